"""START HERE: one step of Algorithms 1 and 2, on one screen. Every fit by steps goes through `step`.

    draw ──► score ──► reduce ──► solve ──► gradient ──► push
    which    psi of    a few sums  q of each  d bound /   weight rows
    classes  label     a row over  row from   d psi       move
             + sampled the classes its sums

A step costs O(B (|S| + 1) nnz): nothing in it grows with N, K or K x D. All randomness comes from `generator`.
Training updates `State` in place (its arrays are large).

Where other processes have some of the classes (`Problem.partition`) a step scores and pushes those that are here, and
`reduce` adds up the sums of all (`OverRanks`), or a pass does with one all-reduce (`LocalStep.over_ranks`).

`reduce`, `solve` and `gradient` belong to the local step (`local`), in torch operations. Where the backend can do the
three in one pass over the scores, the local step finds it (`LocalStep.fused`): the same numbers up to rounding. Where
it can go from the scores to the push (`LocalStep.fused_step`): the very same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.minibatch_groups import MinibatchGroups
from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..local.base import Clock, FusedPass, FusedStep, LocalState, LocalStep, ShardPass
from ..local.shard_terms import Ask, Ready
from ..model import bounds
from ..model.noise import Noise
from ..model.over_ranks import OverRanks
from ..model.scores import Scored, push, push_groups, score
from ..model.shards import ShardScored, push_shard, score_shard
from ..optim import Prior, RowOptimizer
from ..sampling import ClassSampler, Minibatch, Sampled
from ..sharding import ClassShard, Partition


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
    # for every row of X: those of the same number have the same features, and come together
    row_group: np.ndarray | None = None
    fused: FusedPass | None = None  # reduce, solve and gradient in one pass of the backend, where it has one
    fused_step: FusedStep | None = None  # score, reduce, solve, gradient and push in one pass, where it has one
    partition: Partition | None = None  # where other processes have some of the classes
    shard_pass: ShardPass | None = None  # reduce, solve and gradient over ranks with one all-reduce a step

    @functools.cached_property
    def noise_of_steps(self) -> Noise:
        """The noise, with sums over the classes of all ranks."""
        return self.noise if self.partition is None else OverRanks(self.noise, self.partition.ranks)


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


class StepInfo(NamedTuple):
    """`bound` (B,): each row's estimated bound before this step's move; `floor_hits`: how often log eta was floored."""

    bound: Tensor | None
    floor_hits: int


def step(
    problem: Problem,
    state: State,
    rows: np.ndarray,
    clock: Clock,
    *,
    generator: torch.Generator,
    want_bound: bool = True,
) -> tuple[State, StepInfo]:
    """One minibatch. `clock` says which iteration this is.

    The E step (reduce, solve) moves q(eps_n) of these rows towards its optimum, weights held; the M step (gradient,
    push) moves the weights, q held. `problem.local` says in which order q and the gradient come.
    """
    if problem.shard_pass is not None:
        rows = rows.copy()  # they may be needed in the next step, when the order of an epoch has been written anew
    index = torch.from_numpy(rows)
    minibatch = as_minibatch(problem, state, rows, problem.labels.index_select(0, index))
    per_row = problem.n_rows / len(rows)  # N / B: the minibatch stands for all rows, the last short one too
    row_scale = per_row if problem.sample_weight is None else problem.sample_weight.index_select(0, index) * per_row
    try:
        sampled = draw(problem, minibatch, generator)
        fused = problem.fused_step is not None and problem.fused_step.serves(sampled, len(rows))
        go_on = by_fused_step if fused else by_verbs
        bound, floor_hits = go_on(problem, state, minibatch, sampled, row_scale, clock, generator, want_bound)
    except FloatingPointError as error:  # scores are no longer finite
        raise FloatingPointError(f"After iteration {state.clock.iteration}: {error}") from None
    state.clock = clock  # last: a step that failed has not happened
    return state, StepInfo(bound, floor_hits)


def by_verbs(
    problem: Problem, state: State, minibatch: Minibatch, sampled: Sampled, row_scale: Tensor | float, clock: Clock,
    generator: torch.Generator, want_bound: bool,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """score, reduce, solve, gradient, push"""
    scored = score_for(problem, minibatch, sampled)
    per_row = problem.n_rows / len(minibatch.rows)
    move = (state.parameters, problem.optimizer, clock.iteration, problem.prior)
    wanted = {"want_bound": want_bound, "want_shares": problem.prior is not None and problem.prior.in_shares}
    if problem.shard_pass is not None:
        state.mark.torn = True
        ready = problem.shard_pass(Ask(minibatch, scored, state.local, row_scale, per_row, **wanted))
        return push_ready(problem, state, ready, clock)
    if problem.fused is not None and problem.fused.serves(scored.sampled) and not problem.sampler.observes:
        found = problem.fused(scored, row_scale, per_row, **wanted)
        state.mark.torn = True  # until whoever asked for the step has taken note of it
        push_groups(problem.kernels, problem.X, scored, found, per_row, *move)
        return found.bound, found.floor_hits
    grad, bound, floor_hits = gradient_by_gap(problem, state, minibatch, scored, clock, generator, want_bound)
    state.mark.torn = True
    push_gaps = push if problem.partition is None else functools.partial(push_shard, problem.partition)
    push_gaps(problem.kernels, problem.X, scored, grad, row_scale, per_row, *move)
    problem.sampler.observe(minibatch, scored.sampled, grad)
    return bound, floor_hits


def by_fused_step(
    problem: Problem, state: State, minibatch: Minibatch, sampled: Sampled, row_scale: Tensor | float, clock: Clock,
    generator: torch.Generator, want_bound: bool,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """All verbs but the draw in one pass of the backend."""
    assert problem.fused_step is not None
    state.mark.torn = True
    try:
        return problem.fused_step(
            minibatch, sampled, state.local, row_scale, problem.n_rows / len(minibatch.rows), clock=clock,
            generator=generator, want_bound=want_bound,
        )  # fmt: skip
    except (FloatingPointError, ValueError):  # nothing has moved
        state.mark.torn = False
        raise


def push_ready(problem: Problem, state: State, ready: Ready | None, clock: Clock) -> tuple[Tensor | None, int]:
    """Of a pass over ranks, which may have the step before; its bound, and how often a floor acted."""
    if ready is None:
        return None, 0
    ready.gradient.push(problem.kernels, problem.X, state.parameters, problem.optimizer, clock.iteration, problem.prior)
    return ready.bound, ready.floor_hits


def settle(problem: Problem, state: State) -> StepInfo:
    """Before the model is looked at or kept: what the step before has left to the next one."""
    if problem.shard_pass is None:
        return StepInfo(None, 0)
    return StepInfo(*push_ready(problem, state, problem.shard_pass.settle(), state.clock))


def take_up(problem: Problem, state: State, late: Mapping[str, Tensor]) -> StepInfo:
    """What a checkpoint has (`ShardPass.pause`) of a step over ranks whose gradient was still to be pushed. Ranks push
    it in their next step, as they would have; one process does at once."""
    if "rows" in late and int(late["rows"].max()) >= problem.X.n_rows:
        raise ValueError(f"Expected a gradient of rows below {problem.X.n_rows}, found {int(late['rows'].max())}.")
    if late and problem.shard_pass is not None:
        problem.shard_pass.go_on(late)
    elif "rows" in late:
        ready = Ready.own(late, ClassShard(problem.sampler.n_classes))
        next_step = state.clock._replace(iteration=state.clock.iteration + 1)
        return StepInfo(*push_ready(problem, state, ready, next_step))
    return StepInfo(None, 0)


def gradient_by_gap(
    problem: Problem, state: State, minibatch: Minibatch, scored: Scored | ShardScored, clock: Clock,
    generator: torch.Generator, want_bound: bool,
) -> tuple[Tensor, Tensor | None, int]:  # fmt: skip
    """reduce, solve and gradient in torch operations: d bound / d gap (B, S), and q of these rows moved."""
    gap, sampled, labels = scored.gaps(), scored.sampled, minibatch.labels
    if problem.local is None:
        bound, grad = bound_without_local(problem, gap, sampled.log_weight, labels, want_bound)
        return grad, bound, 0
    if not problem.local.uses_updated:
        first_visits(problem, state, minibatch, generator)
    state.mark.torn = True
    assert scored.psi_y is not None
    bound, grad, floor_hits = problem.local.both_steps(
        minibatch, scored.psi_y[:, 0], state.local, problem.noise_of_steps, gap, sampled, clock, generator, want_bound
    )
    return grad, bound, floor_hits


def as_minibatch(problem: Problem, state: State, rows: np.ndarray, labels: Tensor) -> Minibatch:
    """What the sampler may look at."""
    groups = None if problem.row_group is None else MinibatchGroups.among(problem.row_group[rows])
    K = problem.sampler.n_classes
    return Minibatch(problem.X, rows, labels, state.parameters, problem.kernels, state.clock.iteration, groups, K)


def draw(problem: Problem, minibatch: Minibatch, generator: torch.Generator) -> Sampled:
    """Sampled classes for these rows."""
    in_halves = problem.local is not None and problem.local.takes_halves
    draw_for = problem.sampler.draw_halves if in_halves else problem.sampler.draw_for
    return draw_for(minibatch, problem.n_sampled, generator=generator)


def score_for(problem: Problem, minibatch: Minibatch, sampled: Sampled) -> Any:
    """The scores of these rows' labels and sampled classes: `Scored`, or `ShardScored` of the classes that are here."""
    what = (problem.kernels, problem.X, minibatch.rows, minibatch.labels, sampled, minibatch.parameters)
    if problem.partition is None:
        return score(*what, minibatch.groups)
    with_labels = problem.shard_pass is None or problem.shard_pass.needs_label_scores
    return score_shard(*what, problem.partition, minibatch.groups, with_labels=with_labels)


