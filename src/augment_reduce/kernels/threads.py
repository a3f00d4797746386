"""How many threads work for one caller, and what a fork leaves of them.

The threads are a pool of our own. torch's (OpenMP) are not used: training and prediction run with one torch thread, so
that results do not depend on their number, and so that a forked child, in which they do not exist any more, does not
wait for them. Nor are Numba's, which need a threading layer that may not be installed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import torch
from numba.np.ufunc import parallel

_OF_THREAD = threading.local()
_POOL: ThreadPoolExecutor | None = None
_POOL_LOCK = threading.Lock()


def pool() -> ThreadPoolExecutor:
    """The threads for kernels. What runs there must not wait for it."""
    global _POOL
    with _POOL_LOCK:
        if _POOL is None:
            _POOL = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="augment-reduce")
        return _POOL


def _after_fork() -> None:
    """In the child: threads of the parent are gone. torch would wait for its own for ever, and so has one from now on.

    Who is sure that the parent had not used torch's threads may call `torch.set_num_threads` in the child.
    """
    global _POOL, _POOL_LOCK
    _POOL, _POOL_LOCK = None, threading.Lock()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def default_threads() -> int:
    """NUMBA_NUM_THREADS, by default the number of cores."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def get_num_threads() -> int:
    """Of this thread: those of `num_threads`; else those of `numba.set_num_threads`, or all.

    Numba is only asked if it has been asked before: the first time, it starts a threading layer.
    """
    here = getattr(_OF_THREAD, "number", None)
    if here is not None:
        return int(here)
    return int(numba.get_num_threads()) if getattr(parallel, "_is_initialized", False) else default_threads()


@contextlib.contextmanager
def num_threads(n: int | None) -> Iterator[None]:
    """n threads for kernels that are called from this thread. None: as many as outside."""
    before = getattr(_OF_THREAD, "number", None)
    _OF_THREAD.number = before if n is None else n
    try:
        yield
    finally:
        _OF_THREAD.number = before


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """One torch thread inside, the caller's own number again outside; in a child that was forked inside, one."""
    before, process = torch.get_num_threads(), os.getpid()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before if os.getpid() == process else 1)


def for_each(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """function(item) for all items, on `get_num_threads()` threads, each with one for its kernels and one of torch.

    An error ends it: that of the first item that has one, whatever the number of threads.
    """
    items = list(items)
    with one_torch_thread():
        if min(get_num_threads(), len(items)) > 1:
            _share_out(function, items, min(get_num_threads(), len(items)))
        else:
            for item in items:
                function(item)


def _share_out(function: Callable[[Any], None], items: list[Any], n: int) -> None:
    waiting, errors = iter(enumerate(items)), list[tuple[int, BaseException]]()

    def work() -> None:
        if torch.get_num_threads() != 1:  # every thread has a number of its own
            torch.set_num_threads(1)
        with num_threads(1):
            for place, item in waiting:
                if any(failed < place for failed, _ in errors):
                    return
                try:
                    function(item)
                except BaseException as error:
                    errors.append((place, error))

    others = [pool().submit(work) for _ in range(n - 1)]
    try:
        work()
    finally:
        list(waiting)  # an interrupt: nothing more is begun, and nobody writes to arrays that were given up
        for other in others:
            if not other.cancel():
                other.result()
    if errors:
        raise min(errors, key=lambda found: found[0])[1]
