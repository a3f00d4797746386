"""Training in a separate thread, so that an exception in the caller's thread does not interrupt a step.

An exception may be raised in the caller's thread at any time: Ctrl-C, a SIGTERM handler that raises, a notebook's stop
button. The caller is then waiting for the training thread, requests a stop, and raises after the current call of steps
has ended; the model can be resumed exactly. A second exception, at least FORCE_AFTER seconds later, is raised in the
training thread immediately: a model that was interrupted within a step is marked (`Fitted.torn`).
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

FORCE_AFTER = 1.0  # seconds after an exception before another one is raised in the training thread
COMPARED = 64  # steps between exchanges of stop requests over ranks
POLL_SECONDS = 0.05  # seconds between polls for exceptions without a signal

StopAsked = Callable[[], bool]


class Job:
    """A function of `StopAsked`, run once in another thread."""

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
        """True for the first caller: the thread that runs the job, or the caller that cancels it before it has
        started."""
        return self.claimed.acquire(blocking=False)

    def run(self) -> None:
        if not self.claim():
            return
        self.thread = threading.get_ident()
        try:
            torch.set_num_threads(self.torch_threads)  # as in the caller's thread, not as when this one was started
            with num_threads(self.n_threads):
                self.context.run(self._work)
        except BaseException as error:
            self.error = error
        while self.abortable:
            try:
                with self.lock:
                    self.abortable = False
                for _ in range(100):  # a pending exception is raised here, not in the next job
                    pass
            except BaseException as error:
                self.error = self.error or error
        self.done = True
        self.ended.release()

    def _work(self) -> None:
        work, self.work = self.work, None  # release the data when it has ended
        assert work is not None
        work(lambda: self.stop)

    def wait(self) -> None:
        """Wait until it is done. Not by Thread.join, which an exception can leave in a wrong state."""
        while not self.done:
            if os.getpid() != self.process:
                raise RuntimeError("The thread that waits for this fit forked; the fit goes on in the parent process.")
            self.ended.acquire(timeout=POLL_SECONDS)  # an exception may lose the acquired lock, but not `done`

    def abort(self, kind: type[BaseException]) -> None:
        with self.lock:
            if self.abortable and self.thread:
                raise_in(self.thread, kind)


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another thread, as soon as it runs Python code. (Cancelling one, by NULL, would slow down
    the interpreter permanently: Python 3.11 keeps checking for it.)"""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class Worker:
    """A thread that runs jobs sequentially; reused, since the kernels' scratch buffers are per thread."""

    idle: list[Worker] = []  # noqa: RUF012 (of the class)

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Job] = SimpleQueue()
        self.thread = threading.Thread(target=self._run_jobs, name="augment-reduce-training", daemon=True)
        self.thread.start()

    def _run_jobs(self) -> None:
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
    """Whether a stop was requested on any rank, the same on all; exchanged every COMPARED calls."""
    calls, stopped = itertools.count(1), False

    def asked() -> bool:
        nonlocal stopped
        if not stopped and next(calls) % COMPARED == 0:
            stopped = partition.any(stop_asked(), "whether to stop")
        return stopped

    return asked


def run_whole(work: Callable[[StopAsked], None]) -> None:
    """Run work(stop_asked) in another thread. An exception in this thread requests a stop, and is raised afterwards."""
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
    """Wait regardless of further exceptions; those after FORCE_AFTER seconds are raised in the training thread."""
    since = time.monotonic()
    while True:
        try:
            return job.wait()
        except BaseException as again:
            job.stop = True
            if time.monotonic() - since >= FORCE_AFTER:
                since = time.monotonic()
                job.abort(type(again))
