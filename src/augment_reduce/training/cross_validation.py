"""Prior variance and temperature by cross-validation, for data with a cheap exact optimum (`direct`).

Folds are solved along a path of variances, with warm starts, and the left-out rows are scored. The scores of all
left-out rows are multiplied by one factor, the inverse temperature, before evaluation: a stronger prior with rescaled
scores is often better than either alone, and never much worse. The factor is

    argmin_a  sum_n weight_n (-log p(y_n | a psi_n)) + 2 (log a)^2,

with each row's margin smoothed by a normal of the usual kernel width: a few rows that are all classified correctly do
not determine the scale of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from scipy.optimize import minimize_scalar

from ..kernels.rows import Rows, SparseRows
from ..model.noise import Gumbel
from ..support.seeds import mix
from .direct import Basis, Objective, Solution, solve

MOST_FOLDS, LARGEST_HELD_OUT = 10, 0.2
FOLDS_BUDGET = 16_000_000  # (row, class, feature) triples times folds: about a second
FURTHEST = 16  # factors of two from the first variance, each way
FIRST_SCALE = 16.0  # times 1 / (mean squared length of a row)
ROUGH = 2.5e-5  # nats a row: precision on the path
EVIDENCE = 0.3  # standard errors by which a weaker prior has to be better
WORTH = 5e-4  # and nats
JUDGED_PAIRS = 2_000_000
BLUR, PULL = 1.0, 2.0  # kernel widths; weight of (log a)^2


@dataclass
class Judged:
    """The result for one variance: losses of left-out rows, and the solutions to start the next one from."""

    losses: np.ndarray  # of each left-out row, with the factor
    factor: float
    solutions: list[Solution]
    scores: np.ndarray  # (left-out rows, K)
    labels: np.ndarray


@dataclass
class Found:
    variance: float
    factor: float  # what scores are multiplied by, 1 / temperature
    loss: float  # mean over rows that were left out
    n_folds: int
    why: str
    rate: float = 1.0  # times that of the rule
    noise_scale: float = 1.0  # scores of the model's noise over those of the softmax that was searched with


class Path:
    """Losses of left-out rows as a function of the prior variance, FIRST_SCALE / length * 2^e."""

    def __init__(
        self, basis: Basis, order: np.ndarray, labels: np.ndarray, weight: np.ndarray, n_classes: int, seed: int,
        stop_asked: Callable[[], bool] = lambda: False, *, with_factor: bool = True, fit_intercept: bool = True,
    ) -> None:  # fmt: skip
        self.stop_asked, self.with_factor = stop_asked, with_factor
        row, share = _repeated(order, weight)
        self.n_folds = n_folds_for(basis, n_classes)
        fold = _folds(len(row), self.n_folds, mix(seed, 21, 0))
        length = float(np.average((basis.Z * basis.Z).sum(1).numpy(), weights=weight))
        self.length = length if length > 0 else 1.0
        self.objectives, self.left_out = [], []
        most = max(100, JUDGED_PAIRS // n_classes // self.n_folds)
        for f in range(self.n_folds):
            kept, out = row[fold != f], row[fold == f]
            objective = Objective(
                basis.some(torch.from_numpy(kept)), torch.from_numpy(labels[kept]), torch.from_numpy(share[fold != f]),
                n_classes, 1.0, Gumbel(), fit_intercept=fit_intercept,
            )  # fmt: skip
            known = np.isin(labels[out], labels[kept])
            out, of_row = out[known][:most], share[fold == f][known][:most]
            self.objectives.append(objective)
            self.left_out.append((basis.Z[out], labels[out], of_row))
        self.weight = np.concatenate([of_row for _, _, of_row in self.left_out])
        self.judged: dict[int, Judged] = {}

    def variance(self, e: int) -> float:
        return FIRST_SCALE / self.length * 2.0**e

    def at(self, e: int) -> Judged:
        if e not in self.judged:
            near = min(self.judged, key=lambda known: abs(known - e), default=None)
            solutions, scores, labels = [], [], []
            for f, (objective, left_out) in enumerate(zip(self.objectives, self.left_out, strict=True)):
                start = None
                if near is not None:
                    start = self.judged[near].solutions[f].weight, self.judged[near].solutions[f].bias
                objective.variance = self.variance(e)
                solution = solve(objective, start, precision=ROUGH, max_iter=60, stop_asked=self.stop_asked)
                solutions.append(solution)
                scores.append((left_out[0] @ solution.weight.T + solution.bias).numpy())
                labels.append(left_out[1])
            all_scores, all_labels = np.concatenate(scores), np.concatenate(labels)
            if self.with_factor:
                factor, losses = best_factor(all_scores, all_labels, self.weight)
            else:
                factor, losses = 1.0, losses_at(1.0, all_scores, all_labels)
            self.judged[e] = Judged(losses, factor, solutions, all_scores, all_labels)
        return self.judged[e]

    def is_better(self, e: int, than: int) -> bool:
        """A stronger prior needs no evidence, a weaker one some: overfitting is the worse error."""
        gain = self.at(than).losses - self.at(e).losses
        mean = np.average(gain, weights=self.weight)
        if e < than:
            return bool(mean > 0)
        rows = self.weight.sum() ** 2 / (self.weight**2).sum()
        deviation = math.sqrt(np.average((gain - mean) ** 2, weights=self.weight))
        return bool(mean > max(WORTH, EVIDENCE * deviation / math.sqrt(rows)))

    def search(self) -> tuple[Found, Judged | None]:
        """Up or down by factors of four while the loss improves, then by one factor of two."""
        if not len(self.weight):
            return Found(self.variance(0), 1.0, math.nan, 0, "no class has rows to train on and rows to judge by"), None
        step, e = (2 if self.is_better(2, 0) else -2), 0
        while abs(e + step) <= FURTHEST and self.is_better(e + step, e):
            e += step
        e = next((near for near in (e - 1, e + 1) if self.is_better(near, e)), e)
        best = self.at(e)
        how = f"{self.n_folds}-fold cross-validation" if self.n_folds > 1 else "a fifth of the rows held out"
        loss = float(np.average(best.losses, weights=self.weight))
        return Found(self.variance(e), best.factor, loss, self.n_folds, f"{how}: loss {loss:.4f}"), best


def canonical_order(X: Rows, rows: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Sort by label, then by a random projection: folds do not depend on the order of rows or on units."""
    direction = np.random.Generator(np.random.PCG64(mix(seed, 20, 0))).standard_normal(X.n_features)
    if isinstance(X, SparseRows):
        matrix = sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features), copy=False)
        return np.lexsort(((matrix @ direction)[rows], labels))
    return np.lexsort((np.einsum("nd,d->n", X.values[rows], direction), labels))


