"""Counters of a head in training, and its warnings; no synchronisation with a GPU within a step."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ._state import Clock
from ._targets import BAD_TARGET, BAD_TARGETS, BAD_WEIGHTS, FLOORED, ROWS, SKIPPED, out_of_range


class Diagnostics(nn.Module):
    """Mixin of the head, which has a `clock`."""

    clock: Clock
    n_classes: int
    ignore_index: int
    _skipped_told: int

    @property
    def last_gap(self) -> Tensor:
        """Estimate of the bound gap of the last minibatch due to its c or q, in nats a row, from its own sample: a
        0-dim tensor on the head's device. Reading it as a number synchronises."""
        return self.clock.gauge[0]

    @property
    def running_gap(self) -> Tensor:
        """The running mean of `last_gap`, over the last hundred steps or so; a 0-dim tensor."""
        return self.clock.gauge[1]

    @property
    def floored_share(self) -> float:
        """The share of training rows clipped by `floor` so far. Synchronises."""
        tally = self.clock.tally.tolist()
        return tally[FLOORED] / max(1, tally[ROWS])

    @property
    def skipped_rows(self) -> int:
        """The number of rows without an update because their hidden values, scores or upstream gradient were not finite
        (or beyond 1e15). Synchronises."""
        return int(self.clock.tally[SKIPPED])

    def check_targets(self) -> None:
        """Raise if a target or a sample weight since the last check was out of range. On a GPU such rows are skipped
        and reported here: called by log_prob, topk, train() and eval(), or by every call with `debug=True`;
        state_dict() warns. Warns of skipped rows, too."""
        if torch.compiler.is_compiling() or self.clock.is_meta:
            return
        self._say_skipped()
        problem = self._bad_input()
        if problem is not None:
            self.clock.tally[BAD_TARGETS : BAD_TARGET + 1] = 0
            self.clock.tally[BAD_WEIGHTS] = 0
            raise ValueError(problem)

    def _bad_input(self) -> str | None:
        tally = self.clock.tally.tolist()
        if tally[BAD_TARGETS]:
            return out_of_range(self.n_classes, tally[BAD_TARGETS], tally[BAD_TARGET], self.ignore_index)
        if tally[BAD_WEIGHTS]:
            return (
                f"Expected sample_weight to be below 1e15 and not negative, but {tally[BAD_WEIGHTS]} were "
                "not. A weight of 0 leaves a row out."
            )
        return None

    def _say_skipped(self) -> None:
        """A warning with the number of rows skipped since the last one."""
        count = self.skipped_rows
        new, self._skipped_told = count - self._skipped_told, count
        if new > 0:
            warnings.warn(
                f"{new} rows were skipped: their hidden values, their scores or the gradient of the loss were not "
                "finite, or beyond 1e15. They moved neither weights nor local parameters. If it happens again, look "
                "for what overflows in the network: a lower learning rate, gradient clipping, bfloat16 in place of "
                "float16.",
                RuntimeWarning,
                stacklevel=3,
            )
