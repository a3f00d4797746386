"""numpy's npz archives and npy files: dense arrays, or a matrix as scipy.sparse.save_npz writes it, with labels in the
same or in a separate file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from augment_reduce.data.arrays import NPY_MAGIC, ZIP_MAGIC, as_data_errors, read_arrays
from augment_reduce.data.arrays import read_npy as read_npy_array
from augment_reduce.data.files import DataFileError, PathLike, first_bytes, read_names
from augment_reduce.data.rows import Features
from augment_reduce.data.sparse_lines import LARGEST_INDEX, whole_number
from augment_reduce.data.sparse_text import label_values
from augment_reduce.data.tables import Table
from augment_reduce.support.atomic import replaced_atomically

SPARSE_PARTS = {
    "csr": ("data", "indices", "indptr"), "csc": ("data", "indices", "indptr"), "bsr": ("data", "indices", "indptr"),
    "coo": ("data", "row", "col"), "dia": ("data", "offsets"),
}  # fmt: skip
OF_A_MATRIX = ("format", "shape", "data", "indices", "indptr", "row", "col", "offsets")
WANTED = ("X", "y", "target", "feature_names", "class_names", *OF_A_MATRIX)
MOST_EMPTY_ROWS = 10**8  # declared rows of a sparse matrix beyond its entries
SAVE_IT = "Save the features as X and the labels as y."


def read_npz(path: PathLike) -> Table:
    """Read an npz archive: `X` and `y`, or the arrays of `scipy.sparse.save_npz` with `y` beside them.

    `data` and `target` are read as well as X and y. `y` may be missing, hold one label a row, or be an (N, K) array of
    zeros and ones (sets of labels). `class_names` and `feature_names` are read where present. Nothing is ever
    unpickled.
    """
    arrays, names = read_arrays(path, WANTED)
    if {"format", "shape", "data"} <= arrays.keys():
        X: Any = sparse_matrix(path, arrays)
    else:
        X = arrays.get("X", arrays.get("data"))
    if X is None:
        raise DataFileError(
            path,
            expected="an array 'X', or a matrix saved by scipy.sparse.save_npz",
            found=f"the arrays {sorted(names)[:20]}",
            advice=SAVE_IT,
        )
    X = checked_features(path, X)
    y, labels = checked_labels(path, arrays.get("y", arrays.get("target")), X.shape[0], "array 'y'")
    features = _names(path, arrays, "feature_names")
    if features is not None and len(features) != X.shape[1]:
        raise DataFileError(
            path, where="array 'feature_names'", expected=f"{X.shape[1]:,} names", found=f"{len(features):,}"
        )
    return Table(X, y, features, _names(path, arrays, "class_names"), labels)


def read_npy(path: PathLike) -> Table:
    """Read an npy file: a table of features; the labels are in another file."""
    return Table(checked_features(path, read_npy_array(path), "its array"), None)


def _names(path: PathLike, arrays: Mapping[str, np.ndarray], key: str) -> list[str] | None:
    if key not in arrays:
        return None
    names = arrays[key]
    if names.ndim != 1:
        raise DataFileError(
            path, where=f"array {key!r}", expected="names in one dimension", found=f"shape {names.shape}"
        )
    found: list[str] = names.astype(str).tolist()
    return found


# ---- features ----


def sparse_matrix(path: PathLike, arrays: Mapping[str, np.ndarray]) -> sparse.csr_matrix:
    """The matrix of `scipy.sparse.save_npz`, validated before scipy's compiled code uses it."""
    expected = "an npz archive with a matrix as scipy.sparse.save_npz writes it"
    advice = "Write it again with scipy.sparse.save_npz."
    with as_data_errors(path, expected, advice):
        kind = str(arrays["format"].astype(str).item())
        if kind not in SPARSE_PARTS:
            raise ValueError(f"format {kind!r}")
        parts = [arrays[name] for name in SPARSE_PARTS[kind]]
        n_rows, n_columns = (int(n) for n in arrays["shape"].astype(np.int64, casting="safe").tolist())
        check_sparse_parts(kind, parts, n_rows, n_columns)
        data, *places = parts
        where = places[0] if kind == "dia" else tuple(places)
        given = (data, where) if kind in ("coo", "dia") else (data, *places)
        matrix = getattr(sparse, f"{kind}_matrix")(given, shape=(n_rows, n_columns))
        if kind in ("csr", "csc", "bsr"):
            matrix.check_format(full_check=True)
        found = matrix.tocsr()
        found.check_format(full_check=True)
        return found


