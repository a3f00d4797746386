"""A noise whose sums over classes are all-reduced over the ranks.

An E step uses the gaps (B, S) of the classes of this rank, and its noise computes their sums. With `OverRanks` as the
noise the sums are those of all ranks, bit-equal on each, and so is q. Results of single classes (`hazards`, and the
last of `sum_slopes`) are those of this rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..sharding import Ranks
from .noise import LocationScale, Noise

ELEMENTWISE = ("dlog_prob", "d2log_prob", "dlog_cdf", "d2log_cdf", "dlog_cdf_and_derivative")
DIVERGED = (
    "The scores stopped being finite, on this rank or another: the weights have diverged. Lower learning_rate, scale "
    "the features to about 1, or set a prior_variance."
)


class OverRanks(Noise):
    """Wraps a noise."""

    def __init__(self, noise: Noise, ranks: Ranks) -> None:
        self.original, self.ranks = noise, ranks
        self.name, self.smooth_log_concave = noise.name, noise.smooth_log_concave
        self.conjugate, self.scalars = noise.conjugate, noise.scalars  # type: ignore[misc]
        vars(self).update({name: getattr(noise, name) for name in ELEMENTWISE})

    @property
    def alone(self) -> Noise:
        return self.original

    def log_prob(self, eps: Tensor) -> Tensor:
        return self.original.log_prob(eps)

    def log_cdf(self, eps: Tensor) -> Tensor:
        return self.original.log_cdf(eps)

    def variational_family(self) -> LocationScale:
        return self.original.variational_family()

    def summed(self, sums: Tensor) -> Tensor:
        return checked(self.ranks.sum_(sums.contiguous(), "the sums over classes"))

    def largest(self, gap: Tensor) -> Tensor:
        here = gap.amax(dim=-1) if gap.shape[1] else gap.new_full((len(gap),), -math.inf)
        return self.ranks.max_(here.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf), "the largest scores")

    def log_total(self, values: Tensor) -> Tensor:
        shift = self.largest(values).clamp_min_(torch.finfo(values.dtype).min)
        return self.summed((values - shift[:, None]).exp_().sum(dim=-1)).log_().add_(shift)

    def sum_log_cdf(self, gap: Tensor, log_weight: Tensor, eps: Tensor) -> Tensor:
        return self.summed(self.original.sum_log_cdf(gap, log_weight, eps) if gap.shape[1] else torch.zeros_like(eps))

    def sum_slopes(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, bend, hazard = slopes_here(self.original, gap, log_weight, eps, weight)
        slope, bend = self.summed(torch.stack([slope, bend]))
        return slope, bend, hazard

    def hazards(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        return self.original.hazards(gap, log_weight, eps, weight) if gap.shape[1] else torch.zeros_like(gap)


def slopes_here(
    noise: Noise, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`sum_slopes` of the classes of this rank, possibly none."""
    if gap.shape[1]:
        return noise.sum_slopes(gap, log_weight, eps, weight)
    return torch.zeros_like(eps), torch.zeros_like(eps), torch.zeros_like(gap)


def checked(sums: Tensor) -> Tensor:
    """FloatingPointError if scores are not finite: NaN is in every rank's sums, so that all ranks raise."""
    if math.isnan(sums.sum()) and bool(sums.isnan().any()):
        raise FloatingPointError(DIVERGED)
    return sums
