"""The local step of a head: q(v) of each row, independent of the sampled classes; v is the winner's utility.

    model       q(v)                       numbers a row ("parts")         optimum
    softmax     Gumbel(c, 1)               c                               c = log sum_k e^{psi_k}, whatever the label
    any other   N(m, 1 / precision)        m, log precision                E_q[f'] = 0, precision = -E_q[f'']

with f(v) = log phi(v - psi_y) + sum_{k != y} omega_k log Phi(v - psi_k). Any parts give a valid bound; the sampled
gradient is unbiased for that of the bound if they do not depend on the classes that estimate it. Four modes:

    "amortised"     predicted from (h, psi_y) by a linear map, updated by every minibatch: O(D) numbers
    "log-sum-exp"   c(h) = log sum_m e^{mu_m h + beta_m} over M = 64 planes, convex in h as log Z is, updated by Adam on
                    the bound's gradient by c; for other models m, plus a linear term in psi_y: O(M D) numbers
    "persistent"    one q for each training row, updated at every visit; a new row starts from the prediction
    "fresh"         the prediction, corrected by a second sample of classes, independent of the first. A softmax's c
                    moves half the way: the errors are independent, and that of the sample has a heavy tail

`Local` has the state; its functions on `parts` (Q, B), Q = 1 or 2, are implemented in `nn/triton/rows.py`, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..local.amortised import (
    LABEL_RATE,
    OFFSET_RATE,
    PRECISION_RANGE,
    SLOPE_RATE,
    first_guess,
    newton,
    residuals,
)
from ..model.noise import Gumbel, Noise
from . import _hash
from ._state import Kept, buffer

MODES = ("amortised", "log-sum-exp", "persistent", "fresh")
N_PLANES = 64
PLANE_RATE, PLANE_BETAS = 5e-3, (0.9, 0.99)  # of Adam on the planes
MEAN_RATE = 0.01  # of the running means of h and psi_y
SECOND_SHARE = 0.5  # of "fresh": the step of a softmax's c from the prediction to the second sample
REFINE_NODES = 3  # of "fresh": one random node would add noise to that of the second sample
MEMORY_POWER = {True: 0.9, False: 0.6}  # of alpha = (2 + visits)^-power: softmax, others (the estimator's choices)


class Report(NamedTuple):
    """Sums over rows: their number, psi_y - its mean and its square, rho (Q,), rho times that, h - mean (D,), rho times
    that (Q, D), |h - mean|^2; of a log-sum-exp the gradient by its planes (M, D + 1)."""

    n: Tensor
    label: Tensor
    label_energy: Tensor
    rho: Tensor
    rho_label: Tensor
    centred: Tensor
    rho_centred: Tensor
    energy: Tensor
    planes: Tensor | None = None

    def plus(self, other: Report) -> Report:
        return Report(*(a if a is None or b is None else a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class Local(Kept):
    """The state of a mode, and its updates."""

    slope: Tensor
    offset: Tensor
    label_slope: Tensor
    mean: Tensor
    label_mean: Tensor
    learned: Tensor
    memory: Tensor
    visits: Tensor
    planes: Tensor
    plane_moments: Tensor
    plane_steps: Tensor

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
        with torch.device("cpu"):  # regardless of the default device
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
            *self._plane_shapes(in_features),
        ):
            buffer(self, name, torch.zeros(shape, dtype=dtype, device=device))
        self.reset_buffers()

    def _plane_shapes(self, in_features: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        if self.mode != "log-sum-exp":
            return []
        shape = (N_PLANES, in_features + 1)
        return [
            ("planes", shape, torch.float32),
            ("plane_moments", (2, *shape), torch.float32),
            ("plane_steps", (1,), torch.float32),
        ]

    def reset_buffers(self) -> None:
        for value in self.buffers(recurse=False):
            value.zero_()
        self.offset.copy_(torch.tensor(self._first_guess, device="cpu"))
        if self.mode == "log-sum-exp":
            M, D = N_PLANES, self.slope.shape[1]
            mu = torch.randn(M, D, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * (0.4 / D**0.5)
            self.planes[:, :D].copy_(mu)
            self.planes[:, D] = self._first_guess[0] - math.log(M)
            self.offset[0] = 0.0

    @property
    def n_parts(self) -> int:
        return len(self.offset)

    def predict(self, hidden: Tensor, psi_y: Tensor) -> Tensor:
        """parts (Q, B) = offset + slope (h - mean) + label_slope (psi_y - label_mean); c no lower than psi_y."""
        centred = hidden - self.mean.to(hidden.dtype)
        parts = self.offset.to(hidden.dtype)[:, None] + self.slope.to(hidden.dtype) @ centred.T
        parts = parts + self.label_slope.to(hidden.dtype)[:, None] * (psi_y - self.label_mean.to(hidden.dtype))
        if self.mode == "log-sum-exp":
            parts = torch.cat([parts[:1] + torch.logsumexp(self._heights(hidden), dim=1), parts[1:]])
        if self.softmax:
            return torch.maximum(parts, psi_y)
        return torch.stack([parts[0], parts[1].clamp(*PRECISION_RANGE)])

    def _heights(self, hidden: Tensor) -> Tensor:
        """mu_m h + beta_m, (B, M)"""
        planes = self.planes.to(hidden.dtype)
        return torch.addmm(planes[:, -1], hidden, planes[:, :-1].T)

    def _of_planes(self, hidden: Tensor, rho: Tensor) -> Tensor | None:
        """Gradient (M, D + 1) of sum_b rho_b c(h_b) by the planes."""
        if self.mode != "log-sum-exp":
            return None
        share = torch.softmax(self._heights(hidden), dim=1) * rho[0][:, None]
        return torch.cat([share.T @ hidden, share.sum(0)[:, None]], dim=1)

    def heights(self, hidden: Tensor) -> Tensor:
        """log sum_m e^{mu_m h + beta_m}, (B,), for kernels."""
        return torch.logsumexp(self._heights(hidden.detach()), dim=1)

    @torch.no_grad()
    def learn_planes(self, hidden: Tensor, rho: Tensor, usable: Tensor, n: Tensor) -> None:
        """As in `move`, for residuals written by a kernel."""
        found = self._of_planes(torch.where(usable[:, None], hidden, 0.0), rho[None])
        assert found is not None
        self._move_planes(found / n.clamp_min(1.0), usable.any())

    def _move_planes(self, gradient: Tensor, learned: Tensor) -> None:
        """One ascent step of Adam; none if no row counted."""
        learned = learned.to(torch.float32)
        self.plane_steps += learned
        t, (b1, b2) = self.plane_steps.clamp_min(1.0), PLANE_BETAS
        first, second = self.plane_moments
        first.lerp_(gradient.float(), learned * (1.0 - b1))
        second.lerp_(gradient.float().square(), learned * (1.0 - b2))
        step = first / (1.0 - b1**t) / ((second / (1.0 - b2**t)).sqrt() + 1e-8)
        self.planes += PLANE_RATE * learned * step

    def recall(self, parts: Tensor, index: Tensor | None) -> Tensor:
        """Persistent: the stored parts of rows visited before, the prediction for the others."""
        if self.mode != "persistent" or index is None:
            return parts
        return torch.where(self.visits[index] > 0, self.memory[:, index].to(parts.dtype), parts)

    def refine(self, parts: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        """Fresh: parts corrected by the second sample. Softmax: c half-way to log Z~ (all the way before the first
        update of the prediction); others: a damped Newton step."""
        if self.softmax:
            return parts + torch.where(self.learned > 0, self.second_share, 1.0).to(parts.dtype) * slope
        return newton(parts, slope, bend, parts.new_tensor(0.7))

    def nodes(
        self, parts: Tensor, key: int, counter: Tensor, n_nodes: int | None = None, *, first_row: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """v (B, J), weights (J,) and a constant (B,): E_q[f(v)] + H[q] = sum_j weight_j f(v_j) + constant.

        Softmax: E over the Gumbel is f(c) + 1, in closed form. Others: one random draw (J = 1) or Gauss-Hermite.
        """
        if self.softmax:
            return parts.T, parts.new_ones(1), torch.ones_like(parts[0])
        n_nodes = self.n_nodes if n_nodes is None else n_nodes
        z, weight = hermite(n_nodes, parts.dtype, parts.device)
        if n_nodes == 1:
            place = torch.arange(first_row, first_row + parts.shape[1], device=parts.device)
            z = _hash.normal(_hash.step_key(key, counter, _hash.NODE), place).to(parts.dtype)[:, None]
        v = parts[0][:, None] + z * torch.exp(-0.5 * parts[1])[:, None]
        return v, weight, 0.5 * (math.log(2.0 * math.pi * math.e) - parts[1])

    def report(
        self, hidden: Tensor, psi_y: Tensor, predicted: Tensor, used: Tensor, slope: Tensor, bend: Tensor, seen: Tensor,
        floor: float | None,
    ) -> Report:  # fmt: skip
        """The sums from which `move` updates the prediction; reports of chunks and of shards add up.

        `seen` (B,) is False for skipped rows.
        """
        rho = torch.where(seen, residuals(self.softmax, predicted, used, slope, bend, floor), 0.0)
        centred, label = hidden - self.mean.to(hidden.dtype), psi_y - self.label_mean.to(psi_y.dtype)
        centred, label = torch.where(seen[:, None], centred, 0.0), torch.where(seen, label, 0.0)
        return Report(
            seen.sum().to(hidden.dtype), label.sum(), label.square().sum(), rho.sum(1), rho @ label, centred.sum(0),
            rho @ centred, centred.square().sum(), self._of_planes(hidden, rho),
        )  # fmt: skip

    @torch.no_grad()
    def move(self, found: Report, learned: Tensor) -> None:
        """After the step: update the prediction from the sample. `learned`: whether any row counted.

        The optimal c, or m, solves E[residual] = 0 with curvature 1 by design (`residuals`), so least squares apply, in
        their normalised form (each block of features divided by its energy): for quadratics it cannot diverge while
        the three rates sum to less than 2.
        """
        n = found.n.clamp_min(1.0)
        rate = torch.clamp(1.0 / (self.learned + 1.0), min=MEAN_RATE)
        self.mean += rate * found.centred / n
        self.label_mean += rate * found.label / n
        linear = torch.ones_like(found.rho)
        if found.planes is not None:
            linear[0] = 0.0  # replaced by the planes
            self._move_planes(found.planes / n, learned)
        self.offset += torch.clamp(rate, min=OFFSET_RATE) * (linear * found.rho / n)
        self.slope += SLOPE_RATE * linear[:, None] * found.rho_centred / found.energy.clamp_min(1e-12)
        if not self.softmax:
            self.label_slope += LABEL_RATE * found.rho_label / found.label_energy.clamp_min(1e-12)
        self.learned += learned

    def remember(self, index: Tensor, used: Tensor, slope: Tensor, bend: Tensor, seen: Tensor) -> None:
        """Update the stored parts of each row with step size alpha = (2 + visits)^-power.

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