def check_sparse_parts(kind: str, parts: Sequence[np.ndarray], n_rows: int, n_columns: int) -> None:
    """Checks that scipy lacks: dtypes, and declared but empty rows, for which it would allocate memory."""
    data, *places = parts
    if data.ndim != {"dia": 2, "bsr": 3}.get(kind, 1) or data.dtype.kind not in "biuf":
        raise ValueError(f"data of {data.ndim} dimensions of {data.dtype}")
    if any(place.ndim != 1 or place.dtype.kind not in "iu" for place in places):
        raise ValueError("indices that are no whole numbers in one dimension")
    if not (0 <= n_rows < 2**62 and 0 <= n_columns < 2**62):
        raise ValueError(f"the shape ({n_rows}, {n_columns})")
    if n_rows > MOST_EMPTY_ROWS and n_rows > 100 * data.size:
        raise ValueError(f"{n_rows:,} rows, but {data.size:,} entries")
    if any(place.dtype.kind == "u" and place.size and int(place.max()) >= 2**62 for place in places):
        raise ValueError("indices beyond 62 bits")
    if kind in ("csr", "csc", "bsr"):
        indices, indptr = places
        rises = indptr.size > 0 and indptr[0] == 0 and (indptr[1:] >= indptr[:-1]).all()
        if not rises or indptr[-1] > len(indices):  # check_format does nothing if the last entry is 0
            raise ValueError(f"indptr that does not rise from 0 to at most {len(indices)}")


def checked_features(path: PathLike, X: Any, where: str = "array 'X'") -> Features:
    """A table of finite numbers as float32."""
    if X.ndim != 2 or X.dtype.kind not in "fiub":
        raise DataFileError(
            path,
            where=where,
            expected="a table (2 dimensions) of numbers",
            found=f"{X.ndim} dimensions of {X.dtype}",
            advice="Reshape images and the like to (rows, features).",
        )
    values = X.data if sparse.issparse(X) else X
    limit = np.finfo(np.float32).max
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.abs(values, dtype=np.float64) if values.dtype.kind != "b" else np.zeros(0)
    if not sizes.max(initial=0.0) <= limit:
        flat = int(np.flatnonzero(~(sizes.ravel() <= limit))[0])
        row = int(np.searchsorted(X.indptr, flat, side="right")) - 1 if sparse.issparse(X) else flat // X.shape[1]
        raise DataFileError(
            path,
            where=f"{where}, row {row}",
            expected="finite numbers (float32)",
            found=str(values.ravel()[flat]),
            advice="Replace missing or infinite values.",
        )
    X = X.astype(np.float32)
    if sparse.issparse(X):
        X.sum_duplicates()
        checked_sums(path, X, where)
    return X


def checked_sums(path: PathLike, X: sparse.csr_matrix, where: str) -> None:
    """Refuse repeated entries (same row, same feature) whose sum is infinite."""
    if not np.isfinite(X.data).all():
        raise DataFileError(path, where=where, expected="finite sums of repeated entries", found="an infinite one")


# ---- labels ----


