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

    def some(self, rows: np.ndarray) -> sp.csr_matrix:
        matrix = sp.csr_matrix(
            (self.values, self.indices, self.indptr), shape=(self.n_rows, self.n_features), copy=False
        )
        return matrix[rows]

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        """The rows as a (B, D) tensor: for the reference kernels and for tests, never for training."""
        return torch.tensor(self.some(rows).toarray(), dtype=dtype)

    def agreement(self, rows: np.ndarray, weight: np.ndarray | None = None) -> float:
        """sum_d E[sign x_d] E[x_d]: what a step that moves the weights of one row by 1, each the way its feature
        points, does to the score of another, on average. Of at most ten thousand rows."""
        rows, of_row = some_of(rows), weights_of(some_of(rows), weight)
        x = self.some(rows)
        known = (x.indices >= 0) & (x.indices < self.n_features)  # others are told of when a step loads them
        at, value = x.indices[known], x.data[known].astype(np.float64)
        share = np.repeat(of_row, np.diff(x.indptr))[known]
        sign, total = (np.bincount(at, share * part, self.n_features) for part in (np.sign(value), value))
        return float(sign @ total)

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
        rows, of_row = some_of(rows), weights_of(some_of(rows), weight)
        sign, total = np.zeros(self.n_features), np.zeros(self.n_features)
        for start in range(0, len(rows), BLOCK_OF_ROWS):
            part = slice(start, start + BLOCK_OF_ROWS)
            x = self.values[rows[part]].astype(np.float64)
            sign, total = sign + of_row[part] @ np.sign(x), total + of_row[part] @ x
        return float(sign @ total)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        if rows is None or len(rows) == self.n_rows:
            return np.count_nonzero(self.values, axis=0)
        counts = np.zeros(self.n_features, dtype=np.int64)
        for start in range(0, len(rows), BLOCK_OF_ROWS):  # a few at a time: they are copied
            counts += np.count_nonzero(self.values[rows[start : start + BLOCK_OF_ROWS]], axis=0)
        return counts


def some_of(rows: np.ndarray) -> np.ndarray:
    """Ten thousand of them, evenly."""
    return rows[np.linspace(0, len(rows) - 1, 10_000).astype(np.int64)] if len(rows) > 10_000 else rows


def weights_of(rows: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """What each row counts for, one in all."""
    of_row = np.ones(len(rows)) if weight is None else weight[rows].astype(np.float64)
    return of_row / of_row.sum()


Rows = SparseRows | DenseRows


def as_rows(X: Any) -> Rows:
    """Wrap a dense array or a CSR matrix without copying it."""
    if sp.issparse(X):
        csr = X if X.format == "csr" else X.tocsr()
        return SparseRows(csr.indptr, csr.indices, csr.data, csr.shape[1])
    return DenseRows(X)
