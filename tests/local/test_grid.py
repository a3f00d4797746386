"""q on a grid: tight for every noise, unbiased given q, and the same number whoever computes it."""

import itertools
import math

import numpy as np
import pytest
import torch

from augment_reduce import AugmentReduceClassifier, Grid
from augment_reduce.local.base import Clock, StepSize
from augment_reduce.local.grid import bound_of_best
from augment_reduce.model import bounds, grid, quadrature
from augment_reduce.model.compiled import compiled
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from augment_reduce.sampling import Half, Sampled
from tests.helpers import rng
from tests.helpers.user_noises import CompiledStudentT3, Laplace, StudentT3

NOISES = [Gumbel(), Normal(), Logistic(), StudentT3(), Laplace()]
FULL = torch.zeros((), dtype=torch.float64)


def gaps(B=30, K=40, scale=2.0, seed=0):
    return scale * torch.randn(B, K, generator=rng(seed), dtype=torch.float64)


def log_likelihood(noise, gap):
    psi = torch.cat([gap.new_zeros(len(gap), 1), gap], dim=1)
    return quadrature.log_likelihood(noise, psi, torch.zeros(len(gap), dtype=torch.int64), closed_form=False)


@pytest.mark.parametrize(("scale", "allowed"), [(0.5, 2e-3), (4.0, 4e-3)])
@pytest.mark.parametrize("noise", NOISES[:3], ids=lambda noise: noise.name)
def test_the_best_grid_is_the_likelihood_to_the_quadratures_error(noise, scale, allowed):
    gap = gaps(scale=scale)
    exact, errors = log_likelihood(noise, gap), []
    for n_nodes in (11, 41):
        q = grid.best_grid(noise, gap, FULL, n_nodes)
        errors.append(float((bounds.noise_bound(noise, gap, FULL, q) - exact).abs().max()))
    assert errors[0] < allowed
    assert errors[1] < 1e-5


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_the_bound_that_is_reported_is_the_likelihood_where_q_is_of_all_classes(noise):
    gap = gaps(scale=3.0)
    gap[torch.arange(30), torch.arange(30)] = -math.inf  # each row's label
    psi = gap.masked_fill(gap == -math.inf, 0.0)
    exact = quadrature.log_likelihood(noise, psi, torch.arange(30), closed_form=False)
    everything = Sampled(torch.arange(40), FULL, gap == -math.inf, distinct=True)
    whole = Half(torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64))
    for step in (Grid(source="cross-fitted"), Grid().resolved(may_halve=False, all_classes=True)):
        found = step.bound_on_all(None, None, {}, noise, gap, everything._replace(halves=(whole, whole)))
        torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_the_bound_of_half_a_sample_is_below_the_likelihood(noise):
    gap = gaps(scale=3.0, seed=1)
    exact = log_likelihood(noise, gap)
    with_label = torch.cat([gap, gap.new_full((len(gap), 1), -math.inf)], dim=1)
    found = bound_of_best(noise, with_label, gap[:, ::4], torch.full((), math.log(4.0), dtype=torch.float64))
    assert (found < exact + 1e-9).all()
    assert (exact - found).max() > 0.01


@pytest.mark.parametrize("noise", [Normal(), StudentT3()], ids=lambda noise: noise.name)
def test_value_and_gradient_are_unbiased_given_q(noise):
    """Averaged over every subset of the other classes: the full sum's, with q held."""
    K, size = 6, 3
    gap, others = gaps(4, K, seed=2), range(K)
    q = grid.best_grid(noise, gaps(4, 5, seed=3), FULL, 9)
    log_weight = torch.full((), math.log(K / size), dtype=torch.float64)
    value, grad, n = torch.zeros(4, dtype=torch.float64), torch.zeros_like(gap), 0
    for subset in itertools.combinations(others, size):
        some = list(subset)
        value += bounds.noise_bound(noise, gap[:, some], log_weight, q)
        grad[:, some] += bounds.noise_bound_grad(noise, gap[:, some], log_weight, q)
        n += 1
    torch.testing.assert_close(value / n, bounds.noise_bound(noise, gap, FULL, q))
    torch.testing.assert_close(grad / n, bounds.noise_bound_grad(noise, gap, FULL, q))


def test_the_gradient_is_the_bounds_derivative():
    gap = gaps(5, 7, seed=4).requires_grad_()
    q = grid.best_grid(Normal(), gap.detach(), FULL, 11)
    (slope,) = torch.autograd.grad(bounds.noise_bound(Normal(), gap, FULL, q).sum(), gap)
    torch.testing.assert_close(bounds.noise_bound_grad(Normal(), gap.detach(), FULL, q), slope)


@pytest.mark.parametrize("noise", [Normal(), Logistic(), CompiledStudentT3()], ids=lambda noise: noise.name)
def test_compiled_and_torch_functions_give_the_same_q(noise):
    gap = gaps(20, 30, scale=3.0, seed=5)
    one, other = (grid.best_grid(each, gap, FULL, 11) for each in (noise, compiled(noise)))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def remembered_step(step, noise, gap, log_weight, state, t=1):
    sampled = Sampled(torch.zeros(gap.shape, dtype=torch.int64), log_weight, None, distinct=True)
    rows = torch.arange(len(gap))
    return step.e_and_m(state, rows, noise, gap, sampled, Clock(t, t), rng(t), want_bound=True)


def test_a_remembered_q_knows_nothing_of_the_classes_it_is_used_with():
    """The gradient at the second visit is a sum over its classes, each as if alone: q came from the first visit."""
    step, noise = Grid(9, "remembered"), Normal()
    first, second = gaps(6, 8, seed=6), gaps(6, 8, seed=7)
    log_weight = torch.full((), math.log(3.0), dtype=torch.float64)
    found = []
    for some in (slice(0, 4), slice(4, 8), slice(0, 8)):
        state = step.init_state(6, torch.float64)
        step.start(state, torch.arange(6), noise, first, log_weight)
        found.append(remembered_step(step, noise, second[:, some], log_weight, state)[1])
    torch.testing.assert_close(torch.cat(found[:2], dim=1), found[2])


def test_a_remembered_q_converges_to_the_best_one():
    step = Grid(21, "remembered", step_size=StepSize(1.0, 0.6, "visits"))
    noise, gap, state = Normal(), gaps(10, 30, seed=8), step.init_state(10, torch.float64)
    step.start(state, torch.arange(10), noise, gap + 1.0, FULL)
    for t in range(1, 80):
        bound = remembered_step(step, noise, gap, FULL, state, t)[0]
    torch.testing.assert_close(bound, log_likelihood(noise, gap), rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("model", ["probit", "logistic", StudentT3()], ids=str)
def test_a_fit_with_all_classes_gives_away_nothing(model):
    generator = np.random.default_rng(0)
    X = generator.standard_normal((120, 5))
    y = (X @ generator.standard_normal((5, 12)) + generator.standard_normal((120, 12))).argmax(1)
    settings = {"max_iter": 30, "batch_size": 40, "prior_variance": 1.0, "random_state": 0, "class_sampling": "all"}
    clf = AugmentReduceClassifier(model, local_step="grid", **settings).fit(X, y)
    gap = clf.history_["bound_gap"]
    assert np.abs(gap[np.isfinite(gap)]).max() < 1e-6
    assert clf.history_["bound"][-1] > clf.history_["bound"][0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"n_nodes": 2}, "n_nodes"), ({"source": "elsewhere"}, "source"), ({"floor": -1.0}, "floor")],
)
def test_bad_settings_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Grid(**settings)
