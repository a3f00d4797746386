"""From a text file of rows to a folder of mapped rows (`mapped`), in memory that does not grow with the file.

The rows are written as they are read. The order of the labels, whether features count from 0 or 1, and the rows
selected by a reduction or `min_count` are known at the end only, and applied in passes over the written files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from augment_reduce.data.arrow import ArrowRows, is_arrow
from augment_reduce.data.csv_columns import find_column
from augment_reduce.data.files import DataFileError, PathLike, empty_file, read_names
from augment_reduce.data.mapped import AT_ONCE, MappedData, open_mapped
from augment_reduce.data.mapped_writer import Column, RowFiles, finish, new_folder, write_mapped
from augment_reduce.data.readers import detect_format
from augment_reduce.data.reductions import REDUCTIONS
from augment_reduce.data.sparse_lines import LARGEST_INDEX, IntArray
from augment_reduce.data.sparse_text import (
    ZeroBased,
    label_numbers,
    label_values,
    numbers_of_sets,
    said_base,
    svmlight_blocks,
    xml_blocks,
)
from augment_reduce.data.tables import Auto, csv_blocks

CONVERTED = ("svmlight", "xml", "csv")


@dataclass
class Converted:
    """A partially read file: rows in `files`, labels in separate columns."""

    files: RowFiles
    ids: Column  # of the labels, row by row: numbers in the order in which they occurred, or those of the file
    counts: Column  # how many labels each row has
    tokens: dict[bytes, int] | None = None  # the labels and their numbers; None: the file numbers them
    sets: bool = False  # whether rows have sets of labels
    n_labels: int = 0  # where the file numbers them
    n_features: int = 0
    feature_names: list[str] | None = None
    zero_based: bool | None = None
    unlabelled: int | None = None  # the first line without a label
    dropped: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # columns that are no features

    def add(
        self, values: np.ndarray, indices: np.ndarray, counts: np.ndarray, ids: np.ndarray, each: np.ndarray
    ) -> None:
        self.files.add(values, indices, counts, None)
        self.ids.add(ids)
        self.counts.add(each)


def convert_rows(
    path: PathLike, output: PathLike, format: str = "auto", *, n_features: int | None = None,
    zero_based: ZeroBased = "auto", label_column: str | int | None = -1, ignore_columns: Sequence[str | int] = (),
    header: Auto = "auto", keep_index: bool = False, reduction: str | None = None, min_count: int = 1,
    label_names: PathLike | None = None,
) -> MappedData:  # fmt: skip
    """Convert a svmlight, XML-repository or csv file, packed or not, or a Parquet or Arrow file (a column a feature),
    to a new folder of mapped rows, and map it.

    The arguments are those of `read_rows`. `min_count` drops labels with fewer examples; `label_names` is a file whose
    line i names label i - 1. Zeros of a csv file are left out, as of any sparse rows.
    """
    if reduction is not None and reduction not in REDUCTIONS:
        raise ValueError(f"Expected a reduction among {sorted(REDUCTIONS)}, but found {reduction!r}.")
    if format == "auto" and is_arrow(path):
        if reduction is not None or min_count > 1 or label_names is not None:
            raise ValueError("reduction, min_count and label_names are for text files, not for Parquet or Arrow.")
        return _convert_arrow(path, output, label_column, ignore_columns)
    format = detect_format(path) if format == "auto" else format
    if format not in CONVERTED:
        raise DataFileError(
            path, expected=f"a file in one of the formats {', '.join(CONVERTED)}", found=format,
            advice="Arrays are in memory already: write them with augment_reduce.data.write_mapped(folder, X, y).",
        )  # fmt: skip
    names = None if label_names is None else read_names(label_names)
    with new_folder(output) as folder:
        whole = np.dtype(np.int64)
        found = Converted(
            RowFiles(folder, np.dtype(np.float32)), Column(folder / "label_ids.npy", whole),
            Column(folder / "label_counts.npy", whole),
        )  # fmt: skip
        if format == "svmlight":
            _read_svmlight(path, found, n_features, zero_based)
        elif format == "xml":
            _read_xml(path, found)
        else:
            _read_csv(path, found, label_column, ignore_columns, header, keep_index)
        if n_features is not None and found.n_features != n_features:
            raise DataFileError(
                path, expected=f"{n_features:,} features", found=f"{found.n_features:,}",
                advice="Give the same columns as in training.",
            )  # fmt: skip
        classes = _finish_labels(path, found, reduction, min_count, names)
        finish(
            folder, found.files.close(), found.n_features, classes, feature_names=found.feature_names,
            zero_based=found.zero_based,
        )  # fmt: skip
    return open_mapped(output)


def _convert_arrow(
    path: PathLike, output: PathLike, label_column: str | int | None, ignore_columns: Sequence[str | int]
) -> MappedData:
    names = ArrowRows(path, None).columns
    at = None if label_column is None else find_column(path, names, label_column)
    left_out = {find_column(path, names, column) for column in ignore_columns} | {at}
    features = [name for i, name in enumerate(names) if i not in left_out]
    rows = ArrowRows(path, None if at is None else names[at], features=features)
    return write_mapped(output, rows, feature_names=rows.feature_names)


# ---- reading ----


def _read_svmlight(path: PathLike, found: Converted, n_features: int | None, zero_based: ZeroBased) -> None:
    zero_based = said_base(path) if zero_based == "auto" else zero_based
    low, high, found.tokens = LARGEST_INDEX, -1, {}
    for block, missing in svmlight_blocks(path, n_features=n_features, zero_based=zero_based):
        found.unlabelled = missing if found.unlabelled is None else found.unlabelled
        found.sets = found.sets or int(block.label_counts.max(initial=0)) > 1
        found.add(
            block.values, block.indices, block.counts, label_numbers(block, found.tokens), block.label_counts
        )  # fmt: skip
        low, high = min(low, int(block.indices.min(initial=low))), max(high, int(block.indices.max(initial=high)))
    if not found.files.n_rows:
        raise empty_file(path, "rows 'label index:value …'")
    base = int(zero_based is False or (zero_based == "auto" and low > 0))
    if n_features is not None and high - base >= n_features:
        raise DataFileError(
            path, expected=f"feature indices of at most {n_features - 1 + base}, counted from {base}", found=f"{high}",
            advice="Check n_features and zero_based.",
        )  # fmt: skip
    found.n_features = n_features if n_features is not None else high + 1 - base if high >= 0 else 0
    found.zero_based = base == 0
    if found.n_features > LARGEST_INDEX:
        raise DataFileError(
            path, expected=f"at most {LARGEST_INDEX} features", found=f"{found.n_features}: the indices count from 0",
            advice="Say where they begin with zero_based=.",
        )  # fmt: skip
    if base:
        found.files.indices.change(lambda indices: indices - 1)


def _read_xml(path: PathLike, found: Converted) -> None:
    (_, found.n_features, found.n_labels), blocks = xml_blocks(path)
    found.sets = True
    for block in blocks:
        found.add(block.values, block.indices, block.counts, block.label_ids, block.label_counts)


def _read_csv(
    path: PathLike, found: Converted, label_column: str | int | None, ignore_columns: Sequence[str | int],
    header: Auto, keep_index: bool,
) -> None:  # fmt: skip
    table = csv_blocks(
        path, label_column=label_column, ignore_columns=ignore_columns, header=header, keep_index=keep_index
    )
    found.tokens, first_columns = table.codes, Column(found.files.folder / "first_columns.npy", np.dtype(np.float64))
    n = table.n_candidates
    for numbers, ids in table.blocks:
        first_columns.add(numbers[:, :n].reshape(-1))
        numbers = numbers.astype(np.float32)
        row, column = np.nonzero(numbers)
        counts = np.bincount(row, minlength=len(numbers))
        found.add(numbers[row, column], column, counts, ids, np.full(len(numbers), int(table.codes is not None)))
    # The values of one column or two, in memory: whether they number the rows depends on all of them.
    stays = table.columns_that_stay(
        first_columns.read(0, first_columns.length).reshape(-1, n) if n else np.empty((0, 0))
    )
    first_columns.discard()
    found.dropped = np.setdiff1d(np.arange(n), stays)
    found.n_features, found.feature_names = len(table.kept) - len(found.dropped), table.names_of(stays)


# ---- labels ----


def _finish_labels(
    path: PathLike, found: Converted, reduction: str | None, min_count: int, names: list[str] | None
) -> np.ndarray | None:
    """Write the label of every example, and the examples where they are not the rows; the classes in their order.

    None: a file without any labels, as for prediction; all its rows are kept.
    """
    if not found.ids.length:
        if len(found.dropped):
            found.files = _rewritten(found, None, None)
        _discard_labels(found)
        return None
    values = _in_order(path, found)
    if found.sets and reduction is None:
        _require_one_each(path, found)
    classes, of_value = _named(path, values, names)
    counts = np.zeros(len(classes), np.int64)
    for _, label in _examples(found, reduction):
        counts += np.bincount(of_value[label], minlength=len(classes))
    kept = counts >= max(1, min_count)
    if not kept.any():
        raise ValueError(
            f"Expected labels with at least {min_count} examples (min_count), but the most frequent of "
            f"{len(counts):,} has {counts.max(initial=0)}. Lower min_count."
        )
    number = np.where(kept, np.cumsum(kept) - 1, -1)[of_value]
    if _are_the_rows(found, reduction, number):
        found.files.begin_labels()
        for _, label in _examples(found, reduction):
            found.files.add_labels(number[label])
    else:
        found.files = _rewritten(found, reduction, number)
    _discard_labels(found)
    return classes[kept]


def _in_order(path: PathLike, found: Converted) -> np.ndarray:
    """The labels that occur, in ascending order; `ids` become their indices in it."""
    if found.tokens is None:
        values = np.empty(0, np.int64)
        for part in found.ids.parts():
            values = np.union1d(values, part)
        found.ids.change(lambda ids: np.searchsorted(values, ids))
        return values
    if found.sets:
        numbers, texts, _ = numbers_of_sets(list(found.tokens))
        values, place = np.unique(numbers if texts is None else np.asarray(texts)[numbers], return_inverse=True)
    else:
        if found.unlabelled is not None:
            raise DataFileError(
                path, line=found.unlabelled, expected="a label, then features", found="no label",
                advice="Give every row one.",
            )  # fmt: skip
        values, place = np.unique(label_values(path, list(found.tokens)), return_inverse=True)
    found.ids.change(lambda ids: place[ids])
    return values


def _named(path: PathLike, values: np.ndarray, names: list[str] | None) -> tuple[np.ndarray, IntArray]:
    """(the classes in ascending order, the class of each value): the values themselves, or their names."""
    if names is None:
        return values, np.arange(len(values))
    if values.dtype.kind not in "iu" or not 0 <= values[0] <= values[-1] < len(names):
        highest = f"labels up to {values[-1]}" if values.dtype.kind in "iu" else "other labels"
        raise DataFileError(
            path, expected=f"label numbers from 0 to {len(names) - 1:,}, one for each of the {len(names):,} names",
            found=highest, advice="Line i of the names (label_names) names label i - 1.",
        )  # fmt: skip
    return np.unique(np.asarray(names)[values], return_inverse=True)


def _require_one_each(path: PathLike, found: Converted) -> None:
    low, high = 2**62, 0
    for counts in found.counts.parts():
        low, high = min(low, int(counts.min())), max(high, int(counts.max()))
    if low == high == 1:
        return
    raise DataFileError(
        path, expected="one label a row", found=f"rows with {low} to {high} labels",
        advice="Choose a reduction (reduction=): 'first' keeps every row's lowest label, 'all' makes every "
        "(row, label) pair an example.",
    )  # fmt: skip


# ---- examples ----


def _examples(found: Converted, reduction: str | None) -> Iterator[tuple[IntArray, IntArray]]:
    """(rows, labels) of the examples, by blocks of rows; a label that is repeated in a row counts once."""
    begin = first = 0
    for counts in found.counts.parts():
        end = begin + int(counts.sum())
        row, label = np.repeat(np.arange(first, first + len(counts)), counts), found.ids.read(begin, end)
        begin, first = end, first + len(counts)
        if found.sets:
            order = np.lexsort((label, row))
            row, label = row[order], label[order]
            new = np.ones(len(row), bool)
            new[1:] = (row[1:] != row[:-1]) | ((label[1:] != label[:-1]) & (reduction != "first"))
            row, label = row[new], label[new]
        yield row, label


def _are_the_rows(found: Converted, reduction: str | None, number: IntArray) -> bool:
    """Whether every row is one example, with all of its columns."""
    at = 0
    for row, label in _examples(found, reduction):
        if not np.array_equal(row, np.arange(at, at + len(row))) or (number[label] < 0).any():
            return False
        at += len(row)
    return at == found.files.n_rows and not len(found.dropped)


def _rewritten(found: Converted, reduction: str | None, number: IntArray | None) -> RowFiles:
    """The examples whose label has a number >= 0, with that number, in new files; None: all rows, without labels."""
    old = found.files.moved("read")
    files = RowFiles(found.files.folder, np.dtype(np.float32))
    every = ((np.arange(i, min(i + AT_ONCE, old.n_rows)), None) for i in range(0, old.n_rows, AT_ONCE))
    for row, label in every if number is None else _examples(found, reduction):
        code = None
        if number is not None:
            code = number[label]
            row, code = row[code >= 0], code[code >= 0]
        for part, (values, indices, counts) in old.taken(row):
            if len(found.dropped):
                kept = ~np.isin(indices, found.dropped)
                of_row = np.repeat(np.arange(len(counts)), counts)[kept]
                values, indices = values[kept], indices[kept] - np.searchsorted(found.dropped, indices[kept])
                counts = np.bincount(of_row, minlength=len(counts))
            files.add(values, indices, counts, None if code is None else code[part])
    old.discard()
    return files


def _discard_labels(found: Converted) -> None:
    found.ids.discard()
    found.counts.discard()
