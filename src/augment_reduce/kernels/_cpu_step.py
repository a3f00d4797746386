"""Steps of the paper's algorithms in a single compiled call, for parts that all have compiled twins.

    draw, by rows | sort, one thread | scores, by classes | E and M step, by rows | push, by classes

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python, which for small minibatches takes longer than the kernels do.

Every thread of a team runs `take_steps` from end to end, and they wait for each other where the line above has a bar
(`_cpu_meet`). No sum is cut in two, so the results do not depend on how many they are, as long as no row comes twice.
Where weights are few, scores and sums of gradients go by rows. Where there are none, one thread moves the biases while
the others draw the next minibatch's classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_classes import cut, floyd, sort, splitmix, with_label
from ._cpu_local import SOFTMAX, draw_e_and_m, e_and_m
from ._cpu_meet import DRAWN, take_number, together
from ._cpu_push import PARTS, push_groups, step_rows, sum_biases, sum_rows
from ._cpu_rules import push_biases
from ._cpu_scores import SUMS, pairs_dense, pairs_sparse, score_rows
from ._cpu_types import OPTIONS, Array

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what splitmix adds for each number
ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features at all; class by class
ALONE = -1  # what a thread returns when another has left
ROWS_DRAWN = 32  # rows in a share of that job


@njit(**OPTIONS)
def _draw(
    n: int, counter: Array, seed: int, rows: Array, all_labels: Array, n_classes: int, labels: Array, u: Array,
    pairs: Array, table: Array,
) -> None:  # fmt: skip
    """pairs[:, 0] = the label, pairs[:, 1:] = classes of the others, without replacement; share by share.

    `u` (B, S) is for random numbers; number i of splitmix depends on the seed and i alone.
    """
    B, S = u.shape
    each = ROWS_DRAWN if n > 1 else B
    lo = take_number(counter, DRAWN) * each
    while lo < B:
        hi = min(lo + each, B)
        for b in range(lo, hi):
            labels[b] = pairs[b, 0] = all_labels[rows[b]]
        splitmix(np.uint64(seed) + GOLDEN * np.uint64(lo * S), u[lo:hi].reshape(-1))
        floyd(lo, hi, u, n_classes - 1, labels, pairs[:, 1:], table)
        lo = take_number(counter, DRAWN) * each


@njit(**OPTIONS)
def _share_out(start: Array, G: int, each: int, D: int, cuts: Array) -> None:
    """Cut points of the classes, of about equal work: that of their pairs, and of the weights these touch."""
    total = 0
    for j in range(G):
        n = start[j + 1] - start[j]
        total += n * (each + 8) + min(D, n * each)
    n_threads, done, t = cuts.shape[0] - 1, 0, 1
    cuts[0], cuts[1:] = 0, G
    for j in range(G):
        n = start[j + 1] - start[j]
        done += n * (each + 8) + min(D, n * each)
        while t < n_threads and done * n_threads >= total * t:
            cuts[t] = j + 1
            t += 1


@njit(**OPTIONS)
def _group(pairs: Array, n_classes: int, sorting: tuple, each: int, D: int, grouped: tuple) -> None:
    """Sort the pairs by class, and share the classes out among the threads."""
    (bits, passes), (keys, orders, row, count, distinct, start, cuts, n_groups) = sorting, grouped
    sort(pairs.reshape(-1), n_classes, bits, passes, count, keys, orders, row, pairs.shape[1])
    n_groups[0] = cut(keys[passes & 1], distinct, start)
    _share_out(start, n_groups[0], each, D, cuts)


@njit(**OPTIONS)
def _score(
    how: int, rows: tuple, classes: tuple, groups: tuple, pairs: Array, x: Array, at: Array, csr: tuple, weight: Array,
    bias: Array, psi: Array, sink: Array,
) -> None:  # fmt: skip
    """This thread's scores: those of its rows, or of its classes."""
    (lo, hi), (first, last) = rows, classes
    if how == ROWS:
        score_rows(pairs[lo:hi], x, at[lo:hi], weight, bias, psi[lo:hi])
    elif how == BIASES:
        for b in range(lo, hi):
            for s in range(pairs.shape[1]):
                psi[b, s] = bias[pairs[b, s]]
    elif x.shape[0] > 0:
        pairs_dense(first, last, groups, x, at, weight, bias, psi.reshape(-1))
    else:
        pairs_sparse(first, last, groups, csr, weight, bias, psi.reshape(-1), sink)


@njit(**SUMS)
def _sum(a: Array) -> Any:
    total = a.dtype.type(0)
    for i in range(a.shape[0]):
        total += a[i]
    return total


@njit(**OPTIONS)
def _all_finite(psi: Array) -> bool:
    """By their sum, as a rule; finite scores can have one that is not."""
    return np.isfinite(_sum(psi.reshape(-1))) or np.isfinite(psi).all()


