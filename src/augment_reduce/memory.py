"""Zeros for large arrays whose rows are visited at random: on large pages where the system has them.

With pages of 4 kB the processor's list of pages covers a few MB, and every visit of another row of a large array first
waits for its page to be found. Pages of 2 MB make that list cover gigabytes.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 24  # bytes from which pages are worth a thought


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.zeros on the CPU; of large pages where it is large and the system can be asked for them."""
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared ones, the default, have pages of their own kind
    pages = mmap.mmap(-1, size, flags=private)  # zero when first touched; given back when its last view is gone
    with contextlib.suppress(OSError):  # a kernel without them: then the pages are small
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(dtype).view(shape)
