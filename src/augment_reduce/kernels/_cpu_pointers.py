"""Which classes the features of a row point at: lists for each feature, kept while labels go by, and their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_types import OPTIONS, Array
from ._cpu_work import WORK, run, split

NOBODY = -1


@njit(cache=True, **OPTIONS)
def tally(
    indptr: Array, indices: Array, values: Array, rows: Array, labels: Array, certain: Array, classes: Array,
    counts: Array, seen: Array,
) -> None:  # fmt: skip
    """One pass of Space-Saving (Metwally, Agrawal and El Abbadi 2005) for every feature, over these rows.

    `classes`, `counts` (D, M): up to M labels of the rows that have feature d, and how often, at most; whoever comes
    when the list is full takes the place of the rarest, and its count. `certain` classes are not listed.
    """
    M = classes.shape[1]
    for n in range(rows.shape[0]):
        k = labels[n]
        for q in range(indptr[rows[n]], indptr[rows[n] + 1]):
            if values[q] == 0:
                continue
            d, rarest = indices[q], 0
            seen[d] += 1
            if certain[k]:
                continue
            for m in range(M):
                if classes[d, m] == k or classes[d, m] == NOBODY:
                    rarest = m
                    break
                if counts[d, m] < counts[d, rarest]:
                    rarest = m
            classes[d, rarest] = k
            counts[d, rarest] += 1


@njit(**OPTIONS)
def _place(k: int, keys: Array, mask: Any) -> Any:
    """Where class k stands in the table, or where it would."""
    at = (np.uint64(k) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & mask
    while keys[at] != 0 and keys[at] != k + 1:
        at = (at + np.uint64(1)) & mask
    return at


@njit(cache=True, **OPTIONS)
def point(
    lo: int, hi: int, indptr: Array, indices: Array, values: Array, rows: Array, labels: Array, certain: Array,
    classes: Array, counts: Array, seen: Array, weight: Array, out: Array, keys: Array, sums: Array, places: Array,
) -> None:  # fmt: skip
    """out (B, P): the classes of largest sum_d counts[d, k] / seen[d] weight[k], not the label, nor a certain one.

    Rows that are pointed at fewer get their label for the rest. `keys` (class + 1; zero between calls) and `sums` are a
    hash table with room for twice what a row may meet; `places` says where it was written.
    """
    P, mask = out.shape[1], np.uint64(keys.shape[0] - 1)
    for b in range(lo, hi):
        n, label = 0, labels[b]
        for q in range(indptr[rows[b]], indptr[rows[b] + 1]):
            d = indices[q]
            if values[q] == 0 or seen[d] == 0:
                continue
            for m in range(classes.shape[1]):
                k = classes[d, m]
                if k == NOBODY:
                    break
                if k == label or certain[k]:
                    continue
                at = _place(k, keys, mask)
                if keys[at] == 0:
                    keys[at], sums[at], places[n] = k + 1, 0.0, at
                    n += 1
                sums[at] += counts[d, m] / seen[d] * weight[k]
        kept = 0
        for i in range(n):
            k, s = keys[places[i]] - 1, sums[places[i]]
            p = kept
            while p > 0 and _before(k, s, out[b, p - 1], sums, keys, mask):
                if p < P:
                    out[b, p] = out[b, p - 1]
                p -= 1
            if p < P:
                out[b, p] = k
                kept = min(kept + 1, P)
        for p in range(kept, P):
            out[b, p] = label
        for i in range(n):
            keys[places[i]] = 0


@njit(**OPTIONS)
def _before(k: int, s: float, other: int, sums: Array, keys: Array, mask: Any) -> bool:
    """Whether k, with sum s, comes before another class of the table: larger sums first, then smaller numbers."""
    at = _place(other, keys, mask)
    return s > sums[at] or (s == sums[at] and k < other)


@njit(cache=True, **OPTIONS)
def meet(own: Array, shared: Array, mask: Array, last: Array, before: Array) -> None:
    """mask[b, s] = True wherever shared[s] is one of own[b].

    `last` (K,), NOBODY between calls: the last column of each class; `before` (S,): the one before it of the same.
    """
    for s in range(shared.shape[0]):
        before[s], last[shared[s]] = last[shared[s]], s
    for b in range(own.shape[0]):
        for p in range(own.shape[1]):
            s = last[own[b, p]]
            while s != NOBODY:
                mask[b, s] = True
                s = before[s]
    for s in range(shared.shape[0]):
        last[shared[s]] = NOBODY


def pointed(
    csr: tuple[Array, Array, Array], rows: Array, labels: Array, certain: Array, lists: tuple[Array, Array, Array],
    weight: Array, n: int,
) -> Array:  # fmt: skip
    """(B, n): see `point`; `lists` are classes, counts and seen of `tally`."""
    out = np.empty((len(rows), n), np.int64)
    if not out.size:
        return out
    indptr, M = csr[0], lists[0].shape[1]
    lengths = indptr[rows + 1] - indptr[rows]
    most = max(1, min(int(lengths.max()) * M, len(certain)))  # different classes that a row may meet
    cuts = split(len(rows), lambda: lengths * M * 4 + n)
    size = 1 << (2 * most).bit_length()
    kinds = (("pointed", size, np.int64), ("points", size, np.float64), ("places", most, np.int64))
    n_parts = len(cuts) - 1
    arrays = [WORK.array(name, n_parts * each, kind).reshape(n_parts, each) for name, each, kind in kinds]
    scratch = list(zip(*arrays, strict=True))
    run(point, cuts, (*csr, rows, labels, certain, *lists, weight, out), scratch)
    return out
