"""The head's weight rows: their first values, and one step of its own optimiser on every touched row.

    "adagrad"            s <- s + g^2                                w <- w - rate g / (sqrt(s) + eps)
    "rowwise-adagrad"    s_k <- s_k + mean of g_kd^2 over g_kd != 0  the same, with one s for a row of weights
    "adam"               m <- b1^n m + (1-b1) g,  v <- b2^n v + (1-b2) g^2,    w <- w - rate mhat / (sqrt(vhat) + eps)

g is the gradient of the loss that was returned, so it goes down; all pairs of a class are summed before its one step.
Adam's n is 1 plus the number of steps since the row was last touched: the decay that dense Adam would have applied
meanwhile is made up for ("lazy"), without moving the row while it was not touched. Given as an object
`augment_reduce.Adam`, n is always 1, as in torch's SparseAdam. Weights in bfloat16 are rounded at random, up with
probability equal to the part that is cut off, so that steps smaller than their spacing are not lost on average.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..noise import Gumbel, Logistic, Noise
from ..optim import Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from . import _hash
from ._plain import LARGEST, RowGradient
from ._state import Kept, buffer

ADAGRAD, ROWWISE, ADAM = 0, 1, 2
KINDS: dict[type[RowOptimizer], int] = {Adagrad: ADAGRAD, RowwiseAdagrad: ROWWISE, Adam: ADAM}
NAMES: dict[str, type[Adagrad] | type[RowwiseAdagrad] | type[Adam]] = {
    "adagrad": Adagrad, "rowwise-adagrad": RowwiseAdagrad, "adam": Adam,
}  # fmt: skip


def on_host(class_counts: Tensor | np.ndarray) -> np.ndarray:
    """(K,) float64; checked where it is used."""
    values = class_counts.detach().cpu().numpy() if isinstance(class_counts, Tensor) else class_counts
    return np.asarray(values, dtype=np.float64)


@torch.no_grad()
def first_weights(noise: Noise, weight: Tensor, bias: Tensor | None, counts: np.ndarray | None, seed: int) -> None:
    """Weights as in torch.nn.Linear, made where they live: 10^7 x 512 of them are more than a host may have.

    Biases: log frequencies where these are known and the model's scores are on that scale, else 0.
    """
    reach = 1.0 / math.sqrt(weight.shape[1])
    weight.uniform_(-reach, reach, generator=torch.Generator(weight.device).manual_seed(seed))
    if bias is None:
        return
    bias.zero_()
    if counts is not None and isinstance(noise, Gumbel | Logistic):
        bias.copy_(torch.from_numpy(np.log((counts + 1.0) / (counts.mean() + 1.0))))


class RowUpdate(Kept):
    """An optimiser bound to a weight (K, D) and a bias (K,): its settings and what it remembers of every row.

    `rate` and `steps` are tensors on the device, so that a captured step can be given another learning rate.
    """

    rate: Tensor
    steps: Tensor
    first: Tensor
    second: Tensor
    first_bias: Tensor
    second_bias: Tensor
    last: Tensor

    def __init__(
        self, optimizer: str | RowOptimizer, learning_rate: float | None, weight: Tensor, bias: Tensor | None
    ) -> None:
        super().__init__()
        rule = _resolve(optimizer, learning_rate)
        self.kind = KINDS[type(rule)]
        self.lazy = self.kind == ADAM and isinstance(optimizer, str)
        self.name = rule.name
        self.eps = rule.eps
        self.beta1, self.beta2 = (rule.beta1, rule.beta2) if isinstance(rule, Adam) else (0.0, 0.0)
        # What is moved, by name; a head checks that these are still its parameters. A plain dict: not its children.
        self.follows: dict[str, Any] = {"weight": weight, "bias": bias}
        self._learning_rate, self._n_weights = float(rule.learning_rate), weight.numel()
        K, device = len(weight), weight.device
        dtype = torch.promote_types(weight.dtype, torch.float32)
        matrix = weight.shape if self.kind != ROWWISE else (K,)
        biases = K if bias is not None else 0
        adam = self.kind == ADAM
        buffer(self, "rate", torch.full((1,), self._learning_rate, device=device))
        buffer(self, "steps", torch.zeros(1, dtype=torch.int64, device=device))
        buffer(self, "first", torch.zeros(matrix, dtype=dtype, device=device))
        buffer(self, "second", torch.zeros(weight.shape if adam else (0,), dtype=dtype, device=device))
        buffer(self, "first_bias", torch.zeros(biases, dtype=dtype, device=device))
        buffer(self, "second_bias", torch.zeros(biases if adam else 0, dtype=dtype, device=device))
        buffer(self, "last", torch.zeros(K if self.lazy else 0, dtype=torch.int32, device=device))

    def reset_buffers(self) -> None:
        for value in self.buffers(recurse=False):
            value.zero_()
        self.rate.fill_(self._learning_rate)

    @torch.no_grad()
    def apply_(self, weight: Tensor | None, bias: Tensor | None, grad: RowGradient, key: int, counter: Tensor) -> None:
        """One step on the rows in `grad`; plain torch, `kernels/cuda.py` does the same in one pass.

        `weight` or `bias` None: not moved, because it is frozen or because there is none.
        """
        self.steps += 1
        touched, slot = torch.unique(grad.classes, return_inverse=True)
        random, decay = _hash.step_key(key, counter, _hash.ROUNDING), self._decay(touched)
        if weight is not None:
            g = grad.values.new_zeros(len(touched), weight.shape[1]).index_add_(0, slot, grad.values)
            moved = weight[touched].to(self.first.dtype) - self._move(g, touched, self.first, self.second, decay)
            weight[touched] = rounded(moved, weight.dtype, random, touched)
        if bias is not None:
            g = grad.bias.new_zeros(len(touched)).index_add_(0, slot, grad.bias)
            move = self._move(g, touched, self.first_bias, self.second_bias, decay)
            at = touched + self._n_weights  # places after those of the weights
            bias[touched] = rounded((bias[touched].to(move.dtype) - move)[:, None], bias.dtype, random, at)[:, 0]
        if self.lazy:
            self.last[touched] = self.steps.to(torch.int32)

    def _decay(self, touched: Tensor) -> Tensor:
        """n of the formula: how many steps of decay each touched row is due."""
        return (self.steps - self.last[touched]) if self.lazy else torch.ones_like(touched)

    def _move(self, g: Tensor, touched: Tensor, first: Tensor, second: Tensor, decay: Tensor) -> Tensor:
        """Update the states of the touched rows; return what to subtract from their weights.

        A gradient that is not finite, or too large to be squared, does not move its weight.
        """
        g = g.to(first.dtype)
        g = torch.where(g.abs() < LARGEST, g, 0.0)
        if self.kind == ADAM:
            n = decay.to(g.dtype).reshape(-1, *[1] * (g.ndim - 1))
            m = first[touched] * self.beta1**n + (1.0 - self.beta1) * g
            v = second[touched] * self.beta2**n + (1.0 - self.beta2) * g * g
            first[touched], second[touched] = m, v
            unbias = torch.sqrt(1.0 - self.beta2 ** self.steps.to(g.dtype))
            rate = self.rate.to(g.dtype) * unbias / (1.0 - self.beta1 ** self.steps.to(g.dtype))
            return rate * m / (v.sqrt() + self.eps * unbias)
        square = g * g
        if self.kind == ROWWISE and g.ndim == 2:
            square = square.sum(1) / (g != 0).sum(1).clamp_min(1)
        s = first[touched] + square
        first[touched] = s
        scale = self.rate.to(g.dtype) / (s.sqrt() + self.eps)
        return (scale if scale.ndim == g.ndim else scale[:, None]) * g

    def extra_repr(self) -> str:
        return f"{self.name}, eps={self.eps}" + (f", betas=({self.beta1}, {self.beta2})" if self.kind == ADAM else "")


def rounded(x: Tensor, dtype: torch.dtype, key: Tensor, rows: Tensor) -> Tensor:
    """x (n, D) in `dtype`; to bfloat16 at random, unbiased: add 16 random bits below those that are kept, then cut."""
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
