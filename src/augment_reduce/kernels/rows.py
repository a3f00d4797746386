"""The rows of features that every kernel reads: the caller's own arrays, never a copy of them.

Kernels take `(X, rows)`: all the data, and which rows make up this minibatch. They may read the arrays
of `X` through a memory map or from read-only memory; nothing here writes to them. Whoever goes through many rows does
so by `parts` and `loaded`: of rows that stay on disk (`MappedRows`) only a part is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

BLOCK_OF_ROWS = 1024
NUMBERS_AT_ONCE = 1_000_000  # of dense rows that are looked at
ENTRIES_AT_ONCE, ROWS_AT_ONCE = 1 << 18, 1 << 16  # of a part of sparse rows


@dataclass(frozen=True)
class SparseRows:
    """CSR: row n has the features `indices[indptr[n]:indptr[n+1]]` with those `values`."""

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    n_features: int

    mapped: ClassVar[bool] = False  # whether rows stay on disk

    @property
    def n_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_nonzero(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype:
        """Of the values as they are loaded."""
        return self.values.dtype

    def loaded(self, rows: np.ndarray) -> tuple[SparseRows, np.ndarray]:
        """Rows in memory that hold these, and where these are among them."""
        return self, rows

    def parts(self, rows: np.ndarray) -> Iterator[slice]:
        """Slices of `rows`, each of rows that may be loaded together."""
        yield slice(0, len(rows))

    def largest(self) -> float:
        """The largest absolute value."""
        return float(max(self.values.max(initial=0.0), -self.values.min(initial=0.0)))

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        """The rows as a (B, D) tensor: for the reference kernels and for tests, never for training."""
        matrix = sp.csr_matrix(
            (self.values, self.indices, self.indptr), shape=(self.n_rows, self.n_features), copy=False
        )
        return torch.tensor(matrix[rows].toarray(), dtype=dtype)

    def agreement(self, rows: np.ndarray, weight: np.ndarray | None = None) -> float:
        """E[sign(x_n) . x_m] over pairs of different rows: what a step that moves the weights of one by 1, each the way
        its feature points, does to the score of the other. Of at most ten thousand rows."""
        rows = some_of(rows)
        of_row, n = weights_of(rows, weight)
        sign, total, own = np.zeros(self.n_features), np.zeros(self.n_features), 0.0
        for part in self.parts(rows):
            X, at = self.loaded(rows[part])
            index, value, length = X.entries(at)
            known = (index >= 0) & (index < self.n_features)  # others are told of when a step loads them
            index, value = index[known], value[known].astype(np.float64)
            share = np.repeat(of_row[part], length)[known]
            sign += np.bincount(index, share * np.sign(value), self.n_features)
            total += np.bincount(index, share * value, self.n_features)
            own += dot(share, np.abs(value))
        return of_pairs(dot(sign, total), own, n)

    def entries(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Features and values of these rows, side by side, and how many each has."""
        begin = self.indptr[rows].astype(np.int64)
        length = self.indptr[rows + 1].astype(np.int64) - begin
        at: Any = np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))
        return np.asarray(self.indices[at]), np.asarray(self.values[at]), length

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        """In how many rows (of these, each once) every feature is non-zero."""
        counted = self.values != 0
        if rows is not None and len(rows) < self.n_rows:
            taken = np.zeros(self.n_rows, dtype=bool)
            taken[rows] = True
            counted &= np.repeat(taken, np.diff(self.indptr))
        return np.bincount(self.indices[counted], minlength=self.n_features)


