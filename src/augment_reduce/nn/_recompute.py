"""Activation checkpointing: a forward pass that is repeated inside the backward pass repeats its draw.

`torch.utils.checkpoint` runs the checkpointed function again in the backward pass. A head that drew new classes there
would return the loss of one sample and the gradient of another, and would learn its local parameters twice. So a head
remembers its last calls: which step of the random numbers each used, and which q(v) of its rows.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._step import Step

REMEMBERED = 64  # calls; their backward passes may come after all of them (gradient accumulation, chunks of a sequence)


class Call(NamedTuple):
    """One forward pass: the how many-th it was, which parts of q(v) (Q, B) it used, and whether it learned."""

    signature: tuple[Any, ...]
    tensor: int
    number: int
    used: Tensor
    learned: bool


class Calls:
    """The last calls of a head. Not part of its state: copies and pickles begin without any."""

    def __init__(self) -> None:
        self.number = 0
        self._last: deque[Call] = deque(maxlen=REMEMBERED)
        self._open: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[Any, ...]:
        return Calls, ()

    def add(self, hidden: Tensor, target: Tensor, step: Step, remember: bool) -> None:
        """Count a call that was just made, and remember it."""
        if remember and step.used is not None:
            self._last.append(Call(_signature(hidden, target), target.data_ptr(), self.number, step.used, step.learn))
            self._open.add(self.number)
        self.number += 1
        self._open.discard(self.number - 1 - REMEMBERED)

    def repeated(self, hidden: Tensor, target: Tensor) -> Call | None:
        """The call that is being repeated, if this is one inside a backward pass; else None.

        It had the same shapes. The last one with the same target tensor comes first; targets that are made inside
        the checkpointed function are new tensors, and then backward passes go through the calls from the last one on.
        """
        if torch._C._current_graph_task_id() == -1:
            return None
        alike = [call for call in reversed(self._last) if call.signature == _signature(hidden, target)]
        same_target = [call for call in alike if call.tensor == target.data_ptr()]
        for candidates in (same_target, alike):
            for call in candidates:
                if call.number in self._open:
                    self._open.discard(call.number)
                    return call
        return (same_target or alike or [None])[0]


def _signature(hidden: Tensor, target: Tensor) -> tuple[Any, ...]:
    return (hidden.shape, hidden.dtype, target.shape)
