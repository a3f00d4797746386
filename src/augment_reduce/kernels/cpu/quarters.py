"""Gradients summed by quarters of the rows, where weights or classes are few, and the steps that follow from them.

Each quarter is summed in the order of its rows, and quarters are added in pairs, (0 + 1) + (2 + 3), so the sums are the
same whoever makes which. Products and sums round as plain torch does (no fused multiply-add).

What is known of a quarter, or of several, is one line of numbers, which threads can send each other: gradients of all
weights and of all biases, how often each class was met, how many quarters have a score that is not finite; the biases'
shares of a prior, zero without one, and with one the weights'. `line_of` says where each begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from .dense import before_a_line, sum_features
from .lanes import LANES
from .rules import Steps
from .types import OPTIONS, Array, Rule

PARTS = 4  # quarters: as many as threads may share


def line_of(K: int, D: int, with_prior: bool) -> tuple[int, ...]:
    """(K, D, and where these begin: biases, classes met, quarters not finite, shares of biases, of weights; how many
    numbers have to be added up, and how many there are in all). D is 0 where no row has features."""
    sizes = (K * D, K, K if D else 0, 1, K, K * D if with_prior else 0)
    ends = np.cumsum([-(-size // LANES) * LANES for size in sizes]).tolist()
    return K, D, *ends[:5], ends[5] if with_prior else ends[3], ends[5]


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

    A few features at a time, of all rows and classes: a class's sums stay in registers, and each row comes but once
    from the second cache, where scoring left it. Sending for later rows meanwhile won nothing (docs/benchmarks.md).
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
def sum_quarter(
    lo: int, hi: int, classes: Array, x: Array, at: Array, grad: Array, share: Array, line: tuple, to: Array
) -> None:
    """Add rows lo..hi, which are a quarter, to a line."""
    K, D, biases, met, _, shares, weight_shares = line[:7]
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


@njit(**OPTIONS)
def add_line(to: Array, more: Array, n: int) -> None:
    """Add the first n numbers, leaving zeros."""
    for i in range(n):
        to[i] = to[i] + more[i]
        more[i] = 0


@njit(**OPTIONS)
def add_quarters(lines: Array, n: int) -> Array:
    """All of one, two or four quarters in the first of these lines, of which n numbers count; zeros in the others."""
    to = lines[0]
    if lines.shape[0] == 2:
        add_line(to, lines[1], n)
    if lines.shape[0] == 4:
        a, b, c = lines[1], lines[2], lines[3]
        for i in range(n):
            to[i] = (to[i] + a[i]) + (b[i] + c[i])
            a[i] = b[i] = c[i] = 0
    return to


def push_quarters(steps: Steps) -> Callable[..., None]:
    step_row, step_biases = steps.row, steps.biases

    @njit(**OPTIONS)
    def step_line(total: Array, line: tuple, arrays: tuple, rule_: tuple, with_shares: bool) -> None:
        """The steps of all classes that were met, and of all biases; clears the line."""
        K, D, biases, met, _, shares, weight_shares = line[:7]
        rule, size = Rule(*rule_), D if with_shares else 0
        for k in range(K if D > 0 else 0):
            if total[met + k] > 0:
                total[met + k] = 0
                c = total[weight_shares + k * size : weight_shares + (k + 1) * size]
                step_row(rule, arrays, k, total[k * D : (k + 1) * D], c)
        step_biases(0, K, total[biases : biases + K], total[shares : shares + K], arrays, rule_)

    def push_quarters(
        pairs: Array, x: Array, at: Array, grad: Array, share: Array, arrays: tuple, rule: tuple, line: tuple,
        lines: Array,
    ) -> None:  # fmt: skip
        """All pairs, from dense rows x[at], where a gradient of size K x D is small; where x has no columns there are
        only biases, and at least as many pairs as classes. `lines` are zero before and after."""
        B = pairs.shape[0]
        for part in range(PARTS):
            lo, hi = B * part // PARTS, B * (part + 1) // PARTS
            sum_quarter(lo, hi, pairs, x, at, grad, share, line, lines[part])
        step_line(add_quarters(lines, line[7]), line, arrays, rule, share.shape[0] > 0)

    return push_quarters
