"""Choose the prior variance and the learning rate: by cross-validation if the optimum is cheap (`direct`, which has no
learning rate), else by short training runs that are evaluated on held-out rows.

Training runs: a first part at the default variance and rate (`defaults`), possibly a second at a lower or higher rate.
From the end of the better one start short branches with decaying rate: at that variance, four times it and a fourth of
it, and further while the loss improves. The fit itself continues from where the branches started. Everything is
determined by the seed, so an interrupted search is repeated. Probit and logistic models search with a softmax, which is
cheaper, and scale the variance by the square of their relative scores (`noise_scale`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..config.defaults import Settings, Shape, is_small, relative_variance, resolve
from ..config.features import FeatureScaling
from ..kernels.cpu.row_groups import RowGroups
from ..model.noise import Gumbel, Noise, resolve_noise
from ..optim import Adagrad, RowOptimizer
from ..support import limits
from ..support.seeds import mix
from . import fit as fitting
from .cross_validation import Found, Judged, Path, best_factor, canonical_order, losses_at
from .direct import Basis
from .fitted import Fitted, TrainingRows
from .fitted import start as start_fit
from .noise_scale import expected_scale, relative_scale

HELD_OUT, FEWEST_HELD_OUT = 0.1, 50
FEWEST_EPOCHS = 5  # of a fit whose prior is searched by training
WARM_EPOCHS, WARM_STEPS, WARM_SHARE = 2, 400, 0.12  # of the first part: the larger of these, but no larger share
BRANCH_EPOCHS, BRANCH_STEPS, BRANCH_SHARE = 1, 200, 0.08
FURTHEST = 6  # factors of two from the first variance, each way
RATE_STEP, MOST_RATES = 2.5, 2
TOO_FAST, TOO_SLOW = 1.03, 1.2  # best factors of scores, outside of which another rate is tried
NEAR_ENOUGH = 0.95  # best factor above which a rate better than a higher one is not lowered further
CERTAIN = 1.5  # from which the factor of a short run is used for the whole fit; below, weights still grow
EVIDENCE = 0.3  # standard errors by which another variance or rate has to be better
WORTH_SHARE = 0.002  # and share of the loss
JUDGED_PAIRS, FEWEST_JUDGED = 2_000_000, 1_000  # evaluated (row, class) pairs, and rows
REPEATED, SAME_LABEL = 1.05, 0.1  # rows a document, on average; share of its rows beyond one that repeat a label
ROWS_AT_ONCE = 1 << 12  # whose scores are computed together
COPIES = 3  # simultaneous copies of weights and their state

StopAsked = Callable[[], bool]


def wanted(options: dict[str, Any], fitted: Fitted, *, persistent: bool) -> bool:
    """Whether the variance has to be chosen, and was not by an earlier fit."""
    ours = isinstance(options["prior_variance"], str) and options["preset"] is None
    first = fitted.found is None and (persistent or not fitted.rows_seen)
    return ours and first and options["method"] in ("augment-reduce", "exact")


def find(
    fitted: Fitted, settings: Settings, X: Any, rows: TrainingRows, shape: Shape, options: dict[str, Any],
    stop_asked: StopAsked,
) -> tuple[Settings, TrainingRows]:  # fmt: skip
    """Settings with the chosen variance, and the rows with the scaling chosen with it. `X`: the unscaled
    rows."""
    noise = settings.noise
    if by_optima(shape):
        found, judged, scaling = by_cross_validation(fitted, X, rows, shape, settings, stop_asked)
        if scaling is not fitted.scaling and scaling is not None:
            fitted.scaling = scaling
            rows = replace(rows, X=scaling.apply(X, rows.X.dtype))
    else:
        found, judged = by_training(fitted, settings, rows, shape, options, stop_asked)
    if stop_asked():
        return settings, rows
    fitted.found = of_noise(found, judged, noise, rate_is_ours(options))
    return with_found(settings, fitted.found), rows


def by_optima(shape: Shape) -> bool:
    """Whether variances are compared at the optimum of each, since a softmax's is cheap: not by short training runs."""
    return is_small(Gumbel(), shape) and not shape.stream


def rate_is_ours(options: dict[str, Any]) -> bool:
    return options["learning_rate"] is None and not isinstance(options["optimizer"], RowOptimizer)


