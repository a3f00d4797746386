"""q predicted from the features: a valid bound whatever is predicted, unbiased gradients, memory that ignores N."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import Adagrad, AugmentReduceClassifier
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.amortised import Amortised, add_rows, products
from augment_reduce.local.base import Clock
from augment_reduce.model.bounds import exact_softmax
from augment_reduce.model.noise import resolve_noise
from augment_reduce.model.quadrature import log_likelihood
from augment_reduce.sampling import Minibatch, Sampled

N, D, K = 7, 3, 5
MODELS = ("softmax", "probit", "logistic")


def problem(seed=0, scale=1.0):
    """Rows, labels, scores and the minibatch that holds them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D)) * scale
    weight, bias = torch.from_numpy(rng.normal(size=(K, D))), torch.from_numpy(rng.normal(size=K))
    labels = torch.from_numpy(rng.integers(0, K, N))
    minibatch = Minibatch(as_rows(X), np.arange(N), labels, Parameters(weight, bias, [], []), cpu, 0)
    psi = torch.from_numpy(X) @ weight.T + bias
    psi_y = psi.gather(1, labels[:, None])[:, 0]
    gap = (psi - psi_y[:, None]).scatter(1, labels[:, None], -torch.inf)
    return minibatch, psi, psi_y, gap


def any_state(step, noise, minibatch, psi_y, seed, size):
    """Predictions as wrong as they come."""
    state = {}
    step.predict(state, noise, minibatch, psi_y)
    generator = torch.Generator().manual_seed(seed)
    for name in ("offset", "slope", "label_slope"):
        state[name] = state[name] + size * torch.randn(state[name].shape, generator=generator, dtype=torch.float64)
    return state


