"""Row optimisers: how a gradient moves the touched entries of the weights, and what it remembers of them.

The objective is the whole data's (it goes up): sum_n L_n - ||w||^2 / (2 v), so a gradient here is of that
scale, whatever the minibatch. An optimiser sees one entry at a time: its weight w, its gradient g, its
state. Entries without gradient keep weight and state ("touched only"), so a step costs what it touches.

The prior is a proximal step with the entry's own step size h (Duchi et al. 2011, composite objectives):

    w <- (w + h g) / (1 + h c / v)

where c is an unbiased estimate of 1 that is non-zero only for touched entries (see `Prior`).
Each class gives the formula once in torch; `kernels/cpu/rules.py` holds its scalar twin, chosen by `kind`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .kernels.constants import (
    ADAGRAD,
    ADAM,
    OWN_RULE,
    PRIOR_TOUCHED,
    PRIOR_UNBIASED,
    ROWWISE_ADAGRAD,
    SECTION4,
    SECTION4_EVERY_ENTRY,
)
from .support.memory import zeros
from .support.ranges import check_number

MOST_DECAYS = 2**16  # of a rate that are multiplied one at a time; those that follow at once


@dataclass(frozen=True)
class Prior:
    """Gaussian prior N(0, v) on weights and biases, felt only where a step touches.

    ||w||^2 / (2 v) = sum_n sum_k sum_{d: x_nd != 0} w_kd^2 / (2 v N_d), with N_d the rows in which feature d is
    non-zero: a sum over rows and classes like the bound itself, so the minibatch and the class sampler
    estimate it without bias, from the same pairs and with the same weights. For entry (k, d)

        c_kd = (N/B) sum_{pairs (n, k)} omega_nk [x_nd != 0] / N_d,        E[c_kd] = 1.

    `touched_only` is the authors' code instead: the whole of -w / v wherever the data gradient is non-zero,
    nothing elsewhere; the strength then depends on how often an entry is touched.
    """

    variance: float
    inverse_counts: Tensor  # (D,) 1 / N_d, in the dtype of the weights
    inverse_rows: float  # 1 / N times v over the biases' variance; 0 where they have no prior
    touched_only: bool = False

    @property
    def in_shares(self) -> bool:
        """Whether it is felt by each pair's share, and not wherever a gradient is."""
        return not self.touched_only

    @property
    def mode(self) -> int:
        return PRIOR_TOUCHED if self.touched_only else PRIOR_UNBIASED

    @classmethod
    def from_counts(
        cls, variance: float | None, counts: np.ndarray, n_rows: int, dtype: torch.dtype, touched_only: bool = False,
        *, of_bias: float | None = None, per_feature: np.ndarray | None = None,
    ) -> Prior:  # fmt: skip
        """`variance` of the weights, times `per_feature` (D,) where that is given, and `of_bias` of the biases; None is
        no prior on them."""
        inverse = np.zeros(len(counts)) if variance is None else 1.0 / np.maximum(counts, 1)
        if per_feature is not None:
            inverse = inverse / per_feature
        common = variance if variance is not None else of_bias
        assert common is not None
        inverse_rows = 0.0 if of_bias is None else common / (of_bias * n_rows)
        return cls(float(common), torch.from_numpy(inverse).to(dtype), inverse_rows, touched_only)


