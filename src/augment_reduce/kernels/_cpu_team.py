"""The threads that run `take_by_classes`, `take_by_rows` or `take_biases` together, and their scratch.

Handing single kernels to a pool costs some 50 microseconds each time, as much as the kernels of a small minibatch take;
so every thread takes whole steps, several in one call, and a wait is a look at a number that the others raise.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._cpu_ahead import HELD, room_to_draw
from ._cpu_biases import take_biases
from ._cpu_by_classes import take_by_classes
from ._cpu_by_rows import take_by_rows
from ._cpu_classes import sorting
from ._cpu_meet import ALONE, LEFT, first_queue, helpers, new_counter
from ._cpu_quarters import PARTS
from ._cpu_types import Array, Arrays
from ._cpu_work import zeros
from .threads import get_num_threads

APART = 32  # numbers, that two threads do not write to the same line
UNEVEN = 0.01  # of a thread's time: less is not worth moving classes to another core
A_WHILE = 0.05  # seconds of work that are judged together: a step has some classes more, or fewer, by chance
ROWS, BIASES, GROUPS = 0, 1, 2  # row by row; no features, and very many classes; class by class
PLACES = threading.Lock()  # one team at a time: they share the helpers, and each waits for all of its own


def _free_places() -> None:
    global PLACES
    PLACES = threading.Lock()


if hasattr(os, "register_at_fork"):  # whoever held it is not in the child
    os.register_at_fork(after_in_child=_free_places)


def _cores() -> int:
    """Those that this process may use: of a container, as many as its share of time is worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(int(quota) / int(period))))  # "max": no limit, and not a number
    return cores


CORES = _cores()  # asked once: the system takes longer to say than a small step


def most_threads() -> int:
    """A team's threads run at once or not at all: no more than there are cores."""
    return min(get_num_threads(), CORES) if os.name == "posix" else 1  # elsewhere nobody says how to give way


def n_compiled() -> int:
    """How often the functions that take steps have been compiled, or found on disk, so far."""
    return sum(len(take.overloads) for take in (take_by_classes, take_by_rows, take_biases))  # signatures: 0.1 ms


class Taken(NamedTuple):
    """Steps: how many, the bounds by row of those that were asked for them, and how often the floor acted in each."""

    n: int
    bounds: Array
    hits: Array


class Team:
    """n threads (one is a team, too) and their scratch, for one way through minibatches of one size."""

    def __init__(self, n: int, B: int, S: int, dtype: np.dtype, held: tuple[Array, ...]) -> None:
        """`held` are the local parameters."""
        self.n, self.counter = n, new_counter(n)
        self.drawn = np.empty((HELD, B, 1 + S), np.uint32)
        kept = tuple(np.empty(B, each.dtype) for each in held)
        self.scored = (np.empty((B, 1 + S), dtype), np.empty((B, 1 + S), dtype), kept)
        self.rooms = [room_to_draw(S) for _ in range(n)]

    def run(self, M: int, n_bounds: int, arguments: tuple, few: list[tuple]) -> Taken:
        """M steps, so many of them asked for their bounds; this thread is one of the team, and holds PLACES where there
        are others. `few` is scratch for each."""
        B, (others, counter) = len(self.scored[0]), (helpers(self.n - 1), self.counter)
        counter[first_queue(self.n) :] = 0
        out = np.empty((n_bounds, B), self.scored[0].dtype), np.zeros((self.n, M), np.int64)
        try:
            for tid, other in enumerate(others, start=1):
                other.start(partial(self._part, counter, tid, arguments, few, out))
            found = [self._part(counter, 0, arguments, few, out), *(other.wait() for other in others)]
            if any(not isinstance(taken, int) or taken == ALONE for taken in found):
                raise next(
                    (error for error in found if isinstance(error, BaseException)), RuntimeError("A thread left.")
                )
        except BaseException:  # also an interrupt: nobody must be left waiting, nor meet whoever comes next
            counter[LEFT] = 1
            self.counter = new_counter(self.n)
            for other in others:
                other.wait()
            raise
        return Taken(min(taken for taken in found if isinstance(taken, int)), out[0], out[1].sum(0))

    def _part(self, counter: Array, tid: int, arguments: tuple, few: list[tuple], out: tuple) -> int:
        try:
            return self._take(tid, counter, arguments, few, out)
        except BaseException:
            counter[LEFT] = 1
            raise

    def _take(self, tid: int, counter: Array, arguments: tuple, few: list[tuple], out: tuple) -> int:
        raise TypeError(f"{type(self).__name__} does not say how to take steps.")


