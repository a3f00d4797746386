"""Every reader by name, and `read_rows`, which detects the format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import sparse

from augment_reduce.data.archives import read_labels, read_npy, read_npz, write_npz
from augment_reduce.data.arrays import NPY_MAGIC, ZIP_MAGIC
from augment_reduce.data.files import DataFileError, DataFileWarning, PathLike, empty_file, first_bytes, shown
from augment_reduce.data.images import OmniglotImages, read_idx, read_omniglot_zip
from augment_reduce.data.reductions import reduce_labels
from augment_reduce.data.rows import LabelledRows, MultiLabelRows
from augment_reduce.data.sparse_text import ZeroBased, read_svmlight, read_xml_repository, scan_svmlight
from augment_reduce.data.tables import Auto, Table, read_csv

__all__ = [
    "FORMATS",
    "DataFileError",
    "DataFileWarning",
    "LabelledRows",
    "MultiLabelRows",
    "OmniglotImages",
    "Table",
    "detect_format",
    "read_csv",
    "read_idx",
    "read_labels",
    "read_npy",
    "read_npz",
    "read_omniglot_zip",
    "read_rows",
    "read_svmlight",
    "read_xml_repository",
    "write_npz",
]

FORMATS = ("svmlight", "xml", "npz", "npy", "csv")
SUFFIXES = {".svm": "svmlight", ".svmlight": "svmlight", ".libsvm": "svmlight", ".csv": "csv", ".tsv": "csv"}
HEADER = re.compile(rb"\s*\d+(\s+\d+){2,3}\s*")  # N D K; a fourth number is for `parse_header` to refuse
PACKED = (".gz", ".bz2")
SPARSE_ROW = re.compile(rb"[^\s:]*(\s+\d+:\S+)+\s*|\d+:\S+(\s+\d+:\S+)*\s*")


def detect_format(path: PathLike) -> str:
    """The format of a file of rows, one of `FORMATS`, from its contents and, in doubt, its name."""
    start = first_bytes(path)
    if start.startswith(ZIP_MAGIC):
        return "npz"
    if start.startswith(NPY_MAGIC):
        return "npy"
    name = Path(path)
    suffix = (Path(name.stem).suffix if name.suffix.lower() in PACKED else name.suffix).lower()
    if SUFFIXES.get(suffix) == "csv":
        return "csv"
    whole = start if b"\n" in start else start.rpartition(b" ")[0]  # drop a last token that may be cut off
    lines = [line.partition(b"#")[0] for line in whole.split(b"\n")[:50]]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise empty_file(path, "rows of data")
    if HEADER.fullmatch(lines[0]):
        return "xml"  # also if named .svm: no svmlight line has numbers without colons
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if any(SPARSE_ROW.fullmatch(line) for line in lines):
        return "svmlight"
    if b"," in lines[0] or b"\t" in lines[0] or b";" in lines[0]:
        return "csv"
    raise DataFileError(
        path,
        expected="a file in svmlight, XML-repository, npz or csv format, or npy",
        found=f"the first line {shown(lines[0])}",
        advice=f"If it is one of them, say which (format=): one of {', '.join(FORMATS)}.",
    )


def read_rows(
    path: PathLike,
    format: str = "auto",
    *,
    n_features: int | None = None,
    zero_based: ZeroBased = "auto",
    label_column: str | int | None = -1,
    ignore_columns: Sequence[str | int] = (),
    header: Auto = "auto",
    keep_index: bool = False,
    labels: PathLike | None = None,
    reduction: str | None = None,
    need_labels: bool = True,
) -> LabelledRows:
    """Read features and labels from a svmlight, XML-repository, npz, npy or csv file, packed with gzip, bzip2 or not.

    - `n_features`: the expected number of features (svmlight files may lack the last ones).
    - `zero_based`: svmlight only. `label_column`, `ignore_columns`, `header`, `keep_index`: csv only, see `read_csv`.
    - `labels`: a separate file with the labels, see `read_labels`.
    - `reduction`: for rows with sets of labels, "first" or "all" (see `reductions`). Without it, sets of
      exactly one label each are accepted; others are refused or, with `need_labels=False`, ignored (`y` is None).
    - `need_labels=False`: accept a file without labels, as for prediction.
    """
    if format == "auto":
        format = detect_format(path)
    if format == "svmlight":
        required = need_labels and labels is None
        found = scan_svmlight(path, n_features=n_features, zero_based=zero_based, need_labels=required)
        rows = LabelledRows(found.X, found.y, format, found.labels, None, found.label_names, None, found.zero_based)
    elif format == "xml":
        sets = read_xml_repository(path)
        rows = LabelledRows(sets.X, None, format, sets.labels)
    elif format in ("npz", "npy", "csv"):
        if format == "csv":
            table = read_csv(
                path, label_column=None if labels is not None else label_column, ignore_columns=ignore_columns,
                header=header, keep_index=keep_index,
            )  # fmt: skip
        else:
            table = read_npz(path) if format == "npz" else read_npy(path)
        rows = LabelledRows(table.X, table.y, format, table.labels, None, table.class_names, table.feature_names)
    else:
        raise ValueError(f"Expected a format among 'auto', {', '.join(map(repr, FORMATS))}, but found {format!r}.")
    if n_features is not None and rows.n_features != n_features:
        raise DataFileError(
            path,
            expected=f"{n_features:,} features",
            found=f"{rows.n_features:,}",
            advice="Give the same columns as in training.",
        )
    if labels is not None:
        rows = _with_labels(path, rows, labels)
    return _one_label_each(path, rows, reduction, need_labels)


def _with_labels(path: PathLike, rows: LabelledRows, labels: PathLike) -> LabelledRows:
    """The rows with the labels of a separate file, whose rows must have none of their own."""
    if rows.y is not None or (rows.labels is not None and rows.labels.nnz):
        raise DataFileError(
            path,
            expected="rows without labels, as they come from another file",
            found="labels",
            advice="Leave out the file of labels (labels=), or the labels here.",
        )
    y, sets = read_labels(labels, rows.n_rows)
    return replace(rows, y=y, labels=sets)


def _one_label_each(path: PathLike, found: LabelledRows, reduction: str | None, need_labels: bool) -> LabelledRows:
    """One label per row; label sets are reduced by `reduction`."""
    if found.labels is None:
        if found.y is None and need_labels:
            raise DataFileError(
                path,
                expected="a label on every row",
                found="none",
                advice="Labels are needed here; if they are in another file, name it (labels=).",
            )
        return found
    if reduction is not None:
        X = found.X if sparse.issparse(found.X) else sparse.csr_matrix(found.X)
        examples = reduce_labels(MultiLabelRows(X, found.labels), reduction)
        return replace(found, X=examples.X, y=examples.y, rows=examples.rows)
    per_row = np.diff(found.labels.indptr)
    if (per_row == 1).all():
        return replace(found, y=found.labels.indices.astype(np.int64), rows=np.arange(found.n_rows))
    if need_labels:
        raise DataFileError(
            path,
            expected="one label a row",
            found=f"rows with {per_row.min()} to {per_row.max()} labels",
            advice="Choose a reduction (reduction=): 'first' keeps every row's lowest label, 'all' makes every "
            "(row, label) pair an example.",
        )
    return found
