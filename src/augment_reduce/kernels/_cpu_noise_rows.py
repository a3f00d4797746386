"""Sums over classes of a built-in noise's log Phi and its derivatives, row by row: probit and logistic.

`gaussian` and `bounds` say the same for any noise in torch operations, which are the oracle; those hold one number for
each row, class and node several times over, and these none. All cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..noise import Noise
from ._cpu_local import MODELS, PROBIT
from ._cpu_math import exp, log, row_sum
from ._cpu_noise import A_NUMBER, logistic, normal, normal_log_cdf, weighted_normal_slopes
from ._cpu_types import OPTIONS, Array
from ._cpu_work import WORK, run, split

if TYPE_CHECKING:
    from ..bounds import Nodes

LOG_2_PI = np.log(2.0 * np.pi)


@njit(**OPTIONS)
def _softplus(x: float) -> float:
    return max(x, 0.0) + np.log1p(np.exp(-abs(x)))


@njit(**OPTIONS)
def log_prob(model: int, eps: float) -> float:
    """log phi."""
    return -0.5 * (eps * eps + LOG_2_PI) if model == PROBIT else -_softplus(eps) - _softplus(-eps)


@njit(**OPTIONS)
def dlog_prob(model: int, eps: float) -> float:
    return -eps if model == PROBIT else -np.tanh(0.5 * eps)


@njit(**OPTIONS)
def d2log_prob(model: int, eps: float) -> float:
    return -1.0 if model == PROBIT else -0.5 * (1.0 - np.tanh(0.5 * eps) ** 2)


@njit(**OPTIONS)
def log_cdfs(model: int, eps: Any, gap: Array, omega: Array, out: Array) -> Any:
    """sum_k omega_k log Phi(eps - gap_k)."""
    zero, one = gap.dtype.type(0), gap.dtype.type(1)
    if model == PROBIT:
        for k in range(gap.shape[0]):
            out[k] = omega[k] * normal_log_cdf(eps - gap[k])
    else:
        for k in range(gap.shape[0]):
            x = eps - gap[k]
            out[k] = omega[k] * (min(x, zero) - log(one + exp(-abs(x))))
    return row_sum(out)


@njit(**OPTIONS)
def slopes(model: int, eps: Any, gap: Array, omega: Array, first: Array, second: Array) -> None:
    """omega (log Phi)'(eps - gap) and omega (log Phi)''(eps - gap)."""
    if model == PROBIT:
        weighted_normal_slopes(eps, gap, omega, first, second)
        return
    one = gap.dtype.type(1)
    for k in range(gap.shape[0]):
        hazard = logistic(eps - gap[k])
        first[k] = omega[k] * hazard
        second[k] = -omega[k] * hazard * (one - hazard)


@njit(**OPTIONS)
def add_hazards(model: int, eps: Any, by: Any, gap: Array, to: Array) -> None:
    """to += by (phi / Phi)(eps - gap)."""
    if model == PROBIT:
        for k in range(gap.shape[0]):
            to[k] += by * normal(eps - gap[k])
    else:
        for k in range(gap.shape[0]):
            to[k] += by * logistic(eps - gap[k])


@njit(**OPTIONS)
def _spread(omega: Array, row: int, to: Array) -> None:
    """A row's weights, of which there may be one for all rows, and one for all classes."""
    of_row = omega[min(row, omega.shape[0] - 1)]
    for k in range(to.shape[0]):
        to[k] = of_row[k if omega.shape[1] > 1 else 0]


@njit(cache=True, **OPTIONS)
def _newton_slopes(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, first: Array, second: Array,
    hazard: Array, scratch: Array,
) -> None:  # fmt: skip
    of_classes, slope, bend = scratch[0], scratch[1], scratch[2]
    for row in range(lo, hi):
        _spread(omega, row, of_classes)
        hazard[row] = 0
        total, total2 = 0.0, 0.0
        for j in range(weight.shape[0]):
            slopes(model, eps[row, j], gap[row], of_classes, slope, bend)
            by, at = np.float64(weight[j]), np.float64(eps[row, j])
            total += by * (dlog_prob(model, at) + np.float64(row_sum(slope)))
            total2 += by * (d2log_prob(model, at) + np.float64(row_sum(bend)))
            for k in range(slope.shape[0]):
                hazard[row, k] += weight[j] * slope[k]
        first[row], second[row] = total, total2


