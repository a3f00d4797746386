"""The E step on one half of the classes and the M step on the other: unbiased, a bound, and nothing kept of a row."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse

from augment_reduce import AugmentReduceClassifier, CrossFitted, Grid
from augment_reduce.config.validation import memory_bytes
from augment_reduce.kernels import reference
from augment_reduce.local.base import Clock
from augment_reduce.model.bounds import (
    exact_softmax_grad,
    noise_bound,
    noise_bound_grad,
    softmax_bound,
    softmax_bound_grad,
)
from augment_reduce.model.gaussian import fit_gaussian, gaussian_nodes
from augment_reduce.model.noise import resolve_noise
from augment_reduce.model.quadrature import log_likelihood
from augment_reduce.sampling import AllClasses, HeadAndTail, Sampled
from augment_reduce.sampling.base import joined
from tests.helpers.enumerate_draws import COUNTS, HALVING, K, Script, every_halving, one_row

MODELS = ("softmax", "probit", "logistic")
LABEL = 2


def scores(row):
    """psi (1, K) of the row, the label's, and the gaps, the label's masked."""
    x = row.X.dense(row.rows, torch.float64)
    psi = x @ row.parameters.weight.T + row.parameters.bias
    psi_y = psi.gather(1, row.labels[:, None])[:, 0]
    return psi, psi_y, (psi - psi_y[:, None]).scatter(1, row.labels[:, None], -torch.inf)


def by_class(sampled, log_weight, label):
    """(K,) sum of e^log_weight over the places where a class stands, the label's masked."""
    classes = sampled.columns(1)[0]
    weight = log_weight.expand(1, len(classes))[0].exp()
    weight = weight if sampled.mask is None else weight.masked_fill(sampled.mask[0], 0.0)
    return torch.zeros(K, dtype=torch.float64).index_add_(0, classes, weight)


@pytest.mark.parametrize("name", HALVING)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("label", [0, LABEL, K - 1])
def test_each_half_stands_for_the_rest_and_so_does_the_sample_given_it(name, size, label, monkeypatch):
    """Summed over every draw; and, for each outcome of one half, over every draw that has it."""
    expected = torch.ones(K, dtype=torch.float64)
    expected[label] = 0.0
    total, mean, stands, given, chance = 0.0, 0.0, [0.0, 0.0], {}, {}
    for probability, sampled in every_halving(name, label, Script(monkeypatch), size):
        total += probability
        mean = mean + probability * by_class(sampled, sampled.log_weight, label)
        for i, half in enumerate(sampled.halves):
            own = by_class(sampled, half.stands, label)
            stands[i] = stands[i] + probability * own
            which = (i, *own.mul(1e9).round().tolist())
            given[which] = given.get(which, 0.0) + probability * by_class(sampled, half.given, label)
            chance[which] = chance.get(which, 0.0) + probability
    assert total == pytest.approx(1.0, abs=1e-12)
    for found in (mean, *stands, *(given[which] / chance[which] for which in given)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def full_sum(noise, gap, log_eta_or_q):
    """Bound and gradient (1, K) over all classes at this q."""
    none = gap.new_zeros(())
    if noise.name == "softmax":
        return softmax_bound(gap, none, log_eta_or_q), softmax_bound_grad(gap, none, log_eta_or_q)
    return noise_bound(noise, gap, none, log_eta_or_q), noise_bound_grad(noise, gap, none, log_eta_or_q)


def gaps_of(sampled, gap):
    """(1, S) of the columns, -inf where masked."""
    drawn = gap[:, sampled.columns(1)[0]]
    return drawn if sampled.mask is None else drawn.masked_fill(sampled.mask, -math.inf)


def q_of(noise, gap, sampled, half, step):
    """The best q for one half, from the definition."""
    drawn = gaps_of(sampled, gap)
    log_weight = half.stands.expand(1, drawn.shape[1])
    if noise.name == "softmax":
        return torch.log(1.0 + (log_weight + drawn).exp().sum(1))
    mine = log_weight[0] > -math.inf
    moments = fit_gaussian(noise, drawn[:, mine], log_weight[:, mine], n_nodes=step.n_nodes, n_moves=step.n_moves)
    return gaussian_nodes(*moments, step.n_nodes)


@pytest.mark.parametrize("name", HALVING)
@pytest.mark.parametrize("model", MODELS)
def test_gradient_and_bound_are_those_of_all_classes_on_average_over_every_draw(name, model, monkeypatch):
    noise, step, size = resolve_noise(model), CrossFitted(floor=None), 3
    row = one_row(LABEL)
    psi, psi_y, gap = scores(row)
    found, found_bound, expected, expected_bound = 0.0, 0.0, 0.0, 0.0
    for probability, sampled in every_halving(name, LABEL, Script(monkeypatch), size):
        drawn = gaps_of(sampled, gap)
        bound, grad, _ = step.both_steps(
            row, psi_y, {}, noise, drawn, sampled, Clock(1, 1), torch.Generator(), want_bound=True
        )
        spread = torch.zeros(1, K, dtype=torch.float64).index_add_(1, sampled.columns(1)[0], grad)
        found, found_bound = found + probability * spread, found_bound + probability * bound
        for half in sampled.halves:
            one_bound, one_grad = full_sum(noise, gap, q_of(noise, gap, sampled, half, step))
            expected = expected + 0.5 * probability * one_grad
            expected_bound = expected_bound + 0.5 * probability * one_bound
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found_bound, expected_bound, rtol=1e-9, atol=1e-9)
    assert (found_bound < log_likelihood(noise, psi, row.labels)).all()


