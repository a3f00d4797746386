"""Tables in csv files, with a header line or without."""

from __future__ import annotations

import csv
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.csv_columns import Cells, delimiter_of, find_column, find_columns
from augment_reduce.data.csv_guesses import INDEX_NAME, counts_rows, is_index, n_first, names_columns
from augment_reduce.data.files import (
    DataFileError,
    DataFileWarning,
    PathLike,
    decode_line,
    empty_file,
    line_blocks,
    shown,
)
from augment_reduce.data.rows import Features
from augment_reduce.data.sparse_lines import IntArray
from augment_reduce.data.sparse_text import label_values

CSV_BLOCK = 2048  # rows converted at a time
ROWS_COMPARED = 1000  # rows compared with the first line, to decide whether it is a header
SEPARATOR_LINE = re.compile(r"sep=(.)\s*")  # Excel's byte-order mark

Record = tuple[int, list[str]]  # number of its last line, fields
Auto = bool | Literal["auto"]


class Table(NamedTuple):
    """A table: `X` (N, D) float32, `y` or None, and for sets of labels an (N, K) boolean `labels`."""

    X: Features
    y: np.ndarray | None
    feature_names: list[str] | None = None
    class_names: list[str] | None = None
    labels: sparse.csr_matrix | None = None


def read_csv(
    path: PathLike,
    *,
    label_column: str | int | None = -1,
    ignore_columns: Sequence[str | int] = (),
    delimiter: str | None = None,
    header: Auto = "auto",
    keep_index: bool = False,
) -> Table:
    """Read a csv file, packed or not; every column but the label's must hold numbers, or the words True and False.

    - `label_column` is a name or a position (0 is the first, -1 the last; None: the file has no labels). Labels may be
      text. `ignore_columns` names columns to leave out. `delimiter` is guessed from the first line unless given.
    - `header`: whether the first line is a header. "auto" takes a line of numbers for a row, and warns; see
      `csv_guesses.names_columns`.
    - A first column that numbers the rows, and has no name (pandas' index) or is called index, Id, row and the like, is
      left out with a warning, unless `keep_index`.
    """
    found = csv_blocks(
        path, label_column=label_column, ignore_columns=ignore_columns, delimiter=delimiter, header=header,
        keep_index=keep_index,
    )  # fmt: skip
    n, ids, blocks, indexes = found.n_candidates, list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for numbers, codes in found.blocks:
        indexes.append(numbers[:, :n])
        blocks.append(numbers[:, n:].astype(np.float32))
        ids.append(codes)
    X, first_columns = np.concatenate(blocks), np.concatenate(indexes)
    stays = found.columns_that_stay(first_columns)
    X = np.concatenate([first_columns[:, stays].astype(np.float32), X], axis=1) if stays else X
    return Table(X, found.labels(np.concatenate(ids)), found.names_of(stays))


class CsvBlocks(NamedTuple):
    """A csv file that is being read. `blocks`: cells of the `kept` columns and numbers of labels, some rows at a time.

    The first `n_candidates` columns may be an index, which is known when all rows have been seen; the labels too.
    """

    path: PathLike
    names: list[str] | None  # of all columns
    kept: list[int]
    n_candidates: int
    codes: dict[bytes, int] | None  # the labels' numbers; None: no labels
    blocks: Iterator[tuple[npt.NDArray[np.float64], IntArray]]

    def columns_that_stay(self, values: npt.NDArray[np.float64]) -> list[int]:
        """Which of the candidates are features; a warning names each of the others."""
        called = [None if self.names is None else self.names[i] for i in self.kept[: self.n_candidates]]
        return [j for j, name in enumerate(called) if not _is_index(self.path, name, values[:, j])]

    def names_of(self, stays: Sequence[int]) -> list[str] | None:
        kept = [*(self.kept[j] for j in stays), *self.kept[self.n_candidates :]]
        return None if self.names is None else [self.names[i] for i in kept]

    def labels(self, ids: IntArray) -> np.ndarray | None:
        return None if self.codes is None else label_values(self.path, list(self.codes))[ids]


def csv_blocks(
    path: PathLike, *, label_column: str | int | None = -1, ignore_columns: Sequence[str | int] = (),
    delimiter: str | None = None, header: Auto = "auto", keep_index: bool = False,
) -> CsvBlocks:  # fmt: skip
    """Begin to read a csv file; see `read_csv`."""
    records, first = _first_record(path, delimiter)
    label_at, names, rows = _header(path, first, records, label_column, ignore_columns, header)
    shape = _shape(first, names)
    left_out = {i for column in ignore_columns for i in find_columns(path, shape, column)} | {label_at}
    kept = [i for i in range(len(shape)) if i not in left_out]
    n_candidates = 0 if keep_index else min(1, len(kept)) if names is None else n_first([names[i] for i in kept])
    codes = None if label_at is None else dict[bytes, int]()
    blocks = _cells(path, rows, Cells(path, names, kept), len(shape), label_at, codes)
    return CsvBlocks(path, names, kept, n_candidates, codes, blocks)


def _cells(
    path: PathLike, rows: Iterator[Record], cells: Cells, width: int, label_at: int | None,
    codes: dict[bytes, int] | None,
) -> Iterator[tuple[npt.NDArray[np.float64], IntArray]]:  # fmt: skip
    any_rows = False
    for lines, fields in _row_blocks(path, rows, width):
        any_rows, numbers, ids = True, cells.numbers(lines, fields), list[int]()
        if codes is not None and label_at is not None:
            ids = [_label_code(path, codes, row[label_at], line) for line, row in zip(lines, fields, strict=True)]
        yield numbers, np.asarray(ids, np.int64)
    if not any_rows:
        raise DataFileError(path, expected="rows below the header", found="none", advice="Was it copied to the end?")


