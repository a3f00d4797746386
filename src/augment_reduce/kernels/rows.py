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

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        """The rows as a (B, D) tensor: for the reference kernels and for tests, never for training."""
        matrix = sp.csr_matrix(
            (self.values, self.indices, self.indptr), shape=(self.n_rows, self.n_features), copy=False
        )
        return torch.tensor(matrix[rows].toarray(), dtype=dtype)

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

    def dense(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.tensor(self.values[rows], dtype=dtype)

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        if rows is None or len(rows) == self.n_rows:
            return np.count_nonzero(self.values, axis=0)
        counts = np.zeros(self.n_features, dtype=np.int64)
        for start in range(0, len(rows), BLOCK_OF_ROWS):  # a few at a time: they are copied
            counts += np.count_nonzero(self.values[rows[start : start + BLOCK_OF_ROWS]], axis=0)
        return counts


Rows = SparseRows | DenseRows


def as_rows(X: Any) -> Rows:
    """Wrap a dense array or a CSR matrix without copying it."""
    if sp.issparse(X):
        csr = X if X.format == "csr" else X.tocsr()
        return SparseRows(csr.indptr, csr.indices, csr.data, csr.shape[1])
    return DenseRows(X)
