"""Reduce, solve and gradient of a cross-fitted softmax with shared classes, group by group of duplicate rows.

    eta_A = e_y + sum_k stands_k e_k     pull = sum over rows and halves of given_k e_k / eta_A     e_k = e^(psi_k - m)

The exponentials of a group are those of all its rows: what differs is the label, whose own columns are taken out of the
sums, in float64; where they are nearly all of a sum the rest of it is summed again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..cache import cached_njit
from .math import exp, row_max, row_sum
from .types import OPTIONS, PART, Array

NOBODY = -1
SMALLEST = 1e-30  # as in `local.cross_fitting`
NEARLY_ALL = 1e-6  # of a sum: what is left when so much of it is taken away has lost its digits


@njit(**PART)
def hide(psi: Array, own: Array, n_own: int, S: int, last: Array, before: Array) -> None:
    """-inf for a shared class that the group has for itself, and for the places that none of its own fills."""
    for p in range(n_own):
        s = last[own[p]]
        while s != NOBODY:
            psi[s] = -np.inf
            s = before[s]
    for p in range(n_own, own.shape[0]):
        psi[S + p] = -np.inf


@njit(**PART)
def columns_of(label: int, own: Array, n_own: int, S: int, last: Array, before: Array, out: Array) -> int:
    """The columns in which the label stands, and how many."""
    n, s = 0, last[label]
    while s != NOBODY:
        out[n] = s
        n, s = n + 1, before[s]
    for p in range(n_own):
        if own[p] == label:
            out[n] = S + p
            n += 1
    return n


@njit(**PART)
def shares_of_group(psi: Array, omega: Array, scale: float, out: Array) -> None:
    """The weight of a group in the prior of its classes; none where a class is hidden."""
    for k in range(psi.shape[0]):
        out[k] = omega[k] * scale if psi[k] > -np.inf else 0


@njit(**PART)
def share_of_label(columns: Array, omega: Array, scale: float, out: Array) -> None:
    """Takes out of it what a row's label would have beside the label's own."""
    for i in range(columns.shape[0]):
        if out[columns[i]] > 0:
            out[columns[i]] -= omega[columns[i]] * scale


@njit(**OPTIONS)
def _sums(e: Array, weights: Array, out: Array) -> None:
    """out[i] = sum_k weights[i, k] e_k in float64, eight partial sums side by side."""
    for i in range(weights.shape[0]):
        w, part = weights[i], np.zeros(8)
        for k in range(0, e.shape[0] // 8 * 8, 8):
            for j in range(8):
                part[j] += np.float64(w[k + j]) * np.float64(e[k + j])
        for k in range(e.shape[0] // 8 * 8, e.shape[0]):
            part[0] += np.float64(w[k]) * np.float64(e[k])
        out[i] = row_sum(part)


@njit(**OPTIONS)
def _rest(total: float, e: Array, weight: Array, columns: Array, n: int) -> float:
    """total = sum_k weight_k e_k without n of its columns."""
    rest = total
    for i in range(n):
        rest -= np.float64(weight[columns[i]]) * np.float64(e[columns[i]])
    if n == 0 or rest > NEARLY_ALL * total:
        return rest
    rest = 0.0
    for k in range(e.shape[0]):
        counts = True
        for i in range(n):
            counts = counts and k != columns[i]
        if counts:
            rest += np.float64(weight[k]) * np.float64(e[k])
    return rest


@cached_njit(**OPTIONS)
def cross_fitted_softmax(
    lo: int, hi: int, psi: Array, psi_y: Array, start: Array, labels: Array, own: Array, n_own: Array, last: Array,
    before: Array, stands: Array, given: Array, omega: Array, scales: Array, each: int, prior_scale: float,
    floor: float, grad: Array, grad_y: Array, shares: Array, bound: Array, hits: Array, columns: Array, back: Array,
) -> None:  # fmt: skip
    """Groups lo..hi, of rows start[u]:start[u + 1]; psi (U, S + P) is overwritten.

    - `stands`, `given` (H, S + P): the weights of each half, `omega` (S + P,) their mean, for the prior;
    - `grad` (U, S + P), `grad_y` (B,): derivatives by the scores, times scales[b each];
    - `shares` (U, S + P): the group's weight in the prior; `bound` (B,): may be empty, as may `shares`;
    - `last` (K,), `before` (S,): see `candidates.link`; `columns`, `back` (zero between calls): scratch of S + P.
    """
    H, C = stands.shape
    S, share, least = C - own.shape[1], 1.0 / stands.shape[0], np.exp(-floor)
    all_stands, all_given, pull = np.zeros(H), np.zeros(H), np.zeros(H)
    for u in range(lo, hi):
        e = psi[u]
        hide(e, own[u], n_own[u], S, last, before)
        if shares.shape[0] > 0:
            shares_of_group(e, omega, prior_scale * (start[u + 1] - start[u]), shares[u])
        top = row_max(e, e.dtype.type(-np.inf))
        top = top if top > -np.inf else e.dtype.type(0)
        for k in range(C):
            e[k] = exp(e[k] - top)
        _sums(e, stands, all_stands)
        _sums(e, given, all_given)
        pull[:] = 0.0
        for b in range(start[u], start[u + 1]):
            ahead = np.float64(psi_y[b]) - np.float64(top)
            unit, e_y = (np.exp(-ahead), 1.0) if ahead > 0 else (1.0, np.exp(ahead))
            n = columns_of(labels[b], own[u], n_own[u], S, last, before, columns)
            scale, total = np.float64(scales[b * each]), 0.0
            if bound.shape[0] > 0:
                bound[b] = 0
            for h in range(H):
                rest = _rest(all_stands[h], e, stands[h], columns, n)
                rivals = unit * _rest(all_given[h], e, given[h], columns, n)
                eta = max(e_y + unit * rest, SMALLEST)
                if bound.shape[0] > 0:
                    bound[b] += share * (1.0 - max(0.0, -ahead) - np.log(eta) - (e_y + rivals) / eta)
                if (e_y + rivals) * least > eta:
                    hits[u] += 1
                    eta = (e_y + rivals) * least
                by = scale * share / eta
                total += by * rivals
                pull[h] += by * unit
                for i in range(n):
                    back[columns[i]] += by * unit * np.float64(given[h, columns[i]])
            grad_y[b] = total
            if shares.shape[0] > 0:
                share_of_label(columns[:n], omega, prior_scale, shares[u])
        for k in range(C):
            towards = back[k]
            for h in range(H):
                towards -= pull[h] * np.float64(given[h, k])
            grad[u, k] = np.float64(e[k]) * towards
            back[k] = 0.0
