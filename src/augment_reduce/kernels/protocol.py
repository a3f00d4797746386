"""What kernels are given, and what a backend offers.

Every backend (`reference`, `cpu.backend`, `device`) has the functions that `reference` lists, with the same shapes and
results. Where it can do several verbs of a step in one pass it offers a class besides, which local steps look for:

    cross_fitted_softmax(n_classes, log_floor)
    cross_fitted_grid(loops, n_classes, log_floor, nodes, smooth=...)
    natural_gradient, reparameterised                  reduce, solve and gradient of the paper's local steps
    step_by_rows(X, labels, e_and_m, parameters, optimizer, prior)   score to push with one of these; or None
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass
class Parameters:
    """Weights (K, D), biases (K,), and what the row optimiser remembers of each."""

    weight: Tensor
    bias: Tensor
    weight_state: list[Tensor] = field(default_factory=list)
    bias_state: list[Tensor] = field(default_factory=list)


class Prior(Protocol):
    """See `optim.Prior`."""

    variance: float
    inverse_counts: Tensor
    inverse_rows: float

    @property
    def mode(self) -> int: ...


class RowOptimizer(Protocol):
    """See `optim.RowOptimizer`."""

    @property
    def rowwise(self) -> bool: ...

    @property
    def n_states(self) -> int: ...

    @property
    def entry(self) -> Any: ...

    @property
    def kind(self) -> int: ...

    def for_biases(self) -> RowOptimizer: ...

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]: ...

    def apply(self, w: Tensor, g: Tensor, c: Tensor, state: list[Tensor], t: int, prior: Prior | None) -> None: ...
