"""Guesses about a csv file: whether the first line is a header, and whether the first column is an index.

pandas writes its index as a first column without a name, others call it index or Id, R writes row names. As a feature,
the row number would leak the label. A first line of numbers may be a row (possibly with missing values), or column
names such as years.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UNNAMED = re.compile(r"(Unnamed: \d+(\.\d+)*)?")  # pandas' name for columns read without a name
INDEX_NAME = re.compile(r"index|idx|id|row|row[ _.]?(id|index|names?|number|num)|level_0|#", re.IGNORECASE)
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
WHOLE = re.compile(r"0|[1-9]\d*", re.ASCII)
WORDS = {"true", "false"}
MISSING = {"", "nan", "na", "n/a", "null", "none", "?", "-", ".", "inf", "+inf", "-inf", "infinity", "-infinity"}
FEWEST_NUMBERED = 4  # columns named 0, 1, 2, ... by pandas; fewer may be data
FEWEST_COUNTED = 10  # rows numbered by the first column of a file without header; fewer may be data
RARE = 0.1  # share of rows with a unique label, above which a unique label is no evidence


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


# ---- the first line ----


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]], label_at: int | None) -> tuple[bool, bool]:
    """(whether the first line is a header, whether that is practically certain), judged with some of the rows below.

    It is a header if the cell of some feature is neither a number nor a missing value. If all are, it is a row, unless
    they are 0, 1, 2, ..., or distinct whole numbers next to a label that no row has although most labels recur, or
    after an empty cell above an index.
    """
    n_blank = next((i for i, cell in enumerate(first) if cell or i == label_at), len(first))
    if label_at is not None and label_at < n_blank:
        return True, True
    indexed = n_blank > 0 and _numbers_rows([row[0] for row in rows if row])
    first, rows = first[n_blank:], [row[n_blank:] for row in rows]
    label_at = None if label_at is None else label_at - n_blank
    features = [cell for i, cell in enumerate(first) if i != label_at]
    values = [is_number(cell) or cell.lower() in WORDS for cell in features]
    if not any(values) or not all(
        known or cell.lower() in MISSING for known, cell in zip(values, features, strict=True)
    ):
        return True, True
    if [*first] == [str(i) for i in range(len(first))]:
        return len(first) >= FEWEST_NUMBERED or indexed, indexed
    if label_at is None or is_number(first[label_at]):
        header = indexed and all(map(WHOLE.fullmatch, first)) and len(set(first)) == len(first)
        return header, not header
    labels = [row[label_at].strip() for row in rows if len(row) > label_at]
    if first[label_at].strip() in labels:
        return False, True
    numbered = features == [str(i) for i in range(len(features))]
    different = all(map(WHOLE.fullmatch, features)) and len(set(features)) == len(features)
    counts = Counter(labels)
    alone = sum(count == 1 for count in counts.values())
    labels_come_again = bool(labels) and alone < RARE * len(labels)
    return different and (labels_come_again or (numbered and len(features) > 1)), numbered or indexed


# ---- the first columns ----


def may_be_index(name: str) -> bool:
    """Whether a column of this name may be an index: it has no name, or is called index, Id, row, ..."""
    return bool(UNNAMED.fullmatch(name) or INDEX_NAME.fullmatch(name))


def n_first(names: Sequence[str]) -> int:
    """The number of leading columns that may be an index."""
    return next((i for i, name in enumerate(names) if not may_be_index(name)), len(names))


def _numbers_rows(cells: Sequence[str]) -> bool:
    return all(map(is_number, cells)) and is_index(np.asarray(cells, np.float64))


def is_index(values: npt.NDArray[np.float64]) -> bool:
    """Whether a candidate column is an index: distinct whole numbers (gaps and any order are allowed), or a count that
    restarts, as in concatenated tables."""
    if not len(values) or not (
        np.isfinite(values).all() and (values >= 0).all() and (values == np.floor(values)).all()
    ):
        return False
    if len(np.unique(values)) == len(values):
        return True
    begins = np.flatnonzero(np.diff(values) != 1.0) + 1
    return bool((values[begins] == values[0]).all() and len(begins) < len(values) / 2)


def counts_rows(values: npt.NDArray[np.float64]) -> bool:
    """Whether a column of a file without header is 0, 1, 2, ... or 1, 2, 3, ..., too long for a coincidence."""
    if len(values) < FEWEST_COUNTED or values[0] not in (0.0, 1.0):
        return False
    return bool((values == values[0] + np.arange(len(values))).all())
