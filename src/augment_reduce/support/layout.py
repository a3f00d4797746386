"""Layouts of stored arrays: dtype, shape, range. Classes that store arrays in a model file declare them in a table.

    {"log_eta": Entry("weights", ("N",)), "visits": Entry("int32", ("N",), 0, MOST_VISITS)}

Sizes are named. K classes and D features are those of the model; other names (N rows, a cache) are set by the first
array that has them, and have to agree in all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

MOST_VISITS = 2**31 - 2  # int32, and one more must fit


class Entry(NamedTuple):
    """One array. `high` is included; as the name of a size it stands for the indices below that."""

    dtype: str  # "weights": that of the weights
    shape: tuple[int | str, ...]  # "D?lists": D or 0, the same wherever it says so
    low: float = -math.inf
    high: float | str = math.inf
    may_be_nan: bool = False  # infinity is allowed, too
    all_occur: bool = False  # every number in the range is valid


Layout = Mapping[str, Entry]


class LayoutError(ValueError):
    """An array does not match its layout: which one, expected, found."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        self.name, self.expected, self.found = name, expected, found
        super().__init__(f"{name}: expected {expected}, found {found}")


def check(tensors: Mapping[str, Tensor], layout: Layout, sizes: dict[str, int], weights: torch.dtype) -> None:
    """Validate that exactly the arrays of the layout are there; adds the sizes found to `sizes`."""
    for name, entry in layout.items():
        if name not in tensors:
            raise LayoutError(name, "an array", "none")
        check_one(name, tensors[name], entry, sizes, weights)
    for name in tensors:
        if name not in layout:
            raise LayoutError(name, "no such array", "one")


def check_one(name: str, tensor: Tensor, entry: Entry, sizes: dict[str, int], weights: torch.dtype) -> None:
    """Validate one array."""
    dtype = weights if entry.dtype == "weights" else getattr(torch, entry.dtype)
    if tensor.dtype != dtype:
        raise LayoutError(name, f"{dtype}", f"{tensor.dtype}")
    if len(entry.shape) != tensor.ndim or not all(map(_is_size, entry.shape, tensor.shape, [sizes] * tensor.ndim)):
        known = ", ".join(f"{size} = {sizes[size]}" if size in sizes else str(size) for size in entry.shape)
        raise LayoutError(name, f"the shape ({known})", f"{tuple(tensor.shape)}")
    check_range(name, tensor, entry, sizes)


def _is_size(size: int | str, n: int, sizes: dict[str, int]) -> bool:
    if isinstance(size, int):
        return n == size
    base, maybe, _ = size.partition("?")
    if maybe and n not in (0, sizes[base]):
        return False
    return n == sizes.setdefault(size, n)


def check_range(name: str, tensor: Tensor, entry: Entry, sizes: dict[str, int]) -> None:
    """Validate that all numbers are finite and in range, in one pass: a NaN is both minimum and maximum."""
    if entry.may_be_nan or not tensor.numel():
        return
    lowest, highest = (end.item() for end in tensor.aminmax())
    high = sizes[entry.high] - 1 if isinstance(entry.high, str) else entry.high
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        at = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
        raise LayoutError(name, "finite numbers", f"{tensor[tuple(at)].item()} at {at}")
    if not entry.low <= lowest <= highest <= high:
        raise LayoutError(name, f"numbers from {entry.low} to {high}", f"{lowest} to {highest}")
    if entry.all_occur and len(torch.unique(tensor)) != high - entry.low + 1:
        raise LayoutError(name, f"all whole numbers from {entry.low} to {high}", "gaps")
