"""The head as functions of (hidden, weight, target, bias): for weights of another module, such as a tied embedding.

    loss = linear_augment_reduce(hidden, embedding.weight, target, n_sampled_classes=4096)

`hidden` is (..., D), `weight` (K, D), `target` (...) and `bias` (K,), the shapes of exact linear cross entropies.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.noise import Gumbel, Noise, resolve_noise
from ..sampling import ClassSampler
from . import _hash, _predict
from ._autograd import BoundLoss
from ._backend import backend_for
from ._checks import check_hidden, check_reduction, check_sample_weight, check_weight, flat_rows
from ._draw import Drawn, SharedSampler
from ._local import Local
from ._place import EveryClass
from ._step import Step
from ._targets import BAD_TARGETS, BAD_WEIGHTS

__all__ = ["linear_augment_reduce", "linear_sampled_softmax", "log_normalizer", "log_prob", "topk"]


def linear_augment_reduce(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    model: str | Noise = "softmax",
    n_sampled_classes: int = 1024,
    class_sampling: str | ClassSampler | SharedSampler | None = None,
    class_counts: Tensor | np.ndarray | None = None,
    log_normalizer: Tensor | None = None,
    sample_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    floor: float | None = 1.0,
    n_nodes: int = 1,
    sparse_grad: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Negative lower bound on log p(target | hidden), from |S| sampled classes: a loss, at a cost independent of K.

    Its mean over draws of the classes is, for each row, the negative of a true lower bound (paper, eq. 7 and 8); its
    gradients by `hidden`, `weight` and `bias` are unbiased with the local parameters fixed. Those are computed from a
    second sample, independent of the first; or, for softmax, passed as `log_normalizer` (...), any estimate of
    log sum_k e^{psi_k} that is independent of this call's sample.

    - `class_sampling`: a name, or a `SharedSampler` (a name builds tables of K numbers at every call);
    - `generator`: a CPU generator that seeds the draw; None: torch's global one;
    - `floor`: see `AugmentReduceHead`; `n_nodes`: nodes of q(v) for models other than softmax, 1: one random node;
    - `sparse_grad`: gradients of `weight` and `bias` sparse by rows; False: dense, for optimisers that need them.

    Targets out of range and negative sample weights raise; on a GPU, where that would synchronise, the loss is NaN.
    """
    noise = resolve_noise(model)
    _checked(hidden, weight, bias)
    check_reduction(reduction)
    sampler = class_sampling
    if not isinstance(sampler, SharedSampler):
        sampler = SharedSampler(len(weight), n_sampled_classes, sampler, class_counts, device=weight.device)
    if sampler.n_classes != len(weight):
        raise ValueError(f"Expected a sampler of {len(weight)} classes, found one of {sampler.n_classes}.")
    local = Local(noise, weight.shape[1], len(weight), "fresh", n_nodes=n_nodes, device=weight.device)
    step = Step(
        noise=noise,
        target=flat_rows("target", target, hidden, weight, integer=True),
        sampler=sampler,
        local=local,
        key=_hash.seed_key(int(torch.randint(2**63 - 1, (), generator=generator))),
        counter=torch.zeros(1, dtype=torch.int64, device=weight.device),
        tally=torch.zeros(8, dtype=torch.int64, device=weight.device),
        sample_weight=_weights("sample_weight", sample_weight, hidden, weight),
        parts=_given_parts(noise, log_normalizer, hidden, weight),
        floor=floor,
        ignore_index=ignore_index,
        reduction=reduction,
        sparse=sparse_grad,
    )
    return _shaped(step, hidden, weight, bias)


