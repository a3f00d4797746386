"""Measures of a trained cell: test log likelihood (three ways), accuracy, bounds, seconds per epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.labels import encode
from ..estimator import AugmentReduceClassifier
from ..model import bounds, predict
from ..model.noise import resolve_noise
from ..training.fit import threads
from .settings import FLOOR, MOVING_AVERAGE


def row_log_likelihoods(
    clf: AugmentReduceClassifier, X: Any, y: np.ndarray, integral: str = "quadrature"
) -> np.ndarray:
    """log p(y_n | x_n) of every row: exact, or by the paper's 1,000 draws ("importance")."""
    scores_of = clf._scores_of(X)
    codes, K = torch.from_numpy(encode(clf.classes_, y)), len(clf.classes_)
    noise = resolve_noise(clf.model)
    with threads(clf.n_jobs):
        if integral == "importance":
            generator = torch.Generator().manual_seed(clf._fitted.seed)
            return predict.log_likelihood_importance(
                noise, scores_of, codes, K, n_samples=1000, generator=generator
            ).numpy()  # fmt: skip
        return predict.log_likelihood(noise, scores_of, codes, K).numpy()


def heldout_metrics(clf: AugmentReduceClassifier, X: Any, y: np.ndarray) -> dict[str, float]:
    """Table 3. Importance sampling for probit and logistic only; softmax needs no integral."""
    values = row_log_likelihoods(clf, X, y)
    found = {
        "test_log_likelihood": float(values.mean()),
        "test_log_likelihood_floored": float(np.maximum(values, FLOOR).mean()),
        "test_rows_below_floor": int((values < FLOOR).sum()),
        "test_accuracy": float(np.mean(clf.predict(X) == y)),
    }
    if clf.model != "softmax":
        values = row_log_likelihoods(clf, X, y, "importance")
        found["test_log_likelihood_importance"] = float(values.mean())
        found["test_log_likelihood_importance_floored"] = float(np.maximum(values, FLOOR).mean())
    return found


def training_metrics(clf: AugmentReduceClassifier, X: Any, y: np.ndarray) -> dict[str, float]:
    """Of the training rows, softmax only: log likelihood, and the bound summed over all classes; means over rows.

    Eq. (8) with the stored eta: L_n = 1 - log eta_n - exp(log eta*_n - log eta_n), log eta*_n = -log p_n.
    """
    if clf.model != "softmax":
        return {}
    values = row_log_likelihoods(clf, X, y)
    found = {"train_log_likelihood": float(values.mean())}
    if clf.method == "augment-reduce":
        log_eta = clf._fitted.local["log_eta"].double().numpy()
        found["full_bound"] = float(np.mean(1.0 - log_eta - np.exp(-values - log_eta)))
    elif clf.method == "one-vs-each":
        found["full_bound"] = float(np.concatenate(list(_one_vs_each(clf, X, y))).mean())
    elif clf.method == "exact":
        found["full_bound"] = found["train_log_likelihood"]
    return found


def _one_vs_each(clf: AugmentReduceClassifier, X: Any, y: np.ndarray) -> Iterator[np.ndarray]:
    """Eq. (10) over all classes, block by block."""
    scores_of = clf._scores_of(X)
    codes = torch.from_numpy(encode(clf.classes_, y))
    with threads(clf.n_jobs):
        for start, stop in predict.row_blocks(scores_of.n_rows, len(clf.classes_)):
            yield one_vs_each_bound(scores_of(start, stop).double(), codes[start:stop]).numpy()


def one_vs_each_bound(psi: Tensor, labels: Tensor) -> Tensor:
    """Eq. (10) from all scores psi (B, K): the label's own term, log sigmoid(0), is subtracted."""
    gap = psi - psi.gather(1, labels[:, None])
    return bounds.one_vs_each(gap, gap.new_zeros(())) + math.log(2.0)


def seconds_per_epoch(history: dict[str, np.ndarray]) -> tuple[float, float]:
    """(mean, median) of training alone, after the first twentieth; evaluations and checkpoints do not count."""
    iteration = np.concatenate([[0.0], history["iteration"]])
    seconds = np.concatenate([[0.0], history["seconds"]])
    per_epoch = history["iteration"][-1] / history["epoch"][-1]
    first = int(np.searchsorted(iteration, iteration[-1] / 20))
    first = min(first, len(iteration) - 2)
    taken = (seconds[-1] - seconds[first]) / (iteration[-1] - iteration[first])
    each = np.diff(seconds[first:]) / np.diff(iteration[first:])
    return float(taken * per_epoch), float(np.median(each) * per_epoch)


def moving_average(iteration: np.ndarray, values: np.ndarray, window: int = MOVING_AVERAGE) -> np.ndarray:
    """Mean over the last `window` iterations (over all so far, at the start), from records of means between them.

    Record i holds the mean over the iterations (t_{i-1}, t_i]; a record that is partly in the window counts
    in full; one without a value (no iteration computed it) is skipped.
    """
    ends = np.concatenate([[0.0], iteration])
    weight = np.where(np.isfinite(values), np.diff(ends), 0.0)
    total = np.concatenate([[0.0], np.cumsum(weight * np.nan_to_num(values))])
    count = np.concatenate([[0.0], np.cumsum(weight)])
    start = np.searchsorted(ends, ends[1:] - window, side="right") - 1
    start = np.maximum(start, 0)
    with np.errstate(invalid="ignore"):  # 0 / 0: no value in the window
        return (total[1:] - total[start]) / (count[1:] - count[start])


def last_finite(values: np.ndarray) -> float:
    """The last value that is not NaN; NaN if there is none."""
    measured = values[np.isfinite(values)]
    return float(measured[-1]) if len(measured) else math.nan
