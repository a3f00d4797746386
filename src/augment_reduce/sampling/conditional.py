"""A sampler with q(k | x) by the row's features: clusters of classes, rebuilt during training."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..support.finite import check_finite
from ..support.layout import Entry, Layout
from ..support.seeds import many_uniforms
from .base import DrawWithoutReplacement, Minibatch, Sampled, halved
from .fixed import _Frequency

ROWS_COMPARED = 32  # rows of a minibatch by whose scores classes are clustered
BLOCK = 2**24  # weights copied at a time


class Clusters(NamedTuple):
    """A partition of the classes, and for each part a row of weights that gives its score.

    - `order`, `place`: (K,) the classes sorted by part, and the position of each class in that order;
    - `of`: (K,) the part of each class; `first`, `last`: (C,) the positions of a part;
    - `below`: (K + 1,) cumulative sums of q in that order; `mass`: (C,) q of a part;
    - `weight` (C, D), `bias` (C,): the part's score, about log sum_{k in part} e^psi_k.
    """

    order: Tensor
    place: Tensor
    of: Tensor
    first: Tensor
    last: Tensor
    below: Tensor
    mass: Tensor
    weight: Tensor
    bias: Tensor


class Conditional(_Frequency):
    """Each row draws a cluster of classes by its score for the row, then a class of it by frequency.

        q(k | x) = P(c_k | x) q_k / q(c_k)        P(c | x) = (1 - u) softmax_c(v_c . x + a_c) + u q(c)

    over the classes other than the label, renormalised. v_c is the mean of the cluster's weight rows, weighted by q.
    A cluster has classes with similar psi_k - log q_k on the rows of a minibatch: if they are equal, q(k | x) is the
    softmax. a_c makes the cluster's score exact on average over those rows. A draw costs O(log K), a row C more scores.

    The clusters are rebuilt before iteration t = 1, 17, 41, ...: at 1.5 times the last iteration plus 16. A fit of T
    iterations builds them O(log T) times, each in O(K (D + rows compared)). They are saved with the model.

    - `share`: u, which bounds the weights by those of `FrequencyPerRow` over u;
    - `n_clusters`: a power of two; None: the one nearest to the square root of K.
    """

    name: ClassVar[str] = "conditional"
    over_ranks: ClassVar[bool] = False  # clusters come from the weights of all classes
    clusters: Clusters | None
    refreshed_after: int  # steps

    def __init__(
        self, n_clusters: int | None = None, share: float = 0.2, power: float = 1.0, uniform_share: float = 0.1
    ) -> None:
        super().__init__(power, uniform_share)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"Expected share in (0, 1]: at 0 nothing would bound the weights. Found {share}.")
        if n_clusters is not None and (n_clusters < 1 or n_clusters & (n_clusters - 1)):
            raise ValueError(f"Expected n_clusters to be None or a power of two, found {n_clusters}.")
        self.n_clusters, self.share = n_clusters, share

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        bound = super().bind(class_counts, draw_without_replacement)
        bound.clusters, bound.refreshed_after = None, -1
        return bound

    def bytes(self, n_rows: int, n_features: int) -> int:
        return 8 * (self._n_clusters() * n_features + ROWS_COMPARED * self.n_classes)

    def state_dict(self) -> dict[str, Tensor]:
        if self.clusters is None:
            return {}
        weight, bias = self.clusters.weight.cpu(), self.clusters.bias.cpu()
        return {
            "part": self.clusters.of.int(),
            "weight": weight,
            "bias": bias,
            "after": torch.tensor([self.refreshed_after]),
        }

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        return ({
            "weight": Entry("weights", ("C", "D")), "bias": Entry("weights", ("C",)),
            "part": Entry("int32", ("K",), 0, "C", all_occur=True), "after": Entry("int64", (1,), 0, 2**53),
        },)  # fmt: skip

    def load_state_dict(self, state: dict[str, Tensor], *, same_rows: bool) -> None:
        if state.keys() == {"part", "weight", "bias", "after"} and len(state["part"]) == self.n_classes:
            self.clusters = self._tables(state["part"].long(), state["weight"], state["bias"])
            self.refreshed_after = int(state["after"])

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        raise TypeError("Conditional draws by the features of the rows: call draw_for with a Minibatch.")

    def draw_for(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        steps, after = minibatch.steps_taken, self.refreshed_after
        if self.clusters is None or steps >= 1.5 * after + 16:
            self.clusters, self.refreshed_after = self._refresh(minibatch), steps
        u = many_uniforms(len(minibatch.rows), size, generator)
        classes, log_weight = self._draw(self.clusters, self.chances(minibatch), minibatch.labels, u)
        return Sampled(classes, log_weight.to(minibatch.parameters.weight.dtype), mask=None, distinct=False)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return halved(self.draw_for(minibatch, size, generator=generator))

    def chances(self, minibatch: Minibatch) -> Tensor:
        """P(c | x), (B, C) in float64."""
        assert self.clusters is not None
        weight, bias = self.clusters.weight, self.clusters.bias
        home = minibatch.parameters.weight.device
        psi = minibatch.kernels.shared_scores(
            minibatch.X, minibatch.rows, torch.arange(len(bias)), weight.to(home), bias.to(home)
        )
        check_finite(psi)
        return (1.0 - self.share) * torch.softmax(psi.double(), dim=1) + self.share * self.clusters.mass

    def _draw(self, c: Clusters, chance: Tensor, labels: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) classes other than the label, and log omega. One uniform selects the cluster and the class in it."""
        own = c.of[labels][:, None]
        q_label = self.log_q[labels].exp()[:, None]
        others = chance.gather(1, own) * (1.0 - q_label / c.mass[own])
        others = torch.where(c.first[own] == c.last[own], 0.0, others)
        without = chance.scatter(1, own, others.clamp_min(0.0))
        ends = without.cumsum(dim=1)
        rest = ends[:, -1:]
        at = torch.minimum(u * rest, torch.nextafter(rest, torch.zeros_like(rest)))
        part = torch.searchsorted(ends, at, right=True)
        height = without.gather(1, part)
        inside = ((at - ends.gather(1, part) + height) / height).clamp(0.0, 1.0)

        in_own = part == own
        start, own_place = c.below[c.first[part]], c.place[labels][:, None]
        where = start + inside * (c.mass[part] - torch.where(in_own, q_label, 0.0))
        where = where + torch.where(in_own & (where >= c.below[own_place]), q_label, 0.0)
        place = (torch.searchsorted(c.below, where, right=True) - 1).clamp(c.first[part], c.last[part])
        beside = torch.where(own_place > c.first[own], own_place - 1, own_place + 1)
        place = torch.where(place == own_place, beside, place)  # by rounding, at the end of the label's interval
        classes = c.order[place]
        log_q = torch.log(chance.gather(1, part) / c.mass[part]) + self.log_q[classes]
        return classes, torch.log(rest) - log_q - math.log(u.shape[1])

    def _refresh(self, minibatch: Minibatch) -> Clusters:
        """Clusters for the current weights, from the scores of a few rows of this minibatch."""
        weight, bias = minibatch.parameters.weight, minibatch.parameters.bias
        rows = minibatch.rows[:ROWS_COMPARED]
        psi = minibatch.kernels.shared_scores(minibatch.X, rows, torch.arange(self.n_classes), weight, bias).double()
        check_finite(psi)
        residual = psi - self.log_q
        part = torch.from_numpy(bisect(residual.T.numpy(), self._n_clusters()))
        mass = torch.zeros(int(part.max()) + 1, dtype=torch.float64).index_add_(0, part, self.log_q.exp())
        inside = self.log_q.exp() / mass[part]  # the mean's weights
        centre = weighted_sums(weight, part, inside, len(mass))
        of_centre = torch.zeros(len(rows), len(mass), dtype=torch.float64).index_add_(1, part, psi * inside)
        centre_bias = torch.zeros(len(mass), dtype=torch.float64).index_add_(0, part, bias.cpu().double() * inside)
        centre_bias += (log_sums(psi, part, len(mass)) - of_centre).mean(dim=0)
        return self._tables(part, centre, centre_bias.to(weight.dtype).to(weight.device))

    def _n_clusters(self) -> int:
        wanted = self.n_clusters or 2 ** round(math.log2(self.n_classes) / 2)
        return min(wanted, 2 ** int(math.log2(self.n_classes)))

    def _tables(self, part: Tensor, weight: Tensor, bias: Tensor) -> Clusters:
        order = torch.sort(part, stable=True).indices
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        last = torch.bincount(part).cumsum(0) - 1
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        below = torch.cat([self.log_q.new_zeros(1), self.log_q.exp()[order].cumsum(0)])
        return Clusters(order, place, part, first, last, below, below[last + 1] - below[first], weight, bias)


