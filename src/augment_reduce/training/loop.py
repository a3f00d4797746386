"""The loop around `step`: what is recorded, when to stop.

Everything random follows from (seed, iteration): the order of an epoch from the seed and the epoch (`order`), a
step's draws from the seed and the iteration (`seeds`). When something is looked at follows from a `Plan`, which a fit
that was cut short leaves to the one that goes on: so that one sees what the other would have seen.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..kernels.cache import compile_seconds
from ..local.base import Clock
from ..support.seeds import mix
from .order import orders_of
from .progress import TrainingProgress
from .step import Problem, State, StepInfo, settle, step

SECONDS = ("prepare", "search", "compile", "train", "validate", "look", "checkpoint")
HISTORY = (
    "iteration", "epoch", "seconds", "bound", "validation_log_likelihood", "bound_gap", "floor_hits",
    "training_log_likelihood",
)  # fmt: skip


class Plan(NamedTuple):
    """When to look at what, in iterations counted from the first one of all."""

    last: int  # the last iteration
    record_every: int  # iterations between records of the bound
    bound_every: int  # between those whose bound is computed and averaged into a record
    validate_every: int  # between looks at the validation rows; 0: none
    gap_every: int  # between looks at the bound's gap; 0: none
    gap_rows: int  # that are looked at
    review: int = 0  # the iteration after which the fit is reviewed (`training.review`); 0: none is to come
    may_extend: int = 0  # whether the review may plan more iterations

    @property
    def stage_end(self) -> int:
        """The last iteration before the training rows or the prior change, or that ends the fit."""
        return self.review if 0 < self.review < self.last else self.last

    @property
    def look_every(self) -> int:
        """Iterations between looks at either: both come when the rarer one comes."""
        return self.validate_every or self.gap_every or self.last

    def looks(self, t: int) -> bool:
        """Whether validation rows or the bound's gap are looked at after iteration t."""
        return t % self.look_every == 0 or t == self.last

    def validates(self, t: int) -> bool:
        return self.validate_every > 0 and self.looks(t)

    def looks_at_gap(self, t: int) -> bool:
        return self.gap_every > 0 and (t % self.gap_every == 0 or t == self.last)

    def records(self, t: int) -> bool:
        """Whether there is a record after iteration t."""
        return t % self.record_every == 0 or self.looks(t)

    def wants_bound(self, t: int) -> bool:
        """Whether the bound of iteration t is computed."""
        return t % self.bound_every == 0 or t == self.last


@dataclass
class Schedule:
    """How to go through the rows, and when to stop."""

    plan: Plan
    batch_size: int
    seed: int
    origin: int = 0  # the iteration before the first epoch over these rows
    early_stopping: bool = False
    n_iter_no_change: int = 5
    tol: float = 1e-4


@dataclass
class Evaluators:
    """The slow looks, each O(K) a row, taken rarely: None where not asked for."""

    validation: Callable[[], float] | None = None
    bound_gap: Callable[[], tuple[float, float]] | None = None  # (the gap, log likelihood), of fixed training rows
    checkpoint: Callable[[int], None] | None = None  # what is done between two steps, given the first one's number


@dataclass
class Window:
    """Sums since the last record."""

    bound: float = 0.0
    rows: int = 0
    floor_hits: int = 0

    def add(self, info: StepInfo) -> None:
        if info.bound is not None:
            self.bound += float(info.bound.sum(dtype=torch.float64))
            self.rows += len(info.bound)
        self.floor_hits += info.floor_hits

    def mean_bound(self) -> float:
        return self.bound / self.rows if self.rows else math.nan


