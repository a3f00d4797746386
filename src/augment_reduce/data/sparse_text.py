"""Sparse text: files of the extreme-classification (XML) repository, and svmlight / libsvm files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.files import (
    DataFileError,
    PathLike,
    decode_line,
    empty_file,
    first_bytes,
    line_blocks,
    shown,
)
from augment_reduce.data.rows import MultiLabelRows, assemble_csr
from augment_reduce.data.sparse_blocks import parse_block
from augment_reduce.data.sparse_lines import LARGEST_INDEX, NUMBER, Block, IntArray, Rules

ZeroBased = bool | Literal["auto"]

INTEGER = re.compile(rb"[+-]?\d{1,18}")
SAID_BASE = re.compile(rb"column indices are (zero|one)-based", re.IGNORECASE)
NOT_FINITE = re.compile(rb"[+-]?(nan|inf|infinity)", re.IGNORECASE)


class _Collected:
    """The blocks of one file, collected into X and the labels."""

    def __init__(self) -> None:
        self.values: list[npt.NDArray[np.float32]] = []
        self.indices: list[np.ndarray] = []
        self.counts: list[IntArray] = []
        self.label_ids: list[IntArray] = []
        self.label_counts: list[IntArray] = []
        self.n_rows = 0
        self.lowest: int | None = None
        self.highest = -1

    def add(self, block: Block, label_ids: IntArray) -> None:
        self.n_rows += len(block.counts)
        self.counts.append(block.counts)
        self.label_counts.append(block.label_counts)
        self.label_ids.append(label_ids)
        self.values.append(block.values)
        if block.indices.size == 0:
            return
        low, high = int(block.indices.min()), int(block.indices.max())
        self.lowest = low if self.lowest is None else min(low, self.lowest)
        self.highest = max(high, self.highest)
        # int32 where possible: half the memory while reading.
        self.indices.append(block.indices.astype(np.int32) if high < 2**31 else block.indices)

    def features(self, n_features: int, shift: int = 0) -> sparse.csr_matrix:
        if shift:
            for indices in self.indices:
                indices -= shift
        return assemble_csr(self.values, self.indices, self.counts, n_features)

    def label_sets(self, n_labels: int) -> sparse.csr_matrix:
        """(N, K) boolean; a label written twice in a row counts once."""
        counts = np.concatenate(self.label_counts) if self.label_counts else np.zeros(0, np.int64)
        ids = np.concatenate(self.label_ids) if self.label_ids else np.zeros(0, np.int64)
        row = np.repeat(np.arange(len(counts)), counts)
        order = np.lexsort((ids, row))
        row, ids = row[order], ids[order]
        new = np.ones(len(ids), bool)
        new[1:] = (row[1:] != row[:-1]) | (ids[1:] != ids[:-1])
        return assemble_csr(
            [np.ones(int(new.sum()), bool)], [ids[new]], [np.bincount(row[new], minlength=len(counts))], n_labels
        )


def read_xml_repository(path: PathLike) -> MultiLabelRows:
    """Read the text format of the extreme-classification repository, gzip or not.

    A header `N D K`, then N lines `label,label feature:value feature:value`, all counted from 0. A line may have no
    labels (it then starts with a blank) or nothing at all. Features come out ascending; a feature twice in a row is
    refused, a label twice in a row counts once.
    """
    (_, n_features, n_labels), blocks = xml_blocks(path)
    collected = _Collected()
    for block in blocks:
        collected.add(block, block.label_ids)
    labels = collected.label_sets(n_labels)
    return MultiLabelRows(collected.features(n_features), labels)


def xml_blocks(path: PathLike) -> tuple[tuple[int, int, int], Iterator[Block]]:
    """(N, D, K) of the header, and the rows, some at a time: N in all, or an error."""
    blocks = line_blocks(path)
    first, block = next(blocks, (1, b""))
    if not block:
        raise empty_file(path, "a header line 'N D K'")
    header, _, rest = block.partition(b"\n")
    shape = parse_header(path, header)
    return shape, _xml_rows(path, shape, itertools.chain([(first + 1, rest)], blocks))


def _xml_rows(path: PathLike, shape: tuple[int, int, int], blocks: Iterator[tuple[int, bytes]]) -> Iterator[Block]:
    (n_rows, n_features, n_labels), n_read = shape, 0
    rules = Rules(
        highest=n_features - 1,
        n_labels=n_labels,
        limit_note=f"The header declares {n_features} features and {n_labels} labels, both counted from 0.",
    )
    for first, text in blocks:
        surplus = n_read + text.count(b"\n") - n_rows
        rest = _without_blank_tail(path, first, text, surplus, n_rows) if surplus > 0 else text
        if rest:
            parsed = parse_block(path, first, rest, rules)
            n_read += len(parsed.counts)
            yield parsed
    if n_read < n_rows:
        raise DataFileError(
            path,
            expected=f"{n_rows:,} rows, as the header declares",
            found=f"only {n_read:,} when the file ended",
            advice="The file was cut short, or its header belongs to another one.",
        )


def parse_header(path: PathLike, line: bytes) -> tuple[int, int, int]:
    """N, D, K of the header line."""
    fields = decode_line(path, 1, line).split()
    if len(fields) != 3 or not all(field.isascii() and field.isdigit() and len(field) < 19 for field in fields):
        raise DataFileError(
            path,
            line=1,
            expected="a header of three whole numbers 'N D K' (rows, features, labels)",
            found=shown(line),
            advice="A file without such a header may be svmlight (format='svmlight', read_svmlight).",
        )
    n_rows, n_features, n_labels = (int(field) for field in fields)
    return n_rows, n_features, n_labels


def _without_blank_tail(path: PathLike, first: int, block: bytes, surplus: int, n_rows: int) -> bytes:
    """The block without lines beyond the declared N rows, which must be blank."""
    lines = block.split(b"\n")[:-1]
    kept = len(lines) - surplus
    for number, line in enumerate(lines[kept:], start=first + kept):
        if line.strip():
            raise DataFileError(
                path,
                line=number,
                expected=f"the end of the file after {n_rows:,} rows, as the header declares",
                found=f"another row, {shown(line)}",
                advice="Correct the header's first number, or remove the extra rows.",
            )
    return b"".join(line + b"\n" for line in lines[:kept])


class SvmlightRows(NamedTuple):
    """The contents of a svmlight file: `y` (one label per row), `labels` (label sets), or neither."""

    X: sparse.csr_matrix
    y: np.ndarray | None
    labels: sparse.csr_matrix | None
    label_names: list[str] | None
    zero_based: bool


def read_svmlight(
    path: PathLike, *, n_features: int | None = None, zero_based: ZeroBased = "auto"
) -> tuple[sparse.csr_matrix, np.ndarray] | MultiLabelRows:
    """Read svmlight / libsvm text, gzip or not: `label index:value …`, comments after `#`, blank lines skipped.

    Returns (X, y), with y int64 if every label is a whole number, float64 if every one is a number, strings
    otherwise. If any line has a comma list of labels, returns `MultiLabelRows`.

    `zero_based="auto"` takes indices as 1-based unless a 0 occurs. That is right for most training files, but a test
    file may lack index 0, so pass True or False if you know.
    """
    found = scan_svmlight(path, n_features=n_features, zero_based=zero_based, need_labels=True)
    if found.labels is not None:
        return MultiLabelRows(found.X, found.labels, found.label_names)
    assert found.y is not None  # need_labels
    return found.X, found.y


def scan_svmlight(path: PathLike, *, n_features: int | None, zero_based: ZeroBased, need_labels: bool) -> SvmlightRows:
    """`read_svmlight` that also returns how indices were read; `need_labels=False` accepts a file without labels."""
    if zero_based == "auto":
        zero_based = said_base(path)
    auto = zero_based == "auto"
    base = 0 if zero_based is True else 1
    collected, codes, unlabelled = _Collected(), dict[bytes, int](), None
    for block, missing in svmlight_blocks(path, n_features=n_features, zero_based=zero_based):
        unlabelled = missing if unlabelled is None else unlabelled
        collected.add(block, label_numbers(block, codes))
    if collected.n_rows == 0:
        raise empty_file(path, "rows 'label index:value …'")
    if auto and collected.lowest == 0:
        base = 0
        if n_features is not None and collected.highest == n_features:
            # A 0 contradicts n_features: read again as 0-based, to find the line.
            return scan_svmlight(path, n_features=n_features, zero_based=True, need_labels=need_labels)
    width = n_features if n_features is not None else collected.highest + 1 - base if collected.highest >= 0 else 0
    if width > LARGEST_INDEX:
        raise DataFileError(
            path, expected=f"at most {LARGEST_INDEX} features", found=f"{width}: the indices count from 0",
            advice="Say where they begin with zero_based=.",
        )  # fmt: skip
    y, labels, names = _labels(path, collected, codes, unlabelled, need_labels)
    return SvmlightRows(collected.features(width, shift=base), y, labels, names, base == 0)


def svmlight_blocks(
    path: PathLike, *, n_features: int | None, zero_based: ZeroBased
) -> Iterator[tuple[Block, int | None]]:
    """The rows, some at a time, and the first line among them that lacks a label. Feature indices are as in the file;
    "auto": from 0 or 1 on."""
    auto, base = zero_based == "auto", 0 if zero_based is True else 1
    rules = Rules(
        lowest=0 if auto else base,
        highest=None if n_features is None else n_features - 1 + base,
        comments=True,
        limit_note=f"Features are counted from {base}"
        + (f" and there are {n_features} of them." if n_features is not None else "; see zero_based."),
    )
    for first, text in line_blocks(path):
        block = parse_block(path, first, text, rules)
        used = (block.label_counts > 0) | (block.counts > 0)
        missing = np.flatnonzero(used & (block.label_counts == 0))
        kept = block._replace(label_counts=block.label_counts[used], counts=block.counts[used])
        yield kept, first + int(missing[0]) if missing.size else None


def label_numbers(block: Block, codes: dict[bytes, int]) -> IntArray:
    """Numbers of the labels in the order in which they occur; new ones are entered in `codes`."""
    return np.fromiter((codes.setdefault(label, len(codes)) for label in block.labels), np.int64, len(block.labels))


def said_base(path: PathLike) -> ZeroBased:
    """Whether indices are 0-based, if a comment at the top says so, as scikit-learn's do."""
    for line in first_bytes(path).split(b"\n"):
        if line.strip() and not line.lstrip().startswith(b"#"):
            break
        if said := SAID_BASE.search(line):
            return said[1].lower() == b"zero"
    return "auto"


