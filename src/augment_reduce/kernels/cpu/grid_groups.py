"""Reduce, solve and gradient of a cross-fitted q on a grid, group by group of rows with the same features.

    q_A on nodes eps_j:  q_j ~ w_j phi(eps_j) exp sum_{k in A} stands_k log Phi(eps_j - gap_k)
    pull_k = given_k sum_j q_j (phi / Phi)(eps_j - gap_k)         k in B

`model.grid` and `local.cross_fitting` say the same in torch operations, which are the oracle, and would hold B x S x J
numbers for it. Here a row's gaps with one half of the classes stay in the first cache from the search for the mode to
the pulls. Scalars are float64, whatever the scores are. Generated from the scalar functions of a noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from ..constants import ABOVE, BELOW, CLOSE, HALVINGS, LEAST_CURVATURE, LEAST_SHARE, MOVES
from .math import row_max, row_sum
from .scalars import Scalars
from .softmax_groups import columns_of, hide, share_of_label, shares_of_group
from .types import OPTIONS, Array

N_SCRATCH = 5  # lines of S + P numbers


@njit(**OPTIONS)
def _gaps(psi: Array, psi_y: Any, half: tuple, h: int, gap: Array, weight: Array, at: Array) -> int:
    """Gaps, weights and columns of the classes that half h gives any weight and that are not hidden; how many."""
    columns, weights, n = half[0], half[1], 0
    for i in range(half[2][h]):
        k = columns[h, i]
        gap[n], weight[n], at[n] = psi[k] - psi_y, weights[h, i], k
        n += psi[k] > -np.inf
    return n


def _slope_of(noise: Scalars) -> Callable[..., float]:
    dlog_cdf, dlog_prob = noise.dlog_cdf, noise.dlog_prob

    @njit(**OPTIONS)
    def slope(eps: float, gap: Array, omega: Array, terms: Array) -> float:
        """f'(eps)."""
        at = gap.dtype.type(eps)
        for k in range(gap.shape[0]):
            terms[k] = omega[k] * dlog_cdf(at - gap[k])
        return dlog_prob(eps) + np.float64(row_sum(terms[: gap.shape[0]]))

    return slope


def _bend_of(noise: Scalars, slope: Callable[..., float], smooth: bool) -> Callable[..., float]:
    d2log_cdf, d2log_prob = noise.d2log_cdf, noise.d2log_prob

    @njit(**OPTIONS)
    def precision(eps: float, gap: Array, omega: Array, terms: Array) -> float:
        """-f''(eps), or as in `model.grid.slope_at` where f need not be smooth."""
        at = gap.dtype.type(eps)
        for k in range(gap.shape[0]):
            terms[k] = omega[k] * d2log_cdf(at - gap[k])
        bend = d2log_prob(eps) + np.float64(row_sum(terms[: gap.shape[0]]))
        if not smooth:
            fall = slope(eps + 1.0, gap, omega, terms) - slope(eps - 1.0, gap, omega, terms)
            return max(-min(bend, 0.5 * fall), LEAST_CURVATURE)
        return max(-bend, LEAST_CURVATURE)

    return precision


def _place_of(slope: Callable[..., float], precision: Callable[..., float]) -> Callable[..., tuple]:
    @njit(**OPTIONS)
    def place(gap: Array, omega: Array, terms: Array) -> tuple:
        """`model.grid.find_place`: the mode, and the deviation there."""
        low, high = np.float64(-BELOW), np.float64(row_max(gap, gap.dtype.type(0))) + ABOVE
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if slope(middle, gap, omega, terms) > 0.0:
                low = middle
            else:
                high = middle
        mode = 0.5 * (low + high)
        bend = 1.0
        for _ in range(MOVES):
            here, bend = slope(mode, gap, omega, terms), precision(mode, gap, omega, terms)
            if here > 0.0:
                low = mode
            else:
                high = mode
            mode = min(max(mode + here / bend, low), high)
            if abs(here) < CLOSE * np.sqrt(bend):
                break
        return mode, 1.0 / np.sqrt(bend)

    return place


def _shares_of(noise: Scalars, place: Callable[..., tuple]) -> Callable[..., tuple]:
    log_prob, log_cdf = noise.log_prob, noise.log_cdf

    @njit(**OPTIONS)
    def shares(gap: Array, omega: Array, nodes: tuple, share: Array, terms: Array) -> tuple:
        """share_j = q_j of the best q for these classes; its mode, deviation and entropy."""
        (node, log_step), top, total, entropy = nodes, -np.inf, 0.0, 0.0
        mode, deviation = place(gap, omega, terms)
        for j in range(node.shape[0]):
            eps = mode + deviation * node[j]
            at = gap.dtype.type(eps)
            for k in range(gap.shape[0]):
                terms[k] = omega[k] * log_cdf(at - gap[k])
            share[j] = log_prob(eps) + np.float64(row_sum(terms[: gap.shape[0]])) + log_step[j]
            top = max(top, share[j])
        for j in range(node.shape[0]):
            share[j] = np.exp(share[j] - top)
            total += share[j]
        left = 0.0
        for j in range(node.shape[0]):
            share[j] = share[j] / total if share[j] >= LEAST_SHARE * total else 0.0
            left += share[j]
        for j in range(node.shape[0]):
            share[j] /= left
            if share[j] > 0.0:
                entropy += share[j] * (log_step[j] - np.log(share[j]))
        return mode, deviation, entropy + np.log(deviation)

    return shares


