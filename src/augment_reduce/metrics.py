"""How good predictions are: precision at k against sets of labels, perplexity, and labels as class numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from scipy import sparse


def precision_at(
    top: npt.NDArray[np.intp], relevant: sparse.csr_matrix, ks: Iterable[int] = (1, 3, 5)
) -> dict[int, float]:
    """P@k = mean over rows of |{k best classes} ∩ {right classes}| / k, for every k that `top` reaches.

    - `top`: (N, k_max) class numbers, best first, no class twice in a row;
    - `relevant`: (N, K) boolean, the right classes of each row.

    Divided by k also where a row has fewer than k right classes, as is usual: with one label a row P@5 is at most 1/5.
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
    """exp(-mean log likelihood): as unsure as a fair choice among that many classes."""
    return math.exp(-log_likelihood) if log_likelihood > -700.0 else math.inf


def class_codes(labels: np.ndarray, classes: np.ndarray) -> npt.NDArray[np.int64]:
    """The position of every label among the sorted `classes`, -1 for a label that is not there.

    Where one side is text and the other numbers, both are compared as text: a file in which every label happens
    to look like a number still fits a model whose labels are text.
    """
    if (labels.dtype.kind in "US") != (classes.dtype.kind in "US"):
        labels, classes = labels.astype(str), classes.astype(str)
    order = np.argsort(classes, kind="stable")
    at = order[np.searchsorted(classes, labels, sorter=order).clip(max=len(classes) - 1)]
    return np.where(classes[at] == labels, at, -1).astype(np.int64)
