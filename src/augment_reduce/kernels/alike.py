"""Rows of a minibatch that have the same features: scored once, and their gradients pushed as one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Alike(NamedTuple):
    """A minibatch of B rows in U runs, in each of which all rows have the same features."""

    first: np.ndarray  # (U,) places of the first of each run
    run: np.ndarray  # (B,) its run's number

    @classmethod
    def among(cls, number: np.ndarray) -> Alike:
        """The runs of equal numbers (B,)."""
        new = np.ones(len(number), np.bool_)
        np.not_equal(number[1:], number[:-1], out=new[1:])
        return cls(np.flatnonzero(new), np.cumsum(new) - 1)

    @classmethod
    def none(cls, n_rows: int) -> Alike:
        """Every row a run."""
        return cls(np.arange(n_rows), np.arange(n_rows))

    def spread(self, of_runs: Tensor) -> Tensor:
        """(U, ...) -> (B, ...): what each row's run has."""
        if len(self.first) == len(self.run):
            return of_runs
        return of_runs[torch.from_numpy(self.run)]

    def added(self, of_rows: Tensor) -> Tensor:
        """(B, C) -> (U, C): the sum over each run's rows."""
        if len(self.first) == len(self.run):
            return of_rows
        return of_rows.new_zeros(len(self.first), of_rows.shape[1]).index_add_(0, torch.from_numpy(self.run), of_rows)
