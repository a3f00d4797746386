"""A sampler that looks at which features a row has: the classes they point at are in its sample for certain."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.rows import SparseRows
from ..layout import Entry, Layout
from .base import ClassSampler, DrawWithoutReplacement, Half, Minibatch, Sampled
from .fixed import HeadAndTail

KEPT = ("listed", "counts", "seen", "heavy", "heavy_weight", "since")
A_PASS = 16  # weights that are looked through in the time of a row and a class of it, at least
WEIGHTS_AT_ONCE = 1 << 26  # that a device copies to look through them
ROOM = 8  # times n_own: labels of the same features that a row may have


class FeaturePointed(HeadAndTail):
    """`HeadAndTail`, shared by the minibatch, and for each row the P classes at which its features point, weight 1.

        points_k(x) = sum_{d: x_d != 0} P(k | d) / sqrt(n_k)        P(k | d): the share of label k in the rows with d

    What is seldom drawn is a row's strongest rival only where its features say so, and they did so in the training
    rows before. `study` counts there, once, before the first step: for each feature a list of `per_feature` labels with
    their counts (Space-Saving), O(D) numbers and one pass over the non-zeros. sqrt(n_k) gives room to classes that the
    shared sample meets rarely. Head classes, which are there anyway, are not listed.

    Where rows come several times with different labels (every label of a document an example) the other labels come
    first: nothing is a surer rival than what was right for the very same features, however rare. All of them, where
    they are more than P (up to ROOM times as many).

    What labels have not said the weights may: as many classes again of largest sum_d w_kd over the row's features, from
    lists of the `per_feature` classes whose weight for a feature is largest. A rare class, seldom drawn, can come to
    outweigh the label on rows that have only features in common with it that all have. These lists are made anew from
    the weights when an epoch ends, in one pass over them; after a short one, a part of a stream say, not yet.

    The own classes of a row depend on its features, the training labels and earlier steps, not on the draw: with weight
    1 for them, and the shared classes for what they leave, every row's sum stays unbiased. A row's label is masked,
    where it is one of them.
    """

    name: ClassVar[str] = "pointed-shared"

    def __init__(self, n_own: int = 16, per_feature: int = 16, power: float = 1.0, uniform_share: float = 0.1) -> None:
        super().__init__(power, uniform_share)
        if n_own < 1 or per_feature < 1:
            raise ValueError(
                f"Expected n_own and per_feature to be 1 or more, found {n_own} and {per_feature}. "
                f"Without classes of its own for each row this is {HeadAndTail.name!r}."
            )
        self.n_own, self.per_feature = n_own, per_feature
        self._forget()

    def _forget(self) -> None:
        self.listed = np.empty((0, self.per_feature), np.int32)  # (D, per_feature) classes, NOBODY: none
        self.counts = np.empty((0, self.per_feature), np.float32)
        self.seen = np.empty(0, np.float64)  # (D,) rows that have the feature
        self.heavy = np.empty((0, self.per_feature), np.int32)  # (D, per_feature) classes of the largest weights
        self.heavy_weight = np.empty((0, self.per_feature), np.float32)
        self.since = np.zeros(1, np.int64)  # rows trained on since these were listed
        self._some_heavy = False
        self._knows_rows = False
        self._same: Any = None  # rows that differ in their labels alone

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> ClassSampler:
        self._forget()
        self._weight = 1.0 / np.sqrt(np.maximum(class_counts, 1.0))
        self._certain_of: dict[int, np.ndarray] = {}
        self._last = np.full(len(class_counts), -1, np.int32)  # scratch
        return super().bind(class_counts, draw_without_replacement)

    def most_own(self) -> int:
        return (ROOM + 1) * self.n_own

    def bytes(self, n_rows: int, n_features: int) -> int:
        return n_features * (16 * self.per_feature + 8) + 120 * n_rows  # while it studies; 26 of them stay

    def kept(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name)) for name in KEPT}

    @classmethod
    def layouts(cls) -> tuple[Layout, ...]:
        studied = {
            "listed": Entry("int32", ("D?listed", "P"), -1, "K"), "counts": Entry("float32", ("D?listed", "P"), 0.0),
            "seen": Entry("float64", ("D?listed",), 0.0),
        }  # fmt: skip
        weights = {
            "heavy": Entry("int32", ("D?heavy", "P"), -1, "K"), "heavy_weight": Entry("float32", ("D?heavy", "P"), 0.0),
            "since": Entry("int64", (1,), 0, 2**53),
        }  # fmt: skip
        return studied, studied | weights  # older files have no weights listed

    def resume(self, kept: dict[str, Tensor], *, same_rows: bool) -> None:
        if {"listed", "counts", "seen"} <= kept.keys() and kept["listed"].shape[1] == self.per_feature:
            for name in kept.keys() & set(KEPT):  # older files have no weights listed
                setattr(self, name, kept[name].numpy())
            self._some_heavy = bool(self.heavy_weight.any())
            self._knows_rows = same_rows and len(self.listed) > 0

    def warm_up(self, X: Any) -> None:
        from ..kernels._cpu_pointers import find_heaviest, join, tally, twins

        X, nobody = sparse(X), np.empty(0, np.int64)
        twins((X.indptr, X.indices, X.values), nobody, nobody, np.empty(0, np.bool_), np.empty(0), 1)
        lists = np.empty((0, self.per_feature), np.int32), np.empty((0, self.per_feature), np.float32), np.empty(0)
        tally(X.indptr, X.indices, X.values, nobody, nobody, np.empty(0, np.bool_), *lists)
        find_heaviest(np.empty((0, 0), np.float32), np.empty(0, np.bool_), *lists[:2])
        join(*(np.empty(shape, np.int64) for shape in ((0, 0), 0, (0, 0), 0, 0, (0, 0))))

    def study(self, X: Any, rows: np.ndarray, labels: np.ndarray, size: int) -> None:
        from ..kernels._cpu_batch import check_features
        from ..kernels._cpu_pointers import NOBODY, tally, twins

        X = sparse(X)
        check_features(X)  # before any step has loaded, and looked at, the rows
        labels = np.ascontiguousarray(labels, np.int64)
        same_as = (X.indptr, X.indices, X.values), rows, labels
        self._same = twins(*same_as, self.certain(size), self._weight, ROOM * self.n_own)
        if self._knows_rows:
            return
        if len(self.listed) != X.n_features:
            self.listed = np.full((X.n_features, self.per_feature), NOBODY, np.int32)
            self.counts = np.zeros((X.n_features, self.per_feature), np.float32)
            self.seen = np.zeros(X.n_features)
        tally(
            X.indptr, X.indices, X.values, rows, labels, self.certain(size), self.listed, self.counts, self.seen
        )  # fmt: skip
        self._knows_rows = True

    def end_epoch(self, parameters: Any, n_rows: int, size: int) -> None:
        from ..kernels._cpu_pointers import NOBODY, find_heaviest

        weight = parameters.weight
        self.since = self.since + n_rows
        if self.since * size * A_PASS < weight.numel():  # looking through them would take longer than the epoch has
            return
        shape = weight.shape[1], self.per_feature
        heavy, values = np.full(shape, NOBODY, np.int32), np.zeros(shape, np.float32)
        if weight.is_cuda:
            self._find_on_device(weight, size, heavy, values)
        else:
            find_heaviest(weight.numpy(), self.certain(size), heavy, values)
        some, none = bool(values.any()), np.zeros(1, np.int64)
        self.heavy, self.heavy_weight, self._some_heavy, self.since = heavy, values, some, none  # all or nothing

    def _find_on_device(self, weight: Tensor, size: int, heavy: np.ndarray, heavy_weight: np.ndarray) -> None:
        from ..kernels._cpu_pointers import NOBODY

        free = np.flatnonzero(~self.certain(size))
        rows, n = torch.from_numpy(free).to(weight.device), min(self.per_feature, len(free))
        at_once = max(1, WEIGHTS_AT_ONCE // max(1, len(free)))
        for first in range(0, weight.shape[1], at_once):
            part = slice(first, first + at_once)
            values, places = (found.cpu().numpy().T for found in weight[rows, part].topk(n, dim=0))
            heavy[part, :n] = np.where(values > 0, free[places], NOBODY)
            heavy_weight[part, :n] = np.maximum(values, 0)

    def certain(self, size: int) -> np.ndarray:
        """(K,) whether a class is in the head where |S| = size."""
        if size not in self._certain_of:
            self._certain_of[size] = np.zeros(self.n_classes, np.bool_)
            self._certain_of[size][self.head(size).numpy()] = True
        return self._certain_of[size]

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        raise TypeError(f"{type(self).__name__} draws by the features of the rows: call draw_for with a Minibatch.")

    def draw_for(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return self._with_own(super().draw_for(minibatch, size, generator=generator), minibatch, size)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        """A row's own classes are in both halves, as the head is."""
        return self._with_own(super().draw_halves(minibatch, size, generator=generator), minibatch, size)

    def own(self, minibatch: Minibatch, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(U, P), (U,): the classes that these runs' features point at, and how many; some label for the rest."""
        from ..kernels._cpu_pointers import Twins, join, pointed

        X, labels, rows = sparse(minibatch.X), minibatch.labels.numpy(), minibatch.rows
        if minibatch.alike is not None:
            labels, rows = labels[minibatch.alike.first], rows[minibatch.alike.first]
        if self._same is None or len(self.listed) != X.n_features:
            raise ValueError(
                f"Expected rows of {len(self.listed)} features, as it has studied, found rows of {X.n_features}. "
                "Call `study` with the training rows first."
            )
        lists, csr = (self.listed, self.counts, self.seen), (X.indptr, X.indices, X.values)
        certain = self.certain(size)
        own, found = pointed(csr, rows, labels, certain, lists, self._same, self._weight, self.n_own)
        if len(self.heavy) != X.n_features or not self._some_heavy:
            return own, found
        lists = self.heavy, self.heavy_weight, ones(X.n_features)
        more, n_more = pointed(csr, rows, labels, certain, lists, Twins.none(), ones(self.n_classes), self.n_own)
        both = np.empty((len(own), own.shape[1] + more.shape[1]), np.int64)
        join(np.ascontiguousarray(own), found, np.ascontiguousarray(more), n_more, labels, both)
        return both[:, : max(1, int(found.max()))], found

    def _with_own(self, sampled: Sampled, minibatch: Minibatch, size: int) -> Sampled:
        from ..kernels._cpu_pointers import meet

        (own, found), classes = self.own(minibatch, size), sampled.classes.numpy()
        twice = np.zeros((len(own), len(classes)), np.bool_)
        meet(own, found, classes, twice, self._last, np.empty(len(classes), np.int32))
        if minibatch.alike is not None:
            own, found, twice = (of_runs[minibatch.alike.run] for of_runs in (own, found, twice))
        assert sampled.mask is not None
        shared, of_own = sampled.mask | torch.from_numpy(twice), torch.from_numpy(own)  # a class counts once
        n_own = torch.from_numpy(found)
        none = torch.arange(own.shape[1]) >= n_own[:, None]

        def padded(log_weight: Tensor) -> Tensor:
            return F.pad(log_weight, (0, own.shape[1]))

        halves = sampled.halves
        if halves is not None:
            first, second = (Half(padded(half.stands), padded(half.given)) for half in halves)
            halves = (first, first) if halves[0] is halves[1] else (first, second)
        return sampled._replace(
            own=of_own, n_own=n_own, log_weight=padded(sampled.log_weight), halves=halves,
            mask=torch.cat([shared, none.logical_or_(of_own == minibatch.labels[:, None])], dim=1),
        )  # fmt: skip


@functools.lru_cache(maxsize=4)
def ones(n: int) -> np.ndarray:
    """Made once: a step must not take longer for more features or classes."""
    return np.ones(n)


def sparse(X: Any) -> SparseRows:
    """The rows themselves, of which a device has a copy."""
    rows = getattr(X, "source", X)
    if not isinstance(rows, SparseRows):
        raise ValueError(
            f"class_sampling={FeaturePointed.name!r} looks at which features a row has, and expects sparse rows, but X "
            f"is a dense array, in which a row has them all. Use {HeadAndTail.name!r}, or pass a scipy CSR matrix."
        )
    return rows
