"""The exponentials of a softmax over ranks, group by group, for passes with one all-reduce (`late`, `crossed_shards`).

Rows with the same features have the same scores but for their labels. So e^psi is made once for a group of them, and
what a row does not count of its group's sums is taken off: the pair with its own label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.minibatch_groups import MinibatchGroups
from ..model.shards import ShardGradient, ShardPush, ShardScored
from ..sampling import Minibatch
from ..sharding import ClassShard, Partition
from .base import LocalState


class Ask(NamedTuple):
    """What a step asks of a pass: the arguments of `FusedPass`, with the minibatch and the state of q."""

    minibatch: Minibatch
    scored: ShardScored
    state: LocalState
    row_scale: Tensor | float
    prior_scale: float
    want_bound: bool
    want_shares: bool


class Ready(NamedTuple):
    """What can be pushed: this step's gradient, or that of the one before."""

    gradient: ShardPush
    bound: Tensor | None
    floor_hits: int

    @classmethod
    def of(cls, ask: Ask, gradient: ShardGradient, bound: Tensor | None, floor_hits: int) -> Ready:
        return cls(ShardPush.of(ask.scored, gradient, ask.prior_scale), bound, floor_hits)

    def gathered(self, partition: Partition) -> dict[str, Tensor]:
        """For a checkpoint, the same on every rank."""
        bound = {} if self.bound is None else {"bound": self.bound}
        return self.gradient.gathered(partition) | bound | {"floor_hits": torch.tensor([self.floor_hits])}

    @classmethod
    def own(cls, every: Mapping[str, Tensor], shard: ClassShard) -> Ready:
        return cls(ShardPush.own(every, shard), every.get("bound"), int(every["floor_hits"]))


class Terms(NamedTuple):
    """Scores psi (U, S) of groups of rows with the same features, or of rows where weights differ within a group.

    - `run` (B,): the line of each row;
    - `hidden` (U, S): pairs that no row of the line counts;
    - `row`, `column`: those that this row does not count and another of its line does.
    """

    psi: Tensor
    lines: MinibatchGroups
    run: Tensor
    hidden: Tensor | None
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, scored: ShardScored) -> Terms:
        sampled, groups, n_rows = scored.sampled, scored.groups, len(scored.rows)
        weights = [sampled.log_weight, *(half.stands for half in sampled.halves or ())]
        none = torch.empty(0, dtype=torch.int64)
        if len(groups.first) == n_rows or any(each.ndim == 2 for each in weights):
            each_row = MinibatchGroups.none(n_rows)
            return cls(groups.spread(scored.psi), each_row, torch.arange(n_rows), sampled.mask, none, none)
        run = torch.from_numpy(groups.group)
        if sampled.mask is None:
            return cls(scored.psi, groups, run, None, none, none)
        hidden = torch.from_numpy(np.logical_and.reduceat(sampled.mask.numpy(), groups.first, axis=0))
        row, column = (sampled.mask & ~hidden[run]).nonzero().T
        return cls(scored.psi, groups, run, hidden, row, column)

    def exponentials(self, shift: Tensor | float) -> Tensor:
        """(U, S) e^{psi - shift}; zero where hidden. Overwrites psi."""
        found = self.psi.sub_(shift).exp_()
        return found if self.hidden is None else found.masked_fill_(self.hidden, 0.0)

    def sum(self, values: Tensor, weight: Tensor) -> Tensor:
        """(B,) of values (U, S) times weights (S,), (U, S) or one number: over what each row counts."""
        of_lines = values @ weight if weight.ndim == 1 else (values * weight).sum(dim=1)
        if not len(self.row):
            return of_lines[self.run]
        line = self.run[self.row]
        return of_lines[self.run].index_add_(0, self.row, (values * weight)[line, self.column], alpha=-1.0)

    def added(self, values: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(U, S) the sum over the rows of a line, and over the pairs (u (B,), w as in `sum`), of values u_row w."""
        times = sum(self.lines.added(of_rows[:, None]) * weight for of_rows, weight in weights)
        found = values * times
        if len(self.row):
            line = self.run[self.row]
            for of_rows, weight in weights:
                less = of_rows[self.row] * (values * weight)[line, self.column]
                found.index_put_((line, self.column), -less, accumulate=True)
        return found

    def prior_shares(self, scored: ShardScored, prior_scale: float) -> Tensor:
        """(U, S) of each line's pairs that count: omega times `prior_scale`."""
        counts = torch.ones(len(scored.rows), dtype=self.psi.dtype)
        ones = torch.ones_like(self.psi)
        ones = ones if self.hidden is None else ones.masked_fill_(self.hidden, 0.0)
        return self.added(ones, [(counts, scored.sampled.log_weight.exp() * prior_scale)])

    def gradient(
        self, scored: ShardScored, of_lines: Tensor, of_labels: Tensor, shares: Tensor | None
    ) -> ShardGradient:  # fmt: skip
        """By groups, where these lines are rows."""
        if len(self.lines.first) != len(scored.groups.first):
            of_lines, shares = scored.groups.added(of_lines), None if shares is None else scored.groups.added(shares)
        return ShardGradient(of_lines, of_labels, shares)
