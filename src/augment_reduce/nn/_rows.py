"""The head's weight rows: initial values, and one step of the fused optimiser on every touched row.

    "adagrad"            s <- s + g^2                                w <- w - rate g / (sqrt(s) + eps)
    "rowwise-adagrad"    s_k <- s_k + mean of g_kd^2 over g_kd != 0  the same, with one s for a row of weights
    "adam"               m <- b1^n m + (1-b1) g,  v <- b2^n v + (1-b2) g^2,    w <- w - rate mhat / (sqrt(vhat) + eps)

g is the gradient of the returned loss (descent); the gradients of a class are summed before its step. With `max_norm` a
row's g, bias included, is clipped to that norm. With `weight_decay` d a row is multiplied by (1 - rate d)^n at its
step, n as for Adam, decoupled from the gradient as in AdamW; biases are not decayed. Adam's n is 1 plus the number of
steps since the row was last touched: the decay that dense Adam would have applied in between is applied then ("lazy").
With an object `augment_reduce.Adam`, n is always 1, as in torch's SparseAdam. Weights in bfloat16 are rounded
stochastically, so that steps smaller than their spacing are not lost on average.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.noise import Gumbel, Logistic, Noise
from ..optim import Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from ..sharding import ClassShard
from ..support.ranges import check_number
from . import _hash
from ._fused import Group, Pending
from ._plain import LARGEST, RowGradient
from ._state import Kept, buffer

ADAGRAD, ROWWISE, ADAM = 0, 1, 2
FIRST_NUMBERS = 1 << 22  # initial weights of all ranks drawn at a time
KINDS: dict[type[RowOptimizer], int] = {Adagrad: ADAGRAD, RowwiseAdagrad: ROWWISE, Adam: ADAM}
NAMES: dict[str, type[Adagrad] | type[RowwiseAdagrad] | type[Adam]] = {
    "adagrad": Adagrad, "rowwise-adagrad": RowwiseAdagrad, "adam": Adam,
}  # fmt: skip


def on_host(class_counts: Tensor | np.ndarray) -> np.ndarray:
    """(K,) float64; checked by its users."""
    values = class_counts.detach().cpu().numpy() if isinstance(class_counts, Tensor) else class_counts
    return np.asarray(values, dtype=np.float64)


@torch.no_grad()
def first_weights(
    noise: Noise, weight: Tensor, bias: Tensor | None, counts: np.ndarray | None, seed: int,
    layout: ClassShard | None = None,
) -> None:  # fmt: skip
    """Initial weights as in torch.nn.Linear, drawn on their device: 10^7 x 512 may exceed the host's memory.

    Biases: log frequencies if these are known and the model's scores are on that scale, else 0.
    """
    reach = 1.0 / math.sqrt(weight.shape[1])
    generator = torch.Generator(weight.device).manual_seed(seed)
    if layout is None:
        weight.uniform_(-reach, reach, generator=generator)
    else:
        _uniform_shard(weight, reach, generator, layout)
    if bias is None:
        return
    bias.zero_()
    if counts is not None and isinstance(noise, Gumbel | Logistic):
        log_frequency = np.log((counts + 1.0) / (counts.mean() + 1.0))
        bias.copy_(torch.from_numpy(log_frequency if layout is None else layout.of(log_frequency)))


def _uniform_shard(weight: Tensor, reach: float, generator: torch.Generator, layout: ClassShard) -> None:
    """On a CPU the same rows as in one process: the numbers of all classes are drawn, a block at a time."""
    D, R = weight.shape[1], layout.n_ranks
    size = max(1, FIRST_NUMBERS // (D * R)) * R
    block = weight.new_empty(size, D)
    for start in range(0, layout.n_classes, size):
        drawn = block[: min(size, layout.n_classes - start)].uniform_(-reach, reach, generator=generator)
        own = layout.of(drawn)
        weight[start // R : start // R + len(own)] = own


class Settings(NamedTuple):
    """Settings of a row optimiser, in addition to its rule."""

    weight_decay: float = 0.0
    max_norm: float | None = None
    initial_accumulator_value: float = 0.0

    def checked(self, rule: RowOptimizer) -> Settings:
        check_number("weight_decay", self.weight_decay, 0.0)
        check_number("initial_accumulator_value", self.initial_accumulator_value, 0.0)
        if self.max_norm is not None and not self.max_norm > 0.0:
            raise ValueError(f"Expected max_norm to be None or above 0, found {self.max_norm}.")
        if isinstance(rule, Adam) and self.initial_accumulator_value:
            raise ValueError("initial_accumulator_value is where Adagrad's sums start; Adam has none. Leave it out.")
        return self


class RowUpdate(Kept):
    """An optimiser bound to a weight (K, D) and a bias (K,): its settings and its state of every row.

    `rate` and `steps` are tensors on the device, so that the learning rate of a captured step can be changed. `group`
    is the param group of `head.fused_optimizer`: setting "lr" there sets `rate`.
    """

    rate: Tensor
    steps: Tensor
    first: Tensor
    second: Tensor
    first_bias: Tensor
    second_bias: Tensor
    last: Tensor

    def __init__(
        self, optimizer: str | RowOptimizer, learning_rate: float | None, weight: Tensor, bias: Tensor | None,
        settings: Settings | None = None, layout: ClassShard | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layout = ClassShard(len(weight)) if layout is None else layout
        rule = _resolve(optimizer, learning_rate)
        self.kind = KINDS[type(rule)]
        self.rule: Adagrad | RowwiseAdagrad | Adam = replace(rule, learning_rate=1.0)  # times `rate`
        self.lazy = self.kind == ADAM and isinstance(optimizer, str)
        self.name = rule.name
        self.eps = rule.eps
        self.beta1, self.beta2 = (rule.beta1, rule.beta2) if isinstance(rule, Adam) else (0.0, 0.0)
        settings = (settings or Settings()).checked(rule)
        self.initial = settings.initial_accumulator_value
        # The updated parameters, by name; a head checks that they are still its own. A plain dict: not its children.
        self.follows: dict[str, Any] = {"weight": weight, "bias": bias}
        self.group = Group(self, float(rule.learning_rate), settings)
        self.pending = Pending()
        self._learning_rate = float(rule.learning_rate)
        self._n_weights = self.layout.n_classes * weight.shape[1]
        K, device = len(weight), weight.device
        dtype = torch.promote_types(weight.dtype, torch.float32)
        matrix = weight.shape if self.kind != ROWWISE else (K,)
        biases = K if bias is not None else 0
        adam = self.kind == ADAM
        counts_steps = self.lazy or settings.weight_decay > 0.0
        buffer(self, "rate", torch.full((1,), self._learning_rate, device=device))
        buffer(self, "steps", torch.zeros(1, dtype=torch.int64, device=device))
        buffer(self, "first", torch.full(matrix, self.initial, dtype=dtype, device=device))
        buffer(self, "second", torch.zeros(weight.shape if adam else (0,), dtype=dtype, device=device))
        buffer(self, "first_bias", torch.full((biases,), self.initial, dtype=dtype, device=device))
        buffer(self, "second_bias", torch.zeros(biases if adam else 0, dtype=dtype, device=device))
        buffer(self, "last", torch.zeros(K if counts_steps else 0, dtype=torch.int32, device=device))

    def reset_buffers(self) -> None:
        for name, value in self.named_buffers(recurse=False):
            value.fill_(self.initial if name in ("first", "first_bias") else 0)
        self.group["lr"] = self._learning_rate
        self.pending.clear()

    def get_extra_state(self) -> Tensor:
        """The rule, as bytes: the state of one rule is not valid for another."""
        return torch.tensor(list(self._recipe.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Checked before anything is loaded."""

    @property
    def _recipe(self) -> str:
        return self.name + (" lazy" if self.lazy else "")

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load the state of the same rule; that of another rule, or of none, is ignored with a warning."""
        self.pending.clear()
        recipe = state_dict.get(prefix + "_extra_state")
        found = None if recipe is None else bytes(recipe.tolist()).decode()
        shapes = {name: state_dict.get(prefix + name) for name in ("first", "second")}
        fits = all(x is not None and x.shape == getattr(self, name).shape for name, x in shapes.items())
        if (found is not None and found != self._recipe) or not fits:
            warnings.warn(
                f"Expected the state of the row optimiser {self._recipe!r}, found {found or 'none that fits'!r}: what "
                "it remembers of the rows begins anew, all else is loaded.",
                stacklevel=2,
            )
            unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(prefix)]
            return
        last = state_dict.get(prefix + "last")
        if last is not None and last.shape != self.last.shape:  # saved with, or without, weight decay
            steps = state_dict[prefix + "steps"]
            state_dict[prefix + "last"] = steps.to(torch.int32).expand(len(self.last)).clone()
        if found is None:  # saved before there was one
            state_dict[prefix + "_extra_state"] = self.get_extra_state()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not self.is_meta:
            dict.__setitem__(self.group, "lr", float(self.rate))

    @property
    def weight_decay(self) -> float:
        return float(self.group["weight_decay"])

    @property
    def max_norm(self) -> float | None:
        return self.group["max_norm"]

    @torch.no_grad()
    def take(self, weight: Tensor | None, bias: Tensor | None, grad: RowGradient, key: int, counter: Tensor) -> None:
        """One step on the rows in `grad`: now, or in step() of the optimiser if that is used."""
        if self.pending.waits:
            self.pending.add(weight is not None, bias is not None, grad, key, counter)
        else:
            self.apply_(weight, bias, grad, key, counter)

    @torch.no_grad()
    def step(self, scale: Tensor | None = None) -> None:
        """The step on the accumulated gradients, if any, times `scale`."""
        if self.pending.rows:
            *moves, grad, key, counter = self.pending.summed()
            found = (self.follows["weight"], self.follows["bias"])
            weight, bias = (None if p is None or not m else p.detach() for p, m in zip(found, moves, strict=True))
            self.apply_(weight, bias, grad if scale is None else grad.times(scale), key, counter)
        self.pending.clear()

    @torch.no_grad()
    def apply_(self, weight: Tensor | None, bias: Tensor | None, grad: RowGradient, key: int, counter: Tensor) -> None:
        """One step on the rows in `grad`; plain torch, `nn/triton/step.py` does the same in one pass.

        `weight` or `bias` None: not updated, because it is frozen or absent.
        """
        self.steps += 1
        random = _hash.step_key(key, counter, _hash.ROUNDING)
        for touched, g, g_bias in grad.merged(self._n_classes):
            self._apply_block(weight, bias, touched, g.to(self.first.dtype), g_bias.to(self.first.dtype), random)

    @property
    def _n_classes(self) -> int:
        return len(self.first)

    def _apply_block(
        self, weight: Tensor | None, bias: Tensor | None, touched: Tensor, g: Tensor, g_bias: Tensor, random: Tensor
    ) -> None:
        """A gradient that is not finite, or too large to be squared, does not update its weight."""
        g, g_bias = (torch.where(x.abs() < LARGEST, x, 0.0) for x in (g, g_bias))
        if self.max_norm is not None:
            square = g.square().sum(1) + (g_bias.square() if bias is not None else 0.0)
            shrink = (self.max_norm * square.rsqrt()).clamp(max=1.0)  # rsqrt(0) is inf
            g, g_bias = g * shrink[:, None], g_bias * shrink
        due = self._due(touched)
        decay = due if self.lazy else torch.ones_like(due)
        if weight is not None:
            w = weight[touched].to(self.first.dtype)
            if self.weight_decay:
                w = w * (1.0 - self.rate.to(w.dtype) * self.weight_decay)[:, None] ** due.to(w.dtype)[:, None]
            moved = w - self._move(g, touched, self.first, self.second, decay)
            weight[touched] = rounded(moved, weight.dtype, random, self.layout.classes(touched))
        if bias is not None:
            move = self._move(g_bias, touched, self.first_bias, self.second_bias, decay)
            at = self.layout.classes(touched) + self._n_weights  # random numbers after those of the weights
            bias[touched] = rounded((bias[touched].to(move.dtype) - move)[:, None], bias.dtype, random, at)[:, 0]
        if len(self.last):
            self.last[touched] = self.steps.to(torch.int32)

    def _due(self, touched: Tensor) -> Tensor:
        """n of the formulas: the number of steps since each touched row was last updated."""
        return (self.steps - self.last[touched]) if len(self.last) else torch.ones_like(touched)

    def _move(self, g: Tensor, touched: Tensor, first: Tensor, second: Tensor, decay: Tensor) -> Tensor:
        """Update the states of the touched rows; return the decrement of their weights."""
        if self.kind == ADAM:
            return self._adam(g, touched, first, second, decay)
        s = first[touched]
        by, follow = self.rule.direction(g, [s], 1)
        first[touched] = s
        return self.rate.to(g.dtype) * by * follow

    def _adam(self, g: Tensor, touched: Tensor, first: Tensor, second: Tensor, decay: Tensor) -> Tensor:
        """`augment_reduce.Adam`, decayed n steps at once, with its step number on the device."""
        n = decay.to(g.dtype).reshape(-1, *[1] * (g.ndim - 1))
        m = first[touched] * self.beta1**n + (1.0 - self.beta1) * g
        v = second[touched] * self.beta2**n + (1.0 - self.beta2) * g * g
        first[touched], second[touched] = m, v
        unbias = torch.sqrt(1.0 - self.beta2 ** self.steps.to(g.dtype))
        rate = self.rate.to(g.dtype) * unbias / (1.0 - self.beta1 ** self.steps.to(g.dtype))
        return rate * m / (v.sqrt() + self.eps * unbias)

    def extra_repr(self) -> str:
        return f"{self.name}, eps={self.eps}" + (f", betas=({self.beta1}, {self.beta2})" if self.kind == ADAM else "")


def rounded(x: Tensor, dtype: torch.dtype, key: Tensor, rows: Tensor) -> Tensor:
    """x (n, D) in `dtype`; stochastic rounding to bfloat16: add 16 random bits below those that are kept, then
    truncate."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    place = ((rows * x.shape[1])[:, None] + torch.arange(x.shape[1], device=x.device)) & _hash.MASK
    low = (_hash.bits(key, place, 0) & 0xFFFF).to(torch.int32)
    whole = x.float().contiguous().view(torch.int32)
    kept = (whole + low) & -65536
    return torch.where(x.isfinite(), kept.view(torch.float32), x.float()).to(torch.bfloat16)


def _resolve(optimizer: str | RowOptimizer, learning_rate: float | None) -> Adagrad | RowwiseAdagrad | Adam:
    if isinstance(optimizer, str) and optimizer in NAMES:
        rule = NAMES[optimizer]()
    elif isinstance(optimizer, Adagrad | RowwiseAdagrad | Adam):
        rule = optimizer
    else:
        raise ValueError(
            f"Expected optimizer to be None, one of {', '.join(map(repr, NAMES))}, or an Adagrad, RowwiseAdagrad or "
            f"Adam of augment_reduce, found {optimizer!r}. With None the weight gets row-sparse gradients for a torch "
            "optimiser of yours (SparseAdam, Adagrad)."
        )
    if isinstance(rule, Adagrad) and (rule.bias_scale != 1.0 or rule.half_after is not None):
        raise ValueError(
            f"Expected an Adagrad of constant rate, the same for weights and biases, found {rule!r}. The head has no "
            "bias_scale and no half_after: leave them out, and let the rate fall with a torch scheduler."
        )
    return rule if learning_rate is None else replace(rule, learning_rate=learning_rate)
