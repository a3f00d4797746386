"""The optimal Gaussian q(eps) = N(mu, 1 / precision) of a row, for any noise: its nodes, and Newton's method for it.

With f(eps) = log phi(eps) + sum_k omega_k log Phi(eps - gap_k), q is optimal if E_q[f'] = 0 and precision = -E_q[f''].
Shapes as in `bounds`: gap (B, S), log_weight broadcastable to it, mu and precision (B,).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from ..kernels.constants import ABOVE, BELOW, LEAST_PRECISION
from .bounds import Nodes
from .noise import Noise

HALVINGS = 8  # bisections of the interval around the largest gap, for Newton's initial value
DAMPED = 0.7  # step size of a fit from scratch: with 1 it overshoots in the logistic's linear tails


@functools.cache
def standard_nodes(n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite nodes of a standard Normal, and their weights, which sum to one."""
    node, weight = np.polynomial.hermite_e.hermegauss(n_nodes)
    return node, weight / weight.sum()


def gaussian_nodes(mu: Tensor, precision: Tensor, n_nodes: int) -> Nodes:
    """Gauss-Hermite nodes of N(mu, 1 / precision), with its entropy 1/2 log(2 pi e / precision)."""
    node, node_weight = (torch.tensor(numbers, dtype=mu.dtype) for numbers in standard_nodes(n_nodes))
    eps = mu[:, None] + node * precision.rsqrt()[:, None]
    return Nodes(eps, node_weight, 0.5 * (math.log(2.0 * math.pi * math.e) - torch.log(precision)))


def newton_slopes(
    noise: Noise, gap: Tensor, log_weight: Tensor, mu: Tensor, precision: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """E_q[f'], E_q[f''] (B,) at q = N(mu, 1 / precision), and omega_k E_q[(phi / Phi)(eps - gap_k)] (B, S).

    For a noise that need not be smooth, E_q[f''] = precision E_q[(eps - mu) f'] (Stein's identity), since nodes miss
    the contribution of kinks to f''.
    """
    q = gaussian_nodes(mu, precision, n_nodes)
    slope, bend, hazard = noise.sum_slopes(gap, log_weight, q.eps, q.weight)
    slope = slope + noise.dlog_prob(q.eps)
    if noise.smooth_log_concave:
        second = q.mean(noise.d2log_prob(q.eps) + bend)
    else:
        second = precision * q.mean((q.eps - mu[:, None]) * slope)
    return q.mean(slope), second, hazard


def newton_move(
    noise: Noise, gap: Tensor, log_weight: Tensor, mu: Tensor, precision: Tensor, alpha: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `Newton` from (mu, precision) with step size alpha (B,): new mu, new precision, and
    omega_k E_q[(phi / Phi)(eps - gap_k)] (B, S) at the old q, which is minus the bound's gradient by gap_k."""
    first, second, hazard = newton_slopes(noise, gap, log_weight, mu, precision, n_nodes)
    new_precision = (1.0 - alpha) * precision + alpha * (-second).clamp_min(LEAST_PRECISION)
    reach = 2.0 * torch.maximum(precision, new_precision).rsqrt()
    move = (alpha * first / new_precision).clamp(-reach, reach)
    return mu + move, new_precision, hazard


def fit_gaussian(
    noise: Noise, gap: Tensor, log_weight: Tensor, *, n_nodes: int = 5, n_moves: int = 12
) -> tuple[Tensor, Tensor]:
    """(mu, precision) of the optimal Gaussian q for these classes, by Newton's method.

    The initial value is the median of the largest other utility, eps with sum omega log Phi(eps - gap) = -log 2, and at
    least zero: from far below, where q is narrow, steps are short (with a million equal classes 40 steps reached 0.1 of
    4.85).
    """
    mu = median_of_the_best_rival(noise, gap, log_weight).clamp(min=0.0)
    precision = torch.ones_like(mu)
    alpha = torch.full_like(mu, DAMPED)
    for _ in range(n_moves):
        mu, precision, _ = newton_move(noise, gap, log_weight, mu, precision, alpha, n_nodes)
    return mu, precision


def median_of_the_best_rival(noise: Noise, gap: Tensor, log_weight: Tensor) -> Tensor:
    """(B,) eps where P(all other utilities are below it) = 1/2, by bisection of an interval around the largest gap."""
    top = noise.largest(gap).clamp_min(0.0)  # masked pairs are -inf
    low, high = top - BELOW, top + ABOVE
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        above = noise.sum_log_cdf(gap, log_weight, middle[:, None])[:, 0] > -math.log(2.0)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high)
