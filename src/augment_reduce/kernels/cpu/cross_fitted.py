"""Reduce, solve and gradient of a cross-fitted q in one pass over the scores of shared classes, without a (B, S) array.

What `local` does in torch operations, which are the oracle: `softmax_groups` does it for a softmax, `grid_groups` for
other noises, one group of duplicate rows at a time. Same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ..constants import HALVINGS, MOVES
from .candidates import link
from .grid_groups import N_SCRATCH, grid_groups
from .noise_loops import A_NUMBER, NoiseLoops
from .softmax_groups import NOBODY, cross_fitted_softmax
from .types import Array
from .work import WORK, run, split


class GroupScores(NamedTuple):
    """Scores of a minibatch: U groups of rows with the same features, S shared classes, up to P of a group's own.

    - `psi` (U, S + P), overwritten; `psi_y` (B,), the labels'; rows of group u are start[u]:start[u + 1];
    - `classes` (S,) the shared ones; `own` (U, P) with `n_own` (U,) of them in use; `labels` (B,).
    """

    psi: Array
    psi_y: Array
    start: Array
    labels: Array
    classes: Array
    own: Array
    n_own: Array


class SampleWeights(NamedTuple):
    """Weights over the S + P columns, the same for all rows.

    - `stands`, `given` (H, S + P): of each half, see `samplers.base.Half`; `omega` (S + P,): their mean, for the prior;
    - `of_rows` (B,) or (1,): how much each row's gradient counts; `prior`: the scale of the shares of the prior.
    """

    stands: Array
    given: Array
    omega: Array
    of_rows: Array
    prior: float


class GroupGradients(NamedTuple):
    """Derivatives by the scores of groups (U, S + P) and of labels (B,); the groups' shares of the prior (U, S + P),
    the bound (B,), each empty where not asked for; how often the floor acted."""

    of_groups: Array
    of_labels: Array
    shares: Array
    bound: Array
    floor_hits: int


class CrossFittedPass:
    """What the passes share: arrays in, arrays out, and which shared classes a row's label is among."""

    def __init__(self, n_classes: int, log_floor: float) -> None:
        self.log_floor = log_floor  # inf: none
        self.last = np.full(n_classes, NOBODY, np.int32)  # between calls

    def __call__(self, scores_: tuple, weights_: tuple, *, want_bound: bool, want_shares: bool) -> tuple:
        """`scores_` and `weights_` hold the fields of GroupScores and SampleWeights, the result those of
        GroupGradients, as tensors; None in place of what is empty."""
        found = self.by_arrays(GroupScores(*arrays(scores_)), SampleWeights(*arrays(weights_)), want_bound, want_shares)
        of_groups, of_labels, shares, bound = (torch.from_numpy(each) for each in found[:4])
        hits = found.floor_hits
        return of_groups, of_labels, shares if want_shares else None, bound if want_bound else None, hits

    def by_arrays(
        self, scores: GroupScores, weights: SampleWeights, want_bound: bool, want_shares: bool
    ) -> GroupGradients:
        psi, (B, dtype) = scores.psi, (len(scores.labels), scores.psi.dtype)
        before = np.empty(len(scores.classes), np.int32)
        grad, of_label, hits = np.empty_like(psi), np.empty(B, dtype), np.zeros(len(psi), np.int64)
        shares, bound = np.empty_like(psi if want_shares else psi[:0]), np.empty(B if want_bound else 0, dtype)
        of_classes = psi, scores.psi_y, scores.start, scores.labels, scores.own, scores.n_own, self.last, before
        per_row = weights.of_rows.astype(dtype), int(len(weights.of_rows) > 1)
        of_rows = weights.omega.astype(dtype), *per_row, weights.prior, self.log_floor
        halves = weights.stands.astype(dtype), weights.given.astype(dtype)
        try:
            link(scores.classes, self.last, before)
            self.run(of_classes, halves, of_rows, (grad, of_label, shares, bound, hits))
        finally:
            self.last[scores.classes] = NOBODY
        return GroupGradients(grad, of_label, shares, bound, int(hits.sum()))

    def run(self, of_classes: tuple, halves: tuple[Array, Array], of_rows: tuple, results: tuple) -> None:
        """Fill the results, on all cores."""
        raise NotImplementedError


class CrossFittedSoftmax(CrossFittedPass):
    """eta in closed form."""

    def run(self, of_classes: tuple, halves: tuple[Array, Array], of_rows: tuple, results: tuple) -> None:
        U, C = of_classes[0].shape
        cuts = split(U, lambda: np.full(U, 16 * C))
        columns, back = scratch_of(len(cuts) - 1, C)
        own = list(zip(columns[:, 0], back, strict=True))
        run(cross_fitted_softmax, cuts, (*of_classes, *halves, *of_rows, *results), own)


class CrossFittedGrid(CrossFittedPass):
    """q on a grid, for a noise with scalar functions. `nodes` (J,) twice: places in deviations, log steps."""

    def __init__(
        self, loops: NoiseLoops, n_classes: int, log_floor: float, nodes: tuple[Array, Array], *, smooth: bool
    ) -> None:
        super().__init__(n_classes, log_floor)
        self.nodes, self.kernel = nodes, loops.generated(grid_groups, smooth)
        # Evaluations of the noise for each class of a row.
        self.work = A_NUMBER * (HALVINGS + MOVES + 2 * len(nodes[0]))

    def run(self, of_classes: tuple, halves: tuple[Array, Array], of_rows: tuple, results: tuple) -> None:
        (psi, start), (U, C) = (of_classes[0], of_classes[2]), of_classes[0].shape
        cuts = split(U, lambda: np.diff(start) * (self.work * C))
        n = len(cuts) - 1
        lines = WORK.array("fits", n * N_SCRATCH * C, psi.dtype).reshape(n, N_SCRATCH, C)
        arguments = (*of_classes, *map(nonzero_first, halves), *of_rows, *results, self.nodes)
        run(self.kernel, cuts, arguments, list(zip(*scratch_of(n, C), lines, strict=True)))


def scratch_of(n: int, C: int) -> tuple[Array, Array]:
    """For n threads: two lines of columns, and a line of zeros that is zero again afterwards."""
    columns = WORK.array("columns", n * 2 * C, np.int64).reshape(n, 2, C)
    return columns, WORK.array("back", n * C, np.float64).reshape(n, C)


def arrays(values: tuple) -> Iterator[Any]:
    return (value.numpy() if isinstance(value, torch.Tensor) else value for value in values)


def nonzero_first(weights: Array) -> tuple[Array, Array, Array]:
    """Of each line the columns that are not zero first, in their order; what stands there, and how many they are."""
    places = np.argsort(weights == 0, axis=1, kind="stable")
    return places, np.take_along_axis(weights, places, axis=1), np.count_nonzero(weights, axis=1)
