"""Threads that meet: a counter that all of them see, and helpers that stay awake between two calls.

A thread that sleeps takes some 50 microseconds to wake, and the system may then put it on the core of whoever woke it,
or move the two around: steps of a millisecond take up to half as long again. One that looks at a number while it waits,
giving way to others, is there at once, and stays where it is. After some two milliseconds it goes to sleep after all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils

from ._cpu_lanes import I32, I64, _data, intrinsic
from ._cpu_types import OPTIONS, Array

PATIENCE = 2_000  # looks before the core is offered to others
POLITE = 400  # offers, some 200 microseconds, before a thread that waits for its team naps
AWAKE = 6_000  # looks before a helper goes to sleep
ARRIVED, LEFT = 0, 1  # places of a team's counter: how often threads came to a meeting; whether one is gone
NAPS, QUEUES = 2, 3  # whether waiting threads may nap; and, from there on, how many shares of a job were taken
ASKED, ANSWERED = 0, 1  # places of a helper's


@intrinsic
def take_number(typing_context: Any, counter: Any, i: Any) -> tuple:
    """counter[i], which is raised by one for all threads to see; what was written before it is seen too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", at, I64(1), "seq_cst")

    return types.int64(counter, types.int64), codegen


@intrinsic
def _now(typing_context: Any, counter: Any, i: Any) -> tuple:
    """counter[i] as it is now; what was written before it is seen."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load_atomic(at, "seq_cst", 8)

    return types.int64(counter, types.int64), codegen


@intrinsic
def _give_way(typing_context: Any) -> tuple:
    """Let others have the core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _nap(typing_context: Any) -> tuple:
    """Sleep for as short as can be, some 50 microseconds. Whoever wakes is put on a core that is free."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(I32, [I32])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "usleep"), [I32(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(**OPTIONS)
def together(counter: Array, n: int) -> bool:
    """Wait until all n threads are here; False if one of them will never come. The counter grows by n at each place.

    Who waits long may be on the core of whom it waits for, where giving way can fail for milliseconds: it naps where
    steps are short. Long ones are better off without: the system parts threads that both want to run, sooner or later,
    but not one that wants to and one that mostly sleeps.
    """
    everyone = (take_number(counter, ARRIVED) + n) // n * n
    looks = 0
    while _now(counter, ARRIVED) < everyone:
        if _now(counter, LEFT) != 0:
            return False
        looks += 1
        if looks > PATIENCE + POLITE and counter[NAPS] != 0:
            _nap()
        elif looks > PATIENCE:
            _give_way()
    return True


def new_counter(n_queues: int, naps: bool) -> Array:
    """What a team meets at, in cache lines of its own."""
    counter = np.zeros(max(16, QUEUES + n_queues), np.int64)
    counter[NAPS] = naps
    return counter


@njit(cache=True, **OPTIONS)
def changes(counter: Array, i: int, old: int, looks: int) -> bool:
    """Whether counter[i] is, or within so many looks becomes, something else than `old`."""
    for look in range(looks):
        if _now(counter, i) != old:
            return True
        if look > PATIENCE:
            _give_way()
    return _now(counter, i) != old


class Helper:
    """A thread that does one job after the other for one caller, who waits for each.

    An interrupt may come between any two lines of the caller's: whatever it leaves undone, `wait` makes up for.
    """

    def __init__(self) -> None:
        self.counter = np.zeros(16, np.int64)  # a cache line for itself
        self.job: Callable[[], int] | None = None
        self.found: int | BaseException = 0
        self.asleep, self.bell = False, threading.Lock()
        self.bell.acquire()
        threading.Thread(target=self._attend, name="augment-reduce-helper", daemon=True).start()

    def start(self, job: Callable[[], int]) -> None:
        self.job = job
        self.counter[ASKED] += 1
        self._ring()

    def wait(self) -> int | BaseException:
        """What the last job returned, or raised; at once where there was none."""
        while self.counter[ANSWERED] != self.counter[ASKED]:
            self._ring()
            changes(self.counter, ANSWERED, int(self.counter[ANSWERED]), AWAKE)
        found, self.found = self.found, 0  # an error holds on to all that its frames held
        return found

    def _ring(self) -> None:
        if self.asleep and self.bell.locked():
            self.bell.release()

    def _attend(self) -> None:
        while True:
            answered = int(self.counter[ANSWERED])
            while not changes(self.counter, ASKED, answered, AWAKE):
                self.asleep = True
                if self.counter[ASKED] == answered:  # who asks after this look sees that we are asleep, and rings
                    self.bell.acquire()
                self.asleep = False
            asked = int(self.counter[ASKED])
            self._do()
            self.counter[ANSWERED] = asked

    def _do(self) -> None:
        """The job, of which nothing is kept: it may hold gigabytes."""
        job, self.job = self.job, None
        try:
            self.found = job() if job is not None else 0
        except BaseException as error:
            self.found = error


HELPERS: list[Helper] = []


def helpers(n: int) -> list[Helper]:
    """n of them; for whoever holds the lock of the teams."""
    while len(HELPERS) < n:
        HELPERS.append(Helper())
    return HELPERS[:n]


if hasattr(os, "register_at_fork"):  # threads do not survive a fork; the child starts its own
    os.register_at_fork(after_in_child=HELPERS.clear)