def of_noise(found: Found, judged: Judged | None, noise: Noise, with_rate: bool) -> Found:
    """Convert the result for softmax to this noise: scores, weights and hence the learning rate are rho times as large
    (the default rates have the ratio of the noises' variances)."""
    if judged is None:
        return replace(found, variance=found.variance * relative_variance(noise), noise_scale=expected_scale(noise))
    rho = relative_scale(noise, judged.scores, judged.labels)
    rate = found.rate * rho / relative_variance(noise) if with_rate else found.rate
    return replace(found, variance=found.variance * rho**2, rate=rate, noise_scale=rho)


def with_found(settings: Settings, found: Found) -> Settings:
    """The default settings with the result of the search."""
    optimizer = settings.optimizer
    if isinstance(optimizer, Adagrad):
        optimizer = replace(optimizer, learning_rate=optimizer.learning_rate * found.rate)
    return replace(settings, prior_variance=found.variance, optimizer=optimizer)


# ---- cross-validation ----


def by_cross_validation(
    fitted: Fitted, X: Any, rows: TrainingRows, shape: Shape, settings: Settings, stop_asked: StopAsked
) -> tuple[Found, Judged | None, FeatureScaling | None]:
    """The variance and the feature scaling: a common scale for columns in one unit, or one scale each, whichever
    predicts better."""
    active = rows.active()
    weight = np.ones(len(active)) if rows.weight is None else rows.weight[active].astype(np.float64)
    codes, best, judged, best_scaling = rows.codes[active].astype(np.int64), None, None, fitted.scaling
    order = canonical_order(rows.X, active, codes, fitted.seed)
    candidates = [fitted.scaling]
    if fitted.scaling is not None and settings.direct:
        free = settings.fit_intercept and settings.intercept_prior_variance is None
        own = FeatureScaling.of(X, active, rows.weight, centred=free, pooled=False)
        candidates += [own] if own.differs_from(fitted.scaling) else []
    for scaling in candidates:
        in_units = rows.X if scaling is None or scaling is fitted.scaling else scaling.apply(X, rows.X.dtype)
        basis = Basis.of(in_units, active, weight, centred=settings.fit_intercept)
        path = Path(
            basis, order, codes, weight, shape.n_classes, fitted.seed, stop_asked, with_factor=settings.direct,
            fit_intercept=settings.fit_intercept,
        )  # fmt: skip
        found, judged_here = path.search()
        if best is None or found.loss < best.loss:
            best, judged, best_scaling = found, judged_here, scaling
    assert best is not None
    return best, judged, best_scaling


# ---- training ----


def documents(groups: RowGroups | None, active: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """The document of each row if every label of a document is a row, else None.

    Such rows have the same features and hardly ever the same label (3 % on debian-deps). If a row is held out while
    others of its document are trained on, its loss increases as these are learned, and the search would choose too low
    a rate. Rows that merely have the same features, as in a table of categories, often have the same label.
    """
    if groups is None or len(active) < 2:
        return None
    document = groups.stored[active]
    n_documents = int(document.max()) + 1
    if len(active) < REPEATED * n_documents:
        return None
    n_pairs = len(np.unique(document * (int(labels.max()) + 1) + labels))
    again = (len(active) - n_pairs) / (len(active) - n_documents)
    return document if again <= SAME_LABEL else None


def by_training(
    fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any], stop_asked: StopAsked
) -> tuple[Found, Judged | None]:
    search = Branches(fitted, settings, rows, shape, options, stop_asked)
    first = search.variance(0)
    if search.why_not:
        return Found(first, 1.0, math.nan, 0, f"by the rule for the first one: {search.why_not}"), None
    found, judged, branch = search.search()
    if search.goes_on(with_found(settings, found)) and not stop_asked():
        continue_from(fitted, branch)
    return found, judged


def continue_from(fitted: Fitted, branch: Fitted) -> None:
    """The state at the end of the best short run: its steps are not repeated."""
    vars(fitted).update(
        parameters=branch.parameters, clock=branch.clock, local=branch.local, sampler=branch.sampler,
    )  # fmt: skip


