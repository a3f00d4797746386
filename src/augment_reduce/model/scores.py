"""psi of the label and the sampled classes, by the kernels of the device.

The only module of a training step that reads the weights and applies gradients to them. Its results are small: gaps
psi_k - psi_y (B, S), which are -inf for a row's own label, so that it contributes 0 to every later sum (e^-inf = 0,
log Phi(inf) = 0).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import reference
from ..kernels.cpu import backend as cpu
from ..kernels.minibatch_groups import MinibatchGroups
from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..optim import Prior, RowOptimizer
from ..sampling import Sampled
from ..support.finite import check_finite


def kernels_for(device: str) -> ModuleType:
    """The kernel module of a device: "cpu" (Numba) or "reference" (plain torch, the oracle)."""
    return reference if device == "reference" else cpu


class Scored(NamedTuple):
    """A minibatch with its sampled classes and their scores.

    - `pairs`: (B, 1 + S), the label first, if classes are drawn for each row; None if they are shared;
    - `psi`: (U, S + P) of the U groups of duplicate rows, the shared classes first, then a row's candidates; (B, S) if
      classes are drawn for each row. `psi_y`: (B, 1), of the labels;
    - `groups`: the groups of the rows.
    """

    rows: np.ndarray
    labels: Tensor
    sampled: Sampled
    pairs: Tensor | None
    psi: Tensor
    psi_y: Tensor
    groups: MinibatchGroups

    def gaps(self) -> Tensor:
        """(B, S + P): psi_k - psi_y, -inf where masked. Overwrites `psi`: call once."""
        gap = self.groups.spread(self.psi).sub_(self.psi_y)
        return gap if self.sampled.mask is None else gap.masked_fill_(self.sampled.mask, -torch.inf)


def score(
    kernels: ModuleType,
    X: Rows,
    rows: np.ndarray,
    labels: Tensor,
    sampled: Sampled,
    parameters: Parameters,
    groups: MinibatchGroups | None = None,
) -> Scored:
    """Scores of the label and of the sampled classes. FloatingPointError if one is not finite."""
    groups = groups if groups is not None and sampled.shared else MinibatchGroups.none(len(rows))
    if sampled.shared:
        psi, psi_y = score_runs(kernels, X, rows, labels, sampled, parameters, groups)
        return Scored(rows, labels, sampled, None, psi, psi_y, groups)
    pairs = torch.cat([labels[:, None], sampled.classes], dim=1)
    psi = kernels.pair_scores(X, rows, pairs, parameters.weight, parameters.bias)
    check_finite(psi)
    return Scored(rows, labels, sampled, pairs, psi[:, 1:], psi[:, :1], groups)


def score_runs(
    kernels: ModuleType, X: Rows, rows: np.ndarray, labels: Tensor, sampled: Sampled, parameters: Parameters,
    groups: MinibatchGroups,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores of the groups with the shared classes and their candidates (U, S + P), of the rows with their labels (B,
    1)."""
    weight, bias, of_groups = parameters.weight, parameters.bias, rows[groups.first]
    classes, group, own = own_pairs(labels, sampled, groups)
    psi_own = kernels.pair_scores(X, of_groups, classes, weight, bias, group)
    psi = kernels.shared_scores(X, of_groups, sampled.classes, weight, bias)
    check_finite(psi_own, psi)
    psi_y = psi_own[: len(rows)]
    if own is not None:
        of_own = psi.new_zeros(own.shape)
        of_own[own] = psi_own[len(rows) :, 0]
        psi = torch.cat([psi, of_own], dim=1)
    return psi, psi_y


def own_pairs(labels: Tensor, sampled: Sampled, groups: MinibatchGroups) -> tuple[Tensor, np.ndarray, Tensor | None]:
    """Pairs that are not shared, (Q, 1): each row's label, then the groups' candidate classes.

    Also their groups (Q,), and their positions in the groups' candidates (U, P), in row-major order; None without any.
    """
    if sampled.own is None:
        return labels[:, None], groups.group, None
    first = torch.from_numpy(groups.first)
    filled = torch.ones(len(first), sampled.own.shape[1], dtype=torch.bool)
    if sampled.n_own is not None:
        filled = torch.arange(sampled.own.shape[1]) < sampled.n_own[first][:, None]
    classes = torch.cat([labels, sampled.own[first][filled]])
    return classes[:, None], np.concatenate([groups.group, filled.nonzero()[:, 0].numpy()]), filled


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
    """Apply dL/dgap to the touched weight rows: +g for each sampled class, minus their sum for the label.

    `row_scale` multiplies each row's gradient (N / B times its sample weight); `prior_scale` = N / B times omega is the
    pair's share of the prior.
    """
    sampled, pairs = scored.sampled, scored.pairs
    if pairs is not None:
        share = pair_shares(sampled, grad_gap, prior_scale) if prior is not None and prior.in_shares else None
        grad = kernels.with_label(grad_gap, row_scale)
        kernels.push_pairs(X, scored.rows, pairs, grad, share, parameters, optimizer, t, prior)
        return
    share = shares_of(sampled, grad_gap, prior_scale) if prior is not None and prior.in_shares else None
    grad = grad_gap * (row_scale[:, None] if isinstance(row_scale, Tensor) else row_scale)
    shares = None if share is None else scored.groups.added(share)
    by_score = ByScore(scored.groups.added(grad), grad.sum(dim=1).neg_(), shares, None, 0)
    push_groups(kernels, X, scored, by_score, prior_scale, parameters, optimizer, t, prior)


def shares_of(sampled: Sampled, like: Tensor, prior_scale: float) -> Tensor:
    """(B, S): what the pairs of the sampled classes feel of the prior, for gaps like these."""
    share = torch.exp(sampled.log_weight).expand(like.shape) * prior_scale
    return share if sampled.mask is None else share.masked_fill_(sampled.mask, 0.0)


def pair_shares(sampled: Sampled, like: Tensor, prior_scale: float) -> Tensor:
    """(B, 1 + S): the same with the label's first."""
    return F.pad(shares_of(sampled, like, prior_scale), (1, 0), value=prior_scale)


class ByScore(NamedTuple):
    """Derivatives by the scores of groups (U, S + P) and of labels (B,), the groups' shares of the prior (U, S + P),
    the bound (B,), and the number of clipped rows."""

    of_groups: Tensor
    of_labels: Tensor
    shares: Tensor | None
    bound: Tensor | None
    floor_hits: int


def push_groups(
    kernels: ModuleType, X: Rows, scored: Scored, found: ByScore, prior_scale: float, parameters: Parameters,
    optimizer: RowOptimizer, t: int, prior: Prior | None,
) -> None:  # fmt: skip
    """As `push`, from derivatives by the scores."""
    sampled, groups, (of_groups, of_labels, shares) = scored.sampled, scored.groups, found[:3]
    S, (classes, run, own) = len(sampled.classes), own_pairs(scored.labels, sampled, groups)
    own_grad = of_labels if own is None else torch.cat([of_labels, of_groups[:, S:][own]])
    own_share = None
    if shares is not None:
        own_share = torch.full_like(of_labels, prior_scale)
        own_share = own_share if own is None else torch.cat([own_share, shares[:, S:][own]])
        own_share, shares = own_share[:, None], shares[:, :S]
    kernels.push_shared(
        X, scored.rows[groups.first], sampled.classes, of_groups[:, :S], classes, own_grad[:, None], shares, own_share,
        parameters, optimizer, t, prior, own_rows=run,
    )  # fmt: skip
