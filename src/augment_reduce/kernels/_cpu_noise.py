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


def _normal_of(number: type, exponential: Callable, logarithm: Callable) -> tuple[Callable, Callable]:
    """x -> ((log Phi)', (log Phi)'') and x -> log Phi, by the table in `noise.Normal`."""
    kind = torch.float32 if number is np.float32 else torch.float64
    powers = tuple(number(float(c)) for c in _tail_gap_coefficients(kind, torch.device("cpu")))
    centre, centre2, one, minus_half = number(TAIL_CENTRE), number(2.0 * TAIL_CENTRE), number(1.0), number(-0.5)
    log_norm, zero, far = number(LOG_SQRT_2PI), number(0.0), number(1e18)

    def parts(x: Any) -> tuple:
        """a = |x|, delta(a), log phi(a)."""
        a = min(abs(x), far) if x == x else x
        w = one / (a + centre)
        t, total = one - centre2 * w, zero
        for power in powers:
            total = total * t + power
        return a, total * w, minus_half * a * a - log_norm

    inside = njit(**OPTIONS)(parts)

    def slopes(x: Any) -> tuple:
        a, delta, log_phi = inside(x)
        rho, phi = a + delta, exponential(log_phi)
        r = phi / (one - phi / rho)
        return max(rho, -x) if x < zero else r, -rho * delta if x < zero else -r * (a + r)

    def log_cdf(x: Any) -> Any:
        a, delta, log_phi = inside(x)
        lower = log_phi - logarithm(a + delta)
        return lower if x < zero else logarithm(one - exponential(lower))

    return njit(**OPTIONS)(slopes), njit(**OPTIONS)(log_cdf)


_NORMAL = {types.float32: _normal_of(np.float32, _exp32, _log32), types.float64: _normal_of(np.float64, _exp64, _log64)}


def normal(x: Any) -> Any:
    """(log Phi)' and (log Phi)'' of the Normal at x."""
    raise TypeError("normal() is for compiled code.")


def normal_log_cdf(x: Any) -> Any:
    """log Phi of the Normal at x, to rounding of one."""
    raise TypeError("normal_log_cdf() is for compiled code.")


def _overload(function: Callable, which: int) -> None:
    def typed(x: Any) -> Any:
        compiled = _NORMAL[x][which]

        def implementation(x: Any) -> Any:
            return compiled(x)

        return implementation

    overload(function)(typed)


_overload(normal, 0)
_overload(normal_log_cdf, 1)


@njit(**OPTIONS)
def logistic(x: Any) -> Any:
    """(log Phi)' of the logistic at x: 1 / (1 + e^x)."""
    return type(x)(1) / (type(x)(1) + exp(x))


@njit(cache=True, **OPTIONS)
def normal_hazard(x: Array, out: Array) -> None:
    for i in range(x.shape[0]):
        out[i] = normal(x[i])[0]


@njit(cache=True, **OPTIONS)
def normal_slopes(x: Array, out: Array, out2: Array) -> None:
    for i in range(x.shape[0]):
        out[i], out2[i] = normal(x[i])


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