def linear_sampled_softmax(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    sampler: SharedSampler,
    ignore_index: int = -100,
    sparse_grad: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sampled softmax, for comparison: log(1 + sum omega_k e^{psi_k - psi_y}), mean over rows. Biased, not a bound."""
    _checked(hidden, weight, bias)
    y = flat_rows("target", target, hidden, weight, integer=True)
    h = hidden.reshape(-1, hidden.shape[-1]).to(torch.promote_types(hidden.dtype, torch.float32))
    counter = torch.zeros((), dtype=torch.int64, device=weight.device)
    key = _hash.seed_key(int(torch.randint(2**63 - 1, (), generator=generator)))
    drawn: Drawn = sampler.draw(key, counter, _hash.MAIN)
    safe = torch.where(y == ignore_index, 0, y)

    def rows(classes: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.nn.functional.embedding(classes, weight, sparse=sparse_grad).to(h.dtype)
        return w, h.new_zeros(len(classes)) if bias is None else bias[classes].to(h.dtype)

    (w_y, b_y), (w_s, b_s) = rows(safe), rows(drawn.classes)
    psi_y = (h * w_y).sum(1) + b_y
    psi = (h @ w_s.T + (b_s + drawn.log_weight)).masked_fill(safe[:, None] == drawn.classes, -torch.inf)
    loss = torch.logaddexp(torch.logsumexp(psi, 1), psi_y) - psi_y
    counts = (y != ignore_index).to(h.dtype)
    return (loss * counts).sum() / counts.sum().clamp_min(1.0)


def log_normalizer(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """log sum_k e^{psi_k} over all K classes, in blocks; shape (...) of hidden (..., D). No gradient."""
    _checked(hidden, weight, bias)
    return _predict.log_normalizer(_rows(hidden), EveryClass(weight, bias)).reshape(hidden.shape[:-1])


def log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    model: str | Noise = "softmax",
    ignore_index: int = -100,
) -> Tensor:
    """log p(target | hidden), exact for every model, over all K classes in blocks; 0 if the target is
    `ignore_index`. No gradient."""
    _checked(hidden, weight, bias)
    y = flat_rows("target", target, hidden, weight, integer=True)
    counts = y != ignore_index
    bad = counts & ((y < 0) | (y >= len(weight)))
    if bool(bad.any()):
        raise ValueError(
            f"Expected targets in [0, n_classes={len(weight)}) or ignore_index={ignore_index}, but {int(bad.sum())} of "
            f"{len(y)} are outside; first: {int(y[bad][0])}."
        )
    found = _predict.log_prob(resolve_noise(model), _rows(hidden), EveryClass(weight, bias), torch.where(counts, y, 0))
    return torch.where(counts, found, 0.0).reshape(target.shape)


def topk(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None = None, *, model: str | Noise = "softmax"
) -> tuple[Tensor, Tensor]:
    """(log p, classes) of the k most probable classes, (..., k) each, best first."""
    _checked(hidden, weight, bias)
    log_p, classes = _predict.topk(resolve_noise(model), _rows(hidden), EveryClass(weight, bias), k)
    shape = (*hidden.shape[:-1], k)
    return log_p.reshape(shape), classes.reshape(shape)


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _checked(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_weight(weight, bias)
    check_hidden(hidden, weight)


def _weights(name: str, value: Tensor | None, hidden: Tensor, weight: Tensor) -> Tensor | None:
    if value is None:
        return None
    rows = flat_rows(name, value, hidden, weight, integer=False)
    check_sample_weight(rows)
    return rows


def _given_parts(noise: Noise, guess: Tensor | None, hidden: Tensor, weight: Tensor) -> Tensor | None:
    if guess is None:
        return None
    if type(noise) is not Gumbel:
        raise ValueError(
            f"log_normalizer says where a softmax's bound is tight; the model {noise.name!r} has no such number. "
            "Leave it out: a second sample of classes takes its place."
        )
    return flat_rows("log_normalizer", guess.detach(), hidden, weight, integer=False)[None]


def _shaped(step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    loss = BoundLoss.apply(_rows(hidden), weight, bias, step, backend_for(step, hidden, weight))
    if weight.device.type != "cpu":
        loss = _nan_where_refused(loss, step.tally)
    return loss.reshape(hidden.shape[:-1]) if step.reduction == "none" else loss


def _nan_where_refused(loss: Tensor, tally: Tensor) -> Tensor:
    """On a GPU, where raising would synchronise, targets out of range and invalid sample weights make the loss NaN."""
    refused = tally[BAD_TARGETS] + tally[BAD_WEIGHTS] > 0
    return torch.where(refused, torch.nan, loss)
