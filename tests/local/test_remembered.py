"""The E step arrives: at eta* for the softmax, at the best Gaussian for the others, and survives what rows bring."""

import math

import pytest
import torch

from augment_reduce.local.base import Clock, StepSize
from augment_reduce.local.remembered import NaturalGradient, Newton, Reparameterised, distinct_gap
from augment_reduce.model.bounds import Exponentials, log_eta_tilde, noise_bound
from augment_reduce.model.gaussian import fit_gaussian, gaussian_nodes, newton_move
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from augment_reduce.sampling import Sampled
from tests.helpers import rng
from tests.helpers.user_noises import Laplace

ZERO = torch.zeros((), dtype=torch.float64)
ROWS = torch.arange(4)


def gaps(n_rows=4, n_others=9, scale=2.0):
    return scale * torch.randn(n_rows, n_others, dtype=torch.float64, generator=rng(0))


def test_natural_gradient_is_the_weighted_mean_of_the_paper():
    """eta <- (1 - alpha) eta + alpha eta~, in logs, by the row's own visits."""
    local = NaturalGradient(StepSize(1.0, 0.9, "visits"))
    state = local.init_state(4, torch.float64)
    gap = gaps()
    expected = torch.full((4,), 2.0, dtype=torch.float64)
    for visit in range(5):
        alpha = (1 + visit) ** -0.9
        expected = (1 - alpha) * expected + alpha * (1 + torch.exp(gap + visit).sum(1))
        local.update(state, ROWS, Gumbel(), gap + visit, ZERO, Clock(1, 1), rng(0))
    torch.testing.assert_close(state["log_eta"], expected.log(), rtol=1e-12, atol=1e-12)
    assert state["visits"].tolist() == [5] * 4


@pytest.mark.parametrize(("counts", "expected"), [("epoch", 4.0), ("iteration", 8.0)])
def test_step_size_by_epoch_or_iteration(counts, expected):
    alpha = StepSize(0.5, 0.9, counts).at(torch.zeros(2), Clock(iteration=7, epoch=3), torch.float64)
    assert alpha.tolist() == [0.5 * expected**-0.9] * 2


def test_natural_gradient_survives_large_gaps_in_float32():
    local = NaturalGradient()
    state = local.init_state(1, torch.float32)
    row = torch.tensor([0])
    local.start(state, row, Gumbel(), torch.tensor([[500.0]]), torch.zeros(()))
    local.update(state, row, Gumbel(), torch.tensor([[-500.0]]), torch.zeros(()), Clock(1, 1), rng(0))
    assert state["log_eta"][0].item() == pytest.approx(500.0 + math.log(1 - 2**-0.6), rel=1e-6)


def test_floor_is_a_certain_lower_bound_less_one_and_is_counted():
    gap = torch.tensor([[1.0, 2.0, 2.0], [50.0, 0.0, 50.0]], dtype=torch.float64)
    sampled = Sampled(torch.tensor([[3, 4, 4], [1, 2, 1]]), torch.tensor(2.0), None, distinct=False)
    seen_once = distinct_gap(gap, sampled)
    assert seen_once.tolist() == [[1.0, 2.0, -math.inf], [50.0, 0.0, -math.inf]]
    found = Exponentials(gap, sampled.log_weight)
    log_eta, hits = NaturalGradient().floored(torch.tensor([5.0, 5.0], dtype=torch.float64), gap, sampled, found)
    assert hits == 1
    assert log_eta[0] == 5.0
    assert log_eta[1].item() == pytest.approx(math.log(1 + math.exp(50) + 1) - 1)
    assert NaturalGradient(floor=False).floored(torch.tensor([5.0, 5.0]), gap, sampled, found)[1] == 0


