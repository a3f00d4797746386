"""Predictions with sharded classes: each rank scores its own classes, and ranks exchange a few numbers a row.

    highest scores    gathers the k highest of each rank with their classes, and selects the k highest of these
    softmax           log p_k = psi_k - log sum_k' e^{psi_k'}: gathers the log-sum-exp of each rank's scores
    other noises      eq. (5) by quadrature; G(v) = sum_k log Phi(v - psi_k) is a sum over classes. If it is
                      interpolated (`MaxUtility`): all-reduces its weights at M points, 16 for each bin of the range of
                      scores. With fewer than 2 M classes, or a noise that uses another quadrature: gathers all scores

Collective: all ranks call for the same rows in the same order, and get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sharding import Partition, Ranks
from . import max_utility, quadrature
from .max_utility import DEGREE, FURTHEST, MaxUtility
from .noise import Noise
from .predict import Columns, highest


class ColumnsOverRanks(Columns):
    """The columns of this rank's classes."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition.shard.n_classes)
        self.partition, self.ranks, self.shard = partition, partition.ranks, partition.shard
        self.n_here = len(partition.shard)

    def first_not_finite(self, psi: Tensor) -> int | None:
        """As in `Columns`; the same on every rank, so that all raise."""
        found = super().first_not_finite(psi)
        here = len(psi) if found is None else found
        first = -int(self.ranks.max_(torch.tensor([-here]), "whether scores are finite"))
        return first if first < len(psi) else None

    def highest(self, psi: Tensor, k: int) -> tuple[Tensor, Tensor]:
        width = min(k, -(-self.n_classes // self.ranks.size))
        here = highest(psi, min(width, psi.shape[1]))
        missing = width - here.shape[1]
        scores = torch.nn.functional.pad(psi.double().gather(1, here), (0, missing), value=-torch.inf)
        classes = torch.nn.functional.pad(self.shard.classes(here), (0, missing), value=self.n_classes)
        every, theirs = (self._side_by_side(x) for x in (scores, classes))
        order = theirs.argsort(dim=1)  # ties go to the lowest class
        every, theirs = every.gather(1, order), theirs.gather(1, order)
        best = highest(every, k)
        return every.gather(1, best), theirs.gather(1, best)

    def _side_by_side(self, own: Tensor) -> Tensor:
        """(B, R n): the arrays (B, n) of all ranks, concatenated."""
        return self.ranks.gather(own, "the highest scores").permute(1, 0, 2).flatten(1)

    def log_likelihood(self, noise: Noise, psi: Tensor, labels: Tensor) -> Tensor:
        own = self.shard.is_own(labels)
        of_label = psi.double().gather(1, torch.where(own, self.shard.row(labels), 0)[:, None])
        of_label = torch.where(own[:, None], of_label, 0.0)
        if noise.conjugate:  # both in one round
            both = self.ranks.gather(
                torch.cat([of_label, psi.double().logsumexp(1, keepdim=True)], dim=1), "likelihoods"
            )
            return both[:, :, 0].sum(0) - both[:, :, 1].logsumexp(0)
        scores = self.ranks.sum_(of_label, "the scores of labels")
        return self.log_proba_of(noise, psi, labels[:, None], scores)[:, 0]

    def log_proba_of(self, noise: Noise, psi: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
        if noise.conjugate:
            of_ranks = self.ranks.gather(psi.double().logsumexp(1), "log sums over classes")
            return scores - of_ranks.logsumexp(0)[:, None]
        width = max_utility.bin_width(noise, psi.device) if noise.smooth_log_concave else None
        if width is None:
            return quadrature.log_proba_of(noise, self.partition.whole_columns(psi), classes)
        out = torch.empty(classes.shape, dtype=torch.float64)
        step = max(1, max_utility.CHUNK // max(512, self.n_classes))
        for first in range(0, len(psi), step):
            block = slice(first, first + step)
            out[block] = self._by_quadrature(noise, psi[block], classes[block], scores[block], width)
        return out

    def _by_quadrature(self, noise: Noise, psi: Tensor, classes: Tensor, scores: Tensor, width: float) -> Tensor:
        psi = psi.double()
        ends = self.ranks.max_(torch.stack([psi.amax(1), -psi.amin(1)]), "the range of scores")
        highest, lowest = ends[0], (-ends[1] - ends[0]).clamp_(min=-FURTHEST)
        n_bins = int(-lowest.min() / width) + 1
        if 2 * n_bins * DEGREE > self.n_classes:
            return quadrature.log_proba_of(noise, self.partition.whole_columns(psi), classes)
        own = (psi - highest[:, None]).clamp_(min=-FURTHEST)
        maximum = MaxUtilityOverRanks(noise, own, lowest, width, n_bins, self.ranks)
        return quadrature.log_proba_on(maximum, scores - highest[:, None])


class MaxUtilityOverRanks(MaxUtility):
    """The `MaxUtility` of all classes, all-reduced; the highest score of a row over all ranks has to be zero."""

    def __init__(
        self, noise: Noise, psi: Tensor, lowest: Tensor, width: float, n_bins: int, ranks: Ranks
    ) -> None:  # fmt: skip
        self.noise, self.psi, self.width, self.n_bins = noise, psi, width, n_bins
        self.low, self.top = lowest, torch.zeros_like(lowest)
        self.at = self.points()
        self.weight = ranks.sum_(self.weights_of_points(), "the weights of an interpolation")
