"""Parquet and Arrow files, some rows at a time. pyarrow is an optional dependency: `pip install augment-reduce[arrow]`.

A file of features in columns of numbers gives dense rows; one with a column of lists of feature indices, and one of
lists of values, sparse rows; one with a single column of lists of numbers, all of one length, dense rows again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from augment_reduce.data.arrays import as_data_errors
from augment_reduce.data.files import DataFileError, PathLike

PARQUET, ARROW = b"PAR1", b"ARROW1"
SUFFIXES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 1 << 14
AGAIN = "Write it again, or check with pyarrow that it can be read."


class ArrowRows:
    """The rows of Parquet or Arrow files: a re-iterable of blocks (X, y), or (X, y, weight); at most one row group of
    the selected columns is in memory.

        rows = ArrowRows("train/", label="kind")
        clf.fit_stream(rows, classes=rows.classes())  # or write_mapped("train-rows", rows), then clf.fit

    - `path`: a file, a folder of them (in the order of their names), or several paths.
    - `label`, `weight`: columns by name. `features`: names of columns; by default all others.
    - `sparse`: (column of lists of feature indices, column of lists of values), for `n_features` features.
    """

    def __init__(
        self, path: PathLike | Sequence[PathLike], label: str | None, *, features: Sequence[str] | None = None,
        sparse: tuple[str, str] | None = None, n_features: int | None = None, weight: str | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> None:  # fmt: skip
        if (sparse is None) != (n_features is None) or (sparse is not None and features is not None):
            raise ValueError("Expected sparse=(indices, values) together with n_features, and without features.")
        self.paths, self.label, self.weight, self.batch_rows = files_of(path), label, weight, batch_rows
        self.sparse, self.n_features = sparse, n_features
        names = list(_open(self.paths[0]).schema_arrow.names)
        own = [name for name in (label, weight) if name is not None]
        wanted = list(sparse) if sparse else list(features) if features is not None else _others(names, own)
        for name in [*own, *wanted]:
            if names.count(name) != 1:
                shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
                raise DataFileError(
                    self.paths[0], expected=f"one column {name!r}",
                    found=f"{names.count(name) or 'none'} among {shown}", advice="Name the columns as the file does.",
                )  # fmt: skip
        self.columns = wanted
        self.feature_names: list[str] | None = None if sparse or len(wanted) == 1 else wanted

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for path in self.paths:
            own = [name for name in (self.label, self.weight) if name is not None]
            for first, batch in _batches(path, [*self.columns, *own], self.batch_rows):
                X = self._features(path, first, batch)
                y = None if self.label is None else _labels(path, first, self.label, batch.column(self.label))
                if self.weight is None:
                    yield X, y
                else:
                    yield X, y, _numbers(path, first, self.weight, batch.column(self.weight))

    def classes(self) -> np.ndarray:
        """All labels, ascending, from a pass over their column."""
        if self.label is None:
            raise ValueError("These rows have no labels: no column was named.")
        found: set[Any] = set()
        for path in self.paths:
            for first, batch in _batches(path, [self.label], self.batch_rows):
                found.update(_labels(path, first, self.label, batch.column(self.label)).tolist())
        return np.asarray(sorted(found))

    def _features(self, path: Path, first: int, batch: Any) -> Any:
        if self.sparse is not None:
            return self._sparse(path, first, batch)
        if len(self.columns) == 1 and _is_list(batch.column(self.columns[0])):
            return _table_of_lists(path, first, self.columns[0], batch.column(self.columns[0]))
        columns = [_numbers(path, first, name, batch.column(name)) for name in self.columns]
        dtype = np.float32 if all(column.dtype == np.float32 for column in columns) else np.float64
        return np.stack([column.astype(dtype) for column in columns], axis=1) if columns else np.empty((len(batch), 0))

    def _sparse(self, path: Path, first: int, batch: Any) -> sparse.csr_matrix:
        assert self.sparse is not None
        assert self.n_features is not None
        (ends, indices), (also, values) = (_lists(path, first, name, batch.column(name)) for name in self.sparse)
        if not np.array_equal(ends, also):
            row = first + int(np.flatnonzero(ends != also)[0]) - 1
            raise DataFileError(
                path, where=f"row {row}", expected="as many feature indices as values", found="other lists",
            )  # fmt: skip
        wrong = np.flatnonzero((indices < 0) | (indices >= self.n_features) | (indices != np.floor(indices)))
        if len(wrong):
            row = first + int(np.searchsorted(ends, wrong[0], side="right")) - 1
            raise DataFileError(
                path, where=f"row {row}", expected=f"feature indices from 0 to {self.n_features - 1}",
                found=str(indices[wrong[0]]),
            )  # fmt: skip
        X = sparse.csr_matrix((values, indices.astype(np.int64), ends), shape=(len(batch), self.n_features))
        X.sum_duplicates()
        return X


def files_of(path: PathLike | Sequence[PathLike]) -> list[Path]:
    """The files at a path, which may be a folder of them."""
    if isinstance(path, list | tuple):
        return [file for one in path for file in files_of(one)]
    found = Path(path)  # type: ignore[arg-type]
    if not found.exists():
        raise DataFileError(found, expected="a Parquet or Arrow file", found="nothing there", advice="Check the path.")
    if not found.is_dir():
        return [found]
    files = sorted(file for file in found.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DataFileError(found, expected=f"a folder of {', '.join(SUFFIXES)} files", found="none of them")
    return files


def is_arrow(path: PathLike) -> bool:
    """Whether it is a Parquet or an Arrow file, by its first bytes."""
    try:
        with open(path, "rb") as file:
            return file.read(6).startswith((PARQUET, ARROW))
    except OSError:
        return False


def _others(names: Sequence[str], own: Sequence[str]) -> list[str]:
    return [name for name in names if name not in own]


# ---- files ----


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'augment-reduce[arrow]' (or pyarrow)."
        ) from error


class _Arrow:
    """An Arrow IPC file with the methods of `pyarrow.parquet.ParquetFile` that are used here."""

    def __init__(self, path: Path) -> None:
        self.file = _pyarrow("ipc").open_file(str(path))
        self.schema_arrow = self.file.schema

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[Any]:
        for i in range(self.file.num_record_batches):
            batch = self.file.get_batch(i).select(list(columns))
            for first in range(0, len(batch), batch_size):
                yield batch.slice(first, batch_size)


def _open(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            start = file.read(6)
    except OSError as error:
        raise DataFileError(path, expected="a file that can be opened", found=str(error.strerror)) from error
    if not start.startswith((PARQUET, ARROW)):
        raise DataFileError(path, expected="a Parquet or Arrow (IPC) file", found="other contents", advice=AGAIN)
    parquet = None if start.startswith(ARROW) else _pyarrow("parquet")
    with as_data_errors(path, "a whole Parquet or Arrow file", AGAIN):
        return _Arrow(path) if parquet is None else parquet.ParquetFile(path)


def _batches(path: Path, columns: Sequence[str], batch_rows: int) -> Iterator[tuple[int, Any]]:
    """(the number of the first row, a batch of rows)."""
    first, file = 0, _open(path)
    missing = [name for name in columns if file.schema_arrow.names.count(name) != 1]
    if missing:
        raise DataFileError(path, expected=f"one column {missing[0]!r}, as in the first file", found="none or several")
    batches = iter(file.iter_batches(batch_size=batch_rows, columns=list(columns)))
    while True:
        with as_data_errors(path, "a whole Parquet or Arrow file", AGAIN):
            batch = next(batches, None)
        if batch is None:
            return
        if len(batch):
            yield first, batch
        first += len(batch)


# ---- columns ----


def _without_nulls(path: Path, first: int, name: str, column: Any) -> Any:
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataFileError(
            path, where=f"row {row}, column {name!r}", expected="a value", found="null",
            advice="Fill missing values in, or leave the rows or the column out.",
        )  # fmt: skip
    return column


def _numbers(path: Path, first: int, name: str, column: Any) -> np.ndarray:
    column = _without_nulls(path, first, name, column)
    with as_data_errors(path, f"numbers in column {name!r}", "Name the columns of features (features=)."):
        values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biuf":
        raise DataFileError(
            path, where=f"column {name!r}", expected="numbers", found=str(column.type),
            advice="Turn it into numbers, or name the columns of features (features=).",
        )  # fmt: skip
    return values if values.dtype == np.float32 else values.astype(np.float64)


def _labels(path: Path, first: int, name: str, column: Any) -> np.ndarray:
    column = _without_nulls(path, first, name, column)
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    with as_data_errors(path, f"labels in column {name!r}", AGAIN):
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind == "O":
            values = np.asarray(values.tolist())
    if values.dtype.kind not in "biufU" or values.ndim != 1:
        raise DataFileError(
            path, where=f"column {name!r}", expected="labels that are numbers or text", found=str(column.type)
        )
    return values


def _is_list(column: Any) -> bool:
    return hasattr(column, "flatten") and (hasattr(column, "offsets") or hasattr(column.type, "list_size"))


def _lists(path: Path, first: int, name: str, column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(row offsets, beginning with 0; all numbers)."""
    column = _without_nulls(path, first, name, column)
    if not _is_list(column):
        raise DataFileError(path, where=f"column {name!r}", expected="lists of numbers", found=str(column.type))
    lengths = column.value_lengths() if hasattr(column, "value_lengths") else None
    each = np.full(len(column), column.type.list_size) if lengths is None else np.asarray(lengths)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(each, dtype=np.int64)])
    return ends, _numbers(path, first, name, column.flatten())


def _table_of_lists(path: Path, first: int, name: str, column: Any) -> np.ndarray:
    ends, values = _lists(path, first, name, column)
    length = np.diff(ends)
    if (length != length[0]).any():
        raise DataFileError(
            path, where=f"row {first + int(np.flatnonzero(length != length[0])[0])}, column {name!r}",
            expected=f"lists of one length, {length[0]}", found="another",
        )  # fmt: skip
    return values.reshape(len(length), -1)
