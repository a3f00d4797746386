"""Prediction over many rows: eq. (1) and (5) in blocks, so that N x K never exists unless all of it is asked for.

Every function takes `scores_of(start, stop) -> psi (stop - start, K)`, the scores of a block of rows, and asks for one
block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import quadrature
from .noise import Noise

ScoresOf = Callable[[int, int], Tensor]
BLOCK_BYTES = 64 << 20


def row_blocks(n_rows: int, n_classes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks whose (b, K) float64 scores take at most `BLOCK_BYTES`."""
    size = max(1, min(4096, BLOCK_BYTES // (8 * max(1, n_classes))))
    for start in range(0, n_rows, size):
        yield start, min(n_rows, start + size)


def scores(scores_of: ScoresOf, n_rows: int, n_classes: int) -> Tensor:
    """psi (N, K), for `decision_function`."""
    return torch.cat([scores_of(start, stop) for start, stop in row_blocks(n_rows, n_classes)])


def argmax(scores_of: ScoresOf, n_rows: int, n_classes: int) -> Tensor:
    """The most probable class of each row, (N,): that of the highest score, under every noise (see `top_k`)."""
    return torch.cat([_first_largest(scores_of(start, stop)) for start, stop in row_blocks(n_rows, n_classes)])


def log_likelihood(noise: Noise, scores_of: ScoresOf, labels: Tensor, n_classes: int) -> Tensor:
    """log p(y_n | x_n), (N,) float64, exact."""
    blocks = row_blocks(len(labels), n_classes)
    return torch.cat([quadrature.log_likelihood(noise, scores_of(a, b), labels[a:b]) for a, b in blocks])


def log_likelihood_importance(
    noise: Noise, scores_of: ScoresOf, labels: Tensor, n_classes: int, *, n_samples: int, generator: torch.Generator
) -> Tensor:
    """The paper's estimate of the same, from draws of N(5, 5^2)."""
    blocks = row_blocks(len(labels), n_classes)
    return torch.cat(
        [
            quadrature.log_likelihood_importance(
                noise, scores_of(a, b), labels[a:b], n_samples=n_samples, generator=generator
            )
            for a, b in blocks
        ]
    )


def log_proba(
    noise: Noise, scores_of: ScoresOf, n_rows: int, n_classes: int, dtype: torch.dtype | None = None
) -> Tensor:
    """log p of every class, (N, K), in `dtype` (None: float64): the one function that makes an N x K array."""
    out = torch.empty(n_rows, n_classes, dtype=dtype or torch.float64)
    for start, stop in row_blocks(n_rows, n_classes):
        out[start:stop] = quadrature.log_proba(noise, scores_of(start, stop))
    return out


def top_k(noise: Noise, scores_of: ScoresOf, n_rows: int, n_classes: int, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable classes, (N, k), most probable first, and their probabilities, exact.

    Ranked by score: p_k = P(psi_k) with one function P for all classes of a row (see quadrature.py), and raising a
    score raises its probability, so P increases and the order of the scores is that of the probabilities. Ties go
    to the lower class.
    """
    classes = torch.empty(n_rows, k, dtype=torch.int64)
    probabilities = torch.empty(n_rows, k, dtype=torch.float64)
    for start, stop in row_blocks(n_rows, n_classes):
        psi = scores_of(start, stop)
        classes[start:stop] = _first_top_k(psi, k)
        probabilities[start:stop] = quadrature.log_proba_of(noise, psi, classes[start:stop]).exp()
    return classes, probabilities


def _first_largest(psi: Tensor) -> Tensor:
    """argmax, the lowest class among equals (torch does not promise which)."""
    return (psi == psi.amax(1, keepdim=True)).to(torch.uint8).argmax(1)


def _first_top_k(psi: Tensor, k: int) -> Tensor:
    """The k largest, the lower class first among equals, also where a tie straddles the k-th place."""
    values, found = psi.topk(k, dim=1)
    kth = values[:, -1:]
    straddles = (psi >= kth).sum(1) > k
    if straddles.any():
        found[straddles] = torch.sort(psi[straddles], dim=1, descending=True, stable=True).indices[:, :k]
    # topk may return equals in any order: sort by class, then stably by score
    found = found.sort(1).values
    order = torch.sort(psi.gather(1, found), dim=1, descending=True, stable=True).indices
    return found.gather(1, order)