@dataclass(frozen=True)
class MappedRows(SparseRows):
    """CSR rows that stay where they are, in a memory-mapped file, and are loaded a minibatch or a part at a time.

    What a fit does to rows in memory beforehand is done to these whenever they are loaded: values are divided by their
    feature's `scale`, and if rows are not `canonical` (features in ascending order, each once) repeats are summed.
    """

    mapped: ClassVar[bool] = True
    scale: np.ndarray | None = None
    canonical: bool = True
    peak: float = field(default=0.0, compare=False)  # the largest absolute value in the file

    @classmethod
    def of(cls, csr: Any) -> MappedRows:
        """Of a CSR matrix whose arrays are memory-mapped; looks through it once, in parts, and refuses what no fit can
        use."""
        X = cls(csr.indptr, csr.indices, csr.data, csr.shape[1])
        canonical, peak = True, 0.0
        for part in entry_parts(X.indptr, 0, X.n_rows):
            ends = X.indptr[part.start : part.stop + 1].astype(np.int64)
            index, value = X.indices[ends[0] : ends[-1]], X.values[ends[0] : ends[-1]]
            canonical = canonical and ascend(index, ends - ends[0])
            here = max(float(value.max(initial=0)), -float(value.min(initial=0)))
            low, high = int(index.min(initial=0)), int(index.max(initial=0))
            if not (here < np.inf and 0 <= low <= high < max(1, X.n_features)) or (len(index) and not X.n_features):
                _refuse_part(part.start, ends, index, value, X.n_features)
            peak = max(peak, here)
        return replace(X, canonical=canonical, peak=peak)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype.name if self.values.dtype.name in ("float32", "float64") else "float64")

    def stored_for(self, dtype: np.dtype) -> bool:
        """Whether a kernel can read rows where they are stored: all that is left to do is to divide by the scale."""
        as_wanted = self.values.dtype == dtype and self.values.dtype.isnative
        return self.canonical and as_wanted and self.indices.dtype in (np.int32, np.int64)

    def loaded(self, rows: np.ndarray) -> tuple[SparseRows, np.ndarray]:
        rows = np.asarray(rows, np.int64)
        if len(rows) and (rows[1:] == rows[:-1] + 1).all():  # as they are stored
            begin, end = int(self.indptr[rows[0]]), int(self.indptr[rows[-1] + 1])
            index, value = self.indices[begin:end], self.values[begin:end]
            length = np.diff(self.indptr[rows[0] : rows[-1] + 2].astype(np.int64))
        else:
            index, value, length = self.entries(rows)
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        small = self.n_features < 2**31 and indptr[-1] < 2**31  # of one dtype, as in memory: kernels are compiled once
        index, indptr = (np.asarray(a).astype(np.int32 if small else np.int64) for a in (index, indptr))
        value = np.asarray(value).astype(self.dtype)
        if not self.canonical:
            csr = sp.csr_matrix((value, index, indptr), shape=(len(rows), self.n_features))
            csr.sum_duplicates()
            indptr, index, value = csr.indptr, csr.indices, csr.data
        if self.scale is not None:
            with np.errstate(over="ignore"):
                value = (value / self.scale[index]).astype(self.dtype)
        return SparseRows(indptr, index, value, self.n_features), np.arange(len(rows))

    def parts(self, rows: np.ndarray) -> Iterator[slice]:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = np.asarray(rows[first : first + ROWS_AT_ONCE])
            length = self.indptr[some + 1].astype(np.int64) - self.indptr[some].astype(np.int64)
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
            for part in entry_parts(ends, 0, len(some)):
                yield slice(first + part.start, first + part.stop)

    def largest(self) -> float:
        if self.scale is None and self.canonical:
            return self.peak
        every = (slice(part.start, part.stop) for part in entry_parts(self.indptr, 0, self.n_rows))
        return max((self.loaded(np.arange(part.start, part.stop))[0].largest() for part in every), default=0.0)

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        X, at = self.loaded(rows)
        return X.dense(at, dtype)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        rows, counts = np.arange(self.n_rows) if rows is None else rows, np.zeros(self.n_features, np.int64)
        for part in self.parts(rows):
            counts += self.loaded(rows[part])[0].feature_counts()
        return counts

    def in_memory(self) -> SparseRows:
        """All rows at once: for small data alone."""
        X, _ = self.loaded(np.arange(self.n_rows))
        return X


