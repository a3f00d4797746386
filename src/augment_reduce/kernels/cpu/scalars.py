"""Noises as scalar functions that Numba's loops take sixteen at a time: log phi, log Phi and two derivatives of each.

`model.noise` has them in torch, their oracle. Each works in the precision of its argument and returns one number: of a
pair, the compiler makes no vectors. `noise_loops` generates all loops from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..constants import LOG_SQRT_2PI, TAIL_CENTRE, tail_gap_powers
from .lanes import multiply_add
from .math import _exp32, _exp64, _log32, _log64, even_and_odd, exp, log1p
from .types import OPTIONS


class Scalars(NamedTuple):
    """A noise for compiled code: functions of one number, compiled by `numba.njit`.

    `log_prob` is log phi, `log_cdf` log Phi; each with its first and second derivative.
    """

    log_prob: Callable[[float], float]
    dlog_prob: Callable[[float], float]
    d2log_prob: Callable[[float], float]
    log_cdf: Callable[[float], float]
    dlog_cdf: Callable[[float], float]
    d2log_cdf: Callable[[float], float]


def _normal_of(number: type, exponential: Callable, logarithm: Callable) -> tuple[Callable, ...]:
    """x -> log Phi, x -> (log Phi)', x -> (log Phi)'' of the Normal, by the table in `model.noise.Normal`.

    The two sides of zero are ordered, so that clamping infinity between them chooses, as in `noise._by_sign`.
    """
    powers = [number(c) for c in tail_gap_powers(number is np.float64)]  # of t^n, ..., t^0
    even, odd = even_and_odd(powers)
    centre, centre2, one, minus_half = number(TAIL_CENTRE), number(2.0 * TAIL_CENTRE), number(1.0), number(-0.5)
    log_norm, zero, far, infinity = number(LOG_SQRT_2PI), number(0.0), number(1e18), number(np.inf)

    def tail_gap(a: Any) -> Any:
        w = one / (a + centre)
        t = one - centre2 * w
        square, total, of_odd = t * t, zero, zero
        for power in even:
            total = multiply_add(total, square, power)
        for power in odd:
            of_odd = multiply_add(of_odd, square, power)
        return multiply_add(of_odd, t, total) * w

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

    log_cdf, hazard, bend = (njit(inline="always", **OPTIONS)(f) for f in (log_cdf, hazard, bend))
    return log_cdf, hazard, bend


_NORMAL = {types.float32: _normal_of(np.float32, _exp32, _log32), types.float64: _normal_of(np.float64, _exp64, _log64)}


def _normal_function(which: int) -> Callable:
    """The function in the precision of its argument."""

    def function(x: Any) -> Any:  # what runs where compilation is switched off
        return _NORMAL[types.float64][which](float(x))

    @overload(function, inline="always")
    def typed(x: Any) -> Any:
        compiled = _NORMAL[x][which]

        def implementation(x: Any) -> Any:
            return compiled(x)

        return implementation

    return function


normal_log_cdf, normal_hazard, normal_bend = (_normal_function(which) for which in range(3))


@njit(**OPTIONS)
def _normal_log_prob(x: Any) -> Any:
    return type(x)(-0.5) * x * x - type(x)(LOG_SQRT_2PI)


@njit(**OPTIONS)
def _normal_dlog_prob(x: Any) -> Any:
    return -x


@njit(**OPTIONS)
def _normal_d2log_prob(x: Any) -> Any:
    return type(x)(-1.0)


@njit(**OPTIONS)
def logistic_hazard(x: Any) -> Any:
    """(log Phi)' = 1 / (1 + e^x)."""
    return type(x)(1) / (type(x)(1) + exp(x))


@njit(inline="always", **OPTIONS)
def logistic_log_cdf(x: Any) -> Any:
    """log Phi = min(x, 0) - log(1 + e^-|x|)."""
    return min(x, type(x)(0)) - log1p(exp(-abs(x)))


@njit(**OPTIONS)
def _logistic_bend(x: Any) -> Any:
    hazard = logistic_hazard(x)
    return -hazard * (type(x)(1) - hazard)


@njit(**OPTIONS)
def _logistic_log_prob(x: Any) -> Any:
    return logistic_log_cdf(x) + logistic_log_cdf(-x)


@njit(**OPTIONS)
def _logistic_dlog_prob(x: Any) -> Any:
    """-tanh(x / 2)."""
    return type(x)(2) * logistic_hazard(x) - type(x)(1)


@njit(**OPTIONS)
def _logistic_d2log_prob(x: Any) -> Any:
    return type(x)(2) * _logistic_bend(x)


@njit(**OPTIONS)
def _gumbel_log_prob(x: Any) -> Any:
    return -x - exp(-x)


@njit(**OPTIONS)
def _gumbel_dlog_prob(x: Any) -> Any:
    return exp(-x) - type(x)(1)


@njit(**OPTIONS)
def _gumbel_hazard(x: Any) -> Any:
    return exp(-x)


@njit(**OPTIONS)
def _minus_gumbel_hazard(x: Any) -> Any:
    """log Phi, (log Phi)'' and (log phi)''."""
    return -exp(-x)


BUILT_IN = {
    "normal": Scalars(
        _normal_log_prob, _normal_dlog_prob, _normal_d2log_prob, normal_log_cdf, normal_hazard, normal_bend
    ),
    "logistic": Scalars(
        _logistic_log_prob, _logistic_dlog_prob, _logistic_d2log_prob, logistic_log_cdf, logistic_hazard,
        _logistic_bend,
    ),
    "gumbel": Scalars(
        _gumbel_log_prob, _gumbel_dlog_prob, _minus_gumbel_hazard, _minus_gumbel_hazard, _gumbel_hazard,
        _minus_gumbel_hazard,
    ),
}  # fmt: skip
