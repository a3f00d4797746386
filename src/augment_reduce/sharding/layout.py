"""The layout of classes: class k is row k // R of rank k mod R, of R ranks.

Adjacent ids are on different ranks, so that with ids sorted by frequency (tokens, labels) every rank has about the same
share of the mass. No table is stored. Draws do not depend on the layout: every rank draws for all classes and keeps its
own, so that R ranks have the draws of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

Ids = TypeVar("Ids", int, np.ndarray, Tensor)  # a class, or an array of them


@dataclass(frozen=True)
class ClassShard:
    """The classes of one rank."""

    n_classes: int
    rank: int = 0
    n_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.n_ranks:
            raise ValueError(f"Expected a rank in [0, n_ranks={self.n_ranks}), found {self.rank}.")
        if self.n_classes < self.n_ranks:
            raise ValueError(
                f"Expected at least one class a rank, found {self.n_classes} classes for {self.n_ranks} ranks. Use a "
                f"process group of at most {self.n_classes} ranks."
            )

    def __len__(self) -> int:
        """The number of classes of this rank."""
        return (self.n_classes - self.rank + self.n_ranks - 1) // self.n_ranks

    def owner(self, classes: Ids) -> Ids:
        return classes % self.n_ranks

    def is_own(self, classes: Ids) -> Ids:
        """True for the classes of this rank."""
        return classes % self.n_ranks == self.rank

    def row(self, classes: Ids) -> Ids:
        """The row of each class on its rank."""
        return classes // self.n_ranks

    def classes(self, rows: Ids) -> Ids:
        """The classes of these rows of this rank."""
        return rows * self.n_ranks + self.rank

    def own_rows(self, classes: Tensor) -> Tensor:
        """The rows of this rank's classes; `len(self)`, which is no row, for others."""
        return (classes // self.n_ranks).masked_fill(classes % self.n_ranks != self.rank, len(self))

    def of(self, every: Ids) -> Ids:
        """This rank's part of an array with one entry (or row) a class."""
        return every[self.rank :: self.n_ranks]  # type: ignore[index]
