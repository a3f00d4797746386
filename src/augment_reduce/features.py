"""Units of the features: what the rules for rates and priors need to know of X, and what makes a fit equivariant.

A fit sees (x - centre) / scale in place of x. Multiplying a column by a constant, or moving a dense one, changes
nothing that the fit sees; what it learns is returned in the units of X (`outer`).

A column that has one value in at least half of the rows (zero, as a rule: sparse rows, counts, indicators, pixels) has
that value as its centre, so that it stays sparse, and as its scale the root mean square of the other values' distances
from it. Any other column has its mean and its standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .kernels.rows import DenseRows, Rows, SparseRows

ROWS_AT_ONCE = 1 << 20  # numbers of a block of dense rows
ROWS_FOR_MEDIANS = 10_000
ALIKE = 10.0  # factor between scales that are taken to be in the same unit
MOSTLY = 0.9  # share of the values (of columns) that has to be alike for one unit


@dataclass(frozen=True)
class FeatureScaling:
    """x -> (x - centre) / scale; the centre is zero for sparse rows."""

    centre: np.ndarray  # (D,) float64
    scale: np.ndarray  # (D,) float64, positive
    activity: np.ndarray  # (D,) share of the rows that are not at the centre

    @classmethod
    def of(
        cls, X: Rows, rows: np.ndarray, weight: np.ndarray | None = None, *, centred: bool = True, pooled: bool = True
    ) -> FeatureScaling:  # fmt: skip
        """Of these rows; a row of weight 2 is two rows. `centred=False` leaves zero where it is, `pooled=False` gives
        every column a scale of its own."""
        of_row = np.ones(len(rows)) if weight is None else weight[rows] / weight[rows].max()
        peak, total = _peak(X.values), of_row.sum()
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
        """For a model file."""
        return {prefix + name: torch.from_numpy(array) for name, array in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FeatureScaling:
        return cls(**{name: tensor.numpy() for name, tensor in tensors.items()})

    def differs_from(self, other: FeatureScaling) -> bool:
        return bool(np.abs(self.scale / other.scale - 1.0).max(initial=0.0) > 1e-9)

    def in_one_unit(self) -> FeatureScaling:
        """The same with one scale, the median, for all columns."""
        return FeatureScaling(self.centre, np.full_like(self.scale, np.median(self.scale)), self.activity)

    def apply(self, X: Rows, dtype: np.dtype) -> Rows:
        """X as the fit sees it: a copy of the values, or X where nothing changes."""
        if self.is_identity and X.values.dtype == dtype:
            return X
        if isinstance(X, SparseRows):
            return SparseRows(X.indptr, X.indices, self.of_entries(X.indices, X.values, dtype), X.n_features)
        out = np.empty(X.values.shape, dtype)
        for part in _blocks(len(out), out.shape[1]):
            out[part] = self.of_block(X.values[part])
        return DenseRows(out)

    def of_block(self, values: np.ndarray) -> np.ndarray:
        """Dense rows; differences in float64, so that a column far from zero loses no digits."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (values.astype(np.float64) - self.centre) / self.scale

    def of_entries(self, indices: np.ndarray, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        out = np.empty(len(values), dtype)
        for first in range(0, len(values), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            with np.errstate(over="ignore"):
                out[part] = values[part] / self.scale[np.minimum(indices[part], len(self.scale) - 1)]
        return out

    def outer(self, weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights and biases of the fit as coefficients of X, in float64."""
        with np.errstate(over="ignore"):
            coef = weight / self.scale
        return coef, bias - np.einsum("kd,d->k", coef, self.centre)

    def inner(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The other way round."""
        return coef * self.scale, intercept + np.einsum("kd,d->k", coef, self.centre, dtype=np.float64)


def _blocks(n: int, width: int) -> list[slice]:
    step = max(1, ROWS_AT_ONCE // max(1, width))
    return [slice(first, first + step) for first in range(0, n, step)]


def _peak(values: np.ndarray) -> float:
    """The largest absolute value: squares are of values divided by it, or they might overflow."""
    peak = float(max(values.max(initial=0.0), -values.min(initial=0.0)))
    return peak if peak > 0 else 1.0


def _moments_of_sparse(
    X: SparseRows, rows: np.ndarray, of_row: np.ndarray, peak: float
) -> tuple[np.ndarray, np.ndarray]:
    """(sum of squares of each column, weight of its non-zeros)."""
    share = np.zeros(X.n_rows)
    share[rows] = of_row
    squares, active = np.zeros(X.n_features), np.zeros(X.n_features)
    for part in _blocks(X.n_rows, max(1, X.n_nonzero // max(1, X.n_rows))):
        ends = X.indptr[part.start : min(part.stop, X.n_rows) + 1]
        entries = slice(int(ends[0]), int(ends[-1]))
        index, value = X.indices[entries], X.values[entries].astype(np.float64) / peak
        weight = np.repeat(share[part], np.diff(ends)) * (value != 0)
        squares += np.bincount(index, weight * value * value, X.n_features)[: X.n_features]
        active += np.bincount(index, weight, X.n_features)[: X.n_features]
    return squares, active


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
    """Root mean squares of the active values: one for all columns where nearly all are alike, else each its own.

    In text, counts and images how large a column's values are says how much it tells (inverse document frequencies,
    pixels at the edge); columns whose scale is another (prices beside indicators) have their own.
    """
    known = squares > 0
    own = np.ones(len(squares))
    own[known] = np.sqrt(squares[known] / active[known])
    if not pooled or not known.any():
        return own
    usual = _medians(own[known][:, None], active[known])[0]
    near = known & (np.abs(np.log(own / usual)) <= np.log(ALIKE))
    if active[near].sum() < MOSTLY * active[known].sum():
        return own
    common = np.sqrt(squares[near].sum() / active[near].sum())
    exact = own[near]  # where all values have one size that is the unit, to the last digit: indicators stay ones
    unit = exact[0] if np.ptp(exact) <= 1e-12 * exact[0] else common
    return np.where(near | ~known, unit, own)