@pytest.mark.parametrize("size", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("model", MODELS)
def test_the_bound_stays_below_whatever_is_predicted(model, size):
    noise, step = resolve_noise(model), Amortised()
    for seed in range(20):
        minibatch, psi, psi_y, gap = problem(seed)
        state = any_state(step, noise, minibatch, psi_y, seed, size)
        bound = step.bound_on_all(minibatch, psi_y, state, noise, gap)
        assert (bound <= log_likelihood(noise, psi, minibatch.labels) + 1e-9).all()


def test_the_bound_is_tight_where_the_prediction_is_right():
    noise, step = resolve_noise("softmax"), Amortised()
    minibatch, psi, psi_y, gap = problem()
    x = torch.from_numpy(np.column_stack([minibatch.X.values, np.ones(N)]))
    # seven rows and four numbers: make the normalisers linear by choosing four rows
    minibatch = minibatch._replace(rows=minibatch.rows[:4], labels=minibatch.labels[:4])
    solution = torch.linalg.solve(x[:4], torch.logsumexp(psi[:4], 1))
    state = {}
    step.predict(state, noise, minibatch, psi_y[:4])
    state["slope"], state["offset"] = solution[None, :D], solution[D:]
    bound = step.bound_on_all(minibatch, psi_y[:4], state, noise, gap[:4])
    torch.testing.assert_close(bound, exact_softmax(gap[:4]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_unbiased_over_every_sample(model, size):
    """All subsets of the others of a row, each as likely: their mean is the gradient over all of them at the same q."""
    noise, step = resolve_noise(model), Amortised(floor=None)
    minibatch, _, psi_y, gap = problem(3)
    state = any_state(step, noise, minibatch, psi_y, 1, 0.3)

    def gradient(classes, log_weight):
        """(N, K) gradient by the scores' gaps, and the bound, for one set of classes a row."""
        copy = {name: value.clone() for name, value in state.items()}
        sampled = Sampled(classes, torch.tensor(log_weight, dtype=torch.float64), None, True)
        bound, grad, _ = step.both_steps(
            minibatch, psi_y, copy, noise, gap.gather(1, classes), sampled, Clock(1, 1), torch.Generator(), True
        )
        return torch.zeros(N, K, dtype=torch.float64).scatter(1, classes, grad), bound

    others = torch.tensor([[k for k in range(K) if k != y] for y in minibatch.labels.tolist()])
    full, full_bound = gradient(others, 0.0)
    subsets = list(itertools.combinations(range(K - 1), size))
    found = [gradient(others[:, list(subset)], math.log((K - 1) / size)) for subset in subsets]
    torch.testing.assert_close(torch.stack([g for g, _ in found]).mean(0), full)
    torch.testing.assert_close(torch.stack([b for _, b in found]).mean(0), full_bound)


def test_what_is_learned_comes_after_what_is_used():
    """The gradient of a step does not know what its own classes taught: the same state gives the same gradient."""
    noise, step = resolve_noise("softmax"), Amortised()
    minibatch, _, psi_y, gap = problem(5)
    state = any_state(step, noise, minibatch, psi_y, 2, 0.2)
    before = {name: value.clone() for name, value in state.items()}
    everyone = Sampled(torch.arange(K), torch.zeros((), dtype=torch.float64), None, True)
    arguments = (noise, gap, everyone, Clock(1, 1), torch.Generator(), False)
    first = step.both_steps(minibatch, psi_y, state, *arguments)[1]
    assert not torch.equal(state["slope"], before["slope"])
    torch.testing.assert_close(step.both_steps(minibatch, psi_y, before, *arguments)[1], first, rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_the_prediction_finds_its_optimum(model):
    """Weights held, all classes: after many steps the mean residual of every feature is gone."""
    noise, step = resolve_noise(model), Amortised(floor=None)
    minibatch, psi, psi_y, gap = problem(8, scale=0.5)
    state = {}
    everyone = Sampled(torch.arange(K), torch.zeros((), dtype=torch.float64), None, True)
    first = step.bound_on_all(minibatch, psi_y, state, noise, gap).sum()
    for _ in range(600):
        step.both_steps(minibatch, psi_y, state, noise, gap, everyone, Clock(1, 1), torch.Generator(), False)
    last = step.bound_on_all(minibatch, psi_y, state, noise, gap).sum()
    best = log_likelihood(noise, psi, minibatch.labels).sum()
    assert first < last < best
    assert best - last < 0.3 * (best - first)


def test_sparse_rows_are_dense_rows():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(9, 6)) * (rng.random((9, 6)) < 0.4)
    rows, slope = np.array([4, 1, 8]), torch.from_numpy(rng.normal(size=(2, 6)))
    by = torch.from_numpy(rng.normal(size=(2, 3)))
    moved = [slope.clone(), slope.clone()]
    for matrix, each in ((dense, moved[0]), (sp.csr_matrix(dense), moved[1])):
        torch.testing.assert_close(products(as_rows(matrix), rows, slope), slope @ torch.from_numpy(dense[rows]).T)
        add_rows(as_rows(matrix), rows, by, each)
    torch.testing.assert_close(moved[0], moved[1])
    energy = (dense[rows] ** 2).sum()
    torch.testing.assert_close(moved[0], slope + by @ torch.from_numpy(dense[rows]) / energy)


def stream(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 12, n)
    return np.eye(12)[y] + 0.3 * rng.normal(size=(n, 12)), y


def stream_fitter(**settings):
    return AugmentReduceClassifier(
        class_sampling="uniform", n_sampled_classes=4, batch_size=20, random_state=0, **settings
    )


def test_a_stream_keeps_what_it_learned_in_memory_that_ignores_the_rows(tmp_path):
    clf = stream_fitter(local_step="amortised")
    sizes = []
    for part in range(3):
        X, y = stream(200, part)
        clf.partial_fit(X, y, classes=np.arange(12) if part == 0 else None)
        sizes.append({name: value.numel() for name, value in clf._fitted.local.items()})
    numbers = {"start": 1, "offset": 1, "slope": 12, "label_slope": 1, "label_mean": 1, "learned": 1}
    assert sizes[0] == sizes[2] == numbers
    assert int(clf._fitted.local["learned"]) == 30
    clf.save(tmp_path / "model")
    again = AugmentReduceClassifier.load(tmp_path / "model")
    X, y = stream(200, 9)
    np.testing.assert_array_equal(again.partial_fit(X, y).coef_, clf.partial_fit(X, y).coef_)
    assert clf.score(*stream(500, 77)) > 0.8  # one in twelve by chance


def test_a_fit_that_goes_on_is_one_that_never_stopped():
    X, y = stream(200, 1)
    settings = {"local_step": Amortised(), "optimizer": "rowwise-adagrad"}
    whole = stream_fitter(max_iter=20, **settings).fit(X, y)
    half = stream_fitter(max_iter=10, warm_start=True, **settings).fit(X, y).fit(X, y)
    np.testing.assert_array_equal(half.coef_, whole.coef_)


@pytest.mark.parametrize("model", ["softmax", "logistic"])
def test_the_gap_shrinks_while_training(model):
    X, y = stream(400, 2)
    clf = stream_fitter(model=model, max_epochs=60, local_step="amortised").fit(X, y)
    gap = clf.history_["bound_gap"][~np.isnan(clf.history_["bound_gap"])]
    assert 0 < gap[-1] < 0.1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", MODELS)
def test_resumed_through_a_file_to_the_bit(model, dtype, tmp_path):
    X, y = stream(200, 1)
    settings = {"model": model, "local_step": "amortised", "dtype": dtype}
    whole = stream_fitter(max_iter=60, **settings).fit(X, y)
    half = stream_fitter(max_iter=23, warm_start=True, **settings).fit(X, y)
    half.save(tmp_path / "half")
    resumed = AugmentReduceClassifier.load(tmp_path / "half").set_params(max_iter=37).fit(X, y)
    np.testing.assert_array_equal(resumed.coef_, whole.coef_)


@pytest.mark.parametrize(("first", "then"), [("softmax", "logistic"), ("logistic", "softmax"), ("probit", "logistic")])
def test_what_another_model_has_learned_is_not_taken_up(first, then):
    X, y = stream(200, 1)
    clf = stream_fitter(model=first, local_step="amortised").partial_fit(X, y, classes=np.arange(12))
    clf.set_params(model=then).partial_fit(X, y)
    assert int(clf._fitted.local["learned"]) == 10  # of this call alone
    assert len(clf._fitted.local["offset"]) == (1 if then == "softmax" else 2)


def test_a_stream_does_not_use_up_the_rate_of_a_later_fit():
    X, y = stream(400, 3)
    clf = stream_fitter().partial_fit(X, y, classes=np.arange(12))
    clf.partial_fit(X, y)
    assert clf._fitted.stream_steps == 40
    clf.set_params(warm_start=True, max_iter=1).fit(X, y)
    assert clf._fitted.stream_steps == 40
    assert Adagrad(0.4, half_after=10.0).after(40).scalars(41)[0] == 0.4
    assert Adagrad(0.4, half_after=10.0).after(40).scalars(51)[0] == pytest.approx(0.2)
