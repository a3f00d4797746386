"""`vem.step` in one compiled call where that is possible: says when, and hands `_cpu_step` what it needs.

Possible for the paper's sampler with the paper's E steps, any of our optimisers and priors, dense or sparse rows: the
same numbers to the last bit. For the default with shared classes see `runs`: the same up to rounding. Whoever brings a
part of their own gets `vem.step` as it stands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..local import Clock, NaturalGradient, Reparameterised
from ..noise import Gumbel, Logistic, Normal
from ..optim import OPTIMIZERS, PRIOR_UNBIASED
from ..sampler import UniformPerRow, draw_seed
from ..scores import not_finite
from . import _cpu_team, cpu, runs
from ._cpu_batch import in_place, load, read_only
from ._cpu_classes import sorting
from ._cpu_local import MODELS, step_numbers, two_draws
from ._cpu_step import BIASES, GROUPS, ROWS, whole_step
from ._cpu_team import Team, most_threads
from ._cpu_types import Arrays, Rule
from ._cpu_work import WORK, all_different
from .rows import SparseRows

if TYPE_CHECKING:
    from ..vem import Problem, State

WORTH_THREADS = 400_000  # multiply-adds of a minibatch's scores from which a second thread pays
NOISES = {NaturalGradient: (Gumbel,), Reparameterised: (Normal, Logistic)}


def possible(problem: Problem, dtype: torch.dtype) -> bool:
    """Whether every part of this problem has a compiled twin. Float64 is for comparing, not worth its compiling."""
    return dtype == torch.float32 and (runs.possible(problem) or by_pairs(problem))


def step_of(problem: Problem, state: State) -> CompiledStep | runs.RunsStep:
    """The steps of a problem for which that is possible."""
    return CompiledStep(problem, state) if by_pairs(problem) else runs.RunsStep(problem, state)


def by_pairs(problem: Problem) -> bool:
    """Whether these are the paper's steps, with classes for each row."""
    return (
        problem.kernels is cpu
        and problem.method == "augment-reduce"
        and type(problem.sampler) is UniformPerRow
        and type(problem.noise) in NOISES.get(type(problem.local), ())  # type: ignore[arg-type]
        and type(problem.optimizer) in OPTIMIZERS.values()
    )


