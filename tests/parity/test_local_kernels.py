"""The compiled twins of the E steps, and the functions they are made of, make the numbers of the torch operations."""

import numpy as np
import pytest
import torch

from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu.math import exp, log
from augment_reduce.local.base import Clock
from augment_reduce.model.compiled import compiled
from augment_reduce.model.noise import Normal
from augment_reduce.sampling import Sampled
from tests.helpers.compiled_rules import RULES, generator

B, N = 37, 90


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_and_log_are_right_to_three_units_of_the_last_place(dtype):
    from numba import njit

    @njit
    def both(x, out, back):
        for i in range(x.shape[0]):
            out[i] = exp(x[i])
            back[i] = log(out[i])

    tiny, huge = np.log(np.finfo(dtype).tiny), np.log(np.finfo(dtype).max / 2)
    x = np.concatenate([np.linspace(tiny * 0.999, huge * 0.999, 20_001), np.linspace(-1, 1, 2_001)]).astype(dtype)
    out, back = np.empty_like(x), np.empty_like(x)
    both(x, out, back)
    truth, eps = np.exp(x.astype(np.longdouble)), np.finfo(dtype).eps
    assert float(np.max(np.abs(out - truth) / truth)) < 1.5 * eps
    assert float(np.max(np.abs(back - np.log(out.astype(np.longdouble))))) < 3 * eps * np.abs(x).max()
    edges = np.array([-np.inf, np.inf, np.nan, -1e4, 1e4], dtype)
    out, back = np.empty_like(edges), np.empty_like(edges)
    both(edges, out, back)
    np.testing.assert_array_equal(out, np.array([0, np.inf, np.nan, 0, np.inf], dtype))
    assert back[0] == -np.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_of_the_normal_are_those_in_torch(dtype):
    x = torch.cat([torch.linspace(-60, 12, 5001), torch.tensor([0.0, torch.inf, -torch.inf, 1e30, -1e30, torch.nan])])
    x = x.to(dtype)
    for name in ("log_cdf", "dlog_cdf", "d2log_cdf"):
        assert_near(getattr(compiled(Normal()), name)(x), getattr(Normal(), name)(x))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    ulps = 8 * torch.finfo(expected.dtype).eps
    tail = 40 * ulps  # a^2 / 2 is rounded before the exponential
    torch.testing.assert_close(found, expected, rtol=tail, atol=ulps * 1e-30, equal_nan=True)


def sampled_like(S: int, masked: bool, per_row: bool, dtype: torch.dtype) -> tuple[torch.Tensor, Sampled]:
    gap = torch.randn(B, S, generator=generator(3), dtype=dtype) * 3
    if masked:
        gap[::3, 0] = -torch.inf
    shape = (B, 1) if per_row else ()
    log_weight = torch.full(shape, 1.7, dtype=dtype)
    if per_row:
        log_weight += torch.arange(B, dtype=dtype)[:, None] / B
    return gap, Sampled(torch.zeros(B, S, dtype=torch.int64), log_weight, None, distinct=True)


@pytest.mark.parametrize(
    ("masked", "per_row", "S"), [(False, False, 5), (True, True, 4), (True, False, 1), (False, True, 1)]
)
@pytest.mark.parametrize("name", RULES)
def test_e_and_m_in_few_passes_is_that_of_the_torch_operations(name, masked, per_row, S):
    noise, rule = RULES[name]
    gap, sampled = sampled_like(S, masked, per_row, torch.float64)
    rows = torch.randperm(N, generator=generator(4))[:B]
    states = []
    for fast in (False, True):
        state = rule.init_state(N, torch.float64)
        for key in state:
            state[key] += torch.arange(N).to(state[key].dtype) % 3
        step, of = (rule.on(cpu, compiled(noise)), compiled(noise)) if fast else (rule, noise)
        assert fast == (step.kernel is not None)
        bound, grad, hits = step.e_and_m(state, rows, of, gap, sampled, Clock(7, 3), generator(5), want_bound=True)
        states.append({**state, "bound": bound, "grad": grad, "hits": torch.tensor(hits)})
    for key, expected in states[0].items():
        torch.testing.assert_close(states[1][key].clone(), expected, rtol=1e-11, atol=1e-12, msg=f"{name}: {key}")
    assert not torch.equal(states[0]["grad"], torch.zeros_like(gap))
