"""Which rows have the same features: what is computed for one of them is true of all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..cache import cached_njit
from ..rows import MappedRows, SparseRows
from .batch import read_only
from .math import _bits_of_number
from .types import OPTIONS, Array

NONE = -1  # number of a row that is in no group
NO_FEATURES = 0  # the hash of none
MOST_SORTED = 1 << 18  # memory-mapped rows whose hashes are sorted; of more only neighbours are compared


class RowGroups(NamedTuple):
    """Groups of duplicate rows of X, numbered from 0; each array has a number for every row of X.

    - `stored` (N,): rows of one number are stored alike, entry by entry, so that a kernel may read one for the other;
    - `equal` (N,): rows of one number are the same vector, in whatever order their entries are stored and whether or
      not zeros are among them (up to a collision of 64-bit hashes).

    NONE: a row that was not asked about; in `equal` also a row without features.
    """

    stored: np.ndarray
    equal: np.ndarray

    def mean_size(self) -> float:
        """Rows of a group of `stored`, on average; 1 where there are no rows."""
        n_rows = np.count_nonzero(self.stored != NONE)
        return n_rows / (int(self.stored.max()) + 1) if n_rows else 1.0


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


def group_rows(X: SparseRows, rows: Array) -> RowGroups:
    """The groups of duplicates among these rows, found by a hash of each row. O(nnz) and a sort of the hashes.

    Rows of one hash are compared with the first of them: one that is stored differently, be it for a collision, has a
    number of its own in `stored`. Of very many memory-mapped rows duplicates are found where they follow one another,
    as they do where every label of a document is a row: in 8 bytes a row, not 70.
    """
    rows = np.ascontiguousarray(rows, np.int64)
    if isinstance(X, MappedRows) and len(rows) > MOST_SORTED:
        return neighbours_alike(X, rows)
    hashes, differs = np.empty(len(rows), np.uint64), np.empty(len(rows), np.bool_)
    for part in X.parts(rows):
        own, at = X.loaded(rows[part])
        hash_rows(*arrays_of(own), at, hashes[part])
    _, first, of_hash = np.unique(hashes, return_index=True, return_inverse=True)
    of_hash = of_hash.reshape(-1)
    differ(X, rows, rows[first[of_hash]], differs)
    number = of_hash.copy()
    number[differs] = len(first) + np.arange(np.count_nonzero(differs))
    stored, equal = np.full((2, X.n_rows), NONE)
    stored[rows] = number
    equal[rows] = np.where(hashes == NO_FEATURES, NONE, of_hash)
    return RowGroups(stored, equal)


def arrays_of(X: SparseRows) -> tuple[Array, Array, Array]:
    return read_only(X.indptr), read_only(X.indices), read_only(X.values)


def differ(X: SparseRows, rows: Array, others: Array, out: Array) -> None:
    """out[i]: whether rows[i] and others[i] are stored differently."""
    if not isinstance(X, MappedRows):
        _differ(*arrays_of(X), rows, others, out)
        return
    out[:] = False
    again = np.flatnonzero(rows != others)
    for part in X.parts(rows[again]):
        both = np.concatenate([rows[again[part]], others[again[part]]])
        own, at = X.loaded(both)
        found = np.empty(len(both) // 2, np.bool_)
        _differ(*arrays_of(own), at[: len(found)], at[len(found) :], found)
        out[again[part]] = found


def neighbours_alike(X: MappedRows, rows: Array) -> RowGroups:
    """Groups of rows that follow one another in `rows`, which are in ascending order."""
    stored, n, last = np.full(X.n_rows, NONE), -1, None
    for part in X.parts(rows):
        some = rows[part] if last is None else np.append(last, rows[part])
        own, at = X.loaded(some)
        new = np.empty(len(at) - 1, np.bool_)
        _differ(*arrays_of(own), at[1:], at[:-1], new)
        new = np.append(True, new) if last is None else new
        stored[rows[part]] = n + np.cumsum(new)
        n, last = n + int(new.sum()), rows[part][-1:]
    empty = rows[X.indptr[rows] == X.indptr[rows + 1]]
    if not len(empty):
        return RowGroups(stored, stored)
    equal = stored.copy()
    equal[empty] = NONE
    return RowGroups(stored, equal)


def split_groups(number: Array, most: int) -> Array:
    """Numbers from 0 of parts of at most `most` rows: group by group, in the order of their numbers."""
    order = np.argsort(number, kind="stable")
    ordered = number[order]
    place = np.arange(len(number)) - np.searchsorted(ordered, ordered)  # in its group
    part = np.empty(len(number), np.int64)
    part[order] = np.cumsum(place % most == 0) - 1
    return part
