"""Sums over classes of a noise's log Phi: the compiled ones are those of the torch operations."""

import math

import numba
import pytest
import torch

from augment_reduce.kernels.cpu import work as work_kernels
from augment_reduce.model import bounds, gaussian
from augment_reduce.model.compiled import CompiledNoise, compiled, original
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from tests.helpers.user_noises import CompiledCauchy, CompiledLaplace, CompiledStudentT3, Laplace

NOISES = [Normal(), Logistic(), Gumbel(), CompiledStudentT3(), CompiledLaplace(), CompiledCauchy()]
WEIGHTS = {"one": (), "of classes": (-1,), "of rows": (0, 1), "of pairs": (0, -1)}


def some_rows(B, S, scale, shape, dtype=torch.float64, seed=0):
    """(gap with a masked pair here and there, log weights, mu, precision)."""
    generator = torch.Generator().manual_seed(seed)
    gap = scale * torch.randn(B, S, generator=generator, dtype=torch.float64)
    gap[torch.rand(B, S, generator=generator) < 0.1] = -math.inf
    size = [{0: B, -1: S, 1: 1}[n] for n in shape]
    log_weight = torch.randn(size, generator=generator, dtype=torch.float64)
    mu = torch.randn(B, generator=generator, dtype=torch.float64) + 1.0
    precision = torch.rand(B, generator=generator, dtype=torch.float64) * 3.0 + 0.1
    return tuple(each.to(dtype) for each in (gap, log_weight, mu, precision))


def all_of_them(noise, gap, log_weight, mu, precision, n_nodes=5):
    q = gaussian.gaussian_nodes(mu, precision, n_nodes)
    return [
        *gaussian.newton_slopes(noise, gap, log_weight, mu, precision, n_nodes),
        bounds.noise_bound(noise, gap, log_weight, q), bounds.noise_bound_grad(noise, gap, log_weight, q),
        noise.sum_log_cdf(gap, log_weight, mu[:, None]),
    ]  # fmt: skip


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(("B", "S"), [(1, 1), (7, 1), (33, 61), (0, 4), (3, 0)])
@pytest.mark.parametrize("scale", [0.5, 5.0, 500.0])
def test_compiled_sums_are_those_of_the_torch_operations(noise, shape, B, S, scale, monkeypatch):
    monkeypatch.setattr(work_kernels, "WORTH_A_THREAD", 1)
    numbers = some_rows(B, S, scale, shape)
    for expected, found in zip(all_of_them(noise, *numbers), all_of_them(compiled(noise), *numbers), strict=True):
        torch.testing.assert_close(found.clone(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_in_float32_they_are_as_close_to_the_truth(noise):
    """No further from float64 than three times as far as the torch operations in float32, or 1e-6 of the largest."""
    exact = some_rows(64, 300, 4.0, (-1,))
    rough = tuple(each.float() for each in exact)
    truth = all_of_them(noise, *(each.double() for each in rough))
    for expected, plain, found in zip(
        truth, all_of_them(noise, *rough), all_of_them(compiled(noise), *rough), strict=True
    ):
        assert torch.isfinite(found).all()
        error, allowed = ((each.double() - expected).abs().max() for each in (found, plain))
        assert error <= 3.0 * allowed + 1e-6 * expected.abs().max()


@pytest.mark.parametrize("noise", NOISES[:2], ids=lambda noise: noise.name)
def test_ten_million_equal_rivals_are_not_lost_in_rounding(noise):
    """Each is less than float32 can take away from 1; together they are what decides."""
    gap, log_weight = torch.zeros(1, 1), torch.tensor([math.log(1e7)])
    eps = torch.tensor([[16.0 if noise.name == "logistic" else 5.0]])
    truth = noise.sum_log_cdf(gap.double(), log_weight.double(), eps.double())
    found = compiled(noise).sum_log_cdf(gap, log_weight, eps)
    torch.testing.assert_close(found.double().clone(), truth, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("shape", [(2, 4), (3,), (9,), (1, 5, 4)])
def test_weights_of_another_shape_are_refused(shape):
    numbers = some_rows(5, 4, 1.0, ())
    normal = compiled(Normal())
    with pytest.raises((ValueError, RuntimeError)):
        normal.sum_log_cdf(numbers[0], torch.zeros(shape, dtype=torch.float64), numbers[2][:, None])
    with pytest.raises(ValueError, match="for each of the 5 rows"):
        normal.sum_log_cdf(numbers[0], numbers[1], numbers[2][:1, None])


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba was given one thread")
def test_threads_do_not_change_a_bit(monkeypatch):
    monkeypatch.setattr(work_kernels, "WORTH_A_THREAD", 1)
    numbers = some_rows(37, 50, 2.0, (0, -1), torch.float32)
    before, found = numba.get_num_threads(), []
    try:
        for n in (1, 2):
            numba.set_num_threads(n)
            found.append(all_of_them(compiled(Normal()), *numbers))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_noise_without_scalars_and_what_asks_for_gradients_go_to_torch():
    laplace, normal = Laplace(), compiled(Normal())
    assert compiled(laplace) is laplace
    assert isinstance(normal, CompiledNoise)
    assert compiled(normal) is normal
    assert type(original(normal)) is Normal
    x = torch.tensor([-3.0, 0.5], requires_grad=True)
    (slope,) = torch.autograd.grad(normal.log_cdf(x).sum(), x)
    torch.testing.assert_close(slope, Normal().dlog_cdf(x.detach()))


def wrong(name):
    """A Student t whose scalar function of that name is off by a factor in its left tail."""

    class Wrong(CompiledStudentT3):
        right = CompiledStudentT3.scalars
        scalars = right._replace(**{name: off(getattr(right, name))})

    return Wrong()


def off(function):
    @numba.njit
    def wrong(x):
        return function(x) * (1.001 if x < -30.0 else 1.0)

    return wrong


@pytest.mark.parametrize("name", CompiledStudentT3.scalars._fields)
def test_scalars_that_disagree_with_the_torch_functions_are_refused_with_the_point(name):
    with pytest.raises(ValueError, match=rf"scalars\.{name} of .* at eps = -40 "):
        compiled(wrong(name))