def n_folds_for(basis: Basis, n_classes: int) -> int:
    """As many as the budget allows; 1: a single held-out part."""
    N, R = basis.Z.shape
    return int(min(MOST_FOLDS, N, max(1, FOLDS_BUDGET // (N * n_classes * (R + 20)))))


def _repeated(order: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in that order with their weights; a row of integer weight w becomes w rows of weight one."""
    times = weight[order]
    if (times == np.round(times)).all() and times.sum() <= 2 * len(times) + 100:
        row = np.repeat(order, times.astype(np.int64))
        return row, np.ones(len(row))
    return order, times


def _folds(n: int, n_folds: int, seed: int) -> np.ndarray:
    """Round robin over rows sorted by label: every class is in as many folds as possible."""
    start = seed % max(1, n_folds)
    if n_folds > 1:
        return (np.arange(n) + start) % n_folds
    period = round(1.0 / LARGEST_HELD_OUT)
    return np.where((np.arange(n) + seed) % period == 0, 0, 1)


def best_factor(scores: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """(a, the loss of each row with scores times a); see the top of this module."""
    rows = np.arange(len(labels))
    own, others = scores[rows, labels], scores.astype(np.float32)
    others[rows, labels] = -np.inf
    margin = own - others.max(1)
    others[rows, labels] = own
    others -= others.max(1, keepdims=True)
    of_label = others[rows, labels].astype(np.float64)
    nodes, share = np.polynomial.hermite_e.hermegauss(9)
    blurred = margin[:, None] + BLUR * margin.std() * weight.sum() ** -0.2 * nodes
    share = share / share.sum()

    def objective(log_a: float) -> float:
        a = math.exp(log_a)
        of_blur = np.logaddexp(0.0, -a * blurred) @ share - np.logaddexp(0.0, -a * margin)
        losses = np.log(np.exp(np.float32(a) * others).sum(1, dtype=np.float64)) - a * of_label
        return float(weight @ (losses + of_blur)) + PULL * log_a * log_a

    bounds = (math.log(0.2), math.log(30.0))
    a = math.exp(minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 0.01}).x)
    return a, losses_at(a, scores, labels)


def losses_at(a: float, scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """-log p of the labels of a softmax with scores times a."""
    scores = a * (scores - scores.max(1, keepdims=True))
    return np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
