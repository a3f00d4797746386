"""The loss of a head in eval(): exact, over all classes in blocks, with gradients.

    softmax      log sum_k e^{psi_k} - psi_y                 others      -log p(y | h) of eq. (5), by quadrature

No array of B x K numbers is allocated: the backward pass scores the blocks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model import quadrature
from ..model.noise import Gumbel, Noise
from . import _predict
from ._place import EveryClass
from ._plain import LARGEST


class Exactly(NamedTuple):
    """The arguments of the loss: model, (B,) labels and row weights, reduction, required gradients.

    `smoothing` and `z_loss` are those of the head (softmax only).
    """

    noise: Noise
    label: Tensor
    row_weight: Tensor
    reduction: str
    wants_weights: bool
    smoothing: float = 0.0
    z_loss: float = 0.0
    place: Callable[[Tensor, Tensor | None], EveryClass] = EveryClass


class ExactLoss(torch.autograd.Function):
    """sum_b row_weight_b loss_b / denominator, or the loss of each row; rows of weight 0 have loss 0 and no
    gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, what: Exactly) -> Tensor:
        h = _predict.in_float(hidden, weight)
        counts = what.row_weight != 0
        usable = (h.abs() < LARGEST).all(dim=1)  # False for NaN
        h = torch.where((counts & usable)[:, None], h, 0.0)
        log_z, place = None, what.place(weight, bias)
        if type(what.noise) is Gumbel:
            log_z = _predict.log_normalizer(h, place)
            loss = _softmax_loss(what, h, place, log_z)
        else:
            loss = -_predict.log_prob(what.noise, h, place, what.label)
        loss = torch.where(counts, torch.where(usable, loss * what.row_weight, torch.nan), 0.0)
        ctx.what, ctx.dtype = what, hidden.dtype
        ctx.denominator = _denominator(what)
        ctx.save_for_backward(h, weight, bias, log_z, counts & usable)
        return loss if what.reduction == "none" else loss.sum() / ctx.denominator

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        what, (h, weight, bias, log_z, seen) = ctx.what, ctx.saved_tensors
        scale = torch.where(seen, what.row_weight * (grad / ctx.denominator), 0.0).to(h.dtype)
        wants = [ctx.needs_input_grad[i] and what.wants_weights for i in (1, 2)]
        of_hidden = torch.zeros_like(h)
        of_weight = torch.zeros_like(weight, dtype=h.dtype) if wants[0] else None
        of_bias = torch.zeros_like(bias, dtype=h.dtype) if wants[1] else None
        for rows, classes, by_psi in _by_scores(what, h, what.place(weight, bias), log_z):
            by_psi = by_psi * scale[rows, None]
            of_hidden[rows] += by_psi @ weight[classes].to(h.dtype)
            if of_weight is not None:
                of_weight[classes] += by_psi.T @ h[rows]
            if of_bias is not None:
                of_bias[classes] += by_psi.sum(0)
        given = (None if x is None else x.to(weight.dtype) for x in (of_weight, of_bias))
        return of_hidden.to(ctx.dtype), *given, None


def traced_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, what: Exactly) -> Tensor:
    """A softmax's loss in plain operations, for compilers: B x K scores at once."""
    if type(what.noise) is not Gumbel:
        raise ValueError(
            f"The exact loss of the model {what.noise.name!r} is a quadrature, which no compiler follows. Evaluate "
            "outside of torch.compile."
        )
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    psi = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    log_z = torch.logsumexp(psi, dim=1)
    loss = log_z - (1.0 - what.smoothing) * psi.gather(1, what.label[:, None])[:, 0]
    loss = loss - what.smoothing * psi.mean(1) + what.z_loss * log_z.square()
    loss = torch.where(what.row_weight != 0, loss * what.row_weight, 0.0)
    return loss if what.reduction == "none" else loss.sum() / _denominator(what)


def _denominator(what: Exactly) -> Tensor:
    if what.reduction != "mean":
        return what.row_weight.new_ones(())
    return what.row_weight.sum().clamp_min(torch.finfo(what.row_weight.dtype).tiny)


def _softmax_loss(what: Exactly, h: Tensor, place: EveryClass, log_z: Tensor) -> Tensor:
    """log Z - (1 - s) psi_y - s mean_k psi_k + z log Z^2"""
    psi_y = place.label_scores(h, what.label, slice(None))[0]
    loss = log_z - (1.0 - what.smoothing) * psi_y
    if what.smoothing:
        total = h @ place.weight.detach().sum(0, dtype=h.dtype)
        if place.bias is not None:
            total = total + place.bias.detach().sum(dtype=h.dtype)
        loss = loss - what.smoothing * place.sum_over_classes(total) / place.n_classes
    return loss + what.z_loss * log_z.square() if what.z_loss else loss


def _by_scores(what: Exactly, h: Tensor, place: EveryClass, log_z: Tensor | None) -> Any:
    """(rows, rows of the weight, d loss / d psi) in blocks: of classes for a softmax, else of rows."""
    every = slice(0, len(h))
    if log_z is not None:
        K, label = place.n_classes, place.rows(what.label)
        factor = (1.0 + 2.0 * what.z_loss * log_z)[:, None]
        for part, psi in _predict.class_blocks(h, place):
            by_psi = psi.sub_(log_z[:, None]).exp_().mul_(factor).sub_(what.smoothing / K)
            at = label - part.start
            inside = (at >= 0) & (at < by_psi.shape[1])
            at = at.clamp(0, by_psi.shape[1] - 1)[:, None]
            by_psi.scatter_add_(1, at, -(1.0 - what.smoothing) * inside[:, None].to(h.dtype))
            yield every, part, by_psi
        return
    for rows in _predict.row_blocks(h, place.n_classes):
        psi = _predict.whole_scores(h[rows], place)
        _, by_psi = quadrature.log_likelihood_and_grad(what.noise, psi, what.label[rows])
        yield rows, slice(0, len(place.weight)), -place.own_columns(by_psi).to(h.dtype)
