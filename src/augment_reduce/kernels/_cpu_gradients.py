"""E and M step of a stretch of rows whose scores are there, inside a compiled step: from scores to their gradients."""

from __future__ import annotations

import numpy as np
from numba import njit

from ._cpu_classes import with_label
from ._cpu_lanes import prefetch_to_write
from ._cpu_local import SOFTMAX, draw_e_and_m, e_and_m
from ._cpu_math import row_sum
from ._cpu_types import OPTIONS, Array

NOT_FINITE = -1  # what rows do instead of a count


@njit(**OPTIONS)
def _all_finite(psi: Array) -> bool:
    """By their sum, as a rule; finite scores can have one that is not."""
    return np.isfinite(row_sum(psi.reshape(-1))) or np.isfinite(psi).all()


@njit(**OPTIONS)
def _move(lo: int, hi: int, rows: Array, held: Array, kept: Array, back: bool) -> None:
    for b in range(lo, hi if held.shape[0] > 0 else lo):
        if back:
            held[rows[b]] = kept[b]
        else:
            kept[b] = held[rows[b]]


@njit(**OPTIONS)
def _keep(lo: int, hi: int, rows: Array, state: tuple, kept: tuple, back: bool) -> None:
    """Put the local parameters of rows lo..hi aside, or back."""
    _move(lo, hi, rows, state[0], kept[0], back)
    _move(lo, hi, rows, state[1], kept[1], back)
    _move(lo, hi, rows, state[2], kept[2], back)


@njit(**OPTIONS)
def send_for_local(lo: int, hi: int, rows: Array, state: tuple) -> None:
    """Ask for the local parameters of rows lo..hi: they lie far apart, and beside those of rows that others move."""
    for b in range(lo, hi):
        prefetch_to_write(state[0], rows[b])
        prefetch_to_write(state[2], rows[b])
    for b in range(lo, hi if state[1].shape[0] > 0 else lo):
        prefetch_to_write(state[1], rows[b])


@njit(**OPTIONS)
def _gradients(
    lo: int, hi: int, rows: Array, weights: Array, local: tuple, psi: Array, grads: Array, seeds: Array, bound: Array
) -> int:
    """E and M step of rows lo..hi: derivatives by all scores in `grads`, times how much each row counts: N / B, and its
    weight where there are weights. Returns how often the floor acted."""
    per_row, weigh, model, state, step, flags = local
    B, S, hits = hi - lo, psi.shape[1] - 1, 0
    both, scales = np.empty((2, B, S), psi.dtype), np.empty(B, psi.dtype)
    gap, grad = both[0], both[1]
    for b in range(B):
        scales[b] = weights[rows[lo + b]] * per_row if weights.shape[0] > 0 else per_row
        for s in range(S):
            gap[b, s] = psi[lo + b, 1 + s] - psi[lo + b, 0]
    own_bound = bound[lo:hi] if bound.shape[0] > 0 else bound
    if model == SOFTMAX:
        hits = e_and_m((state[0], state[2]), rows[lo:hi], gap, weigh[0], 0, step, flags, own_bound, grad)
    else:
        own_seeds = (seeds[1], seeds[2])
        draw_e_and_m(model, state, rows[lo:hi], gap, weigh[1], 0, step, flags, own_seeds, lo, own_bound, grad)
    with_label(grad, scales, 1, grads[lo:hi])
    return hits


@njit(**OPTIONS)
def to_gradients(
    lo: int, hi: int, rows: Array, weights: Array, local: tuple, scored: tuple, seeds: Array, bound: Array
) -> int:
    """E and M step of rows lo..hi, whose local parameters are put aside before; returns how often the floor acted, or
    NOT_FINITE, with nothing done, if a score is not finite."""
    psi, grads, kept = scored
    if not _all_finite(psi[lo:hi]):
        return NOT_FINITE
    _keep(lo, hi, rows, local[3], kept, False)
    return _gradients(lo, hi, rows, weights, local, psi, grads, seeds, bound)


@njit(**OPTIONS)
def put_back(lo: int, hi: int, rows: Array, state: tuple, kept: tuple) -> None:
    """Undo what `to_gradients` did to the local parameters of rows lo..hi."""
    _keep(lo, hi, rows, state, kept, True)


@njit(**OPTIONS)
def all_well(tid: int, rows: Array, state: tuple, kept: tuple, well: Array) -> bool:
    """Whether no thread met a score that is not finite. If one did the step will not be taken, and the first puts back
    the local parameters of those that did not."""
    B, m = rows.shape[0], well.shape[0]
    if well.all():
        return True
    for j in range(m if tid == 0 else 0):
        if well[j]:
            put_back(B * j // m, B * (j + 1) // m, rows, state, kept)
    return False


@njit(**OPTIONS)
def score_biases(lo: int, hi: int, pairs: Array, bias: Array, psi: Array) -> None:
    for b in range(lo, hi):
        for s in range(pairs.shape[1]):
            psi[b, s] = bias[pairs[b, s]]