@njit(**OPTIONS)
def _gradients(
    lo: int, hi: int, psi: Array, rows: Array, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple,
    u: Array, scales: Array, bound: Array, grads: Array,
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
    with_label(grad, scales[lo:hi], 1, grads[lo:hi])
    return hits


@njit(**OPTIONS)
def _scales(lo: int, hi: int, rows: Array, weights: Array, per_row: Any, scales: Array) -> None:
    """How much each row counts: N / B, times its weight where there are weights."""
    for b in range(lo, hi):
        scales[b] = weights[rows[b]] * per_row if weights.shape[0] > 0 else per_row


@njit(**OPTIONS)
def _push(
    tid: int, n: int, counter: Array, how: int, classes: tuple, groups: tuple, pairs: Array, x: Array, at: Array,
    csr: tuple, grad: Array, share: Array, arrays: tuple, rule: tuple, summed: tuple, few: tuple,
) -> bool:  # fmt: skip
    """This thread's part of the push; the biases are the first one's. False if another thread has left."""
    bias_g, bias_c, sums, touched, n_touched, whole = summed
    if how == GROUPS:
        push_groups(classes[0], classes[1], groups, csr, x, at, grad, share, arrays, rule, bias_g, bias_c, few)
        if not together(counter, n):
            return False
        if tid == 0:
            push_biases(groups[0], bias_g, bias_c, arrays, rule, few)
        return True
    if how == ROWS:
        sum_rows(PARTS * tid // n, PARTS * (tid + 1) // n, pairs.reshape(-1), x, at, grad, share, whole)
    if tid == 0:
        n_touched[0] = sum_biases((pairs.reshape(-1), touched), grad, share, sums, bias_g, bias_c)
    if how == ROWS:
        if not together(counter, n):
            return False
        G = n_touched[0]
        step_rows(G * tid // n, G * (tid + 1) // n, touched, arrays, rule, whole)
    if tid == 0:
        push_biases(touched[: n_touched[0]], bias_g, bias_c, arrays, rule, few)
    return True


@njit(cache=True, **OPTIONS)
def take_steps(
    tid: int, n: int, counter: Array, how: int, sorting: tuple, plan: tuple, data: tuple, arrays: tuple, kinds: tuple,
    weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple, per_row: Any, share: Array, common: tuple,
    own: tuple, bounds: Array, hits: Array,
) -> int:  # fmt: skip
    """Thread `tid` of n takes its part of M steps. Returns how many were taken, or ALONE.

    `plan` says what differs between them, `data` are the rows where they lie, `common` is everybody's and `own` this
    thread's scratch. Fewer than M were taken where a score of the next is not finite; of that step nothing has moved.
    """
    order, places, begin, end, seeds, alphas, rules, u, wanted = plan
    (labels, weights, x, column, slot, value, feature), (few, table, sink) = data, own
    (numbers, pairs_of, own_labels), grouped, (psi, grads, scales, finite), summed = common
    weight, bias, distinct, start, cuts, n_groups = arrays[0], arrays[3], grouped[4], grouped[5], grouped[6], grouped[7]
    (M, B), D = order.shape, weight.shape[1]
    lo, hi = B * tid // n, B * (tid + 1) // n
    for i in range(M):
        rows, at, pairs, r = order[i], places[i], pairs_of[i & 1], rules[i]
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        csr = (begin[i], end[i], column, slot, value, feature)
        _draw(n, counter, seeds[i], rows, labels, bias.shape[0], own_labels, numbers, pairs, table)
        if not together(counter, n):
            return ALONE
        if tid == 0:
            counter[DRAWN] = 0
            if how == GROUPS:
                each = D // 8 if x.shape[0] > 0 else (csr[1] - csr[0]).sum() // B
                _group(pairs, bias.shape[0], sorting, each, D, grouped)
        _scales(lo, hi, rows, weights, per_row, scales)
        if not together(counter, n):
            return ALONE
        groups = (distinct[: n_groups[0]], start[: n_groups[0] + 1], grouped[1][sorting[1] & 1], grouped[2])
        mine = (cuts[tid], cuts[tid + 1])
        _score(how, (lo, hi), mine, groups, pairs, x, at, csr, weight, bias, psi, sink)
        if not together(counter, n):
            return ALONE
        finite[tid] = _all_finite(psi[lo:hi])
        if not together(counter, n):
            return ALONE
        if not finite[:n].all():
            return i
        now, bound = (step[0], step[1], alphas[i]), bounds[i, : B * wanted[i]]
        hits[i, tid] = _gradients(lo, hi, psi, rows, weigh, model, state, now, flags, u[i], scales, bound, grads)
        if not together(counter, n):
            return ALONE
        flat = grads.reshape(-1)
        if not _push(tid, n, counter, how, mine, groups, pairs, x, at, csr, flat, share, arrays, rule, summed, few):
            return ALONE
    return M
