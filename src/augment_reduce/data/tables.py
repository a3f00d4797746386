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
from augment_reduce.data.sparse_text import label_values

CSV_BLOCK = 2048  # rows converted at a time
LOOKED_AT = 1000  # rows that are asked whether the first line is one of them
SEPARATOR_LINE = re.compile(r"sep=(.)\s*")  # which Excel puts first

Record = tuple[int, list[str]]  # the number of its last line, and its fields
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
      text. `ignore_columns` names columns to leave out. `delimiter` is told from the first line unless given.
    - `header`: whether the first line names the columns. "auto" takes a line of numbers for a row, and warns; see
      `csv_guesses.names_columns`.
    - A first column that numbers the rows and has no name, as pandas writes its index, or is called index, Id, row and
      the like, is left out, with a warning, unless `keep_index`.
    """
    records, first = _first_record(path, delimiter)
    label_at, names, rows = _header(path, first, records, label_column, ignore_columns, header)
    shape = _shape(first, names)
    left_out = {i for column in ignore_columns for i in find_columns(path, shape, column)} | {label_at}
    kept = [i for i in range(len(shape)) if i not in left_out]
    cells = Cells(path, names, kept)
    ids, codes, blocks, indexes = list[int](), dict[bytes, int](), list[np.ndarray](), list[np.ndarray]()
    n_candidates = 0 if keep_index else min(1, len(kept)) if names is None else n_first([names[i] for i in kept])
    for lines, fields in _row_blocks(path, rows, len(shape)):
        numbers = cells.numbers(lines, fields)
        indexes.append(numbers[:, :n_candidates])
        blocks.append(numbers[:, n_candidates:].astype(np.float32))
        if label_at is not None:
            ids += [_label_code(path, codes, row[label_at], line) for line, row in zip(lines, fields, strict=True)]
    if not blocks:
        raise DataFileError(path, expected="rows below the header", found="none", advice="Was it copied to the end?")
    X, first_columns = np.concatenate(blocks), np.concatenate(indexes)
    called = [None if names is None else names[i] for i in kept[:n_candidates]]
    stays = [j for j, name in enumerate(called) if not _is_index(path, name, first_columns[:, j])]
    X = np.concatenate([first_columns[:, stays].astype(np.float32), X], axis=1) if stays else X
    y = None if label_at is None else label_values(path, list(codes))[np.asarray(ids)]
    kept = [*(kept[j] for j in stays), *kept[n_candidates:]]
    return Table(X, y, None if names is None else [names[i] for i in kept])


def csv_header(path: PathLike, *, header: Auto = "auto") -> tuple[list[str], bool]:
    """The fields of the first line, and whether they name the columns, for a file whose labels are in the last."""
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
        ahead = list(itertools.islice(records, LOOKED_AT))
        records = itertools.chain(ahead, records)
        label_at = None if label_column is None else _position(names, label_column)
        header, sure = names_columns(names, [row for _, row in ahead], label_at)
        if not header or not sure:
            _say_header(path, line, header)
    shape = _shape(first, names if header else None)
    label_at = None if label_column is None else find_column(path, shape, label_column)
    return (label_at, names, records) if header else (label_at, None, itertools.chain([first], records))


def _shape(first: Record, names: list[str] | None) -> list[str]:
    """What columns are called by; in a file without header their positions."""
    return [str(i) for i in range(len(first[1]))] if names is None else names


def _position(names: Sequence[str], column: str | int) -> int | None:
    """Where the label may be, for the guess; what is no position is refused later."""
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
    """Whether a first column (None: of a file without header) numbers the rows; if so it is left out, which is said."""
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
    """The number of its last line and the fields of each record; blank ones are left out."""
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