def _labels(
    path: PathLike, collected: _Collected, codes: dict[bytes, int], unlabelled: int | None, need_labels: bool
) -> tuple[np.ndarray | None, sparse.csr_matrix | None, list[str] | None]:
    """One label a row, or sets of labels and their names, or nothing."""
    if not codes and not need_labels:
        return None, None, None
    tokens = list(codes)
    if all(int(counts.max(initial=0)) <= 1 for counts in collected.label_counts):
        if unlabelled is not None:
            raise DataFileError(
                path, line=unlabelled, expected="a label, then features", found="no label", advice="Give every row one."
            )
        return label_values(path, tokens)[np.concatenate(collected.label_ids)], None, None
    numbers, names, n_labels = numbers_of_sets(tokens)
    collected.label_ids = [numbers[ids] for ids in collected.label_ids]
    return None, collected.label_sets(n_labels), names


def numbers_of_sets(tokens: list[bytes]) -> tuple[IntArray, list[str] | None, int]:
    """(the number of each label, names by number or None, how many numbers there are): labels of sets that are all
    whole numbers are these, others are numbered in the order of their names."""
    if all(token.isdigit() and INTEGER.fullmatch(token) for token in tokens):
        numbers = np.asarray([int(token) for token in tokens], np.int64)
        return numbers, None, int(numbers.max(initial=-1)) + 1
    texts = np.asarray([token.decode("utf-8") for token in tokens])
    order = np.argsort(texts)
    return np.argsort(order), texts[order].tolist(), len(texts)


