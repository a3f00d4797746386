"""The loop around `vem.step`: which rows come when, what is recorded, when to stop.

Everything random follows from (seed, iteration): the order of an epoch from the seed and the epoch, a step's
draws from the seed and the iteration (`seeds`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch

from .local import Clock
from .progress import TrainingProgress
from .seeds import StepGenerators, mix, mix_all
from .vem import Problem, State, StepInfos, at_once, steps

HISTORY = ("iteration", "epoch", "seconds", "bound", "validation_log_likelihood", "bound_gap", "floor_hits")


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


@dataclass
class Schedule:
    """How long to train and what to look at on the way."""

    batch_size: int
    max_iter: int  # this many more iterations
    record_every: int  # iterations between records of the bound
    bound_every: int  # iterations between those whose bound is computed and averaged into a record
    evaluate_every: int  # iterations between looks at validation rows and at the bound's gap
    seed: int
    origin: int = 0  # the iteration before the first epoch over these rows
    early_stopping: bool = False
    n_iter_no_change: int = 5
    tol: float = 1e-4
    seconds_before: float = 0.0  # what preparing took

    def evaluates(self, t: int, last: int) -> bool:
        """Whether validation rows and the bound's gap are looked at after iteration t."""
        return t % self.evaluate_every == 0 or t == last

    def recorded(self, t: int, end: int, last: int) -> list[int]:
        """After which of iterations t..end there is a record; looks are taken after `end`, if at all."""
        every = range(-(-t // self.record_every) * self.record_every, end + 1, self.record_every)
        return [*every, end] if self.evaluates(end, last) and end % self.record_every else [*every]

    def wants_bounds(self, turns: range, last: int) -> np.ndarray:
        """Of which of these iterations the bound is computed."""
        at = np.arange(turns.start, turns.stop)
        return (at % self.bound_every == 0) | (at == last)

    def until_look(self, t: int, last: int) -> int:
        """How many iterations from t on until the first after which there is such a look, that one too."""
        return min(last - t + 1, self.evaluate_every - (t - 1) % self.evaluate_every)


@dataclass
class Evaluators:
    """The slow looks, each O(K) a row, taken rarely: None where not asked for."""

    validation: Callable[[], float] | None = None
    bound_gap: Callable[[], float] | None = None


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


@dataclass
class Run:
    """What a training run leaves: history by name, why it stopped."""

    history: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HISTORY})
    stopped_early: bool = False
    without_gain: int = 0  # looks since the last that was better
    best: float = -math.inf
    best_parameters: tuple[torch.Tensor, torch.Tensor] | None = None

    def record(self, progress: TrainingProgress, values: tuple[float, ...]) -> None:
        """Append one value to every column of the history, and show them."""
        for name, value in zip(HISTORY, values, strict=True):
            self.history[name].append(float(value))
        progress.report(dict(zip(HISTORY, values, strict=True)))


@contextlib.contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits for the step under way: inside, SIGINT is only noted; the function given raises it.

    So an interrupted fit has whole steps only and can go on exactly. A second Ctrl-C acts at once. Where this is not
    the main thread, or the program has its own handler, nothing changes.
    """
    usual = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not usual:
        yield lambda: None
        return
    pressed = False

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def train(
    problem: Problem, state: State, schedule: Schedule, evaluators: Evaluators, progress: TrainingProgress, run: Run
) -> Run:
    """Take `schedule.max_iter` steps from where `state.clock` stands, or fewer if validation stops improving."""
    n_rows = len(problem.active)
    B = min(schedule.batch_size, n_rows)
    per_epoch = -(-n_rows // B)
    elapsed = (run.history["seconds"][-1] if run.history["seconds"] else 0.0) + schedule.seconds_before
    first = state.clock.iteration + 1
    last = first + schedule.max_iter - 1
    generator = torch.Generator()
    alike = None if problem.alike is None else problem.alike[problem.active]
    orders = Orders(schedule.seed + schedule.origin, problem.active, B, alike)
    window = Window()
    look_back(run, state, schedule)

    with torch.inference_mode(), interrupt_between_steps() as check_interrupt:
        began = time.perf_counter()
        t, most = first, at_once(problem, state, B)
        elapsed += time.perf_counter() - began
        while t <= last and not run.stopped_early:
            started = time.perf_counter()
            done = t - 1 - schedule.origin
            epoch, slot = divmod(done, per_epoch)
            with progress.may_compile() if t == first else contextlib.nullcontext():
                M = min(most, orders.most_from(done), schedule.until_look(t, last))
                turns = range(t, t + M)
                state, infos = steps(
                    problem, state, orders.minibatches(done, M), Clock(t, epoch + 1, slot, per_epoch),
                    generators=StepGenerators(generator, mix_all(schedule.seed, 2, turns)),
                    wanted=schedule.wants_bounds(turns, last),
                )  # fmt: skip
            M = infos.n_steps  # may be fewer: where the next one diverges its own call will say so
            if slot + M >= per_epoch:  # once for several epochs, which samplers that use it never have in one call
                problem.sampler.end_epoch(state.parameters, n_rows, problem.n_sampled)
            took = time.perf_counter() - started
            progress.advance(M)
            added = 0
            for u in schedule.recorded(t, t + M - 1, last):
                window.add(infos, added, u - t + 1)
                added, looks = u - t + 1, schedule.evaluates(u, last)
                score = evaluators.validation() if looks and evaluators.validation else math.nan
                gap = evaluators.bound_gap() if looks and evaluators.bound_gap else math.nan
                when = (u, (u - schedule.origin) / per_epoch, elapsed + took * added / M)
                run.record(progress, (*when, window.mean_bound(), score, gap, window.floor_hits))
                window = Window()
                if looks and schedule.early_stopping:
                    keep_best(run, state, score, schedule)
            window.add(infos, added, M)
            elapsed += took
            t += M
            check_interrupt()
    if run.best_parameters is not None:
        restore_best(run, state)
    return run


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
