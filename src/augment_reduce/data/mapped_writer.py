"""Write a folder of mapped rows (`mapped`) block by block, in memory that does not grow with the rows."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from scipy import sparse

from augment_reduce.config.labels import check_labels, classes_of
from augment_reduce.data.files import PathLike
from augment_reduce.data.mapped import AT_ONCE, CLASSES, FEATURES, FORMAT, META, VERSION, MappedData, open_mapped
from augment_reduce.support.atomic import sync_folder

try:
    import fcntl
except ImportError:  # Windows has no flock: nothing is locked, and nothing abandoned is removed
    fcntl = None  # type: ignore[assignment]

INT32_MAX = 2**31 - 1
ENTRIES_AT_ONCE = 1 << 20


def write_mapped(
    path: PathLike, X: Any, y: Any = None, *, feature_names: Sequence[str] | None = None
) -> MappedData:  # fmt: skip
    """Write rows to a new folder, and map it: X (sparse or dense) with labels y (numbers or text; None: none), or an
    iterable of blocks (X, y), of which one at a time is in memory. Zeros are left out."""
    if y is None and not hasattr(X, "shape"):
        return _write_blocks(path, X, feature_names)
    if sparse.issparse(X):
        X = X.tocsr()
    else:
        X = np.asarray(X)
    n_rows, n_features = X.shape
    classes, codes = (None, None) if y is None else classes_of(_labels(y, n_rows))
    step = max(1, ENTRIES_AT_ONCE // max(1, X.nnz // max(1, n_rows) if sparse.issparse(X) else n_features))
    with new_folder(path) as folder:
        rows = RowFiles(folder, _kept_dtype(X.dtype))
        for first in range(0, n_rows, step):
            part = slice(first, first + step)
            rows.add_csr(X[part], None if codes is None else codes[part])
        finish(folder, rows.close(), n_features, classes, feature_names=feature_names)
    return open_mapped(path)


def _write_blocks(path: PathLike, blocks: Iterable[Any], feature_names: Sequence[str] | None) -> MappedData:
    number: dict[Any, int] = {}  # of each label, in the order in which they occur
    rows, n_features, first = None, 0, True
    with new_folder(path) as folder:
        for X, y in (_without_weights(block) for block in blocks):
            X = X if sparse.issparse(X) else np.asarray(X)
            if rows is None:
                rows, n_features = RowFiles(folder, _kept_dtype(X.dtype)), X.shape[1]
            if X.shape[1] != n_features:
                raise ValueError(f"Expected blocks of {n_features} features, as the first has, found {X.shape[1]}.")
            if first:
                labelled, first = y is not None, False
            if labelled != (y is not None):
                raise ValueError("Expected labels in all blocks or in none.")
            codes = None
            if y is not None:
                here, codes = np.unique(_labels(y, X.shape[0]), return_inverse=True)
                codes = np.asarray([number.setdefault(label, len(number)) for label in here.tolist()])[codes]
            rows.add_csr(X, codes)
        if rows is None:
            raise ValueError("Expected blocks of rows, found none. Was an iterator passed a second time?")
        classes = None
        if rows.labels is not None:
            check_labels(np.asarray(list(number), object))
            classes, order = np.unique(np.asarray(list(number)), return_inverse=True)
            rows.labels.change(lambda codes: order[codes])
        finish(folder, rows.close(), n_features, classes, feature_names=feature_names)
    return open_mapped(path)


def _without_weights(block: Any) -> tuple[Any, Any]:
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise ValueError("Expected blocks (X, y). Weights are not stored: pass sample_weight to fit.")
    return block[0], block[1]


def _kept_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32 if dtype == np.float32 else np.float64)


def _labels(y: Any, n_rows: int) -> np.ndarray:
    y = np.asarray(y)
    if y.shape != (n_rows,):
        raise ValueError(f"Expected a label for each of the {n_rows:,} rows, found labels of shape {y.shape}.")
    check_labels(y)
    if y.dtype.kind == "O":
        y = y.astype(np.str_ if isinstance(y[0], str) else np.asarray(y.tolist()).dtype)
    if y.dtype.kind not in "biufU":
        raise ValueError(f"Expected labels that are numbers or text, found {y.dtype}.")
    return y


def finish(
    folder: Path, described: dict[str, Any], n_features: int, classes: np.ndarray | None, *,
    feature_names: Sequence[str] | None = None, zero_based: bool | None = None,
) -> None:  # fmt: skip
    """Write what the arrays need to be read."""
    kind = None
    if classes is not None:
        kind = "text" if classes.dtype.kind == "U" else "float64" if classes.dtype.kind == "f" else "int64"
        values = classes if kind == "text" else classes.astype(kind)
        _write_json(folder / CLASSES, values.tolist())
    if feature_names is not None:
        _write_json(folder / FEATURES, list(feature_names))
    meta = {"format": FORMAT, "version": VERSION, "shape": [described["rows"], n_features]}
    _write_json(
        folder / META,
        meta | {
            "entries": described["entries"], "dtypes": described["dtypes"],
            "classes": None if classes is None else len(classes), "classes_kind": kind,
            "feature_names": feature_names is not None, "zero_based": zero_based,
        },
    )  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, allow_nan=False)
        out.flush()
        os.fsync(out.fileno())


# ---- one array ----


class Column:
    """An npy file of one dimension that grows. It is open only while it is read or written."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        with open(path, "wb") as file:
            self.offset = self._write_header(file)

    def _write_header(self, file: BinaryIO) -> int:
        """The offset of the numbers: numpy's header has space for any length."""
        entry = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(file, entry)
        return file.tell()

    def add(self, values: np.ndarray) -> None:
        with open(self.path, "ab") as file:
            file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def widen(self, dtype: np.dtype) -> None:
        """Convert the stored numbers to another dtype."""
        wider = Column(self.path.with_suffix(".wider"), dtype)
        for part in self.parts():
            wider.add(part)
        os.replace(wider.path, self.path)
        self.dtype, self.offset = wider.dtype, wider.offset

    def change(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace every number, some at a time."""
        with open(self.path, "r+b") as file:
            for i, part in enumerate(self.parts()):
                file.seek(self.offset + i * AT_ONCE * self.dtype.itemsize)
                file.write(np.ascontiguousarray(function(part), self.dtype).data)

    def parts(self) -> Iterator[np.ndarray]:
        """All numbers, some at a time."""
        for first in range(0, self.length, AT_ONCE):
            yield self.read(first, min(first + AT_ONCE, self.length))

    def read(self, begin: int, end: int) -> np.ndarray:
        with open(self.path, "rb") as file:
            file.seek(self.offset + begin * self.dtype.itemsize)
            return np.frombuffer(file.read((end - begin) * self.dtype.itemsize), self.dtype)

    def move(self, folder: Path) -> None:
        self.path = self.path.rename(folder / self.path.name)

    def discard(self) -> None:
        self.path.unlink()

    def close(self) -> str:
        """Complete the file; the name of its dtype."""
        with open(self.path, "r+b") as file:
            self._write_header(file)
            file.flush()
            os.fsync(file.fileno())
        return str(self.dtype)


# ---- all arrays ----


class RowFiles:
    """The arrays of a folder of rows. Indices are int32 as long as features and entries allow it, as scipy has them."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        small = np.dtype(np.int32)
        self.data, self.indices = Column(folder / "data.npy", dtype), Column(folder / "indices.npy", small)
        self.indptr, self.folder = Column(folder / "indptr.npy", small), folder
        self.indptr.add(np.zeros(1))
        self.labels: Column | None = None

    @property
    def n_rows(self) -> int:
        return self.indptr.length - 1

    def add(self, values: np.ndarray, indices: np.ndarray, counts: np.ndarray, codes: np.ndarray | None) -> None:
        n_entries = self.data.length + len(values)
        if self.indices.dtype == np.int32 and max(n_entries, int(indices.max(initial=0))) > INT32_MAX:
            self.indices.widen(np.dtype(np.int64))
            self.indptr.widen(np.dtype(np.int64))
        self.indptr.add(self.data.length + np.cumsum(counts))
        self.data.add(values)
        self.indices.add(indices)
        if codes is not None:
            if self.labels is None:
                self.begin_labels()
            self.add_labels(codes)

    def add_csr(self, X: Any, codes: np.ndarray | None) -> None:
        """Rows of a table or a sparse matrix."""
        block = sparse.csr_matrix(X)
        if not block.has_canonical_format:
            block = block.copy()
            block.sum_duplicates()
        if not np.isfinite(block.data).all():
            raise ValueError("Input X contains NaN or infinity. Replace or leave out missing values.")
        self.add(block.data, block.indices, np.diff(block.indptr), codes)

    def begin_labels(self) -> None:
        self.labels = Column(self.folder / "labels.npy", np.dtype(np.int32))

    def add_labels(self, codes: np.ndarray) -> None:
        assert self.labels is not None
        self.labels.add(codes)

    def taken(self, rows: np.ndarray) -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """(slice of `rows`, (values, indices, counts) of these), for ascending rows, which may come several times."""
        if not len(rows):
            return
        ends, at = self.indptr.read(int(rows[0]), int(rows[-1]) + 2).astype(np.int64), rows - rows[0]
        begin, length = ends[at], ends[at + 1] - ends[at]
        total, first = np.cumsum(length), 0
        while first < len(rows):
            before = total[first] - length[first]
            few = np.searchsorted(total, before + ENTRIES_AT_ONCE, side="right")
            near = np.searchsorted(begin + length, begin[first] + ENTRIES_AT_ONCE, side="right")
            part = slice(first, max(first + 1, int(min(few, near))))
            here, last = int(begin[first]), int(begin[part.stop - 1] + length[part.stop - 1])
            place = np.repeat(begin[part] - here - (total[part] - length[part] - before), length[part])
            place = place + np.arange(len(place))
            yield part, (self.data.read(here, last)[place], self.indices.read(here, last)[place], length[part])
            first = part.stop

    def moved(self, name: str) -> RowFiles:
        """These files moved to a subfolder of their folder, which is removed with it."""
        inside = self.folder / name
        inside.mkdir()
        moved = copy.copy(self)
        moved.folder = inside
        for column in moved.columns().values():
            column.move(inside)
        return moved

    def columns(self) -> dict[str, Column]:
        columns = {"data": self.data, "indices": self.indices, "indptr": self.indptr}
        return columns if self.labels is None else columns | {"labels": self.labels}

    def close(self) -> dict[str, Any]:
        described = {"rows": self.n_rows, "entries": self.data.length}
        return described | {"dtypes": {name: column.close() for name, column in self.columns().items()}}

    def discard(self) -> None:
        for column in self.columns().values():
            column.discard()
        self.folder.rmdir()


# ---- the folder ----


def check_new_folder(path: PathLike) -> Path:
    """Refuse a place where no folder of rows can be made; an existing one is never replaced."""
    if not os.fspath(path):
        raise ValueError("Expected the name of a folder to write, found an empty one.")
    target = Path(os.path.realpath(path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "a folder with files in it" if target.is_dir() else "a file"
        raise FileExistsError(errno.EEXIST, f"it is {what}; name a new folder, or remove it first", str(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {Path(path).parent} to write {Path(path).name} to; make it first.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target.parent))
    return target


@contextlib.contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """A temporary folder beside `path`, which is renamed to it only if the body succeeds: at any moment there is either
    a whole folder of rows or none. An OSError (a full disk, say) names `path`."""
    target = check_new_folder(path)
    remove_abandoned(target)
    temporary, lock = target.parent / f".{target.name[:50]}-{secrets.token_hex(4)}.part", -1
    try:
        os.mkdir(temporary)
        lock = _locked(temporary)
        yield temporary
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        inside = str(getattr(error, "filename", None) or "None")
        if isinstance(error, OSError) and error.errno and (inside == "None" or inside.startswith(str(temporary))):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if lock >= 0:  # only now: the lock holds while it is open
            os.close(lock)


def _locked(folder: Path) -> int:
    """A handle that locks the folder; -1: its writer is gone, or still at work, or nobody can tell."""
    if fcntl is None:
        return -1
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return -1
    return handle


def remove_abandoned(target: Path) -> None:
    """Remove what killed writers of the same folder left."""
    part = re.compile(re.escape(f".{target.name[:50]}-") + r"[0-9a-f]{8}\.part")
    with contextlib.suppress(OSError):
        for found in target.parent.iterdir():
            if (
                part.fullmatch(found.name)
                and found.is_dir()
                and not found.is_symlink()
                and (lock := _locked(found)) >= 0
            ):
                shutil.rmtree(found, ignore_errors=True)
                os.close(lock)
