"""Tables in csv files with a header line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from augment_reduce.data.files import DataFileError, PathLike, decode_line, empty_file, line_blocks, shown
from augment_reduce.data.rows import Features
from augment_reduce.data.sparse_text import label_values

CSV_BLOCK = 2048  # rows converted at a time


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
    ignore_columns: Sequence[str] = (),
    delimiter: str | None = None,
) -> Table:
    """Read a csv file with a header line, gzip or not; every column but the label's must hold numbers.

    `label_column` is a name or a position (0 is the first, -1 the last; None: the file has no labels). Labels may be
    text. `ignore_columns` names columns to leave out. `delimiter` is told from the header unless given.
    """
    lines = _text_lines(path)
    header_line = next(lines, "")
    if not header_line.strip():
        raise empty_file(path, "a header line with column names")
    delimiter = delimiter or max(",;\t", key=header_line.count)
    header = [name.strip() for name in next(csv.reader([header_line], delimiter=delimiter))]
    if all(_is_number(name) for name in header):
        raise DataFileError(
            path,
            line=1,
            expected="a header line with column names",
            found=shown(header_line.rstrip()),
            advice="Put the names of the columns on the first line.",
        )
    label_at = None if label_column is None else find_column(path, header, label_column)
    left_out = {find_column(path, header, name) for name in ignore_columns} | {label_at}
    kept = [i for i in range(len(header)) if i not in left_out]
    codes: dict[bytes, int] = {}
    ids: list[int] = []
    blocks: list[np.ndarray] = []
    reader = csv.reader(lines, delimiter=delimiter)
    for numbers, rows in _row_blocks(path, reader, header):
        blocks.append(_numbers(path, numbers, rows, header, kept))
        if label_at is not None:
            ids += [_label_code(path, codes, row[label_at], number) for number, row in zip(numbers, rows, strict=True)]
    if not blocks:
        raise DataFileError(path, expected="rows below the header", found="none", advice="Was it copied to the end?")
    y = None if label_at is None else label_values(path, list(codes))[np.asarray(ids)]
    return Table(np.concatenate(blocks), y, [header[i] for i in kept])


def _text_lines(path: PathLike) -> Iterator[str]:
    for first, block in line_blocks(path):
        for number, line in enumerate(block.split(b"\n")[:-1], start=first):
            yield decode_line(path, number, line) + "\n"


def _row_blocks(path: PathLike, reader: Any, header: Sequence[str]) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Line numbers and fields, `CSV_BLOCK` rows at a time; blank lines are skipped."""
    numbers: list[int] = []
    rows: list[list[str]] = []
    try:
        for row in reader:
            if not row:
                continue
            number = reader.line_num + 1  # the header was taken off before the reader began
            if len(row) != len(header):
                raise DataFileError(
                    path,
                    line=number,
                    expected=f"{len(header)} fields, as in the header",
                    found=f"{len(row)}",
                    advice="Quote fields that contain the delimiter.",
                )
            numbers.append(number)
            rows.append(row)
            if len(rows) == CSV_BLOCK:
                yield numbers, rows
                numbers, rows = [], []
    except csv.Error as error:
        raise DataFileError(path, line=reader.line_num + 1, expected="a csv row", found=str(error)) from error
    if rows:
        yield numbers, rows


def _numbers(
    path: PathLike, numbers: Sequence[int], rows: Sequence[Sequence[str]], header: Sequence[str], kept: Sequence[int]
) -> np.ndarray:
    """The kept columns as float32; the first cell that is no finite number is reported with line and column."""
    try:
        block = np.asarray([[float(row[i]) for i in kept] for row in rows], np.float64).reshape(len(rows), len(kept))
        if np.abs(block).max(initial=0.0) <= np.finfo(np.float32).max:  # false for NaN and infinity as well
            return block.astype(np.float32)
    except ValueError:
        pass
    for number, row in zip(numbers, rows, strict=True):
        for i in kept:
            if not _is_number(row[i]) or not abs(float(row[i])) <= np.finfo(np.float32).max:
                raise DataFileError(
                    path,
                    line=number,
                    where=f"column {header[i]!r}",
                    expected="a finite number",
                    found=shown(row[i]) if row[i].strip() else "an empty cell",
                    advice="Fill missing values in, turn text into numbers, or leave the column out "
                    "(ignore_columns; label_column names the label).",
                )
    raise AssertionError("unreachable: some cell was refused above")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _label_code(path: PathLike, codes: dict[bytes, int], text: str, number: int) -> int:
    text = text.strip()
    if not text or text.lower() in ("nan", "na"):
        raise DataFileError(
            path, line=number, expected="a label", found=shown(text), advice="Leave out rows whose label is missing."
        )
    return codes.setdefault(text.encode(), len(codes))


def find_column(path: PathLike, header: Sequence[str], column: str | int) -> int:
    """The position of a column given by name or by position (also as text, if no column has that name)."""
    if isinstance(column, str) and header.count(column) == 1:
        return header.index(column)
    if isinstance(column, str) and column not in header and column.lstrip("-").isdigit():
        column = int(column)
    if isinstance(column, int) and -len(header) <= column < len(header):
        return column % len(header)
    many = "more than one of that name" if isinstance(column, str) and column in header else "none such"
    raise DataFileError(
        path,
        line=1,
        expected=f"a column {column!r}",
        found=f"{many} among the {len(header)}: {', '.join(header[:12])}{', …' if len(header) > 12 else ''}",
        advice="Name one of them, or give its position (-1 is the last).",
    )
