"""Checks of a head's arguments, without synchronising with the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ._plain import LARGEST

REDUCTIONS = ("none", "mean", "sum")
HALF = (torch.bfloat16, torch.float16)


def check_hidden(hidden: Tensor, weight: Tensor) -> None:
    """(..., D) on the weights' device, in their dtype or in a half precision beside float32 (autocast)."""
    if hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"Expected hidden of shape (..., in_features={weight.shape[1]}), found {tuple(hidden.shape)}.")
    same_device("hidden", hidden, weight)
    if hidden.dtype == weight.dtype and hidden.is_floating_point():
        return
    mixed = {hidden.dtype, weight.dtype}
    if torch.float32 in mixed and any(half in mixed for half in HALF):
        return
    raise TypeError(
        f"Expected hidden in the dtype of the weights, {weight.dtype}, or one of the two in float32 and the other in "
        f"half precision, found hidden in {hidden.dtype}. Convert with hidden.to({weight.dtype}), or convert the head."
    )


def same_device(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.device != weight.device:
        raise ValueError(
            f"Expected {name} on the device of the weights, {weight.device}, found {tensor.device}. "
            f"Move it with {name}.to({str(weight.device)!r}), or move the head."
        )


def flat_rows(name: str, value: Tensor, hidden: Tensor, weight: Tensor, *, integer: bool) -> Tensor:
    """One number for each row of hidden, as a flat (B,) tensor; int64 where `integer`."""
    if value.shape != hidden.shape[:-1]:
        raise ValueError(
            f"Expected {name} with one number for each row of hidden, shape {tuple(hidden.shape[:-1])}, "
            f"found {tuple(value.shape)}."
        )
    same_device(name, value, weight)
    if integer:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"Expected {name} to be integers, found {value.dtype}; convert with {name}.long().")
        return value.reshape(-1).to(torch.int64)
    if not value.is_floating_point():
        raise TypeError(f"Expected {name} to be floating point, found {value.dtype}; convert with {name}.float().")
    return value.reshape(-1)


def check_sample_weight(sample_weight: Tensor) -> None:
    """Not negative, below 1e15, and not all close to 0, so that float32 can sum them. On a GPU rows with negative or
    too large weights are skipped and counted instead, without synchronising."""
    if sample_weight.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = ~((sample_weight >= 0.0) & (sample_weight < LARGEST))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"Expected sample_weight to be below {LARGEST:.0e} and not negative, but {int(bad.sum())} of "
            f"{len(bad)} are not; first at row {row}: {float(sample_weight[row])}. A weight of 0 leaves a row out."
        )
    heaviest = float(sample_weight.max()) if len(sample_weight) else 0.0
    if 0.0 < heaviest < 1.0 / LARGEST:
        raise ValueError(
            f"Expected a sample_weight of {1.0 / LARGEST:.0e} at least, or 0, but the largest is {heaviest:.3g}. "
            "Divide the weights by their mean."
        )


def check_weight(weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"Expected weight of shape (n_classes, in_features) in floating point, found {tuple(weight.shape)} "
            f"in {weight.dtype}."
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"Expected bias of shape ({len(weight)},), one number a class, found {tuple(bias.shape)}.")
        same_device("bias", bias, weight)


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"Expected reduction to be one of {', '.join(map(repr, REDUCTIONS))}, found {reduction!r}.")


def check_options(
    in_features: int, reduction: str, floor: float | None, label_smoothing: float, z_loss: float, softmax: bool,
    has_class_weight: bool,
) -> None:  # fmt: skip
    """Check the options of a head's constructor."""
    if in_features < 1:
        raise ValueError(f"Expected in_features of at least 1, found {in_features}.")
    check_reduction(reduction)
    if floor is not None and floor < 0.0:
        raise ValueError(f"Expected floor to be None or at least 0 (0 is sampled softmax), found {floor}.")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"Expected label_smoothing in [0, 1), found {label_smoothing}.")
    if not 0.0 <= z_loss < LARGEST:
        raise ValueError(f"Expected z_loss to be a finite number, at least 0, found {z_loss}.")
    if (label_smoothing or z_loss) and not softmax:
        raise ValueError(
            "label_smoothing and z_loss are for the model 'softmax': others have no log Z. Leave them out."
        )
    if label_smoothing and has_class_weight:
        raise ValueError(
            "Expected class_weight or label_smoothing, found both: smoothed labels would have to be weighted one by "
            "one. Pass sample_weight=class_weight[target] to weight whole rows."
        )
