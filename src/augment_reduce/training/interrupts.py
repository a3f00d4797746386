"""Training in a thread of its own, so that what interrupts the caller falls between two steps, not into one.

An exception may reach the caller's thread at any moment: Ctrl-C, a SIGTERM handler that raises, a tool that stops a
notebook's cell. There, it finds the caller waiting. The training thread is asked to stop, ends its call of steps, and
leaves a model that goes on exactly; then the caller gets its exception. Whoever insists (another exception, INSIST
seconds later or more) has it raised in the training thread, too, wherever that is: a model that was left in the middle
of a step is marked (`Fitted.torn`).
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from ..kernels.threads import get_num_threads, num_threads
from ..sharding import Partition

INSIST = 1.0  # seconds after an exception from which another one is not just impatience
COMPARED = 64  # steps, after which ranks tell each other whether one was asked to stop
LOOK_UP = 0.05  # seconds between looks for exceptions that no signal tells of

StopAsked = Callable[[], bool]


class Job:
    """A function of `StopAsked`, to be run once on another thread."""

    def __init__(self, work: Callable[[StopAsked], None]) -> None:
        self.work: Callable[[StopAsked], None] | None = work
        self.context, self.process = contextvars.copy_context(), os.getpid()
        self.n_threads, self.torch_threads = get_num_threads(), torch.get_num_threads()
        self.stop, self.done = False, False
        self.error: BaseException | None = None
        self.thread, self.abortable, self.lock = 0, True, threading.Lock()
        self.claimed, self.ended = _thread.allocate_lock(), _thread.allocate_lock()
        self.ended.acquire()

    def claim(self) -> bool:
        """For who gets it first: the thread that runs it, or the caller who gives it up before it has begun."""
        return self.claimed.acquire(blocking=False)

    def run(self) -> None:
        if not self.claim():
            return
        self.thread = threading.get_ident()
        try:
            torch.set_num_threads(self.torch_threads)  # as in the caller's thread, not as when this one began
            with num_threads(self.n_threads):
                self.context.run(self._work)
        except BaseException as error:
            self.error = error
        while self.abortable:
            try:
                with self.lock:
                    self.abortable = False
                for _ in range(100):  # one that has been asked for is raised here, not when the thread is used again
                    pass
            except BaseException as error:
                self.error = self.error or error
        self.done = True
        self.ended.release()

    def _work(self) -> None:
        work, self.work = self.work, None  # when it has ended nobody holds the data any more
        assert work is not None
        work(lambda: self.stop)

    def wait(self) -> None:
        """Until it is done. Not by Thread.join, which an exception can leave believing that the thread has ended."""
        while not self.done:
            if os.getpid() != self.process:
                raise RuntimeError("The thread that waits for this fit forked; the fit goes on in the parent process.")
            self.ended.acquire(timeout=LOOK_UP)  # what it has acquired may be lost on the way; `done` is not

    def abort(self, kind: type[BaseException]) -> None:
        with self.lock:
            if self.abortable and self.thread:
                raise_in(self.thread, kind)


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """An exception in another thread, as soon as it runs Python. (To withdraw one, by NULL, would slow the interpreter
    down for good: Python 3.11 goes on looking for it.)"""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class Worker:
    """A thread that runs one job after the other; kept, since the kernels' scratch memory belongs to a thread."""

    idle: list[Worker] = []  # noqa: RUF012 (of the class)

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Job] = SimpleQueue()
        self.thread = threading.Thread(target=self._attend, name="augment-reduce-training", daemon=True)
        self.thread.start()

    def _attend(self) -> None:
        while True:
            job = self.inbox.get()
            job.run()
            del job  # it may hold gigabytes
            Worker.idle.append(self)

    @classmethod
    def any(cls) -> Worker:
        with contextlib.suppress(IndexError):
            return cls.idle.pop()
        return cls()


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=Worker.idle.clear)


def asked_anywhere(stop_asked: StopAsked, partition: Partition) -> StopAsked:
    """Whether any rank was asked to stop, the same on all: they compare every COMPARED calls."""
    calls, stopped = itertools.count(1), False

    def asked() -> bool:
        nonlocal stopped
        if not stopped and next(calls) % COMPARED == 0:
            stopped = partition.any(stop_asked(), "whether to stop")
        return stopped

    return asked


def run_whole(work: Callable[[StopAsked], None]) -> None:
    """work(stop_asked) on another thread. An exception in this one asks it to stop, and is raised when it has."""
    job = Job(work)
    try:
        Worker.any().inbox.put(job)
        job.wait()
    except BaseException as first:
        job.stop = True
        if not job.claim() and os.getpid() == job.process:
            _wait_for_the_end(job)
        raise first from job.error
    if job.error is not None:
        raise job.error


def _wait_for_the_end(job: Job) -> None:
    """However many exceptions come; those that insist are passed on."""
    since = time.monotonic()
    while True:
        try:
            return job.wait()
        except BaseException as again:
            job.stop = True
            if time.monotonic() - since >= INSIST:
                since = time.monotonic()
                job.abort(type(again))
