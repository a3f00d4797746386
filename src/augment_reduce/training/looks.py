"""Looks at a model while it is trained: the validation rows, and how much the bound gives away. Each is O(K) a row.

Looks at the bound's gap take at most SHARE of a fit. How often it is looked at, and at how many rows, must not depend
on the machine or on who else uses it; so operations are counted, with what each takes on one core of the machine of
docs/benchmarks.md: steps at the least, looks at the most.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..config.defaults import Settings
from ..kernels.threads import num_threads
from ..model import bounds, predict, quadrature
from ..model.columns_over_ranks import ColumnsOverRanks
from ..sampling import Minibatch, Sampled
from ..sharding import Partition
from ..support.finite import check_finite
from .loop import Plan
from .step import Problem, State, as_minibatch

if TYPE_CHECKING:
    from .fitted import Fitted, TrainingRows

VALIDATION_PAIRS = 50_000_000  # (row, class) pairs of one look at the validation rows
GAP_PAIRS = 2_000_000  # and of one at the bound's gap: what has to be kept in memory
SHARE = 0.1  # of the time of the steps
CHEAP = 0.05  # seconds of a look that is taken at the end of any fit
MOST_LOOKS, MOST_ROWS, ENOUGH_ROWS, FEWEST_ROWS = 20, 256, 32, 8

# Seconds
A_STEP = 3e-4  # whatever its size
AN_ENTRY = 5e-10  # of a pair and a non-zero of its row: score and gradient
A_PAIR = {"softmax": 1e-8, "probit": 6e-8, "logistic": 6e-8}  # of a row and a class, besides
A_FITTED_PAIR = 4e-7  # where q is fitted anew, and the noise is not softmax's
OTHER_STEP, OTHER_PAIR = 3e-3, 1e-6  # of a noise by autograd
A_LOOK = {"softmax": 3e-3, "probit": 3e-2, "logistic": 3e-2}
A_LOOKED_AT_PAIR = {"softmax": 4.5e-8, "probit": 1.8e-6, "logistic": 5.5e-6}
OTHER_LOOK, OTHER_LOOKED_AT_PAIR = 1.5e-2, 2e-4  # by adaptive quadrature


def plan_of(
    fitted: Fitted, problem: Problem, settings: Settings, n_iter: int, n_held_out: int, *, with_gap: bool,
    review: int = 0, may_extend: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a fit of `n_iter` more iterations; that of the fit before, up to another end, if it was cut short."""
    last = fitted.clock.iteration + n_iter
    if fitted.run.plan is not None:
        plan = fitted.run.plan
        return plan if plan.last == last else plan._replace(last=last, may_extend=0)
    per_epoch, every = -(-len(problem.active) // settings.batch_size), max(1, n_iter // MOST_LOOKS)
    n_looks, gap_rows = looks_at_gap(problem, settings, n_iter) if with_gap else (0, 0)
    return Plan(
        last=last,
        record_every=max(1, min(n_iter // 200, per_epoch)),
        bound_every=1 if n_iter < 200 else max(1, min(10, n_iter // 200)),
        validate_every=every if n_held_out else 0,
        gap_every=every * -(-n_iter // (every * n_looks)) if n_looks else 0,
        gap_rows=gap_rows,
        review=review,
        may_extend=int(may_extend),
    )


def looks_at_gap(problem: Problem, settings: Settings, n_iter: int) -> tuple[int, int]:
    """How often, and at how many rows; never (0, 0) where even a few rows once cost too much."""
    if problem.method in ("sampled-softmax", "exact"):
        return 0, 0
    K, noise = problem.sampler.n_classes, problem.noise.name
    fixed, each = A_LOOK.get(noise, OTHER_LOOK), K * A_LOOKED_AT_PAIR.get(noise, OTHER_LOOKED_AT_PAIR)
    budget, N = SHARE * n_iter * seconds_of_step(problem, settings), len(problem.active)
    most = min(N, MOST_ROWS, max(FEWEST_ROWS, GAP_PAIRS // K))
    for n_looks in (20, 10, 5, 4, 2, 1):
        rows = int(min(most, max(0.0, budget / n_looks - fixed) / each))
        if rows >= min(most, ENOUGH_ROWS):
            return n_looks, rows
    budget = max(budget, CHEAP)
    for n_looks in (2, 1):
        rows = int(min(most, max(0.0, budget / n_looks - fixed) / each))
        if rows >= min(most, FEWEST_ROWS):
            return n_looks, rows
    return 0, 0


def seconds_of_step(problem: Problem, settings: Settings) -> float:
    """What a step takes at least."""
    B, noise, X = min(settings.batch_size, len(problem.active)), problem.noise.name, problem.X
    pairs = B * (problem.n_sampled + 1)
    a_pair = A_PAIR.get(noise, OTHER_PAIR)
    if problem.local is not None and problem.local.takes_halves and noise != "softmax":
        a_pair = max(a_pair, A_FITTED_PAIR)
    fixed = A_STEP if noise in A_PAIR else OTHER_STEP
    return fixed + pairs * (a_pair + AN_ENTRY * X.n_nonzero / max(1, X.n_rows))


def validation_look(problem: Problem, state: State, rows: TrainingRows, held_out: np.ndarray) -> Callable[[], float]:
    """Mean log likelihood of the held-out rows (of as many as are affordable), exact."""
    K = problem.sampler.n_classes
    looked_at = held_out[: max(100, VALIDATION_PAIRS // K)]
    codes = torch.from_numpy(rows.codes[looked_at].astype(np.int64, copy=False))
    weight = None if rows.weight is None else rows.weight[looked_at]
    columns = predict.Columns(K) if problem.partition is None else ColumnsOverRanks(problem.partition)

    def look() -> float:
        with in_order(problem.partition):
            found = predict.log_likelihood(
                problem.noise, lambda begin, end: scores_here(problem, state, looked_at[begin:end]), codes, K,
                columns=columns,
            )  # fmt: skip
        return float(np.average(found.numpy(), weights=weight))

    return look


def scores_here(problem: Problem, state: State, rows: np.ndarray) -> Tensor:
    """psi (B, K), on every rank those of its own classes."""
    parameters = state.parameters
    here = torch.arange(len(parameters.bias))
    return problem.kernels.shared_scores(problem.X, rows, here, parameters.weight, parameters.bias)


def scores_of_all(problem: Problem, state: State, rows: np.ndarray) -> Tensor:
    """psi (B, K), on every rank those of all classes."""
    psi = scores_here(problem, state, rows)
    return psi if problem.partition is None else problem.partition.whole_columns(psi)


def in_order(partition: Partition | None) -> contextlib.AbstractContextManager[None]:
    """Blocks of rows one after the other, where each is gathered from all ranks."""
    return contextlib.nullcontext() if partition is None else num_threads(1)


def bound_gap_look(
    problem: Problem, state: State, active: np.ndarray, n_rows: int
) -> Callable[[], tuple[float, float]]:  # fmt: skip
    """On fixed training rows: log p minus the full-sum bound with their stored q, which is how much the bound gives
    away, and log p."""
    rows = active[np.linspace(0, len(active) - 1, n_rows).astype(np.int64)]
    index = torch.from_numpy(rows)
    labels = problem.labels[index]

    def look() -> tuple[float, float]:
        psi = scores_of_all(problem, state, rows)
        check_finite(psi)
        psi_y = psi.gather(1, labels[:, None])
        gap = (psi - psi_y).scatter_(1, labels[:, None], -torch.inf).to(torch.float64)
        if problem.local is None:
            bound = bounds.one_vs_each(gap, gap.new_zeros(()))
            visited = torch.ones(len(rows), dtype=torch.bool)
        else:
            minibatch = as_minibatch(problem, state, rows, labels)
            halves = halves_to_look_with(problem, minibatch) if problem.local.takes_halves else None
            bound = problem.local.bound_on_all(minibatch, psi_y[:, 0], state.local, problem.noise, gap, halves)
            visited = ~problem.local.unvisited(state.local, index)
        log_p = quadrature.log_likelihood(problem.noise, gap.scatter(1, labels[:, None], 0.0), labels)
        gap_there = float((log_p - bound)[visited].mean()) if visited.any() else math.nan
        return gap_there, float(log_p.mean())

    return look


def halves_to_look_with(problem: Problem, minibatch: Minibatch) -> Sampled:
    """Classes drawn as for a step, always with the same luck. By a copy: a sampler may take up something new then."""
    generator = torch.Generator().manual_seed(0)
    return copy.copy(problem.sampler).draw_halves(minibatch, problem.n_sampled, generator=generator)
