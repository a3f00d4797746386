"""Random data in the shape of the paper's datasets, for timing when the data are not available.

Only the numbers of rows, covariates, classes and non-zeros per row are those of the real data; use them for time and
memory only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.splits import Dataset, Split

ROW_BLOCK = 1 << 14


class Shape(NamedTuple):
    """Table 1 of the paper, and the mean number of non-zeros in a row (`dense`: stored as an array)."""

    n_train: int
    n_test: int
    n_features: int
    n_classes: int
    nonzeros: int
    dense: bool = False


PAPER_SHAPES = {
    "mnist": Shape(60_000, 10_000, 784, 10, 150, dense=True),
    "bibtex": Shape(4_880, 2_413, 1_836, 148, 68),
    "omniglot": Shape(25_968, 6_492, 784, 1_623, 189, dense=True),
    "eurlex-4k": Shape(15_539, 3_809, 5_000, 896, 236),
    "amazoncat-13k": Shape(1_186_239, 306_782, 203_882, 2_919, 71),
}


def random_like(name: str, seed: int = 0, n_rows: int | None = None) -> Dataset:
    """Training rows in the shape of a paper dataset (all of them, or `n_rows`); no test rows.

    The feature of rank r has frequency about 1 / r (Zipf), without repeats in a row; ranks are assigned to columns at
    random; values are uniform on (0, 1]. Classes follow the same law, and each occurs if there are enough rows.
    """
    if name not in PAPER_SHAPES:
        raise ValueError(f"Expected a name among {', '.join(PAPER_SHAPES)}, but found {name!r}.")
    shape = PAPER_SHAPES[name]
    n_rows = shape.n_train if n_rows is None else n_rows
    if n_rows < 1:
        raise ValueError(f"Expected n_rows of at least 1, but found {n_rows}.")
    rng = np.random.default_rng(seed)
    X = zipf_rows(rng, n_rows, shape.n_features, shape.nonzeros)
    y = zipf_classes(rng, n_rows, shape.n_classes)
    names = [str(k) for k in range(shape.n_classes)]
    note = f"random data (seed {seed}) in the shape of {name}: for timing only"
    return Dataset(f"{name}-shape", Split(X.toarray() if shape.dense else X, y), None, names, notes=(note,))


def log_uniform_ranks(u: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.int32]:
    """Ranks 0..size-1 from uniform u: P(rank r) = log((r + 2) / (r + 1)) / log(size + 1), close to 1 / r."""
    ranks = np.exp(u * np.float32(np.log(size + 1))).astype(np.int32) - 1
    return np.minimum(ranks, size - 1)


def zipf_rows(rng: np.random.Generator, n_rows: int, n_features: int, nonzeros: int) -> sparse.csr_matrix:
    """Rows with exactly `nonzeros` distinct features each.

    One draw from each of `nonzeros` equal strata gives ascending ranks; shifting every rank beyond its predecessor
    makes them distinct in one pass, where rejection would redraw frequent features many times.
    """
    column_of_rank = rng.permutation(n_features).astype(np.int32)
    place = np.arange(nonzeros, dtype=np.int32)
    indices = np.empty((n_rows, nonzeros), np.int32)
    for start in range(0, n_rows, ROW_BLOCK):
        block = indices[start : start + ROW_BLOCK]
        u = (place + rng.random(block.shape, dtype=np.float32)) / np.float32(nonzeros)
        ranks = np.maximum.accumulate(log_uniform_ranks(u, n_features) - place, axis=1) + place
        ranks = np.minimum(ranks, n_features - nonzeros + place)
        block[:] = np.sort(column_of_rank[ranks], axis=1)
    values = rng.random(n_rows * nonzeros, dtype=np.float32)
    np.subtract(np.float32(1), values, out=values)  # (0, 1]: no stored zeros
    total = n_rows * nonzeros
    indptr = np.arange(0, total + 1, nonzeros, dtype=np.int32 if total < 2**31 else np.int64)
    return sparse.csr_matrix((values, indices.ravel(), indptr), shape=(n_rows, n_features))


def zipf_classes(rng: np.random.Generator, n_rows: int, n_classes: int) -> npt.NDArray[np.int64]:
    """Labels 0..K-1, class k of random rank; the first min(n_rows, K) of them all differ, then all are shuffled."""
    class_of_rank = rng.permutation(n_classes)
    ranks = log_uniform_ranks(rng.random(n_rows, dtype=np.float32), n_classes)
    ranks[:n_classes] = np.arange(n_classes)[:n_rows]
    return class_of_rank[rng.permutation(ranks)].astype(np.int64)
