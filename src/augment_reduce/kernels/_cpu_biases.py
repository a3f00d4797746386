"""Steps of the paper's algorithms where no row has a feature, and classes are very many, in a single compiled call.

    scores, E and M step, by rows | biases, by one thread, while the others draw the next

With the results of `vem.step` to the last bit. Every thread runs `take_biases` from end to end, and they wait for each
other where the line above has a bar, or ends (`_cpu_meet`). Rows to be drawn are cut into more shares than there are
threads, and whoever is free takes the next: no sum is cut in two, so the results do not depend on how many threads
there are, nor on who does what, as long as no row comes twice.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ._cpu_ahead import HELD, draw
from ._cpu_gradients import NOT_FINITE, all_well, score_biases, to_gradients
from ._cpu_meet import ALONE, queue_of, take_number, together
from ._cpu_push import sum_biases
from ._cpu_rules import push_biases
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit

ROWS_DRAWN = 32  # rows in a share
DRAW, JOB = 0, 1  # queues of shares, one for each thread; of JOB there is but one


@njit(**OPTIONS)
def _claim(tid: int, n: int, counter: Array, m: int) -> int:
    """The next of m shares that nobody has, or -1: of this thread's own rows, then of the others'."""
    for turn in range(n):
        owner = (tid + turn) % n
        j = m * owner // n + take_number(counter, queue_of(owner, n, DRAW))
        if j < m * (owner + 1) // n:
            return j
    return -1


@njit(**OPTIONS)
def _open(n: int, counter: Array) -> None:
    """Nothing has been taken from any queue."""
    for tid in range(n):
        counter[queue_of(tid, n, DRAW)] = counter[queue_of(tid, n, JOB)] = 0


@njit(**OPTIONS)
def _first_to_come(n: int, counter: Array) -> bool:
    """For work that is not shared."""
    return take_number(counter, queue_of(0, n, JOB)) == 0


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
    j = _claim(tid, n, counter, m) if i + 1 < M else -1
    while j >= 0:
        lo, hi, own = B * j // m, B * (j + 1) // m, drawn[(i + 1) % HELD]
        draw(lo, hi, seeds[i + 1, 0], order[i + 1], labels, K, own, room)
        j = _claim(tid, n, counter, m)


@cached_njit(**OPTIONS)
def take_biases(
    tid: int, n: int, counter: Array, plan: tuple, data: tuple, arrays: tuple, kinds: tuple, weigh: tuple, model: int,
    state: tuple, step: tuple, flags: tuple, per_row: Any, share: Array, common: tuple, own: tuple, bounds: Array,
    hits: Array,
) -> int:  # fmt: skip
    """Thread `tid` of n takes its part of M steps. Returns how many were taken, or ALONE.

    `plan` says what differs between them, `common` is everybody's and `own` this thread's scratch. Fewer than M were
    taken where a score of the next is not finite; of that step nothing has moved.
    """
    order, seeds, alphas, rules, shown = plan
    (labels, weights), (few, room), (drawn, scored, well, summed) = data, own, common
    bias, flat, (M, B) = arrays[3], scored[1].reshape(-1), order.shape
    lo, hi = B * tid // n, B * (tid + 1) // n
    draw(lo, hi, seeds[0, 0], order[0], labels, bias.shape[0], drawn[0], room)
    if not together(counter, tid, n):
        return ALONE
    for i in range(M):
        r, local = rules[i], (per_row, weigh, model, state, (step[0], step[1], alphas[i]), flags)
        rule = (kinds[0], kinds[1], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        if tid == 0:
            _open(n, counter)  # nobody takes from these before all are through with the rows
        bound = bounds[max(0, shown[i]), : B if shown[i] >= 0 else 0]
        score_biases(lo, hi, drawn[i % HELD], bias, scored[0])
        floored = to_gradients(lo, hi, order[i], weights, local, scored, seeds[i], bound)
        well[tid], hits[tid, i] = floored != NOT_FINITE, max(0, floored)
        if not together(counter, tid, n):
            return ALONE
        if not all_well(tid, order[i], state, scored[2], well):
            return i
        _biases_and_draw(
            i, tid, n, counter, order, seeds, labels, drawn, flat, share, arrays, rule, summed, few, room
        )  # fmt: skip
        if not together(counter, tid, n):
            return ALONE
    return M
