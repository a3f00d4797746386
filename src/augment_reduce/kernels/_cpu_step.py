"""One step of the paper's algorithms in a single compiled call, for parts that all have compiled twins.

    classes of each row, uniform  ->  scores  ->  E and M step  ->  row optimiser

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python between them, which for small minibatches takes longer than they do.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ._cpu_classes import cut, floyd, sort, splitmix, with_label
from ._cpu_local import SOFTMAX, draw_e_and_m, e_and_m
from ._cpu_push import push_biases, push_groups, push_rows
from ._cpu_scores import pairs_dense, pairs_sparse, score_rows
from ._cpu_types import OPTIONS, Array

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what splitmix adds for each number
ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features at all; class by class


@njit(**OPTIONS)
def draw_rows(lo: int, hi: int, seed: int, n_classes: int, labels: Array, u: Array, pairs: Array, table: Array) -> None:
    """For rows lo..hi: pairs[:, 0] = the label, pairs[:, 1:] = classes of the others, without replacement.

    `u` (B, S) is for random numbers; number i of splitmix depends on the seed and i alone.
    """
    splitmix(np.uint64(seed) + GOLDEN * np.uint64(lo * u.shape[1]), u[lo:hi].reshape(-1))
    floyd(lo, hi, u, n_classes - 1, labels, pairs[:, 1:], table)
    for b in range(lo, hi):
        pairs[b, 0] = labels[b]


@njit(**OPTIONS)
def _group(pairs: Array, n_classes: int, bits: int, passes: int) -> tuple:
    P = pairs.size
    keys, orders = np.empty((2, P), np.uint32), np.empty((2, P), np.uint32)
    row, count = np.empty(P, np.uint32), np.empty((1 << bits) + 1, np.uint32)
    sort(pairs.reshape(-1), n_classes, bits, passes, count, keys, orders, row, pairs.shape[1])
    distinct, start = np.empty(P, np.int64), np.empty(P + 1, np.int64)
    n = cut(keys[passes & 1], distinct, start)
    return distinct[:n], start[: n + 1], orders[passes & 1], row


@njit(cache=True, **OPTIONS)
def draw_and_group(
    how: int, seed: int, sorting: tuple, n_classes: int, labels: Array, table: Array, pairs: Array
) -> tuple:
    """The classes of every row, and their pairs by class where that is how to go through them."""
    u = np.empty((pairs.shape[0], pairs.shape[1] - 1))
    draw_rows(0, pairs.shape[0], seed, n_classes, labels, u, pairs, table)
    return _group(pairs if how == GROUPS else pairs[:0], n_classes, sorting[0], sorting[1])


@njit(**OPTIONS)
def all_finite(psi: Array) -> bool:
    """By their sum, as a rule; finite scores can have one that is not."""
    return np.isfinite(psi.sum()) or np.isfinite(psi).all()


@njit(**OPTIONS)
def gradients(
    lo: int, hi: int, psi: Array, rows: Array, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple,
    u: Array, scales: Array, each: int, bound: Array, grads: Array,
) -> int:  # fmt: skip
    """E and M step of rows lo..hi: derivatives by all scores in `grads`; returns how often the floor acted."""
    B, S, hits = hi - lo, psi.shape[1] - 1, 0
    gap, grad = np.empty((B, S), psi.dtype), np.empty((B, S), psi.dtype)
    for b in range(B):
        for s in range(S):
            gap[b, s] = psi[lo + b, 1 + s] - psi[lo + b, 0]
    own_bound = bound[lo:hi] if bound.shape[0] > 0 else bound
    if model == SOFTMAX:
        hits = e_and_m((state[0], state[2]), rows[lo:hi], gap, weigh[0], 0, step, flags, own_bound, grad)
    else:
        draws = np.ascontiguousarray(u[:, lo:hi])
        draw_e_and_m(model, state, rows[lo:hi], gap, weigh[1], 0, step, flags, draws, own_bound, grad)
    with_label(grad, scales[lo * each :], each, grads[lo:hi])
    return hits


@njit(cache=True, **OPTIONS)
def whole_step(
    how: int, seed: int, sorting: tuple, rows: Array, labels: Array, x: Array, csr: tuple, arrays: tuple,
    rule: tuple, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple, u: Array, scales: Array, each: int,
    share: Array, scratch: tuple, bound: Array,
) -> int:  # fmt: skip
    """The step on one thread; returns how often the floor acted, or -1, nothing moved, where a score is not finite."""
    weight, bias, (few, sums, touched, bias_g, bias_c, table, sink) = arrays[0], arrays[3], scratch
    B, S = rows.shape[0], weigh[2]
    pairs, psi, grads = (
        np.empty((B, 1 + S), np.int64),
        np.empty((B, 1 + S), bias.dtype),
        np.empty((B, 1 + S), bias.dtype),
    )
    groups = draw_and_group(how, seed, sorting, bias.shape[0], labels, table, pairs)
    if how == ROWS:
        score_rows(pairs, x, rows, weight, bias, psi)
    elif how == BIASES:
        for b in range(B):
            for s in range(1 + S):
                psi[b, s] = bias[pairs[b, s]]
    elif x.shape[0] > 0:
        pairs_dense(0, len(groups[0]), groups, x, weight, bias, psi.reshape(-1))
    else:
        pairs_sparse(0, len(groups[0]), groups, csr, weight, bias, psi.reshape(-1), sink)
    if not all_finite(psi):
        return -1
    hits = gradients(0, B, psi, rows, weigh, model, state, step, flags, u, scales, each, bound, grads)
    if how == GROUPS:
        push_groups(0, len(groups[0]), groups, csr, x, grads.reshape(-1), share, arrays, rule, bias_g, bias_c, few)
        push_biases(groups[0], bias_g, bias_c, arrays, rule, few)
    else:
        push_rows(
            (pairs.reshape(-1), touched), x, rows, grads.reshape(-1), share, arrays, rule, sums, bias_g, bias_c, few
        )
    return hits
