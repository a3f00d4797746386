"""Steps of the paper's algorithms in a single compiled call, for parts that all have compiled twins.

    class by class   scores, by classes | E and M step, by rows | push, by classes | sort the next, draw
    biases alone     scores, E and M step, by rows | biases, draw the next
    row by row       draw, scores, E and M step, sums of gradients, by rows | push, by classes

Row by row where weights are few, or where there are no features, and classes are few: there, whoever has to wait draws
from the next minibatch (`_cpu_ahead`).

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python, which for small minibatches takes longer than the kernels do.

Every thread of a team runs `take_steps` from end to end, and they wait for each other where a line above has a bar, or
ends (`_cpu_meet`). Work is cut into more shares than there are threads, and whoever is free takes the next. No sum is
cut in two, so the results do not depend on how many threads there are, nor on who does what, as long as no row comes
twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_ahead import HELD, draw, draw_part, forget_drawn, meet_and_draw
from ._cpu_classes import cut, sort, with_label
from ._cpu_local import SOFTMAX, draw_e_and_m, e_and_m
from ._cpu_math import row_sum
from ._cpu_meet import queue_of, take_number, together
from ._cpu_push import push_groups, step_parts, sum_biases, sum_part, sum_rows
from ._cpu_rules import push_biases
from ._cpu_scores import pairs_dense, pairs_sparse, score_rows
from ._cpu_types import OPTIONS, Array

ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features, and very many classes; class by class
ALONE, NOT_FINITE = -1, -1  # what a thread returns when another has left; what rows do instead of a count
ROWS_DRAWN = 32  # rows in a share of that job
SCORES, PUSH, DRAW, JOB, BY_ROWS = 0, 1, 2, 3, 4  # queues of shares, one for each thread; of JOB there is but one
SHARES = 8  # of the classes for each thread, where there are several


@njit(**OPTIONS)
def _share_out(start: Array, G: int, each: int, D: int, cuts: Array) -> None:
    """Cut points of the classes, of about equal work: that of their pairs, and of the weights these touch."""
    total = 0
    for j in range(G):
        n = start[j + 1] - start[j]
        total += n * (each + 8) + min(D, n * each)
    n_shares, done, t = cuts.shape[0] - 1, 0, 1
    cuts[0], cuts[1:] = 0, G
    for j in range(G):
        n = start[j + 1] - start[j]
        done += n * (each + 8) + min(D, n * each)
        while t < n_shares and done * n_shares >= total * t:
            cuts[t] = j + 1
            t += 1


@njit(**OPTIONS)
def _group(pairs: Array, n_classes: int, sorting: tuple, each: int, D: int, grouped: tuple) -> None:
    """Sort the pairs by class, and share the classes out."""
    (bits, passes), (keys, orders, row, count, distinct, start, cuts, n_groups) = sorting, grouped
    sort(pairs.reshape(-1), n_classes, bits, passes, count, keys, orders, row, pairs.shape[1])
    n_groups[0] = cut(keys[passes & 1], distinct, start)
    _share_out(start, n_groups[0], each, D, cuts)


@njit(**OPTIONS)
def _claim(tid: int, n: int, counter: Array, queue: int, m: int) -> int:
    """The next of m shares that nobody has, or -1: of this thread's own, whose data it may well have at hand, then of
    the others'."""
    for turn in range(n):
        owner = (tid + turn) % n
        share = m * owner // n + take_number(counter, queue_of(owner, n, queue))
        if share < m * (owner + 1) // n:
            return share
    return -1


@njit(**OPTIONS)
def _open(n: int, counter: Array, first: int, last: int) -> None:
    """Nothing has been taken from these queues."""
    for tid in range(n):
        counter[queue_of(tid, n, first) : queue_of(tid, n, last) + 1] = 0


@njit(**OPTIONS)
def _first_to_come(n: int, counter: Array) -> bool:
    """For work that is not shared."""
    return take_number(counter, queue_of(0, n, JOB)) == 0


