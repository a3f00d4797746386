"""The arguments of a head's forward pass, flattened: rows, labels, weights; soft targets as several rows with one label
each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._checks import check_sample_weight, flat_rows, same_device

if TYPE_CHECKING:
    from .head import AugmentReduceHead


RANK_BITS = 40  # groups of different ranks have different numbers


@dataclass(frozen=True)
class Rows:
    """Flat rows. `one_label` is False for soft targets, whose labels are not draws from the class frequencies."""

    hidden: Tensor  # (B, D)
    target: Tensor  # (B,) int64
    sample_weight: Tensor | None
    index: Tensor | None
    group: Tensor | None
    reduction: str
    one_label: bool
    shape: torch.Size

    def shaped(self, loss: Tensor, reduction: str) -> Tensor:
        """The loss in the shape of the input; for soft targets the sum over a row's classes."""
        if reduction != "none":
            return loss
        return loss.reshape(self.shape) if self.one_label else loss.reshape(*self.shape).sum(-1)


def rows_of(
    head: AugmentReduceHead, hidden: Tensor, target: Tensor, index: Tensor | None, sample_weight: Tensor | None,
    target_prob: Tensor | None, group: Tensor | None,
) -> Rows:  # fmt: skip
    weights = None
    if sample_weight is not None:
        weights = flat_rows("sample_weight", sample_weight, hidden, head.weight, integer=False)
        check_sample_weight(weights)
    index = checked_index(head, index, hidden)
    flat = hidden.reshape(-1, head.in_features)
    one_label = target_prob is None
    if target_prob is not None:
        flat, target, weights, index = _soft(head, hidden, target, target_prob, weights, index)
        y, group = target.reshape(-1).to(torch.int64), None
    else:
        y = flat_rows("target", target, hidden, head.weight, integer=True)
        group = _group(head, group, hidden)
    if head.class_weight is not None:
        of_class = head.class_weight[torch.where((y >= 0) & (y < head.n_classes), y, 0)]
        weights = of_class if weights is None else of_class * weights
    return Rows(flat, y, weights, index, group, head.reduction, one_label, target.shape)


def _soft(
    head: AugmentReduceHead, hidden: Tensor, target: Tensor, target_prob: Tensor, weights: Tensor | None,
    index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Rows repeated for each of their M classes, weighted by the probabilities, in which the loss is linear."""
    if target.shape != target_prob.shape or target.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"Expected soft targets of shape {(*hidden.shape[:-1], 'M')}, target and target_prob alike, found "
            f"{tuple(target.shape)} and {tuple(target_prob.shape)}."
        )
    for name, tensor in (("target", target), ("target_prob", target_prob)):
        same_device(name, tensor, head.weight)
    M = target.shape[-1]
    wide = hidden[..., None, :].expand(*hidden.shape[:-1], M, hidden.shape[-1])
    prob = flat_rows("target_prob", target_prob, wide, head.weight, integer=False)
    check_sample_weight(prob)
    flat_rows("target", target, wide, head.weight, integer=True)
    repeated = None if index is None else index.repeat_interleave(M)
    weighted = prob if weights is None else prob * weights.repeat_interleave(M)
    return wide.reshape(-1, hidden.shape[-1]), target, weighted, repeated


def _group(head: AugmentReduceHead, group: Tensor | None, hidden: Tensor) -> Tensor | None:
    """(B,) groups of rows that are not independent: as given, else the sequences of rows (..., T, D)."""
    if not head.in_batch:
        return None
    if group is not None:
        return flat_rows("group", group, hidden, head.weight, integer=True)
    if hidden.ndim < 3:
        return None
    T = hidden.shape[-2]
    first = 0 if head.shards is None else head.shards.ranks.rank << RANK_BITS
    return torch.arange(hidden.shape[:-1].numel(), device=hidden.device) // max(1, T) + first


def checked_index(head: AugmentReduceHead, index: Tensor | None, hidden: Tensor) -> Tensor | None:
    if head.local.mode != "persistent":
        return None
    if index is None:
        raise ValueError(
            'local="persistent" keeps numbers for every training row and needs index, the row numbers of this '
            'minibatch: head(hidden, target, index=rows). Without them, use local="amortised" or "fresh".'
        )
    rows = flat_rows("index", index, hidden, head.weight, integer=True)
    n_rows = len(head.local.visits)
    if (
        rows.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and len(rows)
        and not (int(rows.min()) >= 0 and int(rows.max()) < n_rows)
    ):
        raise ValueError(f"Expected index in [0, n_rows={n_rows}), found {int(rows.min())} to {int(rows.max())}.")
    return rows


def flat_class_weight(class_weight: Tensor, n_classes: int) -> Tensor:
    """(K,), finite and not negative."""
    weights = torch.as_tensor(class_weight, dtype=torch.float32)
    if weights.shape != (n_classes,) or not bool((weights >= 0.0).all()) or not bool(weights.isfinite().all()):
        raise ValueError(
            f"Expected class_weight of shape ({n_classes},), finite and not negative, found {tuple(weights.shape)}"
            f"{f' with smallest {float(weights.min())}' if weights.numel() else ''}."
        )
    return weights
