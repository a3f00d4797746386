"""psi of the label and of the sampled classes with sharded classes (`scores`, over ranks).

Every rank draws the same classes and keeps its own: shared ones as columns, those of single rows (candidate classes, or
all if drawn for each row) as a list of pairs, since their number differs between rows. The scores of the labels are
all-reduced; a score that is not finite becomes NaN, which the next all-reduce distributes to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.minibatch_groups import MinibatchGroups
from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..optim import Prior, RowOptimizer
from ..sampling import Half, Sampled
from ..sharding import ClassShard, Partition
from ..support.finite import all_finite
from .over_ranks import checked


class ShardScored(NamedTuple):
    """A minibatch with the sampled classes of this rank, as rows of its weights.

    - `sampled`: S shared classes and, as the last columns, P of single rows; P only if none are shared;
    - `psi`: (U, S + P) of groups of duplicate rows; (B, P) if none are shared;
    - `psi_y`: (B, 1), of all labels; None if not requested;
    - `pairs` (Q,), `run` (Q,): weight row and group of each label of `here`, then of each position of `filled` (U, P);
    - `exchange`: whether the weights of a half alone equal those given the other half. Determined from the whole
      sample, so that all ranks agree.
    """

    rows: np.ndarray
    sampled: Sampled
    psi: Tensor
    psi_y: Tensor | None
    psi_here: Tensor  # (H,) of the labels of this rank
    here: Tensor  # (H,) their rows in the minibatch
    groups: MinibatchGroups
    pairs: Tensor
    run: np.ndarray
    filled: Tensor
    exchange: bool

    @property
    def n_shared(self) -> int:
        return self.psi.shape[1] - self.filled.shape[1]

    def gaps(self) -> Tensor:
        """(B, S + P): psi_k - psi_y, -inf where masked. Overwrites `psi`: ask once."""
        assert self.psi_y is not None
        gap = self.groups.spread(self.psi).sub_(self.psi_y)
        return gap if self.sampled.mask is None else gap.masked_fill_(self.sampled.mask, -torch.inf)


def score_shard(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, parameters: Parameters,
    partition: Partition, minibatch_groups: MinibatchGroups | None = None, *, with_labels: bool = True,
) -> ShardScored:  # fmt: skip
    """Scores of the classes of this rank, and of all labels unless `with_labels` is False: then without a
    collective."""
    shard, weight, bias = partition.shard, parameters.weight, parameters.bias
    groups = minibatch_groups if minibatch_groups is not None and sampled.shared else MinibatchGroups.none(len(rows))
    own, pairs_of, filled = restricted(sampled, shard, len(rows))
    first = torch.from_numpy(groups.first)
    filled = filled[first]
    here = shard.is_own(labels).nonzero()[:, 0]
    pairs = torch.cat([shard.row(labels[here]), pairs_of[first][filled]])
    run = np.concatenate([groups.group[here.numpy()], filled.nonzero()[:, 0].numpy()])
    of_runs = rows[groups.first]
    psi_pairs = finite_or_nan(kernels.pair_scores(X, of_runs, pairs[:, None], weight, bias, run)[:, 0])
    psi_here, pending = psi_pairs[: len(here)], None
    if with_labels:  # asynchronous, while the other scores are computed
        of_labels = psi_here.new_zeros(len(rows)).index_copy_(0, here, psi_here)
        pending = partition.ranks.start_sum(of_labels, "the scores of labels")
    shared = own.classes if own.classes.ndim == 1 else own.classes.new_empty(0)
    psi = kernels.shared_scores(X, of_runs, shared, weight, bias)
    of_own = psi.new_zeros(filled.shape)
    of_own[filled] = psi_pairs[len(here) :]
    psi = finite_or_nan(torch.cat([psi, of_own], dim=1) if of_own.shape[1] else psi)
    psi_y = None if pending is None else checked(pending.wait())[:, None]
    return ShardScored(rows, own, psi, psi_y, psi_here, here, groups, pairs, run, filled, halves_exchange(sampled))


def halves_exchange(sampled: Sampled) -> bool:
    if sampled.halves is None:
        return False
    a, b = sampled.halves
    return a.stands.ndim < 2 and torch.equal(a.stands, b.given) and torch.equal(b.stands, a.given)


def finite_or_nan(psi: Tensor) -> Tensor:
    return psi if all_finite(psi) else torch.full_like(psi, torch.nan)


def restricted(sampled: Sampled, shard: ClassShard, n_rows: int) -> tuple[Sampled, Tensor, Tensor]:
    """The sample without the classes of other ranks, in rows of this rank's weights; the classes of single rows (B, P),
    likewise, and the mask of filled positions."""
    if not sampled.shared:
        columns, filled = first_columns(shard.is_own(sampled.classes))
        classes = shard.row(sampled.classes.gather(1, columns)).masked_fill_(~filled, -1)
        found = Selection(torch.arange(0), columns)
        return found.of(sampled, filled)._replace(classes=classes), classes, filled
    of_shared = shard.is_own(sampled.classes).nonzero()[:, 0]
    valid = torch.zeros(n_rows, 0, dtype=torch.bool)
    if sampled.own is not None:
        valid = shard.is_own(sampled.own)
        if sampled.n_own is not None:
            valid = valid & (torch.arange(sampled.own.shape[1]) < sampled.n_own[:, None])
    columns, filled = first_columns(valid)
    found = Selection(of_shared, columns + len(sampled.classes))
    own = found.of(sampled, filled)._replace(classes=shard.row(sampled.classes[of_shared]), own=None, n_own=None)
    pairs = columns if sampled.own is None else shard.row(sampled.own.gather(1, columns))
    return own, pairs, filled


def first_columns(valid: Tensor) -> tuple[Tensor, Tensor]:
    """(B, P) the True columns of each row, in order, padded with others; and the mask of the True ones."""
    count = valid.sum(dim=1)
    most = int(count.max()) if len(count) else 0
    columns = torch.sort(~valid, dim=1, stable=True).indices[:, :most]
    return columns, torch.arange(most) < count[:, None]


class Selection(NamedTuple):
    """Columns of a sample: first those for all rows, then those for each row (B, P)."""

    of_all: Tensor
    of_rows: Tensor

    def of(self, sampled: Sampled, filled: Tensor) -> Sampled:
        halves = sampled.halves
        if halves is not None:
            a, b = (Half(self.weights(half.stands), self.weights(half.given)) for half in halves)
            halves = (a, a) if halves[0] is halves[1] else (a, b)
        mask = None if sampled.mask is None else self.take(sampled.mask)
        if not bool(filled.all()):
            none = torch.cat([torch.zeros(len(filled), len(self.of_all), dtype=torch.bool), ~filled], dim=1)
            mask = none if mask is None else mask | none
        return sampled._replace(log_weight=self.weights(sampled.log_weight), mask=mask, halves=halves, label_mask=None)

    def weights(self, log_weight: Tensor) -> Tensor:
        """The columns of log weights: a scalar, (B, 1), one a column, or (B, S + P)."""
        if log_weight.ndim == 0 or (log_weight.ndim == 2 and log_weight.shape[1] == 1):
            return log_weight
        if log_weight.ndim == 2:
            return self.take(log_weight.expand(len(self.of_rows), -1))
        if not self.of_rows.shape[1]:
            return log_weight[self.of_all]
        rest = log_weight[int(self.of_rows.min()) :]
        if len(rest) and bool((rest == rest[0]).all()):
            return torch.cat([log_weight[self.of_all], rest[:1].expand(self.of_rows.shape[1])])
        return self.take(log_weight.expand(len(self.of_rows), -1))

    def take(self, values: Tensor) -> Tensor:
        """The columns of values (B, S + P)."""
        shared = values[:, self.of_all]
        return shared if not self.of_rows.shape[1] else torch.cat([shared, values.gather(1, self.of_rows)], dim=1)


def push_shard(
    partition: Partition, kernels: ModuleType, X: Rows, scored: ShardScored, grad_gap: Tensor,
    row_scale: Tensor | float, prior_scale: float, parameters: Parameters, optimizer: RowOptimizer, t: int,
    prior: Prior | None,
) -> None:  # fmt: skip
    """As `scores.push`: the label's gradient is minus the sum over the classes of all ranks."""
    sampled, shares = scored.sampled, None
    if prior is not None:
        share = torch.exp(sampled.log_weight).expand_as(grad_gap) * prior_scale
        shares = scored.groups.added(share if sampled.mask is None else share.masked_fill_(sampled.mask, 0.0))
    grad = grad_gap * (row_scale[:, None] if isinstance(row_scale, Tensor) else row_scale)
    of_labels = checked(partition.ranks.sum_(grad.sum(dim=1), "the gradients of labels")).neg_()[scored.here]
    by_score = ShardGradient(scored.groups.added(grad), of_labels, shares)
    ShardPush.of(scored, by_score, prior_scale).push(kernels, X, parameters, optimizer, t, prior)


