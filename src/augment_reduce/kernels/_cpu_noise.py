"""phi / Phi of the built-in noises, one pass over an array; `noise` says them in torch operations, their oracle.

Twenty small torch operations for the Normal take longer than all else in a small step; this is one.
Compiled into `_cpu_local` too: whoever changes this deletes `__pycache__/*.nbi` beside it.
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
from ._cpu_math import _exp32, _exp64, _log32, _log64, exp
from ._cpu_types import OPTIONS, Array


def _normal_of(number: type, exponential: Callable, logarithm: Callable) -> tuple[Callable, Callable, Callable]:
    """x -> (log Phi)', x -> (log Phi)'' and x -> log Phi, by the table in `noise.Normal`.

    Each returns one number: of a pair, the compiler makes no vectors. The two sides of zero are ordered, so that
    clamping infinity between them chooses, as in `noise._by_sign`.
    """
    kind = torch.float32 if number is np.float32 else torch.float64
    powers = tuple(number(float(c)) for c in _tail_gap_coefficients(kind, torch.device("cpu")))
    centre, centre2, one, minus_half = number(TAIL_CENTRE), number(2.0 * TAIL_CENTRE), number(1.0), number(-0.5)
    log_norm, zero, far, infinity = number(LOG_SQRT_2PI), number(0.0), number(1e18), number(np.inf)

    def tail_gap(a: Any) -> Any:
        w = one / (a + centre)
        t, total = one - centre2 * w, zero
        for power in powers:
            total = total * t + power
        return total * w

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
        lower = minus_half * a * a - log_norm - logarithm(a + delta(a))
        upper = logarithm(one - exponential(lower))
        return max(lower, min(upper, -infinity if x < zero else infinity))

    hazard, bend, log_cdf = (njit(inline="always", **OPTIONS)(f) for f in (hazard, bend, log_cdf))
    return hazard, bend, log_cdf


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


@njit(**OPTIONS)
def logistic(x: Any) -> Any:
    """(log Phi)' of the logistic at x: 1 / (1 + e^x)."""
    return type(x)(1) / (type(x)(1) + exp(x))


@njit(cache=True, **OPTIONS)
def normal_hazard(x: Array, out: Array) -> None:
    for i in range(x.shape[0]):
        out[i] = normal(x[i])


@njit(cache=True, **OPTIONS)
def normal_slopes(x: Array, out: Array, out2: Array) -> None:
    for i in range(x.shape[0]):
        out[i] = normal(x[i])
    for i in range(x.shape[0]):
        out2[i] = normal_bend(x[i])


def dlog_cdf(eps: Tensor) -> Tensor:
    """phi / Phi of the Normal, in a fresh tensor of the shape of `eps`."""
    out = torch.empty(eps.shape, dtype=eps.dtype)
    normal_hazard(eps.contiguous().view(-1).numpy(), out.view(-1).numpy())
    return out


def dlog_cdf_and_derivative(eps: Tensor) -> tuple[Tensor, Tensor]:
    """phi / Phi of the Normal and its derivative."""
    out, out2 = torch.empty(eps.shape, dtype=eps.dtype), torch.empty(eps.shape, dtype=eps.dtype)
    normal_slopes(eps.contiguous().view(-1).numpy(), out.view(-1).numpy(), out2.view(-1).numpy())
    return out, out2
