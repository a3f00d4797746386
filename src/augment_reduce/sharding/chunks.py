"""Conversion between the interleaved classes of ranks and chunks of consecutive classes, as in files and DTensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .group import Ranks
from .layout import ClassShard


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk r of the classes, as in torch.chunk, is on rank r."""

    ranks: Ranks
    shard: ClassShard

    def chunk(self, rank: int) -> tuple[int, int]:
        """The classes [start, end) of a rank's chunk."""
        K = self.shard.n_classes
        size = -(-K // self.ranks.size)
        return min(K, rank * size), min(K, (rank + 1) * size)

    def __len__(self) -> int:
        """The number of classes in this rank's chunk."""
        first, end = self.chunk(self.ranks.rank)
        return end - first

    def to_chunks(self, own: Tensor) -> Tensor:
        """This rank's chunk, from the rows of all ranks."""
        given, places = self._shares()
        place = torch.cat(places).to(own.device)
        out = torch.empty(len(place), *own.shape[1:], dtype=own.dtype, device=own.device)
        out[place] = self.ranks.swap(own, given, [len(x) for x in places], "rows of a checkpoint")
        return out

    def from_chunks(self, chunk: Tensor) -> Tensor:
        """The own rows, from the chunks of all ranks."""
        taken, places = self._shares()
        return self.ranks.swap(chunk[torch.cat(places)], [len(x) for x in places], taken, "rows of a checkpoint")

    def _shares(self) -> tuple[list[int], list[Tensor]]:
        """The number of own classes in each rank's chunk; the positions of each rank's classes in the own chunk."""
        R, rank = self.ranks.size, self.ranks.rank
        first, end = self.chunk(rank)
        counts = [len(range(a + (rank - a) % R, b, R)) for a, b in map(self.chunk, range(R))]
        return counts, [torch.arange((r - first) % R, end - first, R) for r in range(R)]
