"""Exact answers of a head, for evaluation: over all K classes in blocks, so that B x K numbers never exist at once.

Scores are computed in float32 at least. Softmax needs one pass over blocks of classes. Any other noise integrates
eq. (5) by quadrature (`augment_reduce.quadrature`), which wants a row's K scores together: blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import quadrature
from ..noise import Gumbel, Noise
from ._plain import label_scores, objective

BLOCK = 1 << 24  # scores alive at once: 64 MB in float32


def in_float(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.detach().to(torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32))


def class_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, block: int = BLOCK
) -> Iterator[tuple[slice, Tensor]]:
    """(classes, psi (B, k)) of consecutive blocks of classes."""
    K = len(weight)
    size = max(1, min(K, block // max(1, len(hidden))))
    for start in range(0, K, size):
        part = slice(start, min(start + size, K))
        psi = hidden @ weight[part].detach().to(hidden.dtype).T
        yield part, psi if bias is None else psi.add_(bias[part].detach().to(hidden.dtype))


def row_blocks(hidden: Tensor, n_classes: int, block: int = BLOCK) -> Iterator[slice]:
    block = block if hidden.device.type == "cpu" else 16 * block  # a GPU has room, and wants few, large operations
    step = max(1, block // (4 * n_classes))  # quadrature keeps a few float64 arrays of that size
    return (slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step))


@torch.no_grad()
def log_normalizer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """log sum_k e^{psi_k}, (B,)"""
    h = in_float(hidden, weight)
    total = torch.full((len(h),), -torch.inf, dtype=h.dtype, device=h.device)
    for _, psi in class_blocks(h, weight, bias):
        total = torch.logaddexp(total, torch.logsumexp(psi, dim=1))
    return total


@torch.no_grad()
def log_prob(noise: Noise, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """log p(y | h), (B,): eq. (1) for softmax, eq. (5) for the others."""
    h = in_float(hidden, weight)
    if type(noise) is Gumbel:
        return label_scores(h, weight, bias, target)[0] - log_normalizer(h, weight, bias)
    out = torch.empty(len(h), dtype=h.dtype, device=h.device)
    for rows in row_blocks(h, len(weight)):
        psi = torch.cat([part for _, part in class_blocks(h[rows], weight, bias)], dim=1)
        out[rows] = quadrature.log_likelihood(noise, psi, target[rows]).to(h.dtype)
    return out


@torch.no_grad()
def bound(
    noise: Noise,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """The bound at these nodes with every class in it, (B,): at most log p(y | h) up to the nodes' own error."""
    h = in_float(hidden, weight)
    psi_y, _ = label_scores(h, weight, bias, target)
    everyone_out = torch.ones(len(h), 1, dtype=torch.bool, device=h.device)
    label_alone = objective(noise, psi_y[:, None].clone(), psi_y, everyone_out, psi_y.new_zeros(1), nodes, None).bound
    total = label_alone.clone()
    for part, psi in class_blocks(h, weight, bias, BLOCK // 4):
        classes = torch.arange(part.start, part.stop, device=h.device)
        own = target[:, None] == classes
        found = objective(noise, psi, psi_y, own, psi_y.new_zeros(len(classes)), nodes, None)
        total += found.bound - label_alone
    return total


@torch.no_grad()
def topk(noise: Noise, hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """(log p, classes) of the k most probable classes, (B, k) each, best first: those of the k highest scores.

    (Under any noise that is the same for all classes, a higher score is a higher probability: see `predict.top_k`.)
    """
    if not 1 <= k <= len(weight):
        raise ValueError(f"Expected k between 1 and n_classes={len(weight)}, found {k}.")
    h = in_float(hidden, weight)
    best = torch.full((len(h), 0), -torch.inf, dtype=h.dtype, device=h.device)
    classes = torch.zeros(len(h), 0, dtype=torch.int64, device=h.device)
    total = torch.full((len(h),), -torch.inf, dtype=h.dtype, device=h.device)
    for part, psi in class_blocks(h, weight, bias):
        total = torch.logaddexp(total, torch.logsumexp(psi, dim=1))
        value, column = psi.topk(min(k, psi.shape[1]), dim=1)
        best, classes = torch.cat([best, value], 1), torch.cat([classes, column + part.start], 1)
        best, order = best.topk(min(k, best.shape[1]), dim=1)
        classes = classes.gather(1, order)
    if type(noise) is Gumbel:
        return best - total[:, None], classes
    log_p = torch.empty_like(best)
    for rows in row_blocks(h, len(weight)):
        psi = torch.cat([part for _, part in class_blocks(h[rows], weight, bias)], dim=1)
        log_p[rows] = quadrature.log_proba_of(noise, psi, classes[rows]).to(h.dtype)
    return log_p, classes
