"""Read data files for the commands: rows, examples and, for a given model, its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from ..data import DataFileError, LabelledRows, MultiLabelRows, all_pairs, detect_format, read_rows, reduce_labels
from ..data.csv_guesses import may_be_index, n_first
from ..data.files import read_names
from ..data.mapped import MappedData, as_csr, open_mapped
from ..data.sparse_text import said_base
from ..data.tables import Auto, csv_header
from ..estimator import AugmentReduceClassifier


@dataclass(frozen=True)
class Reading:
    """How to read a data file; None: detect."""

    format: str = "auto"
    label_column: str | None = None
    ignore_columns: Sequence[str] = ()
    header: bool | None = None
    keep_index: bool = False
    labels: Path | None = None
    zero_based: bool | None = None
    reduction: str | None = None
    label_names: Path | None = None


@dataclass(frozen=True)
class FileRows:
    """The rows of a file and its examples: example i is row `rows[i]` with label `y[i]`.

    `pair_rows`, `pair_y` are all (row, label) pairs of the file; the examples may be fewer, after a reduction.
    """

    found: LabelledRows
    rows: npt.NDArray[np.intp]
    y: np.ndarray
    pair_rows: npt.NDArray[np.intp]
    pair_y: np.ndarray

    def features(self, rows: npt.NDArray[np.intp]) -> Any:
        """The features of those rows; the file's own matrix, not a copy, if these are all rows in order."""
        X = self.found.X
        return X if np.array_equal(rows, np.arange(X.shape[0])) else X[rows]


def read_file(
    path: Path, reading: Reading, model: AugmentReduceClassifier | None = None, *, need_labels: bool = True
) -> FileRows:
    """Read a data file, or map a folder of rows; for a given model, with features numbered and named as in training."""
    if path.is_dir():
        return _of_mapped(path, read_mapped(path, reading, model), need_labels)
    format = detect_format(path) if reading.format == "auto" else reading.format
    columns = _csv_columns(path, reading, model, need_labels) if format == "csv" else {}
    found = read_rows(
        path,
        format,
        n_features=None if model is None else model.n_features_in_,
        zero_based=_zero_based(path, format, reading, model),
        labels=reading.labels if need_labels else None,
        need_labels=need_labels and reading.reduction is None,
        **columns,
    )
    if format == "csv" and model is not None:
        found = _in_model_order(found, model)
    nothing = np.empty(0, dtype=np.intp)
    if not need_labels:
        return FileRows(found, nothing, nothing, nothing, nothing)
    if found.labels is None:
        if found.y is None:
            raise without_labels(path)
        rows, y = np.arange(found.n_rows), _named(path, found.y, found, reading)
        return FileRows(found, rows, y, rows, y)
    sets = MultiLabelRows(sparse.csr_matrix(found.X), found.labels)
    pairs = all_pairs(sets)
    chosen = pairs if reading.reduction in (None, "all") else reduce_labels(sets, reading.reduction)
    y, pair_y = (_named(path, examples.y, found, reading) for examples in (chosen, pairs))
    return FileRows(found, chosen.rows, y, pairs.rows, pair_y)


def read_mapped(path: Path, reading: Reading, model: AugmentReduceClassifier | None = None) -> MappedData:
    """Map a folder of rows that `convert` wrote; for a given model, of its features."""
    if reading != Reading():
        raise ValueError(
            f"{path} is a folder of converted rows, which is read as it is: how to read a file (format=, reduction=, "
            "label_column and the like) is said when it is converted. Leave these out here."
        )
    data = open_mapped(path)
    if model is None:
        return data
    n_features, known = model.n_features_in_, getattr(model, "feature_names_in_", None)
    counted = known is not None and [*known[:2]] == ["0", "1"][: len(known)]  # of a 0-based svmlight file
    names = data.feature_names if known is not None and not counted else None
    misnamed = names is not None and known is not None and names != list(known)
    if data.X.shape[1] > n_features or misnamed or (counted and data.zero_based is False):
        raise DataFileError(
            path, expected=f"rows of the {n_features:,} features that the model was trained on",
            found=f"{data.X.shape[1]:,}" if data.X.shape[1] > n_features else "others",
            advice="Convert them as the training rows were: the same columns, and zero_based as it was there.",
        )  # fmt: skip
    X = as_csr(data.X.data, data.X.indices, data.X.indptr, (len(data), n_features))  # the last ones may be missing
    return MappedData(X, data.coded, data.path, data.feature_names, data.zero_based)


def described(data: MappedData) -> LabelledRows:
    return LabelledRows(data.X, None, "mapped", feature_names=data.feature_names, zero_based=data.zero_based)


def _of_mapped(path: Path, data: MappedData, need_labels: bool) -> FileRows:
    rows, y = np.arange(len(data)), data.y
    if y is None:
        if need_labels:
            raise without_labels(path)
        y = np.empty(0)
    return FileRows(described(data), rows, y, rows, y)


