"""A sampler that stores, for every training row, the classes with the largest gradients at its last visit."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..support.layout import Entry, Layout
from .base import DrawWithoutReplacement, Minibatch, Sampled
from .fixed import HeadAndTail


class HardNegativeCache(HeadAndTail):
    """`HeadAndTail` with an additional head: classes with large gradients at the last visit of these rows.

    After a step each row stores the `memory` classes of S with the largest gradient g (without omega); O(N memory)
    numbers. With h_k^2 the sum of g^2 stored for class k by the rows of a minibatch, and T a running mean of
    sum_{k in S} omega_k |g_k|, an estimate of the sum over all classes, the head has the classes with |S| h_k >= T:
    those that draws by size of gradient would contain at least once on average. They take up to `cache_share` of S. The
    rest of S is HeadAndTail's, without them. The head does not depend on this step's draw, so that its weights 1 are
    exact.

    - `batch_labels`: fill the remainder of that share with the labels of the minibatch. Their weights are read
      anyway. With memory=0 these are the in-batch negatives of two-tower models, without bias.
    """

    name: ClassVar[str] = "cache-shared"
    over_ranks: ClassVar[bool] = False  # the memory comes from the gradients of all classes
    remembered: Tensor
    heat: Tensor
    total: Tensor

    def __init__(
        self,
        memory: int = 4,
        cache_share: float = 0.5,
        batch_labels: bool = False,
        power: float = 1.0,
        uniform_share: float = 0.1,
    ) -> None:
        super().__init__(power, uniform_share)
        if memory < 0:
            raise ValueError(f"Expected a memory of 0 classes or more for each row, found {memory}.")
        if not 0.0 <= cache_share <= 1.0:
            raise ValueError(f"Expected cache_share in [0, 1], found {cache_share}.")
        self.memory, self.cache_share, self.batch_labels = memory, cache_share, batch_labels

    def bytes(self, n_rows: int, n_features: int) -> int:
        return 8 * self.memory * n_rows

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        bound = super().bind(class_counts, draw_without_replacement)
        bound.remembered = torch.zeros(0, self.memory, dtype=torch.int32)  # (N, memory) classes
        bound.heat = torch.zeros(0, self.memory)  # (N, memory) their gradients, without omega; 0: empty
        bound.total = torch.zeros(1, dtype=torch.float64)  # T; 0: not estimated yet
        return bound

    def state_dict(self) -> dict[str, Tensor]:
        return {"remembered": self.remembered, "heat": self.heat, "total": self.total}

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        return ({
            "remembered": Entry("int32", ("N", "M"), 0, "K"), "heat": Entry("float32", ("N", "M"), 0.0),
            "total": Entry("float64", (1,), 0.0),
        },)  # fmt: skip

    def load_state_dict(self, state: dict[str, Tensor], *, same_rows: bool) -> None:
        if same_rows and state.keys() == self.state_dict().keys() and state["heat"].shape[1] == self.memory:
            self.remembered, self.heat, self.total = state["remembered"], state["heat"], state["total"]

    def head_for(self, minibatch: Minibatch, size: int) -> Tensor:
        self._make_room(minibatch.X.n_rows)
        hard = self._hard(minibatch, size)
        return torch.cat([self.head(size - len(hard)), hard]).unique() if len(hard) else self.head(size)

    def _make_room(self, n_rows: int) -> None:
        if len(self.heat) != n_rows:
            self.remembered = torch.zeros(n_rows, self.memory, dtype=torch.int32)
            self.heat = torch.zeros(n_rows, self.memory)

    def _hard(self, minibatch: Minibatch, size: int) -> Tensor:
        """The head by gradients for these rows, largest first; then, with `batch_labels`, labels of the minibatch."""
        index = torch.from_numpy(minibatch.rows)
        heat = self.heat[index].flatten().double()
        classes, which = self.remembered[index].flatten()[heat > 0].long().unique(return_inverse=True)
        size_of = heat.new_zeros(len(classes)).index_add_(0, which, heat[heat > 0] ** 2).sqrt()
        order = torch.sort(size_of, descending=True, stable=True).indices
        hard = classes[order[size * size_of[order] >= self.total]]
        if self.batch_labels:
            labels = minibatch.labels.unique()
            hard = torch.cat([hard, labels[~torch.isin(labels, hard)]])
        return hard[: min(int(self.cache_share * size), size - 1)]  # not all of S: some have to be drawn

    def observe(self, minibatch: Minibatch, sampled: Sampled, grad: Tensor) -> None:
        if not self.memory:
            return
        mass = grad.neg() * torch.exp(-sampled.log_weight)  # softmax: e^(psi_k - psi_y) / eta; 0 for a row's own label
        size_of_all = (torch.exp(sampled.log_weight.double()) * mass.double().square().sum(dim=0).sqrt()).sum()
        self.total = size_of_all[None] if not self.total.any() else 0.9 * self.total + 0.1 * size_of_all
        found = mass.topk(min(self.memory, mass.shape[1]), dim=1)
        index = torch.from_numpy(minibatch.rows)
        n = found.indices.shape[1]
        self.heat[index, n:] = 0.0
        self.heat[index, :n] = found.values.float()
        self.remembered[index, :n] = sampled.classes[found.indices].int()