class TeamByClasses(Team):
    """Class by class: every thread has a stretch of the classes, whose ends follow the threads' speeds."""

    def __init__(
        self, n: int, B: int, S: int, K: int, dtype: np.dtype, held: tuple[Array, ...], labels: Array, with_prior: bool
    ) -> None:
        """`labels` are some of those to come."""
        super().__init__(n, B, S, dtype, held)
        pairs, most = B * (1 + S), min(K, B * (1 + S))
        of_part = -(-B // n) * (1 + S)
        room = (-(-of_part // APART) + 1) * APART  # a stretch of sixteen that begins in it ends in it
        self.sorting, self.cuts = sorting(of_part, K), fair_cuts(n, K, S, labels)
        lists = -(-(min(K, of_part) + 1) // APART) * APART
        self.parts = (
            np.empty((HELD, n, 2, room), np.uint32), np.empty((HELD, n, room), np.uint32),
            np.empty((HELD, n, lists), np.int64), np.empty((HELD, n, lists), np.int64),
            np.zeros((HELD, n, APART), np.int64), np.empty((HELD, n, room if with_prior and n > 1 else 0), dtype),
        )  # fmt: skip
        handed = n if n > 1 else 0
        by_class = np.empty((handed, room), dtype), np.empty((handed, room), dtype)
        self.well, self.busy = np.ones(n, np.bool_), np.zeros((n, APART))
        self.common = (self.drawn[0], self.scored, self.parts, by_class, self.well, self.busy)
        self.own = [self._scratch(of_part, pairs if n > 1 else 0, most, dtype) for _ in range(n)]

    def _scratch(self, of_part: int, pairs: int, most: int, dtype: np.dtype) -> tuple:
        """One thread's: to sort its part, the pairs of its classes, and sums of their biases."""
        bits, passes = self.sorting
        keys, count = zeros((2, of_part if passes > 1 else 0), np.uint32), zeros((1 << bits) + 1, np.uint32)
        classes, start = zeros(most + 1, np.int64), zeros(most + 1, np.int64)
        place, row = zeros(pairs + APART, np.uint32), zeros(pairs + APART, np.uint32)  # written sixteen at a time
        mine = (classes, start, place, row, zeros((self.n, 2), np.int64))
        return zeros(APART, dtype), (keys, count), mine, (zeros(most, dtype), zeros(most, dtype))

    def run(self, M: int, n_bounds: int, arguments: tuple, few: list[tuple]) -> Taken:
        self.well[:] = True
        taken = super().run(M, n_bounds, arguments, few)
        if self.busy[:, 0].mean() > A_WHILE:
            self.cuts, self.busy[:] = even_cuts(self.cuts, self.busy[:, 0]), 0.0
        return taken

    def _take(self, tid: int, counter: Array, arguments: tuple, few: list[tuple], out: tuple) -> int:
        own = (few[tid], self.rooms[tid], *self.own[tid])
        return take_by_classes(tid, self.n, counter, self.cuts, self.sorting, *arguments, self.common, own, *out)


def fair_cuts(n: int, K: int, S: int, labels: Array) -> Array:
    """Where n stretches of K classes begin and end that have as many pairs each, if every row has its label, like those
    given, and S other classes, each as likely."""
    ordered, cuts = np.sort(labels), [0]
    for t in range(1, n):
        wanted, low, high = (1 + S) * t / n, cuts[-1], K
        while low < high:
            c = (low + high) // 2
            enough = S * c / K + np.searchsorted(ordered, c) / len(ordered) >= wanted
            low, high = (low, c) if enough else (c + 1, high)
        cuts.append(low)
    return np.array([*cuts, K])


def even_cuts(cuts: Array, seconds: Array) -> Array:
    """The same stretches; or, if one thread spent more seconds on its own than others on theirs (its core is slow, or a
    stranger was on it), half way to where all would have spent as many."""
    total = seconds.sum()
    if len(seconds) < 2 or seconds.max() <= (1 + UNEVEN) * total / len(seconds):
        return cuts
    even = np.interp(np.arange(1, len(seconds)) * total / len(seconds), np.cumsum([0, *seconds]), cuts)
    return np.array([0, *np.rint((cuts[1:-1] + even) / 2).astype(np.int64), cuts[-1]])


class TeamOfBiases(Team):
    """No features, and very many classes."""

    def __init__(self, n: int, B: int, S: int, K: int, dtype: np.dtype, held: tuple[Array, ...]) -> None:
        super().__init__(n, B, S, dtype, held)
        most = min(K, B * (1 + S))
        sums = np.zeros(K, dtype), np.zeros(K, dtype), np.zeros(K, np.uint8)
        summed = (np.zeros(most, dtype), np.zeros(most, dtype), sums, np.empty(most + 1, np.int64))
        self.common = (self.drawn, self.scored, np.empty(n, np.bool_), summed)

    def _take(self, tid: int, counter: Array, arguments: tuple, few: list[tuple], out: tuple) -> int:
        plan, data, *rest = arguments
        order, _, _, _, *differing = plan
        own = (few[tid], self.rooms[tid])
        return take_biases(tid, self.n, counter, (order, *differing), data[:2], *rest, self.common, own, *out)


class TeamByRows(Team):
    """Row by row: every thread but the first has weights of its own, like `arrays`."""

    def __init__(
        self, n: int, B: int, S: int, line: tuple[int, ...], dtype: np.dtype, held: tuple[Array, ...], arrays: Arrays
    ) -> None:
        super().__init__(n, B, S, dtype, held)
        kept = 0 if line[1] > 0 else 3  # weights and their states, which nobody moves where no row has features
        self.copies = [[*arrays[:kept], *(zeros(a.shape, dtype) for a in arrays[kept:6])] for _ in range(n - 1)]
        self.lines = [zeros((PARTS // n, line[-1]), dtype) for _ in range(n)]
        self.common, self.line = (self.drawn, self.scored, zeros((2, n, n, line[-1] if n > 1 else 0), dtype)), line

    def _take(self, tid: int, counter: Array, arguments: tuple, few: list[tuple], out: tuple) -> int:
        plan, data, arrays, *rest = arguments
        order, places, _, _, *differing = plan
        mine = arrays if tid == 0 else (*self.copies[tid - 1], *arrays[6:])
        own = (mine, self.lines[tid], self.rooms[tid])
        return take_by_rows(
            tid, self.n, counter, self.line, (order, places, *differing), data[:3], arrays, *rest, self.common, own,
            *out,
        )  # fmt: skip