def first_visits(problem: Problem, state: State, minibatch: Minibatch, generator: torch.Generator) -> None:
    """Rows seen for the first time get their q from a second, independent draw of classes."""
    local, index = problem.local, torch.from_numpy(minibatch.rows)
    assert local is not None
    new = local.unvisited(state.local, index)
    if not new.any():
        return
    of_new = as_minibatch(problem, state, minibatch.rows[new.numpy()], minibatch.labels[new])
    scored = score_for(problem, of_new, draw(problem, of_new, generator))
    state.mark.torn = True
    local.start(state.local, index[new], problem.noise_of_steps, scored.gaps(), scored.sampled.log_weight)


def bound_without_local(
    problem: Problem, gap: Tensor, log_weight: Tensor, labels: Tensor, want_bound: bool
) -> tuple[Tensor | None, Tensor]:
    """The methods that keep nothing per row: one-vs-each, sampled softmax, exact."""
    noise = problem.noise_of_steps
    if problem.method == "one-vs-each":
        value = bounds.one_vs_each(gap, log_weight, noise) if want_bound else None
        return value, bounds.one_vs_each_grad(gap, log_weight)
    if problem.method == "sampled-softmax":
        value = bounds.sampled_softmax(gap, log_weight, noise) if want_bound else None
        return value, bounds.sampled_softmax_grad(gap, log_weight, noise)
    if problem.noise.conjugate:
        return (bounds.exact_softmax(gap, noise) if want_bound else None), bounds.exact_softmax_grad(gap, noise)
    if problem.partition is None:
        return bounds.exact_noise(problem.noise, gap, labels)
    value, grad = bounds.exact_noise(problem.noise, problem.partition.whole_columns(gap), labels)  # eq. (5) is no sum
    return value, problem.partition.shard.of(grad.T).T.contiguous()