@pytest.mark.parametrize("name", HALVING)
@pytest.mark.parametrize("model", MODELS)
def test_the_bound_that_is_shown_stays_below_the_likelihood_for_every_draw(name, model, monkeypatch):
    noise, step, row = resolve_noise(model), CrossFitted(), one_row(LABEL)
    psi, psi_y, gap = scores(row)
    exact = log_likelihood(noise, psi, row.labels)
    for _, sampled in every_halving(name, LABEL, Script(monkeypatch), 2):
        assert (step.bound_on_all(row, psi_y, {}, noise, gap, sampled) <= exact + 1e-9).all()


def halves_of_all(row):
    sampler = AllClasses().bind(COUNTS.numpy(), reference.draw_without_replacement)
    return sampler.draw_halves(row, K, generator=torch.Generator())


def test_with_all_classes_it_is_the_exact_gradient():
    row = one_row(LABEL)
    psi, psi_y, gap = scores(row)
    sampled, noise = halves_of_all(row), resolve_noise("softmax")
    arguments = (row, psi_y, {}, noise, gap, sampled, Clock(1, 1), torch.Generator())
    bound, grad, hits = CrossFitted().both_steps(*arguments, want_bound=True)
    torch.testing.assert_close(grad, exact_softmax_grad(gap))
    torch.testing.assert_close(bound, log_likelihood(noise, psi, row.labels))
    assert hits == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_class_that_one_half_lacks_does_not_outweigh_all_else(model):
    """Half B holds a class that beats the label by 12, and A does not."""
    noise, row = resolve_noise(model), one_row(LABEL)
    sampler = HeadAndTail(power=0.0, uniform_share=1.0).bind(np.ones(40), reference.draw_without_replacement)
    sampled = sampler.draw_halves(row, 10, generator=torch.Generator().manual_seed(0))
    gap = torch.full((1, len(sampled.classes)), -2.0, dtype=torch.float64).masked_fill(sampled.mask, -torch.inf)
    gap[0, -1] = 12.0
    psi_y = torch.zeros(1, dtype=torch.float64)
    for floor, expected in ((1.0, 1), (None, 0)):
        step = CrossFitted(floor=floor)
        _, grad, hits = step.both_steps(row, psi_y, {}, noise, gap, sampled, Clock(1, 1), torch.Generator(), False)
        assert hits == expected
        pull = -float(grad.sum())
        if floor is None:
            assert pull > {"softmax": 1e4, "probit": 15.0, "logistic": 3.5}[model]
        else:
            assert pull < {"softmax": 2.0 * math.e, "probit": 8.0, "logistic": 3.0}[model]


def blobs(n=400, n_classes=60, n_features=6, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, n_classes, n)
    return 1.5 * rng.normal(size=(n_classes, n_features))[y] + rng.normal(size=(n, n_features)), y


