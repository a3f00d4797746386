"""Draws of the standard Normal and logistic, each a function of a seed and its number alone: whichever thread makes it,
it is the same. `noise` has them in torch, their oracle: the quantile of a uniform number."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.polynomial import chebyshev
from scipy.special import ndtri

from ..cache import cached_njit
from .classes import uniform
from .math import log
from .types import OPTIONS, Array

LEAST = 2.0**-54  # what a uniform number of zero stands for: half the smallest step
MIDDLE, CENTRE, DEGREE = 0.35, 2.0, 16  # |u - 1/2| up to which the first polynomial serves; see below
FIRST = (np.sqrt(-2.0 * np.log(0.5 - MIDDLE)) - CENTRE) / (np.sqrt(-2.0 * np.log(0.5 - MIDDLE)) + CENTRE)
LAST = (np.sqrt(-2.0 * np.log(LEAST)) - CENTRE) / (np.sqrt(-2.0 * np.log(LEAST)) + CENTRE)


def _powers(values: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of the polynomial through these values at Chebyshev's points, the even and the odd ones, highest first: all in
    one chain would no longer be done in vectors."""
    at = chebyshev.chebpts1(len(values))
    powers = chebyshev.cheb2poly(chebyshev.chebfit(at, values, len(values) - 1))
    return tuple(powers[::2][::-1].tolist()), tuple(powers[1::2][::-1].tolist())


def _by_middle(t: Array) -> Array:
    q = np.sqrt(0.5 * (t + 1.0)) * MIDDLE
    return -ndtri(0.5 - q) / q


def _by_tail(t: Array) -> Array:
    place = FIRST + 0.5 * (t + 1.0) * (LAST - FIRST)
    s = CENTRE * (1.0 + place) / (1.0 - place)
    return -ndtri(np.exp(-0.5 * s * s)) / s


MIDDLE_EVEN, MIDDLE_ODD = _powers(_by_middle(chebyshev.chebpts1(DEGREE + 1)))
TAIL_EVEN, TAIL_ODD = _powers(_by_tail(chebyshev.chebpts1(DEGREE + 1)))


@njit(**OPTIONS)
def _normal_quantiles(u: Array, out: Array) -> None:
    """out = x with Phi(x) = u, to 2e-14 of itself.

    x / (u - 1/2) is smooth in (u - 1/2)^2; far out x is nearly s = sqrt(-2 log p) with p the tail's probability, and
    x / s smooth in (s - c) / (s + c), as in `noise._tail_gap`. Loop by loop, so that each is done in vectors.
    """
    far = np.empty(u.shape[0])
    for i in range(u.shape[0]):
        far[i] = np.sqrt(-2.0 * log(max(min(u[i], 1.0 - u[i]), LEAST)))
    for i in range(u.shape[0]):
        s = far[i]
        total, t = 0.0, ((s - CENTRE) / (s + CENTRE) - FIRST) * (2.0 / (LAST - FIRST)) - 1.0
        square, odd = t * t, 0.0
        for power in TAIL_EVEN:
            total = total * square + power
        for power in TAIL_ODD:
            odd = odd * square + power
        far[i] = (total + odd * t) * s
    for i in range(u.shape[0]):
        q = u[i] - 0.5
        total, t = 0.0, q * q * (2.0 / (MIDDLE * MIDDLE)) - 1.0
        square, odd = t * t, 0.0
        for power in MIDDLE_EVEN:
            total = total * square + power
        for power in MIDDLE_ODD:
            odd = odd * square + power
        tail = far[i] if q > 0.0 else -far[i]
        out[i] = (total + odd * t) * q if abs(q) <= MIDDLE else tail


@njit(**OPTIONS)
def _logistic_quantiles(u: Array, out: Array) -> None:
    """out = x with 1 / (1 + e^-x) = u."""
    for i in range(u.shape[0]):
        p = max(u[i], LEAST)
        out[i] = log(p / (1.0 - p))


@cached_njit(**OPTIONS)
def standard_draws(normal: bool, seed: int, first: int, out: Array) -> None:
    """out[i] = draw first + i of this seed, of the Normal or the logistic."""
    u = np.empty(out.shape[0])
    for i in range(u.shape[0]):
        u[i] = uniform(seed, first + i)
    if normal:
        _normal_quantiles(u, out)
    else:
        _logistic_quantiles(u, out)
