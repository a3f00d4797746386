"""Scratch memory that outlives a step, and threads that split one.

Scratch belongs to the calling thread, so two fits may run at once. It is sized by the minibatch (its
non-zeros, its pairs, the features it touches) and by D, and is allocated once, not once a step.

Threads are a plain pool around kernels that release the GIL, each given a range of classes or rows and
its own accumulators. Numba's `prange` would do the same work, but its layers spin for milliseconds when
cores are shared with others (OpenMP) or end the process when two threads call at once (workqueue).
The ranges never cut through a sum, so results do not depend on how many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cache import cached_njit
from ..threads import get_num_threads, pool

LINE = 64  # bytes of a cache line
FAR = 4096  # bytes from what one thread writes to what another does: cores fetch ahead of what they go through
WORTH_A_THREAD = 60_000  # multiply-adds, about as long as waking a thread takes


class OutOfRange(IndexError, ValueError):
    """A row or class that does not exist."""


def zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """From the beginning of a cache line on, so that no sixteen numbers of float32 lie in two; and far from whatever is
    handed out after it."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(n + LINE + FAR, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + n].view(dtype).reshape(shape)


class Workspace(threading.local):
    """Named arrays of one thread. Accumulators are zero between calls: whoever writes to them clears them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Give the memory back."""
        self.arrays: dict[tuple[str, Any], np.ndarray] = {}
        self.buffers: dict[tuple, Any] = {}
        self.batch: Any = None  # the minibatch last scored, which the push that follows needs again
        self.groups: Any = None  # and its pairs in the order of their classes
        self.views: Any = None  # the parameters last pushed into, as arrays
        self.rules: Any = None  # the optimiser's steps that come next, in numbers

    def array(self, name: str, size: int, dtype: Any) -> np.ndarray:
        """`size` numbers, zero when first handed out, then as their last user left them."""
        key = (name, dtype)
        found = self.arrays.get(key)
        if found is None or len(found) < size:
            found = self.arrays[key] = zeros(size + size // 4, dtype)
        return found[:size]


WORK = Workspace()


def split(n: int, work: Callable[[], np.ndarray]) -> list[int]:
    """Cut points 0 = b_0 < ... < b_m = n of about equal `work` (n,), with m at most get_num_threads()."""
    threads = min(get_num_threads(), n)
    if threads < 2:
        return [0, n]
    total = np.cumsum(work())
    threads = max(1, min(threads, int(total[-1]) // WORTH_A_THREAD))
    cuts = np.searchsorted(total, total[-1] / threads * np.arange(1, threads)) + 1
    return np.unique([0, *np.minimum(cuts, n), n]).tolist()


@cached_njit(nogil=True)
def _same(a: np.ndarray, b: np.ndarray) -> bool:
    different = 0
    for i in range(a.shape[0]):
        different += a[i] != b[i]
    return different == 0


@cached_njit(nogil=True)
def all_below(a: np.ndarray, n: int) -> bool:
    """Whether every number of `a` is in range(n)."""
    bad = 0
    for i in range(a.shape[0]):
        bad += (a[i] < 0) | (a[i] >= n)
    return bad == 0


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two contiguous arrays of int64 hold the same."""
    return a.shape == b.shape and _same(a.reshape(-1), b.reshape(-1))


def _plain(args: tuple) -> list:
    return [tuple(a) if isinstance(a, tuple) else a for a in args]


def run(kernel: Callable[..., Any], cuts: Sequence[int], args: tuple, scratch: Sequence[tuple] = ()) -> None:
    """kernel(lo, hi, *args, *scratch[i]) for the i-th range, the first on this thread; without cuts, kernel(*args).

    Named tuples go as plain ones: Numba's disk cache would look for their classes before it asks whether it
    is out of date, and fail where a newer version has moved one.
    """
    plain = _plain(args)
    if not cuts:
        kernel(*plain)
        return
    try:
        if len(cuts) == 2:
            kernel(*cuts, *plain, *_plain(scratch[0]))
            return
        ranges = [(cuts[i], cuts[i + 1], *plain, *_plain(own)) for i, own in enumerate(scratch)]
        waiting = [pool().submit(kernel, *each) for each in ranges[1:]]
        kernel(*ranges[0])
        for future in waiting:
            future.result()
    except BaseException:  # also an interrupt: threads that go on must not write where the next call does
        WORK.forget()
        raise
