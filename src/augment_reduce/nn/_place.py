"""Where the classes of a step are: all in this process, or on several ranks (`_shards.py`).

A step asks its place for everything that crosses classes: the rows of classes and labels, and the sums over classes of
`_plain.Reduced`. With all classes here the answers are look-ups, and sums are what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._columns import Columns
from ._local import Report
from ._plain import Reduced, RowGradient, class_rows, label_scores


class EveryClass:
    """All classes are rows of `weight`. Base of the other places."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.n_classes = len(weight)
        self.nobody = len(weight)  # a row that no class has: what goes there moves nothing
        self.first_row = 0  # the step's first row among all rows of the minibatch: random numbers go by it

    def begin(self, label: Tensor) -> None:
        """Called once, before anything else."""

    def labels(self, label: Tensor, usable: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, slice]:
        """(label, usable, group) of the rows whose labels may join, and which of them are the step's own rows."""
        return label, usable, group, slice(None)

    def have_finite_weights(self, label: Tensor, part: slice) -> Tensor:
        """(B,) whether all weights of each label's class are finite."""
        return self.weight[label].isfinite().all(dim=1)

    def kept(self, columns: Columns) -> Columns:
        """The columns that are scored here."""
        return columns

    def class_rows(self, classes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return class_rows(self.weight, self.bias, classes, dtype)

    def label_scores(self, hidden: Tensor, label: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """psi_y (B,), and the labels' weight rows (B, D), of the rows `part`."""
        return label_scores(hidden, self.weight, self.bias, label)

    def rows(self, classes: Tensor) -> Tensor:
        """The rows that gradients by these classes go to; `nobody` for classes whose gradients are not made here."""
        return classes

    def reduce(self, sums: Reduced) -> Reduced:
        """Sums over the columns kept here made sums over all."""
        return sums

    # ---- all classes, for exact answers ----

    def log_sum(self, values: Tensor) -> Tensor:
        """log sum e^value over what is here made one over all classes."""
        return values

    def sum_over_classes(self, values: Tensor) -> Tensor:
        return values

    def whole(self, psi: Tensor) -> Tensor:
        """Scores (B, .) of the classes here made those of all classes (B, K)."""
        return psi

    def own_columns(self, of_classes: Tensor) -> Tensor:
        """The columns of the classes here, of those of all (B, K)."""
        return of_classes

    def highest(self, scores: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, k) highest scores of all, and their classes, from the highest here; equal ones by the lower class."""
        return scores, rows

    # ---- sums over rows ----

    def report(self, found: Report) -> Report:
        """Sums over the step's own rows made sums over all."""
        return found

    def totals(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """The same of any sums over rows."""
        return sums

    def home(self, found: RowGradient) -> RowGradient:
        """Gradients brought to where their rows are."""
        return found
