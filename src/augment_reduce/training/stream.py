"""A stream of blocks of rows, shuffled in a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from ..support.seeds import mix


class Block(NamedTuple):
    """Some rows of a stream: features (dense, or CSR), labels and weights (None: all one)."""

    X: Any
    y: np.ndarray
    weight: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Block:
        return Block(self.X[rows], self.y[rows], None if self.weight is None else self.weight[rows])

    def __len__(self) -> int:
        return len(self.y)


def checked_blocks(blocks: Iterable[Any]) -> Iterator[Block]:
    """The non-empty blocks, checked to be like the first: number of features, sparse or dense, with or without
    weights."""
    first = None
    for number, found in enumerate(blocks):
        block = _block(found, number)
        if not len(block):
            continue
        first = block if first is None else first
        if block.X.shape[1] != first.X.shape[1]:
            raise ValueError(
                f"Expected blocks of {first.X.shape[1]} features, as the first has, but block {number} has "
                f"{block.X.shape[1]}."
            )
        for what, has in (
            ("sparse rows", [sp.issparse(b.X) for b in (first, block)]),
            ("row weights", [b.weight is not None for b in (first, block)]),
        ):
            if has[0] != has[1]:
                raise ValueError(f"Expected {what} in all blocks or in none; block {number} differs from the first.")
        yield block


def _block(found: Any, number: int) -> Block:
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        raise ValueError(
            f"Expected blocks (X, y) or (X, y, sample_weight), but block {number} is a {type(found).__name__}"
            + (f" of {len(found)}." if isinstance(found, tuple | list) else ".")
        )
    X = sp.csr_matrix(found[0]) if sp.issparse(found[0]) else np.asarray(found[0])
    y = np.asarray(found[1])
    weight = None if len(found) == 2 or found[2] is None else np.asarray(found[2], np.float64)
    n = X.shape[0] if X.ndim == 2 else -1
    if n < 0 or y.shape != (n,) or (weight is not None and weight.shape != (n,)):
        shapes = ", ".join(str(a.shape) for a in (X, y, weight) if a is not None)
        raise ValueError(f"Expected a table of rows, a label for each, and a weight or none; block {number}: {shapes}.")
    return Block(X, y, weight)


def shuffled(blocks: Iterable[Block], buffer_rows: int, seed: int) -> Iterator[Block]:
    """The rows of the blocks, each once, in parts: the buffer is filled and shuffled, and half of it is yielded."""
    kept: list[Block] = []
    n = part = 0
    for block in blocks:
        kept.append(block)
        n += len(block)
        if n < buffer_rows:
            continue
        buffer = joined(kept)
        order = _permutation(seed, part, n)
        yield buffer.take(order[buffer_rows // 2 :])
        kept, n, part = [buffer.take(order[: buffer_rows // 2])], buffer_rows // 2, part + 1
    if n:
        yield joined(kept).take(_permutation(seed, part, n))


def _permutation(seed: int, part: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(mix(seed, 8, part))).permutation(n)


def joined(blocks: list[Block]) -> Block:
    """The concatenation of the blocks."""
    if len(blocks) == 1:
        return blocks[0]
    X = [block.X for block in blocks]
    weights = [block.weight for block in blocks if block.weight is not None]
    return Block(
        sp.vstack(X, format="csr") if sp.issparse(X[0]) else np.concatenate(X),
        np.concatenate([block.y for block in blocks]),
        np.concatenate(weights) if weights else None,
    )