class Stopwatch:
    """Seconds by what they were spent on; those that kernels took to compile, or to be loaded, apart."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self.since, self.compiled = time.perf_counter(), compile_seconds()

    def lap(self, name: str) -> float:
        """The time since the last lap was for this; how much it was."""
        now, compiled = time.perf_counter(), compile_seconds()
        compiling = compiled - self.compiled
        spent = max(0.0, now - self.since - compiling)
        self.seconds["compile"] += compiling
        self.seconds[name] += spent
        self.since, self.compiled = now, compiled
        return spent

    def describe(self) -> str:
        parts = (f"{name} {spent:.1f} s" for name, spent in self.seconds.items() if spent >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts) or 'less than 0.1 s'}"


@dataclass
class Run:
    """What a training run leaves: history by name, why it stopped, and what a fit that goes on has to know."""

    history: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HISTORY})
    window: Window = field(default_factory=Window)  # since the last record
    seconds: float = 0.0  # of training
    plan: Plan | None = None  # of a fit that has not come to its end
    stopped_early: bool = False
    without_gain: int = 0  # looks since the last that was better
    best: float = -math.inf
    best_parameters: tuple[torch.Tensor, torch.Tensor] | None = None

    def record(self, progress: TrainingProgress, values: tuple[float, ...], last: bool) -> None:
        """Append one value to every column of the history, and show them."""
        kept = len(self.history[HISTORY[0]])
        try:
            for name, value in zip(HISTORY, values, strict=True):
                self.history[name].append(float(value))
        except BaseException:  # an interrupt: columns stay of one length
            for column in self.history.values():
                del column[kept:]
            raise
        progress.report(dict(zip(HISTORY, values, strict=True)), last)


def train(
    problem: Problem, state: State, schedule: Schedule, evaluators: Evaluators, progress: TrainingProgress, run: Run,
    watch: Stopwatch | None = None, stop_asked: Callable[[], bool] = lambda: False,
) -> Run:  # fmt: skip
    """Take steps from where `state.clock` stands to the end of the plan's stage, or fewer if validation stops improving
    or `stop_asked`. Unless the plan is complete, `run.plan` and `run.window` hold what resuming needs.

    Until a call of steps has been entered in all books, `state.mark` says that the model is torn.
    """
    plan, watch = schedule.plan, watch or Stopwatch()
    n_rows = len(problem.active)
    B = min(schedule.batch_size, n_rows)
    per_epoch = -(-n_rows // B)
    generator, row_group = torch.Generator(), None if problem.row_group is None else problem.row_group[problem.active]
    orders = orders_of(problem.X, schedule.seed + schedule.origin, problem.active, B, row_group)
    run.plan = plan
    look_back(run, state, schedule)

    with torch.inference_mode():
        t = first = state.clock.iteration + 1
        watch.lap("prepare")
        while t <= plan.last and not run.stopped_early:
            if t > plan.stage_end or stop_asked():
                run.window.add(settle(problem, state))
                state.mark.torn = False
                return run
            done = t - 1 - schedule.origin
            epoch, slot = divmod(done, per_epoch)
            with progress.may_compile() if t == first else contextlib.nullcontext():
                state, info = step(
                    problem, state, orders.minibatch(done), Clock(t, epoch + 1, slot, per_epoch),
                    generator=generator.manual_seed(mix(schedule.seed, 2, t)), want_bound=plan.wants_bound(t),
                )  # fmt: skip
            if slot + 1 == per_epoch:
                problem.sampler.end_epoch(state.parameters, n_rows, problem.n_sampled)
            progress.advance(1)
            if plan.validates(t) or plan.looks_at_gap(t):
                run.window.add(settle(problem, state))
            enter(run, state, schedule, evaluators, progress, watch, info, t, per_epoch)
            state.mark.torn = False
            if evaluators.checkpoint is not None and not run.stopped_early:  # which a fit that goes on forgets
                evaluators.checkpoint(t)
            t += 1
        state.mark.torn = True
        settle(problem, state)
        if run.best_parameters is not None:
            restore_best(run, state)
        run.plan, run.window = None, Window()
        state.mark.torn = False
    return run


def enter(
    run: Run, state: State, schedule: Schedule, evaluators: Evaluators, progress: TrainingProgress, watch: Stopwatch,
    info: StepInfo, t: int, per_epoch: int,
) -> None:  # fmt: skip
    """The books of step t: sums, records, looks, and the best weights."""
    plan, score, gap, exact = schedule.plan, math.nan, math.nan, math.nan
    run.window.add(info)
    run.seconds += watch.lap("train")
    if not plan.records(t):
        return
    if evaluators.validation is not None and plan.validates(t):
        score = evaluators.validation()
        watch.lap("validate")
    if evaluators.bound_gap is not None and plan.looks_at_gap(t):
        gap, exact = evaluators.bound_gap()
        watch.lap("look")
    when = (t, (t - schedule.origin) / per_epoch, run.seconds)
    values = (*when, run.window.mean_bound(), score, gap, run.window.floor_hits, exact)
    run.record(progress, values, t == plan.last)
    run.window = Window()
    if schedule.early_stopping and plan.validates(t):
        keep_best(run, state, score, schedule)


def look_back(run: Run, state: State, schedule: Schedule) -> None:
    """What an earlier fit found best is what this one has to exceed, and it has begun there; or it is forgotten.

    One that was cut short goes on counting looks without gain, one that had stopped counts anew.
    """
    if run.stopped_early or not schedule.early_stopping:
        run.without_gain, run.stopped_early = 0, False
    if not schedule.early_stopping:
        run.best, run.best_parameters = -math.inf, None
    elif run.best > -math.inf and run.best_parameters is None:
        run.best_parameters = (state.parameters.weight.clone(), state.parameters.bias.clone())


def keep_best(run: Run, state: State, score: float, schedule: Schedule) -> None:
    """Remember the parameters that did best on the validation rows: one more K x D array, early stopping's price.

    After `n_iter_no_change` looks without gain it is time to stop.
    """
    run.without_gain = 0 if score > run.best + schedule.tol else run.without_gain + 1
    run.stopped_early = run.without_gain >= schedule.n_iter_no_change
    if score > run.best:
        run.best = score
        weight, bias = state.parameters.weight, state.parameters.bias
        if run.best_parameters is None:
            run.best_parameters = (weight.clone(), bias.clone())
        else:
            run.best_parameters[0].copy_(weight)
            run.best_parameters[1].copy_(bias)


def restore_best(run: Run, state: State) -> None:
    """Put the best parameters back; they are no longer needed apart."""
    assert run.best_parameters is not None
    state.parameters.weight.copy_(run.best_parameters[0])
    state.parameters.bias.copy_(run.best_parameters[1])
    run.best_parameters = None
