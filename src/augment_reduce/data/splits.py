"""What `load_dataset` returns: training and test examples, their classes, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.rows import Features, MultiLabelRows


@dataclass(frozen=True)
class Split:
    """Training or test examples; unpacks as `X, y = split`.

    Example i is row i of `features`, or row `rows[i]` after a reduction. `original` keeps the rows with their label
    sets, for precision at k.
    """

    features: Features
    y: npt.NDArray[np.int64]
    rows: npt.NDArray[np.intp] | None = None
    original: MultiLabelRows | None = None

    @cached_property
    def X(self) -> Features:
        return self.features if self.rows is None else self.features[self.rows]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.X, self.y))

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A named dataset, its labels numbered 0..K-1.

    `class_names[k]` names class k; with label sets, `class_ids[k]` is its column in `original.labels`. `probabilities`
    are the true ones of synthetic data (of the classes that occur). `notes` say where the data came from.
    """

    name: str
    train: Split
    test: Split | None
    class_names: Sequence[str]
    validation: Split | None = None
    feature_names: Sequence[str] | None = None
    class_ids: npt.NDArray[np.int64] | None = None
    probabilities: npt.NDArray[np.float64] | None = None
    notes: tuple[str, ...] = ()

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def n_features(self) -> int:
        return int(self.train.features.shape[1])

    def relevant(self, split: Split) -> sparse.csr_matrix:
        """(N, K) boolean: the true classes of each row of `split.original`."""
        if split.original is None or self.class_ids is None:
            raise ValueError(f"Expected a dataset with sets of labels, but {self.name!r} has one label a row: use y.")
        return split.original.labels[:, self.class_ids].tocsr()

    def statistics(self) -> dict[str, int]:
        """The columns of the paper's table 1: training rows, test rows, covariates, classes."""
        n_test = 0 if self.test is None else len(self.test)
        return {
            "n_train": len(self.train), "n_test": n_test, "n_features": self.n_features, "n_classes": self.n_classes
        }  # fmt: skip
