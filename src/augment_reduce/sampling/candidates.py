"""A sampler with candidate classes for each row, selected by its features."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu.batch import check_features
from ..kernels.cpu.candidates import (
    NONE,
    DuplicateLabels,
    append_new,
    candidates_of_rows,
    count_labels,
    labels_of_duplicates,
    mark_shared,
    top_weight_classes,
)
from ..kernels.cpu.row_groups import arrays_of, group_rows
from ..kernels.rows import SparseRows
from ..sharding import Partition
from ..support.layout import Entry, Layout
from .base import DrawWithoutReplacement, Half, Minibatch, Sampled, TrainingData
from .fixed import HeadAndTail

KEPT = ("listed", "counts", "seen", "heavy", "heavy_weight", "since")
A_PASS = 16  # weights scanned in the time of scoring a class of a row, at least
WEIGHTS_AT_ONCE = 1 << 26  # weights that a device copies at a time for the scan
ROOM = 8  # times n_own: limit of labels of duplicate rows


class FeatureCandidates(HeadAndTail):
    """`HeadAndTail`, shared by the minibatch, and for each row P candidate classes by its features, with weight 1.

        score_k(x) = sum_{d: x_d != 0} P(k | d) / sqrt(n_k)        P(k | d): the share of label k in the rows with d

    A rare class has a large score in a row mainly if its features co-occurred with that class in training rows.
    `prepare` counts this once, before the first step: for each feature a list of `per_feature` labels with their counts
    (Space-Saving), O(D) numbers and one pass over the non-zeros. The factor 1 / sqrt(n_k) favours classes that are rare
    in the shared sample. Head classes, which are in every sample, are not listed.

    For duplicate rows (every label of a document an example) the labels of the other duplicates come first, since their
    scores are large, however rare they are. All of them are used, up to ROOM * P.

    Labels do not find all classes with large scores, so as many candidates again have the largest sum_d w_kd over the
    row's features, from lists of the `per_feature` classes with the largest weights for a feature. (The score of a rare
    class, drawn rarely, may exceed the label's in rows that share only common features with it.) These lists are
    rebuilt from the weights at the end of an epoch, in one pass; after short epochs, as parts of a stream, less often.

    The candidates of a row depend on its features, the training labels and earlier steps, not on the draw: with weight
    1 for them, and the shared classes for the others, every row's sum is unbiased. A row's label is masked if it is
    among them.
    """

    name: ClassVar[str] = "candidates-shared"
    own_by_features: ClassVar[bool] = True
    listed: np.ndarray  # (D, per_feature) classes, NONE: none
    counts: np.ndarray
    seen: np.ndarray  # (D,) rows with the feature
    heavy: np.ndarray  # (D, per_feature) classes of the largest weights
    heavy_weight: np.ndarray
    since: np.ndarray  # (1,) rows trained on since the lists were built
    _has_heavy: bool
    _rows_counted: bool
    _duplicates: Any  # groups of rows that differ in their labels only
    _weight: np.ndarray  # (K,) 1 / sqrt(n_k)
    _certain_of: dict[int, np.ndarray]
    _last: np.ndarray  # (K,) scratch

    def __init__(self, n_own: int = 16, per_feature: int = 16, power: float = 1.0, uniform_share: float = 0.1) -> None:
        super().__init__(power, uniform_share)
        if n_own < 1 or per_feature < 1:
            raise ValueError(
                f"Expected n_own and per_feature to be 1 or more, found {n_own} and {per_feature}. "
                f"Without classes of its own for each row this is {HeadAndTail.name!r}."
            )
        self.n_own, self.per_feature = n_own, per_feature

    def bind(self, class_counts: np.ndarray, draw_without_replacement: DrawWithoutReplacement) -> Self:
        bound = super().bind(class_counts, draw_without_replacement)
        bound._forget()
        bound._weight = 1.0 / np.sqrt(np.maximum(class_counts, 1.0))
        bound._certain_of = {}
        bound._last = np.full(len(class_counts), -1, np.int32)
        return bound

    def _forget(self) -> None:
        self.listed = np.empty((0, self.per_feature), np.int32)
        self.counts = np.empty((0, self.per_feature), np.float32)
        self.seen = np.empty(0, np.float64)
        self.heavy = np.empty((0, self.per_feature), np.int32)
        self.heavy_weight = np.empty((0, self.per_feature), np.float32)
        self.since = np.zeros(1, np.int64)
        self._has_heavy = False
        self._rows_counted = False
        self._duplicates = None

    def most_own(self) -> int:
        return (ROOM + 1) * self.n_own

    def bytes(self, n_rows: int, n_features: int) -> int:
        return n_features * (16 * self.per_feature + 8) + 120 * n_rows  # during `prepare`; 26 of them remain

    def state_dict(self) -> dict[str, Tensor]:
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
        return studied, studied | weights  # older files have no lists by weights

    def load_state_dict(self, state: dict[str, Tensor], *, same_rows: bool) -> None:
        if {"listed", "counts", "seen"} <= state.keys() and state["listed"].shape[1] == self.per_feature:
            for name in state.keys() & set(KEPT):  # older files have no lists by weights
                setattr(self, name, state[name].numpy())
            self._has_heavy = bool(self.heavy_weight.any())
            self._rows_counted = same_rows and len(self.listed) > 0

    def warm_up(self, X: Any) -> None:
        X, no_rows = sparse(X).loaded(np.empty(0, np.int64))
        lists = np.empty((0, self.per_feature), np.int32), np.empty((0, self.per_feature), np.float32), np.empty(0)
        count_labels(*arrays_of(X), no_rows, no_rows, np.empty(0, np.bool_), *lists)
        top_weight_classes(np.empty((0, 0), np.float32), np.empty(0, np.bool_), *lists[:2])
        append_new(*(np.empty(shape, np.int64) for shape in ((0, 0), 0, (0, 0), 0, 0, (0, 0))))

    def prepare(self, data: TrainingData, size: int) -> None:
        X, rows, labels = sparse(data.X), data.rows, np.ascontiguousarray(data.labels, np.int64)
        check_features(X)  # before a step has loaded and checked the rows
        groups = group_rows(X, rows) if data.groups is None else data.groups
        self._duplicates = labels_of_duplicates(
            groups.equal, rows, labels, self.certain(size), self._weight, ROOM * self.n_own
        )
        if self._rows_counted:
            return
        if len(self.listed) != X.n_features:
            self.listed = np.full((X.n_features, self.per_feature), NONE, np.int32)
            self.counts = np.zeros((X.n_features, self.per_feature), np.float32)
            self.seen = np.zeros(X.n_features)
        for part in X.parts(rows):
            own, at = X.loaded(rows[part])
            count_labels(
                *arrays_of(own), at, labels[part], self.certain(size), self.listed, self.counts, self.seen
            )  # fmt: skip
        self._rows_counted = True

    def end_epoch(self, parameters: Any, n_rows: int, size: int) -> None:
        weight = parameters.weight
        self.since = self.since + n_rows
        shape = weight.shape[1], self.per_feature
        if self.since * size * A_PASS < self.n_classes * shape[0]:  # the scan would take longer than the epoch
            return
        heavy, values = np.full(shape, NONE, np.int32), np.zeros(shape, np.float32)
        if weight.is_cuda:
            self._find_on_device(weight, size, heavy, values)
        elif self.partition is None:
            top_weight_classes(weight.numpy(), self.certain(size), heavy, values)
        else:
            here = np.ascontiguousarray(self.partition.shard.of(self.certain(size)))
            top_weight_classes(weight.numpy(), here, heavy, values)
            heavy, values = of_all_ranks(heavy, values, self.partition)
        some, none = bool(values.any()), np.zeros(1, np.int64)
        self.heavy, self.heavy_weight, self._has_heavy, self.since = heavy, values, some, none  # all or nothing

    def _find_on_device(self, weight: Tensor, size: int, heavy: np.ndarray, heavy_weight: np.ndarray) -> None:
        free = np.flatnonzero(~self.certain(size))
        rows, n = torch.from_numpy(free).to(weight.device), min(self.per_feature, len(free))
        at_once = max(1, WEIGHTS_AT_ONCE // max(1, len(free)))
        for first in range(0, weight.shape[1], at_once):
            part = slice(first, first + at_once)
            values, places = (found.cpu().numpy().T for found in weight[rows, part].topk(n, dim=0))
            heavy[part, :n] = np.where(values > 0, free[places], NONE)
            heavy_weight[part, :n] = np.maximum(values, 0)

    def certain(self, size: int) -> np.ndarray:
        """(K,) whether a class is in the head for |S| = size."""
        if size not in self._certain_of:
            self._certain_of[size] = np.zeros(self.n_classes, np.bool_)
            self._certain_of[size][self.head(size).numpy()] = True
        return self._certain_of[size]

    def draw(self, labels: Tensor, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Sampled:
        raise TypeError(f"{type(self).__name__} draws by the features of the rows: call draw_for with a Minibatch.")

    def draw_for(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        return self._with_own(super().draw_for(minibatch, size, generator=generator), minibatch, size)

    def draw_halves(self, minibatch: Minibatch, size: int, *, generator: torch.Generator) -> Sampled:
        """Candidate classes are in both halves, as the head is."""
        return self._with_own(super().draw_halves(minibatch, size, generator=generator), minibatch, size)

    def own(self, minibatch: Minibatch, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(U, P), (U,): the candidates of these groups, and their numbers; filled with some label."""
        X, labels, rows = sparse(minibatch.X), minibatch.labels.numpy(), minibatch.rows
        if minibatch.groups is not None:
            labels, rows = labels[minibatch.groups.first], rows[minibatch.groups.first]
        if self._duplicates is None or len(self.listed) != X.n_features:
            raise ValueError(
                f"Expected rows of {len(self.listed)} features, as it was prepared for, found rows of {X.n_features}. "
                "Call `prepare` with the training rows first."
            )
        (here, at), same = X.loaded(rows), self._duplicates
        if here is not X:
            same = same._replace(group=same.group[rows])
        lists, csr = (self.listed, self.counts, self.seen), (here.indptr, here.indices, here.values)
        certain = self.certain(size)
        own, found = candidates_of_rows(csr, at, labels, certain, lists, same, self._weight, self.n_own)
        if len(self.heavy) != X.n_features or not self._has_heavy:
            return own, found
        lists = self.heavy, self.heavy_weight, ones(X.n_features)
        more, n_more = candidates_of_rows(
            csr, at, labels, certain, lists, DuplicateLabels.none(), ones(self.n_classes), self.n_own
        )
        both = np.empty((len(own), own.shape[1] + more.shape[1]), np.int64)
        append_new(np.ascontiguousarray(own), found, np.ascontiguousarray(more), n_more, labels, both)
        return both[:, : max(1, int(found.max()))], found

    def _with_own(self, sampled: Sampled, minibatch: Minibatch, size: int) -> Sampled:
        (own, found), classes = self.own(minibatch, size), sampled.classes.numpy()
        twice = np.zeros((len(own), len(classes)), np.bool_)
        mark_shared(own, found, classes, twice, self._last, np.empty(len(classes), np.int32))
        if minibatch.groups is not None:
            own, found, twice = (of_groups[minibatch.groups.group] for of_groups in (own, found, twice))
        assert sampled.mask is not None
        shared, of_own = sampled.mask | torch.from_numpy(twice), torch.from_numpy(own)  # each class counts once
        n_own = torch.from_numpy(found)
        none = torch.arange(own.shape[1]) >= n_own[:, None]

        def padded(log_weight: Tensor) -> Tensor:
            return F.pad(log_weight, (0, own.shape[1]))

        halves = sampled.halves
        if halves is not None:
            first, second = (Half(padded(half.stands), padded(half.given)) for half in halves)
            halves = (first, first) if halves[0] is halves[1] else (first, second)
        mask = torch.cat([shared, none.logical_or_(of_own == minibatch.labels[:, None])], dim=1)
        return sampled._replace(
            own=of_own, n_own=n_own, log_weight=padded(sampled.log_weight), halves=halves, mask=mask,
            label_mask=mask if sampled.hides_labels_only else None,
        )  # fmt: skip