@njit(**OPTIONS)
def _score_groups(
    tid: int, n: int, counter: Array, cuts: Array, groups: tuple, x: Array, at: Array, csr: tuple, weight: Array,
    bias: Array, psi: Array, sink: Array,
) -> None:  # fmt: skip
    """Share by share of the classes."""
    m = cuts.shape[0] - 1
    j = _claim(tid, n, counter, SCORES, m)
    while j >= 0:
        if x.shape[0] > 0:
            pairs_dense(cuts[j], cuts[j + 1], groups, x, at, weight, bias, psi.reshape(-1))
        else:
            pairs_sparse(cuts[j], cuts[j + 1], groups, csr, weight, bias, psi.reshape(-1), sink)
        j = _claim(tid, n, counter, SCORES, m)


@njit(**OPTIONS)
def _push_groups(
    tid: int, n: int, counter: Array, cuts: Array, groups: tuple, x: Array, at: Array, csr: tuple, grad: Array,
    share: Array, arrays: tuple, rule: tuple, summed: tuple, few: tuple,
) -> None:  # fmt: skip
    """Share by share of the classes, as they were scored, and their biases."""
    bias_g, bias_c, m = summed[0], summed[1], cuts.shape[0] - 1
    j = _claim(tid, n, counter, PUSH, m)
    while j >= 0:
        first, last = cuts[j], cuts[j + 1]
        push_groups(first, last, groups, csr, x, at, grad, share, arrays, rule, bias_g, bias_c, few)
        push_biases(groups[0][first:last], bias_g[first:last], bias_c[first:last], arrays, rule, few)
        j = _claim(tid, n, counter, PUSH, m)


@njit(**OPTIONS)
def _all_finite(psi: Array) -> bool:
    """By their sum, as a rule; finite scores can have one that is not."""
    return np.isfinite(row_sum(psi.reshape(-1))) or np.isfinite(psi).all()


@njit(**OPTIONS)
def _move(lo: int, hi: int, rows: Array, held: Array, kept: Array, back: bool) -> None:
    for b in range(lo, hi if held.shape[0] > 0 else lo):
        if back:
            held[rows[b]] = kept[b]
        else:
            kept[b] = held[rows[b]]


@njit(**OPTIONS)
def _keep(lo: int, hi: int, rows: Array, state: tuple, kept: tuple, back: bool) -> None:
    """Put the local parameters of rows lo..hi aside, or back."""
    _move(lo, hi, rows, state[0], kept[0], back)
    _move(lo, hi, rows, state[1], kept[1], back)
    _move(lo, hi, rows, state[2], kept[2], back)


@njit(**OPTIONS)
def _gradients(
    lo: int, hi: int, rows: Array, weights: Array, local: tuple, psi: Array, grads: Array, seeds: Array, bound: Array
) -> int:
    """E and M step of rows lo..hi: derivatives by all scores in `grads`, times how much each row counts: N / B, and its
    weight where there are weights. Returns how often the floor acted."""
    per_row, weigh, model, state, step, flags = local
    B, S, hits = hi - lo, psi.shape[1] - 1, 0
    both, scales = np.empty((2, B, S), psi.dtype), np.empty(B, psi.dtype)
    gap, grad = both[0], both[1]
    for b in range(B):
        scales[b] = weights[rows[lo + b]] * per_row if weights.shape[0] > 0 else per_row
        for s in range(S):
            gap[b, s] = psi[lo + b, 1 + s] - psi[lo + b, 0]
    own_bound = bound[lo:hi] if bound.shape[0] > 0 else bound
    if model == SOFTMAX:
        hits = e_and_m((state[0], state[2]), rows[lo:hi], gap, weigh[0], 0, step, flags, own_bound, grad)
    else:
        own_seeds = (seeds[1], seeds[2])
        draw_e_and_m(model, state, rows[lo:hi], gap, weigh[1], 0, step, flags, own_seeds, lo, own_bound, grad)
    with_label(grad, scales, 1, grads[lo:hi])
    return hits


@njit(**OPTIONS)
def _score_biases(lo: int, hi: int, pairs: Array, bias: Array, psi: Array) -> None:
    for b in range(lo, hi):
        for s in range(pairs.shape[1]):
            psi[b, s] = bias[pairs[b, s]]


@njit(**OPTIONS)
def _to_gradients(
    lo: int, hi: int, rows: Array, weights: Array, local: tuple, scored: tuple, seeds: Array, bound: Array
) -> int:
    """E and M step of rows lo..hi, whose local parameters are put aside before; returns how often the floor acted, or
    NOT_FINITE, with nothing done, if a score is not finite."""
    psi, grads, kept = scored[0], scored[1], scored[3]
    if not _all_finite(psi[lo:hi]):
        return NOT_FINITE
    _keep(lo, hi, rows, local[3], kept, False)
    return _gradients(lo, hi, rows, weights, local, psi, grads, seeds, bound)


