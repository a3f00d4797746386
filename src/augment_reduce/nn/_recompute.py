"""Activation checkpointing: the recomputation of a forward pass in the backward pass repeats its draw.

`torch.utils.checkpoint` runs the checkpointed function again in the backward pass. With newly drawn classes the loss
and the gradient would be of different samples, and the local parameters would be updated twice. A head therefore
records its last calls: the step of the random numbers, and q(v) of the rows.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._step import Step

# Number of recorded calls, for backward passes after several calls (gradient accumulation, chunks of a sequence): at
# least so many, and more while their parts of q(v) have no more numbers than that (16 MB).
REMEMBERED, REMEMBERED_NUMBERS = 64, 1 << 22


class Call(NamedTuple):
    """One forward pass: its number, its parts of q(v) (Q, B), and whether it updated the local parameters.

    `target` is referenced, so that its memory is not reused by another tensor.
    """

    signature: tuple[Any, ...]
    target: Tensor
    training: bool
    number: int
    used: Tensor
    learned: bool


class Calls:
    """The last calls of a head. Not part of its state: copies and pickles start empty."""

    def __init__(self) -> None:
        self.number = 0
        self._last: deque[Call] = deque()
        self._open: set[int] = set()  # numbers of recorded calls that have not been repeated
        self._numbers = 0  # in all recorded parts
        self._forgotten: set[tuple[Any, ...]] = set()  # signatures of calls that were dropped before they were repeated

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[Any, ...]:
        return Calls, ()

    def add(self, hidden: Tensor, target: Tensor, step: Step, training: bool) -> None:
        """Count a call, and record it if it may be repeated."""
        if step.used is not None and (training or torch.is_grad_enabled()):
            call = Call(_signature(hidden, target), target, training, self.number, step.used, step.learn)
            self._last.append(call)
            self._open.add(self.number)
            self._numbers += step.used.numel()
        while len(self._last) > REMEMBERED and self._numbers > REMEMBERED_NUMBERS:
            dropped = self._last.popleft()
            self._numbers -= dropped.used.numel()
            if dropped.number in self._open:
                self._open.discard(dropped.number)
                self._forgotten.add(dropped.signature)
        self.number += 1

    def repeated(self, hidden: Tensor, target: Tensor, training: bool) -> Call | None:
        """The call that is being repeated, if this is one inside a backward pass; else None.

        Candidates have the same shapes. The last one with the same target tensor is chosen. Targets created inside the
        checkpointed function are new tensors: then it is the last one of the same mode (training or not) with the same
        values; values are compared only if there are several candidates, since that synchronises on a GPU.
        """
        if torch._C._current_graph_task_id() == -1:
            return None
        same_shapes = [call for call in reversed(self._last) if call.signature == _signature(hidden, target)]
        same_target = [call for call in same_shapes if call.target.data_ptr() == target.data_ptr()]
        same_shapes = [call for call in same_shapes if call.training == training]
        waiting = [call for call in same_shapes if call.number in self._open]
        if not same_target and len(waiting) > 1:
            waiting = [call for call in waiting if _same_values(call.target, target)]
        for candidates in (same_target, waiting, same_shapes):
            for call in candidates:
                if call.number in self._open:
                    self._open.discard(call.number)
                    return call
        if not same_target and _signature(hidden, target) in self._forgotten:
            raise RuntimeError(
                "A backward pass repeats a call of this head (torch.utils.checkpoint) that came before the last "
                f"{len(self._last)} calls, and its draw is no longer known. Call backward() after fewer calls, with "
                "larger chunks, or leave the head out of the checkpointed function."
            )
        return (same_target or same_shapes or [None])[0]


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _signature(hidden: Tensor, target: Tensor) -> tuple[Any, ...]:
    return (hidden.shape, hidden.dtype, target.shape)
