"""The fitted attributes: coefficients, which may be modified or assigned, history, prior."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.validation import check_is_fitted

from ..training import linear
from .base import ClassifierBase


class Coefficients(ClassifierBase):
    """`coef_` and `intercept_` are computed from the weights at the first access."""

    prior_variance_: float | None

    def _publish(self) -> None:
        """Set the fitted attributes."""
        fitted = self._fitted
        self.__dict__.pop("_coefficients", None)
        self.__dict__.update(
            n_iter_=fitted.clock.iteration,
            n_iter_planned_=fitted.clock.iteration if fitted.run.plan is None else fitted.run.plan.last,
            history_={name: np.array(values) for name, values in fitted.run.history.items()},
            fit_seconds_=dict(fitted.seconds),
        )
        if fitted.found is not None:
            self.prior_variance_ = fitted.found.variance
        else:
            given = self.prior_variance
            self.prior_variance_ = None if given is None or isinstance(given, str) else float(given)
        self.temperature_ = 1.0 / fitted.factor
        D = fitted.parameters.weight.shape[1]
        self.feature_scale_ = np.ones(D) if fitted.scaling is None else fitted.scaling.scale
        self.feature_centre_ = np.zeros(D) if fitted.scaling is None else fitted.scaling.centre

    @property
    def coef_(self) -> Any:
        return self._published()[0]

    @coef_.setter
    def coef_(self, value: Any) -> None:
        self._coefficients = (value, self._published()[1])

    @property
    def intercept_(self) -> Any:
        return self._published()[1]

    @intercept_.setter
    def intercept_(self, value: Any) -> None:
        self._coefficients = (self._published()[0], value)

    def _published(self) -> tuple[Any, Any]:
        """coef_ and intercept_, computed at the first access."""
        if not hasattr(self, "_fitted"):
            raise AttributeError("This model has no coef_ and intercept_ before fit or partial_fit.")
        if "_coefficients" not in self.__dict__:
            self._coefficients = linear.published(self._fitted)
        return self._coefficients

    def _apply_coefficients(self) -> None:
        """Write a modified or assigned coef_ and intercept_ back to the weights."""
        if "_coefficients" in self.__dict__:
            linear.take_up(self._fitted, *self._coefficients)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the cached coefficients: they share memory with the weights, but copies of them would
        not."""
        self._apply_coefficients()
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_coefficients"}

    def sparsify(self) -> Self:
        """Store the weights as a CSR matrix (weights never updated are zero). For prediction; `densify` reverts it."""
        check_is_fitted(self)
        self._apply_coefficients()
        if self._fitted.sparse_weight is None:
            weight = self._fitted.parameters.weight
            self._fitted.sparse_weight = sp.csr_matrix(weight.numpy())
            self._fitted.parameters.weight = torch.empty(0, weight.shape[1], dtype=weight.dtype)
            self._publish()
        return self

    def densify(self) -> Self:
        """Store the weights as a dense array again, which training needs."""
        check_is_fitted(self)
        self._apply_coefficients()
        if self._fitted.sparse_weight is not None:
            self._fitted.parameters.weight = torch.from_numpy(self._fitted.sparse_weight.toarray())
            self._fitted.sparse_weight = None
            self._publish()
        return self