class ShardGradient(NamedTuple):
    """Derivatives by the scores of groups (U, S + P) and of this rank's labels (H,); the groups' shares of the
    prior."""

    of_groups: Tensor
    of_labels: Tensor
    shares: Tensor | None


class ShardPush(NamedTuple):
    """What moves the weights by a `ShardGradient`: U groups of rows against n shared classes, and Q pairs."""

    rows: np.ndarray  # (U,) a row of each group
    classes: Tensor  # (n,) as rows of this rank's weights, like `pairs`
    grad: Tensor  # (U, n)
    shares: Tensor | None
    pairs: Tensor  # (Q,)
    run: np.ndarray  # (Q,) their groups
    pair_grad: Tensor  # (Q,)
    pair_shares: Tensor | None
    prior_scale: float

    @classmethod
    def of(cls, scored: ShardScored, found: ShardGradient, prior_scale: float) -> ShardPush:
        (of_groups, of_labels, shares), n, filled = found, scored.n_shared, scored.filled
        pair_shares = None
        if shares is not None:
            pair_shares = torch.cat([torch.full_like(of_labels, prior_scale), shares[:, n:][filled]])
            shares = shares[:, :n]
        return cls(
            scored.rows[scored.groups.first], scored.sampled.classes if n else scored.pairs.new_empty(0),
            of_groups[:, :n], shares, scored.pairs, scored.run, torch.cat([of_labels, of_groups[:, n:][filled]]),
            pair_shares, prior_scale,
        )  # fmt: skip

    def push(
        self, kernels: ModuleType, X: Rows, parameters: Parameters, optimizer: RowOptimizer, t: int, prior: Prior | None
    ) -> None:
        pair_shares = None if self.pair_shares is None else self.pair_shares[:, None]
        kernels.push_shared(
            X, self.rows, self.classes, self.grad, self.pairs[:, None], self.pair_grad[:, None], self.shares,
            pair_shares, parameters, optimizer, t, prior, own_rows=self.run,
        )  # fmt: skip

    # ---- of the classes of all ranks, for a checkpoint ----

    def gathered(self, partition: Partition) -> dict[str, Tensor]:
        """Tensors that are the same on every rank: B |S| numbers, whatever K and D are."""
        ranks, shard = partition.ranks, partition.shard
        sizes = ranks.gather(torch.tensor([len(self.classes), len(self.pairs)]), "the sizes of a gradient").tolist()

        def of_all(values: Tensor, kind: int) -> Tensor:
            return ranks.gather_rows(values.contiguous(), [size[kind] for size in sizes], "a gradient by scores")

        found = {
            "rows": torch.from_numpy(self.rows),
            "classes": of_all(shard.classes(self.classes), 0), "grad": of_all(self.grad.T, 0),
            "pairs": of_all(shard.classes(self.pairs), 1), "run": of_all(torch.from_numpy(self.run), 1),
            "pair_grad": of_all(self.pair_grad, 1),
            "prior_scale": torch.tensor([self.prior_scale], dtype=torch.float64),
        }  # fmt: skip
        if self.shares is not None and self.pair_shares is not None:
            found |= {"shares": of_all(self.shares.T, 0), "pair_shares": of_all(self.pair_shares, 1)}
        return found

    @classmethod
    def own(cls, every: Mapping[str, Tensor], shard: ClassShard) -> ShardPush:
        """This rank's part of what `gathered` gave, to as many ranks or to others."""
        shared, single = shard.is_own(every["classes"]), shard.is_own(every["pairs"])
        with_shares = "shares" in every
        return cls(
            every["rows"].numpy(), shard.row(every["classes"][shared]), every["grad"][shared].T.contiguous(),
            every["shares"][shared].T.contiguous() if with_shares else None, shard.row(every["pairs"][single]),
            every["run"][single].numpy(), every["pair_grad"][single],
            every["pair_shares"][single] if with_shares else None, float(every["prior_scale"]),
        )  # fmt: skip
