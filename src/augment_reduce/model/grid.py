"""q(eps) on a grid: nodes around the mode of a row's integrand, with probabilities.

    f(eps) = log phi(eps) + sum_k omega_k log Phi(eps - gap_k)
    L      = sum_j q_j [f(eps_j) + log w_j - log q_j]        w_j: quadrature weights        optimal q: q_j ~ w_j
    e^f(eps_j)

At the optimal q this is the quadrature of eq. (5), log int e^f: tight for every noise, up to the quadrature's error.
Given q it is linear in the sum over classes, so that the estimate from a sample is unbiased.

The nodes are eps_j = mode + deviation sinh(t_j), even in t (`constants.grid_in_deviations`), with the mode of f and
1 / deviation^2 = -f'' there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.constants import (
    ABOVE,
    BELOW,
    CLOSE,
    HALVINGS,
    LEAST_CURVATURE,
    LEAST_SHARE,
    MOVES,
    grid_in_deviations,
)
from .bounds import Nodes
from .noise import Noise

NEAR, FAR = (2.0, 3.0), (3.0, 3.9)  # ends of the grid in t of 11 nodes and of 36; sinh(3) is 10 deviations
ROUGH = (5.0, 5.0)  # for noises that need not be smooth and log-concave: 74 deviations
ROUGH_NODES = 3  # factor of the number of nodes for noises that need not be smooth and log-concave


class Place(NamedTuple):
    """Location and scale of each row's nodes (B,)."""

    mode: Tensor
    precision: Tensor  # 1 / deviation^2


def standard_grid(noise: Noise, n_nodes: int) -> tuple[Tensor, Tensor]:
    """(J,) nodes in deviations from the mode, and the log of their quadrature weights; float64."""
    if noise.smooth_log_concave:
        share = min(max(0.0, (n_nodes - 11) / 25), 1.0)
        ends = (near + share * (far - near) for near, far in zip(NEAR, FAR, strict=True))
        node, log_step = grid_in_deviations(n_nodes, *ends)
    else:
        node, log_step = grid_in_deviations(ROUGH_NODES * n_nodes, *ROUGH)
    return torch.from_numpy(node), torch.from_numpy(log_step)


def find_place(noise: Noise, gap: Tensor, log_weight: Tensor) -> Place:
    """The mode of f by bisection of a bracket around the largest gap, then Newton's method in it."""
    top = noise.largest(gap).clamp_min(0.0)  # masked pairs are -inf
    low, high = torch.full_like(top, -BELOW), top + ABOVE
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        rising = slope_at(noise, gap, log_weight, middle)[0] > 0.0
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    mode, precision = 0.5 * (low + high), torch.ones_like(low)
    far = torch.ones_like(low, dtype=torch.bool)
    for _ in range(MOVES):
        slope, here = slope_at(noise, gap, log_weight, mode)
        low, high = torch.where(slope > 0.0, mode, low), torch.where(slope > 0.0, high, mode)
        moved = torch.minimum(torch.maximum(mode + slope / here, low), high)
        mode, precision = torch.where(far, moved, mode), torch.where(far, here, precision)
        far = far & (slope.abs() >= CLOSE * here.sqrt())
        if not far.any():
            break
    return Place(mode, precision)


def slope_at(noise: Noise, gap: Tensor, log_weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """f' (B,) at eps (B,), and -f''; if f is not smooth, at least half of the decrease of f' from eps - 1 to eps +
    1."""
    one = eps.new_ones(1)
    slope, bend, _ = noise.sum_slopes(gap, log_weight, eps[:, None], one)
    slope, bend = slope[:, 0] + noise.dlog_prob(eps), bend[:, 0] + noise.d2log_prob(eps)
    if not noise.smooth_log_concave:
        beside = torch.stack([eps - 1.0, eps + 1.0], dim=1)
        slopes = noise.sum_slopes(gap, log_weight, beside, beside.new_full((2,), 0.5))[0] + noise.dlog_prob(beside)
        bend = torch.minimum(bend, 0.5 * (slopes[:, 1] - slopes[:, 0]))
    return slope, (-bend).clamp_min(LEAST_CURVATURE)


def nodes_at(noise: Noise, place: Place, n_nodes: int) -> tuple[Tensor, Tensor]:
    """eps (B, J) and log w (B, J)."""
    node, log_step = (each.to(place.mode.dtype) for each in standard_grid(noise, n_nodes))
    deviation = place.precision.rsqrt()
    return place.mode[:, None] + deviation[:, None] * node, log_step + deviation.log()[:, None]


def log_density(noise: Noise, gap: Tensor, log_weight: Tensor, eps: Tensor, log_step: Tensor) -> Tensor:
    """(B, J) f(eps_j) + log w_j."""
    return noise.log_prob(eps) + noise.sum_log_cdf(gap, log_weight, eps) + log_step


def as_nodes(eps: Tensor, log_step: Tensor, density: Tensor) -> Nodes:
    """q_j ~ exp(density_j), without nodes of negligible probability. H[q] is relative to the quadrature weights."""
    share = torch.softmax(density, dim=1)
    share = torch.where(share < LEAST_SHARE, 0.0, share)
    share = share / share.sum(dim=1, keepdim=True)
    entropy = (share * (log_step - share.clamp_min(torch.finfo(share.dtype).tiny).log())).sum(dim=1)
    return Nodes(eps, share, entropy)


def best_grid(noise: Noise, gap: Tensor, log_weight: Tensor, n_nodes: int) -> Nodes:
    """The optimal q on a grid for these classes, from scratch."""
    eps, log_step = nodes_at(noise, find_place(noise, gap, log_weight), n_nodes)
    return as_nodes(eps, log_step, log_density(noise, gap, log_weight, eps, log_step))


def moved(place: Place, slope: Tensor, precision: Tensor, alpha: Tensor) -> Place:
    """A Newton step to the mode with step size alpha (B,), of at most two deviations."""
    new = torch.exp((1.0 - alpha) * place.precision.log() + alpha * precision.log())
    reach = 2.0 * torch.maximum(place.precision, new).rsqrt()
    return Place(place.mode + (alpha * slope / new).clamp(-reach, reach), new)
