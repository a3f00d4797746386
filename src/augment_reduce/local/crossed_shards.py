"""Cross-fitting of a softmax over ranks, with one all-reduce a step: of two numbers a row, as a rule.

    eta_A = e^{psi_y - s} + sum_{k in A} omega_k e^{psi_k - s}          s: one number, known to all ranks beforehand

Given the sums of both halves over all ranks, the pulls are local: -1/2 sum over halves of omega_k|A e^{psi_k - s} /
eta_A. The halves of independent draws exchange their sums (what A stands for is what is given B), hence two numbers.

`late`: the gradient of a step is pushed in the next one, when the sums have arrived while that drew and scored. So its
weights are those of one step before, and no step waits for its own sums, but for the first ones (`EARLY`): from the
start late steps cost .013 nat on debian-deps, 5,694 classes, after ten epochs. 200 was chosen there, on one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..model.over_ranks import DIVERGED, checked
from ..model.shards import ShardScored
from ..sharding import Partition, PendingSum
from .shard_terms import Ask, Ready, Terms

if TYPE_CHECKING:
    from .cross_fitting import CrossFitted


EARLY = 200  # steps that wait all the same: while weights move fastest, a step late is as far as two
SMALLEST = 1e-30  # of eta in units of e^s


class Started(NamedTuple):
    """A step whose sums are on their way: (n different weights, B), then psi_y where the bound is wanted."""

    ask: Ask
    terms: Terms
    e: Tensor  # (U, S)
    of_label: Tensor  # (B,) e^{psi_y - s}, zero for labels elsewhere
    shares: Tensor | None
    shift: float
    halves: list[tuple[int, int, Tensor]]  # of each half: where its eta is among the sums, its target, weights given it
    sums: PendingSum


class CrossFittedShards:
    """`CrossFitted` for a softmax, from the classes that are here."""

    needs_label_scores = False

    def __init__(self, local: CrossFitted, partition: Partition) -> None:
        self.partition, self.floor = partition, math.inf if local.floor is None else local.floor
        self.shift = math.log(partition.shard.n_classes)
        self.before: Started | None = None
        self.ready: Ready | None = None  # the step before, where its sums have been waited for

    def settle(self) -> Ready | None:
        """The step before, when its sums are there."""
        before, ready = self.before, self.ready
        self.before = self.ready = None
        return ready if before is None else self._finish(before)

    def pause(self) -> dict[str, Tensor]:
        """For a checkpoint: what the next step needs of this one, the same on every rank. Waits for its sums, which
        changes nothing: its gradient is pushed when it would have been."""
        self.ready = self.settle()
        late = {} if self.ready is None else self.ready.gathered(self.partition)
        return late | {"shift": torch.tensor([self.shift], dtype=torch.float64)}

    def go_on(self, late: Mapping[str, Tensor]) -> None:
        """From what `pause` gave."""
        self.shift = float(late["shift"])
        self.ready = Ready.own(late, self.partition.shard) if "rows" in late else None

    def __call__(self, ask: Ask) -> Ready | None:
        ready = self.settle()
        self.before = self._start(ask)
        if self.partition.late and ask.minibatch.steps_taken >= EARLY:
            return ready
        return self.settle()

    def _start(self, ask: Ask) -> Started:
        scored, terms = ask.scored, Terms.of(ask.scored)
        shares = terms.prior_shares(scored, ask.prior_scale) if ask.want_shares else None
        e, of_label = terms.exponentials(self.shift), scored.psi_here.new_zeros(len(terms.run))
        of_label[scored.here] = torch.exp(scored.psi_here - self.shift)
        weights, halves = self._weights(scored)
        sums = torch.stack([terms.sum(e, weight) + of_label for weight in weights])
        if ask.want_bound:
            psi_y = torch.zeros_like(sums[:1])
            psi_y[0, scored.here] = scored.psi_here
            sums = torch.cat([sums, psi_y])
        pending = self.partition.ranks.start_sum(sums, "the sums over classes")
        return Started(ask, terms, e, of_label, shares, self.shift, halves, pending)

    def _weights(self, scored: ShardScored) -> tuple[list[Tensor], list[tuple[int, int, Tensor]]]:
        """The different weights of both halves, and which of them each half has: what it stands for, and is given."""
        assert scored.sampled.halves is not None
        first, second = scored.sampled.halves
        one = first is second
        if scored.exchange:
            weights = [first.given.exp()] if one else [first.stands.exp(), first.given.exp()]
            return weights, [(0, 0, weights[0])] if one else [(0, 1, weights[1]), (1, 0, weights[0])]
        of_halves = [each.exp() for half in ((first,) if one else (first, second)) for each in half]
        return of_halves, [(i, i + 1, of_halves[i + 1]) for i in range(0, len(of_halves), 2)]

    def _finish(self, started: Started) -> Ready:
        ask, sums, of_label = started.ask, checked(started.sums.wait()), started.of_label
        n_halves, hits, bound = len(started.halves), 0, None
        if not bool(sums.isfinite().all()):
            raise FloatingPointError(DIVERGED)
        lift, pulls = torch.zeros_like(of_label), []
        for eta_at, target_at, given in started.halves:
            eta, target = sums[eta_at].clamp_min(SMALLEST), sums[target_at]
            if ask.want_bound:
                to_label = sums[-1] - started.shift
                part = (1.0 + to_label - eta.log() - target / eta) / n_halves
                bound = part if bound is None else bound + part
            lowest = target * math.exp(-self.floor)
            hits += int((lowest > eta).sum())
            of_rows = ask.row_scale / (n_halves * torch.maximum(eta, lowest))
            lift += of_rows * (target - of_label)
            pulls.append((-of_rows, given))
        log_eta = sums[0].clamp_min(SMALLEST).log()
        self.shift = started.shift + 0.5 * float(log_eta.min() + log_eta.max())
        gradient = started.terms.gradient(
            ask.scored, started.terms.added(started.e, pulls), lift[ask.scored.here], started.shares
        )
        return Ready.of(ask, gradient, bound, hits)
