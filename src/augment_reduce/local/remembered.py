"""The E step: each training row's q(eps_n), kept from visit to visit, O(N) numbers and nothing else.

    local step         model      q(eps)                  moves by
    NaturalGradient    softmax    Gumbel(log eta, 1)      eta <- (1-alpha) eta + alpha eta~   (Algorithm 1), in logs
    Reparameterised    any        location-scale          gradient on (mu, gamma), eq. (9)    (Algorithm 2)
    Newton             any        N(mu, 1 / precision)    persistent stochastic Newton

`uses_updated` says which q the M step of the same minibatch holds. True is the paper: q after the E step, which
has seen the very classes that the M step uses, so the gradient is biased towards sampled softmax. False is ours:
q as it was before, independent of the classes just drawn, so that the gradient of the bound at that q is unbiased.
(With every class in the sum nothing is drawn, and True is right.) `cross_fitting.py` has the one that is new and
independent, `amortised.py` the one that is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..model import bounds
from ..model.bounds import Exponentials, Nodes, log_eta_tilde
from ..model.compiled import loops_for
from ..model.gaussian import fit_gaussian, gaussian_nodes, newton_move
from ..model.noise import Logistic, Noise, Normal
from ..optim import Prior, RowOptimizer
from ..sampling import Sampled
from ..support.layout import Entry, Layout
from ..support.ranges import MOST_NODES, check_number
from ..support.seeds import draw_seed
from .base import VISITS, Clock, FusedStep, LocalState, LocalStep, StepSize
from .by_kernel import NOTHING, by_kernel, fused_step, with_kernel

MOST_MOVES = 1000
SMALLEST_POSITIVE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class NaturalGradient(LocalStep):
    """Softmax. State `log_eta`; `floor` guards the M step (see `floored`)."""

    name: ClassVar[str] = "natural-gradient"
    # 0.6, not the paper's 0.9: eta starts near K and must forget that while the weights still move (docs/math.md)
    step_size: StepSize = field(default_factory=lambda: StepSize(1.0, 0.6, "visits"))
    uses_updated: bool = False
    floor: bool = True

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        # eta = 2 before the first visit: the authors' start (they keep eta without its leading 1, at 1).
        return {
            "log_eta": torch.full((n_rows,), math.log(2.0), dtype=dtype),
            "visits": torch.zeros(n_rows, dtype=torch.int32),
        }

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        return ({"log_eta": Entry("weights", ("N",)), "visits": VISITS},)

    def start(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor) -> None:
        state["log_eta"][rows] = log_eta_tilde(gap, log_weight, noise)
        state["visits"][rows] = 1

    def update(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.blend(state, rows, log_eta_tilde(gap, log_weight, noise), clock)

    def blend(self, state: LocalState, rows: Tensor, log_tilde: Tensor, clock: Clock) -> None:
        """eta <- (1 - alpha) eta + alpha eta~, as log-sum-exp of the two logs."""
        log_eta = state["log_eta"][rows]
        visits = state["visits"][rows]
        if self.step_size.counts == "visits":
            alpha = self.step_size.at(visits, clock, log_eta.dtype)
            old, new = torch.log1p(-alpha) + log_eta, torch.log(alpha) + log_tilde
        else:  # one alpha below 1 for all rows: plain numbers
            alpha_now = self.step_size.now(clock)
            old, new = log_eta + math.log1p(-alpha_now), log_tilde + math.log(alpha_now)
        state["log_eta"][rows] = torch.logaddexp(old, new)
        state["visits"][rows] = visits + 1

    def e_and_m(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, clock: Clock,
        generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        if self.kernel is not None and self.kernel_serves(sampled, len(gap)):
            return by_kernel(self, state, rows, noise, gap, sampled.log_weight, clock, generator, want_bound)
        exponentials = Exponentials(gap, sampled.log_weight, noise)
        if self.uses_updated:
            self.blend(state, rows, exponentials.log_eta_tilde, clock)
        log_eta = state["log_eta"][rows]
        bound = exponentials.softmax_bound(log_eta) if want_bound else None
        log_eta_m, floor_hits = self.floored(log_eta, gap, sampled, exponentials, noise)
        if not self.uses_updated:
            self.blend(state, rows, exponentials.log_eta_tilde, clock)
        return bound, exponentials.softmax_bound_grad(log_eta_m), floor_hits

    def on(self, kernels: ModuleType, noise: Noise) -> NaturalGradient:
        return with_kernel(self, getattr(kernels, "natural_gradient", None))

    def for_kernel(
        self, state: LocalState, noise: Noise, clock: Clock, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple:
        held = state["log_eta"].numpy(), NOTHING[dtype], state["visits"].numpy()
        flags = self.step_size.counts == "visits", self.uses_updated, self.floor
        return held, self.step_size.numbers(clock, dtype), flags, ()

    def kernel_serves(self, sampled: Sampled, n_rows: int) -> bool:
        return super().kernel_serves(sampled, n_rows) and (sampled.distinct or not self.floor)

    def kernel_weights(self, log_weight: Tensor) -> Tensor:
        return log_weight

    def fused_step(
        self, kernels: ModuleType, noise: Noise, X: Rows, labels: Tensor, parameters: Parameters,
        optimizer: RowOptimizer, prior: Prior | None,
    ) -> FusedStep | None:  # fmt: skip
        return fused_step(self, kernels, noise, X, labels, parameters, optimizer, prior)

    def full_bound(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor) -> Tensor:
        return bounds.softmax_bound(gap, gap.new_zeros(()), state["log_eta"][rows].to(gap.dtype))

    def floored(
        self, log_eta: Tensor, gap: Tensor, sampled: Sampled, exponentials: Exponentials, noise: Noise = bounds.SOFTMAX
    ) -> tuple[Tensor, int]:
        """log eta kept above log(1 + sum over the distinct sampled classes of e^gap) - 1, and how often that acted.

        The unweighted sum is part of eta*'s own, so the floor lies more than 1 below the best log eta: where it
        acts, the old eta was wrong by more than a factor e. It keeps e^(gap - log eta) below e (the idea of U-max,
        Fagan and Iyengar 2018). It looks at the classes just drawn, so where it acts the gradient is no longer
        unbiased; the count says how often.
        """
        if not self.floor:
            return log_eta, 0
        if sampled.distinct and sampled.log_weight.ndim == 0:  # one weight for all: the sum is known already
            log_sum = exponentials.log_sum - sampled.log_weight
        else:
            log_sum = noise.log_total(distinct_gap(gap, sampled))
        floor = F.softplus(log_sum) - 1.0
        return torch.maximum(log_eta, floor), int((floor > log_eta).sum())


def distinct_gap(gap: Tensor, sampled: Sampled) -> Tensor:
    """gap with every repetition of a class in a row's sample set to -inf."""
    if sampled.distinct:
        return gap
    ordered, order = torch.sort(sampled.classes, dim=-1, stable=True)
    repeated_sorted = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    repeated = torch.zeros_like(repeated_sorted).scatter(-1, order, repeated_sorted)
    repeated = F.pad(repeated, (0, gap.shape[-1] - repeated.shape[-1]))  # a row's own are masked elsewhere
    return gap.masked_fill(repeated, -torch.inf)