def entry_parts(indptr: np.ndarray, first: int, last: int) -> Iterator[slice]:
    """Slices of rows first..last-1: of ENTRIES_AT_ONCE entries, or one row, and of ROWS_AT_ONCE rows at most."""
    while first < last:
        ends = indptr[first : min(last, first + ROWS_AT_ONCE) + 1].astype(np.int64)
        n = max(1, int(np.searchsorted(ends, ends[0] + ENTRIES_AT_ONCE, side="right")) - 1)
        yield slice(first, first + n)
        first += n


def ascend(index: np.ndarray, ends: np.ndarray) -> bool:
    """Whether the features of every row ascend, each once; a row ends where the next begins."""
    if len(index) < 2:
        return True
    rises = index[1:] > index[:-1]
    rises[ends[(ends > 0) & (ends < len(index))] - 1] = True  # from one row to the next
    return bool(rises.all())


def _refuse_part(first: int, ends: np.ndarray, index: np.ndarray, value: np.ndarray, n_features: int) -> None:
    wrong = np.flatnonzero(~np.isfinite(value)) if value.dtype.kind == "f" else np.empty(0, np.int64)
    if len(wrong):
        row = first + int(np.searchsorted(ends - ends[0], wrong[0], side="right")) - 1
        kind = "NaN" if np.isnan(value[wrong[0]]) else "infinity"
        raise ValueError(
            f"Input X contains {kind}: in the memory-mapped row {row}. Expected finite features; replace or leave out "
            "missing values, and write the file again."
        )
    wrong = np.flatnonzero((index < 0) | (index >= n_features))
    row = first + int(np.searchsorted(ends - ends[0], wrong[0], side="right")) - 1
    raise ValueError(
        f"Expected feature indices in [0, n_features={n_features}), found {index[wrong[0]]} in the memory-mapped row "
        f"{row}. Check the shape that the CSR matrix was made with."
    )


def is_mapped(X: Any) -> bool:
    """Whether the entries of a CSR matrix are in a memory-mapped file."""
    if not (sp.issparse(X) and X.format == "csr"):
        return False
    return in_file(X.data)


def in_file(array: Any) -> bool:
    """Whether an array is a memory map, or a view of one."""
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


