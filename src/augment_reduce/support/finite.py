"""Check that scores are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(psi: Tensor) -> bool:
    """One pass: a finite sum has finite terms only; if the sum is not finite, check every term."""
    return math.isfinite(psi.sum()) or bool(torch.isfinite(psi).all())


def check_finite(*scores: Tensor) -> None:
    """FloatingPointError with advice if scores have diverged."""
    if not all(all_finite(psi) for psi in scores):
        raise not_finite()


def not_finite() -> FloatingPointError:
    """What to do about weights that ran away."""
    return FloatingPointError(
        "The scores stopped being finite: the weights have diverged. Lower learning_rate, scale the features to "
        "about 1, or set a prior_variance."
    )
