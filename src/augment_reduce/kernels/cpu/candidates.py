"""Candidate classes of a row from its features: lists of classes for each feature, and the sums over a row's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..cache import cached_njit
from .row_groups import NONE
from .types import OPTIONS, PART, Array
from .work import WORK, run, split

AT_ONCE = 64  # weights
BEFORE_ALL = 1e9  # times the score of a class that came with the very same features


@cached_njit(**OPTIONS)
def count_labels(
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
                if classes[d, m] == k or classes[d, m] == NONE:
                    rarest = m
                    break
                if counts[d, m] < counts[d, rarest]:
                    rarest = m
            classes[d, rarest] = k
            counts[d, rarest] += 1


class DuplicateLabels(NamedTuple):
    """Rows that have the same features, at least one, and several labels."""

    group: Array  # of each row of X; NONE: none
    start: Array
    labels: Array  # of group g: labels[start[g]:start[g + 1]], each once
    share: Array  # of the group's rows that have this label
    most: int  # labels of a group

    @classmethod
    def none(cls) -> DuplicateLabels:
        return cls(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0), 0)


def labels_of_duplicates(
    equal: Array, rows: Array, labels: Array, certain: Array, weight: Array, limit: int
) -> DuplicateLabels:
    """Of each group of `RowGroups.equal` the `limit` labels of largest share times weight that are not certain.

    Should the hashes of two groups have collided, a row has classes that say nothing: no harm.
    """
    group = equal[rows]
    n_groups = int(group.max(initial=-1)) + 1
    several = np.bincount(group[group != NONE], minlength=n_groups + 1) > 1  # the last, NONE, is not
    grouped = several[group]  # the others have no second label, and are most of the rows
    rows, labels, group = rows[grouped], labels[grouped], group[grouped]
    order = np.lexsort((labels, group))
    g, k = group[order], labels[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (g[1:] != g[:-1]) | (k[1:] != k[:-1])
    first = np.flatnonzero(new)
    g, k, times = g[first], k[first], np.diff(np.append(first, len(order)))
    share = times / np.bincount(g, times, minlength=1)[g]
    several = np.bincount(g, minlength=n_groups) > 1
    useful = several[g] & ~certain[k]
    g, k, share = g[useful], k[useful], share[useful]
    ranked = np.lexsort((k, -share * weight[k], g))
    g, k, share = g[ranked], k[ranked], share[ranked]
    place = np.arange(len(g)) - np.searchsorted(g, g)  # in its group
    g, k, share = (values[place < limit] for values in (g, k, share))
    groups, start = np.unique(g, return_index=True)
    number = np.full(n_groups, NONE, np.int64)
    number[groups] = np.arange(len(groups))
    of_row = np.full(len(equal), NONE, np.int64)
    of_row[rows] = number[group]
    start = np.append(start, len(g))
    return DuplicateLabels(of_row, start, k, share, int(np.diff(start).max(initial=0)))


@njit(**OPTIONS)
def _place(k: int, keys: Array, mask: Any) -> Any:
    """Where class k stands in the table, or where it would."""
    at = (np.uint64(k) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & mask
    while keys[at] != 0 and keys[at] != k + 1:
        at = (at + np.uint64(1)) & mask
    return at


@cached_njit(**OPTIONS)
def rank_candidates(
    lo: int, hi: int, indptr: Array, indices: Array, values: Array, rows: Array, labels: Array, certain: Array,
    classes: Array, counts: Array, seen: Array, group: Array, start: Array, group_labels: Array, share: Array,
    weight: Array, n_own: int, out: Array, found: Array, keys: Array, sums: Array, places: Array,
) -> None:  # fmt: skip
    """out (B, P): the n_own classes of largest sum_d counts[d, k] / seen[d] weight[k], certain ones left out.

    The labels of rows with the same features (`labels_of_duplicates`) come before all others, by their share times
    weight, and where they are more than n_own as many as there is room for. `found` (B,) says how many, the row's label
    fills the rest. `keys` (class + 1; zero between calls) and `sums` are a hash table with room
    for twice the candidates of a row; `places` says where it was written.
    """
    mask = np.uint64(keys.shape[0] - 1)
    for b in range(lo, hi):
        n = 0
        g = group[rows[b]] if rows[b] < group.shape[0] else NONE
        begin, end = (start[g], start[g + 1]) if g != NONE else (0, 0)
        for i in range(begin, end):
            k = group_labels[i]
            if not certain[k]:
                at = _place(k, keys, mask)
                keys[at], sums[at], places[n] = k + 1, BEFORE_ALL * share[i] * weight[k], at
                n += 1
        P = min(max(n, n_own), out.shape[1])
        for q in range(indptr[rows[b]], indptr[rows[b] + 1]):
            d = indices[q]
            if values[q] == 0 or seen[d] == 0:
                continue
            for m in range(classes.shape[1]):
                k = np.int64(classes[d, m])
                if k == NONE:
                    break
                if certain[k]:
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
        found[b] = kept
        for p in range(kept, out.shape[1]):
            out[b, p] = labels[b]
        for i in range(n):
            keys[places[i]] = 0


@njit(**PART)
def _before(k: int, s: float, other: int, sums: Array, keys: Array, mask: Any) -> bool:
    """Whether k, with sum s, comes before another class of the table: larger sums first, then smaller numbers."""
    at = _place(other, keys, mask)
    return s > sums[at] or (s == sums[at] and k < other)


@cached_njit(**OPTIONS)
def link(shared: Array, last: Array, before: Array) -> None:
    """last[k] (K,), NONE before: the last column of shared class k; before[s] (S,): the one before s of the same."""
    for s in range(shared.shape[0]):
        before[s], last[shared[s]] = last[shared[s]], s


@cached_njit(**OPTIONS)
def mark_shared(own: Array, found: Array, shared: Array, mask: Array, last: Array, before: Array) -> None:
    """mask[b, s] = True wherever shared[s] is one of the first found[b] of own[b]; `last`, `before`: see `link`."""
    link(shared, last, before)
    for b in range(own.shape[0]):
        for p in range(found[b]):
            s = last[own[b, p]]
            while s != NONE:
                mask[b, s] = True
                s = before[s]
    for s in range(shared.shape[0]):
        last[shared[s]] = NONE


@njit(**PART)
def _list(k: int, w: Any, classes: Array, values: Array) -> Any:
    """Put class k into a list that is not full, or in place of the lightest. Returns what the next has to exceed."""
    lightest = 0
    for m in range(classes.shape[0]):
        if classes[m] == NONE:
            lightest = m
            break
        if values[m] < values[lightest]:
            lightest = m
    classes[lightest], values[lightest] = k, w
    if classes[-1] == NONE:
        return values.dtype.type(0)
    least = values[0]
    for m in range(1, values.shape[0]):
        least = min(least, values[m])
    return least


@cached_njit(**OPTIONS)
def list_top_weights(
    lo: int, hi: int, weight: Array, certain: Array, classes: Array, values: Array, least: Array
) -> None:
    """Features lo..hi: the M classes whose weight for it is largest, above zero, and these weights; O(K) a feature.

    `classes`, `values` (D, M), NONE for none. Most weights are not among the largest: AT_ONCE of them are compared
    before any is looked at. `certain` classes are not listed.
    """
    for d in range(lo, hi):
        least[d] = 0
        for m in range(classes.shape[1]):
            classes[d, m], values[d, m] = NONE, 0
    for k in range(weight.shape[0]):
        if certain[k]:
            continue
        for first in range(lo, hi, AT_ONCE):
            last, more = min(first + AT_ONCE, hi), 0
            w, floor = weight[k, first:last], least[first:last]
            for i in range(last - first):
                more += w[i] > floor[i]
            if more > 0:
                for i in range(last - first):
                    if w[i] > floor[i]:
                        floor[i] = _list(k, w[i], classes[first + i], values[first + i])


def top_weight_classes(weight: Array, certain: Array, classes: Array, values: Array) -> None:
    D = weight.shape[1]
    cuts = split(D, lambda: np.full(D, len(weight)))
    least = np.empty(D, weight.dtype)
    run(list_top_weights, cuts, (weight, certain, classes, values, least), [()] * (len(cuts) - 1))


@cached_njit(**OPTIONS)
def append_new(own: Array, found: Array, more: Array, n_more: Array, labels: Array, out: Array) -> None:
    """out (B, P + Q): the first found[b] of own[b], then those of more[b] that are not among them, then the label;
    `found` says how many."""
    for b in range(own.shape[0]):
        n = found[b]
        for p in range(n):  # loops: what Numba makes of slices takes two seconds to compile
            out[b, p] = own[b, p]
        for q in range(n_more[b]):
            new = True
            for p in range(found[b]):
                new &= own[b, p] != more[b, q]
            out[b, n] = more[b, q]
            n += new
        for p in range(n, out.shape[1]):
            out[b, p] = labels[b]
        found[b] = n


def candidates_of_rows(
    csr: tuple[Array, Array, Array], rows: Array, labels: Array, certain: Array, lists: tuple[Array, Array, Array],
    same: DuplicateLabels, weight: Array, n_own: int,
) -> tuple[Array, Array]:  # fmt: skip
    """(B, P), (B,): see `rank_candidates`; `lists` are classes, counts and seen of `count_labels`, `same` is what
    `labels_of_duplicates` found."""
    out, found = np.empty((len(rows), max(n_own, same.most)), np.int64), np.zeros(len(rows), np.int64)
    if not out.size:
        return out, found
    indptr, M = csr[0], lists[0].shape[1]
    lengths = indptr[rows + 1] - indptr[rows]
    most = max(1, min(int(lengths.max()) * M + same.most, len(certain)))  # different candidates that a row may have
    cuts = split(len(rows), lambda: lengths * M * 4 + n_own)
    size = 1 << (2 * most).bit_length()
    kinds = (("candidates", size, np.int64), ("candidate scores", size, np.float64), ("places", most, np.int64))
    n_parts = len(cuts) - 1
    arrays = [WORK.array(name, n_parts * each, kind).reshape(n_parts, each) for name, each, kind in kinds]
    scratch = list(zip(*arrays, strict=True))
    run(rank_candidates, cuts, (*csr, rows, labels, certain, *lists, *same[:4], weight, n_own, out, found), scratch)
    return np.ascontiguousarray(out[:, : max(1, int(found.max()))]), found
