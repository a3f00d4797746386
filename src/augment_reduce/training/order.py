"""The order of the rows in every epoch: a function of the seed and the epoch, so that a resumed fit has the same.

Rows in memory are shuffled as a whole. Memory-mapped rows are shuffled by blocks, for sequential reads: the blocks of
an epoch in random order, as many as fit a buffer at a time, and the rows of these shuffled together. Rows that fit one
buffer have the order of rows in memory.
"""

from __future__ import annotations

import numpy as np

from ..kernels.cpu.order import deal, shuffle
from ..kernels.rows import DenseRows, Rows
from ..support.seeds import mix

BLOCK_BYTES = 1 << 20  # of consecutive rows of the file
BUFFER_BLOCKS, BUFFER_BATCHES = 64, 32  # of a buffer, at least


def epoch_order(
    seed: int, epoch: int, rows: np.ndarray, batch_size: int = 1, row_group: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rows in the order of an epoch: minibatches are random, but within one rows keep their order in `rows`,
    usually ascending, so that memory is read sequentially and each of two threads has its own range. Rows with the same
    number in `row_group` are in one minibatch. Written to `out`, if given.

    Compiled: numpy's permutation takes three times as long, which matters in short steps, as do allocations.
    """
    order = np.empty_like(rows) if out is None else out
    if row_group is None:
        deal(mix(seed, 1, epoch), rows, batch_size, order)
        return order
    among, place = np.arange(len(rows)), np.arange(int(row_group.max()) + 1)
    shuffle(mix(seed, 1, epoch), among)
    shuffle(mix(seed, 4, epoch), place)
    among = among[np.argsort(place[row_group[among]], kind="stable")]
    first = mix(seed, 5, epoch) % len(rows)  # otherwise large groups would rarely be last
    order[:] = rows[np.roll(among, first)]
    return order


class Orders:
    """Consecutive minibatches, with a new order in each epoch."""

    def __init__(self, seed: int, rows: np.ndarray, batch_size: int, row_group: np.ndarray | None) -> None:
        self.seed, self.rows, self.batch_size, self.row_group = seed, rows, batch_size, row_group
        self.per_epoch = -(-len(rows) // batch_size)
        self.epoch, self.order = -1, np.empty_like(rows)

    def minibatch(self, done: int) -> np.ndarray:
        """The rows of the minibatch after `done` minibatches."""
        (epoch, slot), B = divmod(done, self.per_epoch), self.batch_size
        if epoch != self.epoch:
            epoch_order(self.seed, epoch, self.rows, B, self.row_group, self.order)
            self.epoch = epoch
        return self.order[slot * B : (slot + 1) * B]


class BlockOrders:
    """As `Orders`, with random blocks of `block_rows` rows and, in buffers of `buffer_blocks` blocks, shuffled rows.

    Memory: a buffer's rows and one number a block. Every row occurs once an epoch: the blocks are concatenated in the
    epoch's order, and this sequence is cut into buffers of whole minibatches.
    """

    def __init__(
        self, seed: int, rows: np.ndarray, batch_size: int, row_group: np.ndarray | None, block_rows: int,
        buffer_blocks: int,
    ) -> None:  # fmt: skip
        self.seed, self.rows, self.batch_size, self.row_group = seed, rows, batch_size, row_group
        self.block_rows, self.per_epoch = block_rows, -(-len(rows) // batch_size)
        self.per_buffer = max(1, block_rows * buffer_blocks // batch_size)  # minibatches
        self.epoch, self.buffer = -1, -1
        self.blocks = self.ends = self.order = np.empty(0, np.int64)

    def minibatch(self, done: int) -> np.ndarray:
        """The rows of the minibatch after `done` minibatches."""
        (epoch, slot), B = divmod(done, self.per_epoch), self.batch_size
        buffer, place = divmod(slot, self.per_buffer)
        if epoch != self.epoch:
            self.blocks, self.ends = self.order_of_blocks(epoch)
        if (epoch, buffer) != (self.epoch, self.buffer):
            self.order = self.order_of_buffer(epoch, buffer)
            self.epoch, self.buffer = epoch, buffer
        return self.order[place * B : (place + 1) * B]

    def order_of_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in the order of this epoch, and the cumulative number of rows at the end of each."""
        blocks = np.arange(-(-len(self.rows) // self.block_rows))
        shuffle(mix(self.seed, 6, epoch), blocks)
        first = blocks * self.block_rows
        return blocks, np.cumsum(np.minimum(first + self.block_rows, len(self.rows)) - first)

    def order_of_buffer(self, epoch: int, buffer: int) -> np.ndarray:
        rows_of_buffer = self.per_buffer * self.batch_size
        begin, end = buffer * rows_of_buffer, min((buffer + 1) * rows_of_buffer, len(self.rows))
        first, last = np.searchsorted(self.ends, [begin, end - 1], side="right")
        pieces = []
        for i in range(first, last + 1):
            before = self.ends[i - 1] if i else 0
            size, start = self.ends[i] - before, self.blocks[i] * self.block_rows
            pieces.append(np.arange(start + max(0, begin - before), start + min(size, end - before)))
        places = np.sort(np.concatenate(pieces))  # sequential reads
        row_group = None if self.row_group is None else np.unique(self.row_group[places], return_inverse=True)[1]
        return epoch_order(mix(self.seed, 7, epoch), buffer, self.rows[places], self.batch_size, row_group)


def orders_of(
    X: Rows, seed: int, rows: np.ndarray, batch_size: int, row_group: np.ndarray | None
) -> Orders | BlockOrders:  # fmt: skip
    """The orders of these rows of X: by blocks if they are memory-mapped and take more than a buffer."""
    if X.mapped:
        block = rows_of_block(X)
        blocks = max(BUFFER_BLOCKS, -(-BUFFER_BATCHES * batch_size // block))
        if len(rows) > block * blocks:
            return BlockOrders(seed, rows, batch_size, row_group, block, blocks)
    return Orders(seed, rows, batch_size, row_group)


def rows_of_block(X: Rows) -> int:
    """The mean number of rows in BLOCK_BYTES of the file."""
    if isinstance(X, DenseRows):
        n_bytes = X.n_rows * X.n_features * X.values.itemsize
    else:
        n_bytes = X.n_nonzero * (X.values.itemsize + X.indices.itemsize)
    return max(1, BLOCK_BYTES * X.n_rows // max(1, n_bytes))
