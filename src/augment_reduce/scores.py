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

from .kernels.alike import Alike
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
    - `gap`: (B, S), psi_k - psi_y, -inf where masked; `psi_y`: (B,). Shared classes come first, a row's own after them;
    - `alike`: which rows have the same features, and so the same scores but for the label's, where classes are shared.
    """

    rows: np.ndarray
    labels: Tensor
    sampled: Sampled
    pairs: Tensor | None
    gap: Tensor
    psi_y: Tensor
    alike: Alike | None = None


def score(
    kernels: ModuleType,
    X: Rows,
    rows: np.ndarray,
    labels: Tensor,
    sampled: Sampled,
    parameters: Parameters,
    alike: Alike | None = None,
) -> Scored:
    """Scores of the label and of the sampled classes, as gaps. FloatingPointError where a score is not finite."""
    if sampled.shared:
        runs = Alike.none(len(rows)) if alike is None else alike
        psi, psi_y = score_runs(kernels, X, rows, labels, sampled, parameters, runs)
        gap, pairs = runs.spread(psi).sub_(psi_y), None
    else:
        runs, pairs = None, torch.cat([labels[:, None], sampled.classes], dim=1)
        psi = kernels.pair_scores(X, rows, pairs, parameters.weight, parameters.bias)
        if not all_finite(psi):
            raise not_finite()
        gap, psi_y = psi[:, 1:] - psi[:, :1], psi[:, :1]
    if sampled.mask is not None:
        gap = gap.masked_fill_(sampled.mask, -torch.inf)
    return Scored(rows, labels, sampled, pairs, gap, psi_y[:, 0], runs)


def score_runs(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, parameters: Parameters,
    alike: Alike,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores of the runs with the shared classes and with their own (U, S + P), of rows with their labels (B, 1)."""
    weight, bias, of_runs = parameters.weight, parameters.bias, rows[alike.first]
    classes, run, own = own_pairs(labels, sampled, alike)
    psi_own = kernels.pair_scores(X, of_runs, classes, weight, bias, run)
    psi = kernels.shared_scores(X, of_runs, sampled.classes, weight, bias)
    if not (all_finite(psi_own) and all_finite(psi)):
        raise not_finite()
    psi_y = psi_own[: len(rows)]
    if own is not None:
        of_own = psi.new_zeros(own.shape)
        of_own[own] = psi_own[len(rows) :, 0]
        psi = torch.cat([psi, of_own], dim=1)
    return psi, psi_y


def own_pairs(labels: Tensor, sampled: Sampled, alike: Alike) -> tuple[Tensor, np.ndarray, Tensor | None]:
    """Pairs that are not shared: each row's label, then what the runs have for themselves; (Q, 1), and their runs (Q,).

    And which places of the runs' own (U, P) these are, row by row; None where there are none.
    """
    if sampled.own is None:
        return labels[:, None], alike.run, None
    first = torch.from_numpy(alike.first)
    filled = torch.ones(len(first), sampled.own.shape[1], dtype=torch.bool)
    if sampled.n_own is not None:
        filled = torch.arange(sampled.own.shape[1]) < sampled.n_own[first][:, None]
    classes = torch.cat([labels, sampled.own[first][filled]])
    return classes[:, None], np.concatenate([alike.run, filled.nonzero()[:, 0].numpy()]), filled


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
    assert scored.alike is not None
    grad = grad_gap * (row_scale[:, None] if isinstance(row_scale, Tensor) else row_scale)
    shares = None if share is None else scored.alike.added(share)
    push_runs(
        kernels, X, scored.rows, labels, sampled, scored.alike, scored.alike.added(grad), grad.sum(dim=1).neg_(),
        shares, prior_scale, parameters, optimizer, t, prior,
    )  # fmt: skip


def push_runs(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, alike: Alike, of_runs: Tensor,
    of_label: Tensor, shares: Tensor | None, prior_scale: float, parameters: Parameters, optimizer: RowOptimizer,
    t: int, prior: Prior | None,
) -> None:  # fmt: skip
    """As `push`, from derivatives by the scores of runs (U, S + P) and of labels (B,), and the runs' shares."""
    S, (classes, run, own) = len(sampled.classes), own_pairs(labels, sampled, alike)
    own_grad = of_label if own is None else torch.cat([of_label, of_runs[:, S:][own]])
    own_share = None
    if shares is not None:
        own_share = torch.full_like(of_label, prior_scale)
        own_share = own_share if own is None else torch.cat([own_share, shares[:, S:][own]])
        own_share, shares = own_share[:, None], shares[:, :S]
    kernels.push_shared(
        X, rows[alike.first], sampled.classes, of_runs[:, :S], classes, own_grad[:, None], shares, own_share,
        parameters, optimizer, t, prior, own_rows=run,
    )  # fmt: skip
