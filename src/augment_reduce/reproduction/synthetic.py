"""Section 4.1: no covariates, so the scores are the biases and every row of a class has the same ones.

The paper's "average absolute error" of 3.00e-6 can only be against the frequencies in the data, which are themselves
1.4e-5 from the probabilities they were drawn with; both are reported.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..estimator import AugmentReduceClassifier
from .evaluate import one_vs_each_bound

ROW_BLOCK = 256


def log_probabilities(clf: AugmentReduceClassifier) -> np.ndarray:
    """log p_k = b_k - log sum exp(b), float64."""
    return torch.from_numpy(clf.intercept_).double().log_softmax(0).numpy()


def probability_errors(clf: AugmentReduceClassifier, y: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Mean over classes of |estimate - frequency|, and of |estimate - probability drawn with|."""
    estimated = np.exp(log_probabilities(clf))
    frequency = np.bincount(y, minlength=len(estimated)) / len(y)
    return {
        "error_to_frequencies": float(np.abs(estimated - frequency).mean()),
        "error_to_truth": float(np.abs(estimated - true).mean()),
        "frequencies_to_truth": float(np.abs(frequency - true).mean()),
    }


def total_bound(clf: AugmentReduceClassifier, y: np.ndarray) -> dict[str, float]:
    """The bound over all rows and all classes, summed over the rows as the paper prints it; and the log likelihood.

    A&R: sum_n 1 - log eta_n - exp(log eta*_k - log eta_n) with log eta*_k = -log p_k of the row's class.
    One-vs-each: sum_k N_k sum_{j != k} log sigmoid(b_k - b_j).
    """
    log_p = log_probabilities(clf)
    total = {"log_likelihood_total": float(log_p[y].sum())}
    if clf.method == "augment-reduce":
        log_eta = clf._fitted.local["log_eta"].double().numpy()
        total["bound_total"] = float(np.sum(1.0 - log_eta - np.exp(-log_p[y] - log_eta)))
        return total
    counts = np.bincount(y, minlength=len(log_p))
    psi = torch.from_numpy(log_p)
    parts = []
    for start in range(0, len(log_p), ROW_BLOCK):
        labels = torch.arange(start, min(start + ROW_BLOCK, len(log_p)))
        values = one_vs_each_bound(psi.expand(len(labels), -1), labels).numpy()
        parts.append(float(values @ counts[start : start + ROW_BLOCK]))
    return {**total, "bound_total": math.fsum(parts)}
