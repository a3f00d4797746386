"""START HERE: one step of Algorithms 1 and 2, on one screen.

    rows -> class sampler -> sampled scores psi -> augmented bound (E | M) -> row optimiser

A step costs O(B (|S| + 1) nnz): nothing in it grows with N, K or K x D. All randomness comes from `generator`.
Training updates `State` in place (its arrays are large); the step returns it with what it learned on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import bounds
from .kernels.alike import Alike
from .kernels.reference import Parameters
from .kernels.rows import Rows
from .local import Clock, LocalState, LocalStep
from .noise import Noise
from .optim import Prior, RowOptimizer
from .sampler import ClassSampler, Minibatch
from .scores import Scored, not_finite, push, score


@dataclass
class Problem:
    """What stays fixed while training: the data and the four parts that multiply."""

    X: Rows
    active: np.ndarray  # (N,) which rows of X are trained on: not those held out, nor those of weight zero
    n_rows: int  # N, what the minibatch stands for
    labels: Tensor  # in 0..K-1, for every row of X, as are the weights of the rows
    sample_weight: Tensor | None  # None: all ones
    method: str  # "augment-reduce" | "one-vs-each" | "sampled-softmax" | "exact"
    noise: Noise
    sampler: ClassSampler
    n_sampled: int
    local: LocalStep | None
    optimizer: RowOptimizer
    prior: Prior | None
    kernels: ModuleType
    alike: np.ndarray | None = (
        None  # for every row of X: those of the same number have the same features, and come together
    )
    may_compile: bool = False  # whether kernels/compiled.py may take whole steps, with the same results up to rounding


@dataclass
class Mark:
    """`torn`: a step has begun to change things, and has not come to its end."""

    torn: bool = False


@dataclass
class State:
    """What training changes: weights with their optimiser state, each row's q, and the clock."""

    parameters: Parameters
    local: LocalState
    clock: Clock
    mark: Mark = field(default_factory=Mark)
    compiled: Any = None  # kernels/compiled.py's steps from here; on the state, as on the problem it would be a cycle


class StepInfo(NamedTuple):
    """`bound` (B,): each row's estimated bound before this step's move; `floor_hits`: how often log eta was floored."""

    bound: Tensor | None
    floor_hits: int


class StepInfos(NamedTuple):
    """Of M steps: `bounds` (A, B) of those that were asked for them, which these were, and `floor_hits` (M,) of all."""

    bounds: Tensor
    asked: list[int]
    floor_hits: Sequence[int] | np.ndarray

    @property
    def n_steps(self) -> int:
        return len(self.floor_hits)

    def of(self, i: int) -> StepInfo:
        bound = self.bounds[self.asked.index(i)] if i in self.asked else None
        return StepInfo(bound, int(self.floor_hits[i]))

    @classmethod
    def from_steps(cls, infos: list[StepInfo]) -> StepInfos:
        """Of steps taken one by one."""
        bounds = {i: info.bound for i, info in enumerate(infos) if info.bound is not None}
        return cls(
            torch.stack([*bounds.values()]) if bounds else torch.empty(0, 0), [*bounds],
            [info.floor_hits for info in infos],
        )  # fmt: skip


def step(
    problem: Problem,
    state: State,
    rows: np.ndarray,
    clock: Clock,
    *,
    generator: torch.Generator,
    want_bound: bool = True,
) -> tuple[State, StepInfo]:
    """One minibatch: draw classes, score them, E step and M step, move the weights.

    The E step moves q(eps_n) of these rows towards its optimum, weights held; the M step takes the bound's gradient by
    the gaps, q held; `problem.local` says in which order. `clock` says which iteration this is.
    """
    if problem.may_compile:
        taken = take_compiled(problem, state, rows[None], clock, [generator], [want_bound])
        if taken is not None:
            return state, taken.of(0)
    index = torch.from_numpy(rows)
    labels = problem.labels[index]
    minibatch = as_minibatch(problem, state, rows, labels)
    scored = draw_and_score(problem, state, minibatch, generator)
    gap, sampled = scored.gap, scored.sampled

    if problem.local is None:
        bound, grad = bound_without_local(problem, gap, sampled.log_weight, labels, want_bound)
        floor_hits = 0
    else:
        if not problem.local.uses_updated:
            first_visits(problem, state, rows, index, labels, generator)
        state.mark.torn = True
        bound, grad, floor_hits = problem.local.both_steps(
            minibatch, scored.psi_y, state.local, problem.noise, gap, sampled, clock, generator, want_bound
        )

    state.mark.torn = True  # until whoever asked for the step has taken note of it
    per_row = problem.n_rows / len(rows)  # N / B: the minibatch stands for all rows, the last short one too
    row_scale = per_row if problem.sample_weight is None else problem.sample_weight[index] * per_row
    push(
        problem.kernels, problem.X, scored, grad, row_scale, per_row,
        state.parameters, problem.optimizer, clock.iteration, problem.prior,
    )  # fmt: skip
    problem.sampler.learn(minibatch, sampled, grad)
    state.clock = clock  # last: a step that failed has not happened
    return state, StepInfo(bound, floor_hits)