def _bound_of(noise: Scalars) -> Callable[..., float]:
    log_prob, log_cdf = noise.log_prob, noise.log_cdf

    @njit(**OPTIONS)
    def bound(q: tuple, node: Array, share: Array, gap: Array, omega: Array, terms: Array) -> float:
        """Eq. (7) at q, by its nodes."""
        mode, deviation, value = q
        for j in range(node.shape[0]):
            if share[j] > 0.0:
                eps = mode + deviation * node[j]
                at = gap.dtype.type(eps)
                for k in range(gap.shape[0]):
                    terms[k] = omega[k] * log_cdf(at - gap[k])
                value += share[j] * (log_prob(eps) + np.float64(row_sum(terms[: gap.shape[0]])))
        return value

    return bound


def _pulls_of(noise: Scalars) -> Callable[..., tuple]:
    dlog_prob, dlog_cdf = noise.dlog_prob, noise.dlog_cdf

    @njit(**OPTIONS)
    def pulls(q: tuple, node: Array, share: Array, gap: Array, omega: Array, floor: float, pull: Array) -> tuple:
        """pull = omega E_q[phi / Phi], kept as low as the floor says; their sum, and whether the floor acted."""
        (mode, deviation, _), expected, number = q, 0.0, gap.dtype.type
        pull[:] = 0
        for j in range(node.shape[0]):
            if share[j] > 0.0:
                eps = mode + deviation * node[j]
                at, by = number(eps), number(share[j])
                expected -= share[j] * dlog_prob(eps)
                for k in range(gap.shape[0]):
                    pull[k] += by * dlog_cdf(at - gap[k])
        for k in range(pull.shape[0]):
            pull[k] *= omega[k]
        total, most = np.float64(row_sum(pull)), np.exp(floor) * (1.0 + max(expected, 0.0)) - 1.0
        if total <= most:
            return total, False
        for k in range(pull.shape[0]):
            pull[k] *= number(most / total)
        return most, True

    return pulls


def grid_groups(noise: Scalars, smooth: bool) -> Callable[..., None]:
    """The kernel for a noise, to be compiled; `smooth`: as `Noise.smooth_log_concave`."""
    slope = _slope_of(noise)
    shares = _shares_of(noise, _place_of(slope, _bend_of(noise, slope, smooth)))
    bound_at, pulls = _bound_of(noise), _pulls_of(noise)

    def cross_fitted_grid(
        lo: int, hi: int, psi: Array, psi_y: Array, start: Array, labels: Array, own: Array, n_own: Array, last: Array,
        before: Array, stands: tuple, given: tuple, omega: Array, scales: Array, each: int, prior_scale: float,
        floor: float, grad: Array, grad_y: Array, prior_shares: Array, bound: Array, hits: Array, nodes: tuple,
        columns: Array, back: Array, scratch: Array,
    ) -> None:  # fmt: skip
        """As `softmax_groups.cross_fitted_softmax`, but for:

        - `stands`, `given`: of each half (columns, weights, how many of them), those with any weight first;
        - `nodes`: (node, log step) of the grid, in deviations; `columns` (2, S + P), `scratch` (N_SCRATCH, S + P).
        """
        H, S, part = stands[0].shape[0], psi.shape[1] - own.shape[1], 1.0 / stands[0].shape[0]
        pull, gap, weight, hidden, terms, at = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], columns[1]
        node, share = nodes[0], np.empty(nodes[0].shape[0])
        for u in range(lo, hi):
            e = psi[u]
            hide(e, own[u], n_own[u], S, last, before)
            if prior_shares.shape[0] > 0:
                shares_of_group(e, omega, prior_scale * (start[u + 1] - start[u]), prior_shares[u])
            for b in range(start[u], start[u + 1]):
                n = columns_of(labels[b], own[u], n_own[u], S, last, before, columns[0])
                if prior_shares.shape[0] > 0:
                    share_of_label(columns[0, :n], omega, prior_scale, prior_shares[u])
                for i in range(n):
                    hidden[i], e[columns[0, i]] = e[columns[0, i]], -np.inf
                total, value, scale = 0.0, 0.0, np.float64(scales[b * each]) * part
                for h in range(H):
                    m = _gaps(e, psi_y[b], stands, h, gap, weight, at)
                    q = shares(gap[:m], weight[:m], nodes, share, terms)
                    m = _gaps(e, psi_y[b], given, h, gap, weight, at)
                    if bound.shape[0] > 0:
                        value += part * bound_at(q, node, share, gap[:m], weight[:m], terms)
                    pulled, floored = pulls(q, node, share, gap[:m], weight[:m], floor, pull[:m])
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

    return cross_fitted_grid
