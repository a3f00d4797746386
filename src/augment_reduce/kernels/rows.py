"""The rows of features that every kernel reads: the caller's own arrays, never a copy of them.

Kernels take `(X, rows)`: all the data, and which rows make up this minibatch. They may read the arrays
of `X` through a memory map or from read-only memory; nothing here writes to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

BLOCK_OF_ROWS = 1024
NUMBERS_AT_ONCE = 1_000_000  # of dense rows that are looked at


@dataclass(frozen=True)
class SparseRows:
    """CSR: row n has the features `indices[indptr[n]:indptr[n+1]]` with those `values`."""

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    n_features: int

    @property
    def n_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_nonzero(self) -> int:
        return len(self.values)

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
        begin, length = self.indptr[rows], self.indptr[rows + 1] - self.indptr[rows]
        at = np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))
        index, value = np.asarray(self.indices[at]), np.asarray(self.values[at], np.float64)
        known = (index >= 0) & (index < self.n_features)  # others are told of when a step loads them
        index, value = index[known], value[known]
        of_row, n = weights_of(rows, weight)
        share = np.repeat(of_row, length)[known]
        sign, total = (np.bincount(index, share * part, self.n_features) for part in (np.sign(value), value))
        return of_pairs(dot(sign, total), dot(share, np.abs(value)), n)

    def repeats(self, rows: np.ndarray) -> float:
        """How many of these rows have the same features and values, on average."""
        if not len(rows):
            return 1.0
        from ._cpu_alike import number_alike

        return len(rows) / (int(number_alike(self, rows, len(rows)).max()) + 1)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        """In how many rows (of these, each once) every feature is non-zero."""
        counted = self.values != 0
        if rows is not None and len(rows) < self.n_rows:
            taken = np.zeros(self.n_rows, dtype=bool)
            taken[rows] = True
            counted &= np.repeat(taken, np.diff(self.indptr))
        return np.bincount(self.indices[counted], minlength=self.n_features)


@dataclass(frozen=True)
class DenseRows:
    """A plain (N, D) array, one row an observation."""

    values: np.ndarray

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    @property
    def n_features(self) -> int:
        return self.values.shape[1]

    @property
    def n_nonzero(self) -> int:
        return int(np.count_nonzero(self.values))

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.tensor(self.values[rows], dtype=dtype)

    def agreement(self, rows: np.ndarray, weight: np.ndarray | None = None) -> float:
        rows = some_of(rows)
        of_row, n = weights_of(rows, weight)
        sign, total, own = np.zeros(self.n_features), np.zeros(self.n_features), 0.0
        step = max(1, NUMBERS_AT_ONCE // max(1, self.n_features))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            x, share = self.values[rows[part]].astype(np.float64), of_row[part]
            sign, total = (so_far + np.einsum("n,nd->d", share, f) for so_far, f in ((sign, np.sign(x)), (total, x)))
            own += dot(share, np.abs(x).sum(1))
        return of_pairs(dot(sign, total), own, n)

    def repeats(self, rows: np.ndarray) -> float:
        """Not looked at: whoever has every label of a document as an example has sparse rows."""
        return 1.0

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        if rows is None or len(rows) == self.n_rows:
            return np.count_nonzero(self.values, axis=0)
        counts = np.zeros(self.n_features, dtype=np.int64)
        for start in range(0, len(rows), BLOCK_OF_ROWS):  # a few at a time: they are copied
            counts += np.count_nonzero(self.values[rows[start : start + BLOCK_OF_ROWS]], axis=0)
        return counts


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
    """Wrap a dense array or a CSR matrix without copying it."""
    if sp.issparse(X):
        csr = X if X.format == "csr" else X.tocsr()
        check_indptr(csr.indptr, min(len(csr.indices), len(csr.data)))
        return SparseRows(csr.indptr, csr.indices, csr.data, csr.shape[1])
    return DenseRows(X)


def check_indptr(indptr: np.ndarray, n_entries: int) -> None:
    """Every row lies within the entries. scipy looks at the first and the last only."""
    if indptr[0] < 0 or indptr[-1] > n_entries or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(
            f"Expected indptr of the CSR matrix to rise from 0 to at most {n_entries}, its entries, but it does not. "
            "Build the matrix anew; its check_format(full_check=True) says more."
        )
