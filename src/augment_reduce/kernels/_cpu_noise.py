"""log Phi and phi / Phi of the built-in noises, one pass over an array; `noise` has them in torch, their oracle.

Twenty small torch operations for the Normal take longer than all else in a small step; this is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from ..noise import LOG_SQRT_2PI, TAIL_CENTRE, _tail_gap_coefficients
from ._cpu_math import _exp32, _exp64, _log32, _log64, _named, exp, log
from ._cpu_types import OPTIONS, Array
from ._cpu_work import run, split
from .cache import cached_njit

BLOCK = 4096  # numbers that go to one thread
A_NUMBER = 2  # multiply-adds that take as long as one of them, or so


def _normal_of(number: type, exponential: Callable, logarithm: Callable) -> tuple[Callable, ...]:
    """x -> (log Phi)', x -> (log Phi)'' and x -> log Phi, by the table in `noise.Normal`; the first two of many x at
    once, times weights.

    Each returns one number: of a pair, the compiler makes no vectors. The two sides of zero are ordered, so that
    clamping infinity between them chooses, as in `noise._by_sign`.
    """
    kind = torch.float32 if number is np.float32 else torch.float64
    powers = [number(float(c)) for c in _tail_gap_coefficients(kind, torch.device("cpu"))]  # of t^n, ..., t^0
    even, odd = (
        tuple(powers[::-1][::2][::-1]),
        tuple(powers[::-1][1::2][::-1]),
    )  # 25 in one chain are no longer unrolled
    centre, centre2, one, minus_half = number(TAIL_CENTRE), number(2.0 * TAIL_CENTRE), number(1.0), number(-0.5)
    log_norm, zero, far, infinity = number(LOG_SQRT_2PI), number(0.0), number(1e18), number(np.inf)

    def tail_gap(a: Any) -> Any:
        w = one / (a + centre)
        t = one - centre2 * w
        square, total, of_odd = t * t, zero, zero
        for power in even:
            total = total * square + power
        for power in odd:
            of_odd = of_odd * square + power
        return (total + of_odd * t) * w

    delta = njit(inline="always", **OPTIONS)(tail_gap)

    def hazard(x: Any) -> Any:
        a = min(abs(x), far) if x == x else x
        gap = delta(a)
        phi = exponential(minus_half * a * a - log_norm)
        r = phi / (one - phi / (a + gap))
        return max(r, min(abs(x) + gap, infinity if x < zero else -infinity))

    def bend(x: Any) -> Any:
        a = min(abs(x), far) if x == x else x
        gap = delta(a)
        phi = exponential(minus_half * a * a - log_norm)
        r = phi / (one - phi / (a + gap))
        return max(-(a + gap) * gap, min(-r * (a + r), -infinity if x < zero else infinity))

    def log_cdf(x: Any) -> Any:
        a = min(abs(x), far) if x == x else x
        rho, log_phi = a + delta(a), minus_half * abs(x) * abs(x) - log_norm
        below, tail = x < zero, exponential(log_phi) / rho
        left = one - tail
        value = logarithm(rho if below else left)  # one logarithm for both sides
        upper = value * (tail / (one - left)) if left < one else -tail  # log(1 - tail), what 1 - tail lost made up for
        return log_phi - value if below else upper if x == x else x

    def weighted_slopes(many: Array, weight: Array, first: Array, second: Array) -> None:
        for k in range(many.shape[0]):
            x = many[k]
            a = min(abs(x), far) if x == x else x
            tail = delta(a)
            phi = exponential(minus_half * a * a - log_norm)
            r = phi / (one - phi / (a + tail))
            hazard = a + tail if x < zero else r
            first[k] = weight[k] * hazard
            second[k] = -weight[k] * hazard * (tail if x < zero else a + r)

    hazard, bend, log_cdf = (njit(inline="always", **OPTIONS)(f) for f in (hazard, bend, log_cdf))
    return hazard, bend, log_cdf, njit(**OPTIONS)(_named(weighted_slopes, number))


_NORMAL = {types.float32: _normal_of(np.float32, _exp32, _log32), types.float64: _normal_of(np.float64, _exp64, _log64)}


def _normal_function(name: str, which: int) -> Callable:
    """A function for compiled code alone, by the type of its argument."""

    def function(x: Any) -> Any:
        raise TypeError(f"{name} is for compiled code.")

    @overload(function, inline="always")
    def typed(x: Any) -> Any:
        compiled = _NORMAL[x][which]

        def implementation(x: Any) -> Any:
            return compiled(x)

        return implementation

    return function


normal = _normal_function("(log Phi)' of the Normal", 0)
normal_bend = _normal_function("(log Phi)'' of the Normal", 1)
normal_log_cdf = _normal_function("log Phi of the Normal", 2)


def weighted_normal_slopes(x: Array, weight: Array, first: Array, second: Array) -> None:
    """weight times (log Phi)' and (log Phi)'' of the Normal at x: they share all that takes time."""
    raise TypeError("For compiled code.")


