"""Which process has which class: class k is row k // R of rank k mod R, of R ranks.

Neighbouring ids go to different ranks, so that ids that fall by frequency (tokens, sorted labels) give every rank the
same share of the mass. Nothing is stored: where a class lives follows from its number. Draws do not depend on the
layout: every rank draws the classes of all and keeps its own, so that R ranks draw what one process draws.
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
        """How many classes are here."""
        return (self.n_classes - self.rank + self.n_ranks - 1) // self.n_ranks

    def owner(self, classes: Ids) -> Ids:
        return classes % self.n_ranks

    def is_own(self, classes: Ids) -> Ids:
        """True for the classes that are here."""
        return classes % self.n_ranks == self.rank

    def row(self, classes: Ids) -> Ids:
        """The row of each class on the rank that has it."""
        return classes // self.n_ranks

    def classes(self, rows: Ids) -> Ids:
        """The classes of these rows here."""
        return rows * self.n_ranks + self.rank

    def own_rows(self, classes: Tensor) -> Tensor:
        """The rows of classes that are here; of others `len(self)`, which is no row."""
        return (classes // self.n_ranks).masked_fill(classes % self.n_ranks != self.rank, len(self))

    def of(self, every: Ids) -> Ids:
        """This rank's part of an array with one entry (row) a class."""
        return every[self.rank :: self.n_ranks]  # type: ignore[index]
