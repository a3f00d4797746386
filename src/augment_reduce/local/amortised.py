"""q(eps_n) predicted from the features instead of remembered: O(D) numbers for any N, for streams that repeat no row.

v, the utility that won, is what the row's features know about; the label only shifts it: eps = v - psi_y. So

    model       q(v)                   parts, linear in x (others: and in psi_y)    at its best
    softmax     Gumbel(c, 1)           c;  log eta_n = c(x_n) - psi_{n, y_n}        c = log sum_k e^{psi_k}
    any other   N(m, 1 / precision)    m, log precision                             E_q[f'] = 0, precision = -E_q[f'']

Any numbers give a valid bound, whatever the prediction. It is made before the classes are drawn that estimate the
bound, and learns from them only afterwards, so the gradient is unbiased, but for the rows that the floor holds up.

The torch head predicts the same way from its hidden layer (`nn/_local.py`); the rules on `parts` (Q, B) here are
common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.rows import DenseRows
from ..model import bounds
from ..model.bounds import Exponentials
from ..model.gaussian import gaussian_nodes, newton_move, newton_slopes
from ..model.noise import Noise
from ..sampling import Minibatch, Sampled
from ..sharding import Partition
from ..support.layout import Entry, Layout
from ..support.ranges import MOST_NODES, check_number
from .base import Clock, LocalState, LocalStep
from .late import LateAmortised

OFFSET_RATE, SLOPE_RATE, LABEL_RATE = 0.3, 0.7, 0.5  # together below 2: see `Amortised.learn`
LARGEST_RESIDUAL = 4.0  # of a softmax row without a floor
LARGEST_MOVE, WIDEST = 5.0, 0.25  # of m in one step, and the least precision to divide by
PRECISION_RANGE = (math.log(1e-2), math.log(1e4))
LABEL_MEMORY = 0.01  # of the running mean of psi_y


@dataclass(frozen=True)
class Amortised(LocalStep):
    """A linear map of the features that learns by normalised least squares. State: `slope` (Q, D), `offset` (Q,), ...

    `floor` keeps a softmax's log eta above what the sample itself says, minus `floor`: where the prediction is far too
    low one row would outweigh all others. What it cuts from the weights' gradient it cuts from what is learned here;
    else pulls and lifts would not balance, and all scores would rise together.
    """

    name: ClassVar[str] = "amortised"
    uses_updated: ClassVar[bool] = False  # type: ignore[misc]
    floor: float | None = 1.0
    n_nodes: int = 5

    amortises: ClassVar[bool] = True
    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.floor is not None:
            check_number("floor", self.floor, 0.0)
        check_number("n_nodes", self.n_nodes, 1, MOST_NODES, whole=True)

    def init_state(self, n_rows: int, dtype: torch.dtype) -> LocalState:
        return {}  # of the size of the features, not of the rows: made at the first step

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        parts, one = Entry("weights", ("Q",)), Entry("weights", (1,))
        return ({
            "start": parts, "offset": parts, "slope": Entry("weights", ("Q", "D")), "label_slope": parts,
            "label_mean": one, "learned": Entry("int64", (1,), 0, 2**53),
        },)  # fmt: skip

    def unvisited(self, state: LocalState, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.bool)

    def begin(self, state: LocalState, noise: Noise, minibatch: Minibatch) -> None:
        """Before the first step: what q is where all scores are equal."""
        K, dtype = minibatch.n_classes, minibatch.parameters.bias.dtype
        offset = torch.tensor(first_guess(noise.alone, K), dtype=dtype)
        state["start"] = offset
        state["offset"] = offset.clone()
        state["slope"] = torch.zeros(len(offset), minibatch.X.n_features, dtype=dtype)
        state["label_slope"] = torch.zeros_like(offset)
        state["label_mean"] = torch.zeros(1, dtype=dtype)
        state["learned"] = torch.zeros(1, dtype=torch.int64)

    def knows(self, state: LocalState, noise: Noise, n_classes: int) -> bool:
        """Whether this is a state of the same model over about as many classes: they start alike.

        But for rounding, in which machines differ; with 90,000 classes one more of them is no more than that.
        """
        if "start" not in state:
            return False
        expected = torch.tensor(first_guess(noise, n_classes), dtype=state["start"].dtype)
        return len(expected) == len(state["start"]) and torch.allclose(state["start"], expected, rtol=1e-6, atol=0.0)

    def predict(self, state: LocalState, noise: Noise, minibatch: Minibatch, psi_y: Tensor) -> Tensor:
        """parts (Q, B); a softmax's c is no lower than psi_y, since the label is one of the classes."""
        if "offset" not in state:
            self.begin(state, noise, minibatch)
        parts = state["offset"][:, None] + products(minibatch.X, minibatch.rows, state["slope"])
        parts = parts + state["label_slope"][:, None] * (psi_y - state["label_mean"])
        if noise.conjugate:
            return torch.maximum(parts, psi_y)
        return torch.stack([parts[0], parts[1].clamp(*PRECISION_RANGE)])

    def over_ranks(self, noise: Noise, partition: Partition) -> LateAmortised | None:
        """Where ranks need not wait, for a softmax, whose c does not depend on the label."""
        return LateAmortised(self, partition) if noise.conjugate and partition.late else None

    def centre(self, state: LocalState, minibatch: Minibatch, rows: np.ndarray) -> Tensor:
        """c(x) (U,) of a softmax for these rows, whatever their labels."""
        if "offset" not in state:
            self.begin(state, bounds.SOFTMAX, minibatch)
        return state["offset"] + products(minibatch.X, rows, state["slope"])[0]

    def both_steps(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor, sampled: Sampled,
        clock: Clock, generator: torch.Generator, want_bound: bool,
    ) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
        parts = self.predict(state, noise, minibatch, psi_y)
        if noise.conjugate:
            bound, grad, log_ratio, hits = self._softmax(noise, parts[0] - psi_y, gap, sampled, want_bound)
            rho = residuals(True, parts, parts, log_ratio, log_ratio, self.floor)
        else:
            bound, grad, slope, bend = self._noise(parts, psi_y, noise, gap, sampled, want_bound)
            rho, hits = residuals(False, parts, parts, slope, bend, None), 0
        self.learn(state, minibatch, psi_y, rho, with_label=not noise.conjugate)
        return bound, grad, hits

    def _softmax(
        self, noise: Noise, log_eta: Tensor, gap: Tensor, sampled: Sampled, want_bound: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, int]:
        exponentials = Exponentials(gap, sampled.log_weight, noise)
        bound = exponentials.softmax_bound(log_eta) if want_bound else None
        log_ratio = exponentials.log_eta_tilde - log_eta
        held = log_eta if self.floor is None else log_eta + (log_ratio - self.floor).clamp_min(0.0)
        hits = 0 if self.floor is None else int((log_ratio > self.floor).sum())
        return bound, exponentials.softmax_bound_grad(held), log_ratio, hits

    def _noise(
        self, parts: Tensor, psi_y: Tensor, noise: Noise, gap: Tensor, sampled: Sampled, want_bound: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        mu, precision = parts[0] - psi_y, parts[1].exp()
        bound = None
        if want_bound:
            bound = bounds.noise_bound(noise, gap, sampled.log_weight, gaussian_nodes(mu, precision, self.n_nodes))
        first, second, hazard = newton_slopes(noise, gap, sampled.log_weight, mu, precision, self.n_nodes)
        return bound, -hazard, first, second

    def learn(self, state: LocalState, minibatch: Minibatch, psi_y: Tensor, rho: Tensor, *, with_label: bool) -> None:
        """Move the prediction by the residuals rho (Q, B), which are zero on average where it is best.

        Their slope by the parts is one by design, so least squares apply, in the normalised form (each block of
        features divided by its energy), which cannot diverge for quadratics while the rates sum to less than 2.
        """
        B = rho.shape[1]
        seen = int(state["learned"])
        state["offset"] += max(1.0 / (seen + 2.0), OFFSET_RATE) * rho.mean(dim=1)
        add_rows(minibatch.X, minibatch.rows, SLOPE_RATE * rho, state["slope"])
        if with_label:
            label = psi_y - state["label_mean"]
            state["label_mean"] += max(1.0 / (seen + 1.0), LABEL_MEMORY) * label.mean()
            state["label_slope"] += LABEL_RATE * (rho @ label) / label.square().sum().clamp_min(1e-12 * B)
        state["learned"] += 1

    def bound_on_all(
        self, minibatch: Minibatch, psi_y: Tensor, state: LocalState, noise: Noise, gap: Tensor,
        sampled: Sampled | None = None,
    ) -> Tensor:  # fmt: skip
        dtype = gap.dtype
        parts = self.predict(state, noise, minibatch, psi_y.to(minibatch.parameters.bias.dtype)).to(dtype)
        if noise.conjugate:
            return bounds.softmax_bound(gap, gap.new_zeros(()), parts[0] - psi_y.to(dtype))
        q = gaussian_nodes(parts[0] - psi_y.to(dtype), parts[1].exp(), n_nodes=40)
        return bounds.noise_bound(noise, gap, gap.new_zeros(()), q)


def entries(X: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The non-zeros of sparse rows side by side: features, values, their number in each row."""
    own, at = X.loaded(rows)
    return own.entries(at)


def products(X: Any, rows: np.ndarray, slope: Tensor) -> Tensor:
    """slope . x of these rows, (Q, B)."""
    X = getattr(X, "source", X)  # rows on a device have a twin here
    if isinstance(X, DenseRows):
        return slope @ torch.from_numpy(np.ascontiguousarray(X.block(rows))).to(slope.dtype).T
    feature, value, length = entries(X, rows)
    row = np.repeat(np.arange(len(rows)), length)
    found = [np.bincount(row, weights=s[feature] * value, minlength=len(rows)) for s in slope.numpy()]
    return torch.from_numpy(np.stack(found)).to(slope.dtype)


def add_rows(X: Any, rows: np.ndarray, by: Tensor, slope: Tensor) -> None:
    """slope += sum_b by_b x_b / sum_b |x_b|^2, for each of the Q parts; in O(non-zeros)."""
    X = getattr(X, "source", X)
    if isinstance(X, DenseRows):
        x = torch.from_numpy(np.ascontiguousarray(X.block(rows))).to(slope.dtype)
        slope += by @ x / x.square().sum().clamp_min(1e-12)
        return
    feature, value, length = entries(X, rows)
    energy = max(float(np.square(value, dtype=np.float64).sum()), 1e-12)
    for part, each in zip(slope.numpy(), by.numpy(), strict=True):
        np.add.at(part, feature, np.repeat(each, length) * value / energy)


def newton(parts: Tensor, slope: Tensor, bend: Tensor, alpha: Tensor) -> Tensor:
    """Natural gradient on (m, log precision), as `gaussian.newton_move`; at most two deviations a move."""
    precision = parts[1].exp()
    moved = (1.0 - alpha) * precision + alpha * (-bend).clamp_min(math.exp(PRECISION_RANGE[0]))
    reach = 2.0 * torch.maximum(precision, moved).rsqrt()
    move = torch.clamp(alpha * slope / moved, -reach, reach)
    return torch.stack([parts[0] + move, moved.log().clamp(*PRECISION_RANGE)])


def residuals(
    softmax: bool, predicted: Tensor, used: Tensor, slope: Tensor, bend: Tensor, floor: float | None
) -> Tensor:
    """(Q, B) how far the prediction is off, in expectation zero where it is best; clipped, since a sample is noisy.

    Softmax: Z~ e^{-c} - 1 (`slope` being log Z~ - c there), cut where `floor` cuts what the weights see. A prediction
    that balances the numbers before they are cut would leave them, once cut, short of pulls: all scores then rise.
    Others: the Newton move of m, cut the same way, and -f'' / precision - 1, both from the q that was used.
    """
    if softmax:
        most = math.log1p(LARGEST_RESIDUAL) if floor is None else floor
        return torch.expm1((used + slope - predicted).clamp(max=most))
    precision = used[1].exp()
    move = slope / precision.clamp_min(WIDEST)
    if floor is None:  # with one, `slope` is bounded, and a second bound would tilt the balance
        move = torch.clamp(move, -2.0 * precision.rsqrt(), 2.0 * precision.rsqrt())
    off = torch.clamp(used[0] + move - predicted[0], -LARGEST_MOVE, LARGEST_MOVE)
    return torch.stack([off, torch.clamp(-bend / precision - 1.0 + used[1] - predicted[1], -1.0, 1.0)])


def first_guess(noise: Noise, n_classes: int) -> list[float]:
    """Parts before the first step: what they are when all K scores are equal (to zero).

    Newton from the best q of half as many classes: from far below, where q is narrow, moves are short.
    """
    if noise.conjugate:
        return [math.log(n_classes)]
    gap = torch.zeros(1, 1, dtype=torch.float64)
    m, precision = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    alpha = torch.full_like(m, 0.7)
    for doublings in range(math.ceil(math.log2(n_classes - 1)) + 1):
        log_rest = torch.full_like(gap, min(doublings * math.log(2.0), math.log(n_classes - 1)))
        for _ in range(8):
            m, precision, _ = newton_move(noise, gap, log_rest, m, precision, alpha, 5)
    return [float(m), float(torch.log(precision).clamp(*PRECISION_RANGE))]