@dataclass(frozen=True)
class Reparameterised(LocalStep):
    """Algorithm 2: q = mu + sigma u, sigma = softplus(gamma), one draw u of the noise's variational family.

        mu    <- mu    + alpha g                                with  g = d/deps log p~(y, eps | psi)  at  eps = mu + sigma u
        gamma <- gamma + alpha (g u + 1 / sigma) dsigma/dgamma        eq. (9); the 1 / sigma is the entropy's gradient

    The authors' code leaves the entropy out (`entropy_gradient=False`).
    """  # noqa: E501

    name: ClassVar[str] = "gradient"
    step_size: StepSize = field(default_factory=lambda: StepSize(0.05, 0.5, "visits"))
    uses_updated: bool = False
    entropy_gradient: bool = True

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        return {
            "mu": torch.zeros(n_rows, dtype=dtype),
            "gamma": torch.full((n_rows,), math.log(math.e - 1.0), dtype=dtype),  # sigma = 1
            "visits": torch.zeros(n_rows, dtype=torch.int32),
        }

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        return ({"mu": Entry("weights", ("N",)), "gamma": Entry("weights", ("N",)), "visits": VISITS},)

    def start(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor) -> None:
        """A Gaussian fitted to the classes just sampled, as q's first location and scale."""
        mu, precision = fit_gaussian(noise, gap, log_weight)
        sigma = precision.rsqrt()
        state["mu"][rows] = mu
        state["gamma"][rows] = torch.log(torch.expm1(sigma))
        state["visits"][rows] = 1

    def update(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        mu, gamma, visits = state["mu"][rows], state["gamma"][rows], state["visits"][rows]
        sigma = F.softplus(gamma)
        u = noise.variational_family().rsample((len(rows),), generator=generator, dtype=mu.dtype)
        eps = mu + sigma * u
        pull = noise.summed(noise.hazards(gap, log_weight, eps[:, None], eps.new_ones(1)).sum(dim=-1))
        slope = noise.dlog_prob(eps) + pull
        alpha = self.step_size.at(visits, clock, mu.dtype)
        entropy_slope = 1.0 / sigma if self.entropy_gradient else 0.0
        state["mu"][rows] = mu + alpha * slope
        state["gamma"][rows] = gamma + alpha * (slope * u + entropy_slope) * -torch.expm1(-sigma)
        state["visits"][rows] = visits + 1

    def e_and_m(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, clock: Clock,
        generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        if self.kernel is not None and self.kernel_serves(sampled, len(gap)):
            return by_kernel(self, state, rows, noise, gap, sampled.log_weight, clock, generator, want_bound)
        return super().e_and_m(state, rows, noise, gap, sampled, clock, generator, want_bound)

    def for_kernel(
        self, state: LocalState, noise: Noise, clock: Clock, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple:
        family = noise.variational_family()
        held = state["mu"].numpy(), state["gamma"].numpy(), state["visits"].numpy()
        flags = self.step_size.counts == "visits", self.uses_updated, self.entropy_gradient
        draws = isinstance(family, Normal), family.entropy, draw_seed(generator), draw_seed(generator)
        return held, self.step_size.numbers(clock, dtype), flags, draws

    def kernel_weights(self, log_weight: Tensor) -> Tensor:
        return torch.exp(log_weight)

    def fused_step(
        self, kernels: ModuleType, noise: Noise, X: Rows, labels: Tensor, parameters: Parameters,
        optimizer: RowOptimizer, prior: Prior | None,
    ) -> FusedStep | None:  # fmt: skip
        return fused_step(self, kernels, noise, X, labels, parameters, optimizer, prior)

    def on(self, kernels: ModuleType, noise: Noise) -> Reparameterised:
        """By a kernel where the noise has scalar functions and its family is one whose draws are compiled."""
        make, loops = getattr(kernels, "reparameterised", None), loops_for(noise)
        if make is None or loops is None or type(noise.variational_family()) not in (Normal, Logistic):
            return self
        return with_kernel(self, loops.generated(make))

    def nodes(self, state: LocalState, rows: Tensor, noise: Noise, generator: torch.Generator) -> Nodes:
        """One fresh draw from q, the paper's M step."""
        family = noise.variational_family()
        mu, sigma = state["mu"][rows], F.softplus(state["gamma"][rows])
        u = family.rsample((len(rows), 1), generator=generator, dtype=mu.dtype)
        return Nodes(mu[:, None] + sigma[:, None] * u, mu.new_ones(1), family.entropy + torch.log(sigma))

    def full_bound(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor) -> Tensor:
        family = noise.variational_family()
        mu, sigma = state["mu"][rows].to(gap.dtype), F.softplus(state["gamma"][rows].to(gap.dtype))
        u, weight = family_nodes(family, mu.dtype)
        q = Nodes(mu[:, None] + sigma[:, None] * u, weight, family.entropy + torch.log(sigma))
        return bounds.noise_bound(noise, gap, gap.new_zeros(()), q)


@dataclass(frozen=True)
class Newton(LocalStep):
    """Persistent stochastic Newton on a Gaussian q, for any noise.

    With f(eps) = log phi(eps) + sum omega_k log Phi(eps - gap_k), the best Gaussian satisfies E_q[f'] = 0 and
    precision = -E_q[f'']. Each visit moves towards both, by natural gradient (Khan and Lin 2017):

        precision <- (1 - alpha) precision + alpha max(-E_q[f''], tiny)         mu <- mu + alpha E_q[f'] / precision

    E_q by Gauss-Hermite. E_q[f'] and E_q[f''] are linear in the sum over classes, so a sample estimates them
    without bias. One move is at most two standard deviations of q; a visit makes `n_moves` of them, after the first at
    most half the way: where that went too far they have to come back.
    """

    name: ClassVar[str] = "newton"
    step_size: StepSize = field(default_factory=lambda: StepSize(1.0, 0.6, "visits"))
    uses_updated: bool = False
    n_nodes: int = 5
    n_moves: int = 1

    def __post_init__(self) -> None:
        check_number("n_nodes", self.n_nodes, 1, MOST_NODES, whole=True)
        check_number("n_moves", self.n_moves, 1, MOST_MOVES, whole=True)

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        return {
            "mu": torch.zeros(n_rows, dtype=dtype),
            "precision": torch.ones(n_rows, dtype=dtype),
            "visits": torch.zeros(n_rows, dtype=torch.int32),
        }

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        positive = Entry("weights", ("N",), SMALLEST_POSITIVE)
        return ({"mu": Entry("weights", ("N",)), "precision": positive, "visits": VISITS},)

    def start(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor) -> None:
        state["mu"][rows], state["precision"][rows] = fit_gaussian(noise, gap, log_weight, n_nodes=self.n_nodes)
        state["visits"][rows] = 1

    def update(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self._move(state, rows, noise, gap, log_weight, clock)

    def _move(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock
    ) -> Tensor:
        mu, precision, visits = state["mu"][rows], state["precision"][rows], state["visits"][rows]
        alpha = self.step_size.at(visits, clock, mu.dtype)
        mu, precision, hazard = newton_move(noise, gap, log_weight, mu, precision, alpha, self.n_nodes)
        for _ in range(self.n_moves - 1):
            mu, precision, _ = newton_move(noise, gap, log_weight, mu, precision, alpha.clamp_max(0.5), self.n_nodes)
        state["mu"][rows], state["precision"][rows], state["visits"][rows] = mu, precision, visits + 1
        return hazard

    def e_and_m(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, clock: Clock,
        generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        """As in the base class, but where the M step holds the old q, its gradient falls out of the E step.

        Where it holds the new one, a row's first visit fits q to the classes at hand: from q's first state one move is
        far from enough, and the weights would follow a q that knows nothing.
        """
        if self.uses_updated:
            new = self.unvisited(state, rows)
            if new.any():
                log_weight = sampled.log_weight.expand_as(gap)[new]
                self.start(state, rows[new], noise, gap[new], log_weight)
            return super().e_and_m(state, rows, noise, gap, sampled, clock, generator, want_bound)
        bound = None
        if want_bound:
            bound = bounds.noise_bound(noise, gap, sampled.log_weight, self.nodes(state, rows, noise, generator))
        return bound, -self._move(state, rows, noise, gap, sampled.log_weight, clock), 0

    def nodes(self, state: LocalState, rows: Tensor, noise: Noise, generator: torch.Generator) -> Nodes:
        return gaussian_nodes(state["mu"][rows], state["precision"][rows], self.n_nodes)

    def full_bound(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor) -> Tensor:
        q = gaussian_nodes(state["mu"][rows].to(gap.dtype), state["precision"][rows].to(gap.dtype), n_nodes=40)
        return bounds.noise_bound(noise, gap, gap.new_zeros(()), q)


def family_nodes(family: Noise, dtype: torch.dtype, n_nodes: int = 61) -> tuple[Tensor, Tensor]:
    """Trapezoid nodes and weights of a standard variational family, out to where its density is 1e-16 of the peak."""
    reach = 8.6 if isinstance(family, Normal) else 38.0
    u = torch.linspace(-reach, reach, n_nodes, dtype=torch.float64)
    weight = torch.exp(family.log_prob(u))
    return u.to(dtype), (weight / weight.sum()).to(dtype)
