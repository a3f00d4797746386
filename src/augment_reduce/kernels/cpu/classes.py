"""Sort pairs by their classes, lay them out by class, draw classes: in time O(pairs), whatever the number of them."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..cache import cached_njit
from .lanes import LANES
from .math import row_sum
from .types import OPTIONS, Array, Groups
from .work import WORK, OutOfRange, all_below, equal

U1 = np.uint64(1)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what splitmix adds for each number


@cached_njit(**OPTIONS)
def sort(
    classes: Array, n: int, bits: int, passes: int, count: Array, keys: Array, orders: Array, row: Array, per_row: int
) -> int:  # fmt: skip
    """Stable radix sort, `bits` bits a pass, into keys[passes & 1]; -1 if a class is not in range(n)."""
    P = classes.shape[0]
    mask = np.uint32((1 << bits) - 1)
    bad = 0
    for i in range(P):
        bad += (classes[i] < 0) | (classes[i] >= n)
        keys[0, i] = classes[i]
        orders[0, i] = i
    if bad > 0:
        return -1
    for step in range(passes):
        shift = np.uint32(step * bits)
        key, order = keys[step & 1], orders[step & 1]
        to_key, to_order = keys[1 - (step & 1)], orders[1 - (step & 1)]
        count[:] = 0
        for i in range(P):
            count[((key[i] >> shift) & mask) + np.uint32(1)] += 1
        for j in range(count.shape[0] - 1):
            count[j + 1] += count[j]
        for i in range(P):
            digit = (key[i] >> shift) & mask
            to = count[digit]
            count[digit] = to + np.uint32(1)
            to_key[to], to_order[to] = key[i], order[i]
    order, inverse = orders[passes & 1], 1.0 / per_row
    for i in range(P):
        row[i] = np.uint32((order[i] + 0.5) * inverse)  # order // per_row, but in vectors
    return 0


@cached_njit(**OPTIONS)
def cut(key: Array, classes: Array, start: Array) -> int:
    """The distinct classes of a sorted list and where each begins; returns how many there are."""
    G = 0
    for i in range(key.shape[0]):
        if i == 0 or key[i] != key[i - 1]:
            classes[G], start[G] = key[i], i
            G += 1
    start[G] = key.shape[0]
    return G


def check_classes(classes: Array, n: int) -> None:
    if not all_below(classes.reshape(-1), n):
        raise OutOfRange(f"Expected classes in [0, {n}), found {classes.min()} to {classes.max()}.")


def sorting(n_pairs: int, n: int) -> tuple[int, int]:
    """(bits, passes) of the radix sort of so many numbers of range(n)."""
    key_bits = max(1, (n - 1).bit_length())
    passes = -(-key_bits // min(max(8, n_pairs.bit_length()), 14))
    return -(-key_bits // passes), passes


def group_by_class(classes: Array, n: int) -> Groups:
    """The pairs of `classes` (B, C), each of range(n), in the order of their classes.

    Like `load`, finds again what it did last.
    """
    found: tuple[Array, Groups] | None = WORK.groups
    if found is not None and equal(found[0], classes):
        return found[1]
    WORK.groups = None
    P = classes.size
    bits, passes = sorting(P, n)
    keys = WORK.array("keys", 2 * P, np.uint32).reshape(2, P)
    orders = WORK.array("orders", 2 * P, np.uint32).reshape(2, P)
    row, count = WORK.array("pair_row", P, np.uint32), WORK.array("count", (1 << bits) + 1, np.uint32)
    if sort(classes.reshape(-1), n, bits, passes, count, keys, orders, row, classes.shape[1]) < 0:
        check_classes(classes, n)
    distinct, start = WORK.array("distinct", P, np.int64), WORK.array("start", P + 1, np.int64)
    G = cut(keys[passes & 1], distinct, start)
    groups = Groups(distinct[:G], start[: G + 1], orders[passes & 1], row)
    kept = WORK.array("classes", P, np.int64).reshape(classes.shape)
    kept[...] = classes
    WORK.groups = (kept, groups)
    return groups


@cached_njit(**OPTIONS)
def spread(a: Array, column: Array, own_a: Array, own_column: Array, own_rows: Array, out: Array) -> None:
    """a (B, C), and (R, P) of the rows' own, by block of 16 distinct classes: out (blocks, B, 16).

    Line r of the own is of row own_rows[r]; column -1: left out.
    """
    out[...] = 0
    for b in range(a.shape[0]):
        for c in range(a.shape[1]):
            out[column[c] // LANES, b, column[c] % LANES] += a[b, c]
    for r in range(own_column.shape[0]):
        for p in range(own_column.shape[1]):
            if own_column[r, p] >= 0:
                out[own_column[r, p] // LANES, own_rows[r], own_column[r, p] % LANES] += own_a[r, p]


def table_size(S: int) -> int:
    """Places for S picks of `floyd`: so many that few fall on one that is taken: looking further is hard to foresee."""
    return int(1 << (16 * S).bit_length())


@cached_njit(**OPTIONS)
def floyd(lo: int, hi: int, uniforms: Array, n: int, labels: Array, out: Array, table: Array) -> None:
    """Rows lo..hi of Floyd's algorithm, stepping over the row's label if there are labels.

    `table` is a hash set of this row's picks, kept as b n + pick. Smaller numbers are of earlier rows and count as
    empty places, so that it is cleared once. The picks are their own hashes: they are uniform.
    """
    S = uniforms.shape[1]
    mask = np.uint64(table.shape[0] - 1)
    table[:] = -1
    for b in range(lo, hi):
        base, label = np.int64(b) * n, labels[b] if labels.shape[0] > 0 else n
        for s in range(S):
            j = n - S + s
            pick = min(np.int64(np.float64(uniforms[b, s]) * np.float64(j + 1)), j)
            at = np.uint64(pick) & mask
            while table[at] >= base and table[at] != base + pick:
                at = (at + U1) & mask
            if table[at] == base + pick:
                pick = j
                at = np.uint64(pick) & mask
                while table[at] >= base:
                    at = (at + U1) & mask
            table[at] = base + pick
            out[b, s] = pick + (pick >= label)


@njit(**OPTIONS)
def uniform(seed: int, i: int) -> float:
    """Number i of splitmix, which depends on the seed and i alone."""
    z = np.uint64(seed) + GOLDEN * np.uint64(i + 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@cached_njit(**OPTIONS)
def splitmix(seed: int, out: Array) -> None:
    """`reference.uniforms`, flat."""
    for i in range(out.shape[0]):
        out[i] = uniform(seed, i)


@cached_njit(**OPTIONS)
def with_label(grad: Array, scale: Array, each: int, out: Array) -> None:
    """out[b, 1:] = grad[b] scale[b each], out[b, 0] = minus their sum."""
    for b in range(grad.shape[0] if grad.shape[1] == 1 else 0):  # short rows, by themselves, cannot be done in vectors
        out[b, 1] = grad[b, 0] * scale[b * each]
        out[b, 0] = -out[b, 1]
    for b in range(grad.shape[0] if grad.shape[1] != 1 else 0):
        by = scale[b * each]
        for s in range(grad.shape[1]):
            out[b, 1 + s] = grad[b, s] * by
        out[b, 0] = -row_sum(out[b, 1:])
