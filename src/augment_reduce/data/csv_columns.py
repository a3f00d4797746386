"""Columns of a csv file: found by name or position, and their cells as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from augment_reduce.data.csv_guesses import is_number
from augment_reduce.data.files import DataFileError, PathLike, shown

TRUTH = {"true": 1.0, "false": 0.0}
QUOTED = re.compile(r'"[^"]*("|$)')
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+(\.\d{3})*,\d+\s*", re.ASCII)
LIMIT = float(np.finfo(np.float32).max)
FILL_IN = (
    "Fill missing values in, turn text into numbers, or leave the column out (ignore_columns; label_column names the "
    "label)."
)


def delimiter_of(line: str) -> str:
    """The most frequent of comma, semicolon and tab outside quotes; the semicolon if commas are decimal."""
    plain = QUOTED.sub("", line)
    if ";" in plain and any(map(DECIMAL_COMMA.fullmatch, plain.split(";"))):
        return ";"
    return max(",;\t", key=plain.count)


def find_column(path: PathLike, header: Sequence[str], column: str | int) -> int:
    """The position of a column given by name or by position (also as text, if no column has that name)."""
    found = find_columns(path, header, column)
    if len(found) == 1:
        return found[0]
    raise _not_one(path, header, column, "more than one of that name")


def find_columns(path: PathLike, header: Sequence[str], column: str | int) -> list[int]:
    """As `find_column`, of all columns of that name."""
    if isinstance(column, str) and column in header:
        return [i for i, name in enumerate(header) if name == column]
    if isinstance(column, str) and re.fullmatch(r"-?\d{1,9}", column, re.ASCII):
        column = int(column)
    if isinstance(column, int) and -len(header) <= column < len(header):
        return [column % len(header)]
    raise _not_one(path, header, column, "none such")


def _not_one(path: PathLike, header: Sequence[str], column: str | int, found: str) -> DataFileError:
    return DataFileError(
        path,
        line=1,
        expected=f"a column {column!r}",
        found=f"{found} among the {len(header)}: {', '.join(header[:12])}{', …' if len(header) > 12 else ''}",
        advice="Name one of them, or give its position (-1 is the last).",
    )


class Cells:
    """Converts the selected columns to numbers, a block of rows at a time.

    A column of True and False becomes ones and zeros; one that mixes these words with numbers is refused as ambiguous.
    """

    def __init__(self, path: PathLike, names: Sequence[str] | None, kept: Sequence[int]) -> None:
        self.path, self.names, self.kept = path, names, kept
        self.words: set[int] = set()  # columns of True and False
        self.seen = False

    def numbers(self, lines: Sequence[int], rows: Sequence[Sequence[str]]) -> npt.NDArray[np.float64]:
        """(rows, columns), finite; the first invalid cell is reported with its line and column."""
        found = None if self.words else self._plain(rows)
        if found is None:
            columns = [self._column(i, [row[i] for row in rows], lines) for i in self.kept]
            found = np.stack(columns, axis=1) if columns else np.empty((len(rows), 0))
        self.seen = True
        return found

    def _plain(self, rows: Sequence[Sequence[str]]) -> npt.NDArray[np.float64] | None:
        """All cells by `float`, the fastest way; None if it fails, or accepts what it should not."""
        try:
            table = [[float(row[i]) for i in self.kept] for row in rows]
        except ValueError:
            return None
        found = np.asarray(table, np.float64).reshape(len(rows), len(self.kept))
        if not np.abs(found).max(initial=0.0) <= LIMIT:  # false for NaN as well
            return None
        odd = any("_" in text or not text.isascii() for text in ("".join([row[i] for i in self.kept]) for row in rows))
        return None if odd else found

    def _column(self, i: int, texts: Sequence[str], lines: Sequence[int]) -> npt.NDArray[np.float64]:
        words = all(text.strip().lower() in TRUTH for text in texts)
        if words and (i in self.words or not self.seen):
            self.words.add(i)
            return np.asarray([TRUTH[text.strip().lower()] for text in texts])
        for line, text in zip(lines, texts, strict=True):
            is_word = text.strip().lower() in TRUTH
            if i in self.words and not is_word:
                self._refuse(line, i, text, "True or False, as in the rows above", "")
            if i not in self.words and (not is_number(text) or not abs(float(text)) <= LIMIT):
                expected = "a number, as in the rows above" if is_word else "a finite number"
                self._refuse(line, i, text, expected, "" if is_word else FILL_IN)
        return np.asarray([TRUTH[text.strip().lower()] if i in self.words else float(text) for text in texts])

    def _refuse(self, line: int, i: int, text: str, expected: str, advice: str) -> NoReturn:
        if DECIMAL_COMMA.fullmatch(text):
            advice = "Decimal commas are not read: write numbers with a point (in pandas, read with decimal=',' first)."
        raise DataFileError(
            self.path,
            line=line,
            where=f"column {i}" if self.names is None else f"column {self.names[i]!r}",
            expected=expected,
            found=shown(text) if text.strip() else "an empty cell",
            advice=advice,
        )
