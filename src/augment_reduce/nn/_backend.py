"""Which code runs a step: Triton kernels where they can, plain torch everywhere else."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..noise import Gumbel, Logistic, Normal
from . import _step
from ._step import Step

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
KERNEL_NOISES = (Gumbel, Normal, Logistic)


@functools.cache
def kernels() -> ModuleType | None:
    """`kernels/cuda.py`, or None where Triton is not installed."""
    try:
        from ..kernels import cuda
    except ImportError:
        return None
    return cuda


def backend_for(step: Step, hidden: Tensor, weight: Tensor) -> ModuleType:
    """Both modules offer forward, backward and backward_and_update, with the same arguments and results."""
    if (
        weight.device.type == "cuda"
        and type(step.noise) in KERNEL_NOISES
        and hidden.dtype in KERNEL_DTYPES
        and weight.dtype in KERNEL_DTYPES
    ):
        return kernels() or _step
    return _step
