"""psi for the label and the sampled classes; picks the kernel for the device.

The only place where the weights are read in a training step. What leaves it is small: (B,) label scores
and (B, S) gaps psi_k - psi_y, in which a pair of a row with its own label is -inf, so that it vanishes from
every sum that follows (e^-inf = 0, Phi(inf) = 1).
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from .kernels.reference import Parameters
from .kernels.rows import Rows
from .optim import Prior, RowOptimizer
from .sampler import Sampled


def kernels_for(device: str) -> ModuleType:
    """The kernel module of a device: "cpu" (Numba) or "reference" (plain torch, the oracle)."""
    if device == "reference":
        from .kernels import reference

        return reference
    from .kernels import cpu

    return cpu


def label_and_gap(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, parameters: Parameters
) -> tuple[Tensor, Tensor]:
    """(psi_y (B,), gap (B, S)) with gap = psi_k - psi_y for the sampled k, -inf where masked."""
    weight, bias = parameters.weight, parameters.bias
    if sampled.shared:
        psi_y = kernels.pair_scores(X, rows, labels[:, None], weight, bias)
        gap = kernels.shared_scores(X, rows, sampled.classes, weight, bias) - psi_y
    else:
        psi = kernels.pair_scores(X, rows, torch.cat([labels[:, None], sampled.classes], dim=1), weight, bias)
        psi_y, gap = psi[:, :1], psi[:, 1:] - psi[:, :1]
    if sampled.mask is not None:
        gap = gap.masked_fill_(sampled.mask, -torch.inf)
    return psi_y[:, 0], gap


def push(
    kernels: ModuleType,
    X: Rows,
    rows: np.ndarray,
    labels: Tensor,
    sampled: Sampled,
    grad_gap: Tensor,
    row_scale: Tensor,
    prior_scale: float,
    parameters: Parameters,
    optimizer: RowOptimizer,
    t: int,
    prior: Prior | None,
) -> None:
    """Send dL/dgap back into the touched rows: +g to each sampled class, minus their sum to the label.

    `row_scale` (B,) multiplies each row's gradient (N / B times its sample weight); `prior_scale` = N / B
    times omega is the pair's share of the prior.
    """
    grad = grad_gap * row_scale[:, None]
    label_grad = -grad.sum(dim=1)
    share = label_share = None
    if prior is not None:
        share = torch.exp(sampled.log_weight).expand_as(grad) * prior_scale
        share = share.clone() if sampled.mask is None else share.masked_fill(sampled.mask, 0.0)
        label_share = torch.full_like(label_grad, prior_scale)
    if sampled.shared:
        kernels.push_shared(
            X, rows, sampled.classes, grad, labels, label_grad, share, label_share, parameters, optimizer, t, prior
        )
        return
    classes = torch.cat([labels[:, None], sampled.classes], dim=1)
    grad = torch.cat([label_grad[:, None], grad], dim=1)
    if share is not None and label_share is not None:
        share = torch.cat([label_share[:, None], share], dim=1)
    kernels.push_pairs(X, rows, classes, grad, share, parameters, optimizer, t, prior)