def without_labels(path: Path) -> DataFileError:
    return DataFileError(
        path,
        expected="a label on every row",
        found="none",
        advice="Labels are needed here; if they are in another file, name it (labels=).",
    )


def _named(path: Path, y: np.ndarray, found: LabelledRows, reading: Reading) -> np.ndarray:
    """Label names for label numbers, if the file or --label-names gives them."""
    names = found.class_names if reading.label_names is None else read_names(reading.label_names)
    if names is None:
        return y
    if y.dtype.kind not in "iu" or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(names)):
        highest = f"labels up to {y.max()}" if len(y) and y.dtype.kind in "iu" else "other labels"
        raise DataFileError(
            path,
            expected=f"label numbers from 0 to {len(names) - 1:,}, one for each of the {len(names):,} names",
            found=highest,
            advice="Line i of the names (label_names) names label i - 1.",
        )
    return np.asarray(names)[y]


def _zero_based(path: Path, format: str, reading: Reading, model: AugmentReduceClassifier | None) -> Any:
    """As given by the user or by a comment of the file; else detected, or, for a model, as in its training file (see
    `feature_names`)."""
    if reading.zero_based is not None:
        return reading.zero_based
    if model is None or format != "svmlight":
        return "auto"
    said = said_base(path)
    if said != "auto":
        return said
    names = getattr(model, "feature_names_in_", None)
    return names is not None and str(names[0]) == "0"


def feature_names(found: LabelledRows) -> Sequence[str] | None:
    """The feature names to store in the model: the columns of a csv file; the indices of a 0-based svmlight file.

    A test file may lack feature 0, so this cannot be detected then. 1-based indices are the default and need no names.
    """
    if found.zero_based and found.n_features:
        return [str(i) for i in range(found.n_features)]
    return found.feature_names


def _csv_columns(
    path: Path, reading: Reading, model: AugmentReduceClassifier | None, need_labels: bool
) -> dict[str, Any]:
    """The label's column and the ignored ones: given a model, all columns that it was not trained on."""
    if reading.labels is not None and reading.label_column is not None:
        raise ValueError("The labels are in another file (labels=), so no column of this one has them (label_column).")
    label = -1 if reading.label_column is None else reading.label_column
    header: Auto = "auto" if reading.header is None else reading.header
    plain = {
        "label_column": label, "ignore_columns": reading.ignore_columns, "header": header,
        "keep_index": reading.keep_index,
    }  # fmt: skip
    if model is None:
        return plain
    known = getattr(model, "feature_names_in_", None)
    if known is not None:
        return _known_columns(path, reading, list(known), need_labels)
    # Trained on a file without names: only the number of columns is compared.
    fields, named = csv_header(path, header=header)
    n_columns = len(fields) - (n_first(fields) if named else 0)
    bare = not need_labels and reading.label_column is None and n_columns == model.n_features_in_
    return plain | {"label_column": None} if bare else plain


def _known_columns(path: Path, reading: Reading, known: Sequence[str], need_labels: bool) -> dict[str, Any]:
    """`_csv_columns` for a model with feature names: the first line is always the header."""
    header, _ = csv_header(path, header=reading.header is not False)
    missing = [name for name in known if name not in header]
    if missing:
        raise DataFileError(
            path,
            line=1,
            expected=f"the {len(known)} feature columns that the model was trained on",
            found=f"no column {', '.join(map(repr, missing[:5]))}{' …' if len(missing) > 5 else ''}",
            advice="Give the same columns as in training, in any order, with a header line that names them.",
        )
    others = [name for name in dict.fromkeys(header) if name not in set(known)]
    columns = {"header": True, "keep_index": True}  # an index that is no feature is among the others
    if not need_labels or reading.labels is not None:
        return columns | {"label_column": None, "ignore_columns": others}
    label = reading.label_column
    if label is None:
        labels = [name for name in others if not may_be_index(name)]
        if len(labels) != 1:
            raise DataFileError(
                path,
                line=1,
                expected="one column beside the model's features, the label",
                found=f"{len(labels)}: {', '.join(map(repr, labels[:5]))}" if labels else "none",
                advice="Say which it is (label_column).",
            )
        label = labels[0]
    return columns | {"label_column": label, "ignore_columns": [name for name in others if name != label]}


def _in_model_order(found: LabelledRows, model: AugmentReduceClassifier) -> LabelledRows:
    known = getattr(model, "feature_names_in_", None)
    if known is None or found.feature_names is None or list(known) == list(found.feature_names):
        return found
    at = {name: i for i, name in enumerate(found.feature_names)}
    return LabelledRows(found.X[:, [at[name] for name in known]], found.y, found.format, feature_names=list(known))
