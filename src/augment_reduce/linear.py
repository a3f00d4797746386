"""Scores of the fitted linear model, psi = coef . x + intercept, for prediction: finite whatever the rows hold.

They come from `coef_` and `intercept_` themselves, so that whoever writes to these changes what is predicted. With two
classes these are one row, the difference of the two, and the first class has the score zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from .kernels.rows import as_rows
from .scores import kernels_for

if TYPE_CHECKING:
    from .fitting import Fitted

NUMBERS_AT_ONCE = 1 << 22  # of weights that are copied to float64
HIGHEST = 1000  # the power of two of the largest score where even float64 has no room for the true one


class LinearScores:
    """scores_of(start, stop) of the rows X, as `predict` wants them; in the dtype of the coefficients, as a rule."""

    def __init__(self, X: Any, coef: Any, intercept: np.ndarray) -> None:
        self.X, self.coef, self.intercept = X, coef, intercept
        self.n_rows, self.binary = X.shape[0], coef.shape[0] == 1
        self.dtype = torch.float32 if intercept.dtype == np.float32 else torch.float64
        if sp.issparse(coef):
            self.transposed = coef.T.tocsr()
        else:
            self.rows, self.kernels = as_rows(X), kernels_for("cpu")
            self.weight, self.bias = torch.from_numpy(coef), torch.from_numpy(intercept)
            self.every = torch.arange(len(intercept))

    def __call__(self, start: int, stop: int) -> Tensor:
        psi = self._product(start, stop)
        overflowed = (~psi.isfinite().all(1)).nonzero()[:, 0].numpy()
        if len(overflowed):
            psi = psi.double()
            psi[overflowed] = torch.from_numpy(self._of_large(start + overflowed))
        return torch.cat([torch.zeros_like(psi), psi], dim=1) if self.binary else psi

    def _product(self, start: int, stop: int) -> Tensor:
        with np.errstate(over="ignore", invalid="ignore"):  # which is looked for afterwards
            if not sp.issparse(self.coef):
                rows = np.arange(start, stop)
                return self.kernels.shared_scores(self.rows, rows, self.every, self.weight, self.bias)
            product = self.X[start:stop] @ self.transposed
            scores = np.asarray(product.toarray() if sp.issparse(product) else product) + self.intercept
        return torch.from_numpy(scores).to(self.dtype)

    def _of_large(self, rows: np.ndarray) -> np.ndarray:
        """Scores of rows for which the sums overflow: in float64, of features and weights scaled by powers of two.

        Where the true scores are too large for float64 all are scaled alike, to 2^HIGHEST at most: they keep their
        order, equal ones stay equal, and others are as far apart as any probability can tell.
        """
        X = self.X[rows]
        X = np.asarray(X.toarray() if sp.issparse(X) else X, dtype=np.float64)
        used = np.flatnonzero(X.any(axis=0))
        _, of_row = np.frexp(np.abs(X).max(axis=1))
        x, bias = np.ldexp(X[:, used], -of_row[:, None]), self.intercept.astype(np.float64)
        most = max([float(np.abs(bias).max()), *(float(np.abs(w).max(initial=0.0)) for w in self._weights(used))])
        if not np.isfinite(most):  # weights that have diverged, which the caller reports
            return np.full((len(rows), len(bias)), np.nan)
        _, of_weights = np.frexp(most)
        scaled = np.concatenate([x @ np.ldexp(w, -of_weights).T for w in self._weights(used)], axis=1)
        scaled += np.ldexp(np.ldexp(bias, -of_weights)[None, :], -of_row[:, None])
        _, largest = np.frexp(np.abs(scaled).max(axis=1))
        power = np.minimum(of_row + of_weights, HIGHEST - largest)
        return np.ldexp(scaled, power[:, None])

    def _weights(self, features: np.ndarray) -> Iterator[np.ndarray]:
        """The columns of these features in float64, some classes at a time."""
        step = max(1, NUMBERS_AT_ONCE // max(1, len(features)))
        for first in range(0, len(self.intercept), step):
            block = self.coef[first : first + step][:, features]
            yield np.asarray(block.toarray() if sp.issparse(block) else block, dtype=np.float64)


def published(fitted: Fitted) -> tuple[Any, np.ndarray]:
    """coef_ and intercept_ as scikit-learn has them; with more than two classes the weights themselves, not a copy."""
    weight = fitted.parameters.weight.numpy() if fitted.sparse_weight is None else fitted.sparse_weight
    bias = fitted.parameters.bias.numpy()
    return (weight[1:] - weight[:1], bias[1:] - bias[:1]) if len(bias) == 2 else (weight, bias)


def checked(fitted: Fitted, coef: Any, intercept: Any) -> tuple[Any, np.ndarray]:
    """coef_ and intercept_ as somebody may have written or replaced them, in the model's dtype."""
    expected, intercept_expected = published(fitted)
    dtype = intercept_expected.dtype
    if sp.issparse(coef):
        coef = coef if coef.format == "csr" and coef.dtype == dtype else sp.csr_matrix(coef, dtype=dtype)
    else:
        coef = np.require(coef, dtype, ["C", "W", "A"])
    intercept = np.require(intercept, dtype, ["C", "W", "A"])
    for name, found, shape in (
        ("coef_", coef, expected.shape), ("intercept_", intercept, intercept_expected.shape)
    ):  # fmt: skip
        if found.shape != shape:
            raise ValueError(
                f"Expected {name} of shape {shape}, as it was fitted, found {found.shape}. Assign an array of that "
                "shape, or fit again."
            )
    return coef, intercept


def take_up(fitted: Fitted, coef: Any, intercept: Any) -> None:
    """Let the model go on from coef_ and intercept_ where somebody has changed them."""
    coef, intercept = checked(fitted, coef, intercept)
    coef_now, intercept_now = published(fitted)
    if not same(intercept, intercept_now):
        fitted.parameters.bias.copy_(torch.from_numpy(of_all_classes(intercept)))
    if not same(coef, coef_now):
        weight = of_all_classes(coef)
        if fitted.sparse_weight is not None:
            fitted.sparse_weight = sp.csr_matrix(weight)
        else:
            fitted.parameters.weight.copy_(torch.from_numpy(weight.toarray() if sp.issparse(weight) else weight))


def of_all_classes(numbers: Any) -> Any:
    """The rows of both of two classes, whose difference is the one given; more are as they are."""
    if numbers.shape[0] != 1:
        return numbers
    half = numbers / numbers.dtype.type(2)
    return sp.vstack([-half, half]).tocsr() if sp.issparse(half) else np.concatenate([-half, half])


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if sp.issparse(a) or sp.issparse(b):
        return sp.issparse(a) and sp.issparse(b) and (a != b).nnz == 0
    return a.__array_interface__ == b.__array_interface__ or np.array_equal(a, b)