def checked_labels(
    path: PathLike, y: np.ndarray | None, n_rows: int, where: str
) -> tuple[np.ndarray | None, sparse.csr_matrix | None]:
    """One label a row, (N,) or (N, 1); or sets of labels, (N, K) zeros and ones."""
    if y is None:
        return None, None
    if y.ndim not in (1, 2) or len(y) != n_rows:
        raise DataFileError(
            path,
            where=where,
            expected=f"{n_rows:,} labels, one a row of X",
            found=f"shape {y.shape}",
            advice="Save X and y of the same rows.",
        )
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataFileError(
            path,
            where=where,
            expected="a label on every row",
            found="NaN or infinity",
            advice="Leave out rows whose label is missing.",
        )
    if y.ndim == 1 or y.shape[1] == 1:
        return y.reshape(-1), None
    if y.dtype.kind not in "fiub" or not np.isin(y, (0, 1)).all():
        raise DataFileError(
            path,
            where=where,
            expected="zeros and ones in a 2-dimensional y",
            found="other values",
            advice="Mark the labels of every row by ones, or give one label a row (1 dimension).",
        )
    return None, sparse.csr_matrix(y.astype(bool))


def read_labels(path: PathLike, n_rows: int) -> tuple[np.ndarray | None, sparse.csr_matrix | None]:
    """The labels of `n_rows` rows from a separate file: one a row, or sets of them as a sparse (N, K) matrix.

    An npz archive (`y`, or what scipy.sparse.save_npz writes: each entry that is not zero is a label), an npy file, or
    text with a label on each line.
    """
    start = first_bytes(path, 16)
    if start.startswith(ZIP_MAGIC):
        arrays, names = read_arrays(path, WANTED)
        if {"format", "shape", "data"} <= arrays.keys():
            return None, label_matrix(path, sparse_matrix(path, arrays), n_rows)
        y = next((arrays[name] for name in ("y", "target", "X", "data") if name in arrays), None)
        if y is None:
            raise DataFileError(
                path,
                expected="an array 'y', or a matrix saved by scipy.sparse.save_npz",
                found=f"the arrays {sorted(names)[:20]}",
                advice="Save the labels as y.",
            )
        return checked_labels(path, y, n_rows, "array 'y'")
    if start.startswith(NPY_MAGIC):
        return checked_labels(path, read_npy_array(path), n_rows, "its array")
    return label_lines(path, n_rows)


def label_lines(path: PathLike, n_rows: int) -> tuple[np.ndarray | None, sparse.csr_matrix | None]:
    """A label on each line; or numbers joined by commas, a set of them on each line."""
    lines = [line.strip().encode() for line in read_names(path)]
    if len(lines) != n_rows:
        raise DataFileError(
            path,
            expected=f"{n_rows:,} lines, a label for each row of X",
            found=f"{len(lines):,}",
            advice="Give X and the labels of the same rows.",
        )
    if any(b"," in line for line in lines) and all(token.isdigit() for line in lines for token in line.split(b",")):
        sets = [sorted({whole_number(token) for token in line.split(b",")}) for line in lines]
        highest = max((numbers[-1] for numbers in sets), default=0)
        if highest >= LARGEST_INDEX:
            raise DataFileError(path, expected="label numbers of 63 bits", found=str(highest)[:40])
        indptr = np.cumsum([0, *map(len, sets)], dtype=np.int64)
        indices = np.fromiter((number for numbers in sets for number in numbers), np.int64, int(indptr[-1]))
        return None, sparse.csr_matrix((np.ones(len(indices), bool), indices, indptr), shape=(n_rows, highest + 1))
    missing = next((number for number, line in enumerate(lines, start=1) if not line), None)
    if missing is not None:
        raise DataFileError(path, line=missing, expected="a label", found="an empty line", advice="Give every row one.")
    distinct = {line: i for i, line in enumerate(dict.fromkeys(lines))}
    ids = np.fromiter((distinct[line] for line in lines), np.int64, len(lines))
    return label_values(path, list(distinct))[ids], None


def label_matrix(path: PathLike, found: sparse.csr_matrix, n_rows: int) -> sparse.csr_matrix:
    """(N, K) boolean, from any numbers: what is not zero is a label."""
    if found.shape[0] != n_rows:
        raise DataFileError(
            path,
            expected=f"{n_rows:,} rows of labels, one for each of X",
            found=f"{found.shape[0]:,}",
            advice="Give X and Y of the same rows.",
        )
    found.sum_duplicates()
    labels = found.astype(bool)
    labels.eliminate_zeros()
    return sparse.csr_matrix(labels)


# ---- writing ----


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
