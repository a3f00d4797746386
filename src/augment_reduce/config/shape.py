"""The facts of the data that rules and training need, found once: sizes, duplicate rows, how far rows agree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..kernels.cpu.row_groups import RowGroups, group_rows
from ..kernels.rows import Rows, SparseRows


@dataclass(frozen=True)
class Shape:
    """The facts of the data that the rules look at, found once a fit."""

    n_rows: int
    n_features: int
    n_classes: int
    n_nonzero: int
    stream: bool = False  # whether these rows are a part of many, and will not come again
    sparse: bool = False  # whether a row says which features it has
    agreement: float = 0.0  # how far one row's step takes another's score: see `Rows.agreement`
    repeats: float = 1.0  # how many rows have the same features, on average
    groups: RowGroups | None = field(default=None, compare=False, repr=False)  # which these are; None: not looked for

    @classmethod
    def of(
        cls, X: Rows, n_classes: int, active: np.ndarray | None = None, weight: np.ndarray | None = None, *,
        stream: bool = False,
    ) -> Shape:  # fmt: skip
        """Of these rows, or of those that are active. Duplicates are looked for among sparse rows alone: whoever has
        every label of a document as an example has sparse rows."""
        active = np.arange(X.n_rows) if active is None else active
        n_nonzero = X.n_nonzero * len(active) // X.n_rows
        groups = group_rows(X, active) if isinstance(X, SparseRows) else None
        return cls(
            len(active), X.n_features, n_classes, n_nonzero, stream, sparse=groups is not None,
            agreement=X.agreement(active, weight), repeats=1.0 if groups is None else groups.mean_size(), groups=groups,
        )  # fmt: skip

    def without(self, n_held_out: int) -> Shape:
        """Of the rows that are trained on where so many are held out."""
        if not n_held_out:
            return self
        left = self.n_rows - n_held_out
        return replace(self, n_rows=left, n_nonzero=self.n_nonzero * left // self.n_rows)
