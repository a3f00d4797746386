"""Selects the backend of a step: Triton kernels if they support it, else plain torch."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor

from ..model.noise import Gumbel, Logistic, Normal
from . import _step
from ._step import Step

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
KERNEL_NOISES = (Gumbel, Normal, Logistic)


@functools.cache
def kernels() -> ModuleType | None:
    """`nn/triton/step.py`, or None if Triton is not installed or the GPU is not NVIDIA's."""
    if torch.version.hip is not None:  # the kernels contain PTX, and tiles that need more shared memory
        return None
    try:
        from .triton import step
    except ImportError:
        return None
    return step


def backend_for(step: Step, hidden: Tensor, weight: Tensor) -> ModuleType:
    """Both modules offer forward, backward and backward_and_update, with the same arguments and results."""
    kind = weight.device.type
    if kind == "cpu":
        return _step
    why = _why_plain(kind, step, hidden, weight)
    if why is None:
        found = kernels()
        assert found is not None
        return found
    say_plain(why)
    return _step


def _why_plain(kind: str, step: Step, hidden: Tensor, weight: Tensor) -> str | None:
    if kind != "cuda" or kernels() is None:
        return f"there are no Triton kernels for this device ({kind}{', ROCm' if torch.version.hip else ''})"
    if type(step.noise) not in KERNEL_NOISES:
        return f"there are no kernels for the noise {step.noise.name!r}"
    if step.label_smoothing:
        return "there are no kernels for label_smoothing"
    if hidden.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        return f"there are no kernels for hidden in {hidden.dtype} and weights in {weight.dtype}"
    return None


@functools.cache
def say_plain(why: str) -> None:
    """Warn that plain torch is used, once for each reason."""
    warnings.warn(
        f"A step of this head runs in plain torch operations, since {why}. It is right, and several times slower than "
        "the kernels: CUDA, Triton, and float32 or bfloat16 have them.",
        RuntimeWarning,
        stacklevel=2,
    )
