"""What a head with an optimizer of its own refuses: set-ups in which the rows it moves are not the ones that are kept.

Such a head changes its weights inside the backward pass, in this process. Wrappers that replicate the weights, shard
them or compute them from other parameters would lose or ignore these changes without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WAY_OUT = (
    "Use optimizer=None with sparse_grad=False: the head then has ordinary gradients, which any wrapper and any torch "
    "optimizer can handle."
)


def check_may_move(head: nn.Module, followed: dict[str, nn.Parameter | None]) -> None:
    """RuntimeError unless the parameters of `head` are the ones that its optimizer moves, and those of one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"Expected one process, found {size} in the initialized process group: each would move its own copy "
                f"of the head's weights, and the copies would drift apart. {WAY_OUT}"
            )
    for name, parameter in followed.items():
        found = getattr(head, name)
        if parameter is None and found is None:
            continue
        if found is not parameter or type(found) is not nn.Parameter:
            raise RuntimeError(
                f"Expected head.{name} to be the parameter that the head's optimizer moves, found {_described(found)}: "
                "its changes would be lost. This happens under torch.nn.utils.parametrize, FSDP (fully_shard), DTensor "
                f"and DataParallel. {WAY_OUT}"
            )


def _described(value: Any) -> str:
    if isinstance(value, nn.Parameter) and type(value) is nn.Parameter:
        return "another parameter in its place"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} that is computed or placed elsewhere"
    return repr(value)
