"""Feature scaling: makes a fit independent of the units of X, and learning rates and priors comparable.

A fit is trained on (x - centre) / scale. Multiplying a column by a constant, or adding one to a dense column, does not
change that; the coefficients are converted back to the units of X (`to_original`).

If a column has one value in at least half of the rows (usually zero: sparse rows, counts, indicators, pixels), that
value is its centre, so that it stays sparse, and its scale is the root mean square distance of the other values from
it. Any other column is standardised by its mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.rows import DenseRows, MappedDenseRows, MappedRows, Rows, SparseRows

ROWS_AT_ONCE = 1 << 20  # numbers in a block of dense rows
ROWS_FOR_MEDIANS = 10_000
SAME_UNIT_FACTOR = 10.0  # scales within this factor of the median count as one unit
SAME_UNIT_SHARE = 0.9  # share of the active values that has to be in one unit for a common scale


@dataclass(frozen=True)
class FeatureScaling:
    """The map x -> (x - centre) / scale; the centre is zero for sparse rows."""

    centre: np.ndarray  # (D,) float64
    scale: np.ndarray  # (D,) float64, positive
    activity: np.ndarray  # (D,) share of the rows whose value is not the centre

    @classmethod
    def of(
        cls, X: Rows, rows: np.ndarray, weight: np.ndarray | None = None, *, centred: bool = True, pooled: bool = True
    ) -> FeatureScaling:  # fmt: skip
        """The scaling of these rows; a row of weight 2 counts as two rows. `centred=False`: all centres are zero.
        `pooled=False`: every column has its own scale."""
        if weight is not None:
            of_row = weight[rows] / weight[rows].max()
        else:
            of_row = np.broadcast_to(1.0, len(rows)) if X.mapped else np.ones(len(rows))
        peak, total = X.largest() or 1.0, of_row.sum()
        if isinstance(X, SparseRows):
            squares, active = _moments_of_sparse(X, rows, of_row, peak)
            return cls(np.zeros(X.n_features), peak * _units(squares, active, pooled), active / total)
        centre, mostly = np.zeros(X.n_features), np.ones(X.n_features, dtype=bool)
        if centred:
            centre, mostly = _centres(X.values, rows, of_row, peak)
        squares, active = _moments_of_dense(X.values, rows, of_row, centre, peak)
        return cls(centre, peak * _units(squares, np.where(mostly, active, total), pooled), active / total)

    @classmethod
    def identity(cls, n_features: int) -> FeatureScaling:
        return cls(np.zeros(n_features), np.ones(n_features), np.ones(n_features))

    @property
    def is_identity(self) -> bool:
        return bool((self.scale == 1.0).all() and not self.centre.any())

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The arrays that a model file stores."""
        return {prefix + name: torch.from_numpy(array) for name, array in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FeatureScaling:
        return cls(**{name: tensor.numpy() for name, tensor in tensors.items()})

    def differs_from(self, other: FeatureScaling) -> bool:
        return bool(np.abs(self.scale / other.scale - 1.0).max(initial=0.0) > 1e-9)

    def in_one_unit(self) -> FeatureScaling:
        """The same with the median scale for all columns."""
        return FeatureScaling(self.centre, np.full_like(self.scale, np.median(self.scale)), self.activity)

    def apply(self, X: Rows, dtype: np.dtype) -> Rows:
        """Scaled X; X itself if nothing changes."""
        if self.is_identity and X.dtype == dtype:
            return X
        if isinstance(X, MappedRows):  # divided whenever they are loaded
            return replace(X, scale=self.scale)
        if isinstance(X, MappedDenseRows):
            return replace(X, centre=self.centre, scale=self.scale)
        if isinstance(X, SparseRows):
            return SparseRows(X.indptr, X.indices, self.of_entries(X.indices, X.values, dtype), X.n_features)
        out = np.empty(X.values.shape, dtype)
        for part in _blocks(len(out), out.shape[1]):
            out[part] = self.of_block(X.values[part])
        return DenseRows(out)

    def of_block(self, values: np.ndarray) -> np.ndarray:
        """Scaled dense rows; differences are taken in float64, so that a column far from zero keeps its digits."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (values.astype(np.float64) - self.centre) / self.scale

    def of_entries(self, indices: np.ndarray, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        out = np.empty(len(values), dtype)
        for first in range(0, len(values), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            with np.errstate(over="ignore"):
                out[part] = values[part] / self.scale[np.minimum(indices[part], len(self.scale) - 1)]
        return out

    def to_original(self, weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients and intercepts for X, in float64, from weights and biases of the scaled features."""
        with np.errstate(over="ignore"):
            coef = weight / self.scale
        return coef, bias - np.einsum("kd,d->k", coef, self.centre)

    def to_scaled(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights and biases of the scaled features from coefficients and intercepts for X."""
        return coef * self.scale, intercept + np.einsum("kd,d->k", coef, self.centre, dtype=np.float64)


def _blocks(n: int, width: int) -> list[slice]:
    step = max(1, ROWS_AT_ONCE // max(1, width))
    return [slice(first, first + step) for first in range(0, n, step)]


def _moments_of_sparse(
    X: SparseRows, rows: np.ndarray, of_row: np.ndarray, peak: float
) -> tuple[np.ndarray, np.ndarray]:
    """(sum of squares of each column, weight of its non-zeros). Values are divided by the peak before they are squared,
    to avoid overflow."""
    squares, active = np.zeros(X.n_features), np.zeros(X.n_features)
    for index, value, weight in _parts_of_sparse(X, rows, of_row):
        value = value.astype(np.float64) / peak
        weight = weight * (value != 0)
        squares += np.bincount(index, weight * value * value, X.n_features)[: X.n_features]
        active += np.bincount(index, weight, X.n_features)[: X.n_features]
    return squares, active


def _parts_of_sparse(
    X: SparseRows, rows: np.ndarray, of_row: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Features, values and their rows' weights, by blocks of rows. Rows in memory are processed in order, with weight
    zero for those that are not selected, to avoid a copy."""
    if isinstance(X, MappedRows):
        for part in X.parts(rows):
            own, _ = X.loaded(rows[part])
            yield own.indices, own.values, np.repeat(of_row[part], np.diff(own.indptr))
        return
    share = np.zeros(X.n_rows)
    share[rows] = of_row
    for part in _blocks(X.n_rows, max(1, X.n_nonzero // max(1, X.n_rows))):
        ends = X.indptr[part.start : min(part.stop, X.n_rows) + 1]
        entries = slice(int(ends[0]), int(ends[-1]))
        yield X.indices[entries], X.values[entries], np.repeat(share[part], np.diff(ends))


def _centres(values: np.ndarray, rows: np.ndarray, of_row: np.ndarray, peak: float) -> tuple[np.ndarray, np.ndarray]:
    """(centre, whether it is the value of at least half of the rows) of each column."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), ROWS_FOR_MEDIANS)).astype(np.int64)
    total, D = of_row.sum(), values.shape[1]
    usual, mean, at_usual = np.empty(D), np.zeros(D), np.zeros(D)
    for columns in _blocks(D, len(some)):
        usual[columns] = _medians(values[rows[some], columns].astype(np.float64), of_row[some])
    for part in _blocks(len(rows), D):
        block = values[rows[part]].astype(np.float64)
        mean += np.einsum("n,nd->d", of_row[part] / total, block / peak - usual / peak)
        at_usual += np.einsum("n,nd->d", of_row[part], block == usual)
    mostly = at_usual >= 0.5 * total
    return np.where(mostly, usual, usual + peak * mean), mostly


def _medians(values: np.ndarray, of_row: np.ndarray) -> np.ndarray:
    """Lower weighted median of each column."""
    order = np.argsort(values, axis=0, kind="stable")
    below = np.cumsum(of_row[order], axis=0)
    at = (below < 0.5 * below[-1]).sum(axis=0)
    return np.take_along_axis(values, np.take_along_axis(order, at[None], 0), 0)[0]


def _moments_of_dense(
    values: np.ndarray, rows: np.ndarray, of_row: np.ndarray, centre: np.ndarray, peak: float
) -> tuple[np.ndarray, np.ndarray]:
    """(sum of squared distances from the centre, weight of the rows that are not there) of each column."""
    squares, active = np.zeros(len(centre)), np.zeros(len(centre))
    for part in _blocks(len(rows), len(centre)):
        away = values[rows[part]].astype(np.float64) / peak - centre / peak
        squares += np.einsum("n,nd->d", of_row[part], away * away)
        active += np.einsum("n,nd->d", of_row[part], away != 0)
    return squares, active


def _units(squares: np.ndarray, active: np.ndarray, pooled: bool) -> np.ndarray:
    """Root mean squares of the active values: one for all columns if nearly all are of similar size, else one each.

    In text, counts and images the size of a column is informative (inverse document frequencies, pixels at the edge)
    and should be kept; columns in different units (prices beside indicators) should be scaled separately.
    """
    known = squares > 0
    own = np.ones(len(squares))
    own[known] = np.sqrt(squares[known] / active[known])
    if not pooled or not known.any():
        return own
    usual = _medians(own[known][:, None], active[known])[0]
    near = known & (np.abs(np.log(own / usual)) <= np.log(SAME_UNIT_FACTOR))
    if active[near].sum() < SAME_UNIT_SHARE * active[known].sum():
        return own
    common = np.sqrt(squares[near].sum() / active[near].sum())
    exact = own[near]  # if all values have the same size, divide by exactly that: indicators stay ones
    unit = exact[0] if np.ptp(exact) <= 1e-12 * exact[0] else common
    return np.where(near | ~known, unit, own)
