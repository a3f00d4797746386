"""The interface of class samplers, and their inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu.row_groups import RowGroups
from ..kernels.minibatch_groups import MinibatchGroups
from ..sharding import Partition
from ..support.layout import Layout

DrawWithoutReplacement = Callable[..., Tensor]  # (uniforms (B, S), n, labels (B,) | None) -> (B, S)


class Half(NamedTuple):
    """One half of a sample: log weights over all of its classes, (S,) or broadcastable to (B, S); -inf: not in it.

    - `stands`: weights of this half alone, unbiased for the sum over the other classes; independent of the other half;
    - `given`: weights of the sample given this half: E[ . | this half] is the full sum.
    """

    stands: Tensor
    given: Tensor


class Sampled(NamedTuple):
    """The sampled classes of a minibatch.

    - `classes`: (B, S), or (S,) if shared by the minibatch;
    - `log_weight`: log omega, broadcastable to (B, S);
    - `mask`: (B, S), True for a row's own label, and for a class that has another column in this row; None: no mask;
    - `distinct`: whether the classes of a row's sample are distinct;
    - `halves`: if drawn in two halves; omega is then the mean of the weights given either;
    - `label_mask`: `mask` itself if it masks only a row's own label and, among the shared classes, the row's candidate
      classes: a fused kernel need not read it. Code that replaces the mask need not change it;
    - `own`: (B, P), candidate classes of each row, in the last P of its S + P columns; the same for duplicate rows. A
      row has `n_own` (B,) of them; the other columns have some label, masked.
    """

    classes: Tensor
    log_weight: Tensor
    mask: Tensor | None
    distinct: bool
    halves: tuple[Half, Half] | None = None
    own: Tensor | None = None
    n_own: Tensor | None = None
    label_mask: Tensor | None = None

    def columns(self, n_rows: int) -> Tensor:
        """The classes of all columns: (B, S + P), or (S,) if all are shared."""
        shared = self.classes.expand(n_rows, -1)
        return shared if self.own is None else torch.cat([shared, self.own], dim=1)

    @property
    def shared(self) -> bool:
        return self.classes.ndim == 1

    @property
    def hides_labels_only(self) -> bool:
        """Whether the mask is determined by the labels and the classes; see `label_mask`."""
        return self.mask is not None and self.mask is self.label_mask and (self.own is None) == (self.n_own is None)


class Minibatch(NamedTuple):
    """The inputs of a draw: the rows of this step, and the weights after `steps_taken` steps."""

    X: Any  # Rows, or the rows of the device
    rows: np.ndarray
    labels: Tensor
    parameters: Any  # Parameters
    kernels: ModuleType
    steps_taken: int
    groups: MinibatchGroups | None = None  # groups of duplicate rows, if known
    all_classes: int = 0  # K, if `parameters` are those of some classes only

    @property
    def n_classes(self) -> int:
        return self.all_classes or len(self.parameters.bias)


class TrainingData(NamedTuple):
    """The inputs of `prepare`, before the first step."""

    X: Any  # Rows
    rows: np.ndarray  # the training rows
    labels: np.ndarray  # of `rows`, in the same order
    groups: RowGroups | None = None  # of duplicate rows, if searched for


class ClassSampler:
    """Base of the samplers: a recipe. `bind` returns a copy for one fit, and that copy draws at every step.

    The recipe has the constructor's arguments and is never modified: several estimators may share one. All that depends
    on the data or changes in training (tables of class frequencies, stored classes of rows) is in the bound copy; the
    part that `warm_start` and model files restore is its `state_dict`.

    A subclass defines `draw`, or `draw_for` if it needs more than labels. To build tables it extends `bind`:

        def bind(self, class_counts, draw_without_replacement):
            bound = super().bind(class_counts, draw_without_replacement)
            bound.log_count = np.log(class_counts)
            return bound

    A subclass with shared classes sets `shared = True`, and `own_by_features = True` if duplicate rows have the same
    candidate classes, or none: then duplicate rows of a minibatch are grouped and scored once. A subclass that
    overrides a draw sets the latter again; it is not inherited.

    Over ranks every process draws for all classes, and the draws have to be equal: a sampler that reads weights or
    gradients, of which a process has some classes only, gathers them by `partition`, or sets `over_ranks = False` and
    is refused over ranks.

    A sampler that needs all training rows before the first step defines `prepare`, one that needs gradients `observe`.
    A draw may depend on earlier steps and on its rows, not on the classes drawn in this step.
    """

    name: ClassVar[str]
    shared: ClassVar[bool] = False  # whether the drawn classes are shared by the minibatch
    own_by_features: ClassVar[bool] = False  # whether duplicate rows have the same `Sampled.own`, if any
    over_ranks: ClassVar[bool] = True  # whether its draws are the same with sharded weights
    n_classes: int = 0  # K, of a bound copy
    partition: Partition | None = None  # of a bound copy with sharded weights
    _draw_without_replacement: DrawWithoutReplacement

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if {"draw", "draw_for", "draw_halves"} & vars(cls).keys() and "own_by_features" not in vars(cls):
            cls.own_by_features = False

    def for_classes(self, n_classes: int) -> Self:
        """A copy with K set, for `size` and `bytes`."""
        found = copy.copy(self)
        found.n_classes = n_classes
        return found

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        """A copy for one fit, with K and the class frequencies; `draw_without_replacement` is the device's kernel."""
        bound = self.for_classes(len(class_counts))
        bound._draw_without_replacement = draw_without_replacement
        return bound

    def size(self, n_sampled_classes: int) -> int:
        """The number of classes drawn: at most the number of other classes."""
        return min(n_sampled_classes, self.n_classes - 1)

    @property
    def observes(self) -> bool:
        """Whether `observe` needs the gradients of a step."""
        return type(self).observe is not ClassSampler.observe

    def most_own(self) -> int:
        """The maximum number of candidate classes of a row."""
        return 0

    def bytes(self, n_rows: int, n_features: int) -> int:
        """Bytes of its state, except for tables of O(K); 0 for most samplers."""
        return 0

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        raise TypeError(f"{type(self).__name__} does not say how to draw.")

    def draw_for(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        """Called by a step. By default `draw` with the labels."""
        return self.draw(minibatch.labels, size, generator=generator, dtype=minibatch.parameters.weight.dtype)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        """As `draw_for`, in two halves, for an E step on one and an M step on the other. By default two draws."""
        first = self.draw_for(minibatch, size - size // 2, generator=generator)
        return joined(first, self.draw_for(minibatch, size // 2, generator=generator))

    def warm_up(self, X: Any) -> None:
        """Compile the kernels of `prepare` for such rows."""

    def prepare(self, data: TrainingData, size: int) -> None:
        """Called before the first step on these rows, with |S|. By default does nothing."""

    def end_epoch(self, parameters: Any, n_rows: int, size: int) -> None:
        """Called after the last step of an epoch over n_rows, with the weights and |S|. By default does nothing."""

    def observe(self, minibatch: Minibatch, sampled: Sampled, grad: Tensor) -> None:
        """Called after the step, with the bound's gradient by the gaps (B, S). By default does nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state that exact resumption of training needs; saved with the model."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor], *, same_rows: bool) -> None:
        """Restore the `state_dict` of an earlier fit, after `bind`. `same_rows`: whether the rows are the same. The
        state of another sampler, or of other settings, is ignored."""

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        """The layouts of `state_dict` in a model file; none: it is not checked."""
        return ()


def joined(first: Sampled, second: Sampled) -> Sampled:
    """Two independent samples for the same rows as the halves of one."""
    classes = torch.cat([first.classes, second.classes], dim=-1)
    n, m = first.classes.shape[-1], second.classes.shape[-1]
    mask = None
    if first.mask is not None or second.mask is not None:
        shape = next(sample.mask.shape[:-1] for sample in (first, second) if sample.mask is not None)
        none = [torch.zeros(*shape, size, dtype=torch.bool) for size in (n, m)]
        mask = torch.cat([x if x is not None else y for x, y in zip((first.mask, second.mask), none, strict=True)], -1)
    a, b = (_one_a_class(sample) for sample in (first, second))
    return in_halves(classes, mask, F.pad(a, (0, m), value=-math.inf), F.pad(b, (n, 0), value=-math.inf))


def halved(sampled: Sampled) -> Sampled:
    """The halves of a sample of independent, identically distributed draws."""
    size = sampled.classes.shape[-1]
    n = size - size // 2
    log_weight = _one_a_class(sampled)
    in_first = torch.arange(size) < n
    a = (log_weight + math.log(size / n)).masked_fill(~in_first, -math.inf)
    b = (log_weight + math.log(size / (size - n))).masked_fill(in_first, -math.inf)
    return in_halves(sampled.classes, sampled.mask, a, b)._replace(label_mask=sampled.label_mask)


def cut_in_two(sampled: Sampled, n_others: int, generator: torch.Generator) -> Sampled:
    """The halves of one draw without replacement from the `n_others` classes other than the label, the label masked.

    Cut at random, because the order of the drawn classes is not uniform. The halves are not independent: given one,
    whose classes are then certain, the other is a draw without replacement from the remaining classes.
    """
    size, dtype = sampled.classes.shape[-1], sampled.log_weight.dtype
    first = torch.randperm(size, generator=generator) < size - size // 2
    counts = torch.ones(size, dtype=torch.bool) if sampled.mask is None else ~sampled.mask

    def half(inside: Tensor) -> Half:
        own, rest = ((counts & part).sum(dim=-1, keepdim=True).double() for part in (inside, ~inside))
        stands = torch.where(inside, n_others / own, 0.0)
        given = torch.where(inside, 1.0, (n_others - own) / rest)
        return Half(stands.log().to(dtype), given.log().to(dtype))

    halves = half(first), half(~first)
    return sampled._replace(log_weight=mean_weight(halves[0].given, halves[1].given), halves=halves)


def in_halves(classes: Tensor, mask: Tensor | None, a: Tensor, b: Tensor) -> Sampled:
    """A sample from two independent halves: given one, the weights of the other are unchanged."""
    return Sampled(classes, mean_weight(a, b), mask, False, (Half(stands=a, given=b), Half(stands=b, given=a)))


def whole(sampled: Sampled) -> Sampled:
    """For a deterministic sample: both halves are the whole sample."""
    half = Half(stands=_one_a_class(sampled), given=_one_a_class(sampled))
    return sampled._replace(halves=(half, half))


def mean_weight(a: Tensor, b: Tensor) -> Tensor:
    """log((e^a + e^b) / 2)."""
    return torch.logaddexp(a, b) - math.log(2.0)


def _one_a_class(sampled: Sampled) -> Tensor:
    """log omega with a last dimension of |S|."""
    log_weight, size = sampled.log_weight, sampled.classes.shape[-1]
    return log_weight.expand(size) if log_weight.ndim == 0 else log_weight.expand(*log_weight.shape[:-1], size)


def frequencies(counts: np.ndarray, power: float, uniform_share: float) -> np.ndarray:
    """q_k = (1 - u) n_k^power / sum n^power + u / K, float64, summing to one."""
    mass = counts.astype(np.float64) ** power
    q = (1.0 - uniform_share) * mass / mass.sum() + uniform_share / len(counts)
    if (q <= 0.0).any():
        raise ValueError(
            f"{int((q <= 0).sum())} of {len(counts)} classes have no training row and would never be drawn, so that "
            "their weight would be missing from every sum. Pass a uniform_share > 0."
        )
    return q / q.sum()


def certain_classes(q: np.ndarray, size: int, ranked: np.ndarray | None = None) -> np.ndarray:
    """The classes whose pi = min(1, lambda q), summing to |S|, is 1; ascending.

    In order of decreasing frequency: class number H (from 0) is certain if its share of the remaining |S| - H draws,
    relative to the remaining classes, is at least one. `ranked`: the classes in that order, if known.
    """
    order = (by_frequency(q) if ranked is None else ranked)[:size]
    rest = 1.0 - np.concatenate([[0.0], np.cumsum(q[order])[:-1]])
    below_one = (size - np.arange(size)) * q[order] < rest * (1.0 - 1e-9)
    n_certain = int(np.argmax(below_one)) if below_one.any() else size
    return np.sort(order[:n_certain])


def by_frequency(q: np.ndarray) -> np.ndarray:
    return np.argsort(-q, kind="stable")
