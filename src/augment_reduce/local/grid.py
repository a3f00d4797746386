"""q(eps_n) on a grid of nodes (`model.grid`): tight for every noise, where a Gaussian q leaves a gap.

source           q of a row comes from                                       worth it
"cross-fitted"   one half of the classes drawn, for the bound on the other   from four classes on
"remembered"     its earlier visits: the place of its nodes and log q there  where all classes are summed, or few
                                                                             rows are visited often
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from ..model import bounds, grid, quadrature
from ..model.bounds import Nodes
from ..model.compiled import loops_for
from ..model.grid import Place
from ..model.noise import Noise
from ..sampling import Minibatch, Sampled
from ..support.layout import Entry, Layout
from ..support.ranges import MOST_NODES, check_number
from .base import VISITS, Clock, FusedPass, LocalState, LocalStep, StepSize
from .cross_fitting import FusedCrossFitting, different, drawn_from, from_halves, part_of
from .remembered import SMALLEST_POSITIVE

SOURCES = ("auto", "cross-fitted", "remembered")


@dataclass(frozen=True)
class Grid(LocalStep):
    """q on `n_nodes` nodes around the mode of a row's integrand; three times as many for a noise with kinks or heavy
    tails.

    - `source`: as above. "auto" remembers where all classes are summed or fewer than four are drawn;
    - `floor`: see `CrossFitted`; `step_size`, `uses_updated`: see `Newton`. Both are about one source each.
    """

    name: ClassVar[str] = "grid"
    n_nodes: int = 11
    source: str = "auto"
    step_size: StepSize = field(default_factory=lambda: StepSize(1.0, 0.6, "visits"))
    uses_updated: bool = False
    floor: float | None = 1.0

    def __post_init__(self) -> None:
        check_number("n_nodes", self.n_nodes, 3, MOST_NODES, whole=True)
        if self.source not in SOURCES:
            raise ValueError(f"Expected source to be one of {', '.join(map(repr, SOURCES))}, found {self.source!r}.")
        if self.floor is not None and not self.floor >= 0.0:
            raise ValueError(f"Expected floor to be None or a number from 0 up, found {self.floor}.")

    def resolved(self, *, may_halve: bool, all_classes: bool) -> Grid:
        """With a source. Where all classes are in the sum nothing is random: q goes all the way, before the M step."""
        if self.source == "cross-fitted":
            return replace(self, uses_updated=True)
        if all_classes:
            return replace(self, source="remembered", step_size=StepSize(1.0, 0.0, "visits"), uses_updated=True)
        if self.source == "auto" and may_halve:
            return replace(self, source="cross-fitted", uses_updated=True)
        return replace(self, source="remembered")

    @property
    def takes_halves(self) -> bool:  # type: ignore[override]
        return self.source == "cross-fitted"

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.source != "cross-fitted"

    @property
    def numbers_a_row(self) -> int:  # type: ignore[override]
        return 3 if self._is_exact else 3 + self.n_nodes

    # ---- state ----

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        if not self.remembers:
            return {}
        return {
            "mode": torch.zeros(n_rows, dtype=dtype),
            "precision": torch.ones(n_rows, dtype=dtype),
            "log_density": torch.zeros(n_rows, 0, dtype=dtype),  # its nodes are known when the noise is
            "visits": torch.zeros(n_rows, dtype=torch.int32),
        }

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        return ({
            "mode": Entry("weights", ("N",)), "precision": Entry("weights", ("N",), SMALLEST_POSITIVE),
            "log_density": Entry("weights", ("N", "J")), "visits": VISITS,
        },)  # fmt: skip

    def unvisited(self, state: LocalState, rows: Tensor) -> Tensor:
        if not self.remembers:
            return torch.zeros(len(rows), dtype=torch.bool)
        return state["visits"][rows] == 0

    def start(self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor) -> None:
        place = grid.find_place(noise, gap, log_weight)
        self._keep(state, rows, place, 1)
        if not self._is_exact:
            eps, log_step = grid.nodes_at(noise, place, self.n_nodes)
            self._densities(state, noise)[rows] = grid.log_density(noise, gap, log_weight, eps, log_step)

    @property
    def _is_exact(self) -> bool:
        """Whether the sums are those of this step alone, so that no density need be remembered."""
        return self.uses_updated and self.step_size.power == 0.0 and self.step_size.scale == 1.0

    def _keep(self, state: LocalState, rows: Tensor, place: Place, visits: Tensor | int) -> None:
        state["mode"][rows], state["precision"][rows], state["visits"][rows] = *place, visits

    def _densities(self, state: LocalState, noise: Noise) -> Tensor:
        """(N, J), made at the first visit of all."""
        J = len(grid.standard_grid(noise, self.n_nodes)[0])
        if state["log_density"].shape[1] != J:
            state["log_density"] = state["log_density"].new_zeros(len(state["mode"]), J)
        return state["log_density"]

    # ---- steps ----

    def both_steps(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor, sampled: Sampled,
        clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        if self.takes_halves:
            fit = functools.partial(grid.best_grid, noise, n_nodes=self.n_nodes)
            return from_halves(noise, gap, different(sampled), fit, self.floor, want_bound)
        rows = torch.from_numpy(minibatch.rows)
        return self.e_and_m(state, rows, noise, gap, sampled, clock, generator, want_bound)

    def e_and_m(
        self, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, clock: Clock,
        generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        """The remembered q. Its place moves by Newton, its log density towards what these classes say at the nodes."""
        log_weight = sampled.log_weight
        if self.uses_updated and (new := self.unvisited(state, rows)).any():
            self.start(state, rows[new], noise, gap[new], log_weight.expand_as(gap)[new])
        place, visits = Place(state["mode"][rows], state["precision"][rows]), state["visits"][rows]
        alpha = self.step_size.at(visits, clock, gap.dtype)
        if self._is_exact:
            place = grid.moved(place, *grid.slope_at(noise, gap, log_weight, place.mode), alpha)
            self._keep(state, rows, place, visits + 1)
        eps, log_step = grid.nodes_at(noise, place, self.n_nodes)
        found = grid.log_density(noise, gap, log_weight, eps, log_step)
        if self._is_exact:
            q = grid.as_nodes(eps, log_step, found)
            return (torch.logsumexp(found, 1) if want_bound else None), -self._hazards(noise, gap, log_weight, q), 0
        densities = self._densities(state, noise)
        blended = (1.0 - alpha)[:, None] * densities[rows] + alpha[:, None] * found
        q = grid.as_nodes(eps, log_step, blended if self.uses_updated else densities[rows])
        bound = q.mean(found - log_step) + q.entropy if want_bound else None
        grad = -self._hazards(noise, gap, log_weight, q)
        densities[rows] = blended
        self._keep(
            state, rows, grid.moved(place, *grid.slope_at(noise, gap, log_weight, place.mode), alpha), visits + 1
        )
        return bound, grad, 0

    def _hazards(self, noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> Tensor:
        return noise.hazards(gap, log_weight, q.eps, q.weight)

    def fused(self, kernels: ModuleType, noise: Noise, n_classes: int) -> FusedPass | None:
        """For a noise with scalar functions."""
        make, loops = getattr(kernels, "cross_fitted_grid", None), loops_for(noise)
        if make is None or loops is None or not self.takes_halves:
            return None
        nodes = tuple(each.numpy() for each in grid.standard_grid(noise, self.n_nodes))
        floor = math.inf if self.floor is None else self.floor
        return FusedCrossFitting(make(loops, n_classes, floor, nodes, smooth=noise.smooth_log_concave))

    # ---- what is reported ----

    def bound_on_all(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor,
        sampled: Sampled | None = None,
    ) -> Tensor:  # fmt: skip
        """The bound over all classes. Where q is found anew at each step: of such a q, on nodes for the integral over
        all classes, so that what is missing is q's, and not the quadrature's."""
        if self.takes_halves:
            assert sampled is not None
            drawn, found = drawn_from(gap, sampled), torch.zeros_like(gap[:, 0])
            halves = different(sampled)
            for half in halves:
                some, log_weight = part_of(drawn, half.stands.to(gap.dtype))
                found += bound_of_best(noise, gap, drawn[:, some], log_weight)
            return found / len(halves)
        if self._is_exact:
            return bound_of_best(noise, gap, gap, gap.new_zeros(()))
        rows = torch.from_numpy(minibatch.rows)
        place = Place(state["mode"][rows].to(gap.dtype), state["precision"][rows].to(gap.dtype))
        eps, log_step = grid.nodes_at(noise, place, self.n_nodes)
        q = grid.as_nodes(eps, log_step, self._densities(state, noise)[rows].to(gap.dtype))
        return bounds.noise_bound(noise, gap, gap.new_zeros(()), q)


def bound_of_best(noise: Noise, gap: Tensor, drawn: Tensor, log_weight: Tensor) -> Tensor:
    """(B,) the bound over all classes `gap` (B, K) at the q that is best for those drawn (B, S)."""
    out = torch.empty_like(gap[:, 0])
    for rows, eps, log_step, others in quadrature.grid_of_gaps(noise, gap):
        own = noise.log_prob(eps) + log_step
        density = own + noise.sum_log_cdf(drawn[rows], log_weight.expand_as(drawn)[rows], eps)
        log_q = torch.log_softmax(density, dim=1)
        terms = torch.where(log_q > -math.inf, log_q.exp() * (own + others - log_q), 0.0)
        out[rows] = terms.sum(dim=1)
    return out
