"""Each bound is what it says: below log p, tight where it should be, and unbiased over every draw of classes."""

import math

import pytest
import torch

from augment_reduce.model import bounds, quadrature
from augment_reduce.model.gaussian import gaussian_nodes
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from tests.helpers import rng
from tests.helpers.enumerate_draws import LOOKING, K, Script, every_draw
from tests.helpers.user_noises import Laplace, StudentT3

NOISES = [Gumbel(), Normal(), Logistic(), Laplace(), StudentT3()]
SAMPLERS = ["uniform", "uniform-shared", "frequency", "frequency-shared", *LOOKING]
ZERO = torch.zeros((), dtype=torch.float64)


def gaps(psi, labels):
    """(B, K) gaps to the label, the label's own -inf."""
    gap = psi - psi.gather(1, labels[:, None])
    return gap.scatter(1, labels[:, None], -math.inf)


def random_case(n_classes=7, rows=200, scale=3.0, seed=0):
    psi = scale * torch.randn(rows, n_classes, dtype=torch.float64, generator=rng(seed))
    labels = torch.randint(n_classes, (rows,), generator=rng(seed + 1))
    return psi, labels, gaps(psi, labels)


def random_q(rows, n_nodes=60, seed=3):
    mu = 4.0 * torch.randn(rows, dtype=torch.float64, generator=rng(seed))
    precision = torch.exp(1.5 * torch.randn(rows, dtype=torch.float64, generator=rng(seed + 1)))
    return gaussian_nodes(mu, precision, n_nodes)


def test_softmax_bound_is_below_and_tight_at_its_optimum():
    psi, labels, gap = random_case()
    exact = torch.log_softmax(psi, 1).gather(1, labels[:, None])[:, 0]
    best = torch.log(1.0 + torch.exp(gap).sum(1))
    torch.testing.assert_close(bounds.softmax_bound(gap, ZERO, best), exact, rtol=1e-12, atol=1e-12)
    for shift in (-2.0, -1e-3, 1e-3, 0.5, 30.0):
        assert (bounds.softmax_bound(gap, ZERO, best + shift) < exact).all()


