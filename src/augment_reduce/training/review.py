"""Review the prior variance and the number of steps of a short fit.

The search before a fit (`prior_search`) compares variances after one or two epochs. The weights are then still small,
the prior has little effect, and a variance that is too low is not detected. A fit of few epochs therefore leaves out up
to MOST_LEFT_OUT of the validation rows of the search until the fraction AFTER of its steps. Then two branches with
decaying rate compare the variance with four times it, or with a fourth of it if the scores are too large. The fit
continues with the better one, on all rows.

The loss of these rows also indicates how far the fit is from convergence. If it decreased by a large share since the
search, as with separable classes of few rows, two or three times as many steps are planned, unless their number was
set, and the fit is reviewed again.

Fits of many epochs are not reviewed: their searches are longer, and leaving rows out would cost accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..config.defaults import Settings, Shape
from .fitted import Fitted, TrainingRows
from .prior_search import Branches, by_optima, temperature_factor

AFTER = 0.4  # fraction of the steps before the review
MOST_EPOCHS = 15  # of a fit that is reviewed
MOST_LEFT_OUT = 1_000  # rows
STEP = 2  # factors of two between the two variances
WORTH_SHARE, EVIDENCE = 1e-4, 1.5  # the share of the loss and the standard errors by which the other has to be better
FEWEST_NATS = 0.05  # the least decrease of the loss for an extension
EXTENSIONS = ((0.25, 3), (0.15, 2))  # (share of the loss by which it decreased since the search, factor of the steps)


def review_of(
    fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any],
    stop_asked: Callable[[], bool], *, persistent: bool,
) -> Review | None:  # fmt: skip
    """The review of this fit, or None: after a search by training, or when such a fit resumes before its review."""
    found, plan = fitted.found, fitted.run.plan
    if found is None or by_optima(shape) or not persistent or options["early_stopping"]:
        return None
    if plan is None and fitted.rows_seen:  # training continues after an earlier fit
        return None
    if plan is not None and plan.review == 0:
        return None
    review = Review(fitted, settings, rows, shape, options, stop_asked)
    return review if plan is not None or review.pays() else None


class Review:
    """`after`: the iteration of the review. `left_out`: its validation rows, not used in training until then."""

    def __init__(
        self, fitted: Fitted, settings: Settings, rows: TrainingRows, shape: Shape, options: dict[str, Any],
        stop_asked: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.branches = Branches(fitted, settings, rows, shape, options, stop_asked)
        self.branches.judge_fewer(MOST_LEFT_OUT)
        self.left_out: np.ndarray = self.branches.left_out
        self.start, self.last = fitted.clock.iteration, settings.max_iter
        self.after = int(AFTER * settings.max_iter)
        self.may_extend = options["max_iter"] is None and options["max_epochs"] is None

    def pays(self) -> bool:
        """Whether the fit is short and its search was by training."""
        branches = self.branches
        per_epoch = -(-len(branches.active) // branches.settings.batch_size)
        return not branches.why_not and self.start < self.after and self.last <= MOST_EPOCHS * per_epoch

    def __call__(self, fitted: Fitted, settings: Settings) -> Settings:
        """The settings with the better variance. Updates `fitted.found` and the plan of the remaining steps; without
        memory for branches neither changes, and the fit is not reviewed again."""
        branches, found, plan = self.branches, fitted.found, fitted.run.plan
        assert found is not None
        assert plan is not None
        if branches.lacks_memory(fitted):
            fitted.run.plan = plan._replace(review=0)
            return settings
        branches.per_branch = branches.branch_steps(plan.last)
        branches.settings, branches.noise_scale = settings, found.noise_scale
        now = branches.at(fitted, 0)
        step = STEP if now.factor >= 1.0 else -STEP
        other = branches.at(fitted, step)
        if branches.stop_asked():
            return settings
        changes = branches.is_better(other.losses, now.losses, share=WORTH_SHARE, errors=EVIDENCE)
        variance, judged = (branches.variance(step), other) if changes else (found.variance, now)
        loss = float(now.losses.mean())
        times = extension(found.loss, loss) if plan.may_extend else 1
        again = int(AFTER * times * plan.last) if times > 1 else 0
        fitted.run.plan = plan._replace(last=times * plan.last, review=again, may_extend=0)
        why = f"{found.why}, {loss:.4f} after {fitted.clock.iteration + branches.per_branch:,}"
        fitted.found = replace(found, variance=variance, factor=temperature_factor(judged), loss=loss, why=why)
        return replace(settings, prior_variance=variance)


def extension(before: float, now: float) -> int:
    """The factor of the planned steps, from the losses of the search and of the review."""
    fell = before - now if before - now > FEWEST_NATS else 0.0
    return next((times for share, times in EXTENSIONS if fell > share * before), 1)
