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

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import bounds
from ..model.bounds import Exponentials, Nodes, log_eta_tilde
from ..model.compiled import loops_for
from ..model.gaussian import fit_gaussian, gaussian_nodes, newton_move
from ..model.noise import Logistic, Noise, Normal
from ..model.scores import ByScore, Scored
from ..sampling import Minibatch, Sampled
from ..sharding import Partition
from ..support.layout import MOST_VISITS, Entry, Layout
from ..support.ranges import MOST_NODES, check_number
from ..support.seeds import draw_seed

LocalState = dict[str, Tensor]
VISITS = Entry("int32", ("N",), 0, MOST_VISITS)
MOST_MOVES = 1000
SMALLEST_POSITIVE = float(np.finfo(np.float32).tiny)


class Clock(NamedTuple):
    """What a step size may depend on; both count from 1. And where in its epoch this is, from 0, if it ends at all."""

    iteration: int
    epoch: int
    place: int = 0
    per_epoch: int = 0  # steps; 0: no end is in sight

    def later(self, steps: int) -> Clock:
        """So many steps later."""
        ended, place = divmod(self.place + steps, self.per_epoch) if self.per_epoch else (0, self.place)
        return Clock(self.iteration + steps, self.epoch + ended, place, self.per_epoch)


@dataclass(frozen=True)
class StepSize:
    """alpha = scale (1 + c)^-power, with c the row's earlier visits, the epoch or the iteration."""

    scale: float = 1.0
    power: float = 0.9
    counts: str = "visits"  # "visits" | "epoch" | "iteration"

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 0.0)
        check_number("power", self.power, 0.0)
        if self.counts not in ("visits", "epoch", "iteration"):
            raise ValueError(f"Expected counts to be 'visits', 'epoch' or 'iteration', found {self.counts!r}.")

    def at(self, visits: Tensor, clock: Clock, dtype: torch.dtype) -> Tensor:
        if self.counts == "visits":
            return self.scale * (1.0 + visits.to(dtype)) ** -self.power
        return torch.full(visits.shape, self.now(clock), dtype=dtype)

    def numbers(self, clock: Clock, dtype: torch.dtype) -> tuple:
        """(scale, power, alpha now), for kernels, in the dtype of the weights."""
        number = np.float32 if dtype == torch.float32 else np.float64
        return tuple(map(number, (self.scale, self.power, 0.0 if self.counts == "visits" else self.now(clock))))

    def now(self, clock: Clock) -> float:
        """The alpha of all rows, where it counts epochs or iterations."""
        count = clock.epoch if self.counts == "epoch" else clock.iteration
        return self.scale * (1.0 + count) ** -self.power


class FusedPass(Protocol):
    """Reduce, solve and gradient at once, for samples that it serves."""

    def serves(self, sampled: Sampled) -> bool: ...

    def __call__(
        self, scored: Scored, row_scale: Tensor | float, prior_scale: float, *, want_bound: bool, want_shares: bool
    ) -> ByScore:
        """`row_scale`: of each row's gradient. Overwrites the scores."""
        ...


class ShardPass(Protocol):
    """Reduce, solve and gradient over ranks with one all-reduce a step: see `shard_terms`, `late`, `crossed_shards`."""

    needs_label_scores: bool  # of all labels, before it begins

    def __call__(self, ask: Any) -> Any:
        """What can be pushed now: this step's gradient, or that of the one before; None: nothing yet."""
        ...

    def settle(self) -> Any:
        """The same, of the step before, which is brought to its end."""
        ...

    def pause(self) -> dict[str, Tensor]:
        """For a checkpoint between two steps: what the next one needs of the one before, the same on every rank."""
        ...

    def go_on(self, late: Mapping[str, Tensor]) -> None:
        """From what `pause` gave, on as many ranks or on others."""
        ...


