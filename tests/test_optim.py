"""Each rule against its formula written out by hand; the prior's share is right on average."""

import itertools

import numpy as np
import pytest
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import DenseRows, as_rows
from augment_reduce.optim import OPTIMIZERS, Adagrad, Adam, Prior, RowOptimizer, RowwiseAdagrad, SectionFour

GRADIENTS = [torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)]


def steps(optimizer: RowOptimizer, prior=None, c=None):
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    state = optimizer.init_state(w)
    for t, g in enumerate(GRADIENTS, start=1):
        optimizer.apply(w, g, torch.zeros_like(g) if c is None else c, state, t, prior)
    return w, state


def test_section_four_is_the_papers_rule():
    """s = 0.1 g^2 + 0.9 s, step 0.02 t^-1/2 / (1 + sqrt s); entries without gradient keep s."""
    w, (s,) = steps(SectionFour())
    s1 = 0.1 * 9.0
    first = 1.0 + 0.02 * 3.0 / (1 + s1**0.5)
    s2 = 0.1 * 0.25 + 0.9 * s1
    assert w[0].item() == pytest.approx(first + 0.02 * 2**-0.5 * 0.5 / (1 + s2**0.5), rel=1e-14)
    assert s[0].item() == pytest.approx(s2, rel=1e-14)
    assert s[2].item() == pytest.approx(0.1, rel=1e-14)


def test_section_four_as_the_authors_code_takes_the_first_gradient_whole():
    _, (s,) = steps(SectionFour(first_kappa_one=True))
    assert s[0].item() == pytest.approx(0.1 * 0.25 + 0.9 * 9.0, rel=1e-14)


def test_section_four_on_every_entry_shrinks_what_was_not_touched():
    """The text updates s everywhere at each iteration; lazily that is (1 - kappa)^missed when touched again."""
    optimizer = SectionFour(every_entry=True)
    w, s = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    lazy_w, state = torch.zeros(1, dtype=torch.float64), optimizer.init_state(torch.zeros(1, dtype=torch.float64))
    for t, g in enumerate([2.0, 0.0, 0.0, -1.0, 0.0, 3.0], start=1):
        s = 0.1 * g * g + 0.9 * s
        w = w + 0.02 * t**-0.5 * g / (1 + s.sqrt())
        g_now = torch.tensor([g], dtype=torch.float64)
        optimizer.apply(lazy_w, g_now, torch.zeros_like(g_now), state, t, None)
    torch.testing.assert_close(lazy_w, w, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("t", "decays"), [(1, 0), (1999, 0), (2000, 1), (3999, 1), (4000, 2)])
def test_section_four_decays_every_two_thousand_iterations(t, decays):
    assert SectionFour().scalars(t)[0] == pytest.approx(0.02 * 0.9**decays * t**-0.5, rel=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        SectionFour(first_kappa_one=True), SectionFour(decay_every=3, every_entry=True), Adagrad(), RowwiseAdagrad(),
        Adagrad(half_after=7.0, begin=4), Adam(),
    ],
)  # fmt: skip
def test_numbers_of_many_iterations_are_those_of_each(optimizer):
    """To the last bit: a fit must not depend on how many steps a call takes."""
    turns = np.arange(1, 200)
    at_once = [np.broadcast_to(each, len(turns)).tolist() for each in optimizer.scalars_of(turns)]
    assert list(zip(*at_once, strict=True)) == [optimizer.scalars(t) for t in turns.tolist()]


def test_section_four_multiplies_its_rate_one_decay_at_a_time():
    rate = 0.02
    for _ in range(50):
        rate = 0.9 * rate
    assert SectionFour().scalars(100_000)[0] == rate * np.float64(100_000) ** (-0.5 + 1e-16)


def test_adagrad():
    w, (s,) = steps(Adagrad(learning_rate=0.1))
    assert w[0].item() == pytest.approx(1.0 + 0.1 + 0.1 * 0.5 / (9.25**0.5), rel=1e-9)
    assert s.tolist() == [9.25, 4.0, 1.0]


