"""Every noise against mpmath, in both tails and both precisions; built-in and brought by a user alike."""

import inspect
import math
import pickle
import sys

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from mpmath import mpf

from augment_reduce.model import noise as noise_module
from augment_reduce.model.noise import NOISES, Gumbel, Logistic, Noise, Normal, resolve_noise
from tests.helpers import ROOT
from tests.helpers.noise_truth import FUNCTIONS, both_signs, normal_hazard, normal_truth, worst
from tests.helpers.user_noises import Laplace, StudentT3

FAILURE_RATE = 1e-6  # chance that a correct sampler fails; with a fixed seed it is always or never

BUILT_IN = [Gumbel(), Normal(), Logistic()]
ALL = [*BUILT_IN, Laplace(), StudentT3()]
built_in = pytest.mark.parametrize("noise", BUILT_IN, ids=lambda noise: noise.name)
every_noise = pytest.mark.parametrize("noise", ALL, ids=lambda noise: noise.name)
every_family = pytest.mark.parametrize("family", [Normal(), Logistic()], ids=lambda noise: noise.name)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


CENTRE = np.concatenate([np.linspace(0.03, 45, 301), np.linspace(45, 800, 152)])
EDGES = [1.6e154, sys.float_info.max]  # at the first z² overflows, but z²/2 does not
WIDE = both_signs(np.concatenate([np.logspace(-300, 300, 301), CENTRE, EDGES]))
MODERATE = both_signs(np.concatenate([np.logspace(-6, 3, 91), np.linspace(0.1, 40, 100)]))


# ---- values and derivatives ------------------------------------------------------------------------------------------


@built_in
@every_function
def test_float64_agrees_with_mpmath_from_end_to_end(noise, function):
    """Both signs, 1e-300 to the largest float: 1e-12 relative where the truth is a normal number, else ±inf or ~0."""
    assert worst(noise, function, WIDE, torch.float64) < 1e-12


@every_function
def test_the_compiled_normal_agrees_with_mpmath_as_well(function):
    """In inference mode, where training and prediction run, Numba takes over: the limits of the two tests beside it."""
    with torch.inference_mode():
        assert worst(Normal(), function, WIDE, torch.float64) < 1e-12
        assert worst(Normal(), function, np.linspace(-5, 3, 801), torch.float32) < 1e-6
        assert worst(Normal(), function, both_signs(np.linspace(0.03, 20, 301)), torch.float32) < 2e-5
        edges = Normal().log_cdf(torch.tensor([math.nan, math.inf, -math.inf])).tolist()
        assert math.isnan(edges[0])
        assert edges[1:] == [0.0, -math.inf]


@built_in
@every_function
def test_float32_agrees_with_mpmath_from_end_to_end(noise, function):
    """z²/2 of the Normal is rounded before it is exponentiated: 87 units of 6e-8 at most, and the like in float64."""
    points = both_signs(np.concatenate([np.logspace(-37, 38, 151), np.linspace(0.03, 20, 301), [1e4]]))
    assert worst(noise, function, points, torch.float32) < 2e-5
    assert worst(noise, function, np.linspace(-5, 3, 801), torch.float32) < 1e-6


@pytest.mark.parametrize("noise", [Laplace(), StudentT3()], ids=lambda noise: noise.name)
@every_function
def test_user_noise_agrees_with_mpmath(noise, function):
    """Derivatives by autograd of the user's two functions."""
    assert worst(noise, function, MODERATE, torch.float64) < 1e-10


@pytest.mark.parametrize("z", [-29.9, -12.0, 0.3, 7.0, 29.9])
def test_truth_of_the_normal_by_an_independent_route(z):
    """The oracle's derivatives, and its continued fraction beyond 30, against mpmath's own ncdf and diff."""
    with mpmath.workdps(60):
        z = mpf(z)
        _, _, _, log_cdf, first, second = normal_truth(z)
        for order, value in enumerate((log_cdf, first, second)):
            assert mpmath.almosteq(value, mpmath.diff(lambda x: mpmath.log(mpmath.ncdf(x)), z, order), 1e-18)
        direct = mpmath.npdf(31) / (mpmath.erfc(31 / mpmath.sqrt(2)) / 2)
        assert mpmath.almosteq(normal_hazard(mpf(31))[1], direct - 31, 1e-40)


