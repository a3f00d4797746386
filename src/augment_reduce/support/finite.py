"""Whether scores are finite, and the error of those that are not."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(psi: Tensor) -> bool:
    """One pass: a sum is finite only if every term is; a sum of finite numbers that overflows is looked at again."""
    return math.isfinite(psi.sum()) or bool(torch.isfinite(psi).all())


def check_finite(*scores: Tensor) -> None:
    if not all(all_finite(psi) for psi in scores):
        raise not_finite()


def not_finite() -> FloatingPointError:
    """What to do about weights that ran away."""
    return FloatingPointError(
        "The scores stopped being finite: the weights have diverged. Lower learning_rate, scale the features to "
        "about 1, or set a prior_variance."
    )
