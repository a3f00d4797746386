"""The prior's variance, found from the rows of a fit: by cross-validation where the optimum is cheap (`direct`), else
by short training runs from one common start, judged on rows that are held out.

Training runs: a first part at the variance that `defaults.first_prior_variance` gives; then from there a few epochs
each at that variance, at a fourth of it and at four times it. While one of them is better than what it began with the
search goes on in its direction, from where it ended. Everything follows from the seed, so an interrupted search is
simply repeated. A probit or a logistic model searches with a softmax, which is cheaper, and has its variance times the
ratio of the noises' variances.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from . import fitting, limits
from .cross_validation import EVIDENCE, Found, Path, best_factor, canonical_order, losses_at
from .defaults import Settings, Shape, is_small, relative_variance, resolve
from .direct import Basis
from .features import FeatureScaling
from .fitting import Fitted, TrainingRows
from .noise import Gumbel, Noise, resolve_noise
from .seeds import mix

HELD_OUT, FEWEST_HELD_OUT = 0.1, 50
FEWEST_EPOCHS = 5  # of a fit whose prior is searched by training
WARM_EPOCHS, BRANCH_EPOCHS, WARM_STEPS, BRANCH_STEPS = 2, 1, 400, 200  # at most a fifth and a tenth of the fit
MOST_MOVES = 2
WORTH_SHARE = 0.002  # of the loss, that a weaker prior has to gain
JUDGED_PAIRS, FEWEST_JUDGED = 2_000_000, 500  # (row, class) pairs, and rows, that are judged
COPIES = 3  # of weights and their state that are alive at once

StopAsked = Callable[[], bool]


def wanted(options: dict[str, Any], fitted: Fitted, *, persistent: bool) -> bool:
    """Whether the variance is ours to find, and has not been found by a fit before."""
    ours = isinstance(options["prior_variance"], str) and options["preset"] is None
    first = fitted.found is None and (persistent or not fitted.rows_seen)
    return ours and first and options["method"] in ("augment-reduce", "exact")


def find(
    fitted: Fitted, settings: Settings, X: Any, rows: TrainingRows, shape: Shape, options: dict[str, Any],
    stop_asked: StopAsked,
) -> tuple[Settings, TrainingRows]:  # fmt: skip
    """Settings with the variance that was found, and the rows in the units that go with it. `X` are they in their own
    units."""
    noise = settings.noise
    of_softmax = is_small(Gumbel(), shape) and not shape.stream
    if of_softmax:
        found, scaling = by_cross_validation(fitted, X, rows, shape, settings, stop_asked)
        if scaling is not fitted.scaling and scaling is not None:
            fitted.scaling = scaling
            rows = replace(rows, X=scaling.apply(X, rows.X.values.dtype))
    else:
        found = by_training(fitted, settings, rows, shape, options, stop_asked)
    if stop_asked():
        return settings, rows
    found = replace(found, variance=found.variance * relative_variance(noise))
    fitted.found = found
    return replace(settings, prior_variance=found.variance), rows


# ---- cross-validation ----


def by_cross_validation(
    fitted: Fitted, X: Any, rows: TrainingRows, shape: Shape, settings: Settings, stop_asked: StopAsked
) -> tuple[Found, FeatureScaling | None]:
    """The variance, and the units of the features: each its own, or one for all where that predicts better."""
    active = rows.active()
    weight = np.ones(len(active)) if rows.weight is None else rows.weight[active].astype(np.float64)
    codes, best, best_scaling = rows.codes[active].astype(np.int64), None, fitted.scaling
    order = canonical_order(rows.X, active, codes, fitted.seed)
    one_unit = None if fitted.scaling is None or not settings.direct else fitted.scaling.in_one_unit()
    for scaling in (fitted.scaling,) if one_unit is None else (fitted.scaling, one_unit):
        in_units = rows.X if scaling is None or scaling is fitted.scaling else scaling.apply(X, rows.X.values.dtype)
        basis = Basis.of(in_units, active, weight, centred=settings.fit_intercept)
        path = Path(
            basis, order, codes, weight, shape.n_classes, fitted.seed, stop_asked, with_factor=settings.direct,
            fit_intercept=settings.fit_intercept,
        )  # fmt: skip
        found = path.search()
        if best is None or found.loss < best.loss:
            best, best_scaling = found, scaling
    assert best is not None
    return best, best_scaling


# ---- training ----


def by_training(
    fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any], stop_asked: StopAsked
) -> Found:
    search = Branches(fitted, settings, rows, shape, options, stop_asked)
    first = search.variance(0)
    if search.why_not:
        return Found(first, 1.0, math.nan, 0, f"by the rule for the first one: {search.why_not}")
    return search.search()


class Branches:
    """Training runs of a softmax on nine tenths of the rows, that begin where others ended."""

    def __init__(
        self, fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any],
        stop_asked: StopAsked,
    ) -> None:  # fmt: skip
        self.rows, self.options, self.stop_asked, self.seed = rows, options, stop_asked, mix(fitted.seed, 22, 0)
        self.shape, self.scaling = shape, fitted.scaling
        noise: Noise = resolve_noise("softmax")
        own = options | {"model": "softmax", "local_step": None, "optimizer": None, "early_stopping": False}
        self.settings = resolve(own, noise, shape, rows.torch_dtype)
        self.active, self.left_out = self.hold_out(rows.active())
        per_epoch = -(-len(self.active) // self.settings.batch_size)
        self.warm = max(1, min(max(WARM_EPOCHS * per_epoch, WARM_STEPS), settings.max_iter // 5))
        self.per_branch = max(1, min(max(BRANCH_EPOCHS * per_epoch, BRANCH_STEPS), settings.max_iter // 10))
        weights = fitted.parameters.weight
        self.why_not = ""
        if settings.max_iter < FEWEST_EPOCHS * per_epoch:
            self.why_not = f"a search needs fits of {FEWEST_EPOCHS} epochs or more"
        elif len(self.left_out) < FEWEST_HELD_OUT:
            self.why_not = f"only {len(self.left_out)} rows could be held out"
        elif limits.shortage(COPIES * 2 * weights.numel() * weights.element_size()) is not None:
            self.why_not = "no memory for copies of the weights"

    def variance(self, e: int) -> float:
        """In units of the softmax."""
        of_first = self.settings.prior_variance
        assert of_first is not None
        return of_first * 2.0**e

    def hold_out(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows to train on, rows to judge by): any rows, but no class is left without rows to train on."""
        codes, n = self.rows.codes[active], len(active)
        order = np.random.Generator(np.random.PCG64(self.seed)).permutation(n)
        most = max(FEWEST_JUDGED, JUDGED_PAIRS // self.shape.n_classes)
        out = order[: min(int(HELD_OUT * n), most)]
        left = np.bincount(codes) - np.bincount(codes[out], minlength=int(codes.max(initial=0)) + 1)
        out = np.sort(out[left[codes[out]] > 0])
        kept = np.ones(n, dtype=bool)
        kept[out] = False
        return active[kept], active[out]

    def search(self) -> Found:
        e, branch, losses = self.best_of(self.begin(), 0, (2, -2))
        step = e
        for _ in range(MOST_MOVES if step else 0):
            before = e
            e, branch, losses = self.best_of(branch, e, (e + step,))
            if e == before or self.stop_asked():
                break
        factor = max(1.0, self.judge(branch)[0])
        loss = float(losses.mean())
        return Found(self.variance(e), factor, loss, 1, f"{len(self.left_out):,} rows held out: loss {loss:.4f}")

    def best_of(self, start: Fitted, e: int, others: tuple[int, ...]) -> tuple[int, Fitted, np.ndarray]:
        """From one start, at variance e or the first of the others that is better: (which, the branch, its losses).
        No more than COPIES of the weights are alive at once."""
        branch = self.branch(start, e)
        losses = self.losses_of(branch)
        for other in others:
            tried = self.branch(start, other)
            tried_losses = self.losses_of(tried)
            if self.is_better(tried_losses, losses, weaker=other > e):
                return other, tried, tried_losses
            del tried
        return e, branch, losses

    @staticmethod
    def is_better(losses: np.ndarray, than: np.ndarray, *, weaker: bool) -> bool:
        """A stronger prior needs no evidence, a weaker one some: its errors are the worse ones."""
        gain = than - losses
        evidence = EVIDENCE * gain.std() / math.sqrt(len(gain))
        return bool(gain.mean() > (max(WORTH_SHARE * than.mean(), evidence) if weaker else 0.0))

    def begin(self) -> Fitted:
        shape = self.shape
        started = fitting.start(self.settings, shape.n_classes, shape.n_features, self.seed, 0)
        started.scaling, started.found = self.scaling, Found(0.0, 1.0, 0.0, 0, "")
        return self.advance(started, self.variance(0), self.warm)

    def branch(self, start: Fitted, e: int) -> Fitted:
        return self.advance(copy.deepcopy(start), self.variance(e), self.per_branch)

    def advance(self, fitted: Fitted, variance: float, n_iter: int) -> Fitted:
        settings = replace(self.settings, prior_variance=variance)
        fitting.advance(fitted, settings, self.rows, self.active, n_iter, self.options, self.stop_asked)
        return fitted

    def losses_of(self, fitted: Fitted) -> np.ndarray:
        """Each left-out row's loss with the best factor of at least one: weights that are on their way are too small,
        and that must not be mistaken for too strong a prior. Too large ones will become larger still."""
        factor, losses = self.judge(fitted)
        return losses if factor >= 1.0 else losses_at(1.0, *self.scores_of(fitted))

    def judge(self, fitted: Fitted) -> tuple[float, np.ndarray]:
        """The best factor, and each left-out row's loss with it."""
        scores, labels = self.scores_of(fitted)
        return best_factor(scores, labels, np.ones(len(labels)))

    def scores_of(self, fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
        """(scores, labels) of the rows left out."""
        rows, parameters = self.left_out, fitted.parameters
        every = torch.arange(self.shape.n_classes)
        kernels = fitting.kernels_for("cpu")
        scores = kernels.shared_scores(self.rows.X, rows, every, parameters.weight, parameters.bias)
        return scores.double().numpy(), self.rows.codes[rows].astype(np.int64)