@every_noise
def test_density_integrates_to_one_and_to_the_cdf(noise):
    def phi(z):
        return math.exp(noise.log_prob(torch.tensor(z, dtype=torch.float64)).item())

    def mass(low, high):
        return scipy.integrate.quad(phi, low, high, epsabs=1e-13, epsrel=1e-12)[0]

    halves = mass(-math.inf, 0.0), mass(0.0, math.inf)  # in halves, for the kink of the Laplace
    assert sum(halves) == pytest.approx(1.0, abs=1e-11)
    for z, below in ((0.0, halves[0]), (1.5, halves[0] + mass(0.0, 1.5)), (-2.0, mass(-math.inf, -2.0))):
        assert noise.log_cdf(torch.tensor(z, dtype=torch.float64)).exp().item() == pytest.approx(below, rel=1e-10)


@every_noise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_function
def test_never_nan(noise, function, dtype):
    """Built-in noises from -inf to inf, a user's within ±1e3; values, closed derivatives, and gradients by autograd."""
    limit = math.inf if noise in BUILT_IN else 1e3
    ends = torch.tensor([-math.inf, math.inf, -0.0, 0.0, torch.finfo(dtype).tiny, -torch.finfo(dtype).max], dtype=dtype)
    z = torch.cat([torch.tensor(WIDE).to(dtype), ends, torch.linspace(-1e3, 1e3, 2001, dtype=dtype)])
    z = z[z.abs() <= limit]
    assert not getattr(noise, function)(z).isnan().any()
    if not function.startswith("d"):
        assert not autograd(getattr(noise, function), z).isnan().any()


@pytest.mark.parametrize("noise", [Normal(), Logistic()], ids=lambda noise: noise.name)
@every_function
def test_finite_to_ten_thousand_in_float32(noise, function):
    z = torch.linspace(-1e4, 1e4, 40_001)
    assert getattr(noise, function)(z).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_at_infinity(dtype):
    """(at -inf, at +inf) of FUNCTIONS in turn."""
    inf = math.inf
    limits = {
        Gumbel: [(-inf, -inf), (inf, -1), (-inf, 0), (-inf, 0), (inf, 0), (-inf, 0)],
        Normal: [(-inf, -inf), (inf, -inf), (-1, -1), (-inf, 0), (inf, 0), (-1, 0)],
        Logistic: [(-inf, -inf), (1, -1), (0, 0), (-inf, 0), (1, 0), (0, 0)],
    }
    ends = torch.tensor([-inf, inf], dtype=dtype)
    for kind, expected in limits.items():
        for function, pair in zip(FUNCTIONS, expected, strict=True):
            values = getattr(kind(), function)(ends)
            torch.testing.assert_close(values, torch.tensor(pair, dtype=dtype), msg=f"{kind} {function}: {values}")


# ---- autograd --------------------------------------------------------------------------------------------------------


def autograd(function, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z).sum(), z)[0]