def steps(
    problem: Problem, state: State, order: np.ndarray, clock: Clock, *,
    generators: Iterable[torch.Generator], wanted: Sequence[bool] | np.ndarray,
) -> tuple[State, StepInfos]:  # fmt: skip
    """One step for each minibatch of order (M, B), the same as M times `step`; in one call where that is possible.

    `clock` is that of the first; the others follow one after the other. Fewer may be taken:
    where the scores of one that follows are not finite the next call, which begins with it, raises.

    `generators` gives each step its generator when its turn comes: it may be one that is seeded anew each time.
    """
    if problem.may_compile and len(order) > 1:
        taken = take_compiled(problem, state, order, clock, generators, wanted)
        if taken is not None:
            return state, taken
    infos: list[StepInfo] = []
    for i, (rows, generator, want) in enumerate(zip(order, generators, wanted, strict=True)):
        try:
            state, info = step(problem, state, rows, clock.later(i), generator=generator, want_bound=want)
        except FloatingPointError:
            if infos:
                break
            raise
        infos.append(info)
    return state, StepInfos.from_steps(infos)


def at_once(problem: Problem, state: State, batch_size: int) -> int:
    """How many steps `steps` is best given: more than one where they are compiled, and short."""
    return compiled_steps(problem, state).at_once(batch_size) if problem.may_compile else 1


def compiled_steps(problem: Problem, state: State) -> Any:
    if state.compiled is None or not state.compiled.serves(problem, state):
        from .kernels.compiled import step_of

        state.compiled = step_of(problem, state)
    return state.compiled


def take_compiled(
    problem: Problem, state: State, order: np.ndarray, clock: Clock, generators: Iterable[torch.Generator],
    wanted: Sequence[bool] | np.ndarray,
) -> StepInfos | None:  # fmt: skip
    """The steps of the compiled twins, or None where they leave them to us."""
    with diverged(state):
        taken: StepInfos | None = compiled_steps(problem, state)(order, clock, generators, wanted)
        if taken is None:
            return None
        if not taken.n_steps:
            raise not_finite()
        state.clock = clock.later(taken.n_steps - 1)
    return taken


@contextlib.contextmanager
def diverged(state: State) -> Iterator[None]:
    """Says after which iteration the scores were no longer finite."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"After iteration {state.clock.iteration}: {error}") from None


def as_minibatch(problem: Problem, state: State, rows: np.ndarray, labels: Tensor) -> Minibatch:
    """What the sampler may look at."""
    alike = None if problem.alike is None else Alike.among(problem.alike[rows])
    return Minibatch(problem.X, rows, labels, state.parameters, problem.kernels, state.clock.iteration, alike)


def draw_and_score(problem: Problem, state: State, minibatch: Minibatch, generator: torch.Generator) -> Scored:
    """Sampled classes for these rows, with their gaps psi_k - psi_y (B, S)."""
    with diverged(state):
        in_halves = problem.local is not None and problem.local.takes_halves
        draw = problem.sampler.draw_halves if in_halves else problem.sampler.draw_for
        sampled = draw(minibatch, problem.n_sampled, generator=generator)
        return score(
            problem.kernels, problem.X, minibatch.rows, minibatch.labels, sampled, state.parameters, minibatch.alike
        )


def first_visits(
    problem: Problem, state: State, rows: np.ndarray, index: Tensor, labels: Tensor, generator: torch.Generator
) -> None:
    """Rows seen for the first time get their q from a second, independent draw of classes."""
    local = problem.local
    assert local is not None
    new = local.unvisited(state.local, index)
    if not new.any():
        return
    minibatch = as_minibatch(problem, state, rows[new.numpy()], labels[new])
    scored = draw_and_score(problem, state, minibatch, generator)
    state.mark.torn = True
    local.start(state.local, index[new], problem.noise, scored.gap, scored.sampled.log_weight)


def bound_without_local(
    problem: Problem, gap: Tensor, log_weight: Tensor, labels: Tensor, want_bound: bool
) -> tuple[Tensor | None, Tensor]:
    """The methods that keep nothing per row: one-vs-each, sampled softmax, exact."""
    if problem.method == "one-vs-each":
        return (bounds.one_vs_each(gap, log_weight) if want_bound else None), bounds.one_vs_each_grad(gap, log_weight)
    if problem.method == "sampled-softmax":
        value = bounds.sampled_softmax(gap, log_weight) if want_bound else None
        return value, bounds.sampled_softmax_grad(gap, log_weight)
    if problem.noise.name == "softmax":
        return (bounds.exact_softmax(gap) if want_bound else None), bounds.exact_softmax_grad(gap)
    return bounds.exact_noise(problem.noise, gap, labels)
