"""psi for the label and the sampled classes; picks the kernel for the device.

The only place where a training step reads the weights or sends gradients back to them. What leaves it is small: gaps
psi_k - psi_y (B, S), in which a pair of a row with its own label is -inf, so that it vanishes from every later sum
(e^-inf = 0, Phi(inf) = 1).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
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


class Scored(NamedTuple):
    """A minibatch with its sampled classes and their scores.

    - `pairs`: (B, 1 + S), the label first, where each row has its own classes; None where they are shared;
    - `gap`: (B, S), psi_k - psi_y, -inf where masked; `psi_y`: (B,). Shared classes come first, a row's own after them.
    """

    rows: np.ndarray
    labels: Tensor
    sampled: Sampled
    pairs: Tensor | None
    gap: Tensor
    psi_y: Tensor


def score(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, parameters: Parameters
) -> Scored:
    """Scores of the label and of the sampled classes, as gaps. FloatingPointError where a score is not finite."""
    weight, bias = parameters.weight, parameters.bias
    pairs = None
    if sampled.shared:
        psi_own = kernels.pair_scores(X, rows, with_own(labels, sampled), weight, bias)
        psi = kernels.shared_scores(X, rows, sampled.classes, weight, bias)
        finite = all_finite(psi_own) and all_finite(psi)
        gap, psi_y = psi.sub_(psi_own[:, :1]), psi_own[:, 0]
        if sampled.own is not None:
            gap = torch.cat([gap, psi_own[:, 1:] - psi_own[:, :1]], dim=1)
    else:
        pairs = torch.cat([labels[:, None], sampled.classes], dim=1)
        psi = kernels.pair_scores(X, rows, pairs, weight, bias)
        finite = all_finite(psi)
        gap, psi_y = psi[:, 1:] - psi[:, :1], psi[:, 0]
    if not finite:
        raise not_finite()
    if sampled.mask is not None:
        gap = gap.masked_fill_(sampled.mask, -torch.inf)
    return Scored(rows, labels, sampled, pairs, gap, psi_y)


def not_finite() -> FloatingPointError:
    """The error that says what to do about weights that ran away."""
    return FloatingPointError(
        "The scores stopped being finite: the weights have diverged. Lower learning_rate, scale the features to "
        "about 1, or set a prior_variance."
    )


def all_finite(psi: Tensor) -> bool:
    """One pass: a sum is finite only if every term is; a sum of finite numbers that overflows is looked at again."""
    return math.isfinite(psi.sum()) or bool(torch.isfinite(psi).all())


def push(
    kernels: ModuleType,
    X: Rows,
    scored: Scored,
    grad_gap: Tensor,
    row_scale: Tensor | float,
    prior_scale: float,
    parameters: Parameters,
    optimizer: RowOptimizer,
    t: int,
    prior: Prior | None,
) -> None:
    """Send dL/dgap back into the touched rows: +g to each sampled class, minus their sum to the label.

    `row_scale` multiplies each row's gradient (N / B times its sample weight); `prior_scale` = N / B times omega is the
    pair's share of the prior.
    """
    sampled, labels, pairs = scored.sampled, scored.labels, scored.pairs
    share = None
    if prior is not None:
        share = torch.exp(sampled.log_weight).expand_as(grad_gap) * prior_scale
        share = share if sampled.mask is None else share.masked_fill_(sampled.mask, 0.0)
    if pairs is not None:
        grad = kernels.with_label(grad_gap, row_scale)
        if share is not None:
            share = F.pad(share, (1, 0), value=prior_scale)
        kernels.push_pairs(X, scored.rows, pairs, grad, share, parameters, optimizer, t, prior)
        return
    S = len(sampled.classes)
    grad = grad_gap * (row_scale[:, None] if isinstance(row_scale, Tensor) else row_scale)
    own_grad = torch.cat([grad.sum(dim=1, keepdim=True).neg_(), grad[:, S:]], dim=1)
    own_share = None
    if share is not None:
        share, own_share = share[:, :S], F.pad(share[:, S:], (1, 0), value=prior_scale)
    kernels.push_shared(
        X, scored.rows, sampled.classes, grad[:, :S], with_own(labels, sampled), own_grad, share, own_share, parameters,
        optimizer, t, prior,
    )  # fmt: skip


def with_own(labels: Tensor, sampled: Sampled) -> Tensor:
    """(B, 1 + P): the label, then the classes that the row has for itself."""
    return labels[:, None] if sampled.own is None else torch.cat([labels[:, None], sampled.own], dim=1)
