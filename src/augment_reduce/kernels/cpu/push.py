"""Push score gradients into the touched weights: sum them for one class row, take the optimiser's step, go on.

Sums run over pairs in the order given and round as plain torch does (no fused multiply-add), so that a sum
which cancels is zero here exactly where it is zero in `reference`: an entry counts as touched by its sum.
Where weights or classes are few, see `few_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .dense import before_a_line, sum_features
from .lanes import LANES, add_lanes, prefetch
from .rules import Steps
from .types import INLINE, OPTIONS, Array, Rule

CHUNK = 64  # features transposed at a time
AHEAD = 4  # classes whose rows are sent for before their turn
AT_A_TIME = 64  # pairs of a class whose dense rows are summed before the next: what is known of them stays at hand


@njit(**INLINE)
def _sum_bias(j: int, groups: tuple, csr: tuple, grad: Array, share: Array, bias_g: Array, bias_c: Array) -> int:
    """Gradient and prior share of the bias of class j; returns how many non-zeros its pairs hold."""
    start, order, row, begin, end, nonzeros = groups[1], groups[2], groups[3], csr[0], csr[1], 0
    g = c = grad.dtype.type(0)
    for p in range(start[j], start[j + 1]):
        nonzeros += end[row[p]] - begin[row[p]]
        g += grad[order[p]]
        if share.shape[0] > 0:
            c += share[order[p]]
    bias_g[j], bias_c[j] = g, c
    return nonzeros


@njit(**INLINE)
def _sum_dense(
    j: int, groups: tuple, x: Array, at: Array, grad: Array, share: Array, g: Array, c: Array, few: tuple
) -> None:
    """g = sum of grad x and c = sum of share [x != 0] over the pairs of class j, some at a time."""
    (order, row), D, flat, (span, first, pull) = groups[2:], x.shape[1], x.reshape(-1), few
    begin, end, before = groups[1][j], groups[1][j + 1], before_a_line(x)
    for q in range(begin, end, first.shape[0]):
        span[1] = m = min(first.shape[0], end - q)
        for i in range(m):
            first[i], pull[i] = at[row[q + i]] * D, grad[order[q + i]]
        sum_features(0, before, D, flat, span, first, pull, g)
        sum_features(before, D, D, flat, span, first, pull, g)
    for q in range(begin, end if share.shape[0] > 0 else begin):
        x0, a0 = x[at[row[q]]], share[order[q]]
        for d in range(D):
            c[d] = c[d] + (a0 if x0[d] != 0 else share.dtype.type(0))


@njit(**INLINE)
def _sum_sparse(j: int, groups: tuple, csr: tuple, grad: Array, share: Array, g: Array, c: Array) -> None:
    """As _sum_dense, by slots."""
    start, order, row, slots, values = groups[1], groups[2], groups[3], csr[3], csr[4]
    for p in range(start[j], start[j + 1]):
        begin, end = csr[0][row[p]], csr[1][row[p]]
        slot, value, a = slots[begin:end], values[begin:end], grad[order[p]]
        for q in range(slot.shape[0]):
            g[slot[q]] += a * value[q]
        if share.shape[0] > 0:
            for q in range(slot.shape[0]):
                c[slot[q]] += share[order[p]]


@njit(**INLINE)
def _mark(j: int, groups: tuple, csr: tuple, w: Array, s: Array, seen: Array, at: Array) -> Any:
    """List the slots that the pairs of class j touch, each once, and send for their weights and states."""
    start, row, columns, slots, n = groups[1], groups[3], csr[2], csr[3], np.uint64(0)
    for p in range(start[j], start[j + 1]):
        begin, end = csr[0][row[p]], csr[1][row[p]]
        slot, column = slots[begin:end], columns[begin:end]
        for q in range(slot.shape[0]):
            at[n] = slot[q]
            n += np.uint64(seen[slot[q]] == 0)
            seen[slot[q]] = 1
            prefetch(w, column[q])
            prefetch(s, column[q])
    return np.int64(n)


@njit(**INLINE)
def _collect(n: int, feature: Array, inverse_counts: Array, unbiased: bool, few: tuple) -> None:
    """Take the sums out of g and c, leaving zeros, and turn slots into features."""
    g, c, seen, at, few_g, few_c = few[0], few[1], few[2], few[3], few[4], few[5]
    for i in range(n):
        u = at[i]
        d = feature[u] if feature.shape[0] > 0 else u
        few_g[i] = g[u]
        if unbiased:
            few_c[i] = c[u] * inverse_counts[d]
            c[u] = 0
        g[u] = 0
        seen[u] = 0
        at[i] = d


def push_groups(steps: Steps, dense: bool) -> Callable[..., None]:
    """The kernel for dense rows x[at], or for sparse ones."""
    step_row, step_at = steps.row, steps.at

    def push_groups(
        lo: int,
        hi: int,
        groups: tuple,
        csr: tuple,
        x: Array,
        at: Array,
        grad: Array,
        share: Array,
        arrays: tuple,
        rule_: tuple,
        bias_g: Array,
        bias_c: Array,
        few: tuple,
    ) -> None:
        """Classes lo..hi of the groups.

        A class row whose pairs hold many non-zeros for its length is stepped as a whole, another where it is
        touched: either way the work is that of the non-zeros. Gradients of the biases are left in bias_g.
        """
        classes, weight, state, feature, g, c = groups[0], arrays[0], arrays[1], csr[5], few[0], few[1]
        rule, D, numbered = Rule(*rule_), weight.shape[1], feature.shape[0] > 0
        pairs = (np.zeros(2, np.int64), np.empty(AT_A_TIME, np.int64), np.empty(AT_A_TIME, grad.dtype))
        for j in range(lo, hi):
            k = classes[j]
            if j + AHEAD < hi:
                for d in range(0, min(D, 64), 16):
                    prefetch(weight, classes[j + AHEAD] * D + d)
                    prefetch(state, classes[j + AHEAD] * state.shape[1] + d)
            nonzeros = _sum_bias(j, groups, csr, grad, share, bias_g, bias_c)
            whole, n = dense or (not numbered and 4 * nonzeros > D), 0
            if dense:
                _sum_dense(j, groups, x, at, grad, share, g, c, pairs)
            elif nonzeros > 0:
                if not whole:
                    n = _mark(j, groups, csr, weight[k], state[k], few[2], few[3])
                _sum_sparse(j, groups, csr, grad, share, g, c)
            if whole:
                step_row(rule, arrays, k, g, c)
            elif n > 0:
                _collect(n, feature, arrays[6], share.shape[0] > 0, few)
                step_at(rule, arrays, k, few[4], few[5], n, few)

    return push_groups


@njit(**OPTIONS)
def sum_biases(pairs: tuple, grad: Array, share: Array, sums: tuple, bias_g: Array, bias_c: Array) -> int:
    """Gradients and shares of the biases of the classes met, listed as they are met; returns how many. No sorting:
    `sums` holds K numbers, zero before and after."""
    classes, touched = pairs
    g, c, seen = sums
    n = 0
    for p in range(classes.shape[0]):
        k = classes[p]
        touched[n] = k
        n += seen[k] == 0
        seen[k] = 1
        g[k] += grad[p]
        if share.shape[0] > 0:
            c[k] += share[p]
    for i in range(n):
        k = touched[i]
        bias_g[i], bias_c[i] = g[k], c[k]
        g[k], c[k], seen[k] = 0, 0, 0
    return n


def push_pair_biases(steps: Steps) -> Callable[..., None]:
    listed_biases = steps.listed_biases

    def push_pair_biases(
        pairs: tuple, grad: Array, share: Array, arrays: tuple, rule: tuple, sums: tuple, bias_g: Array, bias_c: Array,
        few: tuple,
    ) -> None:  # fmt: skip
        """The biases of all classes that the pairs (flat) name, of very many."""
        n = sum_biases(pairs, grad, share, sums, bias_g, bias_c)
        listed_biases(pairs[1][:n], bias_g, bias_c, arrays, rule, few)

    return push_pair_biases


@njit(**OPTIONS)
def _sum_block(csr: tuple, factor: Array, a: Array, tile: Array, to: Array, bias: Array) -> None:
    """to[s, u] = sum over non-zeros (b, u) of factor a[b, s], sixteen s at once. `tile` is zero before and after."""
    begin, end, slot, flat = csr[0], csr[1], csr[3], a.reshape(-1)
    bias[:LANES] = 0
    for b in range(a.shape[0]):
        for q in range(begin[b], end[b]):
            i = np.uint64(q)
            add_lanes(tile, np.uint64(slot[i]) * np.uint64(LANES), factor[i], flat, b * LANES)
        for s in range(LANES):
            bias[s] += a[b, s]
    for u0 in range(0, to.shape[1], CHUNK):
        for s in range(LANES):
            for u in range(u0, min(u0 + CHUNK, to.shape[1])):
                to[s, u] = tile[np.uint64(u * LANES + s)]
                tile[np.uint64(u * LANES + s)] = 0


def push_blocks(steps: Steps) -> Callable[..., None]:
    step_row, step_at = steps.row, steps.at

    def push_blocks(
        lo: int,
        hi: int,
        classes: Array,
        csr: tuple,
        ones: Array,
        grad: Array,
        share: Array,
        arrays: tuple,
        rule_: tuple,
        bias_g: Array,
        bias_c: Array,
        few: tuple,
        tile: Array,
        rows_g: Array,
        rows_c: Array,
    ) -> None:
        """Blocks lo..hi of 16 distinct classes; grad[block, b] holds the gradients of one row's 16 scores."""
        value, feature, inverse_counts, at = csr[4], csr[5], arrays[6], few[3]
        rule, U, numbered = Rule(*rule_), rows_g.shape[1], feature.shape[0] > 0
        if numbered:
            for u in range(U):
                at[u] = feature[u]
        for block in range(lo, hi):
            _sum_block(csr, value, grad[block], tile, rows_g, bias_g[block * LANES :])
            if share.shape[0] > 0:
                _sum_block(csr, ones, share[block], tile, rows_c, bias_c[block * LANES :])
            for s in range(min(LANES, classes.shape[0] - block * LANES) if U > 0 else 0):
                k, g, c = classes[block * LANES + s], rows_g[s], rows_c[s]
                if not numbered:
                    step_row(rule, arrays, k, g, c)
                    continue
                if share.shape[0] > 0:
                    for u in range(U):
                        c[u] *= inverse_counts[feature[u]]
                step_at(rule, arrays, k, g, c, U, few)

    return push_blocks
