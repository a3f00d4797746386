"""Parse `labels index:value index:value …` line by line: defines valid lines and all error messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from augment_reduce.data.files import DataFileError, PathLike, decode_line, shown

IntArray = npt.NDArray[np.int64]

NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
LARGEST_INDEX = 2**63 - 1
LARGEST_VALUE = float(np.finfo(np.float32).max)


class Rules(NamedTuple):
    """Valid rows: feature indices in [lowest, highest], and labels in [0, n_labels) if they are integers."""

    lowest: int = 0
    highest: int | None = None
    n_labels: int | None = None
    comments: bool = False
    limit_note: str = ""


class Block(NamedTuple):
    """The rows of a block: per line the number of labels and of features, then all of them one after another."""

    labels: list[bytes]  # as text; empty if the rules require integers,
    label_ids: IntArray  # which are then here
    label_counts: IntArray
    indices: IntArray
    values: npt.NDArray[np.float32]
    counts: IntArray


def highest_index(rules: Rules) -> int:
    return LARGEST_INDEX if rules.highest is None else rules.highest


def whole_number(token: bytes) -> int:
    """The digits as an integer; anything beyond int64 as one number too large (Python refuses thousands of digits)."""
    return int(token) if len(token.lstrip(b"0")) < 20 else LARGEST_INDEX + 1


def ascending_rows(
    indices: IntArray, values: npt.NDArray[np.float32], counts: IntArray
) -> tuple[IntArray, npt.NDArray[np.float32]] | None:
    """The features of every row in ascending order; None if a row has one twice."""
    row = np.repeat(np.arange(len(counts)), counts)
    same_row = row[1:] == row[:-1]
    if (same_row & (indices[1:] <= indices[:-1])).any():
        order = np.lexsort((indices, row))
        indices, values = indices[order], values[order]
        if (same_row & (indices[1:] == indices[:-1])).any():
            return None
    return indices, values


def careful_block(path: PathLike, first: int, block: bytes, rules: Rules) -> Block:
    """As `fast_block`, line by line in plain Python; raises `DataFileError` at the first fault."""
    labels: list[bytes] = []
    indices: list[int] = []
    values: list[float] = []
    label_counts: list[int] = []
    counts: list[int] = []
    for number, line in enumerate(block.split(b"\n")[:-1], start=first):
        decode_line(path, number, line)
        fields = line.split()
        opens_with_label = bool(fields) and b":" not in fields[0] and (rules.n_labels is None or not line[:1].isspace())
        row_labels = fields[0].split(b",") if opens_with_label else []
        features = parse_features(path, number, fields[1:] if opens_with_label else fields, rules)
        check_labels(path, number, row_labels, rules)
        labels += row_labels
        label_counts.append(len(row_labels))
        indices += features.keys()
        values += features.values()
        counts.append(len(features))
    flat = np.asarray(indices, np.int64), np.asarray(values, np.float32)
    per_row = np.asarray(counts, np.int64)
    ordered = ascending_rows(*flat, per_row)
    assert ordered is not None  # parse_features refused repeats
    ids = np.asarray([int(label) for label in labels] if rules.n_labels is not None else [], np.int64)
    texts = labels if rules.n_labels is None else []
    return Block(texts, ids, np.asarray(label_counts, np.int64), *ordered, per_row)


def parse_features(path: PathLike, number: int, fields: Sequence[bytes], rules: Rules) -> dict[int, float]:
    features: dict[int, float] = {}
    for field in fields:
        name, colon, text = field.partition(b":")
        index = _index(path, number, field, name, colon, rules, fields)
        if index in features:
            raise DataFileError(
                path,
                line=number,
                expected="every feature at most once in a row",
                found=f"feature {index} twice",
                advice="Add the two values up, or drop one.",
            )
        features[index] = _value(path, number, field, text)
    return features


def _without_colons(number: int, rules: Rules, fields: Sequence[bytes]) -> str:
    if number == 1 and rules.n_labels is None and 2 <= len(fields) <= 3 and all(field.isdigit() for field in fields):
        return "A first line of three numbers is the header of an XML-repository file: read it as one (format='xml')."
    return "Labels come first and are joined by commas without blanks."


def _index(
    path: PathLike, number: int, field: bytes, name: bytes, colon: bytes, rules: Rules, fields: Sequence[bytes]
) -> int:
    if name == b"qid":
        raise DataFileError(
            path,
            line=number,
            expected="features as index:value",
            found=shown(field),
            advice="Ranking data with query ids is not supported; remove the qid fields.",
        )
    if not colon or not name.isdigit():
        is_negative = name.startswith(b"-") and name[1:].isdigit()
        what = "a negative feature index in " if is_negative else ""
        raise DataFileError(
            path,
            line=number,
            expected="features as index:value with a whole number as index",
            found=f"{what}{shown(field)}",
            advice="Number the features from 0 or 1 upwards." if colon else _without_colons(number, rules, fields),
        )
    index = whole_number(name)
    if not rules.lowest <= index <= highest_index(rules):
        upper = f" and at most {rules.highest}" if rules.highest is not None else ""
        raise DataFileError(
            path,
            line=number,
            expected=f"feature indices of at least {rules.lowest}{upper or f' and at most {LARGEST_INDEX}'}",
            found=f"{shown(name)} in {shown(field)}",
            advice=rules.limit_note,
        )
    return index


def _value(path: PathLike, number: int, field: bytes, text: bytes) -> float:
    if NUMBER.fullmatch(text) is None or abs(float(text)) > LARGEST_VALUE:
        raise DataFileError(
            path,
            line=number,
            expected="a finite number (float32) after the colon",
            found=shown(field),
            advice="Replace missing or infinite values, or leave the feature out of the row.",
        )
    return float(text)


def check_labels(path: PathLike, number: int, labels: Sequence[bytes], rules: Rules) -> None:
    for label in labels:
        if not label:
            raise DataFileError(
                path,
                line=number,
                expected="labels joined by single commas",
                found=shown(b",".join(labels)),
                advice="Remove the extra comma, or put the missing label in.",
            )
        if rules.n_labels is None:
            continue
        if not label.isdigit() or whole_number(label) >= rules.n_labels:
            raise DataFileError(
                path,
                line=number,
                expected=f"labels as whole numbers from 0 to {rules.n_labels - 1}",
                found=f"the label {shown(label)}",
                advice=rules.limit_note,
            )
