"""Steps of the paper's algorithms in a single compiled call, for parts that all have compiled twins.

    class by class   draw the next, sort, scores, by classes | E and M step, by rows | push, by classes
    biases alone     scores, E and M step, by rows | biases, draw the next

Where weights are few, or where there are no features, and classes are few, steps go row by row: `_cpu_by_rows`.

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python, which for small minibatches takes longer than the kernels do.

Every thread of a team runs `take_steps` from end to end, and they wait for each other where a line above has a bar, or
ends (`_cpu_meet`). Classes are cut into more shares than there are threads, and whoever is free takes the next; of the
rows each has its part. No sum is cut in two, so the results do not depend on how many threads there are, nor on who
does what, as long as no row comes twice.

What one core writes and another reads is slow to write again. So every thread sorts all pairs for itself, and writes
scores in the order of the classes, of which it has whole stretches, not where a row's scores belong, beside others'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_ahead import HELD, draw
from ._cpu_classes import count_out, cut, sort
from ._cpu_gradients import NOT_FINITE, put_back, score_biases, to_gradients
from ._cpu_lanes import LANES, prefetch_to_write
from ._cpu_meet import ALONE, queue_of, take_number, together
from ._cpu_push import push_groups, sum_biases
from ._cpu_rules import push_biases
from ._cpu_scores import pairs_dense, pairs_sparse
from ._cpu_types import OPTIONS, Array

ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features, and very many classes; class by class
ROWS_DRAWN = 32  # rows in a share of that job
SCORES, PUSH, DRAW, JOB = 0, 1, 2, 3  # queues of shares, one for each thread; of JOB there is but one
OWN, OTHERS = 4, 8  # from a queue's place: how many of its shares its thread took, and how many the others did
SHARES = 8  # of the classes for each thread, where there are several
APART = 32  # numbers, that two threads do not write to the same line


@njit(**OPTIONS)
def _share_out(start: Array, G: int, n: int, each: int, D: int, cuts: Array) -> int:
    """Cut points of the classes for n threads, of about equal work: that of their pairs, and of the weights these
    touch. Returns how many shares there are."""
    total, n_shares = 0, n * SHARES if n > 1 else 1
    for j in range(G):
        m = start[j + 1] - start[j]
        total += m * (each + 8) + min(D, m * each)
    done, t = 0, 1
    cuts[0], cuts[1 : n_shares + 1] = 0, G
    for j in range(G):
        m = start[j + 1] - start[j]
        done += m * (each + 8) + min(D, m * each)
        while t < n_shares and done * n_shares >= total * t:
            cuts[t] = j + 1
            t += 1
    return n_shares


@njit(**OPTIONS)
def _group(pairs: Array, n_classes: int, n: int, sorting: tuple, each: int, D: int, grouped: tuple) -> None:
    """Sort the pairs by class, and share the classes out."""
    (bits, passes), (keys, orders, row, count, distinct, start, cuts, sizes) = sorting, grouped
    if passes == 1:
        G = count_out(pairs, n_classes, count, orders[1], row, distinct, start)
    else:
        sort(pairs.reshape(-1), n_classes, bits, passes, count, keys, orders, row, pairs.shape[1])
        G = cut(keys[passes & 1], distinct, start)
    sizes[0], sizes[1] = G, _share_out(start, G, n, each, D, cuts)


@njit(**OPTIONS)
def _claim(tid: int, n: int, counter: Array, queue: int, m: int) -> int:
    """The next of m shares that nobody has, or -1: of this thread's own, whose data it may well have at hand, from one
    end, then of the others' from their other ends. So it is the same shares, as a rule, that change hands, between
    neighbours: the others stay where they are from step to step."""
    for turn in range(n):
        owner = (tid + turn) % n
        at, first, last = queue_of(owner, n, queue), m * owner // n, m * (owner + 1) // n
        if take_number(counter, at) >= last - first:
            continue
        k = counter[at + OWN] if turn == 0 else last - first - 1 - take_number(counter, at + OTHERS)
        if turn == 0:
            counter[at + OWN] = k + 1
        return first + k if owner % 2 == 0 else last - 1 - k
    return -1


@njit(**OPTIONS)
def _open(n: int, counter: Array) -> None:
    """Nothing has been taken from any queue."""
    for tid in range(n):
        counter[queue_of(tid, n, 0) : queue_of(tid, n, JOB + OTHERS) + 1] = 0


@njit(**OPTIONS)
def _first_to_come(n: int, counter: Array) -> bool:
    """For work that is not shared."""
    return take_number(counter, queue_of(0, n, JOB)) == 0


@njit(**OPTIONS)
def _score_groups(
    tid: int, n: int, counter: Array, cuts: Array, groups: tuple, x: Array, at: Array, csr: tuple, weight: Array,
    bias: Array, psi: Array, sink: Array,
) -> None:  # fmt: skip
    """Share by share of the classes; psi is flat."""
    m = cuts.shape[0] - 1
    j = _claim(tid, n, counter, SCORES, m)
    while j >= 0:
        if x.shape[0] > 0:
            pairs_dense(cuts[j], cuts[j + 1], groups, x, at, weight, bias, psi)
        else:
            pairs_sparse(cuts[j], cuts[j + 1], groups, csr, weight, bias, psi, sink)
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
def _send_for(first: int, last: int, a: Array) -> None:
    """Ask for a[first:last], which others have read: it will be written to."""
    for q in range(first, last, LANES):
        prefetch_to_write(a, q)


@njit(**OPTIONS)
def _to_rows(first: int, last: int, order: Array, by_class: Array, psi: Array, elsewhere: int) -> None:
    """psi[order[p]] = by_class[p], for those places first..last alone; what is of no concern goes elsewhere, as that is
    faster than asking whether."""
    for p in range(order.shape[0]):
        q = np.int64(order[p])
        psi[q if first <= q < last else elsewhere] = by_class[p]


@njit(**OPTIONS)
def _e_and_m(
    how: int, tid: int, n: int, rows: Array, seeds: Array, bound: Array, weights: Array, local: tuple, pairs: Array,
    bias: Array, scored: tuple, well: Array,
) -> int:  # fmt: skip
    """E and M step, and where there are only biases scores, of this thread's part of the rows. Returns how often the
    floor acted."""
    B = rows.shape[0]
    lo, hi = B * tid // n, B * (tid + 1) // n
    if how == BIASES:
        score_biases(lo, hi, pairs, bias, scored[0])
    hits = to_gradients(lo, hi, rows, weights, local, scored, seeds, bound)
    well[tid] = hits != NOT_FINITE
    return max(0, hits)


@njit(**OPTIONS)
def _undo(rows: Array, state: tuple, kept: tuple, well: Array) -> None:
    """Put back the local parameters of a step that will not be taken."""
    B, m = rows.shape[0], well.shape[0]
    for j in range(m):
        if well[j]:
            put_back(B * j // m, B * (j + 1) // m, rows, state, kept)


@njit(**OPTIONS)
def _push_biases(
    pairs: Array, grad: Array, share: Array, arrays: tuple, rule: tuple, summed: tuple, few: tuple
) -> None:
    """Of all classes that the pairs name."""
    bias_g, bias_c, sums, touched = summed[0], summed[1], summed[2], summed[3]
    G = sum_biases((pairs.reshape(-1), touched), grad, share, sums, bias_g, bias_c)
    push_biases(touched[:G], bias_g, bias_c, arrays, rule, few)


@njit(**OPTIONS)
def _biases_and_draw(
    i: int, tid: int, n: int, counter: Array, order: Array, seeds: Array, labels: Array, drawn: Array, grad: Array,
    share: Array, arrays: tuple, rule: tuple, summed: tuple, few: tuple, room: tuple,
) -> None:  # fmt: skip
    """Where there are only biases: they go where minibatch i says, while others draw the next."""
    (M, B), K = order.shape, arrays[3].shape[0]
    m = (B + ROWS_DRAWN - 1) // ROWS_DRAWN if n > 1 else 1
    if _first_to_come(n, counter):
        _push_biases(drawn[i % HELD], grad, share, arrays, rule, summed, few)
    j = _claim(tid, n, counter, DRAW, m) if i + 1 < M else -1
    while j >= 0:
        lo, hi, own = B * j // m, B * (j + 1) // m, drawn[(i + 1) % HELD]
        draw(lo, hi, seeds[i + 1, 0], order[i + 1], labels, K, own, room)
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
    (labels, weights, x, column, slot, value, feature), (few, room, sink, grouped) = data, own
    drawn, scored, (flat_psi, by_class, straight), well, summed = common
    weight, bias, sizes = arrays[0], arrays[3], grouped[7]
    (M, B), (K, D), flat, C = order.shape, weight.shape, scored[1].reshape(-1), scored[1].shape[1]
    lo, hi = B * tid // n, B * (tid + 1) // n
    draw(lo, hi, seeds[0, 0], order[0], labels, K, drawn[0], room)
    if not together(counter, tid, n):
        return ALONE
    for i in range(M):
        at, r, csr = places[i], rules[i], (begin[i], end[i], column, slot, value, feature)
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        local = (per_row, weigh, model, state, (step[0], step[1], alphas[i]), flags)
        if how == GROUPS:
            if i + 1 < M:
                draw(lo, hi, seeds[i + 1, 0], order[i + 1], labels, K, drawn[(i + 1) % HELD], room)
            each = D // 8 if x.shape[0] > 0 else (end[i] - begin[i]).sum() // B
            _group(drawn[i % HELD], K, n, sorting, each, D, grouped)
        pair, shares = grouped[1][sorting[1] & 1], grouped[6][: sizes[1] + 1]
        groups = (grouped[4][: sizes[0]], grouped[5][: sizes[0] + 1], pair, grouped[2])
        if how == GROUPS and n == 1:
            _score_groups(tid, n, counter, shares, groups, x, at, csr, weight, bias, flat_psi, sink)
        elif how == GROUPS:  # scores where no other thread writes, then each takes those of its rows
            in_line = (groups[0], groups[1], straight, groups[3])
            _score_groups(tid, n, counter, shares, in_line, x, at, csr, weight, bias, by_class, sink)
            if not together(counter, tid, n):
                return ALONE
            _send_for(lo * C, hi * C, flat)
            _to_rows(lo * C, hi * C, pair, by_class, flat_psi, B * C + (tid + 1) * APART)
        if tid == 0:
            _open(n, counter)  # nobody takes from these before all are through with the rows
        bound = bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0]
        hits[tid, i] = _e_and_m(
            how, tid, n, order[i], seeds[i], bound, weights, local, drawn[i % HELD], bias, scored, well
        )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
        if not well.all():
            if tid == 0:
                _undo(order[i], state, scored[2], well)
            return i
        if how == GROUPS:
            _push_groups(tid, n, counter, shares, groups, x, at, csr, flat, share, arrays, rule, summed, few)
        else:
            _biases_and_draw(
                i, tid, n, counter, order, seeds, labels, drawn, flat, share, arrays, rule, summed, few, room
            )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
    return M
