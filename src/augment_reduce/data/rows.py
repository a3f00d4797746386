"""What the readers return: rows with one label each, or rows with a set of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

Features: TypeAlias = "sparse.csr_matrix | np.ndarray"
INT32_MAX = 2**31 - 1


def assemble_csr(
    data: list[np.ndarray], indices: list[np.ndarray], counts: list[np.ndarray], n_columns: int
) -> sparse.csr_matrix:
    """A CSR matrix from blocks of rows: values, column indices (ascending in each row), entries per row.

    Indices are int32 where the columns and the number of entries allow it, int64 otherwise. The blocks are
    consumed, so that the peak is the result plus one of its arrays.
    """
    per_row = np.concatenate([np.zeros(1, np.int64), *counts]) if counts else np.zeros(1, np.int64)
    indptr = np.cumsum(per_row, dtype=np.int64)
    small = n_columns <= INT32_MAX and int(indptr[-1]) <= INT32_MAX
    index_dtype = np.int32 if small else np.int64
    flat_data = np.concatenate(data) if data else np.zeros(0, np.float32)
    data.clear()
    flat_indices = np.concatenate(indices).astype(index_dtype, copy=False) if indices else np.zeros(0, index_dtype)
    indices.clear()
    matrix = sparse.csr_matrix(
        (flat_data, flat_indices, indptr.astype(index_dtype, copy=False)), shape=(len(indptr) - 1, n_columns)
    )
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix


@dataclass(frozen=True)
class MultiLabelRows:
    """N rows, each with a set of labels: `X` (N, D) float32 CSR, `labels` (N, K) boolean CSR."""

    X: sparse.csr_matrix
    labels: sparse.csr_matrix
    label_names: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.X.shape[0] != self.labels.shape[0]:
            raise ValueError(
                f"Expected as many rows of labels as of features, but X has {self.X.shape[0]:,} rows and labels "
                f"{self.labels.shape[0]:,}. Build both from the same rows."
            )

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_labels(self) -> int:
        return int(self.labels.shape[1])

    @property
    def labels_per_row(self) -> npt.NDArray[np.int64]:
        return np.diff(self.labels.indptr).astype(np.int64)

    def take(self, rows: npt.NDArray[np.intp]) -> MultiLabelRows:
        """The given rows, in the given order."""
        return MultiLabelRows(self.X[rows], self.labels[rows], self.label_names, self.feature_names)


@dataclass(frozen=True)
class LabelledRows:
    """What `read_rows` returns: `X` (N, D) float32, CSR or dense, and a label `y` per row (None if the file has none).

    - `labels`: for a file with label sets, the whole (N_file, K) boolean CSR; else None.
    - `rows`: for a file with label sets, the row of the file that each example came from; else None.
    - `class_names`: the name of class k, where the file gives one; y then holds the numbers k.
    - `zero_based`: for svmlight, how the feature indices were read; pass it on when reading test data.
    """

    X: Features
    y: np.ndarray | None
    format: str
    labels: sparse.csr_matrix | None = None
    rows: npt.NDArray[np.intp] | None = None
    class_names: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None
    zero_based: bool | None = None

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.X.shape[1])
