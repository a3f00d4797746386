"""Local steps by a backend's kernel: on gaps that are there, or in one pass with the scores and the push."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..model.noise import Noise
from ..model.scores import pair_shares
from ..optim import Prior, RowOptimizer
from ..sampling import Minibatch, Sampled
from ..support.finite import not_finite
from .base import Clock, LocalState, LocalStep

NOTHING: dict[torch.dtype, np.ndarray] = {t: torch.empty(0, dtype=t).numpy() for t in (torch.float32, torch.float64)}


def with_kernel(rule: Any, kernel: Any) -> Any:
    """A copy of a local step that is carried out by this kernel; itself where there is none."""
    if kernel is None:
        return rule
    bound = copy.copy(rule)
    object.__setattr__(bound, "kernel", kernel)
    return bound


def by_kernel(
    rule: LocalStep, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
    generator: torch.Generator, want_bound: bool,
) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
    """`rule.e_and_m` by its kernel."""
    gap, weights = gap.contiguous(), rule.kernel_weights(log_weight).to(gap.dtype).reshape(-1).numpy()
    grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
    of_rule = rule.for_kernel(state, noise, clock, generator, gap.dtype)
    per_row = int(log_weight.ndim > 0)
    hits = rule.kernel(0, rows.numpy(), gap.numpy(), weights, per_row, *of_rule, bound.numpy(), grad.numpy())
    return (bound if want_bound else None), grad, hits


class StepByRows:
    """A `FusedStep` by `kernels.cpu.by_rows`."""

    def __init__(self, rule: LocalStep, noise: Noise, by_rows: Any) -> None:
        self.rule, self.noise, self.by_rows = rule, noise, by_rows
        self.weighed: tuple = (None, None)  # log weights, and what the kernel takes in their place

    def serves(self, sampled: Sampled, n_rows: int) -> bool:
        return not sampled.shared and sampled.mask is None and self.rule.kernel_serves(sampled, n_rows)

    def __call__(
        self, minibatch: Minibatch, sampled: Sampled, state: LocalState, row_scale: Tensor | float, prior_scale: float,
        *, clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, int]:  # fmt: skip
        classes, dtype = sampled.classes, minibatch.parameters.weight.dtype
        share = None
        if self.by_rows.with_shares:
            share = pair_shares(sampled, classes, prior_scale).to(dtype).flatten().numpy()
        nothing = NOTHING[dtype]
        bound = np.empty(len(classes), nothing.dtype) if want_bound else nothing
        scale = row_scale.numpy() if isinstance(row_scale, Tensor) else np.array([row_scale], nothing.dtype)
        of_rule = self.rule.for_kernel(state, self.noise, clock, generator, dtype)
        try:
            hits = self.by_rows(
                minibatch.rows, classes.contiguous().numpy(), scale, share, self._weights(sampled, dtype), of_rule,
                clock.iteration, bound,
            )  # fmt: skip
        except FloatingPointError:
            raise not_finite() from None
        return (torch.from_numpy(bound) if want_bound else None), hits

    def _weights(self, sampled: Sampled, dtype: torch.dtype) -> np.ndarray:
        if self.weighed[0] is not sampled.log_weight:
            weights = self.rule.kernel_weights(sampled.log_weight).to(dtype).reshape(-1).numpy()
            self.weighed = sampled.log_weight, weights
        return self.weighed[1]


def fused_step(
    rule: LocalStep, kernels: ModuleType, noise: Noise, X: Rows, labels: Tensor, parameters: Parameters,
    optimizer: RowOptimizer, prior: Prior | None,
) -> StepByRows | None:  # fmt: skip
    """Where q follows the classes at hand: else rows that come for the first time have a draw of their own."""
    make = getattr(kernels, "step_by_rows", None)
    if make is None or rule.kernel is None or not rule.uses_updated:
        return None
    by_rows = make(X, labels, rule.kernel, parameters, optimizer, prior)
    return None if by_rows is None else StepByRows(rule, noise, by_rows)
