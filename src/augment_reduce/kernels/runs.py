"""`vem.step`, cross-fitted, with shared classes, without a (B, S) array: by runs of rows that are alike.

What is drawn, scored and pushed is what `vem.step` draws, scores and pushes; between the two `_cpu_runs`, for probit
and logistic `_cpu_noise_runs`, does in one pass what torch does in twenty. The numbers are those of `vem.step` up to
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..crossed import CrossFitted, different
from ..gaussian import standard_nodes
from ..local import Clock
from ..noise import Gumbel, Logistic, Normal
from ..optim import PRIOR_UNBIASED
from ..sampler import FeaturePointed, FrequencyShared, Half, HeadAndTail, Minibatch, Sampled
from ..scores import push_runs, score_runs
from ..vem import StepInfo, StepInfos
from . import cpu
from ._cpu_local import MODELS
from ._cpu_noise import A_NUMBER
from ._cpu_noise_runs import cross_fitted_noise_runs
from ._cpu_pointers import link
from ._cpu_runs import NOBODY, cross_fitted_runs
from ._cpu_work import WORK, run, split
from .alike import Alike

if TYPE_CHECKING:
    from ..vem import Problem, State

A_FIT = 60  # evaluations of a noise for each class of a row: Newton's start, its moves at five nodes, and the pulls
SAMPLERS = (HeadAndTail, FeaturePointed, FrequencyShared)  # classes and weights of a minibatch, the label masked


def possible(problem: Problem) -> bool:
    return (
        problem.kernels is cpu
        and problem.method == "augment-reduce"
        and type(problem.sampler) in SAMPLERS
        and type(problem.noise) in (Gumbel, Normal, Logistic)
        and type(problem.local) is CrossFitted
    )


class RunsStep:
    """Steps of one problem from one state."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem, self.parameters, self.mark = problem, state.parameters, state.mark  # the state itself has this
        self.last = np.full(len(state.parameters.bias), NOBODY, np.int32)  # between steps

    def serves(self, problem: Problem, state: State) -> bool:
        same = self.parameters is state.parameters and self.mark is state.mark
        return self.problem is problem and same

    def at_once(self, B: int) -> int:
        """One minibatch a call."""
        return 1

    def __call__(
        self,
        order: np.ndarray,
        clock: Clock,
        generators: Iterable[torch.Generator],
        wanted: Sequence[bool] | np.ndarray,
    ) -> StepInfos:
        """Steps taken one by one."""
        clocks = map(clock.later, range(len(order)))
        taken = zip(order, clocks, generators, wanted, strict=True)
        return StepInfos.from_steps([StepInfo(*self.step(*each)) for each in taken])

    def step(
        self, rows: np.ndarray, clock: Clock, generator: torch.Generator, want_bound: bool
    ) -> tuple[torch.Tensor | None, int]:
        problem, parameters = self.problem, self.parameters
        labels = problem.labels[torch.from_numpy(rows)]
        runs = None if problem.alike is None else Alike.among(problem.alike[rows])
        minibatch = Minibatch(problem.X, rows, labels, parameters, problem.kernels, clock.iteration - 1, runs)
        alike = runs or Alike.none(len(rows))
        sampled = problem.sampler.draw_halves(minibatch, problem.n_sampled, generator=generator)
        psi, psi_y = score_runs(problem.kernels, problem.X, rows, labels, sampled, parameters, alike)
        per_row = problem.n_rows / len(rows)
        grads, of_label, shares, bound, hits = self.gradients(
            psi.numpy(), psi_y.numpy()[:, 0], rows, labels.numpy(), sampled, alike, per_row, want_bound
        )
        self.mark.torn = True
        push_runs(
            problem.kernels, problem.X, rows, labels, sampled, alike, torch.from_numpy(grads),
            torch.from_numpy(of_label), None if shares is None else torch.from_numpy(shares), per_row, parameters,
            problem.optimizer, clock.iteration, problem.prior,
        )  # fmt: skip
        return (torch.from_numpy(bound) if want_bound else None), hits

    def gradients(
        self, psi: np.ndarray, psi_y: np.ndarray, rows: np.ndarray, labels: np.ndarray, sampled: Sampled, alike: Alike,
        per_row: float, want_bound: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, int]:  # fmt: skip
        """(by the runs' scores, by the labels', shares of the prior, bound, floor hits); `psi` is used up."""
        problem, U, B, dtype = self.problem, len(psi), len(rows), psi.dtype
        classes, before = sampled.classes.numpy(), np.empty(len(sampled.classes), np.int32)
        own, n_own = np.empty((U, 0), np.int64), np.zeros(U, np.int64)
        if sampled.own is not None and sampled.n_own is not None:
            own, n_own = sampled.own.numpy()[alike.first], sampled.n_own.numpy()[alike.first]
        omega = np.exp(sampled.log_weight.numpy()).astype(dtype)
        of_row, scales = problem.sample_weight, np.array([per_row], dtype)
        if of_row is not None:
            scales = of_row.numpy()[rows] * scales
        felt = problem.prior is not None and problem.prior.mode == PRIOR_UNBIASED
        grad, of_label, hits = np.empty_like(psi), np.empty(B, dtype), np.zeros(U, np.int64)
        shares, bound = np.empty_like(psi if felt else psi[:0]), np.empty(B if want_bound else 0, dtype)
        start, floor = np.append(alike.first, B), problem.local.floor  # type: ignore[union-attr]
        of_classes = psi, psi_y, start, labels, own, n_own, self.last, before
        of_rows = omega, scales, int(of_row is not None), per_row, math.inf if floor is None else floor
        results = grad, of_label, shares, bound, hits
        try:
            link(classes, self.last, before)
            self.one_pass(of_classes, different(sampled), of_rows, results)
        finally:
            self.last[classes] = NOBODY
        return grad, of_label, shares if felt else None, bound, int(hits.sum())

    def one_pass(self, of_classes: tuple, halves: tuple[Half, ...], of_rows: tuple, results: tuple) -> None:
        """Fills the results, all cores."""
        psi, start, local, noise = of_classes[0], of_classes[2], self.problem.local, self.problem.noise
        (U, C), (stands, given) = psi.shape, (weights_of(halves, name, psi.dtype) for name in ("stands", "given"))
        softmax = type(noise) is Gumbel
        cuts = split(U, lambda: np.full(U, 16 * C) if softmax else np.diff(start) * (A_FIT * A_NUMBER * C))
        n = len(cuts) - 1
        columns = WORK.array("columns", n * 2 * C, np.int64).reshape(n, 2, C)
        back = WORK.array("back", n * C, np.float64).reshape(n, C)
        if softmax:
            run(
                cross_fitted_runs, cuts, (*of_classes, stands, given, *of_rows, *results),
                list(zip(columns[:, 0], back, strict=True)),
            )  # fmt: skip
            return
        assert isinstance(local, CrossFitted)
        fits = WORK.array("fits", n * 6 * C, psi.dtype).reshape(n, 6, C)
        how = MODELS[noise.name], standard_nodes(local.n_nodes), local.n_moves
        run(
            cross_fitted_noise_runs, cuts, (*of_classes, in_front(stands), in_front(given), *of_rows, *results, *how),
            list(zip(columns, back, fits, strict=True)),
        )  # fmt: skip


def weights_of(halves: tuple[Half, ...], name: str, dtype: np.dtype) -> np.ndarray:
    """(H, S + P): e^log weight of each half."""
    return np.stack([np.exp(getattr(half, name).numpy()) for half in halves]).astype(dtype)


def in_front(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each line the places that are not zero first, in their order; what stands there, and how many they are."""
    places = np.argsort(weights == 0, axis=1, kind="stable")
    return places, np.take_along_axis(weights, places, axis=1), np.count_nonzero(weights, axis=1)
