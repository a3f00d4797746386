"""The softmax step over ranks that waits for nobody: c(x) is held, and learns from the sums of the step before.

    L = 1 - c + psi_y - e^{psi_y - c} - sum_{k != y} omega_k e^{psi_k - c}          c = c(x) predicted from the features

With c held the pull of a class, omega_k e^{psi_k - c}, needs its own score only, and the label's 1 - e^{psi_y - c}
needs its own: every rank moves its classes at once. What c learns from, r = e^{psi_y - c} + sum omega_k e^{psi_k - c},
which is 1 on average at the best c, is one number a row. Its all-reduce is started in a step and waited for in the next
one, after that has scored its rows and before it predicts.

`floor` as in `Amortised`: what exceeds e^floor is cut, in the pulls and in what is learned, but here each rank cuts its
own part of r, since it knows no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..model.over_ranks import checked
from ..sharding import Partition, PendingSum
from .shard_terms import Ask, Ready, Terms

if TYPE_CHECKING:
    from .amortised import Amortised


class Learned(NamedTuple):
    """What a step leaves to the next: its rows, and its sums (1 or 2, B), on their way."""

    ask: Ask
    sums: PendingSum


class LateAmortised:
    """Reduce, solve and gradient of `Amortised` for a softmax, from the classes that are here."""

    needs_label_scores = False

    def __init__(self, local: Amortised, partition: Partition) -> None:
        self.local, self.partition = local, partition
        self.most = math.inf if local.floor is None else math.exp(local.floor)
        self.before: Learned | None = None

    def settle(self) -> None:
        """Learn from the step before, as soon as its sums are there."""
        self._learn()

    def pause(self) -> dict[str, Tensor]:
        """For a checkpoint: learns now what the next step would begin with."""
        self._learn()
        return {}

    def go_on(self, late: Mapping[str, Tensor]) -> None:
        """From what `pause` gave."""

    def _learn(self) -> Tensor | None:
        before, self.before = self.before, None
        if before is None:
            return None
        sums = checked(before.sums.wait())
        self.local.learn(before.ask.state, before.ask.minibatch, sums[0], sums[:1] - 1.0, with_label=False)
        return sums

    def __call__(self, ask: Ask) -> Ready:
        """This step's gradient; where the bound is wanted the step does wait."""
        self._learn()
        scored, terms = ask.scored, Terms.of(ask.scored)
        omega = scored.sampled.log_weight.exp()
        c = self.local.centre(ask.state, ask.minibatch, ask.minibatch.rows[terms.lines.first])
        shares = terms.prior_shares(scored, ask.prior_scale) if ask.want_shares else None
        e, of_label = terms.exponentials(c[:, None]), c.new_zeros(len(terms.run))
        of_label[scored.here] = torch.exp(scored.psi_here - c[terms.run][scored.here])
        ratio = terms.sum(e, omega) + of_label
        used = ratio.clamp_max(self.most)
        scale = torch.where(ratio > self.most, used / ratio, 1.0) * ask.row_scale
        sums = torch.stack([used, -ratio]) if ask.want_bound else used[None].clone()
        if ask.want_bound:
            sums[1, scored.here] += scored.psi_here
        self.before = Learned(ask, self.partition.ranks.start_sum(sums, "the sums over classes"))
        gradient = terms.gradient(
            scored, terms.added(e, [(-scale, omega)]), (ask.row_scale - scale * of_label)[scored.here], shares
        )
        bound = None
        if ask.want_bound:
            found = self._learn()
            assert found is not None
            bound = 1.0 - c[terms.run] + found[1]
        return Ready.of(ask, gradient, bound, int((ratio > self.most).sum()))
