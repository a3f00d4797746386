"""Validation of rows, labels and parameters, as in scikit-learn's estimators."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn import config_context
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from ..config import labels, mapped
from ..config.validation import check_parameters
from ..kernels.rows import is_mapped
from ..model.noise import Noise
from .base import ClassifierBase

ACCEPTED = {"accept_sparse": "csr", "dtype": (np.float64, np.float32), "accept_large_sparse": True}


class Inputs(ClassifierBase):
    """Input validation before training and prediction."""

    @contextlib.contextmanager
    def _unchanged_if_refused(self) -> Iterator[None]:
        """Restore the attributes of the estimator if an exception is raised, such as for invalid input."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _checked_noise(self) -> Noise:
        noise = self._noise()
        check_parameters(self.get_params(deep=False), noise)
        return noise

    def _checked_rows(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> tuple[Any, Any, np.ndarray | None]:
        with config_context(array_api_dispatch=False):  # tensors become arrays
            if is_mapped(X) and y is not None:
                y = mapped.checked(self, X, y, reset=reset)
            else:
                X, y = validate_data(self, X, y, reset=reset, **ACCEPTED)
            if sample_weight is not None:
                sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not isinstance(y, labels.Coded) and not (is_mapped(X) and y.dtype.kind in "iu"):
            labels.check_labels(y)
            with warnings.catch_warnings():  # scikit-learn warns about many classes
                warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")
                check_classification_targets(y)
        if sp.issparse(X) and not is_mapped(X) and not X.has_canonical_format:
            X = X.copy()  # do not modify the caller's matrix
            X.sum_duplicates()
        return X, y, sample_weight

    def _checked_features(self, X: Any) -> Any:
        """The validated rows of a prediction."""
        with config_context(array_api_dispatch=False):
            if is_mapped(X):
                mapped.check_features(self, X, reset=False)
                return X
            return validate_data(self, X, reset=False, **ACCEPTED)
