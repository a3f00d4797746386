"""Diagnosis of a fit: warnings at its end, and `diagnose` on any rows, with advice.

A finding has a name, the number behind it, and advice. All thresholds are defined here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.exceptions import ConvergenceWarning

from ..config.features import FeatureScaling
from ..kernels.rows import DenseRows, Rows
from ..model import predict
from ..model.noise import Noise
from .fitted import Fitted
from .linear import LinearScores

LAST = 0.125  # share of the steps
STILL_IMPROVES = 0.035  # of the loss, or of what was learned if that is less, within that share
NO_BETTER = 1e-3  # nats by which a fit has to beat class frequencies
FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # of all scores
TOO_SURE, TOO_UNSURE = 0.8, 1.25  # best factors from which scores are too large, too small
WORTH = 0.01  # of the loss, that another factor, or labels at random, must explain
OVERFIT = 0.2  # of the loss, between the training rows and these
LOOSE = 0.05  # bound gap, as a share of the loss
SPREAD, FAR = 100.0, 30.0  # of columns' scales; of a mean in deviations
OTHER_UNITS = 10.0  # between these rows and those of the fit
NOISE = 0.02  # share of labels at random
ROWS = 2_000


@dataclass(frozen=True)
class Finding:
    """One problem of a fit."""

    name: str  # "under-fit", "over-fit", "loose bound", "unscaled columns", "other units", "label noise", ...
    measured: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.measured}. {self.advice}"


@dataclass(frozen=True)
class Diagnosis:
    """Quality of a model on some rows, and findings; prints as a short report."""

    n_rows: int
    log_likelihood: float
    accuracy: float
    frequency_log_likelihood: float  # of a model that predicts the class frequencies of the training rows
    training_log_likelihood: float  # as measured at the end of the fit; NaN if it was not
    bound_gap: float
    best_factor: float  # best factor of all scores, on these rows
    random_labels: float  # estimated share of random labels among these rows
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        head = (
            f"{self.n_rows:,} rows: log likelihood {self.log_likelihood:.4f} (class frequencies "
            f"{self.frequency_log_likelihood:.4f}), accuracy {self.accuracy:.3f}"
        )
        return "\n".join([head, *(f"- {finding}" for finding in self.findings or ("nothing found",))])

    def __contains__(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)


# ---- at the end of a fit ----


def warn(fitted: Fitted, history: Mapping[str, np.ndarray], *, stacklevel: int) -> None:
    """ConvergenceWarning if a fit still improved at its end, or is no better than class frequencies."""
    finding = no_better_than_frequencies(fitted, history) or still_improves(fitted, history)
    if finding is not None:
        warnings.warn(str(finding), ConvergenceWarning, stacklevel=stacklevel)


def still_improves(fitted: Fitted, history: Mapping[str, np.ndarray]) -> Finding | None:
    if not fitted.converged:
        return Finding(
            "not converged", f"L-BFGS stopped after {len(history['bound'])} iterations before the optimum",
            "Set a prior_variance, which separable classes need, or look for columns of extreme values.",
        )  # fmt: skip
    gain = recent_gain(history, entropy(fitted.class_counts))
    if not gain > STILL_IMPROVES:
        return None
    iterations, epochs = int(history["iteration"][-1]), history["epoch"][-1]
    return Finding(
        "not converged",
        f"the fit ended after {iterations:,} iterations ({epochs:.1f} epochs) while the log likelihood still rose by "
        f"{gain:.1%} within an eighth of them",
        "Set a larger max_epochs (or max_iter), or a larger learning_rate.",
    )


def recent_gain(history: Mapping[str, np.ndarray], start: float) -> float:
    """The rise of the log likelihood of fixed training rows over the last eighth of the steps, relative to the loss or
    to the improvement over class frequencies (`start`)."""
    known = np.isfinite(history["training_log_likelihood"])
    values, iteration = history["training_log_likelihood"][known], history["iteration"][known]
    if not len(values):
        return math.nan
    earlier = np.flatnonzero(iteration <= (1.0 - LAST) * iteration[-1])
    if not len(earlier):
        return math.nan
    at = earlier[-1]
    share = 1.0 - iteration[at] / iteration[-1]
    loss = -float(values[-1])
    return float((values[-1] - values[at]) * LAST / share / max(min(loss, start - loss), 1e-2))


def no_better_than_frequencies(fitted: Fitted, history: Mapping[str, np.ndarray]) -> Finding | None:
    found, frequencies = training_log_likelihood(history), -entropy(fitted.class_counts)
    if not found < frequencies - NO_BETTER:
        return None
    return Finding(
        "worse than class frequencies",
        f"on the training rows the log likelihood is {found:.4f} at the end, and that of class frequencies alone is "
        f"{frequencies:.4f}",
        "Set feature_scaling='auto' (columns of very different scale or far from zero), a smaller learning_rate, more "
        "max_epochs, or a smaller prior_variance.",
    )


def training_log_likelihood(history: Mapping[str, np.ndarray]) -> float:
    """Of the training rows evaluated last; NaN if there are none."""
    return last_of(history["training_log_likelihood"])


def last_of(column: np.ndarray) -> float:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else math.nan


def entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


# ---- on rows of the user's choice ----


def diagnose(
    fitted: Fitted, noise: Noise, X: Rows, source: object, codes: np.ndarray, history: Mapping[str, np.ndarray]
) -> Diagnosis:
    """`source` is unscaled X, for scores."""
    scores_of, labels = LinearScores.of(source, fitted), torch.from_numpy(codes)
    K = scores_of.n_classes
    own = predict.log_likelihood(noise, scores_of.here, labels, K, columns=scores_of.columns).double().numpy()
    first = predict.argmax(scores_of.here, len(codes), K, columns=scores_of.columns).numpy()
    counts = np.maximum(fitted.class_counts, 0.5)
    log_likelihood, frequencies = float(own.mean()), float(np.log(counts[codes] / counts.sum()).mean())
    rows = np.linspace(0, len(codes) - 1, min(len(codes), ROWS)).astype(np.int64)
    factor, factor_gain = best_factor(fitted, noise, source[rows], codes[rows])  # type: ignore[index]
    random, random_gain = random_labels(own, K)
    training, gap, loss = training_log_likelihood(history), last_of(history["bound_gap"]), max(-log_likelihood, 1e-9)
    if fitted.factor != 1.0:
        training = math.nan  # scores during the fit are without the factor
    findings: list[Finding | None] = [still_improves(fitted, history)]
    if log_likelihood < frequencies - NO_BETTER:
        findings.append(
            Finding("worse than class frequencies",
                    f"log likelihood {log_likelihood:.4f}, of frequencies {frequencies:.4f}",
                    "Look at the findings below; are these rows of the same kind as those of the fit?")
        )  # fmt: skip
    if factor_gain > WORTH * loss and factor <= TOO_SURE:
        findings.append(
            Finding("over-fit", f"scores times {factor:.2f} would have a log likelihood {factor_gain:.3f} higher here",
                    "Set a smaller prior_variance, fewer max_epochs, or early_stopping=True; or add rows.")
        )  # fmt: skip
    elif training - log_likelihood > OVERFIT * loss and training - log_likelihood > 0.05:
        findings.append(
            Finding("over-fit", f"log likelihood {training:.3f} on the training rows and {log_likelihood:.3f} here",
                    "Set a smaller prior_variance or early_stopping=True; or add rows.")
        )  # fmt: skip
    if factor_gain > WORTH * loss and factor >= TOO_UNSURE:
        findings.append(
            Finding("under-fit", f"scores times {factor:.2f} would have a log likelihood {factor_gain:.3f} higher here",
                    "Set a larger prior_variance, or more max_epochs.")
        )  # fmt: skip
    if gap > LOOSE * loss:
        findings.append(
            Finding("loose bound", f"the bound is {gap:.3f} below the log likelihood of training rows",
                    "Set a larger n_sampled_classes, another class_sampling, or another local_step.")
        )  # fmt: skip
    findings += of_columns(X, fitted.scaling)
    if random > NOISE and random_gain > WORTH * loss:
        findings.append(
            Finding("label noise", f"{random:.0%} of the labels look as if drawn from any class",
                    "Check the labels of the rows of least probability; a smaller prior_variance helps against noise.")
        )  # fmt: skip
    return Diagnosis(
        len(codes), log_likelihood, float((first == codes).mean()), frequencies, training, gap, factor, random,
        tuple(finding for finding in findings if finding is not None),
    )  # fmt: skip


def best_factor(fitted: Fitted, noise: Noise, X: object, codes: np.ndarray) -> tuple[float, float]:
    """(a, the gain of the mean log likelihood from scores times a)."""
    labels, found = torch.from_numpy(codes), []
    for a in FACTORS:
        scores_of = LinearScores.of(X, fitted)
        scores_of.factor *= a
        columns = scores_of.columns
        log_p = predict.log_likelihood(noise, scores_of.here, labels, columns.n_classes, columns=columns)
        found.append(float(log_p.double().mean()))
    best = int(np.argmax(found))
    return FACTORS[best], found[best] - found[FACTORS.index(1.0)]


def random_labels(log_p: np.ndarray, K: int) -> tuple[float, float]:
    """(e, gain): the share e that maximises the mean of log((1 - e) p + e / K), and how much that gains."""

    def loss(e: float) -> float:
        return -float(np.logaddexp(math.log1p(-e) + log_p, math.log(e / K)).mean())

    found = minimize_scalar(loss, bounds=(1e-6, 0.9), method="bounded")
    return float(found.x), float(-log_p.mean() - found.fun)


def of_columns(X: Rows, scaling: FeatureScaling | None) -> list[Finding | None]:
    """Findings on the scale of columns: among each other if the fit did not scale them, else against its rows."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        here = FeatureScaling.of(X, np.arange(X.n_rows))
        used = here.activity > 0
        if not used.any():
            return [Finding("no features", "all rows are empty", "Are the columns those of the fit?")]
        if scaling is None:
            spread = here.scale[used].max() / here.scale[used].min()
            far = np.abs(here.centre / here.scale).max() if isinstance(X, DenseRows) else 0.0
            if spread <= SPREAD and far <= FAR:
                return []
            return [
                Finding("unscaled columns",
                        f"scales differ by up to {spread:.3g}, means are up to {far:.3g} deviations from zero",
                        "Set feature_scaling=True, or standardise the columns.")
            ]  # fmt: skip
        ratio = np.maximum(here.scale / scaling.scale, scaling.scale / here.scale)
        moved = np.abs(here.centre - scaling.centre) / scaling.scale
    share = ((ratio > OTHER_UNITS) | (moved > OTHER_UNITS))[used & (here.activity * X.n_rows >= 20)]
    if not len(share) or share.mean() <= 0.1:
        return []
    return [
        Finding("other units", f"{share.mean():.0%} of the columns have another scale or mean than in the fit",
                "Give these rows in the units of the training rows.")
    ]  # fmt: skip


__all__ = ["Diagnosis", "Finding", "diagnose", "warn"]
