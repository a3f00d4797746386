"""What a local step is: which q(eps) each training row has, how it moves, and what the M step then needs of it.

`remembered`, `cross_fitting`, `grid` and `amortised` have the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..model import bounds
from ..model.bounds import Nodes
from ..model.noise import Noise
from ..model.scores import ByScore, Scored
from ..optim import Prior, RowOptimizer
from ..sampling import Minibatch, Sampled
from ..sharding import Partition
from ..support.layout import MOST_VISITS, Entry, Layout
from ..support.ranges import check_number

LocalState = dict[str, Tensor]
VISITS = Entry("int32", ("N",), 0, MOST_VISITS)


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


class FusedStep(Protocol):
    """All of a step but its draw, for samples that it serves."""

    def serves(self, sampled: Sampled, n_rows: int) -> bool: ...

    def __call__(
        self, minibatch: Minibatch, sampled: Sampled, state: LocalState, row_scale: Tensor | float, prior_scale: float,
        *, clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, int]:  # fmt: skip
        """(the bound (B,), how often a floor acted). FloatingPointError where a score is not finite, with nothing
        changed. `prior_scale`: of omega in each pair's share of the prior."""
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
    kernel: ClassVar[Any] = None  # of a backend, for `e_and_m`

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

    def fused_step(
        self, kernels: ModuleType, noise: Noise, X: Rows, labels: Tensor, parameters: Parameters,
        optimizer: RowOptimizer, prior: Prior | None,
    ) -> FusedStep | None:  # fmt: skip
        """One pass of a backend from the scores to the push, for one fit; None where it has none."""
        return None

    def kernel_serves(self, sampled: Sampled, n_rows: int) -> bool:
        """Whether `kernel` knows such weights: one number, or one for each row."""
        return sampled.log_weight.ndim == 0 or tuple(sampled.log_weight.shape) == (n_rows, 1)

    def for_kernel(
        self, state: LocalState, noise: Noise, clock: Clock, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple:
        """(state, step, flags, draws) of `kernel`; see `kernels.cpu.paper_steps`."""
        raise TypeError(f"{type(self).__name__} has no kernel.")

    def kernel_weights(self, log_weight: Tensor) -> Tensor:
        """The weights of classes as `kernel` takes them."""
        raise TypeError(f"{type(self).__name__} has no kernel.")

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