def test_floor_by_the_short_way_is_the_floor():
    """Distinct classes of one weight: the floor comes from the exponentials at hand; the same number."""
    gap, weight = gaps(), torch.tensor(1.7, dtype=torch.float64)
    low = torch.full((4,), -5.0, dtype=torch.float64)
    sampled = Sampled(torch.arange(9).expand(4, 9), weight, None, distinct=True)
    short, _ = NaturalGradient().floored(low, gap, sampled, Exponentials(gap, weight))
    long, _ = NaturalGradient().floored(low, gap, sampled._replace(distinct=False), Exponentials(gap, weight))
    torch.testing.assert_close(short, long, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(short, torch.log(1 + gap.exp().sum(1)) - 1, rtol=1e-12, atol=1e-12)


def brute_force(noise, gap):
    """The best Gaussian by a general optimiser on the bound itself, 60 nodes."""
    mu = gap.amax(1).clamp(min=0.0).requires_grad_()
    log_precision = torch.zeros(len(gap), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [mu, log_precision], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def loss():
        optimiser.zero_grad()
        value = -noise_bound(noise, gap, ZERO, gaussian_nodes(mu, log_precision.exp(), 60)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    return noise_bound(noise, gap, ZERO, gaussian_nodes(mu, log_precision.exp(), 60)).detach()


@pytest.mark.parametrize("noise", [Normal(), Logistic(), Gumbel()], ids=lambda n: n.name)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_newton_finds_the_best_gaussian(noise, scale):
    gap = gaps(scale=scale)
    mu, precision = fit_gaussian(noise, gap, ZERO, n_nodes=40, n_moves=200)
    found = noise_bound(noise, gap, ZERO, gaussian_nodes(mu, precision, 60))
    torch.testing.assert_close(found, brute_force(noise, gap), rtol=0, atol=1e-6)


@pytest.mark.parametrize("noise", [Normal(), Logistic()], ids=lambda n: n.name)
def test_five_nodes_lose_little_against_the_brute_force_optimum(noise):
    gap = gaps()
    mu, precision = fit_gaussian(noise, gap, ZERO, n_nodes=5, n_moves=200)
    found = noise_bound(noise, gap, ZERO, gaussian_nodes(mu, precision, 60))
    assert ((brute_force(noise, gap) - found) < 2e-3).all()


def test_persistent_newton_from_samples_approaches_the_full_optimum():
    """Visits with 3 of 9 classes each, weight 3: the average of many noisy moves lands near the full-sum optimum."""
    gap, noise, local = gaps(), Normal(), Newton(StepSize(1.0, 0.9, "visits"))
    state = local.init_state(4, torch.float64)
    generator = rng(1)
    log_weight = torch.tensor(math.log(3.0), dtype=torch.float64)
    for visit in range(2000):
        picks = torch.rand(4, 9, generator=generator).argsort(1)[:, :3]
        if visit == 0:
            local.start(state, ROWS, noise, gap.gather(1, picks), log_weight)
        else:
            local.update(state, ROWS, noise, gap.gather(1, picks), log_weight, Clock(1, 1), generator)
    found = local.full_bound(state, ROWS, noise, gap)
    assert ((brute_force(noise, gap) - found) < 5e-3).all()


def test_a_second_move_comes_closer_where_the_scores_have_moved():
    """q is the best for the scores of the last visit; since then every gap moved by about a half."""
    noise, gap = Logistic(), gaps(200, 60)
    since = gap + 0.5 * torch.randn(gap.shape, dtype=gap.dtype, generator=rng(3)) + 0.5
    best = fit_gaussian(noise, since, ZERO, n_moves=100)
    best_bound, rows, lost = noise_bound(noise, since, ZERO, gaussian_nodes(*best, 40)), torch.arange(200), []
    for n_moves in (1, 2):
        local = Newton(StepSize(0.7, 0.0, "visits"), uses_updated=True, n_moves=n_moves)
        state = local.init_state(200, torch.float64)
        state["mu"], state["precision"] = fit_gaussian(noise, gap, ZERO, n_moves=100)
        local.update(state, rows, noise, since, ZERO, Clock(1, 1), rng(0))
        assert state["visits"].tolist() == [1] * 200
        lost.append(float((best_bound - local.full_bound(state, rows, noise, since)).mean()))
    assert 0.0 < lost[1] < 0.6 * lost[0]


def test_newton_move_is_unbiased_in_what_it_averages():
    """With alpha fixed the new precision, averaged over every subset of classes, is that of the full sum."""
    import itertools

    gap = gaps(1, 5)
    mu, precision, alpha = torch.zeros(1), torch.ones(1), torch.full((1,), 0.3)
    args = (mu.double(), precision.double(), alpha.double(), 7)
    full = newton_move(Normal(), gap, ZERO, *args)[1]
    log_weight = torch.tensor(math.log(5 / 2), dtype=torch.float64)
    subsets = list(itertools.combinations(range(5), 2))
    mean = sum(newton_move(Normal(), gap[:, list(s)], log_weight, *args)[1] for s in subsets) / len(subsets)
    torch.testing.assert_close(mean, full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", [Normal(), Logistic()], ids=lambda n: n.name)
def test_reparameterised_gradient_is_the_derivative_of_the_bound_at_that_draw(noise):
    """Eq. (9), entropy included: one update of size alpha equals alpha times autograd's gradient at the same draw."""
    alpha = 1e-3
    local = Reparameterised(StepSize(alpha, 0.0, "visits"))
    state = local.init_state(4, torch.float64)
    state["mu"] += torch.tensor([0.3, -1.0, 2.0, 0.1])
    state["gamma"] += torch.tensor([0.2, -0.5, 0.9, 0.0])
    mu, gamma = state["mu"].clone().requires_grad_(), state["gamma"].clone().requires_grad_()
    gap = gaps()
    family = noise.variational_family()
    u = family.rsample((4,), generator=rng(3), dtype=torch.float64)
    sigma = torch.nn.functional.softplus(gamma)
    eps = mu + sigma * u
    value = noise.log_prob(eps) + noise.log_cdf(eps[:, None] - gap).sum(1) + torch.log(sigma) + family.entropy
    grad_mu, grad_gamma = torch.autograd.grad(value.sum(), [mu, gamma])
    local.update(state, ROWS, noise, gap, ZERO, Clock(1, 1), rng(3))
    torch.testing.assert_close((state["mu"] - mu) / alpha, grad_mu, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close((state["gamma"] - gamma) / alpha, grad_gamma, rtol=1e-9, atol=1e-10)


def test_without_entropy_gradient_the_scale_follows_the_authors_code():
    with_entropy, without = Reparameterised(), Reparameterised(entropy_gradient=False)
    states = [local.init_state(4, torch.float64) for local in (with_entropy, without)]
    for local, state in zip((with_entropy, without), states, strict=True):
        local.update(state, ROWS, Normal(), gaps(), ZERO, Clock(1, 1), rng(0))
    alpha, slope = 0.05, -math.expm1(-1.0)
    torch.testing.assert_close(states[0]["mu"], states[1]["mu"])
    torch.testing.assert_close(states[0]["gamma"] - states[1]["gamma"], torch.full((4,), alpha * slope).double())


@pytest.mark.parametrize("noise", [Normal(), Logistic(), Laplace()], ids=lambda n: type(n).__name__)
def test_extreme_gaps_do_not_break_newton(noise):
    gap = torch.tensor([[1e3, -1e3], [1e3, 1e3], [-1e3, -1e3]], dtype=torch.float64)
    mu, precision = fit_gaussian(noise, gap, torch.tensor(3.0, dtype=torch.float64))
    assert torch.isfinite(mu).all()
    assert (precision > 0).all()


def test_masked_pairs_do_not_matter():
    gap = gaps()
    masked = torch.cat([gap, torch.full((4, 1), -math.inf, dtype=torch.float64)], 1)
    for noise in (Normal(), Logistic()):
        torch.testing.assert_close(fit_gaussian(noise, masked, ZERO), fit_gaussian(noise, gap, ZERO))
    torch.testing.assert_close(log_eta_tilde(masked, ZERO), log_eta_tilde(gap, ZERO))


@pytest.mark.parametrize("noise", [Normal(), Logistic()], ids=lambda noise: noise.name)
@pytest.mark.parametrize("n_rivals", [9, 10**3, 10**6])
def test_a_first_fit_arrives_whatever_the_number_of_rivals(noise, n_rivals):
    """One sampled class that stands for all: twelve moves end where two hundred do."""
    gap, log_weight = torch.zeros(1, 1, dtype=torch.float64), torch.tensor(math.log(n_rivals), dtype=torch.float64)
    mu, precision = fit_gaussian(noise, gap, log_weight)
    best_mu, best_precision = fit_gaussian(noise, gap, log_weight, n_moves=200)
    torch.testing.assert_close(mu, best_mu, atol=3e-3, rtol=0.0)
    torch.testing.assert_close(precision, best_precision, atol=0.0, rtol=1e-2)
    assert best_mu > (1.4 if n_rivals == 9 else 3.0)
