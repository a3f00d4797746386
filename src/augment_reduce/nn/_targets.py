"""Targets and sample weights inside a step: row weights, and values out of range."""

from __future__ import annotations

import torch
from torch import Tensor

from ._plain import LARGEST

# Places of `Step.tally`, (8,) int64 on the device
ROWS, FLOORED, BAD_TARGETS, BAD_TARGET, SKIPPED, ROWS_BEFORE, BAD_WEIGHTS = range(7)


def labels_and_weights(
    target: Tensor, sample_weight: Tensor | None, ignore_index: int, n_classes: int, tally: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(labels, weights) (B,): a row that does not count has weight 0, and label 0 instead of one out of range.

    On the CPU a target out of range raises; on other devices it is counted, and its row skipped.
    """
    counts = target != ignore_index
    bad = counts & ((target < 0) | (target >= n_classes))
    if target.device.type == "cpu":  # no synchronisation
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(out_of_range(n_classes, int(bad.sum()), int(target[row]), ignore_index, row))
        if bool(counts.all()) and sample_weight is None:
            return target, torch.ones(len(target), dtype=dtype)
    else:
        tally[BAD_TARGETS] += bad.sum()
        lowest = torch.iinfo(torch.int64).min
        largest_bad = torch.cat([torch.where(bad, target, lowest), target.new_full((1,), lowest)]).amax()
        tally[BAD_TARGET] = torch.where(bad.any(), largest_bad, tally[BAD_TARGET])
    counts = counts & ~bad
    if sample_weight is None:
        return torch.where(counts, target, 0), counts.to(dtype)
    valid = is_weight(sample_weight)
    tally[BAD_WEIGHTS] += (counts & ~valid).sum()
    row_weight = torch.where(counts & valid, sample_weight.to(dtype), 0.0)
    return torch.where(counts, target, 0), row_weight


def is_weight(sample_weight: Tensor) -> Tensor:
    """Where a sample weight is valid: not negative, and below 1e15."""
    return (sample_weight >= 0.0) & (sample_weight < LARGEST)


def out_of_range(n_classes: int, count: int, example: int, ignore_index: int, row: int | None = None) -> str:
    where = "" if row is None else f"; first at row {row}"
    return (
        f"Expected targets in [0, n_classes={n_classes}) or ignore_index={ignore_index}, but {count} are outside{where}"
        f": target={example}. Targets are 0-based class numbers."
    )