class CompiledStep:
    """Steps of one problem from one state; what does not change from step to step is laid out once."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem, self.parameters, self.local_state = problem, state.parameters, state.local
        weight, rule = state.parameters.weight, problem.local
        assert isinstance(rule, NaturalGradient | Reparameterised)
        self.rule, self.dtype, self.few = rule, weight.numpy().dtype, cpu.few_weights(problem.X, weight)
        self.visits, self.labels = state.local["visits"].numpy(), problem.labels.numpy()
        self.by_visits = rule.step_size.counts == "visits"
        X = problem.X
        self.per_row = len(X.values) / max(1, X.n_rows) if isinstance(X, SparseRows) else X.n_features / 4
        self.weights = None if problem.sample_weight is None else problem.sample_weight.numpy()
        self.none = WORK.array("none", 0, self.dtype)
        K, S = weight.shape[0], problem.n_sampled
        log_weight = torch.full((1,), math.log((K - 1) / S), dtype=weight.dtype)
        self.weigh = (log_weight.numpy(), torch.exp(log_weight).numpy(), S)
        if isinstance(rule, NaturalGradient):
            self.held = (state.local["log_eta"].numpy(), self.none, self.visits)
            self.flags = (self.by_visits, rule.uses_updated, rule.floor)
        else:
            self.held = (state.local["mu"].numpy(), state.local["gamma"].numpy(), self.visits)
            self.flags = (self.by_visits, rule.uses_updated, rule.entropy_gradient)
        self.no_draws = self.none.reshape(0, 0)
        self.no_rows = read_only(self.no_draws)  # as X may be: one compiled signature for all
        self.scratch_key: tuple[int, int, int] = (-1, 0, 0)
        self.scratch_kept: tuple = ()
        self.sizes: dict[int, tuple] = {}  # by B: what depends on the size of the minibatch alone
        self.teams: dict[tuple[int, int], Team] = {}  # by the number of threads and B

    def serves(self, problem: Problem, state: State) -> bool:
        return self.problem is problem and self.parameters is state.parameters and self.local_state is state.local

    def __call__(
        self, rows: np.ndarray, clock: Clock, generator: torch.Generator, want_bound: bool
    ) -> tuple[torch.Tensor | None, int] | None:
        """(bound, floor hits) of the step taken, or None, with nothing touched, where `vem.step` has to take it."""
        problem, rule, kind = self.problem, self.rule, self.parameters.weight.dtype
        if not rule.uses_updated and not self.visits[rows].all():
            return None
        arrays = cpu._arrays(self.parameters, problem.optimizer, problem.prior)
        rows = np.ascontiguousarray(rows, np.int64)
        sort_by, scales, share = self.for_size(len(rows))
        if self.weights is not None:
            scales = self.weights[rows] * scales
        seed = draw_seed(generator)
        softmax = isinstance(rule, NaturalGradient)
        u = self.no_draws if softmax else two_draws(problem.noise, len(rows), generator, kind)
        optimizer = cpu._rule(problem.optimizer, clock.iteration, problem.prior, share, self.dtype)
        bound = np.empty(len(rows) if want_bound else 0, self.dtype)
        e_step = (
            MODELS[problem.noise.name], self.held, step_numbers(rule.step_size, clock, kind)[0], self.flags, u, scales,
            int(self.weights is not None),
        )  # fmt: skip
        hits = None
        places = _cpu_team.PLACES
        if self.by_team(rows) and places.acquire(blocking=False):
            try:
                hits = self.team_step(seed, sort_by, rows, arrays, optimizer, e_step, share, bound)
            finally:
                places.release()
        if hits is None:
            x, csr, how = self.rows_for(rows, arrays.weight)
            hits = whole_step(
                how, seed, sort_by, rows, self.labels[rows], x, csr, tuple(arrays), tuple(optimizer), self.weigh,
                *e_step, share, self.scratch(how, arrays, csr, len(rows)), bound,
            )  # fmt: skip
        if hits < 0:
            raise not_finite()
        return (torch.from_numpy(bound) if want_bound else None), hits

    def by_team(self, rows: np.ndarray) -> bool:
        """Whether there are threads, multiply-adds enough for two of them, and no row that both would move."""
        if most_threads() < 2 or self.few or not self.per_row:
            return False
        worth = len(rows) * self.per_row * (1 + self.weigh[2]) > WORTH_THREADS
        return worth and all_different(rows, WORK.array("met", self.problem.X.n_rows, np.uint8))

    def team_step(
        self, seed: int, sort_by: tuple, rows: np.ndarray, arrays: Arrays, rule: Rule, e_step: tuple, share: np.ndarray,
        bound: np.ndarray,
    ) -> int | None:  # fmt: skip
        """The same step by all threads; None where the rows are empty. Dense rows they load themselves, if they can."""
        n, B, S = most_threads(), len(rows), self.weigh[2]
        K, D = arrays.weight.shape
        source, batch = in_place(self.problem.X, rows, self.dtype), None
        if source is None:
            batch = load(self.problem.X, rows, self.dtype, n_classes=1 + S)
            if batch.empty:
                return None
            source, x = self.no_rows, self.no_draws if batch.dense is None else batch.dense
        else:
            WORK.batch = None  # whose rows lay where these will
            x = WORK.array("dense", B * D, self.dtype).reshape(B, D)
        csr = cpu._csr(batch, B, self.dtype)
        key = (n, B)
        if key not in self.teams:
            self.teams[key] = Team(n, B, S, sort_by, self.dtype)
        few = [tuple(each) for each in cpu._buffers(n, len(csr.feature) or D, min(K, B * (1 + S)), self.dtype)]
        arguments = (
            seed, sort_by, rows, self.labels[rows], source, x, tuple(csr), tuple(arrays), tuple(rule), self.weigh,
            *e_step, share,
        )  # fmt: skip
        return self.teams[key].run(arguments, few, bound)

    def for_size(self, B: int) -> tuple:
        """(how to sort, N / B, the pairs' shares of the prior) for a minibatch of B rows."""
        if B not in self.sizes:
            S, prior = self.weigh[2], self.problem.prior
            per_row, share = self.dtype.type(self.problem.n_rows / B), self.none
            if prior is not None and prior.mode == PRIOR_UNBIASED:
                shares = np.full((B, 1 + S), self.weigh[1][0] * per_row, self.dtype)
                shares[:, 0] = per_row
                share = shares.reshape(-1)
            K = self.parameters.weight.shape[0]
            self.sizes[B] = (sorting(B * (1 + S), K), np.array([per_row], self.dtype), share)
        return self.sizes[B]

    def rows_for(self, rows: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, tuple, int]:
        """(dense rows, sparse rows, how to go through them)."""
        if self.few:
            x = cpu._read_in_place(self.problem.X, rows, weight)
            if x is not None:
                return x, tuple(cpu._csr(None, len(rows), self.dtype)), ROWS
        batch = load(self.problem.X, rows, self.dtype, n_classes=1 + self.weigh[2]) if weight.shape[1] else None
        csr = tuple(cpu._csr(batch, len(rows), self.dtype))
        if batch is None or batch.empty:
            return self.no_rows, csr, BIASES
        return self.no_rows if batch.dense is None else read_only(batch.dense), csr, GROUPS

    def scratch(self, how: int, arrays: Arrays, csr: tuple, B: int) -> tuple:
        """What the kernels leave as they found it, kept from step to step."""
        key = (how, B, len(csr[4]))
        if self.scratch_key == key:
            return self.scratch_kept
        (K, D), S, dtype = arrays.weight.shape, self.weigh[2], self.dtype
        most, size = min(K, B * (1 + S)), {ROWS: K * D, BIASES: 0, GROUPS: len(csr[4]) or D}[how]
        k = 0 if how == GROUPS else K
        sums = (WORK.array("sum_g", k, dtype), WORK.array("sum_c", k, dtype), WORK.array("sum_seen", k, np.uint8))
        few = cpu._buffers(1, size, most, dtype)[0]
        table, sink = WORK.array("table", 1 << (4 * S).bit_length(), np.int64), WORK.array("sink", 64, dtype)
        touched = WORK.array("touched", most + 1, np.int64)
        self.scratch_key = key
        self.scratch_kept = (tuple(few), sums, touched, *cpu._bias_sums(most, dtype), table, sink)
        return self.scratch_kept
