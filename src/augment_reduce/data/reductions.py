"""Reduce label sets to one label per example: the first label (the paper) or every pair; keep frequent labels only.

A reduction selects rows and labels and copies no features: `Examples.X` selects the rows on access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.rows import MultiLabelRows


@dataclass(frozen=True)
class Examples:
    """Example i is row `rows[i]` of `source` with the label `y[i]`, a column of `source.labels`."""

    source: MultiLabelRows
    rows: npt.NDArray[np.intp]
    y: npt.NDArray[np.int64]

    @cached_property
    def X(self) -> sparse.csr_matrix:
        """The features, one row per example; the source's own matrix if every row is used once, in order."""
        n_rows = self.source.n_rows
        if len(self.rows) == n_rows and np.array_equal(self.rows, np.arange(n_rows)):
            return self.source.X
        return self.source.X[self.rows]

    def __len__(self) -> int:
        return len(self.rows)


def first_label(source: MultiLabelRows) -> Examples:
    """One example per row with labels: the row's lowest label, as in the paper."""
    labels = _sorted(source.labels)
    rows = np.flatnonzero(np.diff(labels.indptr))
    return Examples(source, rows, labels.indices[labels.indptr[rows]].astype(np.int64))


def all_pairs(source: MultiLabelRows) -> Examples:
    """One example per (row, label) pair, row by row."""
    labels = _sorted(source.labels)
    rows = np.repeat(np.arange(source.n_rows), np.diff(labels.indptr))
    return Examples(source, rows, labels.indices.astype(np.int64))


REDUCTIONS: dict[str, Callable[[MultiLabelRows], Examples]] = {"first": first_label, "all": all_pairs}


def reduce_labels(source: MultiLabelRows, reduction: str) -> Examples:
    """The reduction of that name."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"Expected a reduction among {sorted(REDUCTIONS)}, but found {reduction!r}. 'first' keeps every row's "
            "lowest label, 'all' makes every (row, label) pair an example."
        )
    return REDUCTIONS[reduction](source)


def first_label_like_paper(train: MultiLabelRows, test: MultiLabelRows) -> tuple[Examples, Examples]:
    """First labels of both parts; test rows are dropped whose first label is no training row's."""
    reduced = first_label(train)
    return reduced, only_labels(first_label(test), np.unique(reduced.y))


def only_labels(examples: Examples, seen: npt.NDArray[np.int64]) -> Examples:
    """The examples whose label is among `seen`."""
    known = np.isin(examples.y, seen)
    return Examples(examples.source, examples.rows[known], examples.y[known])


def frequent_labels(source: MultiLabelRows, min_count: int) -> tuple[MultiLabelRows, npt.NDArray[np.int64]]:
    """Labels on at least `min_count` rows, renumbered, and their old numbers; rows left without labels are dropped.

    Apply the same choice to test rows with `keep_labels(test, kept)`.
    """
    counts = np.bincount(source.labels.indices, minlength=source.n_labels)
    kept = np.flatnonzero(counts >= min_count).astype(np.int64)
    if kept.size == 0:
        raise ValueError(
            f"Expected labels on at least min_count={min_count} rows, but the most frequent of {source.n_labels:,} "
            f"labels is on {int(counts.max(initial=0))}. Lower min_count."
        )
    return keep_labels(source, kept), kept


def keep_labels(source: MultiLabelRows, kept: npt.NDArray[np.int64]) -> MultiLabelRows:
    """Only the labels `kept`; label kept[k] becomes k, and rows left without labels are dropped."""
    labels = source.labels[:, kept].tocsr()
    rows = np.flatnonzero(np.diff(labels.indptr))
    names = None if source.label_names is None else [source.label_names[k] for k in kept]
    return MultiLabelRows(source.X[rows], labels[rows], names, source.feature_names)


def encode(
    y: npt.ArrayLike, classes: npt.NDArray[np.generic] | Sequence[object] | None = None
) -> tuple[npt.NDArray[np.int64], np.ndarray]:
    """Labels of any kind as class numbers 0..K-1, and the sorted classes.

    With `classes` (as returned for the training labels), a label that is not among them is refused.
    """
    values = np.asarray(y)
    if classes is None:
        found, codes = np.unique(values, return_inverse=True)
        return codes.astype(np.int64), found
    known = np.asarray(classes)
    order = np.argsort(known)
    at = order[np.searchsorted(known, values, sorter=order).clip(max=len(known) - 1)]
    wrong = np.flatnonzero(known[at] != values)
    if wrong.size:
        raise ValueError(
            f"Expected labels among the {len(known):,} classes of training, but {len(wrong):,} of {len(values):,} are "
            f"not; first at row {wrong[0]}: {values[wrong[0]]!r}. Drop those rows, or train on data that has them."
        )
    return at.astype(np.int64), known


def _sorted(labels: sparse.csr_matrix) -> sparse.csr_matrix:
    return labels if labels.has_sorted_indices else labels.sorted_indices()
