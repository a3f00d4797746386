"""Scores: one class row at a time for pairs, sixteen classes side by side where rows share their classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..cache import cached_njit
from .batch import Batch
from .dense import before_a_line, score_class
from .lanes import LANES, dot2_lanes, dot_lanes
from .types import OPTIONS, Array, Csr, Groups
from .work import WORK, run, split

SUMS: dict[str, Any] = {**OPTIONS, "fastmath": {"contract", "reassoc", "nsz"}}  # NaN and infinity keep their meaning
CHUNK = 64  # features transposed at a time


@njit(**OPTIONS)
def _dot2(x: Array, row: int, weight: Array, k: int, j: int, sums: Array, coming: int) -> tuple:
    """Two classes against one row: each feature is read once, while another row is sent for."""
    D = x.shape[1]
    first, wide = np.uint64(row * D), D // LANES
    dot2_lanes(sums, x, first, weight, np.uint64(k * D), np.uint64(j * D), wide, np.uint64(coming * D))
    t0 = t1 = x.dtype.type(0)
    for s in range(LANES):
        t0 += sums[s]
        t1 += sums[LANES + s]
    for d in range(wide * LANES, D):
        t0 += weight[k, d] * x[row, d]
        t1 += weight[j, d] * x[row, d]
    return t0, t1


@njit(**SUMS)
def _dot_at(w: Array, index: Array, value: Array) -> float:
    total = w.dtype.type(0)
    for q in range(index.shape[0]):
        total += w[index[q]] * value[q]
    return total


@njit(**SUMS)
def _walk(w: Array) -> float:
    """Read one number of every cache line, in order: the hardware then fetches ahead, as it cannot for gathers."""
    total = w.dtype.type(0)
    for d in range(0, w.shape[0], 16):
        total += w[d]
    return total


@cached_njit(**OPTIONS)
def pairs_sparse(
    lo: int, hi: int, groups_: tuple, csr_: tuple, weight: Array, bias: Array, out: Array, sink: Array
) -> None:
    groups, csr = Groups(*groups_), Csr(*csr_)
    n_nonzero = 0
    for b in range(csr.begin.shape[0]):
        n_nonzero += csr.end[b] - csr.begin[b]
    each = n_nonzero / csr.begin.shape[0]
    for j in range(lo, hi):
        k = groups.classes[j]
        w = weight[k]
        first, last = groups.start[j], groups.start[j + 1]
        if 4 * (last - first) * each > w.shape[0]:
            sink[0] = _walk(w)
        for p in range(first, last):
            b = groups.row[p]
            begin, end = csr.begin[b], csr.end[b]
            out[groups.order[p]] = bias[k] + _dot_at(w, csr.column[begin:end], csr.value[begin:end])


@cached_njit(**OPTIONS)
def pairs_dense(lo: int, hi: int, groups_: tuple, x: Array, at: Array, weight: Array, bias: Array, out: Array) -> None:
    """Row b of the minibatch is x[at[b]]."""
    groups, before = Groups(*groups_), before_a_line(x)
    for j in range(lo, hi):
        k, p, last = groups.classes[j], groups.start[j], groups.start[j + 1]
        score_class(k, p, last, groups.order, groups.row, x, at, before, weight, bias, out)


@cached_njit(**OPTIONS)
def score_rows(classes: Array, x: Array, at: Array, weight: Array, bias: Array, out: Array) -> None:
    """All pairs of rows x[at], row by row: for weights so few that they stay in cache, while rows come from afar."""
    B, C, sums = classes.shape[0], classes.shape[1], np.empty(2 * LANES, x.dtype)
    for b in range(B):
        coming = at[min(b + 2, B - 1)]
        for c in range(0, C, 2):
            k, j = np.int64(classes[b, c]), np.int64(classes[b, min(c + 1, C - 1)])
            t, u = _dot2(x, at[b], weight, k, j, sums, coming)
            out[b, c] = bias[k] + t
            if c + 1 < C:
                out[b, c + 1] = bias[j] + u
            coming = at[b]  # which is here


@cached_njit(**OPTIONS)
def _shared(lo: int, hi: int, classes: Array, csr_: tuple, weight: Array, out: Array, tile: Array, acc: Array) -> None:
    """Blocks lo..hi of 16 classes: their weights side by side in `tile` (16 U,), then rows times tile."""
    csr = Csr(*csr_)
    U = tile.shape[0] // LANES
    numbered = csr.feature.shape[0] > 0
    for block in range(lo, hi):
        first = block * LANES
        width = min(LANES, classes.shape[0] - first)  # lanes beyond it compute what nobody reads
        for u0 in range(0, U, CHUNK):
            u1 = min(u0 + CHUNK, U)
            for s in range(width):
                w = weight[classes[first + s]]
                for u in range(u0, u1):
                    tile[np.uint64(u * LANES + s)] = w[csr.feature[u]] if numbered else w[u]
        for b in range(out.shape[0]):
            begin, end = csr.begin[b], csr.end[b]
            dot_lanes(acc, 0, csr.slot[begin:end], csr.value[begin:end], end - begin, tile)
            for s in range(width):
                out[b, first + s] += acc[s]


def score_pairs(batch: Batch, groups: Groups, weight: Array, bias: Array, out: Array) -> None:
    """out[order] = x[row] . weight[class] + bias[class] for every pair, class by class."""
    G, D = len(groups.classes), weight.shape[1]
    if batch.dense is not None:
        cuts = split(G, lambda: np.diff(groups.start) * (D // 8 + 8))
        at = np.arange(len(batch.dense))
        run(pairs_dense, cuts, (groups, batch.dense, at, weight, bias, out), [()] * (len(cuts) - 1))
    elif batch.csr is not None:
        csr = batch.csr
        cuts = split(G, lambda: np.diff(groups.start) * (len(csr.value) // len(batch.rows) + 8))
        sinks = WORK.array("sink", (len(cuts) - 1) * 64, weight.dtype).reshape(-1, 64)
        run(pairs_sparse, cuts, (groups, csr, weight, bias, out), [(s,) for s in sinks])


def score_shared(csr: Csr, classes: Array, weight: Array, out: Array) -> None:
    """out[b, c] += x[b] . weight[classes[c]]: sparse rows times a dense tile, vectorised over classes."""
    size = (len(csr.feature) or weight.shape[1]) * LANES
    n = -(-len(classes) // LANES)
    cuts = split(n, lambda: np.full(n, 2 * len(csr.value) + size))
    tiles = WORK.array("tile", (len(cuts) - 1) * size, weight.dtype).reshape(-1, size)
    sums = WORK.array("sums", (len(cuts) - 1) * 64, weight.dtype).reshape(-1, 64)
    run(_shared, cuts, (classes, csr, weight, out), list(zip(tiles, sums, strict=True)))
