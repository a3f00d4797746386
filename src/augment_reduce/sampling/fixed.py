"""Samplers that depend on labels and class counts only."""

from __future__ import annotations

import functools
import itertools
import math
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..support.seeds import many_uniforms
from .base import (
    ClassSampler,
    DrawWithoutReplacement,
    Minibatch,
    Sampled,
    by_frequency,
    certain_classes,
    cut_in_two,
    frequencies,
    halved,
    in_halves,
    whole,
)  # fmt: skip

LARGEST_POWER = 16.0  # larger powers of counts may overflow


class UniformPerRow(ClassSampler):
    """The paper's sampler: |S| of the K-1 others for every row, without replacement, in O(B |S|) memory."""

    name: ClassVar[str] = "uniform"

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        uniforms = many_uniforms(len(labels), size, generator)
        classes = self._draw_without_replacement(uniforms, self.n_classes - 1, labels)
        return Sampled(classes, one_weight((self.n_classes - 1) / size, dtype), mask=None, distinct=True)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        sampled = self.draw_for(minibatch, size, generator=generator)
        return whole(sampled) if size == self.n_classes - 1 else cut_in_two(sampled, self.n_classes - 1, generator)


@functools.lru_cache(maxsize=16)
def one_weight(omega: float, dtype: torch.dtype) -> Tensor:
    """log omega, the same tensor at every step."""
    with torch.inference_mode(False):  # it may be needed where there are gradients
        return torch.tensor(math.log(omega), dtype=dtype)


class UniformShared(ClassSampler):
    """|S| of all K classes for the whole minibatch; a row's own label is masked.

    omega = (K-1) / |S without y|: given whether y was drawn, the other classes of S are uniform, so
    this is unbiased in both cases. With |S| = 1 S without y may be empty, and omega = K / |S| is used instead.
    """

    name: ClassVar[str] = "uniform-shared"
    shared: ClassVar[bool] = True
    own_by_features: ClassVar[bool] = True

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

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        if size < 4:  # a half could have the label only
            return super().draw_halves(minibatch, size, generator=generator)
        sampled = self.draw_for(minibatch, size, generator=generator)
        return whole(sampled) if size == self.n_classes else cut_in_two(sampled, self.n_classes - 1, generator)


class _Frequency(ClassSampler):
    """q_k = (1 - u) n_k^power / sum n^power + u / K: one table of K cumulative sums, float64, K not limited to 2^24.

    - `power`: 1 is the class frequency, 0 uniform; word2vec uses 0.75;
    - `uniform_share`: u, the share of a uniform distribution over all classes, which bounds the weights
      by K / u and includes unseen classes.
    """

    q: np.ndarray  # (K,)
    cumulative: Tensor
    log_q: Tensor

    def __init__(self, power: float = 1.0, uniform_share: float = 0.1) -> None:
        if not 0.0 <= uniform_share <= 1.0:
            raise ValueError(f"Expected uniform_share in [0, 1], found {uniform_share}.")
        if not 0.0 <= power <= LARGEST_POWER:
            raise ValueError(f"Expected a power of the class frequency from 0 to {LARGEST_POWER:g}, found {power}.")
        self.power, self.uniform_share = power, uniform_share

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        bound = super().bind(class_counts, draw_without_replacement)
        q = frequencies(class_counts, self.power, self.uniform_share)
        bound.q = q
        bound.cumulative = torch.from_numpy(np.cumsum(q))
        bound.log_q = torch.from_numpy(np.log(q))
        return bound

    def size(self, n_sampled_classes: int) -> int:
        return n_sampled_classes  # with replacement: any number of draws

    def _lookup(self, v: Tensor) -> Tensor:
        """The class whose interval of [0, total) contains v; clipped at the end, for rounding."""
        return torch.searchsorted(self.cumulative, v, right=True).clamp_max_(self.n_classes - 1)


class FrequencyPerRow(_Frequency):
    """Each row draws from q renormalised over the others: y's interval of the table is skipped."""

    name: ClassVar[str] = "frequency"

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        upper = self.cumulative[labels][:, None]
        lower = torch.where(labels > 0, self.cumulative[(labels - 1).clamp_min(0)], 0.0)[:, None]
        total = self.cumulative[-1]
        v = torch.rand(len(labels), size, dtype=torch.float64, generator=generator) * (total - (upper - lower))
        beyond = v >= lower
        v = torch.where(beyond, torch.maximum(v + (upper - lower), upper), v)
        classes = self._lookup(v)
        # If the last class is the label, rounding at the end could only select it again.
        classes = torch.where(classes == labels[:, None], torch.where(labels > 0, labels - 1, 1)[:, None], classes)
        log_rest = torch.log1p(-self.log_q[labels].exp())[:, None]
        log_weight = log_rest - self.log_q[classes] - math.log(size)
        return Sampled(classes, log_weight.to(dtype), mask=None, distinct=False)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return halved(self.draw_for(minibatch, size, generator=generator))


class FrequencyShared(_Frequency):
    """|S| draws from q over all K for the whole minibatch; weights are not renormalised for the masked label."""

    name: ClassVar[str] = "frequency-shared"
    shared: ClassVar[bool] = True
    own_by_features: ClassVar[bool] = True

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        v = torch.rand(size, dtype=torch.float64, generator=generator) * self.cumulative[-1]
        classes = self._lookup(v)
        log_weight, mask = (-self.log_q[classes] - math.log(size)).to(dtype), labels[:, None] == classes
        return Sampled(classes, log_weight, mask, distinct=False, label_mask=mask)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return halved(self.draw_for(minibatch, size, generator=generator))


