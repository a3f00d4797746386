"""Which rows have the same features: what is computed for one of them is true of all."""

from __future__ import annotations

import numpy as np

from ._cpu_batch import read_only
from ._cpu_math import _bits_of_number
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit
from .rows import SparseRows

NO_FEATURES = 0  # the hash of none


@cached_njit(**OPTIONS)
def hash_rows(indptr: Array, indices: Array, values: Array, rows: Array, out: Array) -> None:
    """out[i]: 64 bits of the features that rows[i] has, and of their values, in whatever order."""
    for i in range(rows.shape[0]):
        h = np.uint64(NO_FEATURES)
        for q in range(indptr[rows[i]], indptr[rows[i] + 1]):
            if values[q] == 0:
                continue
            z = np.uint64(indices[q]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
                _bits_of_number(np.float64(values[q]))
            )
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            h += z ^ (z >> np.uint64(31))
        out[i] = h


@cached_njit(**OPTIONS)
def _differ(indptr: Array, indices: Array, values: Array, rows: Array, others: Array, out: Array) -> None:
    """out[i]: whether rows[i] and others[i] are stored differently, be it in their order alone."""
    for i in range(rows.shape[0]):
        a, b = indptr[rows[i]], indptr[others[i]]
        n = indptr[rows[i] + 1] - a
        out[i] = n != indptr[others[i] + 1] - b
        for q in range(0 if out[i] else n):
            if indices[a + q] != indices[b + q] or values[a + q] != values[b + q]:
                out[i] = True
                break


def number_alike(X: SparseRows, rows: Array, most: int) -> Array:
    """(len(rows),) numbers from 0: rows of the same number, at most `most`, have the same features and values.

    Found by a hash, and looked at: two rows whose hashes collide, or that differ in their order, have numbers of their
    own. O(nnz).
    """
    csr = tuple(read_only(a) for a in (X.indptr, X.indices, X.values))
    rows = np.ascontiguousarray(rows, np.int64)
    hashes = np.empty(len(rows), np.uint64)
    hash_rows(*csr, rows, hashes)
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    number, other = number.reshape(-1), np.empty(len(rows), np.bool_)
    _differ(*csr, rows, rows[first[number]], other)
    number[other] = len(first) + np.arange(np.count_nonzero(other))
    order = np.argsort(number, kind="stable")
    ordered = number[order]
    place = np.arange(len(rows)) - np.searchsorted(ordered, ordered)  # in its group
    number[order] = np.cumsum(place % most == 0) - 1
    return number