@dataclass(frozen=True)
class DenseRows:
    """A plain (N, D) array, one row an observation."""

    values: np.ndarray

    mapped: ClassVar[bool] = False

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    @property
    def n_features(self) -> int:
        return self.values.shape[1]

    @property
    def n_nonzero(self) -> int:
        return int(np.count_nonzero(self.values))

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def largest(self) -> float:
        return float(max(self.values.max(initial=0.0), -self.values.min(initial=0.0)))

    def block(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows."""
        return self.values[rows]

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.tensor(self.block(rows), dtype=dtype)

    def agreement(self, rows: np.ndarray, weight: np.ndarray | None = None) -> float:
        rows = some_of(rows)
        of_row, n = weights_of(rows, weight)
        sign, total, own = np.zeros(self.n_features), np.zeros(self.n_features), 0.0
        step = max(1, NUMBERS_AT_ONCE // max(1, self.n_features))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            x, share = self.block(rows[part]).astype(np.float64), of_row[part]
            sign, total = (so_far + np.einsum("n,nd->d", share, f) for so_far, f in ((sign, np.sign(x)), (total, x)))
            own += dot(share, np.abs(x).sum(1))
        return of_pairs(dot(sign, total), own, n)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        if rows is None or len(rows) == self.n_rows:
            return np.count_nonzero(self.values, axis=0)
        counts = np.zeros(self.n_features, dtype=np.int64)
        for start in range(0, len(rows), BLOCK_OF_ROWS):  # a few at a time: they are copied
            counts += np.count_nonzero(self.values[rows[start : start + BLOCK_OF_ROWS]], axis=0)
        return counts


@dataclass(frozen=True)
class MappedDenseRows(DenseRows):
    """Dense rows that stay where they are, in a memory-mapped file, and are read a minibatch or a part at a time.

    What scaling does to rows in memory beforehand is done to these whenever they are read: (x - centre) / scale.
    """

    mapped: ClassVar[bool] = True
    centre: np.ndarray | None = None
    scale: np.ndarray | None = None

    def block(self, rows: np.ndarray) -> np.ndarray:
        values = np.asarray(self.values[rows])
        if self.scale is None or self.centre is None:
            return values
        with np.errstate(over="ignore", invalid="ignore"):  # differences in float64, as `FeatureScaling.of_block`
            return ((values.astype(np.float64) - self.centre) / self.scale).astype(self.dtype)

    def parts(self, rows: np.ndarray) -> Iterator[slice]:
        """Slices of `rows`, each of rows that may be read together: scaled, they take three copies for a moment."""
        step = max(1, NUMBERS_AT_ONCE // (4 * max(1, self.n_features)))
        return (slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step))

    def _blocks(self) -> Iterator[np.ndarray]:
        for part in self.parts(np.arange(self.n_rows)):
            yield self.block(np.arange(part.start, part.stop))

    @cached_property
    def n_nonzero(self) -> int:
        return sum(int(np.count_nonzero(block)) for block in self._blocks())

    def largest(self) -> float:
        return max((DenseRows(block).largest() for block in self._blocks()), default=0.0)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        rows, counts = np.arange(self.n_rows) if rows is None else rows, np.zeros(self.n_features, dtype=np.int64)
        for part in self.parts(rows):
            counts += np.count_nonzero(self.block(rows[part]), axis=0)
        return counts

    def in_memory(self) -> DenseRows:
        """All rows at once: for small data alone."""
        return DenseRows(self.block(np.arange(self.n_rows)))


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Not by `@`: OpenBLAS has a second thread for it, which then looks for more to do for a tenth of a second, on a
    core that training needs."""
    return float(np.einsum("i,i->", a, b))


def some_of(rows: np.ndarray) -> np.ndarray:
    """Ten thousand of them, evenly."""
    return rows[np.linspace(0, len(rows) - 1, 10_000).astype(np.int64)] if len(rows) > 10_000 else rows


def weights_of(rows: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, float]:
    """What each row counts for, one in all, and how many there are: weights that are whole numbers are repeats, of
    small ones it is Kish's number, (sum w)^2 / sum w^2."""
    of_row = np.ones(len(rows)) if weight is None else weight[rows].astype(np.float64)
    total, share = float(of_row.sum()), of_row / of_row.max(initial=0.0)  # of the largest: squares have room
    return of_row / total, max(total, float(share.sum()) ** 2 / float((share**2).sum()))


def of_pairs(of_all: float, of_itself: float, n: float) -> float:
    """The mean over pairs of different ones of n rows, from those over all pairs and over each with itself."""
    return (n * of_all - of_itself) / (n - 1.0) if n > 1.0 + 1e-9 else 0.0


Rows = SparseRows | DenseRows


def as_rows(X: Any) -> Rows:
    """Wrap a dense array or a CSR matrix, in memory or memory-mapped, without copying it."""
    if sp.issparse(X):
        csr = X if X.format == "csr" else X.tocsr()
        check_indptr(csr.indptr, min(len(csr.indices), len(csr.data)))
        if is_mapped(csr):
            return MappedRows.of(csr)
        return SparseRows(csr.indptr, csr.indices, csr.data, csr.shape[1])
    if in_file(X) and X.ndim == 2 and X.flags.c_contiguous:
        return MappedDenseRows(X)
    return DenseRows(X)


def check_indptr(indptr: np.ndarray, n_entries: int) -> None:
    """Every row lies within the entries. scipy looks at the first and the last only."""
    if indptr[0] < 0 or indptr[-1] > n_entries or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(
            f"Expected indptr of the CSR matrix to rise from 0 to at most {n_entries}, its entries, but it does not. "
            "Build the matrix anew; its check_format(full_check=True) says more."
        )
