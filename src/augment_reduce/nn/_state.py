"""A module whose buffers are moved to another device, but not converted to another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Kept(nn.Module):
    """Base of a head's state other than its weights. `head.to(torch.bfloat16)` must not round it.

    A cumulative sum over 10^7 classes needs float64, running averages need float32.
    Constructed on the meta device, buffers are initialised when they are allocated (`to_empty`).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move_only(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        was_meta = self.is_meta
        result = super()._apply(move_only, recurse)
        if was_meta and not self.is_meta:
            self.reset_buffers()
        return result

    @property
    def is_meta(self) -> bool:
        return any(value.is_meta for value in self.buffers(recurse=False))

    def reset_buffers(self) -> None:
        """Set every buffer to its initial value, in place."""
        raise NotImplementedError


def buffer(module: nn.Module, name: str, value: Tensor, *, saved: bool = True) -> None:
    """Register a buffer; `saved` puts it into the state dict."""
    module.register_buffer(name, value, persistent=saved)


class Clock(Kept):
    """The random-number counter and the tallies of a head (see `nn/_step.Step`)."""

    counter: Tensor
    seed: Tensor
    tally: Tensor
    gauge: Tensor

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.first_seed = seed
        buffer(self, "counter", torch.zeros(1, dtype=torch.int64, device=device))
        buffer(self, "seed", torch.zeros(1, dtype=torch.int64, device=device))
        buffer(self, "tally", torch.zeros(8, dtype=torch.int64, device=device))
        buffer(self, "gauge", torch.zeros(4, device=device), saved=False)

    def reset_buffers(self) -> None:
        self.counter.zero_(), self.tally.zero_(), self.gauge.zero_(), self.seed.fill_(self.first_seed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        tally = state_dict.get(prefix + "tally")
        if isinstance(tally, Tensor) and len(tally) == 4:  # saved by an older version with fewer counts
            state_dict[prefix + "tally"] = torch.cat([tally, tally.new_tensor([0, int(tally[0]), 0, 0])])
        super()._load_from_state_dict(state_dict, prefix, *args)