@every_noise
@pytest.mark.parametrize("function", ["log_prob", "log_cdf"])
def test_gradcheck(noise, function):
    z = torch.tensor([-30.0, -6.0, -2.5, -0.7, 0.4, 1.3, 2.9, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(noise, function), z, atol=1e-8, rtol=1e-6)
    if noise.d2log_prob(z.detach()).any() or function == "log_cdf":  # else nothing is left to differentiate
        assert torch.autograd.gradgradcheck(getattr(noise, function), z, atol=1e-7, rtol=1e-6)


@built_in
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("function", ["log_prob", "log_cdf"])
def test_autograd_gives_the_closed_forms(noise, function, dtype, rtol):
    """First and second derivative to ±1e4, where the gradient of torch's own log_ndtr is six times too large."""
    z = torch.cat([torch.linspace(-1e4, 1e4, 2001), torch.linspace(-20, 20, 2001)]).to(dtype)
    first, second = getattr(noise, "d" + function), getattr(noise, "d2" + function)
    # The closed forms are tight relatively; plain autograd of e.g. -1 + e^-ε is so only absolutely, hence atol.
    close = {"rtol": rtol, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(autograd(getattr(noise, function), z), first(z), **close)
    if function == "log_cdf" or noise.name != "probit":  # the Normal's dlog_prob is -ε: nothing to be wrong
        torch.testing.assert_close(autograd(first, z), second(z), **close)


@every_noise
def test_base_class_derivatives_equal_the_closed_forms(noise):
    """The defaults that a user's noise gets, applied to every noise, also under no_grad and inference_mode."""
    z = torch.linspace(-8, 8, 100, dtype=torch.float64)
    for function in ("dlog_prob", "d2log_prob", "dlog_cdf", "d2log_cdf"):
        expected = getattr(noise, function)(z)
        torch.testing.assert_close(getattr(Noise, function)(noise, z), expected, rtol=1e-11, atol=1e-14)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                inside = getattr(Noise, function)(noise, z * 1.0)
            torch.testing.assert_close(inside, expected, rtol=1e-11, atol=1e-14)
            assert not inside.requires_grad


def test_default_derivatives_stay_in_the_graph():
    """d/dz of dlog_cdf(3z) is 3 d2log_cdf(3z), with the user's noise deep inside a graph."""
    z = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(StudentT3().dlog_cdf(3.0 * z).sum(), z)
    torch.testing.assert_close(grad, 3.0 * StudentT3().d2log_cdf(3.0 * z.detach()))


def test_third_derivative_of_the_normal_is_refused():
    z = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="third"):
        Normal().d2log_cdf(z).sum().backward()


# ---- shapes, draws, names --------------------------------------------------------------------------------------------


@every_noise
@every_function
def test_any_shape_and_layout(noise, function):
    """Elementwise, whatever the strides, and the same in blocks as in one piece."""
    f = getattr(noise, function)
    z = torch.linspace(-9, 9, 6 * (noise_module.BLOCK // 4)).reshape(6, -1)
    assert z.numel() > noise_module.BLOCK
    columns = torch.stack([f(column.contiguous()) for column in z.T[:50]])
    for whole in (f(z).T, f(z.T), f(z[:, None, :].expand(6, 2, -1))[:, 1].T):
        torch.testing.assert_close(whole[:50], columns, rtol=1e-6, atol=1e-30)
    for shape in ((), (0,), (2, 0, 3)):
        assert f(torch.zeros(shape)).shape == shape


@built_in
def test_vmap(noise):
    z = torch.linspace(-9, 9, 30).reshape(5, 6)
    for function in FUNCTIONS:
        f = getattr(noise, function)
        torch.testing.assert_close(torch.vmap(f, in_dims=1)(z), f(z.T))


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_distribution(family, dtype):
    """Chi-square over 40 equal bins of the middle and, apart, both far tails (about 30 draws expected in each)."""
    size = 500_000
    draws = family.rsample((size // 100, 100), generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert draws.dtype == dtype
    assert draws.shape == (size // 100, 100)
    standard = scipy.stats.norm if family.name == "probit" else scipy.stats.logistic
    quantiles = np.concatenate([[0, 6e-5], np.linspace(6e-5, 1 - 6e-5, 41)[1:], [1]])
    counts = np.histogram(draws.double().numpy().ravel(), bins=standard.ppf(quantiles))[0]
    assert scipy.stats.chisquare(counts, size * np.diff(quantiles)).pvalue > FAILURE_RATE


@every_family
def test_draws_are_reproducible(family):
    first, second, other = (family.rsample((7,), generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_extreme_uniforms_give_honest_draws(monkeypatch):
    """The smallest and largest of them: no infinity, and tails of one length, in float32 too."""
    ends = torch.tensor([[0.0, 2.0**-53, 1.0 - 2.0**-53]], dtype=torch.float64)
    monkeypatch.setattr(noise_module, "many_uniforms", lambda B, S, generator: ends.clone())
    expected = torch.tensor([-54.0, -53.0, 53.0]) * math.log(2.0)
    torch.testing.assert_close(Logistic().rsample((3,), generator=None), expected)
    expected = scipy.stats.norm.isf([2.0**-54, 2.0**-53, 2.0**-53]) * [-1, -1, 1]
    torch.testing.assert_close(Normal().rsample((3,), generator=None), torch.tensor(expected, dtype=torch.float32))


@every_family
def test_entropy(family):
    z = torch.linspace(-60, 60, 12_001, dtype=torch.float64)
    log_phi = family.log_prob(z)
    assert family.entropy == pytest.approx(-(log_phi.exp() * log_phi).sum().item() * 0.01, rel=1e-10)


def test_families_of_q():
    """The paper's: Gaussian for the probit, logistic for the logistic model; Gaussian for anything else."""
    families = {noise.name: type(noise.variational_family()) for noise in ALL}
    assert families.pop("logistic") is Logistic
    assert set(families.values()) == {Normal}


@every_noise
def test_smooth_log_concave_is_claimed_only_where_it_holds(noise):
    z = torch.linspace(-40, 40, 8001, dtype=torch.float64)
    concave = bool((noise.d2log_prob(z) <= 0).all() and (noise.d2log_cdf(z) <= 0).all())
    assert noise.smooth_log_concave == (concave and noise.name != "laplace")  # the Laplace is concave, with a kink


def test_resolve_noise():
    for name, kind in NOISES.items():
        assert type(resolve_noise(name)) is kind
        assert kind.name == name
    mine = Laplace()
    assert resolve_noise(mine) is mine


class LooksLikeNoise:
    def log_prob(self, eps):
        return eps

    def log_cdf(self, eps):
        return eps


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gumbel", "'softmax', 'probit', 'logistic'.*found 'gumbel'"),
        (None, "found None"),
        (Normal, r"pass an instance: Normal\(\)"),
        (LooksLikeNoise(), "subclass augment_reduce.model.noise.Noise"),
        (["softmax"], r"found \['softmax'\]"),
    ],
)
def test_resolve_noise_refuses(model, message):
    with pytest.raises(ValueError, match=message):
        resolve_noise(model)


@every_noise
def test_noise_is_a_plain_value(noise):
    """An estimator keeps it as a parameter: it must print and pickle."""
    assert repr(noise) == f"{type(noise).__name__}()"
    assert type(pickle.loads(pickle.dumps(noise))) is type(noise)


def test_incomplete_noise_cannot_be_made():
    class NoCdf(Noise):
        def log_prob(self, eps):
            return -eps

    with pytest.raises(TypeError, match="log_cdf"):
        NoCdf()


@pytest.mark.parametrize("kind", [Laplace, StudentT3])
def test_docs_show_the_tested_code(kind):
    page = (ROOT / "docs" / "noise.md").read_text(encoding="utf-8")
    assert inspect.getsource(kind) in page


@pytest.mark.parametrize("noise", [Gumbel(), Normal(), Logistic()], ids=lambda n: n.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_derivatives_at_once_are_the_two(noise, dtype):
    eps = torch.cat(
        [torch.linspace(-1e4, 1e4, 2001), torch.linspace(-9, 9, 2001), torch.tensor([-torch.inf, torch.inf])]
    )
    eps = eps.to(dtype)
    first, second = noise.dlog_cdf_and_derivative(eps)
    finite = torch.isfinite(eps)
    torch.testing.assert_close(first[finite], noise.dlog_cdf(eps)[finite])
    torch.testing.assert_close(second, noise.d2log_cdf(eps))