def test_adagrad_does_not_mind_the_scale_of_the_objective():
    a, b = (torch.zeros(3, dtype=torch.float64) for _ in range(2))
    state_a, state_b = Adagrad().init_state(a), Adagrad().init_state(b)
    for t, g in enumerate(GRADIENTS, start=1):
        Adagrad().apply(a, g, torch.zeros_like(g), state_a, t, None)
        Adagrad().apply(b, 1e6 * g, torch.zeros_like(g), state_b, t, None)
    torch.testing.assert_close(a, b, rtol=1e-8, atol=0)


def test_rowwise_adagrad_keeps_one_number_a_row():
    w = torch.zeros(2, 3, dtype=torch.float64)
    optimizer = RowwiseAdagrad(learning_rate=0.1)
    state = optimizer.init_state(w)
    assert state[0].shape == (2,)
    g = torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    optimizer.apply(w, g, torch.zeros_like(g), state, 1, None)
    assert state[0].tolist() == [5.0, 0.0]  # mean over the two touched entries
    torch.testing.assert_close(w[0], 0.1 * g[0] / 5.0**0.5, rtol=1e-8, atol=0)
    assert w[1].tolist() == [0.0, 0.0, 0.0]


def test_adam_on_touched_entries_is_torch_adam():
    """With gradient everywhere it is torch's own Adam (which minimises)."""
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    twin = w.clone().requires_grad_()
    theirs = torch.optim.Adam([twin], lr=0.01)
    ours, state = Adam(learning_rate=0.01), Adam().init_state(w)
    for t in range(1, 6):
        g = torch.tensor([0.3 * t, -1.0 / t], dtype=torch.float64)
        ours.apply(w, g, torch.zeros_like(g), state, t, None)
        twin.grad = -g
        theirs.step()
    torch.testing.assert_close(w, twin.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_entries_without_gradient_are_not_touched(name):
    optimizer = OPTIMIZERS[name]()
    w = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    state = optimizer.init_state(w)
    optimizer.apply(w, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64), torch.zeros(1, 3).double(), state, 1, None)
    assert w[0, 1:].tolist() == [-2.0, 0.5]
    assert w[0, 0] != 1.0


def test_prior_step_is_the_proximal_one():
    """w <- (w + h g) / (1 + h c / v), h the entry's own step."""
    prior = Prior(variance=0.5, inverse_counts=torch.ones(3), inverse_rows=1.0)
    w = torch.tensor([1.0], dtype=torch.float64)
    Adagrad(0.1).apply(w, torch.tensor([2.0]).double(), torch.tensor([3.0]).double(), Adagrad().init_state(w), 1, prior)
    assert w.item() == pytest.approx((1.0 + 0.1) / (1 + 0.05 * 3.0 / 0.5), rel=1e-9)


def test_a_bias_of_scale_c_is_c_times_the_weight_of_a_feature_of_value_c():
    """Every step, prior included; with the other weights given no gradient, and without eps, which has its own unit."""
    c, N, K, rng = 3.7, 12, 5, np.random.default_rng(0)
    optimizer = Adagrad(0.3, eps=0.0, half_after=2.0, bias_scale=c)
    plain = Adagrad(0.3, eps=0.0, half_after=2.0)
    none, constant = as_rows(np.zeros((N, 1))), as_rows(np.full((N, 1), c))

    def fresh():
        weight, bias = torch.zeros(K, 1).double(), torch.zeros(K).double()
        return Parameters(weight, bias, plain.init_state(weight), plain.init_state(bias))

    as_bias, as_weight = fresh(), fresh()
    counts = np.array([N])
    priors = [Prior.from_counts(0.8, counts, N, torch.float64, of_bias=0.8 * scale**2) for scale in (c, 1.0)]
    for t in range(1, 6):
        rows, classes = rng.choice(N, 4, replace=False), torch.from_numpy(rng.integers(0, K, (4, 2)))
        grad, share = torch.from_numpy(rng.standard_normal((4, 2))), torch.from_numpy(rng.random((4, 2)))
        reference.push_pairs(none, rows, classes, grad, share, as_bias, optimizer, t, priors[0])
        reference.push_pairs(constant, rows, classes, grad, share, as_weight, plain, t, priors[1])
        torch.testing.assert_close(as_bias.bias, c * as_weight.weight[:, 0], rtol=1e-12, atol=0.0)
    assert as_bias.bias.abs().min() > 0.0


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_a_bias_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="bias_scale to be a finite number >= 0"):
        Adagrad(bias_scale=scale)


