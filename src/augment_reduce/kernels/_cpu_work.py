"""Scratch memory that outlives a step, and threads that split one.

Scratch belongs to the calling thread, so two fits may run at once. It is sized by the minibatch (its
non-zeros, its pairs, the features it touches) and by D, and is allocated once, not once a step.

Threads are a plain pool around kernels that release the GIL, each given a range of classes or rows and
its own accumulators. Numba's `prange` would do the same work, but its layers spin for milliseconds when
cores are shared with others (OpenMP) or end the process when two threads call at once (workqueue).
The ranges never cut through a sum, so results do not depend on how many there are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np

WORTH_A_THREAD = 40_000  # multiply-adds, about as long as waking a thread takes


class Workspace(threading.local):
    """Named arrays of one thread. Accumulators are zero between calls: whoever writes to them clears them."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, str], np.ndarray] = {}
        self.batch: Any = None  # the minibatch last scored, which the push that follows needs again
        self.groups: Any = None  # and its pairs in the order of their classes

    def array(self, name: str, size: int, dtype: Any) -> np.ndarray:
        """`size` numbers, zero when first handed out, then as their last user left them."""
        key = (name, np.dtype(dtype).char)
        found = self.arrays.get(key)
        if found is None or len(found) < size:
            found = self.arrays[key] = np.zeros(size + size // 4, dtype=dtype)
        return found[:size]

    def forget(self) -> None:
        """Give the memory back."""
        self.arrays, self.batch, self.groups = {}, None, None


WORK = Workspace()
_POOL: ThreadPoolExecutor | None = None
_POOL_LOCK = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    global _POOL
    with _POOL_LOCK:
        if _POOL is None:
            _POOL = ThreadPoolExecutor(numba.config.NUMBA_NUM_THREADS, thread_name_prefix="augment-reduce")
        return _POOL


def _forget_pool() -> None:
    global _POOL, _POOL_LOCK
    _POOL, _POOL_LOCK = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # threads do not survive a fork; the child starts its own
    os.register_at_fork(after_in_child=_forget_pool)


def split(work: np.ndarray) -> list[int]:
    """Cut points 0 = b_0 < ... < b_n = len(work) of about equal work, n at most numba.get_num_threads()."""
    n = len(work)
    threads = min(numba.get_num_threads(), n)
    if threads < 2:
        return [0, n]
    total = np.cumsum(work)
    threads = max(1, min(threads, int(total[-1]) // WORTH_A_THREAD))
    cuts = np.searchsorted(total, total[-1] / threads * np.arange(1, threads)) + 1
    return np.unique(np.concatenate([[0], np.minimum(cuts, n), [n]])).tolist()


def run(kernel: Callable[..., Any], cuts: list[int], args: tuple, scratch: Sequence[tuple]) -> None:
    """kernel(lo, hi, *args, *scratch[i]) for the i-th range, the first on this thread."""
    waiting = [
        _pool().submit(kernel, cuts[i], cuts[i + 1], *args, *scratch[i]) for i in range(1, len(cuts) - 1)
    ]
    kernel(cuts[0], cuts[1], *args, *scratch[0])
    for future in waiting:
        future.result()
