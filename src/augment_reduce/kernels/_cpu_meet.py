"""Threads that meet: a counter that all of them see, and helpers that stay awake between two calls.

A thread that sleeps takes some 50 microseconds to wake, and the system may then put it on the core of whoever woke it,
or move the two around: steps of a millisecond take up to half as long again. One that looks at a number while it waits,
giving way to others, is there at once, and stays where it is. A helper without work goes to sleep after all, after
some two milliseconds.

The system may still have put two of them on one core, where they take turns, often while another core has nothing to
do; left to itself it parts them after a tenth of a second. So each says on which core it is when it comes to a meeting,
and who waits on the core where another was last moves over. Not in a process that has been told to give way (nice), or
that has a schedule of its own; nor with AUGMENT_REDUCE_STAY=1 in the environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils

from ._cpu_lanes import I32, I64, _data, intrinsic
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit

PATIENCE = 2_000  # looks before the core is offered to others
AWAKE = 6_000  # looks before a helper goes to sleep
ALONE = -1  # what a thread returns when another has left
ARRIVED, LEFT = 0, 1  # places of a team's counter: how often threads came to a meeting; whether one is gone
MAY_MOVE, MOVES = 2, 3  # whether threads may move to other cores; how often one did
LINE = 16  # numbers that two cores had better not write at once: two cache lines
QUEUES = LINE  # of each thread, at most
SEEN = LINE  # from there on: the core on which each thread was last, plus 1
LOOK_AROUND = 16  # meetings from one at which threads may move to the next
MOST_CORES = 1024  # as many as the system's own type has room for
ASKED, ANSWERED = 0, 1  # places of a helper's


@intrinsic
def take_number(typing_context: Any, counter: Any, i: Any) -> tuple:
    """counter[i], which is raised by one for all threads to see; what was written before it is seen too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", at, I64(1), "seq_cst")

    return types.int64(counter, types.int64), codegen


