"""Steps of the paper's algorithms class by class, in a single compiled call, for parts that all have compiled twins.

    scores, by classes | E and M step, draw and sort the next, by rows | push, by classes, and on to the next scores

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit. What is saved is the way back to Python, which for small minibatches takes longer than the kernels do.

Every thread of a team runs `take_by_classes` from end to end, and they wait for each other where the line above has a
bar (`_cpu_meet`). Each has a stretch of the classes, for as long as the call lasts: nobody else reads or moves their
weights. And it has a part of every minibatch's rows, draws their classes, and sorts these pairs for all to see. No sum
is cut in two, so the results do not depend on how many threads there are, as long as no row comes twice.

What goes from one core to another is slow, and what both have read is slow to write again. Pairs, scores and gradients
are therefore handed over part by part, each in the order of the classes: of every part a thread reads and writes one
stretch, and nothing else that is another's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_ahead import HELD, draw
from ._cpu_classes import count_out, cut, sort
from ._cpu_gradients import NOT_FINITE, all_well, to_gradients
from ._cpu_lanes import LANES, copy_lanes, count_lanes
from ._cpu_meet import ALONE, seconds, together
from ._cpu_push import push_groups
from ._cpu_rules import push_biases
from ._cpu_scores import pairs_dense, pairs_sparse
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit


@njit(**OPTIONS)
def _sort_part(
    tid: int, first_row: int, pairs: Array, n_classes: int, sorting: tuple, held: int, parts: tuple, scratch: tuple,
    share: Array,
) -> None:  # fmt: skip
    """Lay this thread's pairs (rows, C) out by class, with their shares of the prior: the same for all rows."""
    (bits, passes), (keys, count), (orders, row, classes, start, sizes, shares) = sorting, scratch, parts
    order = orders[held, tid]
    if passes == 1:
        lists = classes[held, tid], start[held, tid]
        G = count_out(pairs, n_classes, count, order[1], row[held, tid], first_row, lists[0], lists[1])
    else:
        sort(pairs.reshape(-1), n_classes, bits, passes, count, keys, order, row[held, tid], pairs.shape[1], first_row)
        G = cut(keys[passes & 1, : pairs.size], classes[held, tid], start[held, tid])
    sizes[held, tid, 0] = G
    for p in range(pairs.size if shares.shape[2] > 0 else 0):
        shares[held, tid, p] = share[order[passes & 1, p]]


@njit(**OPTIONS)
def _gather(n: int, first: int, last: int, held: int, parts: tuple, mine: tuple) -> int:
    """The pairs of classes first..last, of all parts, one class after the other; returns how many classes there are.

    A pair's place is where its part has it: there its score goes, and its gradient comes from. Sixteen are copied at a
    time, and what is too much is written over by the next."""
    (_, rows, part_classes, part_start, sizes, _), (classes, start, place, row, heads) = parts, mine
    room, flat, G, q = rows.shape[2], rows[held].reshape(-1), 0, 0
    for t in range(n):
        known = part_classes[held, t, : sizes[held, t, 0]]
        heads[t, 0], heads[t, 1] = np.searchsorted(known, first), np.searchsorted(known, last)
    while True:
        k = last
        for t in range(n):
            if heads[t, 0] < heads[t, 1]:
                k = min(k, part_classes[held, t, heads[t, 0]])
        start[G] = q
        if k == last:
            return G
        classes[G] = k
        G += 1
        for t in range(n):
            j = heads[t, 0]
            if j < heads[t, 1] and part_classes[held, t, j] == k:
                heads[t, 0] = j + 1
                p, m = t * room + part_start[held, t, j], part_start[held, t, j + 1] - part_start[held, t, j]
                for i in range(0, m, LANES):
                    copy_lanes(row, q + i, flat, p + i)
                    count_lanes(place, q + i, p + i)
                q += m


@njit(**OPTIONS)
def _groups(
    tid: int, n: int, cuts: Array, passes: int, held: int, parts: tuple, mine: tuple
) -> tuple[Array, Array, Array, Array]:
    """`_cpu_types.Groups` of this thread's classes; of all, with places among the rows' scores, if it is alone."""
    orders, rows, classes, start, sizes, _ = parts
    if n == 1:
        G = sizes[held, 0, 0]
        return classes[held, 0, :G], start[held, 0, : G + 1], orders[held, 0, passes & 1], rows[held, 0]
    G = _gather(n, cuts[tid], cuts[tid + 1], held, parts, mine)
    return mine[0][:G], mine[1][: G + 1], mine[2], mine[3]