@njit(cache=True, **OPTIONS)
def _bound_grad(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, grad: Array, scratch: Array
) -> None:
    for row in range(lo, hi):
        _spread(omega, row, scratch[0])
        grad[row] = 0
        for j in range(weight.shape[0]):
            add_hazards(model, eps[row, j], weight[j], gap[row], grad[row])
        for k in range(grad.shape[1]):
            grad[row, k] *= -scratch[0, k]


@njit(cache=True, **OPTIONS)
def _bound(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, value: Array, scratch: Array
) -> None:
    for row in range(lo, hi):
        _spread(omega, row, scratch[0])
        total = 0.0
        for j in range(weight.shape[0]):
            sums = np.float64(log_cdfs(model, eps[row, j], gap[row], scratch[0], scratch[1]))
            total += np.float64(weight[j]) * (log_prob(model, np.float64(eps[row, j])) + sums)
        value[row] = total


@njit(cache=True, **OPTIONS)
def _log_cdf_sums(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, value: Array, scratch: Array
) -> None:
    for row in range(lo, hi):
        _spread(omega, row, scratch[0])
        value[row] = log_cdfs(model, eps[row], gap[row], scratch[0], scratch[1])


def _over_rows(
    kernel: Callable[..., None], noise: Noise, gap: Tensor, log_weight: Tensor, *rest: Tensor, n_nodes: int
) -> None:
    """kernel(lo, hi, model, gap, omega, *rest, scratch) by all cores; `rest` are numbers of the dtype of gap."""
    B, S = gap.shape
    omega = torch.exp(log_weight).to(gap.dtype)
    omega = omega.reshape((1,) * (2 - omega.ndim) + omega.shape).contiguous()
    cuts = split(B, lambda: np.full(B, A_NUMBER * n_nodes * S))
    n = len(cuts) - 1
    scratch = WORK.array("rows_of_noise", n * 3 * S, np.dtype(str(gap.dtype).removeprefix("torch."))).reshape(n, 3, S)
    arrays = (each.contiguous().numpy() for each in (gap, omega, *rest))
    run(kernel, cuts, (MODELS[noise.name], *arrays), [(each,) for each in scratch])


def newton_slopes(noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> tuple[Tensor, Tensor, Tensor]:
    """`gaussian.newton_slopes`, at the nodes of q."""
    first, second, hazard = gap.new_empty(len(gap)), gap.new_empty(len(gap)), gap.new_empty(gap.shape)
    _over_rows(
        _newton_slopes, noise, gap, log_weight, q.eps, q.weight, first, second, hazard, n_nodes=len(q.weight)
    )  # fmt: skip
    return first, second, hazard


def noise_bound(noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> Tensor:
    """`bounds.noise_bound`."""
    value = gap.new_empty(len(gap))
    _over_rows(_bound, noise, gap, log_weight, q.eps, q.weight, value, n_nodes=len(q.weight))
    return value + q.entropy


def noise_bound_grad(noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> Tensor:
    """`bounds.noise_bound_grad`."""
    grad = gap.new_empty(gap.shape)
    _over_rows(_bound_grad, noise, gap, log_weight, q.eps, q.weight, grad, n_nodes=len(q.weight))
    return grad


def log_cdf_sums(noise: Noise, gap: Tensor, log_weight: Tensor, eps: Tensor) -> Tensor:
    """(B,) sum_k omega_k log Phi(eps - gap_k), eps (B,)."""
    value = gap.new_empty(len(gap))
    _over_rows(_log_cdf_sums, noise, gap, log_weight, eps, value, n_nodes=1)
    return value
