"""Steps of the paper's algorithms in a single compiled call, for parts that all have compiled twins.

    class by class   scores, by classes | E and M step, by rows | push, by classes | sort the next, draw
    biases alone     scores, E and M step, by rows | biases, draw the next

Where weights are few, or where there are no features, and classes are few, steps go row by row: `_cpu_by_rows`.

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python, which for small minibatches takes longer than the kernels do.

Every thread of a team runs `take_steps` from end to end, and they wait for each other where a line above has a bar, or
ends (`_cpu_meet`). Work is cut into more shares than there are threads, and whoever is free takes the next. No sum is
cut in two, so the results do not depend on how many threads there are, nor on who does what, as long as no row comes
twice.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ._cpu_ahead import HELD, draw
from ._cpu_classes import cut, sort
from ._cpu_gradients import NOT_FINITE, put_back, score_biases, to_gradients
from ._cpu_meet import ALONE, queue_of, take_number, together
from ._cpu_push import push_groups, sum_biases
from ._cpu_rules import push_biases
from ._cpu_scores import pairs_dense, pairs_sparse
from ._cpu_types import OPTIONS, Array

ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features, and very many classes; class by class
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
def _by_rows(
    how: int, i: int, tid: int, n: int, counter: Array, plan: tuple, weights: Array, local: tuple, pairs: Array,
    bias: Array, scored: tuple, well: Array,
) -> int:  # fmt: skip
    """E and M step, and where there are only biases scores, stretch by stretch of the rows. Returns how often the floor
    acted."""
    (order, seeds, bound), n_hits, B, m = plan, 0, plan[0].shape[1], well.shape[0]
    j = _claim(tid, n, counter, BY_ROWS, m)
    while j >= 0:
        lo, hi = B * j // m, B * (j + 1) // m
        if how == BIASES:
            score_biases(lo, hi, pairs, bias, scored[0])
        hits = to_gradients(lo, hi, order[i], weights, local, scored, seeds[i], bound)
        well[j] = hits != NOT_FINITE
        n_hits += max(0, hits)
        j = _claim(tid, n, counter, BY_ROWS, m)
    return n_hits


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
    drawn, grouped, scored, well, summed = common
    weight, bias, distinct, start, cuts, n_groups = arrays[0], arrays[3], grouped[4], grouped[5], grouped[6], grouped[7]
    (M, B), D, psi, flat = order.shape, weight.shape[1], scored[0], scored[1].reshape(-1)
    coming, r = (order, begin, end, seeds), rules[0]
    rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
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
        by_rows = (order, seeds, bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0])
        hits[tid, i] = _by_rows(
            how, i, tid, n, counter, by_rows, weights, local, drawn[i % HELD], bias, scored, well
        )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
        if not well.all():
            if tid == 0:
                _undo(order[i], state, scored[2], well)
            return i
        if tid == 0:
            _open(n, counter, BY_ROWS, BY_ROWS)
        if how == GROUPS:
            _push_groups(tid, n, counter, cuts, groups, x, at, csr, flat, share, arrays, rule, summed, few)
            if not together(counter, tid, n):
                return ALONE
        _prepare(
            i + 1, how, tid, n, counter, coming, labels, D, x.shape[0] > 0, sorting, drawn, grouped, flat, share,
            arrays, rule, summed, few, room,
        )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
    return M