class HeadAndTail(_Frequency):
    """The most frequent classes in every S; of the others one from each stratum of q.

    The head, with weight 1, are the classes that |S| draws from q would contain at least once on average; without their
    mass the rule applies again to the others: pi_k = min(1, lambda q_k) with sum |S|. A tail class is drawn
    |tail of S| q_k / (mass of the tail) times on average; its weight is the inverse. The variance with strata is never
    larger than that of independent draws from the same q.
    """

    name: ClassVar[str] = "head-tail-shared"
    shared: ClassVar[bool] = True
    own_by_features: ClassVar[bool] = True
    _ranked: np.ndarray
    _head_of: dict[int, Tensor]

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        bound = super().bind(class_counts, draw_without_replacement)
        bound._ranked, bound._head_of = by_frequency(bound.q), {}
        return bound

    def size(self, n_sampled_classes: int) -> int:
        return min(n_sampled_classes, self.n_classes)

    def head(self, size: int) -> Tensor:
        """The head for |S| = size, ascending; computed once, in O(size)."""
        if size not in self._head_of:
            self._head_of[size] = torch.from_numpy(certain_classes(self.q, size, self._ranked))
        return self._head_of[size]

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        return self._with_head(self.head(size), labels, size, generator, dtype)

    def draw_for(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        head, dtype = self.head_for(minibatch, size), minibatch.parameters.weight.dtype
        return self._with_head(head, minibatch.labels, size, generator, dtype)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        """The head is in both halves; each half has its own strata of the tail, twice as wide."""
        head, dtype = self.head_for(minibatch, size), minibatch.parameters.weight.dtype
        n = size - len(head)
        if not n:
            return whole(self._with_head(head, minibatch.labels, size, generator, dtype))
        sizes = n - n // 2, max(n // 2, 1)  # a tail of one class is one class for each half: |S| + 1
        (first, of_first), (second, of_second) = (self._tail(head, m, generator, dtype) for m in sizes)
        classes, certain = torch.cat([head, first, second]), torch.zeros(len(head), dtype=dtype)
        a = torch.cat([certain, of_first, torch.full_like(of_second, -math.inf)])
        b = torch.cat([certain, torch.full_like(of_first, -math.inf), of_second])
        mask = minibatch.labels[:, None] == classes
        return in_halves(classes, mask, a, b)._replace(label_mask=mask)

    def head_for(self, minibatch: Minibatch, size: int) -> Tensor:
        """The head of this minibatch, ascending."""
        return self.head(size)

    def _with_head(
        self, head: Tensor, labels: Tensor, size: int, generator: torch.Generator, dtype: torch.dtype
    ) -> Sampled:
        """These classes (ascending) with weight 1, the others of S from the strata of the tail."""
        tail, of_tail = self._tail(head, size - len(head), generator, dtype)
        classes, log_weight = torch.cat([head, tail]), torch.cat([torch.zeros(len(head), dtype=dtype), of_tail])
        # A tail class that spans the end of a stratum can be drawn from both strata.
        mask = labels[:, None] == classes
        return Sampled(classes, log_weight, mask, distinct=len(tail) <= 1, label_mask=mask)

    def _tail(self, head: Tensor, n: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """n classes of the tail, one of each stratum, and their log weights."""
        if not n:
            return head.new_zeros(0), torch.zeros(0, dtype=dtype)
        tail, rest = self._outside(head, torch.rand(n, dtype=torch.float64, generator=generator))
        return tail, (math.log(rest / n) - self.log_q[tail]).to(dtype)

    def _outside(self, head: Tensor, u: Tensor) -> tuple[Tensor, float]:
        """One class for each of the len(u) equal strata of q outside the head, at position u in it, and the tail's
        mass.

        The table of cumulative sums has all classes; intervals of head classes are skipped, in O(log K).
        """
        below = torch.where(head > 0, self.cumulative[(head - 1).clamp_min(0)], 0.0)
        removed = torch.cumsum(torch.cat([below.new_zeros(1), self.cumulative[head] - below]), 0)
        rest = float(self.cumulative[-1] - removed[-1])
        at = (torch.arange(len(u)) + u) * (rest / len(u))
        classes = self._lookup(at + removed[torch.searchsorted(below - removed[:-1], at, right=True)])
        for i in torch.isin(classes, head).nonzero()[:, 0].tolist():  # by rounding, at the end of an interval
            classes[i] = self._next_outside(head, int(classes[i]))
        return classes, rest

    def _next_outside(self, head: Tensor, k: int) -> int:
        taken = set(head.tolist())
        others = itertools.chain(range(k + 1, self.n_classes), range(k - 1, -1, -1))
        return next(c for c in others if c not in taken)


class AllClasses(ClassSampler):
    """Every class, weight one: the full sum, for the exact method and for measuring the bound."""

    name: ClassVar[str] = "all"
    shared: ClassVar[bool] = True
    own_by_features: ClassVar[bool] = True

    def size(self, n_sampled_classes: int) -> int:
        return self.n_classes

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        classes = torch.arange(self.n_classes)
        return Sampled(classes, torch.zeros((), dtype=dtype), labels[:, None] == classes, distinct=True)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return whole(self.draw_for(minibatch, size, generator=generator))