@njit(**OPTIONS)
def _by_rows(
    how: int, i: int, tid: int, n: int, counter: Array, plan: tuple, data: tuple, local: tuple, drawn: tuple,
    room: tuple, share: Array, arrays: tuple, scored: tuple, summed: tuple,
) -> int:  # fmt: skip
    """E and M step, and whatever else goes by rows, stretch by stretch of the rows. Returns how often the floor acted.

    Row by row a stretch is a part of the sums, and its rows come from afar but once.
    """
    (order, places, seeds, bound), (labels, weights, x), weight, bias = plan, data, arrays[0], arrays[3]
    (psi, grads, well), rows, at, n_hits = scored[:3], order[i], places[i], 0
    pairs, whole, sums, B, m, D = drawn[i % HELD], summed[4], summed[5], order.shape[1], well.shape[0], x.shape[1]
    j = _claim(tid, n, counter, BY_ROWS, m)
    while j >= 0:
        lo, hi = B * j // m, B * (j + 1) // m
        if how == ROWS and not draw_part(n, counter, i, j, order, seeds, (labels, bias.shape[0], drawn, room)):
            return ALONE
        if how == ROWS and D > 0:
            score_rows(pairs[lo:hi], x, at[lo:hi], weight, bias, psi[lo:hi])
        elif how != GROUPS:
            _score_biases(lo, hi, pairs, bias, psi)
        hits = _to_gradients(lo, hi, rows, weights, local, scored, seeds[i], bound)
        well[j] = hits != NOT_FINITE
        n_hits += max(0, hits)
        if how == ROWS and well[j]:
            if D > 0:
                sum_rows(j, lo, hi, pairs, x, at, grads, share, whole)
            sum_part(j, lo, hi, pairs, D, grads, share, sums)
        j = _claim(tid, n, counter, BY_ROWS, m)
    return n_hits