@intrinsic
def now(typing_context: Any, counter: Any, i: Any) -> tuple:
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
def seconds(typing_context: Any) -> tuple:
    """A clock that nobody sets; zero where there is none."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.DoubleType()
        if os.name != "posix":
            return number(0.0)
        time_of = cgutils.alloca_once(builder, ir.LiteralStructType([I64, I64]))
        kind = ir.FunctionType(I32, [I32, cgutils.voidptr_t])
        call = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(call, [I32(time.CLOCK_MONOTONIC), builder.bitcast(time_of, cgutils.voidptr_t)])
        whole, nano = (builder.sitofp(builder.extract_value(builder.load(time_of), i), number) for i in range(2))
        return builder.fadd(whole, builder.fmul(nano, number(1e-9)))

    return types.float64(), codegen


@intrinsic
def _core(typing_context: Any) -> tuple:
    """The core that this thread is on; -1 where the system does not say."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "linux":
            return I64(-1)
        kind = ir.FunctionType(I32, [])
        return builder.sext(builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_getcpu"), []), I64)

    return types.int64(), codegen


def _about_cores(function: str) -> Any:
    """Code that calls a function of the system with this thread's set of cores, args[0], a bit for each."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "linux":
            return I64(-1)
        cores = builder.bitcast(_data(context, builder, signature.args[0], args[0]), cgutils.voidptr_t)
        kind = ir.FunctionType(I32, [I32, I64, cgutils.voidptr_t])
        call = cgutils.get_or_insert_function(builder.module, kind, function)
        return builder.sext(builder.call(call, [I32(0), I64(MOST_CORES // 8), cores]), I64)

    return codegen


@intrinsic
def _get_cores(typing_context: Any, cores: Any) -> tuple:
    """Fill in where this thread may run; negative: the system does not say."""
    return types.int64(cores), _about_cores("sched_getaffinity")


@intrinsic
def _set_cores(typing_context: Any, cores: Any) -> tuple:
    """Say where this thread may run. If that is not where it is, Linux moves it before this returns."""
    return types.int64(cores), _about_cores("sched_setaffinity")


@njit(**OPTIONS)
def move_over(counter: Array, tid: int, n: int) -> int:
    """To a core where no other thread of the team was last, if one of them was on this one; returns that core, or -1.

    From there it may go wherever it might before; what the system had taken from all its threads just then, cores of a
    container say, is not given back to this one."""
    here, went, crowded = _core(), -1, False
    allowed = np.zeros(MOST_CORES // 8, np.uint8)
    if here < 0 or _get_cores(allowed) < 0:
        return went
    free = allowed.copy()
    for other in range(n):
        core = now(counter, SEEN + other) - 1
        if other != tid and 0 <= core < MOST_CORES:
            crowded |= core == here
            free[core >> 3] &= np.uint8(255 - (1 << (core & 7)))
    if crowded and free.any() and _set_cores(free) >= 0:
        went = _core()
        take_number(counter, MOVES)
        counter[SEEN + tid] = went + 1  # or the next to look would think that it is still here, and follow
        if _set_cores(allowed) < 0:  # all of these were taken away meanwhile
            allowed[:] = 255
            _set_cores(allowed)
    return went


@njit(**OPTIONS)
def arrive(counter: Array, tid: int, n: int) -> int:
    """Say that this thread has come to the next meeting; returns which one that is. The counter grows by n at each."""
    core = _core() + 1
    if counter[SEEN + tid] != core:
        counter[SEEN + tid] = core
    return take_number(counter, ARRIVED) // n + 1


@njit(**OPTIONS)
def all_here(counter: Array, n: int, meeting: int) -> bool:
    return now(counter, ARRIVED) >= meeting * n


@njit(**OPTIONS)
def has_left(counter: Array) -> bool:
    """Whether there is a thread that will never come."""
    return now(counter, LEFT) != 0


@njit(**OPTIONS)
def wait_for(counter: Array, tid: int, n: int, meeting: int) -> bool:
    """Wait until all n threads are here; False if one of them will never come."""
    looks = 0
    while not all_here(counter, n, meeting):
        if has_left(counter):
            return False
        looks += 1
        if looks == PATIENCE and meeting % LOOK_AROUND == 0 and counter[MAY_MOVE] != 0:
            move_over(counter, tid, n)
        elif looks > PATIENCE:
            _give_way()
    return True


@njit(**OPTIONS)
def together(counter: Array, tid: int, n: int) -> bool:
    """Come to the next meeting, and wait for the others; False if one of them will never come."""
    return wait_for(counter, tid, n, arrive(counter, tid, n))


@njit(**OPTIONS)
def queue_of(tid: int, n: int, i: int) -> int:
    """The place in the counter of a team of n that says how many shares were taken from thread tid's queue i."""
    return SEEN + (n + LINE - 1) // LINE * LINE + tid * QUEUES + i


def new_counter(n: int) -> Array:
    """What a team meets at, with up to QUEUES queues for each thread."""
    counter = np.zeros(first_queue(n) + n * QUEUES, np.int64)
    counter[MAY_MOVE] = may_move()
    return counter


def first_queue(n: int) -> int:
    """Where the queues begin."""
    return int(queue_of.py_func(0, n, 0))  # as Python: not worth compiling for


def may_move() -> bool:
    """Whether threads of this process had better be side by side. Forced from one core to another, a process that gives
    way to others may have to wait until these are through with it."""
    if sys.platform != "linux" or os.environ.get("AUGMENT_REDUCE_STAY", "0") not in ("", "0"):
        return False
    with contextlib.suppress(OSError):
        return os.getpriority(os.PRIO_PROCESS, 0) <= 0 and os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


@cached_njit(**OPTIONS)
def changes(counter: Array, i: int, old: int, looks: int) -> bool:
    """Whether counter[i] is, or within so many looks becomes, something else than `old`."""
    for look in range(looks):
        if now(counter, i) != old:
            return True
        if look > PATIENCE:
            _give_way()
    return now(counter, i) != old


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
