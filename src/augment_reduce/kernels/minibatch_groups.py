"""Rows of a minibatch that have the same features: scored once, and their gradients pushed as one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class MinibatchGroups(NamedTuple):
    """A minibatch of B rows in U groups; the rows of a group have the same features."""

    first: np.ndarray  # (U,) places of the first row of each group
    group: np.ndarray  # (B,) number of each row's group

    @classmethod
    def among(cls, number: np.ndarray) -> MinibatchGroups:
        """The groups of neighbours with equal numbers (B,)."""
        new = np.ones(len(number), np.bool_)
        np.not_equal(number[1:], number[:-1], out=new[1:])
        return cls(np.flatnonzero(new), np.cumsum(new) - 1)

    @classmethod
    def none(cls, n_rows: int) -> MinibatchGroups:
        """Every row a group."""
        return cls(np.arange(n_rows), np.arange(n_rows))

    def spread(self, of_groups: Tensor) -> Tensor:
        """(U, ...) -> (B, ...): what each row's group has."""
        if len(self.first) == len(self.group):
            return of_groups
        return of_groups[torch.from_numpy(self.group)]

    def added(self, of_rows: Tensor) -> Tensor:
        """(B, C) -> (U, C): the sum over each group's rows."""
        if len(self.first) == len(self.group):
            return of_rows
        return of_rows.new_zeros(len(self.first), of_rows.shape[1]).index_add_(0, torch.from_numpy(self.group), of_rows)