def bisect(points: np.ndarray, n_parts: int) -> np.ndarray:
    """(n,) the part of each point: bisected along the direction of largest variance into n_parts parts, equal in
    size up to rounding."""
    parts = [np.arange(len(points))]
    while len(parts) < n_parts:
        parts = [half for members in parts for half in _halves(points, members)]
    found = np.empty(len(points), dtype=np.int64)
    for i, members in enumerate(parts):
        found[members] = i
    return found


def _halves(points: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    centred = points[members] - points[members].mean(axis=0)
    along = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    order = members[np.argsort(centred @ along, kind="stable")]
    return order[: len(order) // 2], order[len(order) // 2 :]


def weighted_sums(weight: Tensor, part: Tensor, share: Tensor, n_parts: int) -> Tensor:
    """(C, D) sum of the weight rows of each part times their shares, some rows at a time."""
    sums = weight.new_zeros(n_parts, weight.shape[1])
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for begin in range(0, len(weight), step):
        some = slice(begin, begin + step)
        scaled = weight[some] * share[some, None].to(weight)
        sums.index_add_(0, part[some].to(weight.device), scaled)
    return sums


def log_sums(psi: Tensor, part: Tensor, n_parts: int) -> Tensor:
    """(B, C) log sum over each part's classes of e^psi."""
    top = psi.amax(dim=1, keepdim=True)
    sums = psi.new_zeros(len(psi), n_parts).index_add_(1, part, torch.exp(psi - top))
    return torch.log(sums.clamp_min(1e-300)) + top