@njit(**OPTIONS)
def _undo(rows: Array, state: tuple, scored: tuple, summed: tuple) -> None:
    """Put back the local parameters of a step that will not be taken, and clear what was summed of it."""
    well, kept, whole, sums, B = scored[2], scored[3], summed[4], summed[5], rows.shape[0]
    m = well.shape[0]
    for j in range(m):
        if well[j]:
            _keep(B * j // m, B * (j + 1) // m, rows, state, kept, True)
    whole[0][:], whole[1][:] = 0, 0
    sums[0][...], sums[1][...], sums[2][...] = 0, 0, 0


@njit(**OPTIONS)
def _push_biases(
    pairs: Array, grad: Array, share: Array, arrays: tuple, rule: tuple, summed: tuple, few: tuple
) -> None:
    """Of all classes that the pairs name."""
    bias_g, bias_c, sums, touched = summed[0], summed[1], summed[2], summed[3]
    G = sum_biases((pairs.reshape(-1), touched), grad, share, sums, bias_g, bias_c)
    push_biases(touched[:G], bias_g, bias_c, arrays, rule, few)


@njit(**OPTIONS)
def _step_parts(tid: int, n: int, counter: Array, D: int, arrays: tuple, rule: tuple, summed: tuple) -> None:
    """Share by share of the classes, whose gradients are summed."""
    whole, sums, K = summed[4], summed[5], arrays[3].shape[0]
    m = min(K, SHARES * n)
    j = _claim(tid, n, counter, PUSH, m)
    while j >= 0:
        step_parts(K * j // m, K * (j + 1) // m, sums, D, arrays, rule, whole)
        j = _claim(tid, n, counter, PUSH, m)


@njit(**OPTIONS)
def _prepare(
    i: int, how: int, tid: int, n: int, counter: Array, plan: tuple, labels: Array, D: int, is_dense: bool,
    sorting: tuple, drawn: tuple, grouped: tuple, grad: Array, share: Array, arrays: tuple, rule: tuple, summed: tuple,
    few: tuple, room: tuple,
) -> None:  # fmt: skip
    """What minibatch i needs: to be sorted while the next is drawn; or to be drawn while biases go where the one before
    it says."""
    order, begin, end, seeds = plan
    (M, B), pairs, K, to_draw = order.shape, drawn, arrays[3].shape[0], i + 1 if how == GROUPS else i
    m = (B + ROWS_DRAWN - 1) // ROWS_DRAWN if n > 1 else 1
    if _first_to_come(n, counter):
        if how == BIASES:
            _push_biases(pairs[(i - 1) % HELD], grad, share, arrays, rule, summed, few)
        elif i < M:
            per_row = D // 8 if is_dense else (end[i] - begin[i]).sum() // B
            _group(pairs[i % HELD], K, sorting, per_row, D, grouped)
    j = _claim(tid, n, counter, DRAW, m) if to_draw < M else -1
    while j >= 0:
        lo, hi, own = B * j // m, B * (j + 1) // m, pairs[to_draw % HELD]
        draw(lo, hi, seeds[to_draw, 0], order[to_draw], labels, K, own, room)
        j = _claim(tid, n, counter, DRAW, m)


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
    order, places, begin, end, seeds, alphas, rules, shown = plan
    (labels, weights, x, column, slot, value, feature), (few, room, sink) = data, own
    drawn, grouped, scored, summed = common
    weight, bias, distinct, start, cuts, n_groups = arrays[0], arrays[3], grouped[4], grouped[5], grouped[6], grouped[7]
    (M, B), D, psi, flat, well = order.shape, weight.shape[1], scored[0], scored[1].reshape(-1), scored[2]
    coming, of_rows, r = (order, begin, end, seeds), (labels, weights, x), rules[0]
    of_classes = (labels, bias.shape[0], drawn, room)
    rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
    if how != ROWS:
        lo, hi = B * tid // n, B * (tid + 1) // n
        draw(lo, hi, seeds[0, 0], order[0], labels, bias.shape[0], drawn[0], room)
        if not together(counter, tid, n):
            return ALONE
    if how == GROUPS:
        _prepare(
            0, how, tid, n, counter, coming, labels, D, x.shape[0] > 0, sorting, drawn, grouped, flat, share, arrays,
            rule, summed, few, room,
        )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
    for i in range(M):
        at, r, csr = places[i], rules[i], (begin[i], end[i], column, slot, value, feature)
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        groups = (distinct[: n_groups[0]], start[: n_groups[0] + 1], grouped[1][sorting[1] & 1], grouped[2])
        local = (per_row, weigh, model, state, (step[0], step[1], alphas[i]), flags)
        if how == GROUPS:
            _score_groups(tid, n, counter, cuts, groups, x, at, csr, weight, bias, psi, sink)
            if not together(counter, tid, n):
                return ALONE
        if tid == 0:
            _open(n, counter, SCORES, JOB)  # nobody takes from these before all are through with the rows
        by_rows = (order, places, seeds, bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0])
        hits[tid, i] = _by_rows(
            how, i, tid, n, counter, by_rows, of_rows, local, drawn, room, share, arrays, scored, summed
        )  # fmt: skip
        left = hits[tid, i] == ALONE
        if left or not meet_and_draw(tid, n, counter, i + 1 if how == ROWS else M, order, seeds, of_classes):
            return ALONE
        if not well.all():
            if tid == 0:
                _undo(order[i], state, scored, summed)
            return i
        if tid == 0:
            _open(n, counter, BY_ROWS, BY_ROWS)
        if how == GROUPS:
            _push_groups(tid, n, counter, cuts, groups, x, at, csr, flat, share, arrays, rule, summed, few)
        elif how == ROWS:
            _step_parts(tid, n, counter, x.shape[1], arrays, rule, summed)
        if how == ROWS and tid == 0:
            forget_drawn(n, counter, i)
        if how == GROUPS and not together(counter, tid, n):
            return ALONE
        if how == ROWS and not meet_and_draw(tid, n, counter, i + 1, order, seeds, of_classes):
            return ALONE
        if how != ROWS:
            _prepare(
                i + 1, how, tid, n, counter, coming, labels, D, x.shape[0] > 0, sorting, drawn, grouped, flat, share,
                arrays, rule, summed, few, room,
            )  # fmt: skip
            if not together(counter, tid, n):
                return ALONE
    return M