@njit(**OPTIONS)
def _score(groups: tuple, x: Array, at: Array, csr: tuple, arrays: tuple, psi: Array, sink: Array) -> None:
    G = groups[0].shape[0]
    if x.shape[0] > 0:
        pairs_dense(0, G, groups, x, at, arrays[0], arrays[3], psi)
    else:
        pairs_sparse(0, G, groups, csr, arrays[0], arrays[3], psi, sink)


@njit(**OPTIONS)
def _push(
    groups: tuple, x: Array, at: Array, csr: tuple, grad: Array, share: Array, arrays: tuple, rule: tuple,
    biases: tuple, few: tuple,
) -> None:  # fmt: skip
    """Weights, then biases."""
    G = groups[0].shape[0]
    push_groups(0, G, groups, csr, x, at, grad, share, arrays, rule, biases[0], biases[1], few)
    push_biases(groups[0], biases[0][:G], biases[1][:G], arrays, rule, few)


@njit(**OPTIONS)
def _to_rows(order: Array, by_class: Array, psi: Array) -> None:
    """Scores of a thread's part, flat, from the order of their classes."""
    for p in range(psi.shape[0]):
        psi[order[p]] = by_class[p]


@njit(**OPTIONS)
def _to_classes(order: Array, grad: Array, by_class: Array) -> None:
    """And gradients into it."""
    for p in range(grad.shape[0]):
        by_class[p] = grad[order[p]]


@cached_njit(**OPTIONS)
def take_by_classes(
    tid: int, n: int, counter: Array, cuts: Array, sorting: tuple, plan: tuple, data: tuple, arrays: tuple,
    kinds: tuple, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple, per_row: Any, share: Array,
    common: tuple, own: tuple, bounds: Array, hits: Array,
) -> int:  # fmt: skip
    """Thread `tid` of n, which has classes cuts[tid] to cuts[tid + 1], takes its part of M steps. Returns how many were
    taken, or ALONE.

    `plan` says what differs between them, `data` are the rows where they lie, `common` is everybody's and `own` this
    thread's scratch. Fewer than M were taken where a score of the next is not finite; of that step nothing has moved.
    """
    order, places, begin, end, seeds, alphas, rules, shown = plan
    labels, weights, x, column, slot, value, feature = data
    drawn, scored, parts, (by_class, grad_by_class), well, busy = common
    few, room, sink, scratch, mine, biases = own
    (M, B), K, passes, flat = order.shape, arrays[0].shape[0], sorting[1], scored[1].reshape(-1)
    lo, hi, alone = B * tid // n, B * (tid + 1) // n, n == 1
    own_psi, own_grad = scored[0][lo:hi].reshape(-1), scored[1][lo:hi].reshape(-1)
    draw(lo, hi, seeds[0, 0], order[0], labels, K, drawn, room)
    _sort_part(tid, lo, drawn[lo:hi], K, sorting, 0, parts, scratch, share)
    if not together(counter, tid, n):
        return ALONE
    began = seconds()
    groups = _groups(tid, n, cuts, passes, 0, parts, mine)
    for i in range(M):
        held, r, csr = i % HELD, rules[i], (begin[i], end[i], column, slot, value, feature)
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        local = (per_row, weigh, model, state, (step[0], step[1], alphas[i]), flags)
        _score(groups, x, places[i], csr, arrays, scored[0].reshape(-1) if alone else by_class.reshape(-1), sink)
        busy[tid, 0] += seconds() - began
        if not together(counter, tid, n):
            return ALONE
        if not alone:
            _to_rows(parts[0][held, tid, passes & 1], by_class[tid], own_psi)
        bound = bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0]
        floored = to_gradients(lo, hi, order[i], weights, local, scored, seeds[i], bound)
        hits[tid, i] = max(0, floored)
        if floored == NOT_FINITE:
            well[tid] = False  # not written otherwise: all read it
        if not alone:
            _to_classes(parts[0][held, tid, passes & 1], own_grad, grad_by_class[tid])
        if i + 1 < M:
            draw(lo, hi, seeds[i + 1, 0], order[i + 1], labels, K, drawn, room)
            _sort_part(tid, lo, drawn[lo:hi], K, sorting, 1 - held, parts, scratch, share)
        if not together(counter, tid, n):
            return ALONE
        if not all_well(tid, order[i], state, scored[2], well):
            return i
        began = seconds()
        shares = share if alone or share.shape[0] == 0 else parts[5][held].reshape(-1)
        _push(
            groups, x, places[i], csr, flat if alone else grad_by_class.reshape(-1), shares, arrays, rule, biases, few
        )
        if i + 1 < M:
            groups = _groups(tid, n, cuts, passes, 1 - held, parts, mine)
    busy[tid, 0] += seconds() - began
    return M
