"""Zeros for large arrays with random access to rows: on huge pages, if the system has them.

With pages of 4 kB the translation buffer (TLB) covers a few MB, and most accesses to rows of a large array miss it.
With pages of 2 MB it covers gigabytes.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 24  # smallest array, in bytes, that uses huge pages


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.zeros on the CPU; large arrays on huge pages, where the system supports madvise."""
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared mappings, the default, have no huge pages
    pages = mmap.mmap(-1, size, flags=private)  # zero when first accessed; freed with its last view
    with contextlib.suppress(OSError):  # an operating system without them: small pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(dtype).view(shape)
