"""Metrics of predictions: precision at k, perplexity, calibration of the top class; labels as class numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse


def precision_at(
    top: npt.NDArray[np.intp], relevant: sparse.csr_matrix, ks: Iterable[int] = (1, 3, 5)
) -> dict[int, float]:
    """P@k = mean over rows of |{k best classes} ∩ {true classes}| / k, for every k up to the columns of `top`.

    - `top`: (N, k_max) class numbers, best first, no class twice in a row;
    - `relevant`: (N, K) boolean, the true classes of each row.

    As usual, it is divided by k also if a row has fewer than k true classes: with one label a row P@5 is at most 1/5.
    """
    n_rows, k_max = top.shape
    if relevant.shape[0] != n_rows:
        raise ValueError(f"Expected as many rows of labels as of predictions, {n_rows:,}; found {relevant.shape[0]:,}.")
    if n_rows == 0:
        return {k: math.nan for k in ks if k <= k_max}
    rows = np.repeat(np.arange(n_rows), k_max)
    hits = np.asarray(relevant[rows, top.ravel()]).reshape(n_rows, k_max) != 0
    return {k: float(hits[:, :k].mean()) for k in ks if k <= k_max}


def perplexity(log_likelihood: float) -> float:
    """exp(-mean log likelihood): the number of equally likely classes with this log likelihood."""
    return math.exp(-log_likelihood) if log_likelihood > -700.0 else math.inf


def class_codes(labels: np.ndarray, classes: np.ndarray) -> npt.NDArray[np.int64]:
    """The position of every label among the sorted `classes`, -1 for a label that is not there.

    If one side is text and the other numbers, both are compared as text: a file whose labels all happen to look like
    numbers still works with a model whose labels are text.
    """
    if (labels.dtype.kind in "US") != (classes.dtype.kind in "US"):
        labels, classes = labels.astype(str), classes.astype(str)
    order = np.argsort(classes, kind="stable")
    at = order[np.searchsorted(classes, labels, sorter=order).clip(max=len(classes) - 1)]
    return np.where(classes[at] == labels, at, -1).astype(np.int64)


# ---- calibration: of the rows that a model is 70 % sure of, are 70 % right? ----

STRATEGIES = ("uniform", "quantile")  # as scikit-learn's calibration_curve calls them


@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy of a model in M bins of its confidence, lowest first.

    - `edges`: (M + 1,), bin m holds the confidences in (edges[m], edges[m + 1]], the first one its lower edge too;
    - `confidence`, `accuracy`: (M,), weighted means over the rows of the bin, NaN where it is empty;
    - `count`: (M,) rows; `weight`: (M,) sum of their weights, the count itself where none were given.
    """

    edges: npt.NDArray[np.float64]
    confidence: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error, sum_m (weight_m / weight) |accuracy_m - confidence_m|."""
        filled = self.weight > 0.0
        off = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float(np.average(off, weights=self.weight[filled]))


def reliability_curve(
    confidence: npt.ArrayLike,
    correct: npt.ArrayLike,
    sample_weight: npt.ArrayLike | None = None,
    *,
    n_bins: int = 15,
    strategy: str = "uniform",
) -> Reliability:
    """Mean confidence and accuracy of the most probable class, in bins of its probability.

    - `confidence`: (N,) the probability of each row's most probable class, as in `predict_topk(X, 1)`: O(N) memory;
    - `correct`: (N,) whether that class is the true one;
    - `strategy`: "uniform" cuts [0, 1] into `n_bins` equal lengths; "quantile" gives the bins equal weight, as
      nearly as possible: equal confidences stay in one bin (so there may be fewer bins).

    Rows of weight zero are ignored; a weight of 2 counts a row twice.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"Expected strategy to be one of {', '.join(map(repr, STRATEGIES))}, but found {strategy!r}.")
    if n_bins < 1:
        raise ValueError(f"Expected n_bins of at least 1, but found {n_bins}.")
    sure, right, weight = _checked_guesses(confidence, correct, sample_weight)
    edges = np.linspace(0.0, 1.0, n_bins + 1) if strategy == "uniform" else _equal_mass(sure, weight, n_bins)
    bins = np.searchsorted(edges[1:-1], sure, side="left")  # a confidence on an edge belongs below it
    total = np.bincount(bins, weight, minlength=len(edges) - 1).astype(np.float64)
    with np.errstate(invalid="ignore"):  # 0 / 0: an empty bin
        mean_sure = np.bincount(bins, weight * sure, minlength=len(total)) / total
        mean_right = np.bincount(bins, weight * right, minlength=len(total)) / total
    return Reliability(edges, mean_sure, mean_right, np.bincount(bins, minlength=len(total)), total)


def expected_calibration_error(
    confidence: npt.ArrayLike,
    correct: npt.ArrayLike,
    sample_weight: npt.ArrayLike | None = None,
    *,
    n_bins: int = 15,
    strategy: str = "uniform",
) -> float:
    """Mean distance of confidence and accuracy over the bins of `reliability_curve`: 0 is calibrated, 1 the worst.

    It is about the most probable class only ("top-label"). Noise counts as error: N rows of a calibrated model in M
    bins give up to 0.4 sqrt(M / N).
    """
    return reliability_curve(confidence, correct, sample_weight, n_bins=n_bins, strategy=strategy).error


def _checked_guesses(
    confidence: npt.ArrayLike, correct: npt.ArrayLike, sample_weight: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(confidence, correct, weight) of the rows with positive weight, as float64."""
    sure, right = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    weight = np.ones(len(sure)) if sample_weight is None else np.asarray(sample_weight, np.float64)
    if sure.ndim != 1 or right.shape != sure.shape or weight.shape != sure.shape:
        raise ValueError(
            f"Expected one confidence, one correct and one weight a row, but found shapes {sure.shape}, {right.shape} "
            f"and {weight.shape}. Pass predict_topk(X, 1)'s probabilities as probabilities[:, 0]."
        )
    for name, bad, values in (
        ("confidence in [0, 1]", ~((sure >= 0.0) & (sure <= 1.0)), sure),
        ("correct to be 0 or 1", (right != 0.0) & (right != 1.0), right),
        ("finite sample_weight >= 0", ~((weight >= 0.0) & np.isfinite(weight)), weight),
    ):
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"Expected {name}, but {int(bad.sum())} of {len(bad)} rows differ; first row {row}: {values[row]}."
            )
    counts = weight > 0.0
    if not counts.any():
        raise ValueError("Expected at least one row with a weight above zero; found none to compare.")
    return sure[counts], right[counts], weight[counts]


def _equal_mass(sure: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], n_bins: int) -> npt.NDArray[np.float64]:
    """Edges at weighted quantiles: edge m is the lowest confidence with m / n_bins of the weight at or below it."""
    order = np.argsort(sure, kind="stable")
    share = np.cumsum(weight[order]) / weight.sum()
    wanted = np.arange(1, n_bins) / n_bins
    inner = sure[order][np.searchsorted(share, wanted * (1.0 - 1e-12), side="left")]  # 1e-12: rounding of the sums
    low, high = sure[order[[0, -1]]]
    return np.concatenate([[low], np.unique(inner[inner < high]), [high]])
