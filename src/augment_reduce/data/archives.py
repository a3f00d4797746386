"""numpy's npz archives: dense arrays, or a matrix as scipy.sparse.save_npz writes it, with labels beside it."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from augment_reduce.atomic import replaced_atomically
from augment_reduce.data.files import DataFileError, PathLike, open_data
from augment_reduce.data.rows import Features
from augment_reduce.data.tables import Table


def read_npz(path: PathLike) -> Table:
    """Read an npz archive: `X` and `y`, or the arrays of `scipy.sparse.save_npz` with `y` beside them.

    `y` may be missing, hold one label a row, or be an (N, K) array of zeros and ones (sets of labels). `class_names`
    and `feature_names` are read where present. Nothing is ever unpickled.
    """
    try:
        with open_data(path) as stream:
            packed = io.BytesIO(stream.read())
        with np.load(packed, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name not in ("data", "indices", "indptr")}
            is_sparse = {"format", "shape", "data"} <= set(archive.files)
        if is_sparse:
            packed.seek(0)
            arrays["X"] = sparse.load_npz(packed).tocsr()
            arrays["X"].check_format(full_check=True)
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, zlib.error, AttributeError) as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(
            path,
            expected="an npz archive of plain arrays",
            found=f"something else ({error})",
            advice="Write it with numpy.savez, scipy.sparse.save_npz or augment_reduce.data.write_npz; "
            "arrays of Python objects are refused.",
        ) from error
    if "X" not in arrays:
        raise DataFileError(
            path,
            expected="an array 'X', or a matrix saved by scipy.sparse.save_npz",
            found=f"the arrays {sorted(arrays)}",
            advice="Save the features as X and the labels as y.",
        )
    X = _checked_features(path, arrays["X"])
    y, labels = _checked_labels(path, arrays.get("y"), X.shape[0])
    names = {key: arrays[key].astype(str).tolist() for key in ("feature_names", "class_names") if key in arrays}
    return Table(X, y, names.get("feature_names"), names.get("class_names"), labels)


def _checked_features(path: PathLike, X: Any) -> Features:
    if X.ndim != 2 or X.dtype.kind not in "fiub":
        raise DataFileError(
            path,
            where="array 'X'",
            expected="a table (2 dimensions) of numbers",
            found=f"{X.ndim} dimensions of {X.dtype}",
            advice="Reshape images and the like to (rows, features).",
        )
    values = X.data if sparse.issparse(X) else X
    if not np.abs(values, dtype=np.float64).max(initial=0.0) <= np.finfo(np.float32).max:
        flat = int(np.flatnonzero(~(np.abs(values.ravel().astype(np.float64)) <= np.finfo(np.float32).max))[0])
        row = int(np.searchsorted(X.indptr, flat, side="right")) - 1 if sparse.issparse(X) else flat // X.shape[1]
        raise DataFileError(
            path,
            where=f"array 'X', row {row}",
            expected="finite numbers (float32)",
            found=str(values.ravel()[flat]),
            advice="Replace missing or infinite values.",
        )
    X = X.astype(np.float32)
    if sparse.issparse(X):
        X.sum_duplicates()
    return X


def _checked_labels(
    path: PathLike, y: np.ndarray | None, n_rows: int
) -> tuple[np.ndarray | None, sparse.csr_matrix | None]:
    if y is None:
        return None, None
    if y.ndim not in (1, 2) or len(y) != n_rows:
        raise DataFileError(
            path,
            where="array 'y'",
            expected=f"{n_rows:,} labels, one a row of X",
            found=f"shape {y.shape}",
            advice="Save X and y of the same rows.",
        )
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataFileError(
            path,
            where="array 'y'",
            expected="a label on every row",
            found="NaN or infinity",
            advice="Leave out rows whose label is missing.",
        )
    if y.ndim == 1:
        return (np.strings.decode(y, "utf-8") if y.dtype.kind == "S" else y), None
    if y.dtype.kind not in "fiub" or not np.isin(y, (0, 1)).all():
        raise DataFileError(
            path,
            where="array 'y'",
            expected="zeros and ones in a 2-dimensional y",
            found="other values",
            advice="Mark the labels of every row by ones, or give one label a row (1 dimension).",
        )
    return None, sparse.csr_matrix(y.astype(bool))


def write_npz(
    path: PathLike,
    X: Features,
    y: np.ndarray | None = None,
    *,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
) -> None:
    """Write what `read_npz` reads, through a temporary file, so that a broken write leaves no half file."""
    matrix: Any = X
    arrays: dict[str, Any] = {"X": X}
    if sparse.issparse(matrix):
        csr = matrix.tocsr()
        arrays = {"format": b"csr", "shape": csr.shape, "data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
    optional = {"y": y, "class_names": class_names, "feature_names": feature_names}
    arrays |= {name: np.asarray(value) for name, value in optional.items() if value is not None}
    with replaced_atomically(path) as temporary, open(temporary, "wb") as stream:
        np.savez_compressed(stream, **arrays)
