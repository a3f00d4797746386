"""Exact results of a head, for evaluation: over all K classes in blocks, without arrays of B x K numbers.

Scores are computed in float32 at least. Softmax needs one pass over blocks of classes. Other noises integrate
eq. (5) by quadrature (`augment_reduce.model.quadrature`), which needs all K scores of a row: blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model import quadrature
from ..model.noise import Gumbel, Noise
from ..model.predict import merge_highest
from ._place import EveryClass
from ._plain import objective

BLOCK = 1 << 24  # scores in memory at once: 64 MB in float32


def in_float(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.detach().to(torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32))


def class_blocks(hidden: Tensor, place: EveryClass, block: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the weight, psi (B, k)) of consecutive blocks of the classes here."""
    weight, bias = place.weight, place.bias
    K = len(weight)
    size = max(1, min(K, block // max(1, len(hidden))))
    for start in range(0, K, size):
        part = slice(start, min(start + size, K))
        psi = hidden @ weight[part].detach().to(hidden.dtype).T
        yield part, psi if bias is None else psi.add_(bias[part].detach().to(hidden.dtype))


def row_blocks(hidden: Tensor, n_classes: int, block: int = BLOCK) -> Iterator[slice]:
    block = block if hidden.device.type == "cpu" else 16 * block  # a GPU is faster with few, large operations
    step = max(1, block // (4 * n_classes))  # quadrature allocates a few float64 arrays of that size
    return (slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step))


def whole_scores(hidden: Tensor, place: EveryClass) -> Tensor:
    """psi (B, K) of all classes."""
    return place.whole(torch.cat([psi for _, psi in class_blocks(hidden, place)], dim=1))


@torch.no_grad()
def log_normalizer(hidden: Tensor, place: EveryClass) -> Tensor:
    """log sum_k e^{psi_k}, (B,)"""
    h = in_float(hidden, place.weight)
    total = torch.full((len(h),), -torch.inf, dtype=h.dtype, device=h.device)
    for _, psi in class_blocks(h, place):
        total = torch.logaddexp(total, torch.logsumexp(psi, dim=1))
    return place.log_sum(total)


@torch.no_grad()
def log_prob(noise: Noise, hidden: Tensor, place: EveryClass, target: Tensor) -> Tensor:
    """log p(y | h), (B,): eq. (1) for softmax, eq. (5) for the others."""
    h = in_float(hidden, place.weight)
    if type(noise) is Gumbel:
        return place.label_scores(h, target, slice(None))[0] - log_normalizer(h, place)
    out = torch.empty(len(h), dtype=h.dtype, device=h.device)
    for rows in row_blocks(h, place.n_classes):
        out[rows] = quadrature.log_likelihood(noise, whole_scores(h[rows], place), target[rows]).to(h.dtype)
    return out


@torch.no_grad()
def bound(
    noise: Noise, hidden: Tensor, place: EveryClass, target: Tensor, psi_y: Tensor, nodes: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The full bound at these nodes, (B,): at most log p(y | h), up to the error of the nodes."""
    h = in_float(hidden, place.weight)
    everyone_out = torch.ones(len(h), 1, dtype=torch.bool, device=h.device)
    label_alone = objective(noise, psi_y[:, None].clone(), psi_y, everyone_out, psi_y.new_zeros(1), nodes, None).bound
    others = torch.zeros_like(label_alone)
    for part, psi in class_blocks(h, place, BLOCK // 4):
        classes = torch.arange(part.start, part.stop, device=h.device)
        own = place.rows(target)[:, None] == classes
        found = objective(noise, psi, psi_y, own, psi_y.new_zeros(len(classes)), nodes, None)
        others += found.bound - label_alone
    return label_alone + place.sum_over_classes(others)


@torch.no_grad()
def topk(noise: Noise, hidden: Tensor, place: EveryClass, k: int) -> tuple[Tensor, Tensor]:
    """(log p, classes) of the k most probable classes, (B, k) each, best first: those of the k highest scores.

    (Under any noise that is the same for all classes, a higher score is a higher probability: see `predict.top_k`.)
    Ties go to the lower class, independent of the blocks. A score that is NaN comes after all
    others, and makes the row's probabilities NaN.
    """
    if not 1 <= k <= place.n_classes:
        raise ValueError(f"Expected k between 1 and n_classes={place.n_classes}, found {k}.")
    h = in_float(hidden, place.weight)
    best = None
    total = torch.full((len(h),), -torch.inf, dtype=h.dtype, device=h.device)
    for part, psi in class_blocks(h, place):
        total = torch.logaddexp(total, torch.logsumexp(psi, dim=1))
        best = merge_highest(best, psi, part.start, min(k, len(place.weight)))
    assert best is not None  # k <= n_classes
    scores, classes = place.highest(*best, k)
    if type(noise) is Gumbel:
        return scores - place.log_sum(total)[:, None], classes
    log_p = torch.empty_like(scores)
    for rows in row_blocks(h, place.n_classes):
        psi = whole_scores(h[rows], place)
        log_p[rows] = quadrature.log_proba_of(noise, psi, classes[rows]).to(h.dtype)
    return log_p, classes
