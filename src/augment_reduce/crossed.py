"""The E step on one half of the classes drawn, the M step on the other, and the other way round.

    L = 1/2 [ L(q_A; B) + L(q_B; A) ]        q_A: the best q for half A of the sample; L( . ; B): the bound, from half B

q_A knows nothing of B, so that L(q_A; B) estimates the bound at q_A without bias, and so does its gradient: as with a q
that was remembered (`local.py`) or predicted (`amortised.py`), but this one is as new as the weights. It is what
sampled softmax does with one sample, made honest with two halves: there the classes in the normaliser are those that it
normalises, and the result is no bound. (Cross-fitting; Chernozhukov et al. 2018 use it against the same kind of bias.)

What it costs: q_A is as uncertain as half a sample makes it. Worth it from a few classes on (docs/studies.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import bounds
from .gaussian import fit_gaussian, gaussian_nodes
from .local import MOST_MOVES, Clock, LocalState, LocalStep
from .noise import Gumbel, Noise
from .ranges import MOST_NODES, check_number
from .sampler import Half, Minibatch, Sampled

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
        if type(noise) is Gumbel:
            return self._softmax(gap, halves, want_bound)
        return self._noise(noise, gap, halves, want_bound)

    def _softmax(self, gap: Tensor, halves: tuple[Half, ...], want_bound: bool) -> tuple[Tensor | None, Tensor, int]:
        """eta_A = 1 + sum_{k in A} omega_k e^gap_k; gradient -1/2 sum over both halves of omega_k|A e^gap_k / eta_A."""
        shift = gap.amax(dim=-1, keepdim=True).clamp_min_(0.0)  # the label's own gap is 0, and one of those in eta
        scaled = (gap - shift).exp_()
        label = torch.exp(-shift[:, 0])
        bound, pull, hits = torch.zeros_like(label), torch.zeros_like(scaled), 0
        share = 1.0 / len(halves)
        for half in halves:
            eta = (label + weighted_sum(scaled, half.stands)).clamp_min(SMALLEST)  # both in units of e^shift
            target = label + weighted_sum(scaled, half.given)
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
        bound, grad, hits = torch.zeros_like(gap[:, 0]), torch.zeros_like(gap), 0
        share = 1.0 / len(halves)
        for half in halves:
            q = gaussian_nodes(*self._gaussian(noise, gap, half), self.n_nodes)
            some, log_weight = part_of(gap, half.given)
            if want_bound:
                bound += share * bounds.noise_bound(noise, gap[:, some], log_weight, q)
            pull = bounds.noise_bound_grad(noise, gap[:, some], log_weight, q)
            if self.floor is not None:
                expected = (noise.dlog_prob(q.eps) @ q.weight).neg()  # A's pull, where q_A is best
                most = math.exp(self.floor) * (1.0 + expected.clamp_min(0.0)) - 1.0
                total = pull.sum(dim=1).neg()
                hits += int((total > most).sum())
                pull *= torch.where(total > most, most / total, 1.0)[:, None]
            grad[:, some] += share * pull
        return (bound if want_bound else None), grad, hits

    def _gaussian(self, noise: Noise, gap: Tensor, half: Half) -> tuple[Tensor, Tensor]:
        some, log_weight = part_of(gap, half.stands.to(gap.dtype))
        return fit_gaussian(noise, gap[:, some], log_weight, n_nodes=self.n_nodes, n_moves=self.n_moves)

    def bound_on_all(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor,
        sampled: Sampled | None = None,
    ) -> Tensor:  # fmt: skip
        """q from either half of a draw like those of training, the bound over all classes."""
        assert sampled is not None
        halves = different(sampled)
        drawn, full = gap.gather(1, sampled.columns(len(gap))), gap.new_zeros(())
        if sampled.mask is not None:
            drawn = drawn.masked_fill_(sampled.mask, -math.inf)
        found = torch.zeros_like(gap[:, 0])
        for half in halves:
            if type(noise) is Gumbel:
                log_eta = bounds.log_eta_tilde(drawn, half.stands.to(gap.dtype))
                found += bounds.softmax_bound(gap, full, log_eta)
            else:
                q = gaussian_nodes(*self._gaussian(noise, drawn, half), n_nodes=40)
                found += bounds.noise_bound(noise, gap, full, q)
        return found / len(halves)


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
    some = (log_weight > -math.inf).reshape(-1, gap.shape[1]).any(dim=0).nonzero()[:, 0]
    return some, log_weight[..., some]
