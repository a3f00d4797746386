"""Steps of the paper's algorithms row by row, in a single compiled call: where weights, or classes, are few.

    draw, scores, E and M step, sums of gradients, by quarters of the rows | steps of all classes, by every thread

Nothing new is computed here: the kernels of the other files, one after the other, with the results of `vem.step` to the
last bit, whatever the number of threads.

Every thread has weights of its own. It goes through its quarters, sends the others its sums, and when theirs are there
takes the same steps as they do: they meet but once a step (`|`), and no thread reads what another has changed but these
sums. Moving a line of memory from one core to the other costs little where its new owner changes it, but four times as
much where both read it and one then writes to it, as with weights that all share and one moves. So sums are cleared by
who receives them, and each pair of threads has a letter box for either way, or two, used in turns: one is read while
the next is filled.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ._cpu_ahead import HELD, draw_on, meet_and_draw
from ._cpu_gradients import NOT_FINITE, put_back, score_biases, to_gradients
from ._cpu_meet import ALONE
from ._cpu_quarters import PARTS, add_line, add_quarters, step_line, sum_quarter
from ._cpu_scores import score_rows
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit


@njit(**OPTIONS)
def _copy(arrays: tuple, to: tuple, has_features: bool) -> None:
    """Weights, if rows have features, and biases with their states."""
    if has_features:
        to[0][...], to[1][...], to[2][...] = arrays[0], arrays[1], arrays[2]
    to[3][...], to[4][...], to[5][...] = arrays[3], arrays[4], arrays[5]


@njit(**OPTIONS)
def _send(tid: int, n: int, total: Array, boxes: Array, size: int) -> None:
    for other in range(n):
        if other != tid:
            letter = boxes[other, tid]
            for i in range(size):
                letter[i] = total[i]


@njit(**OPTIONS)
def _receive(tid: int, n: int, total: Array, boxes: Array, size: int) -> None:
    """Add what the others sent, in pairs of neighbours, as `add_quarters` does."""
    add_line(total, boxes[tid, tid ^ 1], size)
    if n == 4:
        one = tid ^ 2
        add_line(boxes[tid, one], boxes[tid, one ^ 1], size)
        add_line(total, boxes[tid, one], size)


@njit(**OPTIONS)
def _sum_own(
    first: int, last: int, done: int, rows: Array, at: Array, seeds: Array, bound: Array, data: tuple,
    of_classes: tuple, local: tuple, pairs: Array, scored: tuple, share: Array, line: tuple, own: tuple, well: Array,
) -> int:  # fmt: skip
    """Quarters first..last of a minibatch, whose classes are drawn up to row `done`, from the draw to the sums of their
    gradients; their rows come from afar but once. Returns how often the floor acted."""
    (weights, x), (mine, lines, room), B, n_hits = data, own, rows.shape[0], 0
    for j in range(first, last):
        lo, hi = B * j // PARTS, B * (j + 1) // PARTS
        done = draw_on(done, hi, seeds[0], rows, of_classes, pairs, room)
        if x.shape[1] > 0:
            score_rows(pairs[lo:hi], x, at[lo:hi], mine[0], mine[3], scored[0][lo:hi])
        else:
            score_biases(lo, hi, pairs, mine[3], scored[0])
        hits = to_gradients(lo, hi, rows, weights, local, scored, seeds, bound)
        well[j] = hits != NOT_FINITE
        if well[j]:
            n_hits += hits
            sum_quarter(lo, hi, pairs, x, at, scored[1], share, line, lines[j - first])
        else:
            lines[0, line[4]] += 1
    return n_hits


@cached_njit(**OPTIONS)
def take_by_rows(
    tid: int, n: int, counter: Array, line: tuple, plan: tuple, data: tuple, arrays: tuple, kinds: tuple, weigh: tuple,
    model: int, state: tuple, step: tuple, flags: tuple, per_row: float, share: Array, common: tuple, own: tuple,
    bounds: Array, hits: Array,
) -> int:  # fmt: skip
    """Thread `tid` of n, a power of two, takes its part of M steps. Returns how many were taken, or ALONE.

    `plan` says what differs between them, `data` are the rows where they lie, `common` is everybody's and `own` this
    thread's: its weights (those of the first are `arrays`), the sums of its quarters, and scratch. Fewer than M were
    taken where a score of the next is not finite; of that step nothing has moved.
    """
    order, places, seeds, alphas, rules, shown = plan
    (drawn, scored, boxes), (labels, weights, x), (mine, lines, room) = common, data, own
    if tid > 0:
        _copy(arrays, mine, line[1] > 0)  # nobody moves them before all have met
    (M, B), size, well = order.shape, line[7], np.zeros(PARTS, np.bool_)
    first, last = PARTS * tid // n, PARTS * (tid + 1) // n
    done, until, of_classes = B * first // PARTS, B * last // PARTS, (labels, line[0], state)
    for i in range(M):
        r, local = rules[i], (per_row, weigh, model, state, (step[0], step[1], alphas[i]), flags)
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        bound = bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0]
        hits[tid, i] = _sum_own(
            first, last, done, order[i], places[i], seeds[i], bound, (weights, x), of_classes, local, drawn[i % HELD],
            scored, share, line, own, well,
        )  # fmt: skip
        total, done = add_quarters(lines, size), B * first // PARTS
        if n > 1:
            _send(tid, n, total, boxes[i % 2], size)
            ahead = min(i + 1, M - 1)
            done = meet_and_draw(
                tid, n, counter, done, until if i + 1 < M else done, seeds[ahead, 0], order[ahead], of_classes,
                drawn[ahead % HELD], room,
            )  # fmt: skip
            if done < 0:
                return ALONE
            _receive(tid, n, total, boxes[i % 2], size)
        if total[line[4]] > 0:
            for j in range(first, last):
                if well[j]:
                    put_back(B * j // PARTS, B * (j + 1) // PARTS, order[i], state, scored[2])
            total[:] = 0
            return i
        step_line(total, line, mine, rule)
    return M