@pytest.mark.parametrize("sampling", HALVING)
def test_stopped_and_resumed_it_ends_where_it_would_have_ended(sampling, tmp_path):
    X, y = blobs(200, 12)
    X = sparse.csr_matrix(np.where(X > 1.0, X, 0.0))
    settings = {"local_step": "cross-fitted", "class_sampling": sampling, "n_sampled_classes": 6, "random_state": 1}
    straight = AugmentReduceClassifier(max_iter=40, **settings).fit(X, y)
    clf = AugmentReduceClassifier(max_iter=25, warm_start=True, **settings).fit(X, y)
    clf.save(tmp_path / "model.safetensors")
    clf = AugmentReduceClassifier.load(tmp_path / "model.safetensors").set_params(max_iter=15).fit(X, y)
    np.testing.assert_array_equal(clf.coef_, straight.coef_)


def test_nothing_is_kept_for_a_row():
    from augment_reduce.config.defaults import Shape, resolve

    noise = resolve_noise("probit")
    chosen = resolve(AugmentReduceClassifier().get_params(), noise, Shape(10**9, 10, 10**5, 10**10), torch.float32)
    assert isinstance(chosen.local, Grid)
    assert not chosen.local.remembers
    assert memory_bytes(chosen, Shape(10**9, 10, 10**5, 10**10), early_stopping=False)["per-row state"] == 0
    X, y = blobs(100, 30)
    stream = AugmentReduceClassifier(n_sampled_classes=8, random_state=0)
    for begin in range(0, 100, 20):
        stream.partial_fit(X[begin : begin + 20], y[begin : begin + 20], classes=np.arange(30))
    assert np.isfinite(stream.log_likelihood(X, y))


@pytest.mark.parametrize(("name", "size"), [("uniform", 11), ("uniform-shared", 12), ("head-tail-shared", 12)])
def test_where_nothing_is_left_to_chance_the_fit_is_the_exact_one(name, size):
    X, y = blobs(200, 12)
    settings = {"random_state": 0, "max_epochs": 5, "batch_size": 50}
    exact = AugmentReduceClassifier(method="exact", **settings).fit(X, y)
    clf = AugmentReduceClassifier(class_sampling=name, n_sampled_classes=size, **settings).fit(X, y)
    np.testing.assert_allclose(clf.coef_, exact.coef_, rtol=1e-8, atol=1e-10)
    assert clf.history_["bound_gap"][-1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("floor", [1.0, None])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("most", [90.0, 120.0, 3e4])
def test_scores_out_of_all_proportion_give_numbers(model, floor, most):
    row, noise = one_row(LABEL), resolve_noise(model)
    sampler = HeadAndTail(power=0.0, uniform_share=1.0).bind(np.ones(40), reference.draw_without_replacement)
    sampled = sampler.draw_halves(row, 10, generator=torch.Generator().manual_seed(0))
    gap = torch.full((1, len(sampled.classes)), -3.0).masked_fill(sampled.mask, -torch.inf)
    gap[0, -1] = most
    sampled = sampled._replace(halves=tuple(type(h)(h.stands.float(), h.given.float()) for h in sampled.halves))
    step = CrossFitted(floor=floor)
    arguments = (row, torch.zeros(1), {}, noise, gap, sampled, Clock(1, 1), torch.Generator())
    bound, grad, _ = step.both_steps(*arguments, want_bound=True)
    assert torch.isfinite(bound).all()
    assert torch.isfinite(grad).all()
    assert (grad <= 0).all()


def test_a_mask_of_one_half_is_not_lost():
    mine = Sampled(torch.tensor([1, 2]), torch.zeros(()), torch.tensor([[True, False]]), distinct=True)
    other = Sampled(torch.tensor([3]), torch.zeros(()), None, distinct=True)
    assert joined(mine, other).mask.tolist() == [[True, False, False]]
    assert joined(other, mine).mask.tolist() == [[False, True, False]]


def test_a_floor_below_zero_would_turn_the_gradient_round():
    with pytest.raises(ValueError, match="floor"):
        CrossFitted(floor=-1.0)


def test_one_class_has_no_halves():
    X, y = blobs(50, 5)
    with pytest.raises(ValueError, match=r"at least 2 sampled classes.*\|S\| is 1"):
        AugmentReduceClassifier(local_step="cross-fitted", n_sampled_classes=1).fit(X, y)
