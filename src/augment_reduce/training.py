"""The loop around `vem.step`: which rows come when, what is recorded, when to stop.

Everything random follows from (seed, iteration): the order of an epoch from the seed and the epoch, a step's
draws from the seed and the iteration (`seeds`). When something is looked at follows from a `Plan`, which a fit that was
cut short leaves to the one that goes on: so that one sees what the other would have seen.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from .kernels.cache import compile_seconds
from .local import Clock
from .progress import TrainingProgress
from .seeds import StepGenerators, mix, mix_all
from .vem import Problem, State, StepInfos, at_once, steps

SECONDS = ("prepare", "search", "compile", "train", "validate", "look")
HISTORY = (
    "iteration", "epoch", "seconds", "bound", "validation_log_likelihood", "bound_gap", "floor_hits",
    "training_log_likelihood",
)  # fmt: skip


@functools.cache
def order_kernels() -> ModuleType:
    """Compiled ones, which take a while to import; asked for once, as in `seeds`."""
    from .kernels import _cpu_order

    return _cpu_order


def epoch_order(
    seed: int, epoch: int, rows: np.ndarray, batch_size: int = 1, alike: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rows in the order that an epoch follows: which minibatch a row is in is random, but within it rows stand as
    they do in `rows`, as a rule ascending: what belongs to them is read in one direction, and of two threads each has
    its own part. Rows of the same number in `alike`, one for each, come together. In `out`, where it is given.

    Compiled: numpy's permutation takes three times as long, which shows in short steps, as new memory does.
    """
    kernels = order_kernels()
    order = np.empty_like(rows) if out is None else out
    if alike is None:
        kernels.deal(mix(seed, 1, epoch), rows, batch_size, order)
        return order
    among, place = np.arange(len(rows)), np.arange(int(alike.max()) + 1)
    kernels.shuffle(mix(seed, 1, epoch), among)
    kernels.shuffle(mix(seed, 4, epoch), place)
    among = among[np.argsort(place[alike[among]], kind="stable")]
    first = mix(seed, 5, epoch) % len(rows)  # or rows that are many alike would seldom be the last ones
    order[:] = rows[np.roll(among, first)]
    return order


