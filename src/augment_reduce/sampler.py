"""Which classes stand for the rest, and with what weights.

A sampler draws classes S for a minibatch and says omega such that, for every row with label y,

    E[ sum_{k in S} omega_k f_k ] = sum_{k != y} f_k          for any f,

which is all that the bounds need of it (paper, "Reduce by subsampling"). Classes are drawn for each row
(`classes` is (B, S)) or once for the whole minibatch (`classes` is (S,)); a pair in which a row meets its
own label is masked, and counts for nothing.

    sampler                    drawn                                          omega_k
    UniformPerRow              without replacement from the K-1 others        (K-1) / |S|
    UniformShared              without replacement from all K, label masked   (K-1) / |S without y|   (K where |S| = 1)
    FrequencyPerRow            with replacement from q over the others        (1 - q_y) / (|S| q_k)
    FrequencyShared            with replacement from q, label masked          1 / (|S| q_k)
    AllClasses                 every class, label masked                      1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

DrawWithoutReplacement = Callable[..., Tensor]  # (uniforms (B, S), n, labels (B,) | None) -> (B, S)


class Sampled(NamedTuple):
    """The classes that stand for the rest.

    - `classes`: (B, S), or (S,) where the minibatch shares them;
    - `log_weight`: log omega, broadcastable to (B, S);
    - `mask`: (B, S), True where a row meets its own label; None where that cannot happen;
    - `distinct`: whether no class stands twice in a row's sample.
    """

    classes: Tensor
    log_weight: Tensor
    mask: Tensor | None
    distinct: bool

    @property
    def shared(self) -> bool:
        return self.classes.ndim == 1


def many_uniforms(B: int, S: int, generator: torch.Generator) -> Tensor:
    """(B, S) in float64, from one number of the generator: five times as fast as torch.rand."""
    from .kernels.cpu import uniforms

    return uniforms(draw_seed(generator), B, S)


def draw_seed(generator: torch.Generator) -> int:
    """One number of the generator, from which many follow."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


class ClassSampler:
    """Base of the samplers: `bind` once to the training labels, then `draw` at every step."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.n_classes = 0

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> ClassSampler:
        """Learn K and the class frequencies; `draw_without_replacement` is the kernel of the device."""
        self.n_classes = len(class_counts)
        self._draw_without_replacement = draw_without_replacement
        return self

    def size(self, n_sampled_classes: int) -> int:
        """|S| as drawn: never more than there are others to draw."""
        return min(n_sampled_classes, self.n_classes - 1)

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        raise TypeError(f"{type(self).__name__} does not say how to draw.")


class UniformPerRow(ClassSampler):
    """The paper's sampler: |S| of the K-1 others for every row, without replacement, in O(B |S|) memory."""

    name: ClassVar[str] = "uniform"

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        uniforms = many_uniforms(len(labels), size, generator)
        classes = self._draw_without_replacement(uniforms, self.n_classes - 1, labels)
        log_weight = torch.full((), math.log((self.n_classes - 1) / size), dtype=dtype)
        return Sampled(classes, log_weight, mask=None, distinct=True)


class UniformShared(ClassSampler):
    """|S| of all K classes for the whole minibatch; a row whose label is among them leaves it out.

    omega = (K-1) / |S without y|: given whether y was drawn, the rest of S is uniform over the others, so
    this is unbiased in both cases. With |S| = 1 the rest can be empty, and omega = K / |S| is used instead.
    """

    name: ClassVar[str] = "uniform-shared"

    def size(self, n_sampled_classes: int) -> int:
        return min(n_sampled_classes, self.n_classes)

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        classes = self._draw_without_replacement(many_uniforms(1, size, generator), self.n_classes)[0]
        mask = labels[:, None] == classes
        if size == 1:
            log_weight = torch.tensor(math.log(self.n_classes), dtype=dtype)
        else:
            others = size - mask.sum(dim=1, keepdim=True)
            log_weight = torch.log((self.n_classes - 1) / others.to(torch.float64)).to(dtype)
        return Sampled(classes, log_weight, mask, distinct=True)


