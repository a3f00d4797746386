"""Labels of any type as numbers 0..K-1, and what rows of a class weigh."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import compute_class_weight


def check_labels(y: np.ndarray) -> None:
    """Labels given as objects: none missing, and all of them text or all of them numbers."""
    if y.dtype.kind != "O":
        return
    missing = [i for i, label in enumerate(y) if label is None or label != label]
    if missing:
        raise ValueError(
            f"Expected a label for every row, but {len(missing)} of {len(y)} are missing (None or NaN); first at row "
            f"{missing[0]}. Drop those rows, or give them a class of their own."
        )
    kinds = {"text" if isinstance(label, str) else "number" for label in y}
    if len(kinds) > 1:
        first = next(i for i, label in enumerate(y) if isinstance(label, str) != isinstance(y[0], str))
        raise ValueError(
            f"Expected labels of one kind, but they mix text and numbers: row 0 has {y[0]!r}, row {first} has "
            f"{y[first]!r}. Convert them all to text."
        )


def check_classes(classes: np.ndarray) -> None:
    if len(classes) < 2:
        raise ValueError(
            f"Expected at least two classes, found only one class: {classes.tolist()[0]!r}. "
            "There is nothing to tell apart."
        )


def encode(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Labels to 0..K-1; an error that names the first label never seen."""
    if y.dtype.kind != classes.dtype.kind and (y.dtype.kind in "OUS" or classes.dtype.kind in "OUS"):
        y = y.astype(object)
    try:
        codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    except TypeError:  # text among numbers or the other way round: in no order, so in none of the classes
        codes = np.zeros(len(y), dtype=np.int64)
    unseen = np.flatnonzero(classes[codes] != y)
    if len(unseen):
        row = int(unseen[0])
        label = y[row : row + 1].tolist()[0]
        raise ValueError(
            f"Expected labels among the {len(classes):,} classes seen in training, but {len(unseen)} of "
            f"{len(y)} rows have others; first at row {row}: y={label!r}. Drop those rows, or fit with them."
        )
    return codes


def row_weights(
    class_weight: Any, classes: np.ndarray, codes: np.ndarray, sample_weight: np.ndarray | None
) -> np.ndarray | None:
    """sample_weight times class_weight, or None where all are one."""
    if class_weight is None:
        return sample_weight
    present = np.unique(codes)
    of_class = np.ones(len(classes))
    of_class[present] = compute_class_weight(
        class_weight, classes=classes[present], y=classes[codes], sample_weight=sample_weight
    )
    weights = of_class[codes]
    with np.errstate(over="ignore"):  # what overflows is told of when the scale is checked
        return weights if sample_weight is None else weights * sample_weight
