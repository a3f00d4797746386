"""Scores of the fitted linear model, psi = coef . x + intercept, for prediction: finite for any finite rows.

They are computed from the weights of training, for scaled features (`features`). `coef_` and `intercept_` are derived
from these at the first access, centred over the classes; modified values are written back before anything is predicted,
saved or trained. With two classes they are one row, the difference of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..config.features import FeatureScaling
from ..kernels.rows import DenseRows, MappedDenseRows, MappedRows, SparseRows, as_rows
from ..model import predict
from ..model.columns_over_ranks import ColumnsOverRanks
from ..model.scores import kernels_for
from ..sharding import Partition

if TYPE_CHECKING:
    from .fitted import Fitted

LARGEST = 1e300  # replaces scaled features that overflow
NUMBERS_AT_ONCE = 1 << 22  # weights copied to float64 at a time
HIGHEST = 1000  # the exponent of the largest score if the true one overflows float64


class LinearScores:
    """scores_of(start, stop) of the rows X, for `predict`; usually in the dtype of the weights.

    psi = factor * (weight . (x - centre) / scale + bias), with weight (K, D) a tensor or a CSR matrix. With sharded
    classes a call gathers the scores of all classes, and `here` returns those of this rank, for `columns`. Both are
    collective: all ranks call for the same rows, in the same order.
    """

    def __init__(
        self, X: Any, weight: Any, bias: Tensor, scaling: FeatureScaling | None = None, factor: float = 1.0,
        partition: Partition | None = None,
    ) -> None:  # fmt: skip
        self.n_rows, self.dtype, self.partition = X.shape[0], bias.dtype, partition
        self.columns = predict.Columns(len(bias)) if partition is None else ColumnsOverRanks(partition)
        self.n_classes = self.columns.n_classes
        self.weight, self.bias, self.scaling, self.factor = weight, bias, scaling, factor
        self.rows, self.kernels = as_rows(X), kernels_for("cpu")
        self.transposed = weight.T.tocsr() if sp.issparse(weight) else None
        self.every = torch.arange(len(bias))
        if scaling is not None and isinstance(self.rows, SparseRows):
            self.rows = scaling.apply(self.rows, self.rows.dtype)
            if scaling.centre.any():  # sparse rows stay sparse: the contribution of their zeros is added to the biases
                self.bias = bias.double() - self._of_centres(scaling)

    @classmethod
    def of(cls, X: Any, fitted: Fitted) -> LinearScores:
        weight = fitted.parameters.weight if fitted.sparse_weight is None else fitted.sparse_weight
        return cls(X, weight, fitted.parameters.bias, fitted.scaling, fitted.factor, fitted.partition)

    def __call__(self, start: int, stop: int) -> Tensor:
        psi = self.here(start, stop)
        return psi if self.partition is None else self.partition.whole_columns(psi)

    def here(self, start: int, stop: int) -> Tensor:
        if isinstance(self.rows, MappedRows | MappedDenseRows):  # as many as fit in memory
            parts = self.rows.parts(np.arange(start, stop))
            psi = torch.cat([self._product(start + part.start, start + part.stop) for part in parts])
        else:
            psi = self._product(start, stop)
        if self.factor != 1.0:
            psi = psi * self.factor
        finite = psi.isfinite().all(1)
        if self._on_any(not finite.all()):
            overflowed = self._largest(~finite.numpy()).nonzero()[0]
            psi = psi.double()
            psi[overflowed] = torch.from_numpy(self._of_large(start + overflowed))
        return psi

    def _on_any(self, here: bool) -> bool:
        return here if self.partition is None else self.partition.any(here, "whether scores are finite")

    def _largest(self, numbers: np.ndarray) -> np.ndarray:
        """The elementwise maximum over ranks."""
        if self.partition is None:
            return numbers
        found = self.partition.ranks.max_(torch.from_numpy(numbers.astype(np.float64)), "the largest scores")
        return found.numpy().astype(numbers.dtype)

    def _of_centres(self, scaling: FeatureScaling) -> Tensor:
        used = np.flatnonzero(scaling.centre)
        with np.errstate(over="ignore"):
            centre = scaling.centre[used] / scaling.scale[used]
        return torch.from_numpy(np.concatenate([weights @ centre for weights in self._weights(used)]))

    def _block(self, rows: np.ndarray) -> np.ndarray:
        """These rows scaled, dense, float64."""
        if isinstance(self.rows, SparseRows):
            return self.rows.dense(rows, torch.float64).numpy()
        values = self.rows.values[rows]
        return values.astype(np.float64) if self.scaling is None else self.scaling.of_block(values)

    def _product(self, start: int, stop: int) -> Tensor:
        rows, X = np.arange(start, stop), self.rows
        with np.errstate(over="ignore", invalid="ignore"):  # checked afterwards
            if self.scaling is not None and isinstance(X, DenseRows):
                X, rows = DenseRows(self._block(rows).astype(X.values.dtype)), np.arange(stop - start)
            if self.transposed is None:
                if self.bias.dtype == self.weight.dtype:
                    return self.kernels.shared_scores(X, rows, self.every, self.weight, self.bias)
                without = torch.zeros_like(self.bias, dtype=self.dtype)
                psi = self.kernels.shared_scores(X, rows, self.every, self.weight, without)
                return (psi.double() + self.bias).to(self.dtype)
            if isinstance(X, SparseRows):
                X, rows = X.loaded(rows)
                block: Any = sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features), copy=False)
                first = int(rows[0]) if len(rows) else 0
                product = block[first : first + len(rows)] @ self.transposed
            else:
                product = X.values[rows] @ self.transposed
            scores = np.asarray(product.toarray() if sp.issparse(product) else product) + self.bias.numpy()
        return torch.from_numpy(scores).to(self.dtype)

    def _of_large(self, rows: np.ndarray) -> np.ndarray:
        """Scores of rows for which the sums overflow: in float64, of features and weights scaled by powers of two.

        If the true scores overflow float64, all are multiplied by one factor, to 2^HIGHEST at most: order and ties are
        kept, and differences are large enough for the same probabilities.
        """
        with np.errstate(over="ignore"):
            X = np.nan_to_num(self._block(rows), posinf=LARGEST, neginf=-LARGEST)
        used = np.flatnonzero(X.any(axis=0))
        _, of_row = np.frexp(np.abs(X).max(axis=1))
        x, bias = np.ldexp(X[:, used], -of_row[:, None]), self.bias.numpy().astype(np.float64)
        most = max([float(np.abs(bias).max()), *(float(np.abs(w).max(initial=0.0)) for w in self._weights(used))])
        most = float(self._largest(np.array([np.nan_to_num(most, nan=np.inf)]))[0])
        if not np.isfinite(most):  # weights that have diverged, which the caller reports
            return np.full((len(rows), len(bias)), np.nan)
        _, of_weights = np.frexp(most)
        scaled = np.concatenate([x @ np.ldexp(w, -of_weights).T for w in self._weights(used)], axis=1)
        scaled += np.ldexp(np.ldexp(bias, -of_weights)[None, :], -of_row[:, None])
        _, largest = np.frexp(self._largest(np.abs(scaled).max(axis=1)))
        power = np.minimum(of_row + of_weights, HIGHEST - largest)
        return np.ldexp(scaled * self.factor, power[:, None])

    def _weights(self, features: np.ndarray) -> Iterator[np.ndarray]:
        """The columns of these features in float64, by blocks of classes."""
        step = max(1, NUMBERS_AT_ONCE // max(1, len(features)))
        for first in range(0, len(self.every), step):
            block = self.weight[first : first + step][:, features]
            yield np.asarray(block.toarray() if sp.issparse(block) else block, dtype=np.float64)


def published(fitted: Fitted) -> tuple[Any, np.ndarray]:
    """coef_ and intercept_ in scikit-learn's format, in the units of X; with a preset the weights themselves, not a
    copy."""
    weight = fitted.parameters.weight.numpy() if fitted.sparse_weight is None else fitted.sparse_weight
    bias = fitted.parameters.bias.numpy()
    if fitted.scaling is not None or fitted.factor != 1.0:
        weight, bias = _of_own_units(fitted, weight, bias)
    if is_one_row(fitted):
        return weight[1:] - weight[:1], bias[1:] - bias[:1]
    if is_centred(fitted):
        if fitted.class_mean is None:
            of_weight, of_bias = weight.mean(0, dtype=np.float64), bias.mean()
        else:
            of_weight, of_bias = own_units_of_mean(fitted, *fitted.class_mean)
        weight, bias = weight - of_weight.astype(weight.dtype), bias - np.asarray(of_bias, bias.dtype)
    return weight, bias


def check_same_ranks(fitted: Fitted, partition: Partition | None) -> None:
    """ValueError unless a model continues on the ranks that it was trained on."""
    before = fitted.partition
    was, found = ("one process" if each is None else repr(each.ranks) for each in (before, partition))
    if was != found or (before is not None and partition is not None and before.shard != partition.shard):
        raise ValueError(
            f"Expected to go on with the process group of the fit before, but that was {was} and this is {found}. "
            "Save the model and load it with the new process_group, or fit anew."
        )


def is_one_row(fitted: Fitted) -> bool:
    """Whether two classes are published as their difference: not if they are on different processes."""
    return fitted.n_classes == 2 and fitted.partition is None


def mean_over_classes(fitted: Fitted) -> tuple[np.ndarray, float] | None:
    """Mean of the weights of training (D,) and of the biases over the classes of all ranks: computed in a collective
    call, so that reading `coef_` is not collective. None for one process, which has all classes."""
    if fitted.partition is None:
        return None
    weight, bias = fitted.parameters.weight, fitted.parameters.bias
    step, sums = (
        max(1, NUMBERS_AT_ONCE // max(1, weight.shape[1])),
        torch.zeros(weight.shape[1] + 1, dtype=torch.float64),
    )
    for first in range(0, len(weight), step):
        sums[:-1] += weight[first : first + step].sum(0, dtype=torch.float64)
    sums[-1] = bias.sum(dtype=torch.float64)
    mean = fitted.partition.ranks.sum_(sums, "the mean weights").numpy() / fitted.n_classes
    return mean[:-1], float(mean[-1])


def own_units_of_mean(fitted: Fitted, weight: np.ndarray, bias: float) -> tuple[np.ndarray, np.float64]:
    scaling = fitted.scaling or FeatureScaling.identity(len(weight))
    coef, intercept = scaling.to_original(fitted.factor * weight[None], fitted.factor * np.array([bias]))
    return coef[0], intercept[0]


def is_centred(fitted: Fitted) -> bool:
    """Whether coefficients and scores are centred over the classes, which does not change probabilities: not if they
    were assigned by the user, and not if zeros have to be kept."""
    known = fitted.partition is None or fitted.class_mean is not None
    return fitted.centred and fitted.sparse_weight is None and known


def _of_own_units(fitted: Fitted, weight: Any, bias: np.ndarray) -> tuple[Any, np.ndarray]:
    """Coefficients in the units of X, times the factor. Intercepts in float64 if columns were centred: they may need
    more digits than the weights."""
    scaling = fitted.scaling or FeatureScaling.identity(weight.shape[1])
    bias = bias.astype(np.float64) if scaling.centre.any() else bias.copy()
    if sp.issparse(weight):
        coef = (weight @ sp.diags_array(fitted.factor / scaling.scale)).tocsr().astype(weight.dtype)
        return coef, fitted.factor * bias - coef.astype(bias.dtype) @ scaling.centre.astype(bias.dtype)
    coef = np.empty_like(weight)
    step = max(1, NUMBERS_AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        own = fitted.factor * weight[part].astype(np.float64)
        coef[part], bias[part] = scaling.to_original(own, fitted.factor * bias[part].astype(np.float64))
    return coef, bias


def checked(fitted: Fitted, coef: Any, intercept: Any) -> tuple[Any, np.ndarray]:
    """coef_ and intercept_, possibly modified or replaced by the user, in their previous dtypes."""
    n_rows, n_features = len(fitted.parameters.bias), fitted.parameters.weight.shape[1]
    n_rows = 1 if is_one_row(fitted) else n_rows
    dtype = fitted.parameters.bias.numpy().dtype
    if sp.issparse(coef):
        coef = coef if coef.format == "csr" and coef.dtype == dtype else sp.csr_matrix(coef, dtype=dtype)
    else:
        coef = np.require(coef, dtype, ["C", "W", "A"])
    centred = fitted.scaling is not None and fitted.scaling.centre.any()
    intercept = np.require(intercept, np.float64 if centred else dtype, ["C", "W", "A"])
    for name, found, shape in (
        ("coef_", coef, (n_rows, n_features)), ("intercept_", intercept, (n_rows,))
    ):  # fmt: skip
        if found.shape != shape:
            raise ValueError(
                f"Expected {name} of shape {shape}, as it was fitted, found {found.shape}. Assign an array of that "
                "shape, or fit again."
            )
    return coef, intercept


def take_up(fitted: Fitted, coef: Any, intercept: Any) -> None:
    """Update the model from coef_ and intercept_ if the user has changed them."""
    coef, intercept = checked(fitted, coef, intercept)
    coef_now, intercept_now = published(fitted)
    if same(intercept, intercept_now) and same(coef, coef_now):
        return
    fitted.centred = False
    weight, bias = (of_all_classes(each) if is_one_row(fitted) else each for each in (coef, intercept))
    if fitted.scaling is not None or fitted.factor != 1.0:
        scaling = fitted.scaling or FeatureScaling.identity(weight.shape[1])
        if sp.issparse(weight):
            bias = (bias + weight.astype(np.float64) @ scaling.centre) / fitted.factor
            weight = (weight @ sp.diags_array(scaling.scale / fitted.factor)).tocsr()
        else:
            weight, bias = scaling.to_scaled(weight / fitted.factor, bias.astype(np.float64) / fitted.factor)
    fitted.parameters.bias.copy_(torch.from_numpy(np.ascontiguousarray(bias)))
    if fitted.sparse_weight is not None:
        fitted.sparse_weight = sp.csr_matrix(weight, dtype=fitted.sparse_weight.dtype)
    else:
        dense = weight.toarray() if sp.issparse(weight) else weight
        fitted.parameters.weight.copy_(torch.from_numpy(np.ascontiguousarray(dense)))


def of_all_classes(numbers: Any) -> Any:
    """For two classes, the rows of both from their difference; otherwise unchanged."""
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
