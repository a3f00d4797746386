"""Labels of any type as class numbers 0..K-1, and row weights from class weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import compute_class_weight


class Coded(NamedTuple):
    """Encoded labels: row n has the label `classes[codes[n]]`; the classes are sorted and unique."""

    codes: np.ndarray
    classes: np.ndarray

    def values(self) -> np.ndarray:
        return self.classes[self.codes]


def classes_of(y: np.ndarray | Coded) -> tuple[np.ndarray, np.ndarray]:
    """The classes that occur, and the class number of each row."""
    if not isinstance(y, Coded):
        return _numbered(y) if y.dtype.kind in "iu" and len(y) else np.unique(y, return_inverse=True)
    occurs = np.bincount(y.codes, minlength=len(y.classes)) > 0
    if occurs.all():
        return y.classes, y.codes.astype(np.int64)
    return y.classes[occurs], (np.cumsum(occurs) - 1)[y.codes]


def _numbered(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As np.unique, for integers: by counting if their range is small, in a third of the memory."""
    low, high = int(y.min()), int(y.max())
    if high - low >= 2 * len(y) or not -(2**62) < low <= high < 2**62:
        return np.unique(y, return_inverse=True)
    place = y.astype(np.int64) - low
    occurs = np.bincount(place) > 0
    return (np.flatnonzero(occurs) + low).astype(y.dtype), (np.cumsum(occurs) - 1)[place]


def check_labels(y: np.ndarray) -> None:
    """Validate labels of object dtype: none missing, and either all text or all numbers."""
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


def encode(classes: np.ndarray, y: np.ndarray | Coded) -> np.ndarray:
    """Class numbers 0..K-1 of labels; a ValueError names the first unseen label."""
    if isinstance(y, Coded):
        if np.array_equal(classes, y.classes):
            return y.codes.astype(np.int64)
        y = y.values()
    if y.dtype.kind != classes.dtype.kind and (y.dtype.kind in "OUS" or classes.dtype.kind in "OUS"):
        y = y.astype(object)
    try:
        codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    except TypeError:  # text and numbers cannot be compared, so it is none of the classes
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
    """sample_weight times class_weight; None if all are one."""
    if class_weight is None:
        return sample_weight
    present = np.unique(codes)
    of_class = np.ones(len(classes))
    of_class[present] = compute_class_weight(
        class_weight, classes=classes[present], y=classes[codes], sample_weight=sample_weight
    )
    weights = of_class[codes]
    with np.errstate(over="ignore"):  # `check_scale` reports an overflow
        return weights if sample_weight is None else weights * sample_weight
