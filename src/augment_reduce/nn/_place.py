"""The placement of the classes of a step: all in this process, or on several ranks (`_shards.py`).

All operations over classes go through the placement: weight rows of classes and labels, and the sums over classes of
`_plain.Reduced`. With all classes in this process these are look-ups, and sums are unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._columns import Columns
from ._local import Report
from ._plain import Reduced, RowGradient, class_rows, label_scores


class EveryClass:
    """All classes are rows of `weight`. Base of the other placements."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.n_classes = len(weight)
        self.nobody = len(weight)  # a row of no class: gradients for it are discarded
        self.first_row = 0  # index of the step's first row in the minibatch, for random numbers

    def begin(self, label: Tensor) -> None:
        """Called once, first."""

    def labels(self, label: Tensor, usable: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, slice]:
        """(label, usable, group) of the rows whose labels may be added, and the slice of the step's own rows among
        them."""
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
        """The rows for gradients by these classes; `nobody` for classes of other processes."""
        return classes

    def reduce(self, sums: Reduced) -> Reduced:
        """Sums over all columns, from sums over the columns here."""
        return sums

    # ---- all classes, for exact results ----

    def log_sum(self, values: Tensor) -> Tensor:
        """log sum e^value over all classes, from the one over the classes here."""
        return values

    def sum_over_classes(self, values: Tensor) -> Tensor:
        return values

    def whole(self, psi: Tensor) -> Tensor:
        """Scores of all classes (B, K), from those of the classes here (B, .)."""
        return psi

    def own_columns(self, of_classes: Tensor) -> Tensor:
        """The columns of the classes here, from those of all classes (B, K)."""
        return of_classes

    def highest(self, scores: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, k) highest scores of all classes, and their classes, from the highest here; ties go to the lower
        class."""
        return scores, rows

    # ---- sums over rows ----

    def report(self, found: Report) -> Report:
        """Sums over all rows, from sums over the step's own rows."""
        return found

    def totals(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """The same for any sums over rows."""
        return sums

    def home(self, found: RowGradient) -> RowGradient:
        """Send gradients to the owners of their rows."""
        return found