def csv_header(path: PathLike, *, header: Auto = "auto") -> tuple[list[str], bool]:
    """The fields of the first line, and whether they are a header, for a file with labels in the last column."""
    records, first = _first_record(path, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataFileWarning)
        _, names, _ = _header(path, first, records, -1, (), header)
    return [cell.strip() for cell in first[1]], names is not None


# ---- the first line, and the first column ----


def _header(
    path: PathLike, first: Record, records: Iterator[Record], label_column: str | int | None,
    ignore_columns: Sequence[str | int], header: Auto,
) -> tuple[int | None, list[str] | None, Iterator[Record]]:  # fmt: skip
    """(position of the label's column, names of the columns or None, the rows)."""
    line, fields = first
    names = [cell.strip() for cell in fields]
    by_name = [column for column in (label_column, *ignore_columns) if isinstance(column, str)]
    if header == "auto" and not any(column in names and not column.isdigit() for column in by_name):
        ahead = list(itertools.islice(records, ROWS_COMPARED))
        records = itertools.chain(ahead, records)
        label_at = None if label_column is None else _position(names, label_column)
        header, sure = names_columns(names, [row for _, row in ahead], label_at)
        if not header or not sure:
            _say_header(path, line, header)
    shape = _shape(first, names if header else None)
    label_at = None if label_column is None else find_column(path, shape, label_column)
    return (label_at, names, records) if header else (label_at, None, itertools.chain([first], records))


def _shape(first: Record, names: list[str] | None) -> list[str]:
    """Column names; positions if there is no header."""
    return [str(i) for i in range(len(first[1]))] if names is None else names


def _position(names: Sequence[str], column: str | int) -> int | None:
    """The possible position of the label, for the guess; invalid ones are refused later."""
    try:
        at = int(column)
    except ValueError:
        return None
    return at % len(names) if -len(names) <= at < len(names) else None


def _say_header(path: PathLike, line: int, header: bool) -> None:
    if header:
        fact = "the first line, of numbers, was taken for the names of the columns"
        advice = "If it is a row, say header=False."
    else:
        fact = "the first line has no names, so it was taken for a row: a file without a header"
        advice = "If it names the columns, say header=True."
    warnings.warn(DataFileWarning(path, fact, advice, line=line), stacklevel=4)


def _is_index(path: PathLike, name: str | None, values: npt.NDArray[np.float64]) -> bool:
    """Whether the first column (name None: no header) is an index; if so it is left out, with a warning."""
    if not (counts_rows(values) if name is None else is_index(values)):
        return False
    low, high = int(values.min()), int(values.max())
    called = f"is called {name!r}" if name and INDEX_NAME.fullmatch(name) else "has no name"
    fact = f"the first column {called} and numbers the rows ({low} to {high}), so it was left out as an index"
    advice = "To keep it as a feature, give it another name, or say keep_index=True."
    warnings.warn(DataFileWarning(path, fact, advice), stacklevel=3)
    return True


# ---- rows ----


def _first_record(path: PathLike, delimiter: str | None) -> tuple[Iterator[Record], Record]:
    """The records after the first, and the first."""
    lines = _text_lines(path)
    skipped, first = 0, ""
    for first in lines:
        separator = SEPARATOR_LINE.fullmatch(first)
        if separator:
            delimiter = delimiter or separator[1]
        elif first.strip():
            break
        skipped, first = skipped + 1, ""
    if not first:
        raise empty_file(path, "a header line with column names, or rows")
    records = _records(path, itertools.chain([first], lines), delimiter or delimiter_of(first), skipped)
    record = next(records, None)
    if record is None:
        raise empty_file(path, "a header line with column names, or rows")
    return records, record


def _text_lines(path: PathLike) -> Iterator[str]:
    for first, block in line_blocks(path):
        for number, line in enumerate(block.split(b"\n")[:-1], start=first):
            yield decode_line(path, number, line) + "\n"


def _records(path: PathLike, lines: Iterator[str], delimiter: str, skipped: int) -> Iterator[Record]:
    """The last line's number and the fields of each record that is not blank."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num + skipped, row
    except csv.Error as error:
        raise DataFileError(
            path,
            line=reader.line_num + skipped,
            expected="a csv record",
            found=f"something else ({error})",
            advice="Is a quote never closed, or in the middle of a cell? Quotes inside of cells are doubled.",
        ) from error


def _row_blocks(path: PathLike, records: Iterator[Record], width: int) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Line numbers and fields, `CSV_BLOCK` rows at a time."""
    while block := list(itertools.islice(records, CSV_BLOCK)):
        for line, row in block:
            if len(row) != width:
                raise DataFileError(
                    path,
                    line=line,
                    expected=f"{width} fields, as in the first line",
                    found=f"{len(row)}",
                    advice="Quote fields that contain the delimiter.",
                )
        yield [line for line, _ in block], [row for _, row in block]


def _label_code(path: PathLike, codes: dict[bytes, int], text: str, number: int) -> int:
    text = text.strip()
    if not text or text.lower() in ("nan", "na"):
        raise DataFileError(
            path, line=number, expected="a label", found=shown(text), advice="Leave out rows whose label is missing."
        )
    return codes.setdefault(text.encode(), len(codes))