def of_all_ranks(heavy: np.ndarray, values: np.ndarray, partition: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Lists (D, P) of the largest weights, from the lists of each rank; ties go to the lower class, as in one
    process."""
    classes = np.where(heavy == NONE, NONE, partition.shard.classes(heavy.astype(np.int64)))
    of_ranks = [
        np.concatenate(list(partition.ranks.gather(torch.from_numpy(each), "the largest weights").numpy()), axis=1)
        for each in (classes, values)
    ]
    order = np.lexsort((of_ranks[0], -of_ranks[1]), axis=1)[:, : heavy.shape[1]]
    classes, values = (np.take_along_axis(each, order, axis=1) for each in of_ranks)
    return classes.astype(heavy.dtype), values


@functools.lru_cache(maxsize=4)
def ones(n: int) -> np.ndarray:
    """Cached, so that the time of a step is independent of features and classes."""
    return np.ones(n)


def sparse(X: Any) -> SparseRows:
    """The rows on the host, of which a device has a copy."""
    rows = getattr(X, "source", X)
    if not isinstance(rows, SparseRows):
        raise ValueError(
            f"class_sampling={FeatureCandidates.name!r} looks at which features a row has, and expects sparse rows, "
            f"but X is a dense array, in which a row has them all. Use {HeadAndTail.name!r}, or pass a CSR matrix."
        )
    return rows
