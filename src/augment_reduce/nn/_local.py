"""What a head knows of each row's winner before it looks at the sampled classes: q(v), v the utility that won.

    model       q(v)                       numbers a row ("parts")         at its best
    softmax     Gumbel(c, 1)               c                               c = log sum_k e^{psi_k}, whatever the label
    any other   N(m, 1 / precision)        m, log precision                E_q[f'] = 0, precision = -E_q[f'']

with f(v) = log phi(v - psi_y) + sum_{k != y} omega_k log Phi(v - psi_k). Any numbers give a valid bound; it is unbiased
for the gradient of that bound as long as they do not depend on the classes that estimate it. Three ways to get them:

    "amortised"     predicted from (h, psi_y) by a linear map that learns from every minibatch: O(D) numbers
    "persistent"    one q for each training row, kept from visit to visit; a new row starts from the prediction
    "fresh"         the prediction, corrected by a second sample of classes, independent of the first. A softmax's c
                    goes half the way: prediction and sample err independently, and the sample's error has a heavy tail

`Local` holds the state; the functions on `parts` (Q, B), Q = 1 or 2, are what `kernels/_cuda_rows.py` repeats.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..amortised import (
    LABEL_RATE,
    OFFSET_RATE,
    PRECISION_RANGE,
    SLOPE_RATE,
    first_guess,
    newton,
    residuals,
)
from ..noise import Gumbel, Noise
from . import _hash
from ._state import Kept, buffer

MODES = ("amortised", "persistent", "fresh")
MEAN_RATE = 0.01  # of the running means of h and psi_y
SECOND_SHARE = 0.5  # of "fresh": how far the second sample moves a softmax's c from where it was predicted
REFINE_NODES = 3  # of "fresh": one random draw would add its own noise to that of the second sample
MEMORY_POWER = {True: 0.9, False: 0.6}  # of alpha = (2 + visits)^-power: softmax, others (the estimator's choices)


class Local(Kept):
    """The state of one of the three ways, and what each does with it."""

    slope: Tensor
    offset: Tensor
    label_slope: Tensor
    mean: Tensor
    label_mean: Tensor
    learned: Tensor
    memory: Tensor
    visits: Tensor

    def __init__(
        self,
        noise: Noise,
        in_features: int,
        n_classes: int,
        mode: str,
        *,
        n_rows: int | None = None,
        n_nodes: int = 1,
        second_share: float = SECOND_SHARE,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"Expected local to be one of {', '.join(map(repr, MODES))}, found {mode!r}.")
        if mode == "persistent" and (n_rows is None or n_rows < 1):
            raise ValueError(
                f'local="persistent" keeps numbers for every training row and needs n_rows, found {n_rows}. '
                'Where rows have no number of their own, use local="amortised" or "fresh".'
            )
        if n_nodes < 1:
            raise ValueError(f"Expected n_nodes of at least 1, found {n_nodes}.")
        self.mode, self.n_nodes, self.second_share = mode, n_nodes, second_share
        self.softmax = type(noise) is Gumbel
        Q = 1 if self.softmax else 2
        size = n_rows if mode == "persistent" and n_rows is not None else 0
        with torch.device("cpu"):  # whatever the default device is
            self._first_guess = first_guess(noise, n_classes)
        for name, shape, dtype in (
            ("slope", (Q, in_features), torch.float32),
            ("offset", (Q,), torch.float32),
            ("label_slope", (Q,), torch.float32),
            ("mean", (in_features,), torch.float32),
            ("label_mean", (1,), torch.float32),
            ("learned", (1,), torch.int64),
            ("memory", (Q, size), torch.float32),
            ("visits", (size,), torch.int32),
        ):
            buffer(self, name, torch.zeros(shape, dtype=dtype, device=device))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        for value in self.buffers(recurse=False):
            value.zero_()
        self.offset.copy_(torch.tensor(self._first_guess, device="cpu"))

    @property
    def n_parts(self) -> int:
        return len(self.offset)

    def predict(self, hidden: Tensor, psi_y: Tensor) -> Tensor:
        """parts (Q, B) = offset + slope (h - mean) + label_slope (psi_y - label_mean); c no lower than psi_y."""
        centred = hidden - self.mean.to(hidden.dtype)
        parts = self.offset.to(hidden.dtype)[:, None] + self.slope.to(hidden.dtype) @ centred.T
        parts = parts + self.label_slope.to(hidden.dtype)[:, None] * (psi_y - self.label_mean.to(hidden.dtype))
        if self.softmax:
            return torch.maximum(parts, psi_y)
        return torch.stack([parts[0], parts[1].clamp(*PRECISION_RANGE)])

    def recall(self, parts: Tensor, index: Tensor | None) -> Tensor:
        """Persistent: the kept numbers of rows seen before, the prediction for the others."""
        if self.mode != "persistent" or index is None:
            return parts
        return torch.where(self.visits[index] > 0, self.memory[:, index].to(parts.dtype), parts)

    def refine(self, parts: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        """Fresh: parts moved by what the second sample says. Softmax: c half-way to log Z~ (all the way as long as
        nothing was learned to predict from); others: a damped Newton move."""
        if self.softmax:
            return parts + torch.where(self.learned > 0, self.second_share, 1.0).to(parts.dtype) * slope
        return newton(parts, slope, bend, parts.new_tensor(0.7))

    def nodes(
        self, parts: Tensor, key: int, counter: Tensor, n_nodes: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """v (B, J), weights (J,) and a constant (B,): E_q[f(v)] + H[q] = sum_j weight_j f(v_j) + constant.

        Softmax: E over the Gumbel is f(c) + 1, in closed form. Others: one random draw (J = 1) or Gauss-Hermite.
        """
        if self.softmax:
            return parts.T, parts.new_ones(1), torch.ones_like(parts[0])
        n_nodes = self.n_nodes if n_nodes is None else n_nodes
        z, weight = hermite(n_nodes, parts.dtype, parts.device)
        if n_nodes == 1:
            place = torch.arange(parts.shape[1], device=parts.device)
            z = _hash.normal(_hash.step_key(key, counter, _hash.NODE), place).to(parts.dtype)[:, None]
        v = parts[0][:, None] + z * torch.exp(-0.5 * parts[1])[:, None]
        return v, weight, 0.5 * (math.log(2.0 * math.pi * math.e) - parts[1])

    def learn(
        self, hidden: Tensor, psi_y: Tensor, predicted: Tensor, used: Tensor, slope: Tensor, bend: Tensor, seen: Tensor,
        index: Tensor | None, floor: float | None, counted: Tensor | None = None,
    ) -> None:  # fmt: skip
        """After the step: the prediction moves towards what the sample says, and so do the rows' own numbers.

        The best c, or m, solves E[residual] = 0 with curvature 1 by design (`residuals`), so least squares apply, in
        their normalised form (each block of features divided by its energy): for quadratics it cannot diverge while
        the three rates sum to less than 2. `seen` (B,) is 0 for rows to leave out;
        `counted` (B,) is True for rows that were left out for their scores alone: a kernel knows of these too late.
        """
        with torch.no_grad():
            rho = torch.where(seen > 0, residuals(self.softmax, predicted, used, slope, bend, floor), 0.0)
            n = seen.sum().clamp_min(1.0)
            rate = torch.clamp(1.0 / (self.learned + 1.0), min=MEAN_RATE)
            centred, label = hidden - self.mean.to(hidden.dtype), psi_y - self.label_mean.to(psi_y.dtype)
            self.mean += rate * (seen @ centred) / n
            self.label_mean += rate * (seen @ label) / n
            self.offset += torch.clamp(rate, min=OFFSET_RATE) * (rho.sum(1) / n)
            energy = (seen[:, None] * centred * centred).sum().clamp_min(1e-12)
            self.slope += SLOPE_RATE * (rho @ centred) / energy
            if not self.softmax:
                label_energy = (seen * label * label).sum().clamp_min(1e-12)
                self.label_slope += LABEL_RATE * (rho @ label) / label_energy
            self.learned += (seen > 0 if counted is None else counted).any()
            if self.mode == "persistent" and index is not None:
                self.remember(index, used, slope, bend, seen)

    def remember(self, index: Tensor, used: Tensor, slope: Tensor, bend: Tensor, seen: Tensor) -> None:
        """Each row's own numbers, moved with step size alpha = (2 + visits)^-power.

        Softmax: eta <- (1 - alpha) eta + alpha eta~ (Algorithm 1), in logs. Others: Newton.
        """
        alpha = (2.0 + self.visits[index]) ** -MEMORY_POWER[self.softmax]
        if self.softmax:
            new = used + torch.logaddexp(torch.log1p(-alpha), torch.log(alpha) + slope)
        else:
            new = newton(used, slope, bend, alpha)
        kept = seen > 0
        self.memory[:, index[kept]] = new[:, kept].to(self.memory.dtype)
        self.visits[index[kept]] += 1

    def extra_repr(self) -> str:
        return f"{self.mode!r}" + ("" if self.softmax else f", n_nodes={self.n_nodes}")


def hermite(n_nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the standard normal."""
    z, weight = np.polynomial.hermite_e.hermegauss(n_nodes)
    return torch.as_tensor(z, dtype=dtype, device=device), torch.as_tensor(
        weight / weight.sum(), dtype=dtype, device=device
    )