class Orders:
    """Minibatches one after the other, of several epochs at once where rows come out even."""

    def __init__(self, seed: int, rows: np.ndarray, batch_size: int, alike: np.ndarray | None) -> None:
        self.seed, self.rows, self.batch_size, self.alike = seed, rows, batch_size, alike
        self.per_epoch = -(-len(rows) // batch_size)
        self.first, self.n_held, self.held = 0, 0, np.empty((1, len(rows)), rows.dtype)

    def most_from(self, done: int) -> int:
        """How many minibatches of one size there are after so many."""
        n, slot = len(self.rows) // self.batch_size, done % self.per_epoch
        return max(1, n - slot) if n < self.per_epoch else sys.maxsize

    def minibatches(self, done: int, M: int) -> np.ndarray:
        """(M, B) rows of those after `done`, of one size."""
        (epoch, slot), B = divmod(done, self.per_epoch), self.batch_size
        self.hold(epoch, (slot + M - 1) // self.per_epoch + 1)
        return self.held.reshape(-1)[slot * B : (slot + M) * B].reshape(M, -1)

    def hold(self, epoch: int, n: int) -> None:
        """The orders of n epochs from this one on; those that are there are kept."""
        ahead = epoch - self.first
        kept = self.held[ahead : self.n_held] if 0 <= ahead < self.n_held else self.held[:0]
        if len(self.held) < n:
            self.held = np.concatenate([kept, np.empty((n - len(kept), len(self.rows)), self.rows.dtype)])
        elif ahead and len(kept):
            self.held[: len(kept)] = kept.copy()
        self.first, self.n_held = epoch, len(kept)
        while self.n_held < n:
            out = self.held[self.n_held]
            epoch_order(self.seed, epoch + self.n_held, self.rows, self.batch_size, self.alike, out)
            self.n_held += 1


class Plan(NamedTuple):
    """When to look at what, in iterations counted from the first one of all."""

    last: int  # the last iteration
    record_every: int  # iterations between records of the bound
    bound_every: int  # between those whose bound is computed and averaged into a record
    validate_every: int  # between looks at the validation rows; 0: none
    gap_every: int  # between looks at the bound's gap; 0: none
    gap_rows: int  # that are looked at

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

    def recorded(self, t: int, end: int) -> list[int]:
        """After which of iterations t..end there is a record; looks are taken after `end`, if at all."""
        every = range(-(-t // self.record_every) * self.record_every, end + 1, self.record_every)
        return [*every, end] if self.looks(end) and end % self.record_every else [*every]

    def wants_bounds(self, turns: range) -> np.ndarray:
        """Of which of these iterations the bound is computed."""
        at = np.arange(turns.start, turns.stop)
        return (at % self.bound_every == 0) | (at == self.last)

    def until_look(self, t: int) -> int:
        """How many iterations from t on until the first after which there is such a look, that one too."""
        return min(self.last - t + 1, self.look_every - (t - 1) % self.look_every)


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


@dataclass
class Window:
    """Sums since the last record."""

    bound: float = 0.0
    rows: int = 0
    floor_hits: int = 0

    def add(self, infos: StepInfos, first: int, end: int) -> None:
        """Steps first..end of these."""
        lo, hi = bisect_left(infos.asked, first), bisect_left(infos.asked, end)
        if lo < hi:
            bounds = infos.bounds[lo:hi].numpy()
            for of_step in bounds.sum(axis=1, dtype=np.float64).tolist():  # one by one: however many came in a call
                self.bound += of_step
            self.rows += bounds.size
        self.floor_hits += int(np.sum(infos.floor_hits[first:end]))

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
        for name, value in zip(HISTORY, values, strict=True):
            self.history[name].append(float(value))
        progress.report(dict(zip(HISTORY, values, strict=True)), last)


def train(
    problem: Problem, state: State, schedule: Schedule, evaluators: Evaluators, progress: TrainingProgress, run: Run,
    watch: Stopwatch | None = None, stop_asked: Callable[[], bool] = lambda: False,
) -> Run:  # fmt: skip
    """Take steps from where `state.clock` stands to the plan's last, or fewer if validation stops improving, or as soon
    as `stop_asked`. Then `run.plan` and `run.window` say how to go on; at the end of the plan there is nothing to say.

    Until a call of steps has been entered in all books, `state.mark` says that the model is torn.
    """
    plan, watch = schedule.plan, watch or Stopwatch()
    n_rows = len(problem.active)
    B = min(schedule.batch_size, n_rows)
    per_epoch = -(-n_rows // B)
    generator, alike = torch.Generator(), None if problem.alike is None else problem.alike[problem.active]
    orders = Orders(schedule.seed + schedule.origin, problem.active, B, alike)
    run.plan = plan
    look_back(run, state, schedule)

    with torch.inference_mode():
        t = first = state.clock.iteration + 1
        most = at_once(problem, state, B)
        watch.lap("prepare")
        while t <= plan.last and not run.stopped_early:
            if stop_asked():
                return run
            done = t - 1 - schedule.origin
            epoch, slot = divmod(done, per_epoch)
            with progress.may_compile() if t == first else contextlib.nullcontext():
                M = min(most, orders.most_from(done), plan.until_look(t))
                turns = range(t, t + M)
                state, infos = steps(
                    problem, state, orders.minibatches(done, M), Clock(t, epoch + 1, slot, per_epoch),
                    generators=StepGenerators(generator, mix_all(schedule.seed, 2, turns)),
                    wanted=plan.wants_bounds(turns),
                )  # fmt: skip
            M = infos.n_steps  # may be fewer: where the next one diverges its own call will say so
            if slot + M >= per_epoch:  # once for several epochs, which samplers that use it never have in one call
                problem.sampler.end_epoch(state.parameters, n_rows, problem.n_sampled)
            progress.advance(M)
            enter(run, state, schedule, evaluators, progress, watch, infos, t, per_epoch)
            state.mark.torn = False
            t += M
        state.mark.torn = True
        if run.best_parameters is not None:
            restore_best(run, state)
        run.plan, run.window = None, Window()
        state.mark.torn = False
    return run


def enter(
    run: Run, state: State, schedule: Schedule, evaluators: Evaluators, progress: TrainingProgress, watch: Stopwatch,
    infos: StepInfos, t: int, per_epoch: int,
) -> None:  # fmt: skip
    """The books of the steps from iteration t on: sums, records, looks, and the best weights."""
    plan, M, added = schedule.plan, infos.n_steps, 0
    before, took = run.seconds, watch.lap("train")
    for u in plan.recorded(t, t + M - 1):
        run.window.add(infos, added, u - t + 1)
        added, score, gap, exact = u - t + 1, math.nan, math.nan, math.nan
        if evaluators.validation is not None and plan.validates(u):
            score = evaluators.validation()
            watch.lap("validate")
        if evaluators.bound_gap is not None and plan.looks_at_gap(u):
            gap, exact = evaluators.bound_gap()
            watch.lap("look")
        when = (u, (u - schedule.origin) / per_epoch, before + took * added / M)
        values = (*when, run.window.mean_bound(), score, gap, run.window.floor_hits, exact)
        run.record(progress, values, u == plan.last)
        run.window = Window()
        if schedule.early_stopping and plan.validates(u):
            keep_best(run, state, score, schedule)
    run.window.add(infos, added, M)
    run.seconds = before + took


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
