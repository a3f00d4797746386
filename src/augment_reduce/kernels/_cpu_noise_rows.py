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
from ._cpu_math import row_sum
from ._cpu_noise import A_NUMBER, logistic, logistic_log_cdf, normal, normal_log_cdf, weighted_normal_slopes
from ._cpu_types import OPTIONS, Array
from ._cpu_work import WORK, run, split
from .cache import cached_njit

if TYPE_CHECKING:
    from ..bounds import Nodes

LOG_2_PI = np.log(2.0 * np.pi)
AT_ONCE = 512  # numbers in a block of rows, or one row


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
def log_cdfs(model: int, x: Array, omega: Array, out: Array) -> None:
    """omega log Phi(x)."""
    if model == PROBIT:
        for k in range(x.shape[0]):
            out[k] = omega[k] * normal_log_cdf(x[k])
    else:
        for k in range(x.shape[0]):
            out[k] = omega[k] * logistic_log_cdf(x[k])


@njit(**OPTIONS)
def slopes(model: int, x: Array, omega: Array, first: Array, second: Array) -> None:
    """omega (log Phi)'(x) and omega (log Phi)''(x)."""
    if model == PROBIT:
        weighted_normal_slopes(x, omega, first, second)
        return
    one = x.dtype.type(1)
    for k in range(x.shape[0]):
        hazard = logistic(x[k])
        first[k] = omega[k] * hazard
        second[k] = -omega[k] * hazard * (one - hazard)


@njit(**OPTIONS)
def add_hazards(model: int, x: Array, by: Any, to: Array) -> None:
    """to += by (phi / Phi)(x)."""
    if model == PROBIT:
        for k in range(x.shape[0]):
            to[k] += by * normal(x[k])
    else:
        for k in range(x.shape[0]):
            to[k] += by * logistic(x[k])


# What follows takes a block of short rows side by side: of ten classes the compiler would make no vectors.


@njit(**OPTIONS)
def _spread(omega: Array, lo: int, hi: int, S: int, to: Array) -> None:
    """The weights of rows lo..hi, of which there may be one for all rows, and one for all classes."""
    for row in range(lo, hi):
        of_row = omega[min(row, omega.shape[0] - 1)]
        for k in range(S):
            to[(row - lo) * S + k] = of_row[k if omega.shape[1] > 1 else 0]


@njit(**OPTIONS)
def _block(begin: int, hi: int, S: int, omega: Array, scratch: Array) -> tuple:
    """Rows begin..end, no more than fit: the end, the weights of their pairs, and three more lines of scratch."""
    end = min(hi, begin + scratch.shape[1] // max(1, S))
    n = (end - begin) * S
    _spread(omega, begin, end, S, scratch[0])
    return end, scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n]


@njit(**OPTIONS)
def _from_gaps(gap: Array, eps: Array, lo: int, hi: int, to: Array) -> None:
    """eps - gap of rows lo..hi."""
    S = gap.shape[1]
    for row in range(lo, hi):
        for k in range(S):
            to[(row - lo) * S + k] = eps[row] - gap[row, k]


@cached_njit(**OPTIONS)
def _newton_slopes(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, first: Array, second: Array,
    hazard: Array, scratch: Array,
) -> None:  # fmt: skip
    S, begin = gap.shape[1], lo
    while begin < hi:
        end, of_classes, x, slope, bend = _block(begin, hi, S, omega, scratch)
        to = hazard[begin:end].reshape(-1)
        to[:], first[begin:end], second[begin:end] = 0, 0, 0
        for j in range(weight.shape[0]):
            _from_gaps(gap, eps[:, j], begin, end, x)
            slopes(model, x, of_classes, slope, bend)
            for row in range(begin, end):
                at, those = np.float64(eps[row, j]), slice((row - begin) * S, (row - begin + 1) * S)
                first[row] += weight[j] * (dlog_prob(model, at) + np.float64(row_sum(slope[those])))
                second[row] += weight[j] * (d2log_prob(model, at) + np.float64(row_sum(bend[those])))
            for k in range(to.shape[0]):
                to[k] += weight[j] * slope[k]
        begin = end


@cached_njit(**OPTIONS)
def _bound_grad(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, grad: Array, scratch: Array
) -> None:
    S, begin = gap.shape[1], lo
    while begin < hi:
        end, of_classes, x, _, _ = _block(begin, hi, S, omega, scratch)
        to = grad[begin:end].reshape(-1)
        to[:] = 0
        for j in range(weight.shape[0]):
            _from_gaps(gap, eps[:, j], begin, end, x)
            add_hazards(model, x, weight[j], to)
        for k in range(to.shape[0]):
            to[k] *= -of_classes[k]
        begin = end


@cached_njit(**OPTIONS)
def _bound(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, weight: Array, value: Array, scratch: Array
) -> None:
    S, begin = gap.shape[1], lo
    while begin < hi:
        end, of_classes, x, terms, _ = _block(begin, hi, S, omega, scratch)
        value[begin:end] = 0
        for j in range(weight.shape[0]):
            _from_gaps(gap, eps[:, j], begin, end, x)
            log_cdfs(model, x, of_classes, terms)
            for row in range(begin, end):
                sums = np.float64(row_sum(terms[(row - begin) * S : (row - begin + 1) * S]))
                value[row] += weight[j] * (log_prob(model, np.float64(eps[row, j])) + sums)
        begin = end


@cached_njit(**OPTIONS)
def _log_cdf_sums(
    lo: int, hi: int, model: int, gap: Array, omega: Array, eps: Array, value: Array, scratch: Array
) -> None:
    S, begin = gap.shape[1], lo
    while begin < hi:
        end, of_classes, x, terms, _ = _block(begin, hi, S, omega, scratch)
        _from_gaps(gap, eps, begin, end, x)
        log_cdfs(model, x, of_classes, terms)
        for row in range(begin, end):
            value[row] = row_sum(terms[(row - begin) * S : (row - begin + 1) * S])
        begin = end


def _over_rows(
    kernel: Callable[..., None], noise: Noise, gap: Tensor, log_weight: Tensor, *rest: Tensor, n_nodes: int
) -> None:
    """kernel(lo, hi, model, gap, omega, *rest, scratch) by all cores; `rest` are numbers of the dtype of gap."""
    B, S = gap.shape
    if np.broadcast_shapes(log_weight.shape, gap.shape) != gap.shape or len(rest[0]) != B:
        raise ValueError(
            f"Expected log weights that broadcast to the gaps {tuple(gap.shape)}, and eps for each of the {B} rows, "
            f"found {tuple(log_weight.shape)} and {len(rest[0])}."
        )
    omega = torch.exp(log_weight).to(gap.dtype)
    omega = omega.reshape((1,) * (2 - omega.ndim) + omega.shape).contiguous()
    cuts = split(B, lambda: np.full(B, A_NUMBER * n_nodes * S))
    n = len(cuts) - 1
    size, kind = max(S, AT_ONCE), np.dtype(str(gap.dtype).removeprefix("torch."))
    scratch = WORK.array("rows_of_noise", n * 4 * size, kind).reshape(n, 4, size)
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
