"""The bound as a function of scores that the caller computes: margins, two towers, low-rank updates.

drawn = sampler.draw()                                              # classes (S,), log_weight (S,)
psi, psi_y = h @ tower(drawn.classes).T, (h * tower(y)).sum(1)      # (B, S), (B,)
bound = sampled_bound(psi_y, psi, drawn.log_weight, y[:, None] == drawn.classes, local=local.at(h))
(-bound).mean().backward()                                          # a bound goes up, a loss goes down
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.gaussian import fit_gaussian
from ..model.noise import Gumbel, Noise, resolve_noise
from ._local import Local, hermite
from ._plain import LARGEST, Objective, objective

FIT_MOVES = 10  # Newton iterations, if q is fitted to the sample itself


@dataclass(frozen=True)
class LocalAt:
    """Local parameters of the rows of one minibatch: `LocalParameters.at`."""

    owner: LocalParameters
    hidden: Tensor
    index: Tensor | None


class LocalParameters(nn.Module):
    """c, or q(v), of each row for `sampled_bound`: predicted from `hidden`, or stored for each training row.

    - `in_features`: number of input features, any description of the row that does not depend on the sample;
    - `n_classes`: number of classes, for the initial value;
    - `mode`: "amortised" (linear), "log-sum-exp", or "persistent" (needs `n_rows`, and `index` at every call);
    - `n_nodes`: Gauss-Hermite nodes of q(v), for models other than softmax; 2 at least.

    Updated by every call of `sampled_bound` in train() with gradients enabled. Its buffers are part of the state dict.
    """

    def __init__(
        self, in_features: int, n_classes: int, model: str | Noise = "softmax", *, mode: str = "amortised",
        n_rows: int | None = None, n_nodes: int = 3, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if mode == "fresh":
            raise ValueError('mode="fresh" draws a second sample of classes by itself, which needs the head.')
        if n_nodes < 2:
            raise ValueError(f"Expected n_nodes of at least 2, found {n_nodes}: one node is no distribution.")
        self.noise = resolve_noise(model)
        self.local = Local(
            self.noise, in_features, n_classes, mode, n_rows=n_rows, n_nodes=n_nodes, device=device
        )  # fmt: skip

    def at(self, hidden: Tensor, index: Tensor | None = None) -> LocalAt:
        """Of rows (B, in_features); `index` (B,) are their row numbers, for "persistent"."""
        D = self.local.slope.shape[1]
        if hidden.ndim != 2 or hidden.shape[1] != D:
            raise ValueError(f"Expected hidden of shape (B, in_features={D}), found {tuple(hidden.shape)}.")
        if (self.local.mode == "persistent") != (index is not None):
            raise ValueError('Expected index, the numbers of the training rows, for mode="persistent" and only there.')
        return LocalAt(self, hidden.detach(), index)


def sampled_bound(
    psi_label: Tensor,
    psi: Tensor,
    log_weight: Tensor | float = 0.0,
    own_label_mask: Tensor | None = None,
    local: Tensor | LocalAt | None = None,
    *,
    model: str | Noise = "softmax",
    floor: float | None = 1.0,
    n_nodes: int = 5,
) -> Tensor:
    """Unbiased estimate from sampled classes of a lower bound on log p(label) of each row, (B,); larger is better.

    Softmax, c fixed:  1 - c + psi_y - e^{psi_y - c} - sum_k omega_k e^{psi_k - c}        (paper, eq. 8)
    others, q fixed:   E_q[log phi(v - psi_y) + sum_k omega_k log Phi(v - psi_k)] + H[q]   (eq. 7)

    - `psi_label` (B,), `psi` (B, S): scores of the label and of the sampled classes; differentiable by both;
    - `log_weight`: log omega, (S,), (B, S) or a number, such that the weighted sum over the sample is unbiased for the
      sum over all classes but the label, as returned by `SharedSampler.draw`;
    - `own_label_mask` (B, S): True where a column is masked for a row, because it is its label;
    - `local`: c (B,), or m and log precision (2, B), any numbers that do not depend on this sample; or
      `LocalParameters.at(hidden)`, which predicts and updates them. None computes them from the sample itself: for
      softmax that is sampled softmax, whose value and gradient are biased, and not a bound;
    - `model`, if `local` does not have it; `floor`: as in the head, applied to the gradient only; `n_nodes` of q(v).

    A row with scores that are not finite has the bound NaN and gradients of 0.
    """
    log_weight, mask = _checked(psi_label, psi, log_weight, own_label_mask)
    noise = local.owner.noise if isinstance(local, LocalAt) else resolve_noise(model)
    with torch.no_grad():
        wide = torch.promote_types(psi.dtype, torch.float32)
        held, held_label = psi.detach().to(wide), psi_label.detach().to(wide)
        predicted, parts = _parts(noise, local, held_label, held, log_weight, mask)
        nodes = _nodes(noise, parts, local.owner.local.n_nodes if isinstance(local, LocalAt) else n_nodes)
        found = objective(noise, held.clone(), held_label, mask, log_weight, nodes, floor)
        seen = found.bound.isfinite() & found.slope.isfinite() & found.bend.isfinite() & (held_label.abs() < LARGEST)
        if isinstance(local, LocalAt) and local.owner.training:
            _learn(local, held_label, predicted, parts, found, seen, floor)
    return _Bound.apply(psi_label, psi, found, seen)


class _Bound(torch.autograd.Function):
    """The computed value, with the gradients dL / dpsi_y = grad_label and dL / dpsi = -grad_class."""

    @staticmethod
    def forward(ctx: Any, psi_label: Tensor, psi: Tensor, found: Objective, seen: Tensor) -> Tensor:
        ctx.save_for_backward(
            torch.where(seen, found.grad_label, 0.0), torch.where(seen[:, None], found.grad_class, 0.0)
        )
        ctx.dtypes = psi_label.dtype, psi.dtype
        return torch.where(seen, found.bound, torch.nan)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_label, grad_class = ctx.saved_tensors
        return (grad * grad_label).to(ctx.dtypes[0]), (-grad[:, None] * grad_class).to(ctx.dtypes[1]), None, None


def _checked(psi_label: Tensor, psi: Tensor, log_weight: Tensor | float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if psi.ndim != 2 or not psi.is_floating_point():
        raise ValueError(f"Expected psi of shape (B, S), floating point, found {tuple(psi.shape)} in {psi.dtype}.")
    B, S = psi.shape
    if psi_label.shape != (B,):
        raise ValueError(
            f"Expected psi_label of shape ({B},), one score for each row of psi, found {tuple(psi_label.shape)}. A "
            "margin or a temperature must return the shape that it was given."
        )
    weight = torch.as_tensor(log_weight, dtype=psi.dtype, device=psi.device).detach()
    weight = weight.expand(S) if weight.ndim == 0 else weight
    if weight.shape not in ((S,), (B, S)):
        raise ValueError(f"Expected log_weight of shape ({S},) or ({B}, {S}), found {tuple(weight.shape)}.")
    if mask is None:
        return weight, torch.zeros(B, S, dtype=torch.bool, device=psi.device)
    if mask.shape != (B, S) or mask.dtype != torch.bool:
        raise ValueError(
            f"Expected own_label_mask of shape ({B}, {S}) and dtype bool, found {tuple(mask.shape)} in {mask.dtype}. "
            "It is labels[:, None] == classes."
        )
    return weight, mask


def _parts(
    noise: Noise, local: Tensor | LocalAt | None, psi_y: Tensor, psi: Tensor, log_weight: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(predicted, used) parts (Q, B) of q(v)."""
    softmax = type(noise) is Gumbel
    if isinstance(local, LocalAt):
        predicted = local.owner.local.predict(local.hidden.to(psi.dtype), psi_y)
        return predicted, local.owner.local.recall(predicted, local.index)
    if local is None:
        gap = (psi - psi_y[:, None]).masked_fill(mask, -torch.inf)
        if softmax:
            c = psi_y + torch.nn.functional.softplus(torch.logsumexp(gap + log_weight, 1))
            return c[None], c[None]
        m, precision = fit_gaussian(noise, gap, log_weight, n_moves=FIT_MOVES)
        parts = torch.stack([m + psi_y, precision.log()])
        return parts, parts
    expected = (len(psi),) if softmax else (2, len(psi))
    if local.shape != expected:
        raise ValueError(
            f"Expected local of shape {expected}, {'c' if softmax else 'm and log precision'} of each row, or "
            f"LocalParameters.at(hidden), found a tensor of shape {tuple(local.shape)}."
        )
    parts = local.detach().to(psi.dtype).reshape(-1, len(psi))
    return parts, parts


def _nodes(noise: Noise, parts: Tensor, n_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    if type(noise) is Gumbel:
        return parts.T, parts.new_ones(1), torch.ones_like(parts[0])
    if n_nodes < 2:
        raise ValueError(f"Expected n_nodes of at least 2, found {n_nodes}: one node is no distribution.")
    z, weight = hermite(n_nodes, parts.dtype, parts.device)
    v = parts[0][:, None] + z * torch.exp(-0.5 * parts[1])[:, None]
    return v, weight, 0.5 * (LOG_2PI_E - parts[1])


LOG_2PI_E = 2.8378770664093453


def _learn(
    at: LocalAt, psi_y: Tensor, predicted: Tensor, used: Tensor, found: Objective, seen: Tensor, floor: float | None
) -> None:
    local, hidden = at.owner.local, at.hidden.to(psi_y.dtype)
    local.move(local.report(hidden, psi_y, predicted, used, found.slope, found.bend, seen, floor), seen.any())
    if at.index is not None:
        local.remember(at.index, used, found.slope, found.bend, seen)
