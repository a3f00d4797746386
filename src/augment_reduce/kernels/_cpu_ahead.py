"""Classes of minibatches: drawn when they are needed, or before that, by threads that would have to wait for others.

Classes depend on the seed of a step alone, so whoever waits at the end of a step draws some of the next, share by
share: of its own rows first, then of the others', who have that much less to do. What is left when the step begins is
drawn by those whose rows these are. A thread that is held up, by a stranger on its core say, then costs the others
nothing as long as there is something to draw.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ._cpu_classes import GOLDEN, floyd, splitmix, table_size
from ._cpu_meet import all_here, arrive, queue_of, reaches, take_number, wait_for
from ._cpu_push import PARTS
from ._cpu_types import OPTIONS, Array

AT_A_TIME = 2048  # numbers drawn before their classes are: they stay in the first cache
HELD = 2  # minibatches whose pairs are held: one that is sorted, or pushed, while the other is drawn
DRAWN = 8  # queues from there on, for each part of the rows of each minibatch that is held: shares taken, shares drawn
A_SHARE, MOST_ROWS = 512, 32  # classes drawn between two looks at who has come; and rows
OLDEST = 2**31  # rows after which the table is cleared


def room_to_draw(S: int) -> tuple[Array, Array, Array, Array]:
    """One thread's scratch: the table of `floyd`, how many rows it has seen, numbers, labels."""
    m = max(8, AT_A_TIME // max(1, S))
    return np.empty(table_size(S), np.int64), np.zeros(1, np.int64), np.empty((m, S)), np.empty(m, np.int64)


@njit(**OPTIONS)
def draw(
    lo: int, hi: int, seed: int, rows: Array, all_labels: Array, n_classes: int, pairs: Array, room: tuple
) -> None:
    """Rows lo..hi: pairs[:, 0] = the label, pairs[:, 1:] = classes of the others, without replacement.

    A stretch of rows at a time: number i of splitmix depends on the seed and i alone.
    """
    table, age, u, labels = room
    S, m = u.shape[1], u.shape[0]
    for first in range(lo, hi, m):
        last = min(hi, first + m)
        for b in range(first, last):
            labels[b - first] = pairs[b, 0] = all_labels[rows[b]]
        splitmix(np.uint64(seed) + GOLDEN * np.uint64(first * S), u[: last - first].reshape(-1))
        age[0] = age[0] if age[0] < OLDEST else 0
        floyd(0, last - first, u, n_classes - 1, labels, pairs[first:last, 1:], table, age[0])
        age[0] += last - first


@njit(**OPTIONS)
def _rows_a_share(n: int, B: int, S: int) -> int:
    return max(1, min(MOST_ROWS, A_SHARE // max(1, S))) if n > 1 else B


@njit(**OPTIONS)
def _queue(n: int, i: int, j: int) -> int:
    """Where it says how many shares of part j of minibatch i were taken; in the next place, how many are drawn."""
    return queue_of(j * n // PARTS, n, DRAWN + 2 * (HELD * j + i % HELD))


@njit(**OPTIONS)
def forget_drawn(n: int, counter: Array, i: int) -> None:
    """All have drawn minibatch i, and nobody draws the next but one before they have met again."""
    for j in range(PARTS):
        at = _queue(n, i, j)
        counter[at], counter[at + 1] = 0, 0


@njit(**OPTIONS)
def _draw_share(n: int, counter: Array, i: int, j: int, order: Array, seeds: Array, of_classes: tuple) -> bool:
    """One share of part j of minibatch i; False where all have been taken."""
    (labels, K, drawn, room), B = of_classes, order.shape[1]
    first, last, at = B * j // PARTS, B * (j + 1) // PARTS, _queue(n, i, j)
    each = _rows_a_share(n, B, drawn.shape[2] - 1)
    lo = first + each * take_number(counter, at)
    if lo >= last:
        return False
    draw(lo, min(last, lo + each), seeds[i, 0], order[i], labels, K, drawn[i % HELD], room)
    take_number(counter, at + 1)
    return True


@njit(**OPTIONS)
def draw_part(n: int, counter: Array, i: int, j: int, order: Array, seeds: Array, of_classes: tuple) -> bool:
    """What is left of part j of minibatch i, and wait for what others have taken of it; False if one never comes."""
    B = order.shape[1]
    rows, each = B * (j + 1) // PARTS - B * j // PARTS, _rows_a_share(n, B, of_classes[2].shape[2] - 1)
    while _draw_share(n, counter, i, j, order, seeds, of_classes):
        pass
    return reaches(counter, _queue(n, i, j) + 1, (rows + each - 1) // each)


@njit(**OPTIONS)
def meet_and_draw(tid: int, n: int, counter: Array, i: int, order: Array, seeds: Array, of_classes: tuple) -> bool:
    """`together`; as long as others are on their way, draw minibatch i, if there is one."""
    meeting = arrive(counter, tid, n)
    for turn in range(PARTS if i < order.shape[0] else 0):
        j = (PARTS * tid // n + turn) % PARTS
        while not all_here(counter, n, meeting) and _draw_share(n, counter, i, j, order, seeds, of_classes):
            pass
    return wait_for(counter, tid, n, meeting)
