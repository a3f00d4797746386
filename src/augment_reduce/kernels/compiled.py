"""`vem.steps` in one compiled call where that is possible: says when, and hands the teams of
`_cpu_team` what they need.

Possible for the paper's sampler with the paper's E steps, any of our optimisers and priors, dense or sparse rows: the
same numbers to the last bit. For the default with shared classes see `runs`: the same up to rounding. Whoever brings a
part of their own gets `vem.step` as it stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..local import Clock, NaturalGradient, Reparameterised
from ..noise import Gumbel, Logistic, Normal
from ..optim import OPTIMIZERS, PRIOR_UNBIASED
from ..sampler import UniformPerRow
from ..seeds import StepGenerators, draw_seed
from ..vem import StepInfos
from . import _cpu_team, cpu, runs
from ._cpu_batch import dense_enough, in_place, load, plain, read_only, spans, worth_numbering
from ._cpu_local import MODELS
from ._cpu_order import all_ascend, all_different
from ._cpu_quarters import PARTS, line_of
from ._cpu_team import BIASES, GROUPS, ROWS, Taken, Team, TeamByClasses, TeamByRows, TeamOfBiases, most_threads
from ._cpu_types import Arrays
from ._cpu_work import WORK, all_below
from .pace import Pace
from .rows import DenseRows, SparseRows

if TYPE_CHECKING:
    from ..vem import Problem, State

WORTH_THREADS = 100_000  # multiply-adds of a minibatch's scores from which a second thread pays
AT_ONCE, MOST = 240_000_000, 512  # such multiply-adds in one call, some 200 ms of steps; and how many of these at most
SOME_LABELS = 4096  # enough to see which are frequent
A_PAIR = 16  # what a pair costs beside them: drawing its class, sorting it, an exponential
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
        self.mark = state.mark
        weight, rule, X = state.parameters.weight, problem.local, problem.X
        assert isinstance(rule, NaturalGradient | Reparameterised)
        self.rule, self.dtype, self.few = rule, weight.numpy().dtype, cpu.few_weights(X, weight)
        visits, none = state.local["visits"].numpy(), WORK.array("none", 0, self.dtype)
        self.visits, self.none = visits, none
        by_visits = rule.step_size.counts == "visits"
        self.per_row = len(X.values) / max(1, X.n_rows) if isinstance(X, SparseRows) else X.n_features / 4
        K, self.S = weight.shape[0], problem.n_sampled
        log_weight = torch.full((1,), math.log((K - 1) / self.S), dtype=weight.dtype)
        self.weigh = (log_weight.numpy(), torch.exp(log_weight).numpy())
        if isinstance(rule, NaturalGradient):
            self.held, flag = (state.local["log_eta"].numpy(), none, visits), rule.floor
        else:
            self.held, flag = (state.local["mu"].numpy(), state.local["gamma"].numpy(), visits), rule.entropy_gradient
        self.flags = (by_visits, rule.uses_updated, flag)
        self.softmax = isinstance(rule, NaturalGradient)
        self.lie = self.where_they_lie()
        weights = problem.sample_weight
        self.of_rows = problem.labels.numpy(), none if weights is None else weights.numpy()
        self.sizes: dict[int, tuple] = {}  # by B: what depends on the size of the minibatch alone
        self.teams: dict[tuple[int, int, int], Team] = {}  # by the number of threads, the way and B
        self.paces: dict[tuple[int, int], Pace] = {}  # by the way and B

    def serves(self, problem: Problem, state: State) -> bool:
        same = self.parameters is state.parameters and self.mark is state.mark and self.local_state is state.local
        return self.problem is problem and same

    def where_they_lie(self) -> tuple | None:
        """(dense rows, columns, slots, values, features) of all data, if compiled steps can read them where they are;
        else every minibatch is loaded before its step."""
        X, index = self.problem.X, WORK.array("no_index", 0, np.uint32)
        if isinstance(X, DenseRows):
            x = in_place(X, np.empty(0, np.int64), self.dtype)
            return None if x is None else (x, index, index, self.none, index)
        if not plain(X, self.dtype):
            return None
        columns = X.indices.view(np.uint32)
        return self.none.reshape(0, 0), columns, columns, X.values, index

    def at_once(self, B: int) -> int:
        """How many minibatches of B rows one call may take."""
        X = self.problem.X
        if self.lie is None or (isinstance(X, SparseRows) and worth_numbering(B * self.per_row, X.n_features)):
            return 1
        return min(MOST, max(1, int(AT_ONCE / self.work(B))))

    def work(self, B: int) -> float:
        return B * (1 + self.S) * (self.per_row + A_PAIR)

    def __call__(
        self,
        order: np.ndarray,
        clock: Clock,
        generators: Iterable[torch.Generator],
        wanted: Sequence[bool] | np.ndarray,
    ) -> StepInfos | None:
        """Of the steps taken, for minibatches order (M, B); fewer than M where scores of the next are not finite, and
        where it is tried out how many threads pay. None, with nothing touched, where `vem.step` has to take them."""
        problem = self.problem
        if not self.rule.uses_updated and not self.visits[order].all():
            return None
        order = np.ascontiguousarray(order, np.int64)
        arrays, different = cpu._arrays(self.parameters, problem.optimizer, problem.prior), self.all_different(order)
        found = self.rows_for(order, arrays)
        if found is None or (found[0] == ROWS and not different):  # a quarter would see what another has moved
            return None
        how, places, data = found
        most = self.threads(how, order.shape[1]) if different else 1  # a row that comes twice two threads would move
        n, M = self.pace(how, order.shape[1], most, len(order))
        order, wanted, places = order[:M], wanted[:M], tuple(each[:M] for each in places)
        shown = np.cumsum(wanted) * wanted - 1  # where each step's bounds go: -1, nowhere
        taken = self.take(n, how, order, data, arrays, (*places, *self.plan(len(order), clock, generators), shown))
        asked = np.flatnonzero(shown[: taken.n] >= 0).tolist()
        return StepInfos(torch.from_numpy(taken.bounds)[: len(asked)], asked, taken.hits[: taken.n])

    def all_different(self, order: np.ndarray) -> bool:
        """Whether no row comes twice in a minibatch."""
        n = self.problem.X.n_rows
        if all_ascend(order, n):
            return True
        if not all_below(order.reshape(-1), n):
            raise IndexError(f"Expected rows in [0, {n}), found {order.min()} to {order.max()}.")
        return bool(all_different(order, WORK.array("met", n, np.uint8)))

    def threads(self, how: int, B: int) -> int:
        """As many as there is work for in a minibatch; for its quarters one, two or four."""
        work = self.work(B)
        n = min(most_threads(), int(2 * work / max(1, WORTH_THREADS))) if work > WORTH_THREADS else 1
        return n if how != ROWS else min(PARTS, 1 << (n.bit_length() - 1))

    def pace(self, how: int, B: int, most: int, M: int) -> tuple[int, int]:
        """(threads, steps) of the next call: as many as pay, at most these."""
        pace = self.paces.setdefault((how, B), Pace())
        n = pace.threads(most)
        return n, pace.steps_of(M, n) if most > 1 else M

    def plan(self, M: int, clock: Clock, generators: Iterable[torch.Generator]) -> tuple:
        """What differs between steps: seeds (of the classes, and of the two draws of q where there are draws), sizes of
        the E step, numbers of the optimiser."""
        n_seeds = 1 if self.softmax else 3
        if isinstance(generators, StepGenerators):
            seeds = generators.draw_seeds(n_seeds)
        else:
            seeds = np.array([[draw_seed(generator) for _ in range(n_seeds)] for generator in generators])
        alphas, step = np.zeros(M, self.dtype), self.rule.step_size
        if step.counts == "epoch":
            epochs = clock.epochs(M)
            sizes = [step.now(clock._replace(epoch=epoch)) for epoch in range(clock.epoch, epochs[-1] + 1)]
            alphas[:] = np.array(sizes)[epochs - clock.epoch]
        elif step.counts != "visits":  # of the rows
            alphas[:] = [step.now(clock.later(i)) for i in range(M)]
        turns = np.arange(clock.iteration, clock.iteration + M)
        return seeds, alphas, cpu.steps_of_rule(self.problem.optimizer, turns, self.problem.prior).astype(self.dtype)

    def take(self, n: int, how: int, order: np.ndarray, data: tuple, arrays: Arrays, plan: tuple) -> Taken:
        """The steps, by n threads where nobody else has them."""
        places = _cpu_team.PLACES
        held = n > 1 and places.acquire(blocking=False)
        try:
            began, known = time.perf_counter(), _cpu_team.n_compiled()
            taken = self.by_team(n if held else 1, how, order, data, arrays, plan)
            if _cpu_team.n_compiled() == known:  # or it took that long to compile
                self.paces[how, order.shape[1]].note(n if held else 1, time.perf_counter() - began, taken.n)
            return taken
        finally:
            if held:
                places.release()

    def by_team(self, n: int, how: int, order: np.ndarray, data: tuple, arrays: Arrays, plan: tuple) -> Taken:
        (M, B), (K, D), S = order.shape, arrays.weight.shape, self.S
        per_row, share = self.for_size(B)
        key, x = (n, how, B), data[0]
        if key not in self.teams and how == ROWS:
            line = line_of(K, x.shape[1], len(share) > 0)
            self.teams[key] = TeamByRows(n, B, S, line, self.dtype, self.held, arrays)
        elif key not in self.teams and how == BIASES:
            self.teams[key] = TeamOfBiases(n, B, S, K, self.dtype, self.held)
        elif key not in self.teams:
            labels = self.of_rows[0][order[: 1 + SOME_LABELS // B].reshape(-1)]
            self.teams[key] = TeamByClasses(n, B, S, K, self.dtype, self.held, labels, len(share) > 0)
        size, few = (D if len(x) else len(data[4]) or D) if how == GROUPS else 0, []
        if how != ROWS:
            few = [tuple(each) for each in cpu._buffers(n, size, min(K, B * (1 + S)), self.dtype)]
        kinds = cpu.kinds_of_rule(self.problem.optimizer, self.problem.prior, len(share) > 0)
        model, step = MODELS[self.problem.noise.name], self.rule.step_size
        scale, power = (self.dtype.type(number) for number in (step.scale, step.power))
        rows = (*self.of_rows, *map(read_only, data))  # as X may be: one compiled signature for all
        arguments = (
            (order, *plan), rows, tuple(arrays), kinds, self.weigh, model, self.held, (scale, power), self.flags,
            per_row, share,
        )  # fmt: skip
        before, self.mark.torn = self.mark.torn, True
        try:
            taken = self.teams[key].run(M, int(plan[-1].max()) + 1, arguments, few)
            self.mark.torn = before or taken.n > 0
            return taken
        except BaseException:  # sums may lie about half made
            self.teams.clear()
            WORK.forget()
            raise

    def for_size(self, B: int) -> tuple:
        """(N / B, the pairs' shares of the prior) for a minibatch of B rows."""
        if B not in self.sizes:
            S, prior = self.S, self.problem.prior
            per_row, share = self.dtype.type(self.problem.n_rows / B), self.none
            if prior is not None and prior.mode == PRIOR_UNBIASED:
                shares = np.full((B, 1 + S), self.weigh[1][0] * per_row, self.dtype)
                shares[:, 0] = per_row
                share = shares.reshape(-1)
            self.sizes[B] = (per_row, share)
        return self.sizes[B]

    def rows_for(self, order: np.ndarray, arrays: Arrays) -> tuple | None:
        """(way through the minibatches, (places of dense rows, begins and ends of sparse ones), data), or None where
        they have to be loaded one by one and there are several."""
        (M, B), D, X = order.shape, arrays.weight.shape[1], self.problem.X
        nowhere = WORK.array("zeros", M * B, np.int64).reshape(M, B)
        nothing = tuple(cpu._csr(None, B, self.dtype))[2:]
        way = ROWS if cpu.in_quarters(X, D, len(arrays.weight), B * (1 + self.S)) else BIASES
        biases = (way, (order, nowhere, nowhere), (self.none.reshape(0, 0), *nothing))
        if not D or (isinstance(X, SparseRows) and not len(X.values)):
            return biases
        if self.lie is not None and isinstance(X, DenseRows):
            return ROWS if self.few else GROUPS, (order, nowhere, nowhere), self.lie
        if self.lie is not None and isinstance(X, SparseRows):
            begin, end = np.empty((M, B), np.int64), np.empty((M, B), np.int64)
            fewest, most = spans(read_only(X.indptr), order, begin, end)
            if most == 0:
                return biases
            dense = dense_enough(most, B, D, 1 + self.S)
            if not dense and not worth_numbering(fewest, D):
                return GROUPS, (order, begin, end), self.lie
        if M > 1:
            return None
        batch = load(X, order[0], self.dtype, n_classes=1 + self.S)
        if batch.empty:
            return biases
        begin, end, *csr = cpu._csr(batch, B, self.dtype)
        x = self.none.reshape(0, 0) if batch.dense is None else batch.dense
        return GROUPS, (np.arange(B)[None], begin[None], end[None]), (x, *csr)