class RowOptimizer:
    """What the three rules share: names, state, and the move with or without a prior."""

    name: ClassVar[str]
    rowwise: ClassVar[bool] = False
    entry: ClassVar[Any] = (
        None  # of a rule of your own: its scalar function for compiled code, see `kernels/cpu/rules.py`
    )
    bias_scale: float = 1.0  # the constant feature whose weight, times it, is the bias

    @property
    def kind(self) -> int:
        """Which scalar rule `kernels/cpu/rules.py` applies, where `entry` does not say it."""
        if self.entry is None:
            raise TypeError(f"{type(self).__name__} has no scalar function `entry` for compiled code.")
        return OWN_RULE

    @property
    def n_states(self) -> int:
        return 1

    def after(self, steps: int) -> RowOptimizer:
        """The same where `steps` of those taken so far do not count for a rate that falls."""
        return self

    def for_biases(self) -> RowOptimizer:
        """The rule that biases follow."""
        return self

    def init_state(self, weight: Tensor) -> list[Tensor]:
        if self.rowwise and weight.ndim == 2:
            return [torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)]
        if not weight.is_cpu:
            return [torch.zeros_like(weight) for _ in range(self.n_states)]
        return [zeros(tuple(weight.shape), weight.dtype) for _ in range(self.n_states)]

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]:
        """(rate, first, second, third): everything the entry rule needs, at each iteration of `turns` (from 1); at
        once, since steps may be short."""
        raise TypeError(f"{type(self).__name__} does not say its scalars.")

    def scalars(self, t: int) -> tuple[float, ...]:
        """Those of iteration t."""
        return tuple(float(np.broadcast_to(each, 1)[0]) for each in self.scalars_of(np.array([t])))

    def direction(self, g: Tensor, state: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        """Update `state` in place; return (step size h, gradient to follow) per entry."""
        raise TypeError(f"{type(self).__name__} does not say its direction.")

    def apply(self, w: Tensor, g: Tensor, c: Tensor, state: list[Tensor], t: int, prior: Prior | None) -> None:
        """One step on entries `w` with gradient `g` and prior share `c`, all of one shape, in place."""
        touched = (g != 0) | (c != 0)
        if prior is not None and prior.touched_only:
            touched = g != 0
            g = torch.where(touched, g - w / prior.variance, g)
        kept = [s.clone() for s in state]
        h, follow = self.direction(g, state, t)
        moved = w + h * follow
        if prior is not None and not prior.touched_only:
            moved = moved / (1.0 + h * c / prior.variance)
        w.copy_(torch.where(touched, moved, w))
        for s, old in zip(state, kept, strict=True):
            s.copy_(torch.where(touched if s.ndim == touched.ndim else touched.any(-1), s, old))


@dataclass(frozen=True)
class SectionFour(RowOptimizer):
    """The paper's section 4 (Kucukelbir et al. 2017):

        s <- kappa g^2 + (1 - kappa) s         w <- w + rho_0 decay(t) t^(-1/2 + 1e-16) g / (1 + sqrt(s))

    decay(t) = 0.9^floor(t / 2000). `first_kappa_one` is the authors' code: kappa = 1 in iteration 1.
    `every_entry` is the text: s shrinks by 1 - kappa at every iteration, touched or not. A second state remembers
    when an entry was last touched, and the shrinking is made up for when it is touched again: the same numbers, lazily.
    """

    name: ClassVar[str] = "section4"
    learning_rate: float = 0.02
    kappa: float = 0.1
    decay: float = 0.9
    decay_every: int = 2000
    first_kappa_one: bool = False
    every_entry: bool = False

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0)
        check_number("kappa", self.kappa, 0.0, 1.0)
        check_number("decay", self.decay, 0.0, 1.0)
        check_number("decay_every", self.decay_every, 1, whole=True)

    @property
    def kind(self) -> int:
        return SECTION4_EVERY_ENTRY if self.every_entry else SECTION4

    @property
    def n_states(self) -> int:
        return 2 if self.every_entry else 1

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]:
        decays = turns // self.decay_every
        one_by_one = np.minimum(decays, MOST_DECAYS)
        rates = np.full(one_by_one.max() + 1, self.decay)
        rates[0] = self.learning_rate
        rates = np.multiply.accumulate(rates)  # multiplied one at a time: bit-equal to the authors' loop
        kappa = np.where(turns == 1, 1.0, self.kappa) if self.first_kappa_one else self.kappa
        t = turns.astype(np.float64)
        return rates[one_by_one] * self.decay ** (decays - one_by_one) * t ** (-0.5 + 1e-16), kappa, t, 0.0

    def direction(self, g: Tensor, state: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        rho, kappa, _, _ = self.scalars(t)
        s = state[0]
        if self.every_entry:
            s.mul_((1.0 - kappa) ** (t - 1 - state[1]))
            state[1].fill_(t)
        s.copy_(kappa * g * g + (1.0 - kappa) * s)
        return rho / (1.0 + s.sqrt()), g


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """Duchi et al. 2011:  s <- s + g^2,  w <- w + rate g / (sqrt(s) + eps). Indifferent to the scale of g.

    With `half_after` the rate at step t is learning_rate / (1 + (t - 1 - begin) / half_after): what the noise of the
    minibatches leaves in the weights dies out (docs/studies.md). It goes by t alone, so a fit that goes on is one that
    never stopped.

    Biases have `bias_scale` times the rate: each is, but for eps, c times the weight of a feature that is always c.
    Where features share a sign the bias has to undo what all weights of a row do together, and with the rate of one of
    them it is never there in time.
    """

    kind = ADAGRAD
    n_states = 1
    name: ClassVar[str] = "adagrad"
    learning_rate: float = 0.1
    eps: float = 1e-10
    half_after: float | None = None
    begin: int = 0  # the step that is counted as zero
    bias_scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0)
        check_number("eps", self.eps, 0.0)
        check_number("begin", self.begin, 0, whole=True)
        if not 0.0 <= self.bias_scale < math.inf:
            raise ValueError(f"Expected bias_scale to be a finite number >= 0 (0: no biases), found {self.bias_scale}.")
        if self.half_after is not None and not self.half_after > 0.0:
            raise ValueError(f"Expected half_after to be None or a number of steps above 0, found {self.half_after}.")

    def after(self, steps: int) -> Adagrad:
        return replace(self, begin=steps) if self.half_after is not None and steps else self

    def for_biases(self) -> Adagrad:
        if self.bias_scale == 1.0:
            return self
        return replace(self, learning_rate=self.learning_rate * self.bias_scale, bias_scale=1.0)

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]:
        if self.half_after is None:
            return self.learning_rate, 0.0, 0.0, self.eps
        return self.learning_rate / (1.0 + np.maximum(turns - 1 - self.begin, 0) / self.half_after), 0.0, 0.0, self.eps

    def direction(self, g: Tensor, state: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        s = state[0]
        s.add_(g * g)
        return self.scalars(t)[0] / (s.sqrt() + self.eps), g


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one number a class row: s_k <- s_k + mean of g_kd^2 over the entries touched this step.

    K numbers of state instead of K x D. The mean is over touched entries, so that sparse rows are not
    taken for small gradients. Biases keep one number each, as in Adagrad.
    """

    kind = ROWWISE_ADAGRAD
    n_states = 1
    name: ClassVar[str] = "rowwise-adagrad"
    rowwise: ClassVar[bool] = True
    learning_rate: float = 0.1
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0)
        check_number("eps", self.eps, 0.0)

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]:
        return self.learning_rate, 0.0, 0.0, self.eps

    def direction(self, g: Tensor, state: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        s = state[0]
        if g.ndim == s.ndim:
            s.add_(g * g)
            return self.learning_rate / (s.sqrt() + self.eps), g
        s.add_((g * g).sum(-1) / (g != 0).sum(-1).clamp_min(1))
        return (self.learning_rate / (s.sqrt() + self.eps))[..., None].expand_as(g), g


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Kingma and Ba 2015, with moments that move only where a step touches (as torch's SparseAdam):

    m <- b1 m + (1-b1) g,  v <- b2 v + (1-b2) g^2,  w <- w + rate mhat / (sqrt(vhat) + eps)
    """

    kind = ADAM
    n_states = 2
    name: ClassVar[str] = "adam"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0)
        for name in ("beta1", "beta2"):
            check_number(name, getattr(self, name), 0.0, 1.0 - 2.0**-24)
        check_number("eps", self.eps, 0.0)

    def scalars_of(self, turns: np.ndarray) -> tuple[np.ndarray | float, ...]:
        t = turns.astype(np.float64)
        unbias = np.sqrt(1.0 - self.beta2**t)
        return self.learning_rate * unbias / (1.0 - self.beta1**t), self.beta1, self.beta2, self.eps * unbias

    def direction(self, g: Tensor, state: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        rate, beta1, beta2, eps = self.scalars(t)
        m, v = state
        m.copy_(beta1 * m + (1.0 - beta1) * g)
        v.copy_(beta2 * v + (1.0 - beta2) * g * g)
        return rate / (v.sqrt() + eps), m


OPTIMIZERS: dict[str, type[RowOptimizer]] = {cls.name: cls for cls in (SectionFour, Adagrad, RowwiseAdagrad, Adam)}
