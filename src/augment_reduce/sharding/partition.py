"""The shard of this process, and the ranks that have the other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .group import Ranks
from .layout import ClassShard

NUMBERS_AT_ONCE = 1 << 24  # gathered to be written to a file


@dataclass(frozen=True, eq=False)
class Partition:
    """`late`: whether the sums of a step are used in the next one, so that no step waits for them."""

    ranks: Ranks
    shard: ClassShard
    late: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self  # a process group cannot be copied, and copies of a fit have the same ranks

    @property
    def sizes(self) -> list[int]:
        """The number of classes of each rank."""
        shard = self.shard
        return [len(ClassShard(shard.n_classes, rank, shard.n_ranks)) for rank in range(shard.n_ranks)]

    def any(self, here: bool, what: str = "a decision") -> bool:
        """Logical or of `here` over ranks, on every rank."""
        return bool(self.ranks.max_(torch.tensor([float(here)]), what))

    def own(self, every: Tensor) -> Tensor:
        """A copy of this rank's part of a tensor with one row a class."""
        return self.shard.of(every).clone(memory_format=torch.contiguous_format)

    def whole(self, own: Tensor, what: str = "the weights of all classes") -> Tensor:
        """One row a class, on every rank, from each rank's own rows."""
        K, R = self.shard.n_classes, self.shard.n_ranks
        most = -(-K // R)
        if len(own) < most:
            own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        return self.ranks.gather(own.contiguous(), what).transpose(0, 1).flatten(0, 1)[:K].contiguous()

    def whole_on_first(self, own: Tensor) -> Tensor:
        """As `whole`, on the first rank; elsewhere empty. By blocks of rows, since other ranks need not have memory for
        all."""
        shard, width = self.shard, own[:1].numel()
        first, step = shard.rank == 0, max(1, NUMBERS_AT_ONCE // max(1, width * shard.n_ranks))
        out = own.new_empty(shard.n_classes if first else 0, *own.shape[1:])
        for begin in range(0, self.sizes[0], step):
            sizes = [max(0, min(size, begin + step) - begin) for size in self.sizes]
            rows = self.ranks.gather_rows(own[begin : begin + step].contiguous(), sizes, "the weights of all classes")
            for rank, part in enumerate(rows.split(sizes) if first else ()):
                out[rank + begin * shard.n_ranks :: shard.n_ranks][: len(part)] = part
        return out

    def whole_columns(self, own: Tensor, what: str = "scores of all classes") -> Tensor:
        """As `whole`, for one column a class."""
        return self.whole(own.T, what).T.contiguous()