class LocalStep:
    """Base of the local steps. `state` maps names to (N,) tensors; `rows` indexes them."""

    name: ClassVar[str]
    uses_updated: bool
    remembers: ClassVar[bool] = True  # whether it keeps numbers for every row
    amortises: ClassVar[bool] = False  # whether q comes from the features, by what has been learned about them
    takes_halves: ClassVar[bool] = False  # whether it needs the classes drawn in two halves
    numbers_a_row: int = 3  # how many it keeps, where it does
    kernel: ClassVar[Any] = None  # of a backend that does `e_and_m`

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        raise TypeError(f"{type(self).__name__} does not say its state.")

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        """What a state may look like in a model file; none: it is not checked there."""
        return ()

    def start(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor) -> None:
        """First visit: set q from classes drawn for that alone."""
        raise TypeError(f"{type(self).__name__} has no first visit of its own.")

    def update(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        """E step: move q of these rows towards its optimum for these classes."""
        raise TypeError(f"{type(self).__name__} does not say how it moves.")

    def e_and_m(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, clock: Clock,
        generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        """Both steps on one sample, in the order of `uses_updated`.

        Returns what the weights need, for the q held: the bound (B,), its gradient by gap (B, S), how often a floor
        acted. Here for every q that offers `nodes`; the softmax has its closed form.
        """
        if self.uses_updated:
            self.update(state, rows, noise, gap, sampled.log_weight, clock, generator)
        q = self.nodes(state, rows, noise, generator)
        bound = bounds.noise_bound(noise, gap, sampled.log_weight, q) if want_bound else None
        grad = bounds.noise_bound_grad(noise, gap, sampled.log_weight, q)
        if not self.uses_updated:
            self.update(state, rows, noise, gap, sampled.log_weight, clock, generator)
        return bound, grad, 0

    def both_steps(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor, sampled: Sampled,
        clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        """What a step calls: `e_and_m`, for steps that look no further than the row's number and its gaps."""
        rows = torch.from_numpy(minibatch.rows)
        return self.e_and_m(state, rows, noise, gap, sampled, clock, generator, want_bound)

    def on(self, kernels: ModuleType, noise: Noise) -> LocalStep:
        """The same step, by a compiled kernel of this backend if it has one; see `with_kernel`."""
        return self

    def fused(self, kernels: ModuleType, noise: Noise, n_classes: int) -> FusedPass | None:
        """One pass of a backend that reduces, solves and gives the gradient; None where it has none for this step."""
        return None

    def over_ranks(self, noise: Noise, partition: Partition) -> ShardPass | None:
        """A pass with one all-reduce a step, if there is one; else `both_steps` asks its noise for all ranks' sums."""
        return None

    def bound_on_all(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor,
        sampled: Sampled | None = None,
    ) -> Tensor:  # fmt: skip
        """What is reported as the bound's gap is measured from: `full_bound`, likewise. `sampled`: halves, if taken."""
        return self.full_bound(state, torch.from_numpy(minibatch.rows), noise, gap)

    def full_bound(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor) -> Tensor:
        """(B,) the bound with these rows' stored q and every other class in `gap`: what is reported as its gap."""
        raise TypeError(f"{type(self).__name__} does not say its bound.")

    def nodes(self, state: LocalState, rows: Tensor, noise: Noise, generator: torch.Generator) -> Nodes:
        raise TypeError(f"{type(self).__name__} does not say its nodes.")

    def knows(self, state: LocalState, noise: Noise, n_classes: int) -> bool:
        """Whether a state that is not of rows is of this model and number of classes."""
        return False

    def unvisited(self, state: LocalState, rows: Tensor) -> Tensor:
        """(B,) True for rows that have no q of their own yet."""
        return state["visits"][rows] == 0


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
        if self.kernel is not None and one_weight_a_row(gap, sampled) and (sampled.distinct or not self.floor):
            return self._by_kernel(state, rows, gap, sampled.log_weight, clock, want_bound)
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

    def _by_kernel(
        self, state: LocalState, rows: Tensor, gap: Tensor, log_weight: Tensor, clock: Clock, want_bound: bool
    ) -> tuple[Tensor | None, Tensor, int]:
        gap = gap.contiguous()
        grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
        flags = self.step_size.counts == "visits", self.uses_updated, self.floor
        hits = self.kernel(
            (state["log_eta"].numpy(), state["visits"].numpy()), rows.numpy(), gap.numpy(),
            log_weight.to(gap.dtype).reshape(-1).numpy(), int(log_weight.ndim > 0),
            self.step_size.numbers(clock, gap.dtype), flags, bound.numpy(), grad.numpy(),
        )  # fmt: skip
        return (bound if want_bound else None), grad, hits

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


def one_weight_a_row(gap: Tensor, sampled: Sampled) -> bool:
    """Whether the weights are one number, or one for each row: those that compiled steps know."""
    return sampled.log_weight.ndim == 0 or tuple(sampled.log_weight.shape) == (len(gap), 1)


def with_kernel(rule: Any, kernel: Any) -> Any:
    """A copy of a local step that is carried out by this kernel; itself where there is none."""
    if kernel is None:
        return rule
    bound = copy.copy(rule)
    object.__setattr__(bound, "kernel", kernel)
    return bound


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
        if self.kernel is None or not one_weight_a_row(gap, sampled):
            return super().e_and_m(state, rows, noise, gap, sampled, clock, generator, want_bound)
        gap, log_weight, family = gap.contiguous(), sampled.log_weight, noise.variational_family()
        grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
        omega = torch.exp(log_weight).to(gap.dtype).reshape(-1)
        flags = self.step_size.counts == "visits", self.uses_updated, self.entropy_gradient
        self.kernel(
            isinstance(family, Normal), (state["mu"].numpy(), state["gamma"].numpy(), state["visits"].numpy()),
            rows.numpy(), gap.numpy(), omega.numpy(), int(log_weight.ndim > 0),
            self.step_size.numbers(clock, gap.dtype), flags, family.entropy,
            (draw_seed(generator), draw_seed(generator)), bound.numpy(), grad.numpy(),
        )  # fmt: skip
        return (bound if want_bound else None), grad, 0

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
