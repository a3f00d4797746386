"""One step of a head in plain torch: what runs without a GPU or with a noise of one's own, and the kernels' oracle.

With v the winner's utility, held, at nodes v_j with weights (softmax: one node v = c), a row's bound is

    L = sum_j weight_j [ log phi(v_j - psi_y) + sum_{k in S} omega_k log Phi(v_j - psi_k) ] + constant

and all that a step needs of it are

    pull_k = omega_k sum_j weight_j (phi / Phi)(v_j - psi_k) = -dL/dpsi_k       >= 0; softmax: omega_k e^{psi_k - c}
    lift   = -sum_j weight_j (log phi)'(v_j - psi_y)         =  dL/dpsi_y       softmax: 1 - e^{psi_y - c}, no sample
    slope  = sum_k pull_k - lift,   bend                                        first and second derivative by v;
                                                                                softmax: slope = log Z~ - c, see below

`value`, `slope` and `bend` are sums over classes: a head split by classes would add them up over its shards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..noise import Gumbel, Noise

LARGEST_LOG = 60.0  # of a term e^x of a sum that nothing bounds (floor=None): e^60 is far from overflow
LARGEST = 1e15  # of a score, a feature or a gradient that takes part in a step: its square is far from overflow


class Objective(NamedTuple):
    """`bound`, `lift`, `slope`, `bend`, `floored` are (B,); `pull` is (B, S).

    For softmax `slope` holds log Z~ - c instead of the derivative Z~ e^{-c} - 1: how far c is from its best, without
    losing digits where it is far; `bend` is not used there, and zero.
    """

    bound: Tensor
    pull: Tensor
    lift: Tensor
    slope: Tensor
    bend: Tensor
    floored: Tensor


class RowGradient(NamedTuple):
    """Gradient of the loss by weight rows: `values[i]` and `bias[i]` belong to class `classes[i]`; repeats add up."""

    classes: Tensor
    values: Tensor
    bias: Tensor


def label_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor]:
    """psi_y (B,), and the labels' weight rows (B, D) in the dtype of `hidden`."""
    rows = weight[target].to(hidden.dtype)
    psi = torch.linalg.vecdot(hidden, rows)
    return (psi if bias is None else psi.add_(bias[target].to(hidden.dtype))), rows


def shared_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> tuple[Tensor, Tensor]:
    """psi (B, S) of the sampled classes, and their weight rows (S, D) in the dtype of `hidden`.

    The scores of a class whose weights are not finite are NaN, so that no row with such a class counts; a bias may be
    -inf, which leaves its class out.
    """
    rows = weight[classes].to(hidden.dtype)
    psi = hidden @ rows.T
    finite = rows.isfinite().all(dim=1)
    if hidden.device.type != "cpu" or not bool(finite.all()):
        psi.masked_fill_(~finite, torch.nan)
        rows = torch.where(finite[:, None], rows, 0.0)
    return (psi if bias is None else psi.add_(bias[classes].to(hidden.dtype))), rows


def objective(
    noise: Noise,
    psi: Tensor,
    psi_y: Tensor,
    own: Tensor,
    log_weight: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor],
    floor: float | None,
) -> Objective:
    """`own` (B, S) is True where a class is the row's label; `psi` is overwritten."""
    if type(noise) is Gumbel:
        return _softmax(psi, psi_y, own, log_weight, nodes[0][:, 0], floor)
    return _any_noise(noise, psi, psi_y, own, log_weight, nodes, floor)


def _softmax(psi: Tensor, psi_y: Tensor, own: Tensor, log_weight: Tensor, c: Tensor, floor: float | None) -> Objective:
    """L = 1 - c + psi_y - e^{psi_y - c} - sum omega_k e^{psi_k - c}.

    `floor`: c is kept above log Z~ - floor, Z~ = e^{psi_y} + sum omega_k e^{psi_k} from this very sample, so that no
    row counts more than e^floor times what it should. Where that acts the gradient is no longer unbiased.
    log Z~ is taken relative to the row's largest term, so that it is exact however far c is from it.
    """
    terms = psi.add_(log_weight.to(psi.dtype)).masked_fill_(own, -torch.inf)
    top = torch.maximum(terms.amax(dim=1), psi_y)
    pull = terms.sub_(top[:, None]).exp_()
    slope = top - c + torch.log(pull.sum(dim=1) + torch.exp(psi_y - top))
    raised = torch.zeros_like(c) if floor is None else (slope - floor).clamp_min(0.0)
    c = c + raised
    pull.mul_(torch.exp((top - c).clamp(max=LARGEST_LOG))[:, None])
    own_share = torch.exp((psi_y - c).clamp(max=LARGEST_LOG))
    bound = 1.0 - c + psi_y - own_share - pull.sum(dim=1)
    return Objective(bound, pull, 1.0 - own_share, slope, torch.zeros_like(slope), raised > 0.0)


def _any_noise(
    noise: Noise, psi: Tensor, psi_y: Tensor, own: Tensor, log_weight: Tensor, nodes: tuple[Tensor, Tensor, Tensor],
    floor: float | None,
) -> Objective:  # fmt: skip
    """`floor`: a row whose pulls sum to more than e^floor (1 + |lift|) has them, and its bound's sum, scaled down."""
    v, node_weight, constant = nodes
    omega = torch.exp(log_weight).to(psi.dtype)
    pull, value, bend = torch.zeros_like(psi), torch.zeros_like(psi_y), torch.zeros_like(psi_y)
    for j, w in enumerate(node_weight.unbind()):
        t = v[:, j, None] - psi
        first, second = noise.dlog_cdf_and_derivative(t)
        pull.add_(first * w)
        value += w * (noise.log_cdf(t).masked_fill(own, 0.0) @ omega)
        bend += w * (second.masked_fill(own, 0.0) @ omega)
    pull.mul_(omega).masked_fill_(own, 0.0)
    at_label = v - psi_y[:, None]
    lift = -(noise.dlog_prob(at_label) @ node_weight)
    total = pull.sum(dim=1)
    bend += noise.d2log_prob(at_label) @ node_weight
    floored = torch.zeros_like(lift, dtype=torch.bool)
    if floor is not None:
        most = torch.exp(lift.new_tensor(floor)) * (1.0 + lift.abs())
        floored = total > most
        shrink = torch.where(floored, most / total, 1.0)
        pull, value, total = pull.mul_(shrink[:, None]), value * shrink, total * shrink
    slope = total - lift  # what the weights see, the floor included: the local step balances just that
    bound = noise.log_prob(at_label) @ node_weight + value + constant
    return Objective(bound, pull, lift, slope, bend, floored)


def gradient_of_hidden(pull: Tensor, lift: Tensor, rows: Tensor, label_rows: Tensor, scale: Tensor) -> Tensor:
    """Gradient of sum_b scale_b (-L_b) by `hidden` (B, D); rows of scale 0 have none, whatever else they hold."""
    found = (pull @ rows).sub_(lift[:, None] * label_rows).mul_(scale[:, None])
    return found.masked_fill_((scale == 0.0)[:, None], 0.0)


def gradient_of_rows(
    hidden: Tensor, classes: Tensor, target: Tensor, pull: Tensor, lift: Tensor, scale: Tensor
) -> RowGradient:
    """Gradient of sum_b scale_b (-L_b) by the touched weight rows (S + B of them)."""
    at_label = lift * scale
    by_class = pull.T @ (hidden * scale[:, None])
    values = torch.cat([by_class, at_label[:, None] * -hidden])
    return RowGradient(torch.cat([classes, target]), values, torch.cat([pull.T @ scale, -at_label]))