def test_exact_softmax_is_log_softmax():
    psi, labels, gap = random_case()
    exact = torch.log_softmax(psi, 1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(bounds.exact_softmax(gap), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", NOISES, ids=lambda n: type(n).__name__)
def test_noise_bound_is_below_the_exact_log_likelihood(noise):
    """For random Gaussian q and random scores; a missing entropy or a doubled sum would cross it."""
    psi, labels, gap = random_case(rows=300)
    exact = quadrature.log_likelihood(noise, psi, labels)
    assert (bounds.noise_bound(noise, gap, ZERO, random_q(300)) <= exact + 1e-9).all()


@pytest.mark.parametrize(("noise", "slack"), [(Normal(), 0.15), (Logistic(), 0.25)], ids=["probit", "logistic"])
def test_noise_bound_comes_close_at_the_best_gaussian(noise, slack):
    from augment_reduce.model.gaussian import fit_gaussian

    psi, labels, gap = random_case(rows=300, scale=1.0)
    mu, precision = fit_gaussian(noise, gap, ZERO, n_nodes=20, n_moves=60)
    exact = quadrature.log_likelihood(noise, psi, labels)
    below = exact - bounds.noise_bound(noise, gap, ZERO, gaussian_nodes(mu, precision, 60))
    assert (below >= -1e-9).all()
    assert (below < slack).all()


def test_noise_bound_with_gumbel_and_its_own_q_is_the_softmax_bound():
    """Eq. (7) with q = Gumbel(log eta, 1) must give eq. (8): both by an independent integral."""
    _, _, gap = random_case(rows=20, scale=1.0)
    log_eta = torch.linspace(0.1, 3.0, 20, dtype=torch.float64)
    u = torch.linspace(-6.0, 40.0, 20_001, dtype=torch.float64)
    weight = torch.exp(Gumbel().log_prob(u))
    weight /= weight.sum()
    entropy = torch.full((20,), 1.0 + 0.5772156649015329, dtype=torch.float64)  # a Gumbel's, whatever its location
    q = bounds.Nodes(log_eta[:, None] + u, weight, entropy)
    torch.testing.assert_close(
        bounds.noise_bound(Gumbel(), gap, ZERO, q), bounds.softmax_bound(gap, ZERO, log_eta), rtol=1e-8, atol=1e-8
    )


def test_one_vs_each_is_below_softmax_and_equal_for_two_classes():
    psi, labels, gap = random_case()
    exact = torch.log_softmax(psi, 1).gather(1, labels[:, None])[:, 0]
    assert (bounds.one_vs_each(gap, ZERO) <= exact + 1e-12).all()
    psi, labels, gap = random_case(n_classes=2)
    exact = torch.log_softmax(psi, 1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(bounds.one_vs_each(gap, ZERO), exact)


OBJECTIVES = {
    "softmax": (
        lambda gap, lw, k: bounds.softmax_bound(gap, lw, torch.full_like(gap[:, 0], 0.7)),
        lambda gap, lw, k: bounds.softmax_bound_grad(gap, lw, torch.full_like(gap[:, 0], 0.7)),
    ),
    "one-vs-each": (
        lambda gap, lw, k: bounds.one_vs_each(gap, lw),
        lambda gap, lw, k: bounds.one_vs_each_grad(gap, lw),
    ),
    **{
        type(noise).__name__: (
            lambda gap, lw, k, noise=noise: bounds.noise_bound(noise, gap, lw, random_q(len(gap), 7)),
            lambda gap, lw, k, noise=noise: bounds.noise_bound_grad(noise, gap, lw, random_q(len(gap), 7)),
        )
        for noise in NOISES
    },
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("label", [0, 2, K - 1])
def test_value_and_gradient_are_unbiased_over_every_draw(objective, name, label, monkeypatch):
    """Averaged over every draw with its probability, value and gradient are those of the full sum, given q."""
    value, grad = OBJECTIVES[objective]
    psi = torch.randn(1, K, dtype=torch.float64, generator=rng(5))
    full_gap = gaps(psi, torch.tensor([label]))
    mean_value, mean_grad, total = 0.0, torch.zeros(K, dtype=torch.float64), 0.0
    for probability, sampled in every_draw(name, label, Script(monkeypatch)):
        classes = sampled.columns(1)
        gap = full_gap.gather(1, classes)
        gap = gap if sampled.mask is None else gap.masked_fill(sampled.mask, -torch.inf)
        mean_value += probability * value(gap, sampled.log_weight, K)
        g = grad(gap, sampled.log_weight, K).expand_as(gap)
        mean_grad.index_add_(0, classes[0], probability * g[0])
        total += probability
    assert total == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(mean_value, value(full_gap, ZERO, K), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(mean_grad, grad(full_gap, ZERO, K).expand_as(full_gap)[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("objective", [*OBJECTIVES, "sampled-softmax"])
def test_gradient_is_the_derivative_of_the_value(objective):
    value, grad = OBJECTIVES.get(
        objective,
        (lambda gap, lw, k: bounds.sampled_softmax(gap, lw), lambda gap, lw, k: bounds.sampled_softmax_grad(gap, lw)),
    )
    gap = torch.randn(6, 4, dtype=torch.float64, generator=rng(1)).requires_grad_()
    log_weight = torch.rand(6, 4, dtype=torch.float64, generator=rng(2))
    (expected,) = torch.autograd.grad(value(gap, log_weight, 4).sum(), gap)
    torch.testing.assert_close(grad(gap.detach(), log_weight, 4), expected, rtol=1e-9, atol=1e-11)


def test_sampled_softmax_is_not_a_bound(monkeypatch):
    """Its mean over the draws lies above log p: the bias that the augmented bound does not have."""
    psi = 2.0 * torch.randn(1, K, dtype=torch.float64, generator=rng(5))
    gap = gaps(psi, torch.tensor([1]))
    mean = sum(
        p * float(bounds.sampled_softmax(gap.gather(1, s.classes), s.log_weight))
        for p, s in every_draw("uniform", 1, Script(monkeypatch), size=1)
    )
    assert mean > float(bounds.exact_softmax(gap)) + 1e-3


@pytest.mark.parametrize("noise", [Normal(), Logistic(), Laplace()], ids=lambda n: type(n).__name__)
def test_exact_noise_is_eq_5_with_its_gradient(noise):
    psi, labels, gap = random_case(n_classes=4, rows=3, scale=1.0)
    value, grad = bounds.exact_noise(noise, gap, labels)
    torch.testing.assert_close(value, quadrature.log_likelihood(noise, psi, labels), rtol=1e-9, atol=1e-9)
    step = 1e-5
    for k in range(4):
        moved = gap.clone()
        moved[:, k] += step
        up = bounds.exact_noise(noise, moved, labels)[0]
        moved[:, k] -= 2 * step
        down = bounds.exact_noise(noise, moved, labels)[0]
        slope = torch.where(labels == k, torch.zeros_like(up), (up - down) / (2 * step))
        torch.testing.assert_close(grad[:, k], slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_the_bound_and_its_gradient(dtype, scale):
    """The shared computation of training against the two functions, also where e^gap overflows."""
    gap = scale * torch.randn(50, 6, dtype=dtype, generator=rng(1))
    gap[0, 2] = gap[3] = -math.inf
    log_weight = torch.rand(50, 6, dtype=dtype, generator=rng(2))
    log_eta = bounds.log_eta_tilde(gap, log_weight) + 0.3
    found = bounds.Exponentials(gap, log_weight)
    torch.testing.assert_close(found.log_eta_tilde, bounds.log_eta_tilde(gap, log_weight))
    torch.testing.assert_close(found.softmax_bound(log_eta), bounds.softmax_bound(gap, log_weight, log_eta))
    expected = bounds.softmax_bound_grad(gap, log_weight, log_eta)
    tolerance = (
        {"rtol": 1e-4 * scale / 30 + 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    )
    torch.testing.assert_close(found.softmax_bound_grad(log_eta), expected, **tolerance)


def test_huge_gaps_stay_finite():
    gap = torch.tensor([[1e4, -1e4, 3e3]], dtype=torch.float32)
    log_weight = torch.zeros((), dtype=torch.float32)
    log_eta = bounds.log_eta_tilde(gap, log_weight)
    assert torch.isfinite(bounds.softmax_bound(gap, log_weight, log_eta)).all()
    assert torch.isfinite(bounds.softmax_bound_grad(gap, log_weight, log_eta)).all()
    for noise in (Normal(), Logistic()):
        q = gaussian_nodes(torch.zeros(1), torch.ones(1), 5)
        assert torch.isfinite(bounds.noise_bound(noise, gap, log_weight, q)).all()
        assert torch.isfinite(bounds.noise_bound_grad(noise, gap, log_weight, q)).all()
