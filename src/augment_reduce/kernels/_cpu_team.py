"""The threads that run `_cpu_step.take_steps`, or `_cpu_by_rows.take_by_rows`, together, and their scratch.

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

import numba
import numpy as np

from ._cpu_ahead import HELD, room_to_draw
from ._cpu_by_rows import take_by_rows
from ._cpu_meet import ALONE, LEFT, first_queue, helpers, new_counter
from ._cpu_quarters import PARTS
from ._cpu_step import APART, BIASES, GROUPS, SHARES, take_steps
from ._cpu_types import Array, Arrays
from ._cpu_work import zeros

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
    return min(numba.get_num_threads(), CORES) if os.name == "posix" else 1  # elsewhere nobody says how to give way


def n_compiled() -> int:
    """How often the functions that take steps have been compiled, or found on disk, so far."""
    return len(take_steps.signatures) + len(take_by_rows.signatures)


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
        self.psi = np.empty(B * (1 + S) + (n + 1) * APART, dtype)  # with room for what nobody needs
        psi = self.psi[: B * (1 + S)].reshape(B, 1 + S)
        self.scored = (psi, np.empty_like(psi), kept)
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
    """Class by class, or biases alone: every thread works on the same weights."""

    def __init__(
        self, n: int, how: int, B: int, S: int, K: int, sorting: tuple[int, int], dtype: np.dtype,
        held: tuple[Array, ...],
    ) -> None:  # fmt: skip
        super().__init__(n, B, S, dtype, held)
        pairs, most = B * (1 + S), min(K, B * (1 + S))
        sorted_, k = (pairs if how == GROUPS else 0), (K if how == BIASES else 0)
        self.grouped = [
            (
                np.empty((2, sorted_), np.uint32), np.empty((2, sorted_), np.uint32), np.empty(sorted_, np.uint32),
                np.empty((1 << sorting[0]) + 1, np.uint32), np.empty(most + 1, np.int64),
                np.empty(most + 1, np.int64), np.zeros(n * SHARES + 1, np.int64), np.zeros(2, np.int64),
            )
            for _ in range(n)
        ]  # fmt: skip
        in_line = sorted_ if n > 1 else 0
        scores = (self.psi, np.empty(in_line, dtype), np.arange(in_line, dtype=np.uint32))
        sums = np.zeros(k, dtype), np.zeros(k, dtype), np.zeros(k, np.uint8)
        biases = np.zeros(most, dtype), np.zeros(most, dtype)
        summed = (*biases, sums, np.empty(most + 1, np.int64))
        self.common = (self.drawn, self.scored, scores, np.empty(n, np.bool_), summed)
        self.way, self.sinks = (how, sorting), np.empty((n, 64), dtype)

    def _take(self, tid: int, counter: Array, arguments: tuple, few: list[tuple], out: tuple) -> int:
        own = (few[tid], self.rooms[tid], self.sinks[tid], self.grouped[tid])
        return take_steps(tid, self.n, counter, *self.way, *arguments, self.common, own, *out)


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
