"""Label smoothing and z-loss terms of a softmax's objective: linear in sums over classes, hence unbiased.

Smoothing by s adds s (mean_k psi_k - psi_y) to the bound. With a = h m + b_m, m any row that does not depend on this
sample, mean_k psi_k = a + (1 / K) sum_k (psi_k - a) is estimated by

    a + (1 / K) [psi_y - a + sum_{k in S} omega_k (psi_k - a)]

for any m; a running mean of the class rows is a control variate that removes most of the variance.
A z-loss z (log Z)^2, linearised in Z at e^c: z (c^2 + 2 c (Z e^{-c} - 1)), exact to first order in log Z - c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._plain import LARGEST_LOG, Objective
from ._state import Kept, buffer

RATE = 0.01  # of the running mean


class ClassMean(Kept):
    """A running mean of the weight rows and biases of all classes, from the drawn classes."""

    row: Tensor
    bias: Tensor
    learned: Tensor

    def __init__(self, in_features: int, n_classes: int, device: torch.device) -> None:
        super().__init__()
        self.n_classes = n_classes
        buffer(self, "row", torch.zeros(in_features, device=device))
        buffer(self, "bias", torch.zeros(1, device=device))
        buffer(self, "learned", torch.zeros(1, device=device))

    def reset_buffers(self) -> None:
        for value in self.buffers(recurse=False):
            value.zero_()

    def learn(self, rows: Tensor, row_bias: Tensor | None, log_weight: Tensor) -> None:
        """After a step: update by sum_k omega_k w_k / K of its drawn classes."""
        share = torch.exp(log_weight).to(rows.dtype) / self.n_classes
        self.learned += 1.0
        rate = torch.clamp(1.0 / self.learned, min=RATE)
        drawn = share @ rows
        usable = drawn.isfinite().all()
        self.row += torch.where(usable, rate * (drawn - self.row), 0.0)
        if row_bias is not None:
            mean = share @ row_bias
            self.bias += torch.where(mean.isfinite(), rate * (mean - self.bias), 0.0)


def with_z_loss(found: Objective, c: Tensor, floor: float | None, z: float) -> Objective:
    raised = torch.zeros_like(c) if floor is None else (found.slope - floor).clamp_min(0.0)
    value = c.square() + 2.0 * c * torch.expm1(found.slope.clamp(max=LARGEST_LOG))
    factor = 1.0 + 2.0 * z * (c + raised)
    return found._replace(
        bound=found.bound - z * value,
        grad_class=found.grad_class * factor[:, None],
        grad_label=1.0 - (1.0 - found.grad_label) * factor,
    )


def smoothed(
    found: Objective, psi: Tensor, psi_y: Tensor, own: Tensor, log_weight: Tensor, anchor: Tensor, smoothing: float,
    n_classes: int,
) -> Objective:  # fmt: skip
    """`grad_class` gets an additional column, for the row m from which `anchor` (B,), a, was computed."""
    share = torch.exp(log_weight).to(psi.dtype).expand_as(psi).masked_fill(own, 0.0) / n_classes
    mean = anchor + (psi_y - anchor) / n_classes + (share * (psi - anchor[:, None])).sum(1)
    rest = 1.0 - 1.0 / n_classes - share.sum(1)
    grad_class = torch.cat([found.grad_class - smoothing * share, -smoothing * rest[:, None]], dim=1)
    return found._replace(
        bound=found.bound + smoothing * (mean - psi_y),
        grad_class=grad_class,
        grad_label=found.grad_label - smoothing * (1.0 - 1.0 / n_classes),
    )