def test_prior_of_the_authors_code_acts_where_the_data_do():
    prior = Prior(0.5, torch.ones(2), 1.0, touched_only=True)
    w = torch.tensor([1.0, 1.0], dtype=torch.float64)
    SectionFour().apply(
        w, torch.tensor([2.0, 0.0]).double(), torch.zeros(2).double(), SectionFour().init_state(w), 1, prior
    )
    assert w[1] == 1.0
    assert w[0].item() == pytest.approx(1.0, abs=1e-15)  # 2 - 1 / 0.5 = 0: the prior cancels the gradient


def test_the_priors_share_is_one_on_average():
    """E[c_kd] = 1, over every minibatch and every class subset, entry by entry."""
    N, B, K, S = 4, 2, 4, 2
    X = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    y = torch.tensor([0, 2, 1, 0])
    counts = np.count_nonzero(X, axis=0)
    prior = Prior.from_counts(1.0, counts, N, torch.float64, of_bias=1.0)

    class Recorder(RowOptimizer):
        n_states = 0

        def apply(self, w, g, c, state, t, prior):
            w += c

    per_batch = list(itertools.combinations(range(N), B))
    mean_w, mean_b = torch.zeros(K, 3).double(), torch.zeros(K).double()
    for batch in per_batch:
        rows = np.array(batch)
        others = [[k for k in range(K) if k != int(y[n])] for n in batch]
        draws = list(itertools.product(*(itertools.combinations(o, S) for o in others)))
        for draw in draws:
            parameters = Parameters(torch.zeros(K, 3).double(), torch.zeros(K).double())
            classes = torch.tensor([[int(y[n]), *s] for n, s in zip(batch, draw, strict=True)])
            share = torch.tensor([[1.0] + [(K - 1) / S] * S] * B).double() * (N / B)
            grad = torch.zeros_like(share)
            reference.push_pairs(DenseRows(X), rows, classes, grad, share, parameters, Recorder(), 1, prior)
            mean_w += parameters.weight / (len(per_batch) * len(draws))
            mean_b += parameters.bias / (len(per_batch) * len(draws))
    torch.testing.assert_close(mean_w, torch.ones(K, 3).double(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean_b, torch.ones(K).double(), rtol=1e-12, atol=1e-12)


def test_push_sums_before_it_steps():
    """Two pairs of one class in a minibatch are one gradient to the optimiser, not two steps."""
    X = DenseRows(np.array([[1.0], [2.0]]))
    parameters = Parameters(torch.zeros(2, 1).double(), torch.zeros(2).double())
    optimizer = Adagrad(0.1)
    parameters.weight_state = optimizer.init_state(parameters.weight)
    parameters.bias_state = optimizer.init_state(parameters.bias)
    classes, grad = torch.tensor([[0], [0]]), torch.tensor([[1.0], [-3.0]]).double()
    reference.push_pairs(X, np.array([0, 1]), classes, grad, None, parameters, optimizer, 1, None)
    assert parameters.weight_state[0][0, 0].item() == 25.0  # (1*1 - 3*2)^2
    assert parameters.weight[0, 0].item() == pytest.approx(-0.1)
