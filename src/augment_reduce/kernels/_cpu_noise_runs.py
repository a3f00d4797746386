"""E and M step of `crossed.CrossFitted` for probit and logistic with shared classes, run by run as in `_cpu_runs`.

    q_A = N(mu, 1 / precision), the best for half A, by Newton     pull_k = given_k E_q_A[(phi / Phi)(eps - gap_k)]

`gaussian` and `crossed` say the same in torch operations, which are the oracle, and would hold B x S x 5 numbers for it
several times over. Here a row's gaps with one half of the classes stay in the first cache from its first move to its
pulls. Scalars are float64, whatever the scores are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..gaussian import ABOVE, BELOW, DAMPED, HALVINGS, LEAST_PRECISION
from ._cpu_math import row_max, row_sum
from ._cpu_noise_rows import add_hazards, d2log_prob, dlog_prob, log_cdfs, log_prob, slopes
from ._cpu_runs import columns_of, hide, share_of_label, shares_of_run
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit

LOG_2, LOG_2_PI_E = np.log(2.0), np.log(2.0 * np.pi) + 1.0


@njit(**OPTIONS)
def _beyond(eps: float, gap: Array, out: Array) -> None:
    """out = eps - gap."""
    of_kind = gap.dtype.type(eps)
    for k in range(gap.shape[0]):
        out[k] = of_kind - gap[k]


@njit(**OPTIONS)
def _start(model: int, gap: Array, omega: Array, x: Array, terms: Array) -> float:
    """`gaussian.median_of_the_best_rival`, and no less than zero."""
    number = gap.dtype.type
    top = np.float64(row_max(gap, number(0)))
    low, high = top - BELOW, top + ABOVE
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        _beyond(middle, gap, x)
        log_cdfs(model, x, omega, terms)  # not in place, which the compiler could not do in vectors
        if row_sum(terms) > -LOG_2:
            high = middle
        else:
            low = middle
    return max(0.5 * (low + high), 0.0)


@njit(**OPTIONS)
def _best_gaussian(model: int, gap: Array, omega: Array, nodes: tuple, n_moves: int, scratch: Array) -> tuple:
    """`gaussian.fit_gaussian`: (mu, precision)."""
    (node, weight), n = nodes, gap.shape[0]
    slope, bend, x = scratch[0, :n], scratch[1, :n], scratch[5, :n]
    mu, precision = _start(model, gap, omega, x, slope), 1.0
    for _ in range(n_moves):
        deviation, first, second = 1.0 / np.sqrt(precision), 0.0, 0.0
        for j in range(node.shape[0]):
            eps = mu + node[j] * deviation
            _beyond(eps, gap, x)
            slopes(model, x, omega, slope, bend)
            first += weight[j] * (dlog_prob(model, eps) + np.float64(row_sum(slope)))
            second += weight[j] * (d2log_prob(model, eps) + np.float64(row_sum(bend)))
        new = (1.0 - DAMPED) * precision + DAMPED * max(-second, LEAST_PRECISION)
        reach = 2.0 / np.sqrt(max(precision, new))
        mu, precision = mu + min(max(DAMPED * first / new, -reach), reach), new
    return mu, precision


@njit(**OPTIONS)
def _pulls(model: int, q: tuple, nodes: tuple, gap: Array, omega: Array, floor: float, pull: Array, x: Array) -> tuple:
    """pull = omega E_q[phi / Phi], kept as low as the floor says; their sum, and whether the floor acted."""
    (mu, precision), (node, weight), number = q, nodes, gap.dtype.type
    deviation, expected = 1.0 / np.sqrt(precision), 0.0
    pull[:] = 0
    for j in range(node.shape[0]):
        eps = mu + node[j] * deviation
        expected -= weight[j] * dlog_prob(model, eps)
        _beyond(eps, gap, x)
        add_hazards(model, x, number(weight[j]), pull)
    for k in range(pull.shape[0]):
        pull[k] *= omega[k]
    total, most = np.float64(row_sum(pull)), np.exp(floor) * (1.0 + max(expected, 0.0)) - 1.0
    if total <= most:
        return total, False
    for k in range(pull.shape[0]):
        pull[k] *= number(most / total)
    return most, True


@njit(**OPTIONS)
def _bound(model: int, q: tuple, nodes: tuple, gap: Array, omega: Array, x: Array, terms: Array) -> float:
    """Eq. (7) at q, by its nodes."""
    (mu, precision), (node, weight) = q, nodes
    deviation, value = 1.0 / np.sqrt(precision), 0.5 * (LOG_2_PI_E - np.log(precision))
    for j in range(node.shape[0]):
        eps = mu + node[j] * deviation
        _beyond(eps, gap, x)
        log_cdfs(model, x, omega, terms)
        value += weight[j] * (log_prob(model, eps) + np.float64(row_sum(terms)))
    return value


@njit(**OPTIONS)
def _gaps(psi: Array, psi_y: Any, half: tuple, h: int, gap: Array, weight: Array, at: Array) -> int:
    """Gaps, weights and columns of the classes that half h gives any weight and that are not hidden; how many."""
    columns, weights, n = half[0], half[1], 0
    for i in range(half[2][h]):
        k = columns[h, i]
        gap[n], weight[n], at[n] = psi[k] - psi_y, weights[h, i], k
        n += psi[k] > -np.inf
    return n


@cached_njit(**OPTIONS)
def cross_fitted_noise_runs(
    lo: int, hi: int, psi: Array, psi_y: Array, start: Array, labels: Array, own: Array, n_own: Array, last: Array,
    before: Array, stands: tuple, given: tuple, omega: Array, scales: Array, each: int, prior_scale: float,
    floor: float, grad: Array, grad_y: Array, shares: Array, bound: Array, hits: Array, model: int, nodes: tuple,
    n_moves: int, columns: Array, back: Array, scratch: Array,
) -> None:  # fmt: skip
    """As `_cpu_runs.cross_fitted_runs`, but for:

    - `stands`, `given`: of each half (columns, weights, how many of them), those with any weight first;
    - `nodes`: (node, weight) of a standard Normal; `columns` (2, S + P), `scratch` (6, S + P).
    """
    H, S, share = stands[0].shape[0], psi.shape[1] - own.shape[1], 1.0 / stands[0].shape[0]
    pull, gap, weight, hidden, x, at = scratch[0], scratch[2], scratch[3], scratch[4], scratch[5], columns[1]
    for u in range(lo, hi):
        e = psi[u]
        hide(e, own[u], n_own[u], S, last, before)
        if shares.shape[0] > 0:
            shares_of_run(e, omega, prior_scale * (start[u + 1] - start[u]), shares[u])
        for b in range(start[u], start[u + 1]):
            n = columns_of(labels[b], own[u], n_own[u], S, last, before, columns[0])
            if shares.shape[0] > 0:
                share_of_label(columns[0, :n], omega, prior_scale, shares[u])
            for i in range(n):
                hidden[i], e[columns[0, i]] = e[columns[0, i]], -np.inf
            total, value, scale = 0.0, 0.0, np.float64(scales[b * each]) * share
            for h in range(H):
                m = _gaps(e, psi_y[b], stands, h, gap, weight, at)
                q = _best_gaussian(model, gap[:m], weight[:m], nodes, n_moves, scratch)
                m = _gaps(e, psi_y[b], given, h, gap, weight, at)
                if bound.shape[0] > 0:
                    value += share * _bound(model, q, nodes, gap[:m], weight[:m], x[:m], pull[:m])
                pulled, floored = _pulls(model, q, nodes, gap[:m], weight[:m], floor, pull[:m], x[:m])
                total, hits[u] = total + scale * pulled, hits[u] + floored
                for i in range(m):
                    back[at[i]] += scale * np.float64(pull[i])
            grad_y[b] = total
            if bound.shape[0] > 0:
                bound[b] = value
            for i in range(n):
                e[columns[0, i]] = hidden[i]
        for k in range(back.shape[0]):
            grad[u, k] = -back[k]
            back[k] = 0.0