class Branches:
    """Training runs of a softmax on nine tenths of the rows, each from the end of another."""

    def __init__(
        self, fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any],
        stop_asked: StopAsked,
    ) -> None:  # fmt: skip
        self.rows, self.options, self.stop_asked, self.seed = rows, options, stop_asked, mix(fitted.seed, 22, 0)
        self.shape, self.scaling, self.partition = shape, fitted.scaling, fitted.partition
        noise: Noise = resolve_noise("softmax")
        own = options | {"model": "softmax", "local_step": None, "optimizer": None, "early_stopping": False}
        self.settings = resolve(own, noise, shape, rows.torch_dtype)
        self.active, self.left_out = self.hold_out(rows.active())
        per_epoch = -(-len(self.active) // self.settings.batch_size)
        most = settings.max_iter
        self.warm = max(1, min(max(WARM_EPOCHS * per_epoch, WARM_STEPS), int(WARM_SHARE * most)))
        self.per_branch = self.branch_steps(most)
        self.with_rate, self.noise_scale = rate_is_ours(options), 1.0
        self.why_not = ""
        if settings.max_iter < FEWEST_EPOCHS * per_epoch:
            self.why_not = f"a search needs fits of {FEWEST_EPOCHS} epochs or more"
        elif len(self.left_out) < FEWEST_HELD_OUT:
            self.why_not = f"only {len(self.left_out)} rows could be held out"
        elif self.lacks_memory(fitted):
            self.why_not = "no memory for copies of the weights"

    def branch_steps(self, n_iter: int) -> int:
        """Of a branch, in a fit of `n_iter` steps."""
        per_epoch = -(-len(self.active) // self.settings.batch_size)
        return max(1, min(max(BRANCH_EPOCHS * per_epoch, BRANCH_STEPS), int(BRANCH_SHARE * n_iter)))

    def lacks_memory(self, fitted: Fitted) -> bool:
        """For copies of the weights and their state, here or on another rank."""
        weights = fitted.parameters.weight
        here = limits.shortage(COPIES * 2 * weights.numel() * weights.element_size()) is not None
        return here if self.partition is None else self.partition.any(here)

    def variance(self, e: int) -> float:
        """For the softmax."""
        of_first = self.settings.prior_variance
        assert of_first is not None
        return of_first * 2.0**e

    def hold_out(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(training rows, held-out rows): random rows, or all rows of random documents; every class keeps training
        rows."""
        codes, n = self.rows.codes[active], len(active)
        generator = np.random.Generator(np.random.PCG64(self.seed))
        most = min(int(HELD_OUT * n), max(FEWEST_JUDGED, JUDGED_PAIRS // self.shape.n_classes))
        document = documents(self.rows.groups, active, codes)
        if document is None:
            out = generator.permutation(n)[:most]
        else:
            place = generator.permutation(int(document.max()) + 1)[document]
            order = np.argsort(place, kind="stable")
            out = order[place[order] < place[order[most]]] if most < n else order[:0]
        left = np.bincount(codes) - np.bincount(codes[out], minlength=int(codes.max(initial=0)) + 1)
        out = np.sort(out[left[codes[out]] > 0])
        self.unit = np.arange(len(out)) if document is None else np.unique(document[out], return_inverse=True)[1]
        kept = np.ones(n, dtype=bool)
        kept[out] = False
        return active[kept], active[out]

    def judge_fewer(self, most: int) -> None:
        """Judge by about that many of the held-out rows, whole documents; train on the others."""
        order = np.random.Generator(np.random.PCG64(self.seed)).permutation(int(self.unit.max(initial=-1)) + 1)
        judged = order[: int(np.searchsorted(np.bincount(self.unit)[order].cumsum(), most)) + 1]
        stays = np.isin(self.unit, judged)
        self.active = np.union1d(self.active, self.left_out[~stays])
        self.left_out, self.unit = self.left_out[stays], np.unique(self.unit[stays], return_inverse=True)[1]

    def goes_on(self, settings: Settings) -> bool:
        """Whether the fit can continue from these runs. Not in a stream, which counts each row once."""
        if self.shape.stream:
            return False
        mine = self.settings
        same = settings.noise.name == mine.noise.name and settings.optimizer == mine.optimizer
        return same and settings.local == mine.local and not self.options["early_stopping"]

    def search(self) -> tuple[Found, Judged, Fitted]:
        """The result, its evaluation, and the state from which the fit can continue."""
        start, rate, best = self.best_rate()
        e = 0
        for step in (2, -2):
            while abs(e + step) <= FURTHEST and not self.stop_asked():
                tried = self.at(start, e + step)
                if not self.is_better(tried.losses, best.losses):
                    break
                e, best = e + step, tried
            if e:
                break
        factor, loss = temperature_factor(best), float(best.losses.mean())
        why = f"{len(self.left_out):,} rows held out: loss {loss:.4f} after {self.warm + self.per_branch:,} steps"
        return Found(self.variance(e), factor, loss, 1, why, rate), best, start

    def best_rate(self) -> tuple[Fitted, float, Judged]:
        """(the first part of a fit, its rate as a multiple of the default, its evaluation), at another rate if that is
        better."""
        rule, rate, start = self.settings.optimizer, 1.0, self.begin()
        best = self.at(start, 0)
        if not self.with_rate or not isinstance(rule, Adagrad):
            return start, rate, best
        step = RATE_STEP if best.factor > TOO_SLOW else 1.0 / RATE_STEP if best.factor < TOO_FAST else 1.0
        for _ in range(MOST_RATES if step != 1.0 else 0):
            before = self.settings
            self.settings = replace(before, optimizer=replace(rule, learning_rate=rule.learning_rate * rate * step))
            other_start = self.begin()
            tried = self.at(other_start, 0)
            if self.stop_asked() or not self.is_better(tried.losses, best.losses):
                self.settings = before
                break
            start, rate, best = other_start, rate * step, tried
            if best.factor > NEAR_ENOUGH if step < 1.0 else best.factor < TOO_SLOW:
                break
        return start, rate, best

    def is_better(
        self, losses: np.ndarray, than: np.ndarray, *, share: float = WORTH_SHARE, errors: float = EVIDENCE
    ) -> bool:  # fmt: skip
        """By more than that share of the loss and those standard errors, with documents as independent units."""
        gain = than - losses
        of_units = np.bincount(self.unit, gain - gain.mean())
        standard_error = math.sqrt((of_units**2).sum()) / len(gain)
        return bool(gain.mean() > max(share * than.mean(), errors * standard_error))

    def begin(self) -> Fitted:
        """The first part of a fit at the first variance."""
        shape = self.shape
        started = start_fit(self.settings, shape.n_classes, shape.n_features, self.seed, 0, self.partition)
        started.scaling, started.found = self.scaling, Found(0.0, 1.0, 0.0, 0, "")
        return self.advance(started, self.settings, self.variance(0), self.warm)

    def at(self, start: Fitted, e: int) -> Judged:
        """Evaluate left-out rows at this variance, after a branch from the start.

        The rate decays to a ninth over the branch; otherwise its noise would look like too weak a prior.
        """
        settings, t = self.settings, start.clock.iteration
        if isinstance(settings.optimizer, Adagrad):
            now = settings.optimizer.scalars(t + 1)[0]
            falling = replace(settings.optimizer, learning_rate=now, begin=t, half_after=self.per_branch / 8)
            settings = replace(settings, optimizer=falling)
        return self.judge(self.advance(copy.deepcopy(start), settings, self.variance(e), self.per_branch))

    def advance(self, fitted: Fitted, settings: Settings, variance: float, n_iter: int) -> Fitted:
        settings = replace(settings, prior_variance=variance)
        fitting.advance(fitted, settings, self.rows, self.active, n_iter, self.options, self.stop_asked)
        return fitted

    def judge(self, fitted: Fitted) -> Judged:
        """The best factor, and each left-out row's loss with that factor if it is above one, else without: weights that
        still grow are too small, which must not look like too strong a prior; too large ones will become even
        larger."""
        scores, labels = self.scores_of(fitted)
        factor, losses = best_factor(scores, labels, np.ones(len(labels)))
        return Judged(losses if factor >= 1.0 else losses_at(1.0, scores, labels), factor, [], scores, labels)

    def scores_of(self, fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
        """(scores, labels) of the left-out rows."""
        rows, parameters = self.left_out, fitted.parameters
        here = torch.arange(len(parameters.bias))
        kernels = fitting.kernels_for("cpu")
        scores = torch.empty(len(rows), len(here), dtype=parameters.weight.dtype)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            scores[part] = kernels.shared_scores(self.rows.X, rows[part], here, parameters.weight, parameters.bias)
        if self.partition is not None:
            scores = self.partition.whole_columns(scores)
        return scores.double().numpy() / self.noise_scale, self.rows.codes[rows].astype(np.int64)


def temperature_factor(judged: Judged) -> float:
    """The factor of all scores for the whole fit: only a large one, since the weights of a short run still grow."""
    return judged.factor if judged.factor >= CERTAIN else 1.0
