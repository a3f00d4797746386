"""AugmentReduceClassifier, the scikit-learn face."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from . import diagnosis, direct_fit, fitting, interrupts, labels, linear, predict, prior_search, saving
from .defaults import Settings, Shape, is_small, resolve, resolve_dtype, solves_directly
from .edge import check_load, check_memory, check_parameters, check_prediction, check_scale, check_weights
from .fitting import threads
from .kernels.rows import Rows, as_rows
from .kernels.threads import one_torch_thread
from .limits import memory_errors
from .local import LocalStep
from .merging import merged
from .noise import Gumbel, Noise, resolve_noise
from .optim import RowOptimizer
from .sampler import ClassSampler
from .training import Stopwatch

ACCEPTED = {"accept_sparse": "csr", "dtype": (np.float64, np.float32), "accept_large_sparse": True}


@dataclasses.dataclass(frozen=True)
class Fit:
    """All that a fit needs."""

    settings: Settings
    X: Rows  # in units of its own
    rows: fitting.TrainingRows  # in those of training
    shape: Shape
    options: dict[str, Any]


class AugmentReduceClassifier(ClassifierMixin, BaseEstimator):
    """Softmax, multinomial probit or logistic for very many classes: beyond 2,000 at a cost that does not grow with
    them.

    Maximises sum_n weight_n L_n - ||w||^2 / (2 prior_variance), where L_n is a lower bound on log p(y_n | x_n)
    estimated from a few sampled classes (Ruiz, Titsias, Dieng, Blei 2018). Linear scores: psi_nk = w_k . x_n + b_k.

    Parameters
    ----------
    model : "softmax", "probit", "logistic" or a Noise
        The distribution of the utilities' noise: Gumbel, Gaussian, logistic, or one of your own.
    method : "augment-reduce", "one-vs-each", "sampled-softmax" or "exact"
        What is maximised. The middle two are for the softmax only; "exact" costs O(K) a row.
    n_sampled_classes : int, optional
        |S|, how many classes stand for the rest. More than there are others means all others.
    class_sampling : "auto", a name or a ClassSampler
        "all", "uniform", "frequency", "conditional" (for each row, the last by its features), "uniform-shared",
        "frequency-shared", "head-tail-shared", "cache-shared" (one draw for the whole minibatch), "pointed-shared" (and
        for each row the classes that its features point at). "auto": all up to 2,000 classes, above "pointed-shared",
        or "head-tail-shared" where rows are dense; with `n_sampled_classes` set always a sample.
    batch_size, max_iter, max_epochs : int, optional
        Rows a step, and how many steps, or passes over the data (set one of the two).
    prior_variance : "auto", float or None
        Variance v of a Gaussian prior on the weights of X as it is: C = v of scikit-learn's LogisticRegression, with
        two classes C = 2 v (two weight vectors). None is maximum likelihood. "auto" finds v, of weights of features in
        units of their own, from held-out rows (`prior_variance_`; docs/defaults.md); it is none with a preset.
    intercept_prior_variance : float, optional
        The same for the intercepts, which are free by default.
    fit_intercept : bool
    feature_scaling : "auto" or bool
        Train on features in units of their own: dense columns centred, columns of very different scale divided by it,
        others by one common scale; sparse rows stay sparse. `coef_` and `intercept_` are of X as it is. "auto": unless
        a preset, a learning rate or an optimiser object is given, which are about X as it is.
    optimizer, learning_rate : optional
        "adagrad" (default), "rowwise-adagrad", "adam", "section4" (the paper's rule), or a RowOptimizer. "lbfgs" goes
        to the optimum of the exact objective with all rows at once; the default where that takes a second or two and
        nothing is set that is about steps.
    local_step : optional
        The E step: "cross-fitted" (from one half of the sampled classes, for the other), "natural-gradient" (softmax),
        "newton", "gradient" (one q for each row, remembered), "amortised" (predicted from the features); a LocalStep.
    early_stopping, validation_fraction, n_iter_no_change, tol
        Hold out that share of the rows, stop when their log likelihood has not risen by `tol` for
        `n_iter_no_change` looks, and keep the best weights. `partial_fit` has no such rows and refuses it.
    class_weight : dict, "balanced" or None
    warm_start : bool
        `fit` goes on from where the last one ended, or was interrupted, for `max_iter` more steps, on the same rows.
    device : "auto", "cpu" or "cuda"
        Where the weights are trained; the results are the same to rounding. "auto" takes a GPU for many weights only.
    n_jobs : int, optional
        Threads: -1 is all cores, None as many as are set (numba.set_num_threads, NUMBA_NUM_THREADS), by default all.
        Results do not depend on it.
    dtype : "float32", "float64" or None
        Of the weights; None follows X.
    init_scale : float, optional
        Standard deviation of the first weights; None is 0 (the presets: 0.1, and 0.001 for the biases).
    preset : None, "paper" or "paper-text"
        The authors' code as they ran it, or the paper's text to the letter.
    random_state : int, RandomState or None
    verbose : int
        1 shows settings, memory and progress.

    Attributes
    ----------
    classes_, coef_ (K, D), intercept_ (K,)
        With two classes, as in scikit-learn, coef_ is (1, D): the second class's weights minus the first's. May be
        written to, or replaced: predictions, `save` and further training go by them.
    prior_variance_, temperature_
        The variance that was set or found; what all scores were divided by, found with it (1 where it was set).
    feature_scale_, feature_centre_ (D,)
        Units of the features in training.
    n_features_in_, feature_names_in_, n_iter_, n_iter_planned_
        The last is where a fit that was interrupted would have ended; `max_iter=n_iter_planned_ - n_iter_` goes there.
    history_ : dict of arrays
        "iteration", "epoch", "seconds" (of steps), "bound" (per row), "validation_log_likelihood", "bound_gap"
        (log p minus the bound, on fixed training rows), "training_log_likelihood" (of those rows), "floor_hits" (half
        rows, where cross-fitted).
    fit_seconds_ : dict
        Seconds of the last fit by what they were spent on: "prepare", "search" (for the prior),
        "compile", "train", "validate", "look".
    """

    classes_: np.ndarray
    _fitted: fitting.Fitted
    prior_variance_: float | None

    def __init__(
        self,
        model: str | Noise = "softmax",
        *,
        method: str = "augment-reduce",
        n_sampled_classes: int | None = None,
        class_sampling: str | ClassSampler = "auto",
        batch_size: int | None = None,
        max_iter: int | None = None,
        max_epochs: float | None = None,
        prior_variance: float | str | None = "auto",
        intercept_prior_variance: float | None = None,
        fit_intercept: bool = True,
        feature_scaling: str | bool = "auto",
        optimizer: str | RowOptimizer | None = None,
        learning_rate: float | None = None,
        local_step: str | LocalStep | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        tol: float = 1e-4,
        class_weight: dict[Any, float] | str | None = None,
        warm_start: bool = False,
        device: str = "auto",
        n_jobs: int | None = None,
        dtype: str | None = None,
        init_scale: float | None = None,
        preset: str | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.model = model
        self.method = method
        self.n_sampled_classes = n_sampled_classes
        self.class_sampling = class_sampling
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.max_epochs = max_epochs
        self.prior_variance = prior_variance
        self.intercept_prior_variance = intercept_prior_variance
        self.fit_intercept = fit_intercept
        self.feature_scaling = feature_scaling
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.local_step = local_step
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.device = device
        self.n_jobs = n_jobs
        self.dtype = dtype
        self.init_scale = init_scale
        self.preset = preset
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ---- fitting ----

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> AugmentReduceClassifier:
        """Fit to rows X (dense or sparse) and their labels y (numbers or text)."""
        with self._unchanged_if_refused():
            noise = self._checked_noise()
            go_on = self.warm_start and hasattr(self, "_fitted")
            X, y, weight = self._checked_rows(X, y, sample_weight, reset=not go_on)
            if go_on:
                codes = labels.encode(self.classes_, y)
            else:
                self.classes_, codes = np.unique(y, return_inverse=True)
                labels.check_classes(self.classes_)
            rows = fitting.TrainingRows(
                as_rows(X), codes, labels.row_weights(self.class_weight, self.classes_, codes, weight)
            )
            prepared = self._prepare(noise, rows, anew=not go_on)
        return self._train(prepared, persistent=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> AugmentReduceClassifier:
        """One pass over these rows, which are not expected again; the first call names all `classes` there will be."""
        with self._unchanged_if_refused():
            noise = self._checked_noise()
            if self.early_stopping:
                raise ValueError(
                    "early_stopping=True has no meaning for partial_fit, which sees each row once. Set "
                    "early_stopping=False, and score rows of your own between calls."
                )
            first = not hasattr(self, "_fitted")
            if first and classes is None:
                raise ValueError(
                    "The first call of partial_fit needs classes: all labels that any later call may bring."
                )
            if self.class_weight == "balanced":
                raise ValueError(
                    "class_weight='balanced' needs all rows at once; pass weights as a dict to partial_fit."
                )
            X, y, weight = self._checked_rows(X, y, sample_weight, reset=first)
            if first:
                self.classes_ = np.unique(np.asarray(classes))
                labels.check_classes(self.classes_)
            elif classes is not None and not np.array_equal(np.unique(np.asarray(classes)), self.classes_):
                raise ValueError(
                    "classes differ from those of the first call of partial_fit; leave them out, or start anew."
                )
            codes = labels.encode(self.classes_, y)
            rows = fitting.TrainingRows(
                as_rows(X), codes, labels.row_weights(self.class_weight, self.classes_, codes, weight)
            )
            prepared = self._prepare(noise, rows, anew=first, stream=True)
        return self._train(prepared, persistent=False)

    @contextlib.contextmanager
    def _unchanged_if_refused(self) -> Iterator[None]:
        """Input that is refused leaves the estimator, and the model it may hold, as they were."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _checked_noise(self) -> Noise:
        noise = resolve_noise(self.model)
        check_parameters(self.get_params(deep=False), noise)
        return noise

    def _checked_rows(
        self, X: Any, y: Any, sample_weight: Any, reset: bool
    ) -> tuple[Any, np.ndarray, np.ndarray | None]:
        with config_context(array_api_dispatch=False):  # tensors become arrays, as where that is not switched on
            X, y = validate_data(self, X, y, reset=reset, **ACCEPTED)
            if sample_weight is not None:
                sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        labels.check_labels(y)
        with warnings.catch_warnings():  # many classes are what this is for
            warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")
            check_classification_targets(y)
        if sp.issparse(X) and not X.has_canonical_format:
            X = X.copy()  # the caller's matrix stays as it is
            X.sum_duplicates()
        return X, y, sample_weight

    def _prepare(self, noise: Noise, rows: fitting.TrainingRows, *, anew: bool, stream: bool = False) -> Fit:
        """Resolve all settings; allocate fresh parameters, or make sure that the old ones can go on."""
        options = self.get_params(deep=False)
        plain = Shape(len(rows.active()), rows.X.n_features, len(self.classes_), rows.X.n_nonzero, stream)
        dtype = resolve_dtype(options["dtype"], rows.torch_dtype)
        if anew:
            check_weights(len(self.classes_), rows.X.n_features, dtype)
        if solves_directly(options, noise, plain):
            rows = merged(rows)
        active, own = rows.active(), rows.X
        scaling = fitting.units(own, active, rows.weight, options, stream) if anew else self._fitted.scaling
        if scaling is not None:
            rows = dataclasses.replace(rows, X=scaling.apply(own, own.values.dtype))
        check_scale(rows.X.values, rows.weight, len(active), len(self.classes_), dtype)
        shape = Shape.of(rows.X, len(self.classes_), active, rows.weight, stream=stream)
        held_out = fitting.n_held_out(len(active), self.validation_fraction) if self.early_stopping else 0
        settings = resolve(options, noise, shape.without(held_out), rows.torch_dtype)
        settings = dataclasses.replace(settings, direct=solves_directly(options, noise, plain))
        searched = anew and isinstance(self.prior_variance, str) and self.preset is None and not stream
        exact = settings.direct or (searched and is_small(Gumbel(), shape))
        bytes_needed = check_memory(settings, shape, self.early_stopping, anew, exact)
        if anew:
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
            with one_torch_thread(), memory_errors("This fit", bytes_needed):
                self._fitted = fitting.start(settings, shape.n_classes, shape.n_features, seed, bytes_needed)
            self._fitted.scaling, self._fitted.centred = scaling, self.preset is None
        else:
            self.densify()
            self._take_up()
            fitting.check_can_go_on(self._fitted, settings)
        return Fit(settings, own, rows, shape, options)

    def _train(self, fit: Fit, *, persistent: bool) -> AugmentReduceClassifier:
        """Find the prior, train, and publish what was learned, also after an interruption."""

        def work(stop_asked: interrupts.StopAsked) -> None:
            settings, rows, watch = fit.settings, fit.rows, Stopwatch()
            try:
                if prior_search.wanted(fit.options, self._fitted, persistent=persistent):
                    with threads(self.n_jobs):
                        settings, rows = prior_search.find(
                            self._fitted, settings, fit.X, rows, fit.shape, fit.options, stop_asked
                        )
                    watch.lap("search")
                elif isinstance(fit.options["prior_variance"], str) and self._fitted.found is not None:
                    settings = prior_search.with_found(settings, self._fitted.found)
                if stop_asked():
                    return
                if settings.direct:
                    direct_fit.run(self._fitted, settings, rows, fit.options, stop_asked, watch)
                else:
                    fitting.run(
                        self._fitted, settings, rows, fit.options, persistent=persistent, stop_asked=stop_asked,
                        watch=watch,
                    )  # fmt: skip
            finally:
                self._publish()

        with memory_errors("This fit", self._fitted.bytes_needed, loads=True):
            interrupts.run_whole(work)
        if persistent and self.preset is None and not self._fitted.run.stopped_early:
            diagnosis.warn(self._fitted, self.history_, stacklevel=4)
        return self

    def _publish(self) -> None:
        """Make what was learned visible under scikit-learn's names."""
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
        """coef_ and intercept_, made when they are first asked for."""
        if not hasattr(self, "_fitted"):
            raise AttributeError("This model has no coef_ and intercept_ before fit or partial_fit.")
        if "_coefficients" not in self.__dict__:
            self._coefficients = linear.published(self._fitted)
        return self._coefficients

    def _take_up(self) -> None:
        """What somebody has written to coef_ or intercept_ is what the model is from now on."""
        if "_coefficients" in self.__dict__:
            linear.take_up(self._fitted, *self._coefficients)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made of the rest; after a copy it would no longer be the same memory."""
        self._take_up()
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_coefficients"}

    # ---- prediction ----

    def _scores_of(self, X: Any) -> linear.LinearScores:
        check_is_fitted(self)
        with config_context(array_api_dispatch=False):
            X = validate_data(self, X, reset=False, **ACCEPTED)
        self._take_up()
        return linear.LinearScores.of(X, self._fitted)

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores psi (N, K), X coef_' + intercept_; with two classes (N,), the second's minus the first's."""
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
        """The class of the highest score, which is the most probable one under every model."""
        scores_of = self._scores_of(X)
        with self._predicting(scores_of, 1):
            return self.classes_[predict.argmax(scores_of, scores_of.n_rows, len(self.classes_)).numpy()]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """log of `predict_proba`, without underflow."""
        return self._all_classes(X, predict.log_proba)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, K) probabilities, exact for every model, in the dtype of the weights. See also `predict_topk`."""
        return self._all_classes(X, predict.proba)

    def _all_classes(self, X: Any, answer: Callable[..., torch.Tensor]) -> np.ndarray:
        scores_of, noise = self._scores_of(X), resolve_noise(self.model)
        with self._predicting(scores_of, len(self.classes_)):
            return answer(noise, scores_of, scores_of.n_rows, len(self.classes_), scores_of.dtype).numpy()

    def predict_topk(self, X: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most probable classes of each row and their probabilities, (N, k) each; never N x K."""
        scores_of, noise, K = self._scores_of(X), resolve_noise(self.model), len(self.classes_)
        if not 1 <= k <= K:
            raise ValueError(f"Expected k between 1 and the number of classes, {K}; found {k}.")
        with self._predicting(scores_of, 2 * k):
            classes, probabilities = predict.top_k(noise, scores_of, scores_of.n_rows, K, k)
        return self.classes_[classes.numpy()], probabilities.to(scores_of.dtype).numpy()

    @contextlib.contextmanager
    def _predicting(self, scores_of: linear.LinearScores, numbers: int) -> Iterator[None]:
        """Threads for a prediction of so many numbers a row, for which there is memory."""
        needed = predict.bytes_needed(scores_of.n_rows, len(self.classes_), numbers)
        check_prediction(needed, scores_of.n_rows, len(self.classes_))
        with threads(self.n_jobs), memory_errors("This prediction", needed, loads=True):
            yield

    def log_likelihood(
        self, X: Any, y: Any, sample_weight: Any = None, *, integral: str = "quadrature", n_samples: int = 1000
    ) -> float:
        """Mean log probability of the labels, exact for every model.

        `integral="importance"` is the paper's estimate instead (probit, logistic): 1,000 draws from N(5, 5^2).
        """
        check_is_fitted(self)
        codes = torch.from_numpy(labels.encode(self.classes_, np.asarray(y)))
        scores_of = self._scores_of(X)
        if len(codes) != scores_of.n_rows:
            raise ValueError(f"X has {scores_of.n_rows} rows but y has {len(codes)} labels.")
        if integral not in ("quadrature", "importance"):
            raise ValueError(f"Expected integral to be 'quadrature' or 'importance', found {integral!r}.")
        noise = resolve_noise(self.model)
        with self._predicting(scores_of, 1):
            if integral == "importance" and noise.name != "softmax":
                values = predict.log_likelihood_importance(
                    noise, scores_of, codes, len(self.classes_), n_samples=n_samples,
                    generator=torch.Generator().manual_seed(self._fitted.seed),
                )  # fmt: skip
            else:
                values = predict.log_likelihood(noise, scores_of, codes, len(self.classes_))
        return float(np.average(values.numpy(), weights=sample_weight))

    def diagnose(self, X: Any, y: Any) -> diagnosis.Diagnosis:
        """What is wrong with this model, judged on rows that were not fitted, if there are any; print it.

        `"over-fit" in clf.diagnose(X, y)`; other names: "under-fit", "not converged", "loose bound", "unscaled
        columns", "other units", "label noise", "worse than class frequencies".
        """
        check_is_fitted(self)
        with config_context(array_api_dispatch=False):
            X = validate_data(self, X, reset=False, **ACCEPTED)
        codes = labels.encode(self.classes_, np.asarray(y))
        if len(codes) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} rows but y has {len(codes)} labels.")
        self._take_up()
        with threads(self.n_jobs):
            return diagnosis.diagnose(self._fitted, resolve_noise(self.model), as_rows(X), X, codes, self.history_)

    def sparsify(self) -> AugmentReduceClassifier:
        """Keep the weights as a CSR matrix: those never touched are zero. For prediction; `densify` undoes it."""
        check_is_fitted(self)
        self._take_up()
        if self._fitted.sparse_weight is None:
            weight = self._fitted.parameters.weight
            self._fitted.sparse_weight = sp.csr_matrix(weight.numpy())
            self._fitted.parameters.weight = torch.empty(0, weight.shape[1], dtype=weight.dtype)
            self._publish()
        return self

    def densify(self) -> AugmentReduceClassifier:
        """Keep the weights as a plain array again, as training needs them."""
        check_is_fitted(self)
        self._take_up()
        if self._fitted.sparse_weight is not None:
            self._fitted.parameters.weight = torch.from_numpy(self._fitted.sparse_weight.toarray())
            self._fitted.sparse_weight = None
            self._publish()
        return self

    # ---- files ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, with all that training needs to go on exactly, to one file; atomically, without pickle."""
        check_is_fitted(self)
        self._take_up()
        with one_torch_thread():
            saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **objects: Any) -> AugmentReduceClassifier:
        """Read a model saved by `save`; `ModelFileError` names what is wrong with a file that cannot be trusted.

        Objects of your own among the parameters (a noise) are given again here, as is what belongs to the machine and
        not to the model: `n_jobs` and `device`, which are the defaults unless given. Other parameters may be, too.
        """
        size = check_load(path)
        with one_torch_thread(), memory_errors("This model", size):
            return saving.load(cls, path, objects)


def _within(dtype: np.dtype, values: np.ndarray) -> np.ndarray:
    """In this dtype; what is too large for it has its largest value."""
    return np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)


__all__ = ["AugmentReduceClassifier"]
