"""Errors of a head with a fused optimiser, for configurations in which its updates would be lost.

Such a head updates its weights in the backward pass, in this process. Wrappers that replicate the weights, shard
them or compute them from other parameters would lose or ignore these updates without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WAY_OUT = (
    "Use optimizer=None with sparse_grad=False: the head then has ordinary gradients, which any wrapper and any torch "
    "optimizer can handle."
)


def check_may_move(head: nn.Module, followed: dict[str, nn.Parameter | None], n_ranks: int = 1) -> None:
    """RuntimeError unless the parameters of `head` are those of its optimizer, and the process group has the `n_ranks`
    processes that share the classes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size != n_ranks:
            found = f"a head on {n_ranks} of them" if n_ranks > 1 else "a head without process_group"
            raise RuntimeError(
                f"Expected the classes of a head with an optimizer to be shared by all {size} processes of the "
                f"initialized process group, found {found}: copies of its weights would drift apart. Pass "
                f"process_group=torch.distributed.group.WORLD. Or: {WAY_OUT}"
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


def check_left_alone_by_ddp(head: nn.Module) -> None:
    """RuntimeError if the head's shard is inside a DDP, which would treat it as a replica."""
    around = DistributedDataParallel._get_active_ddp_module()
    if around is None:
        return
    found = [name for name, module in around.module.named_modules() if module is head]
    names = {f"{prefix}.{name}".lstrip(".") for prefix in found for name in _names_of(head)}
    if not names <= around.parameters_to_ignore:
        raise RuntimeError(
            "This head's classes are on several ranks, and the DistributedDataParallel around it takes its weights and "
            "buffers for copies: it has overwritten them with those of rank 0. Call "
            "augment_reduce.nn.exclude_from_ddp(model) before DistributedDataParallel(model), and construct the head "
            "anew or load its state again."
        )


def _names_of(head: nn.Module) -> list[str]:
    return [name for name, _ in (*head.named_parameters(), *head.named_buffers())]


def exclude_from_ddp(model: nn.Module) -> nn.Module:
    """Call before `DistributedDataParallel(model)`: excludes the parameters and buffers of the sharded heads in `model`
    from DDP. Returns the model."""
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for prefix, module in model.named_modules():
        if getattr(module, "shards", None) is not None:
            names |= {f"{prefix}.{name}".lstrip(".") for name in _names_of(module)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))
    return model


GUARDED = "_moved_by_a_head"  # attribute of a parameter that has the hook


def guard_against_others(name: str, parameter: nn.Parameter | None) -> None:
    """Register a hook that raises if a gradient from outside the head reaches this parameter: it is meant for another
    optimiser, which would update the parameter a second time."""
    if parameter is None or not parameter.requires_grad or not parameter.is_leaf or hasattr(parameter, GUARDED):
        return

    def refuse(reached: Tensor) -> None:
        if reached.grad is None:  # the head's backward pass, which returns no gradient
            return
        raise RuntimeError(
            f"head.{name} is moved by the head's own optimizer, and another part of the loss has a gradient by it, too "
            "(a tied embedding, a penalty): that gradient would be lost, or another optimiser would move the weights a "
            f"second time. For a penalty use weight_decay; otherwise: {WAY_OUT}"
        )

    parameter.register_post_accumulate_grad_hook(refuse)
    setattr(parameter, GUARDED, True)


def _described(value: Any) -> str:
    if isinstance(value, nn.Parameter) and type(value) is nn.Parameter:
        return "another parameter in its place"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} that is computed or placed elsewhere"
    return repr(value)