@overload(weighted_normal_slopes)
def _weighted_normal_slopes(x: Any, weight: Any, first: Any, second: Any) -> Any:
    compiled = _NORMAL[x.dtype][3]

    def implementation(x: Any, weight: Any, first: Any, second: Any) -> Any:
        compiled(x, weight, first, second)

    return implementation


@njit(**OPTIONS)
def logistic(x: Any) -> Any:
    """(log Phi)' of the logistic at x: 1 / (1 + e^x)."""
    return type(x)(1) / (type(x)(1) + exp(x))


@njit(**OPTIONS)
def logistic_log_cdf(x: Any) -> Any:
    """log Phi of the logistic at x: -log(1 + e^-x), what 1 + e^-|x| loses made up for."""
    one, zero = type(x)(1), type(x)(0)
    tail = exp(-abs(x))
    left = one + tail
    return min(x, zero) - (log(left) * (tail / (left - one)) if left > one else tail)


@cached_njit(**OPTIONS)
def normal_log_cdfs(lo: int, hi: int, x: Array, out: Array) -> None:
    for i in range(lo, hi):
        out[i] = normal_log_cdf(x[i])


@cached_njit(**OPTIONS)
def normal_hazard(lo: int, hi: int, x: Array, out: Array) -> None:
    for i in range(lo, hi):
        out[i] = normal(x[i])


@cached_njit(**OPTIONS)
def normal_slopes(lo: int, hi: int, x: Array, out: Array, out2: Array) -> None:
    for i in range(lo, hi):
        out[i] = normal(x[i])
    for i in range(lo, hi):
        out2[i] = normal_bend(x[i])


def _of_each(kernel: Callable[..., None], eps: Tensor, n_results: int) -> tuple[Tensor, ...]:
    """Fresh tensors of the shape of `eps`, by all cores."""
    results = tuple(torch.empty(eps.shape, dtype=eps.dtype) for _ in range(n_results))
    n_blocks = -(-eps.numel() // BLOCK)
    ends = [min(eps.numel(), BLOCK * cut) for cut in split(n_blocks, lambda: np.full(n_blocks, A_NUMBER * BLOCK))]
    run(kernel, ends, tuple(each.contiguous().view(-1).numpy() for each in (eps, *results)), [()] * (len(ends) - 1))
    return results


def log_cdf(eps: Tensor) -> Tensor:
    """log Phi of the Normal."""
    return _of_each(normal_log_cdfs, eps, 1)[0]


def dlog_cdf(eps: Tensor) -> Tensor:
    """phi / Phi of the Normal."""
    return _of_each(normal_hazard, eps, 1)[0]


def dlog_cdf_and_derivative(eps: Tensor) -> tuple[Tensor, Tensor]:
    """phi / Phi of the Normal and its derivative."""
    first, second = _of_each(normal_slopes, eps, 2)
    return first, second
