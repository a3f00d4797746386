"""Which rows come when: shuffled, and dealt out into minibatches."""

from __future__ import annotations

import numpy as np

from ..cache import cached_njit
from .classes import uniform
from .types import OPTIONS, Array

AT_ONCE = 64  # places of a shuffle that are drawn before its swaps


@cached_njit(**OPTIONS)
def shuffle(seed: int, a: Array) -> None:
    """Fisher and Yates: the last is swapped with one of all, the one before it with one of those that are left, ..."""
    n, to = a.shape[0], np.empty(AT_ONCE, np.int64)
    for first in range(n - 1, 0, -AT_ONCE):
        m = min(AT_ONCE, first)
        for t in range(m):  # apart from the swaps, so that it is done in vectors
            i = first - t
            to[t] = min(int(uniform(seed, n - 1 - i) * (i + 1)), i)
        for t in range(m):
            i, j = first - t, to[t]
            a[i], a[j] = a[j], a[i]


@cached_njit(**OPTIONS)
def deal(seed: int, rows: Array, B: int, out: Array) -> None:
    """All rows in minibatches of B, one after the other in `out`, the last of them shorter if need be: every way to do
    that is as likely. Within a minibatch they stand as they stand in `rows`."""
    n, turns = rows.shape[0], np.empty(rows.shape[0], np.int32)
    at = np.empty((n + B - 1) // B, np.int64)
    for m in range(at.shape[0]):
        at[m] = m * B
        turns[m * B : min(n, (m + 1) * B)] = m
    shuffle(seed, turns)
    for i in range(n):  # or its lines would be fetched when they are written to, far apart
        out[i] = rows[i]
    for i in range(n):
        m = turns[i]
        out[at[m]] = rows[i]
        at[m] += 1