def label_values(path: PathLike, tokens: list[bytes]) -> np.ndarray:
    """The distinct labels as int64 if all are whole numbers, else float64 if all are numbers, else strings."""
    if all(INTEGER.fullmatch(token) for token in tokens):
        return np.asarray([int(token) for token in tokens], np.int64)
    bad = next((token for token in tokens if NOT_FINITE.fullmatch(token)), None)
    if bad is not None and all(NUMBER.fullmatch(token) or NOT_FINITE.fullmatch(token) for token in tokens):
        raise DataFileError(
            path,
            line=_line_that_opens_with(path, bad),
            expected="a label on every row",
            found=f"the label {shown(bad)}",
            advice="Leave out the rows whose label is missing.",
        )
    if all(NUMBER.fullmatch(token) for token in tokens):
        values = np.asarray([float(token) for token in tokens])
        if not np.isfinite(values).all():
            large = tokens[int(np.flatnonzero(~np.isfinite(values))[0])]
            raise DataFileError(
                path,
                line=_line_that_opens_with(path, large),
                expected="a label that is text, or a number of 64 bits",
                found=f"the label {shown(large)}",
                advice="Put a letter before labels that are names made of digits.",
            )
        return values
    return np.asarray([token.decode("utf-8") for token in tokens])


def _line_that_opens_with(path: PathLike, token: bytes) -> int | None:
    for first, block in line_blocks(path):
        for number, line in enumerate(block.split(b"\n"), start=first):
            if line.split(maxsplit=1)[:1] == [token]:
                return number
    return None
