"""Predictions, likelihoods and the diagnosis of a fitted model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from ..config import labels
from ..config.validation import check_prediction
from ..kernels.rows import as_rows
from ..model import predict
from ..support.limits import memory_errors
from ..training import agreement, diagnosis, linear
from ..training.fit import threads
from .coefficients import Coefficients
from .inputs import Inputs


class Predictions(Inputs, Coefficients):
    """The prediction methods of a fitted model, `log_likelihood` and `diagnose`."""

    def _scores_of(self, X: Any) -> linear.LinearScores:
        X, _ = self._checked(X)
        return linear.LinearScores.of(X, self._fitted)

    def _checked(self, X: Any, y: Any = None) -> tuple[Any, np.ndarray]:
        """The validated rows, and the positions in `classes_` of their labels if given. An error on one rank is raised
        on all."""
        check_is_fitted(self)
        partition, codes, error = self._fitted.partition, np.empty(0, np.int64), None
        try:
            if y is not None:
                codes = labels.encode(self.classes_, np.asarray(y))
            X = self._checked_features(X)
            if y is not None and len(codes) != X.shape[0]:
                raise ValueError(f"X has {X.shape[0]} rows but y has {len(codes)} labels.")
            self._apply_coefficients()
        except Exception as found:
            if partition is None:
                raise
            error = found
        if partition is not None:
            agreement.same_rows(partition.ranks, X, codes, error)
        return X, codes

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores psi (N, K) = X coef_' + intercept_; with two classes (N,), second minus first."""
        scores_of = self._scores_of(X)
        with self._predicting(scores_of, len(self.classes_)):
            psi = predict.scores(scores_of, scores_of.n_rows, len(self.classes_), scores_of.dtype).numpy()
        if len(self.classes_) == 2:
            return _within(psi.dtype, psi[:, 1].astype(np.float64) - psi[:, 0])
        if linear.is_centred(self._fitted):
            mean = (psi / len(self.classes_)).sum(1, keepdims=True, dtype=np.float64)  # divided first: no overflow
            return _within(psi.dtype, psi - mean)
        return psi

    def predict(self, X: Any) -> np.ndarray:
        """The class with the highest score, the most probable one under every model."""
        scores_of = self._scores_of(X)
        with self._predicting(scores_of, 1):
            n_rows, K = scores_of.n_rows, len(self.classes_)
            return self.classes_[predict.argmax(scores_of.here, n_rows, K, columns=scores_of.columns).numpy()]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """log of `predict_proba`, without underflow."""
        return self._all_classes(X, predict.log_proba)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, K) probabilities, exact for every model, in the dtype of the weights. See also `predict_topk`."""
        return self._all_classes(X, predict.proba)

    def _all_classes(self, X: Any, answer: Callable[..., torch.Tensor]) -> np.ndarray:
        scores_of, noise = self._scores_of(X), self._noise()
        with self._predicting(scores_of, len(self.classes_)):
            return answer(noise, scores_of, scores_of.n_rows, len(self.classes_), scores_of.dtype).numpy()

    def predict_topk(self, X: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most probable classes of each row and their probabilities, (N, k) each; O(N k) memory."""
        scores_of, noise, K = self._scores_of(X), self._noise(), len(self.classes_)
        if not 1 <= k <= K:
            raise ValueError(f"Expected k between 1 and the number of classes, {K}; found {k}.")
        with self._predicting(scores_of, 2 * k):
            classes, probabilities = predict.top_k(
                noise, scores_of.here, scores_of.n_rows, K, k, columns=scores_of.columns
            )
        return self.classes_[classes.numpy()], probabilities.to(scores_of.dtype).numpy()

    @contextlib.contextmanager
    def _predicting(self, scores_of: linear.LinearScores, numbers: int) -> Iterator[None]:
        """Set the threads, and check the memory, for a prediction with `numbers` results a row."""
        needed = predict.bytes_needed(scores_of.n_rows, len(self.classes_), numbers)
        check_prediction(needed, scores_of.n_rows, len(self.classes_))
        n_jobs = 1 if scores_of.partition is not None else self.n_jobs  # ranks: all in the same order of blocks
        with threads(n_jobs), memory_errors("This prediction", needed, loads=True):
            yield

    def log_likelihood(
        self, X: Any, y: Any, sample_weight: Any = None, *, integral: str = "quadrature", n_samples: int = 1000
    ) -> float:
        """Mean log probability of the labels, exact for every model.

        `integral="importance"` is the paper's estimate instead (probit, logistic): 1,000 draws from N(5, 5^2).
        """
        X, numbers = self._checked(X, y)
        scores_of, codes = linear.LinearScores.of(X, self._fitted), torch.from_numpy(numbers)
        if integral not in ("quadrature", "importance"):
            raise ValueError(f"Expected integral to be 'quadrature' or 'importance', found {integral!r}.")
        noise = self._noise()
        with self._predicting(scores_of, 1):
            if integral == "importance" and not noise.conjugate:
                values = predict.log_likelihood_importance(
                    noise, scores_of, codes, len(self.classes_), n_samples=n_samples,
                    generator=torch.Generator().manual_seed(self._fitted.seed),
                )  # fmt: skip
            else:
                values = predict.log_likelihood(
                    noise, scores_of.here, codes, len(self.classes_), columns=scores_of.columns
                )
        return float(np.average(values.numpy(), weights=sample_weight))

    def diagnose(self, X: Any, y: Any) -> diagnosis.Diagnosis:
        """Print possible problems of this model, from these rows (preferably validation rows) and training statistics.

        `"over-fit" in clf.diagnose(X, y)`; other names: "under-fit", "not converged", "loose bound", "unscaled
        columns", "other units", "label noise", "worse than class frequencies".
        """
        X, codes = self._checked(X, y)
        with threads(1 if self._fitted.partition is not None else self.n_jobs):
            return diagnosis.diagnose(self._fitted, self._noise(), as_rows(X), X, codes, self.history_)


def _within(dtype: np.dtype, values: np.ndarray) -> np.ndarray:
    """Convert to this dtype, clipped to its range."""
    return np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)