class _Frequency(ClassSampler):
    """q_k = (1 - u) n_k^power / sum n^power + u / K: one table of K cumulative sums, float64, no 2^24 limit.

    - `power`: 1 is the class frequency, 0 uniform; 0.75 is word2vec's habit;
    - `uniform_share`: u, the share of the draws that goes to all classes alike, which bounds the weights
      by K / u and reaches the classes never seen.
    """

    def __init__(self, power: float = 1.0, uniform_share: float = 0.1) -> None:
        super().__init__()
        if not 0.0 <= uniform_share <= 1.0:
            raise ValueError(f"Expected uniform_share in [0, 1], found {uniform_share}.")
        if not (math.isfinite(power) and power >= 0.0):
            raise ValueError(f"Expected a power of the class frequency >= 0, found {power}.")
        self.power, self.uniform_share = power, uniform_share

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> ClassSampler:
        super().bind(class_counts, draw_without_replacement)
        mass = class_counts.astype(np.float64) ** self.power
        q = (1.0 - self.uniform_share) * mass / mass.sum() + self.uniform_share / self.n_classes
        if (q <= 0.0).any():
            raise ValueError(
                f"{int((q <= 0).sum())} of {self.n_classes} classes have no training row and would never be drawn, "
                "so that their weight would be missing from every sum. Pass a uniform_share > 0."
            )
        self.cumulative = torch.from_numpy(np.cumsum(q))
        self.log_q = torch.from_numpy(np.log(q / q.sum()))
        return self

    def size(self, n_sampled_classes: int) -> int:
        return n_sampled_classes  # with replacement: any number of draws makes sense

    def _lookup(self, v: Tensor) -> Tensor:
        """The class whose stretch of [0, total) holds v; rounding at the very end stays inside."""
        return torch.searchsorted(self.cumulative, v, right=True).clamp_max_(self.n_classes - 1)


class FrequencyPerRow(_Frequency):
    """Each row draws from q renormalised over the others: y's stretch of the table is stepped over."""

    name: ClassVar[str] = "frequency"

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        upper = self.cumulative[labels][:, None]
        lower = torch.where(labels > 0, self.cumulative[(labels - 1).clamp_min(0)], 0.0)[:, None]
        total = self.cumulative[-1]
        v = torch.rand(len(labels), size, dtype=torch.float64, generator=generator) * (total - (upper - lower))
        beyond = v >= lower
        v = torch.where(beyond, torch.maximum(v + (upper - lower), upper), v)
        classes = self._lookup(v)
        # The last class's stretch can be stepped over too; then rounding could only reach back to it.
        classes = torch.where(classes == labels[:, None], torch.where(labels > 0, labels - 1, 1)[:, None], classes)
        log_rest = torch.log1p(-self.log_q[labels].exp())[:, None]
        log_weight = log_rest - self.log_q[classes] - math.log(size)
        return Sampled(classes, log_weight.to(dtype), mask=None, distinct=False)


class FrequencyShared(_Frequency):
    """|S| draws from q over all K for the whole minibatch; weights are not renormalised for the masked label."""

    name: ClassVar[str] = "frequency-shared"

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        v = torch.rand(size, dtype=torch.float64, generator=generator) * self.cumulative[-1]
        classes = self._lookup(v)
        log_weight = (-self.log_q[classes] - math.log(size)).to(dtype)
        return Sampled(classes, log_weight, labels[:, None] == classes, distinct=False)


class AllClasses(ClassSampler):
    """Every class, weight one: the full sum, for the exact method and for measuring the bound."""

    name: ClassVar[str] = "all"

    def size(self, n_sampled_classes: int) -> int:
        return self.n_classes

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        classes = torch.arange(self.n_classes)
        return Sampled(classes, torch.zeros((), dtype=dtype), labels[:, None] == classes, distinct=True)


SAMPLERS: dict[str, type[ClassSampler]] = {
    cls.name: cls for cls in (UniformPerRow, UniformShared, FrequencyPerRow, FrequencyShared, AllClasses)
}


def resolve_sampler(class_sampling: str | ClassSampler) -> ClassSampler:
    """A sampler by its name, or the object itself."""
    if isinstance(class_sampling, ClassSampler):
        return class_sampling
    if isinstance(class_sampling, str) and class_sampling in SAMPLERS:
        return SAMPLERS[class_sampling]()
    raise ValueError(
        f"Expected class_sampling to be one of {', '.join(map(repr, SAMPLERS))} or a ClassSampler object, "
        f"found {class_sampling!r}."
    )
