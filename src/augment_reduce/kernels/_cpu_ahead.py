"""Classes of minibatches: drawn when they are needed, or before that, by threads that would have to wait for others."""

from __future__ import annotations

import numpy as np
from numba import njit

from ._cpu_classes import GOLDEN, floyd, splitmix, table_size
from ._cpu_gradients import send_for_local
from ._cpu_meet import all_here, arrive, wait_for
from ._cpu_types import OPTIONS, Array
from ._cpu_work import zeros

AT_A_TIME = 2048  # numbers drawn before their classes are: they stay in the first cache
HELD = 2  # minibatches whose pairs are held: one that is sorted, or pushed, while the other is drawn
A_SHARE, MOST_ROWS = 512, 32  # classes drawn between two looks at who has come; and rows
OLDEST = 2**31  # rows after which the table is cleared


def room_to_draw(S: int) -> tuple[Array, Array, Array, Array]:
    """One thread's scratch: the table of `floyd`, how many rows it has seen, numbers, labels."""
    m = max(8, AT_A_TIME // max(1, S))
    return zeros(table_size(S), np.int64), zeros(1, np.int64), zeros((m, S), np.float64), zeros(m, np.int64)


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
def draw_on(done: int, until: int, seed: int, rows: Array, of_classes: tuple, pairs: Array, room: tuple) -> int:
    """Rows from `done` on, until there; returns how far it went. Their local parameters are sent for: drawing needs
    little memory, and their turn is next."""
    labels, n_classes, state = of_classes
    send_for_local(done, until, rows, state)
    draw(done, until, seed, rows, labels, n_classes, pairs, room)
    return max(done, until)


@njit(**OPTIONS)
def meet_and_draw(
    tid: int, n: int, counter: Array, done: int, until: int, seed: int, rows: Array, of_classes: tuple, pairs: Array,
    room: tuple,
) -> int:  # fmt: skip
    """`together`; as long as others are on their way, draw the classes of own rows to come, from `done` on. Returns how
    far that went, or -1 if one of the others will never come.

    So a thread that is held up, by a stranger on its core say, costs the others nothing as long as they have something
    to draw. They leave its own rows to it: what one core has drawn another is slow to read.
    """
    meeting, a_share = arrive(counter, tid, n), max(1, min(MOST_ROWS, A_SHARE // pairs.shape[1]))
    while done < until and not all_here(counter, n, meeting):
        done = draw_on(done, min(until, done + a_share), seed, rows, of_classes, pairs, room)
    return done if wait_for(counter, tid, n, meeting) else -1
