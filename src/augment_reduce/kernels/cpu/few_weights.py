"""Gradients of all weights summed before any is moved, where weights or classes are few: no sorting of pairs.

Sums run over the rows in order, some rows at a time, and round as plain torch does (no fused multiply-add). They are
one line of numbers: gradients of all weights and of all biases, and how often each class was met; the biases' shares of
a prior, zero without one, and with one the weights'. `line_of` says where each begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numba import njit

from .dense import before_a_line, sum_features
from .lanes import LANES
from .rules import Steps
from .types import OPTIONS, Array, Rule

ROWS_AT_ONCE = 128  # a few features of so many rows stay in the first cache, all features of them in the second


def line_of(K: int, D: int, with_prior: bool) -> tuple[int, ...]:
    """(K, D, and where these begin: biases, classes met, shares of biases, of weights; and how many numbers there
    are). D is 0 where no row has features."""
    sizes = (K * D, K, K if D else 0, K, K * D if with_prior else 0)
    ends = itertools.accumulate(-(-size // LANES) * LANES for size in sizes)
    return K, D, *ends


@njit(**OPTIONS)
def in_groups(classes: Array, K: int, start: Array, order: Array) -> None:
    """order = the pairs, class by class as they came; those of class k begin at start[k]."""
    start[:] = 0
    for p in range(classes.shape[0]):
        start[classes[p] + 2] += 1
    for k in range(2, K + 2):
        start[k] += start[k - 1]
    for p in range(classes.shape[0]):
        k = classes[p] + 1
        order[start[k]] = p
        start[k] += 1


@njit(**OPTIONS)
def _sum_weights(lo: int, hi: int, classes: Array, x: Array, at: Array, grad: Array, share: Array, to: tuple) -> None:
    """Add what rows lo..hi pull at each class's weights to g, and their shares of the prior to c.

    A few features at a time, of these rows and all classes: a class's sums stay in registers meanwhile.
    """
    (g, c, K), D, C, P = to, x.shape[1], classes.shape[1], (hi - lo) * classes.shape[1]
    own, a, flat = classes[lo:hi].reshape(-1), grad[lo:hi].reshape(-1), x.reshape(-1)
    start, order = np.empty(K + 2, np.int64), np.empty(P, np.int64)
    first, pull = np.empty(P, np.int64), np.empty(P, grad.dtype)
    in_groups(own, K, start, order)
    for p in range(P):
        first[p], pull[p] = at[lo + order[p] // C] * D, a[order[p]]
    before = before_a_line(x)
    sum_features(0, before, D, flat, start[: K + 1], first, pull, g)
    sum_features(before, D, D, flat, start[: K + 1], first, pull, g)
    for k in range(K if share.shape[0] > 0 else 0):
        of_prior = c[k * D : (k + 1) * D]
        for p in range(start[k], start[k + 1]):
            row, more = flat[first[p] : first[p] + D], share[lo * C + order[p]]
            for e in range(D):
                of_prior[e] = of_prior[e] + (more if row[e] != 0 else c.dtype.type(0))


@njit(**OPTIONS)
def add_rows(
    lo: int, hi: int, classes: Array, x: Array, at: Array, grad: Array, share: Array, line: tuple, to: Array
) -> None:
    """Add what rows lo..hi pull to the line."""
    K, D, biases, met, shares, weight_shares, _ = line
    C, g, c = classes.shape[1], to[biases : biases + K], to[shares : shares + K]
    if D > 0:
        of_weights = (to[: K * D], to[weight_shares:], K)
        _sum_weights(lo, hi, classes, x, at, grad, share, of_weights)
    for b in range(lo, hi):
        for i in range(C):
            g[classes[b, i]] += grad[b, i]
    for b in range(lo, hi if share.shape[0] > 0 else lo):
        for i in range(C):
            c[classes[b, i]] += share[b * C + i]
    for b in range(lo, hi if D > 0 else lo):
        for i in range(C):
            to[met + classes[b, i]] += 1


def line_steps(steps: Steps) -> Callable[..., None]:
    """The steps that follow from a line."""
    step_row, step_biases = steps.row, steps.biases

    @njit(**OPTIONS)
    def step_line(total: Array, line: tuple, arrays: tuple, rule_: tuple, with_shares: bool) -> None:
        """The steps of all classes that were met, and of all biases; clears the line."""
        K, D, biases, met, shares, weight_shares, _ = line
        rule, size = Rule(*rule_), D if with_shares else 0
        for k in range(K if D > 0 else 0):
            if total[met + k] > 0:
                total[met + k] = 0
                c = total[weight_shares + k * size : weight_shares + (k + 1) * size]
                step_row(rule, arrays, k, total[k * D : (k + 1) * D], c)
        step_biases(0, K, total[biases : biases + K], total[shares : shares + K], arrays, rule_)

    return step_line


def push_rows(steps: Steps) -> Callable[..., None]:
    step_line = line_steps(steps)

    def push_rows(
        pairs: Array, x: Array, at: Array, grad: Array, share: Array, arrays: tuple, rule: tuple, line: tuple,
        sums: Array,
    ) -> None:  # fmt: skip
        """All pairs, from dense rows x[at], where a gradient of size K x D is small; where x has no columns there are
        only biases, and at least as many pairs as classes. `sums` are zero before and after."""
        B = pairs.shape[0]
        for lo in range(0, B, ROWS_AT_ONCE):
            add_rows(lo, min(lo + ROWS_AT_ONCE, B), pairs, x, at, grad, share, line, sums)
        step_line(sums, line, arrays, rule, share.shape[0] > 0)

    return push_rows
