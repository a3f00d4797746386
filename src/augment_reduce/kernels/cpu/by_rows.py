"""All of a step but its draw, some rows at a time, where rows are dense and weights few.

    score ─► reduce, solve, gradient ─► sums of these rows | push: the steps of all classes

The kernels of the other files one after the other, with their very numbers; but rows are still in the second cache when
their gradients are summed, and Python is asked once a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from ..protocol import Parameters, Prior, RowOptimizer
from .arguments import RulesInTurn, arrays_of, in_shares, rule_kernels
from .batch import check_rows
from .classes import check_classes, with_label
from .door import check_shapes
from .few_weights import ROWS_AT_ONCE, add_rows, line_of, line_steps
from .paper_steps import keep, put_back
from .rules import Steps
from .scores import score_rows
from .types import OPTIONS, Array
from .work import all_below, zeros

NOT_FINITE, NO_SUCH_PAIR = -1, -2


@njit(**OPTIONS)
def _pair(rows: Array, labels: Array, classes: Array, n_rows: int, n_classes: int, pairs: Array) -> bool:
    """pairs = each row's label and its sampled classes; whether all rows and classes exist."""
    bad = 0
    for b in range(rows.shape[0]):
        bad += (rows[b] < 0) | (rows[b] >= n_rows)
    for b in range(rows.shape[0] if bad == 0 else 0):
        pairs[b, 0] = labels[rows[b]]
        for s in range(classes.shape[1]):
            pairs[b, 1 + s] = classes[b, s]
    flat = pairs.reshape(-1)
    for p in range(flat.shape[0] if bad == 0 else 0):
        bad += (flat[p] < 0) | (flat[p] >= n_classes)
    return bad == 0


@njit(**OPTIONS)
def _gaps(psi: Array, gap: Array) -> bool:
    """gap = the scores of the sampled classes minus the label's; whether all scores are finite."""
    bad, infinity = 0, psi.dtype.type(np.inf)
    for b in range(psi.shape[0]):
        bad += not abs(psi[b, 0]) < infinity
        for s in range(gap.shape[1]):
            bad += not abs(psi[b, 1 + s]) < infinity
            gap[b, s] = psi[b, 1 + s] - psi[b, 0]
    return bad == 0


def step_by_rows(steps: Steps, e_and_m: Callable[..., int]) -> Callable[..., int]:
    """The kernel of a rule and an E and M step, one of `paper_steps`."""
    step_line = line_steps(steps)

    def step_by_rows(
        data: tuple, rows: Array, classes: Array, scale: Array, each: int, share: Array, weights: Array, per_row: int,
        local: tuple, arrays: tuple, rule: tuple, line: tuple, sums: Array, scratch: tuple, bound: Array,
    ) -> int:  # fmt: skip
        """How often the floor acted; or NOT_FINITE or NO_SUCH_PAIR, with nothing changed.

        `data` are all rows and their labels; row b of the minibatch has scale[b each] and weights[b per_row]. `local`
        are state, step, flags and draws of the E and M step. `sums` are zero before and after.
        """
        (x, labels), (pairs, psi, gap, by_gap, grad, kept), hits = data, scratch, 0
        (state, step, flags, draws), B = local, rows.shape[0]
        if not _pair(rows, labels, classes, x.shape[0], arrays[0].shape[0], pairs):
            return NO_SUCH_PAIR
        for lo in range(0, B, ROWS_AT_ONCE):
            hi = min(lo + ROWS_AT_ONCE, B)
            score_rows(pairs[lo:hi], x, rows[lo:hi], arrays[0], arrays[3], psi[lo:hi])
            if not _gaps(psi[lo:hi], gap[lo:hi]):
                put_back(rows[:lo], state, kept)
                sums[:] = 0
                return NOT_FINITE
            keep(lo, rows[lo:hi], state, kept)
            hits += e_and_m(
                lo, rows[lo:hi], gap[lo:hi], weights[lo * per_row :], per_row, state, step, flags, draws,
                bound[lo:hi], by_gap[lo:hi],
            )  # fmt: skip
            with_label(by_gap[lo:hi], scale[lo * each :], each, grad[lo:hi])
            add_rows(lo, hi, pairs, x, rows, grad, share, line, sums)
        step_line(sums, line, arrays, rule, share.shape[0] > 0)
        return hits

    return step_by_rows


class StepByRows:
    """That kernel for one fit: rows `x` with `labels`, and parameters that stay where they are in memory."""

    def __init__(
        self, x: Array, labels: Array, e_and_m: Callable[..., int], parameters: Parameters, optimizer: RowOptimizer,
        prior: Prior | None,
    ) -> None:  # fmt: skip
        self.data, self.none, self.with_shares = (x, labels), np.empty(0, x.dtype), in_shares(prior)
        self.arrays = tuple(arrays_of(parameters, optimizer, prior))
        self.kernel = rule_kernels(optimizer, prior, self.with_shares).generated(step_by_rows, e_and_m)
        self.rules = RulesInTurn(optimizer, prior, x.dtype)
        self.rooms: dict[tuple[int, ...], tuple] = {}

    def __call__(
        self, rows: Array, classes: Array, scale: Array, share: Array | None, weights: Array, local: tuple, t: int,
        bound: Array,
    ) -> int:  # fmt: skip
        """How often the floor acted. FloatingPointError where a score is not finite; then nothing has changed.

        `rows` (B,), each once, and their `classes` (B, S), contiguous; `scale` and `weights` have one number,
        or one for each row; `share` (B (1 + S),) is what each pair feels of the prior, its label first.
        """
        check_shapes(classes.shape[:1], rows=rows)
        line, sums, scratch = self.rooms.get(classes.shape) or self._room(*classes.shape)
        hits = self.kernel(
            self.data, rows, classes, scale, int(len(scale) > 1), self.none if share is None else share, weights,
            int(len(weights) > 1), local, self.arrays, self.rules.at(t), line, sums, scratch, bound,
        )  # fmt: skip
        if hits == NO_SUCH_PAIR:
            self.refuse(rows, classes)
        if hits == NOT_FINITE:
            raise FloatingPointError
        return int(hits)

    def refuse(self, rows: Array, classes: Array) -> None:
        """IndexError that says which row or class there is not."""
        check_rows(rows, len(self.data[0]), all_below(rows, len(self.data[0])))
        check_classes(classes, len(self.arrays[0]))

    def _room(self, B: int, S: int) -> tuple:
        """(line, sums, scratch) for minibatches of this size."""
        weight: Array = self.arrays[0]
        (K, D), shapes = weight.shape, ((B, 1 + S), (B, S), (B, S), (B, 1 + S), (2, B))
        line = line_of(K, D, self.with_shares)
        scratch = np.empty((B, 1 + S), np.int64), *(np.empty(shape, weight.dtype) for shape in shapes)
        self.rooms[B, S] = line, zeros(line[-1], weight.dtype), scratch
        return self.rooms[B, S]
