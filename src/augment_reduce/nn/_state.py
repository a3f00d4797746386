"""Numbers that keep their precision: a module whose buffers follow it to a device, but not to another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Kept(nn.Module):
    """Base of what a head remembers beside its weights. `head.to(torch.bfloat16)` must not round it.

    A cumulative sum over 10^7 classes is useless below float64, and so are running averages below float32.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move_only(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move_only, recurse)


def buffer(module: nn.Module, name: str, value: Tensor, *, saved: bool = True) -> None:
    """Register a buffer; `saved` puts it into the state dict."""
    module.register_buffer(name, value, persistent=saved)
