"""A direct fit (`direct`): from rows and settings to weights, with the history and attributes of a minibatch fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..config.defaults import Settings, relative_variance
from ..local.base import Clock
from ..model.noise import Gumbel
from .direct import PRECISE, Basis, Objective, Solution, solve
from .fit import count, threads
from .fitted import Fitted, TrainingRows
from .loop import HISTORY, Stopwatch
from .progress import TrainingProgress

SEARCHED = {"softmax": 1e-9}  # precision after a search for the prior
SEARCHED_OTHERS = 1e-7


def run(
    fitted: Fitted, settings: Settings, rows: TrainingRows, options: dict[str, Any], stop_asked: Callable[[], bool],
    watch: Stopwatch,
) -> None:  # fmt: skip
    """The optimum, always from the same initial value: an interrupted or continued fit starts again."""
    active = rows.active()
    if not fitted.rows_seen:
        count(fitted, settings, rows, active)
    progress = TrainingProgress(0, options["verbose"])
    with threads(options["n_jobs"]):
        progress.say(settings.describe() + ("" if fitted.found is None else f" ({fitted.found.why})"))
        of_x = settings.prior_of_x and settings.prior_variance is not None
        free = settings.fit_intercept and settings.intercept_prior_variance is None
        weight = np.ones(len(active)) if rows.weight is None else rows.weight[active].astype(np.float64)
        times = fitted.scaling.scale if fitted.scaling is not None and of_x else None
        basis = Basis.of(rows.X, active, weight, centred=free, times=times)
        watch.lap("prepare")
        solution = _optimum(fitted, settings, basis, weight, rows.codes[active], stop_asked)
        watch.lap("train")
        _keep(fitted, basis, solution, watch)
        if solution.values:
            progress.say(
                f"optimum after {len(solution.values):,} iterations: log likelihood {solution.values[-1]:.4f} a row"
            )
        progress.say(watch.describe())


def _optimum(
    fitted: Fitted, settings: Settings, basis: Basis, weight: np.ndarray, codes: np.ndarray,
    stop_asked: Callable[[], bool],
) -> Solution:  # fmt: skip
    """The optimum; for other noises than softmax's it starts from the optimum of softmax, which is cheap and close."""
    labels = torch.from_numpy(codes.astype(np.int64))
    ratio = relative_variance(settings.noise) if fitted.found is None else fitted.found.noise_scale**2

    def objective(noise: Any, share: float) -> Objective:
        variance, of_bias = settings.prior_variance, settings.intercept_prior_variance
        return Objective(
            basis, labels, torch.from_numpy(weight), len(fitted.class_counts),
            None if variance is None else variance / share, noise, None if of_bias is None else of_bias / share,
            settings.fit_intercept,
        )  # fmt: skip

    searched = fitted.found is not None
    if settings.noise.conjugate:
        return solve(objective(settings.noise, 1.0), precision=SEARCHED["softmax"] if searched else PRECISE,
                     stop_asked=stop_asked)  # fmt: skip
    near = solve(objective(Gumbel(), ratio), precision=1e-6, stop_asked=stop_asked)
    start = near.weight * math.sqrt(ratio), near.bias * math.sqrt(ratio)
    return solve(objective(settings.noise, 1.0), start, precision=SEARCHED_OTHERS if searched else PRECISE,
                 stop_asked=stop_asked)  # fmt: skip


def _keep(fitted: Fitted, basis: Basis, solution: Solution, watch: Stopwatch) -> None:
    """Store weights, centred over classes, which changes no probability."""
    weight, bias = basis.outer(solution.weight, solution.bias)
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    if fitted.partition is not None:  # every rank has computed the whole optimum, and keeps its part
        weight, bias = fitted.partition.own(weight), fitted.partition.own(bias)
    fitted.parameters.weight.copy_(weight)
    fitted.parameters.bias.copy_(bias)
    fitted.factor = 1.0 if fitted.found is None else fitted.found.factor
    n, seconds = len(solution.values), watch.seconds["train"]
    columns = {name: [math.nan] * n for name in HISTORY} | {
        "iteration": [float(i + 1) for i in range(n)],
        "epoch": [float(i + 1) for i in range(n)],
        "seconds": [seconds * (i + 1) / n for i in range(n)],
        "bound": list(solution.values),
        "bound_gap": [0.0] * n,
        "training_log_likelihood": list(solution.values),
        "floor_hits": [0.0] * n,
    }
    fitted.run = replace(fitted.run, history=columns, seconds=seconds, plan=None)
    fitted.converged = solution.converged
    vars(fitted).update(clock=Clock(n, n), seconds=dict(watch.seconds), torn=False)
