"""Rows that are truly dense, and classes shared by a minibatch: matrix products by torch's BLAS, in place of CSR.

Products are cut into parts of a size that does not depend on the number of threads, each with one thread: so results do
not depend on it either.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..threads import for_each
from .rules import Steps
from .types import Array, Rule

FULL_FROM = 0.5  # share of non-zeros from which a product is faster than sparse rows times dense tiles
PART = 128  # rows of a result


def is_full(x: Array) -> bool:
    """Whether most entries are not zero."""
    return bool(x.size - np.count_nonzero(x == 0) > FULL_FROM * x.size)


def multiply(a: Array, b: Array, out: Array) -> None:
    """out = a b, for matrices."""

    def part(first: int) -> None:
        rows = slice(first, first + PART)  # tensors of this thread, which has inference modes of its own
        torch.mm(torch.from_numpy(a[rows]), torch.from_numpy(b), out=torch.from_numpy(out[rows]))

    for_each(part, range(0, len(a), PART))


def score_shared(x: Array, classes: Array, weight: Array, bias: Array, out: Array) -> None:
    """out[b, c] = x[b] . weight[classes[c]] + bias[classes[c]]"""
    multiply(x, weight[classes].T, out)
    out += bias[classes]


def count_shares(x: Array, share: Array, sums: Array, out: Array) -> None:
    """out[j, d] = sum over b of share[j, b] [x[b, d] != 0]; `sums` are those over all b."""
    seen = x != 0
    if seen.all():
        out[...] = sums[:, None]
    else:
        multiply(share, seen.astype(x.dtype), out)


def push_lines(steps: Steps) -> Callable[..., None]:
    step_row = steps.row

    def push_lines(lo: int, hi: int, classes: Array, g: Array, c: Array, arrays: tuple, rule_: tuple) -> None:
        """Classes lo..hi, of which every entry has a gradient g and a share c of the prior (one line: none)."""
        rule = Rule(*rule_)
        for j in range(lo, hi):
            step_row(rule, arrays, classes[j], g[j], c[min(j, c.shape[0] - 1)])

    return push_lines
