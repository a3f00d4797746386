"""The E step on one half of the classes drawn, the M step on the other, and the other way round.

    L = 1/2 [ L(q_A; B) + L(q_B; A) ]        q_A: the best q for half A of the sample; L( . ; B): the bound, from half B

q_A knows nothing of B, so that L(q_A; B) estimates the bound at q_A without bias, and so does its gradient: as with a q
that was remembered (`remembered.py`) or predicted (`amortised.py`), but this one is as new as the weights. It is what
sampled softmax does with one sample, made honest with two halves: there the classes in the normaliser are those that it
normalises, and the result is no bound. (Cross-fitting; Chernozhukov et al. 2018 use it against the same kind of bias.)

What it costs: q_A is as uncertain as half a sample makes it. Worth it from a few classes on (docs/studies.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..model import bounds
from ..model.bounds import Nodes
from ..model.gaussian import fit_gaussian, gaussian_nodes
from ..model.noise import Noise
from ..model.scores import ByScore, Scored
from ..sampling import Half, Minibatch, Sampled
from ..sharding import Partition
from ..support.ranges import MOST_NODES, check_number
from .base import Clock, FusedPass, LocalState, LocalStep
from .crossed_shards import CrossFittedShards
from .remembered import MOST_MOVES

SMALLEST = 1e-30  # eta in units of the largest term of both halves: what is below is no less hopeless, and finite


@dataclass(frozen=True)
class CrossFitted(LocalStep):
    """Nothing to remember, for any number of rows. Softmax: in closed form; others: Newton from scratch, `n_moves`.

    `floor`: a softmax's eta_A is kept above what B says, over e^floor; of other noises the pull of all rivals in B,
    plus 1, below that of A, plus 1, times e^floor. A class that B has, that outweighs the others, and that A lacks,
    would else outweigh all other rows, and Adagrad would never forget it. Where it acts the gradient is biased; that is
    counted.
    """

    name: ClassVar[str] = "cross-fitted"
    uses_updated: ClassVar[bool] = True  # type: ignore[misc]
    takes_halves: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    floor: float | None = 1.0
    n_moves: int = 4
    n_nodes: int = 5

    def __post_init__(self) -> None:
        if self.floor is not None and not self.floor >= 0.0:
            raise ValueError(f"Expected floor to be None or a number from 0 up, found {self.floor}.")
        check_number("n_moves", self.n_moves, 1, MOST_MOVES, whole=True)
        check_number("n_nodes", self.n_nodes, 1, MOST_NODES, whole=True)

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        return {}

    def unvisited(self, state: LocalState, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.bool)  # q comes from the classes just drawn

    def both_steps(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor, sampled: Sampled,
        clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        halves = different(sampled)
        if noise.conjugate:
            return self._softmax(noise, gap, halves, want_bound)
        return self._noise(noise, gap, halves, want_bound)

    def over_ranks(self, noise: Noise, partition: Partition) -> CrossFittedShards | None:
        """For a softmax."""
        return CrossFittedShards(self, partition) if noise.conjugate else None

    def fused(self, kernels: ModuleType, noise: Noise, n_classes: int) -> FusedPass | None:
        """For a softmax."""
        make = getattr(kernels, "cross_fitted_softmax", None) if noise.conjugate else None
        return make and FusedCrossFitting(make(n_classes, math.inf if self.floor is None else self.floor))

    def _softmax(
        self, noise: Noise, gap: Tensor, halves: tuple[Half, ...], want_bound: bool
    ) -> tuple[Tensor | None, Tensor, int]:
        """eta_A = 1 + sum_{k in A} omega_k e^gap_k; gradient -1/2 sum over both halves of omega_k|A e^gap_k / eta_A."""
        shift = noise.largest(gap)[:, None].clamp_min_(0.0)  # the label's own gap is 0, and one of those in eta
        scaled = (gap - shift).exp_()
        label = torch.exp(-shift[:, 0])
        bound, pull, hits = torch.zeros_like(label), torch.zeros_like(scaled), 0
        share = 1.0 / len(halves)
        sums = noise.summed(
            torch.stack([weighted_sum(scaled, weights) for half in halves for weights in (half.stands, half.given)])
        )
        for half, of_stands, of_given in zip(halves, sums[::2], sums[1::2], strict=True):
            eta = (label + of_stands).clamp_min(SMALLEST)  # both in units of e^shift
            target = label + of_given
            if want_bound:
                bound += share * (1.0 - shift[:, 0] - eta.log() - target / eta)
            if self.floor is not None:
                lowest = target * math.exp(-self.floor)
                hits += int((lowest > eta).sum())
                eta = torch.maximum(eta, lowest)
            pull -= (share / eta)[:, None] * half.given.exp()
        return (bound if want_bound else None), scaled.mul_(pull), hits

    def _noise(
        self, noise: Noise, gap: Tensor, halves: tuple[Half, ...], want_bound: bool
    ) -> tuple[Tensor | None, Tensor, int]:
        """q_A: the best Gaussian for half A, by Newton."""
        return from_halves(noise, gap, halves, functools.partial(self._gaussian, noise), self.floor, want_bound)

    def _gaussian(self, noise: Noise, gap: Tensor, log_weight: Tensor, n_nodes: int | None = None) -> Nodes:
        place = fit_gaussian(noise, gap, log_weight, n_nodes=self.n_nodes, n_moves=self.n_moves)
        return gaussian_nodes(*place, n_nodes or self.n_nodes)

    def bound_on_all(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor,
        sampled: Sampled | None = None,
    ) -> Tensor:  # fmt: skip
        """q from either half of a draw like those of training, the bound over all classes."""
        assert sampled is not None
        halves = different(sampled)
        drawn, full = drawn_from(gap, sampled), gap.new_zeros(())
        found = torch.zeros_like(gap[:, 0])
        for half in halves:
            if noise.conjugate:
                log_eta = bounds.log_eta_tilde(drawn, half.stands.to(gap.dtype))
                found += bounds.softmax_bound(gap, full, log_eta)
            else:
                some, log_weight = part_of(drawn, half.stands.to(gap.dtype))
                found += bounds.noise_bound(noise, gap, full, self._gaussian(noise, drawn[:, some], log_weight, 40))
        return found / len(halves)


def from_halves(
    noise: Noise, gap: Tensor, halves: tuple[Half, ...], fit: Callable[[Tensor, Tensor], Nodes], floor: float | None,
    want_bound: bool,
) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
    """The bound (B,), its gradient by gap (B, S) and how often the floor acted, for q = fit(gap, log weight) of each
    half. `floor`: see `CrossFitted`."""
    bound, grad, hits = gap.new_zeros(len(gap)), torch.zeros_like(gap), 0
    share = 1.0 / len(halves)
    for half in halves:
        alone, log_weight = part_of(gap, half.stands.to(gap.dtype))
        drawn = gap[:, alone]
        if log_weight.ndim == 2:  # a column may be of this half in some rows only; q's place looks at the largest gap
            drawn = drawn.masked_fill_(log_weight == -math.inf, -math.inf)
        q = fit(drawn, log_weight)
        some, log_weight = part_of(gap, half.given)
        if want_bound:
            bound += share * bounds.noise_bound(noise, gap[:, some], log_weight, q)
        pull = bounds.noise_bound_grad(noise, gap[:, some], log_weight, q)
        if floor is not None:
            expected = q.mean(noise.dlog_prob(q.eps)).neg()  # A's pull, where q_A is best
            most = math.exp(floor) * (1.0 + expected.clamp_min(0.0)) - 1.0
            total = noise.summed(pull.sum(dim=1)).neg()
            hits += int((total > most).sum())
            pull *= torch.where(total > most, most / total, 1.0)[:, None]
        grad[:, some] += share * pull
    return (bound if want_bound else None), grad, hits


def drawn_from(gap: Tensor, sampled: Sampled) -> Tensor:
    """(B, S) of the classes drawn, from the gaps of all classes; -inf where masked."""
    drawn = gap.gather(1, sampled.columns(len(gap)))
    return drawn if sampled.mask is None else drawn.masked_fill_(sampled.mask, -math.inf)


class FusedCrossFitting:
    """`CrossFitted` by a backend that goes through the scores group by group, (U, S + P) and not (B, S + P)."""

    def __init__(self, by_groups: Any) -> None:
        self.by_groups = by_groups

    def serves(self, sampled: Sampled) -> bool:
        """One weight a class, and no mask to be read."""
        halves = sampled.halves
        return halves is not None and halves[0].given.ndim == 1 and sampled.shared and sampled.hides_labels_only

    def __call__(
        self, scored: Scored, row_scale: Tensor | float, prior_scale: float, *, want_bound: bool, want_shares: bool
    ) -> ByScore:
        sampled, groups, labels = scored.sampled, scored.groups, scored.labels
        own, n_own = labels.new_empty(len(groups.first), 0), labels.new_zeros(len(groups.first))
        if sampled.own is not None and sampled.n_own is not None:
            own, n_own = sampled.own[groups.first], sampled.n_own[groups.first]
        start = np.append(groups.first, len(labels))
        of_rows = row_scale if isinstance(row_scale, Tensor) else scored.psi.new_tensor([row_scale])
        found = self.by_groups(
            (scored.psi, scored.psi_y[:, 0], start, labels, sampled.classes, own, n_own),
            (*both_weights(different(sampled)), sampled.log_weight.exp(), of_rows, prior_scale),
            want_bound=want_bound, want_shares=want_shares,
        )  # fmt: skip
        return ByScore(*found)


def both_weights(halves: tuple[Half, ...]) -> tuple[Tensor, Tensor]:
    """(H, S + P) twice: `stands` and `given` of each half, not their logs."""
    stands, given = (torch.stack([getattr(half, name) for half in halves]).exp() for name in ("stands", "given"))
    return stands, given


def different(sampled: Sampled) -> tuple[Half, ...]:
    """The halves of a sample; one, where both are the whole."""
    assert sampled.halves is not None
    first, second = sampled.halves
    return (first,) if first is second else (first, second)


def weighted_sum(scaled: Tensor, log_weight: Tensor) -> Tensor:
    """(B,) sum_k e^{log_weight_k} scaled_k."""
    weight = log_weight.exp()
    return scaled @ weight if weight.ndim == 1 else (scaled * weight).sum(dim=-1)


def part_of(gap: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of gap that have any weight, and their weights."""
    if not gap.shape[1]:  # of the classes drawn none is on this process
        return torch.arange(0), log_weight
    some = (log_weight > -math.inf).reshape(-1, gap.shape[1]).any(dim=0).nonzero()[:, 0]
    return some, log_weight[..., some]
