"""Validation of memory-mapped rows: scikit-learn's checks of arrays, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data

from ..kernels.rows import is_mapped
from .labels import Coded


def rows_and_labels(X: Any, y: Any) -> tuple[Any, Any]:
    """X and y, both taken from X if y is not given. Encoded labels stay encoded."""
    if y is not None or hasattr(X, "shape") or not (hasattr(X, "X") and hasattr(X, "y")):
        return X, y
    coded = getattr(X, "coded", None) if is_mapped(X.X) else None
    return X.X, X.y if coded is None else coded


def checked(estimator: Any, X: Any, y: Any, *, reset: bool) -> Any:
    """The labels of memory-mapped rows, as a one-dimensional array."""
    check_features(estimator, X, reset=reset)
    if isinstance(y, Coded):
        check_consistent_length(X, y.codes)
        return y
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y", estimator_name=type(estimator).__name__)
    check_consistent_length(X, y)
    return np.asarray(y)


def check_features(estimator: Any, X: Any, *, reset: bool) -> None:
    """Refuse memory-mapped rows with other feature names or another number of features. `MappedRows.of` checks the
    entries."""
    if X.data.dtype.kind not in "biuf":
        raise ValueError(
            f"Expected memory-mapped rows of real numbers, found {X.data.dtype}. Write them as float32 or float64."
        )
    if X.indices.dtype.kind not in "iu" or X.indptr.dtype.kind not in "iu":
        raise ValueError(f"Expected indices and indptr of whole numbers, found {X.indices.dtype} and {X.indptr.dtype}.")
    for n, what in zip(X.shape, ("sample", "feature"), strict=True):
        if n < 1:
            raise ValueError(f"Found array with 0 {what}(s) (shape={X.shape}) while a minimum of 1 is required.")
    validate_data(estimator, X, reset=reset, skip_check_array=True)


def check_device(device: str) -> None:
    if device == "cuda":
        raise ValueError(
            "device='cuda' trains on rows in the GPU's memory, but these are memory-mapped. Use device='auto' or "
            "'cpu', or load the rows into memory first: X = scipy.sparse.csr_matrix(X, copy=True)."
        )
