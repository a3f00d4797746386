"""AugmentReduceClassifier, the scikit-learn estimator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from .config import labels, mapped
from .config.defaults import Settings, is_small, resolve, resolve_dtype, solves_directly
from .config.shape import Shape
from .config.validation import (
    check_load,
    check_memory,
    check_over_ranks,
    check_parameters,
    check_prediction,
    check_scale,
    check_weights,
    is_integer,
    ranks_of,
    state_bytes,
)
from .kernels.rows import MappedRows, Rows, as_rows, is_mapped
from .kernels.threads import one_torch_thread
from .local.base import LocalStep
from .model import predict
from .model.compiled import compiled
from .model.noise import Gumbel, Noise, resolve_noise
from .optim import RowOptimizer
from .persistence import saving
from .persistence.checkpoints import Checkpoints, checkpoints
from .sampling import ClassSampler
from .sharding import ClassShard, Partition, Ranks
from .support.limits import memory_errors
from .support.seeds import mix
from .training import agreement, diagnosis, direct_fit, interrupts, linear, prior_search, stream
from .training import fit as fitting
from .training.fit import threads
from .training.loop import Stopwatch
from .training.merging import merged

BUFFER_ROWS = 1 << 16  # of a stream, mixed before they are trained on
ACCEPTED = {"accept_sparse": "csr", "dtype": (np.float64, np.float32), "accept_large_sparse": True}


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `_prepare` passes to `_train`."""

    settings: Settings
    X: Rows  # scaled features
    rows: fitting.TrainingRows  # the training rows
    shape: Shape
    options: dict[str, Any]
    state_bytes: int  # of what a checkpoint holds


class AugmentReduceClassifier(ClassifierMixin, BaseEstimator):
    """Softmax, multinomial probit or logistic regression for very many classes. Above 2,000 classes the cost of a step
    does not grow with their number.

    Maximises sum_n weight_n L_n - ||w||^2 / (2 prior_variance), where L_n is a lower bound on log p(y_n | x_n)
    estimated from a few sampled classes (Ruiz, Titsias, Dieng, Blei 2018). Linear scores: psi_nk = w_k . x_n + b_k.

    Parameters
    ----------
    model : "softmax", "probit", "logistic" or a Noise
        The distribution of the utilities' noise: Gumbel, Gaussian, logistic, or one of your own.
    method : "augment-reduce", "one-vs-each", "sampled-softmax" or "exact"
        What is maximised. The middle two are for the softmax only; "exact" costs O(K) a row.
    n_sampled_classes : int, optional
        |S|, the number of sampled classes. If it is at least K - 1, all other classes are used.
    class_sampling : "auto", a name or a ClassSampler
        "all"; drawn for each row: "uniform", "frequency", "conditional" (on the features); drawn once for a minibatch:
        "uniform-shared", "frequency-shared", "head-tail-shared", "cache-shared", "candidates-shared" (plus candidate
        classes for each row, from its features). "auto": all up to 2,000 classes; above, "candidates-shared" for sparse
        rows and "head-tail-shared" for dense ones. With `n_sampled_classes` set classes are always sampled.
    batch_size, max_iter, max_epochs : int, optional
        Rows per step, and the number of steps or of passes over the data (set one of the last two).
    prior_variance : "auto", float or None
        Variance v of a Gaussian prior on the weights of X, unscaled: C = v of scikit-learn's LogisticRegression, with
        two classes C = 2 v (two weight vectors). None is maximum likelihood. "auto" chooses v, for scaled features, on
        held-out rows (`prior_variance_`; docs/defaults.md); with a preset it is None.
    intercept_prior_variance : float, optional
        The same for the intercepts; by default they have no prior.
    fit_intercept : bool
    feature_scaling : "auto" or bool
        Train on scaled features: dense columns are centred; columns of very different scale are divided by their own,
        others by a common one; sparse rows stay sparse. `coef_` and `intercept_` are in the units of X. "auto": yes,
        unless a preset, a learning rate or an optimiser object is given, which refer to unscaled features.
    optimizer, learning_rate : optional
        "adagrad" (default), "rowwise-adagrad", "adam", "section4" (the paper's rule), or a RowOptimizer. "lbfgs"
        solves the exact objective over all rows; it is the default if that takes a second or two and no parameter of
        minibatch training is set.
    local_step : optional
        The E step: "cross-fitted" (q from one half of the sampled classes, the gradient from the other);
        "natural-gradient" (softmax), "newton", "gradient" (q remembered for each row); "amortised" (q predicted from
        the features); or a LocalStep.
    early_stopping, validation_fraction, n_iter_no_change, tol
        Hold out that share of the rows, stop when their log likelihood has not risen by `tol` for
        `n_iter_no_change` evaluations, and restore the best weights. `partial_fit` refuses it.
    class_weight : dict, "balanced" or None
    warm_start : bool
        `fit` continues the last fit (also an interrupted one) for `max_iter` more steps, on the same rows.
    device : "auto", "cpu" or "cuda"
        Where to train; results agree to rounding. "auto" is the CPU (docs/running.md says when a GPU pays).
    n_jobs : int, optional
        Threads: -1 is all cores, None as many as numba is set to use (by default all). Results do not depend on it.
    dtype : "float32", "float64" or None
        Of the weights; None: that of X.
    init_scale : float, optional
        Standard deviation of the initial weights; None is 0 (presets: 0.1, and 0.001 for the biases).
    preset : None, "paper" or "paper-text"
        The settings of the authors' code, or of the paper's text.
    random_state : int, RandomState or None
    verbose : int
        1 prints settings, memory and progress.
    process_group : ProcessGroup or one-dimensional DeviceMesh, optional
        Share the classes out among these processes: class k of `classes_` is on rank k mod R. All ranks call the same
        methods with the same arguments, and get the same answers; `coef_` and `intercept_` are of the rank's own
        classes, `classes_[rank::R]` (docs/distributed.md).
    sync : bool
        With a process group: True computes what one process does, and every step waits for the sums of all ranks.
        False lets a softmax's step go on without the sums of the others, which the next one takes up (local steps
        "cross-fitted" and "amortised"; others wait).

    Attributes
    ----------
    classes_, coef_ (K, D), intercept_ (K,)
        With two classes, as in scikit-learn, coef_ is (1, D): the second class's weights minus the first's. They may
        be modified or assigned; predictions, `save` and further training use the new values.
    prior_variance_, temperature_
        The prior variance set or chosen; the temperature that divides all scores (1 if the variance was set).
    feature_scale_, feature_centre_ (D,)
        Feature scaling of the fit: it is trained on (X - centre) / scale.
    n_features_in_, feature_names_in_, n_iter_, n_iter_planned_
        To complete an interrupted fit: `warm_start=True`, `max_iter=n_iter_planned_ - n_iter_`.
    history_ : dict of arrays
        "iteration", "epoch", "seconds" (of steps), "bound" (per row), "validation_log_likelihood", "bound_gap"
        (log p minus the full bound, on fixed training rows), "training_log_likelihood" (of those rows), "floor_hits"
        (rows clipped at the floor; with cross-fitting each half of a row counts).
    fit_seconds_ : dict
        Seconds of the last fit by phase: "prepare", "search" (for the prior), "compile", "train", "validate", "look"
        (the bound gap), "checkpoint".
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
        process_group: Any = None,
        sync: bool = False,
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
        self.process_group = process_group
        self.sync = sync

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ---- fitting ----

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
    ) -> AugmentReduceClassifier:  # fmt: skip
        """Fit to rows X (dense or sparse) and their labels y (numbers or text).

        A CSR matrix of memory-mapped arrays is never copied: memory does not grow with the rows but for a few numbers
        each. `fit(rows)`, without y, takes what has rows and labels: `open_mapped(folder)`, `load_dataset(name).train`.

        `checkpoint` names a folder for the training state, written every `every` iterations (None: every ten minutes),
        the last two kept. The same call, with the same rows and parameters, goes on from there bit for bit, whatever
        ended the fit; once it has ended it returns the fitted model. Small fits without steps, of a second or two, are
        written at their end only, and a fit that was ended while it chose its prior chooses again.
        """
        with contextlib.ExitStack() as stack, self._unchanged_if_refused():
            ranks = self._ranks()
            with ranks.agree_on_errors("the checks of fit"):
                noise = self._checked_noise()
                go_on = self.warm_start and hasattr(self, "_fitted")
                self._check_checkpoint(checkpoint, go_on, ranks)
                X, y = mapped.rows_and_labels(X, y)
                X, y, weight = self._checked_rows(X, y, sample_weight, reset=not go_on)
                if go_on:
                    codes = labels.encode(self.classes_, y)
                else:
                    self.classes_, codes = labels.classes_of(y)
                    labels.check_classes(self.classes_)
                rows = fitting.TrainingRows(
                    as_rows(X), codes, labels.row_weights(self.class_weight, self.classes_, codes, weight)
                )
            keeper = stack.enter_context(checkpoints(self, checkpoint, every, rows))
            if keeper is not None and keeper.found is not None:
                self.__dict__.pop("_coefficients", None)
                self._fitted, go_on = keeper.found, True
            prepared = self._prepare(noise, rows, ranks, anew=not go_on)
            if keeper is not None:
                keeper.check_space(prepared.state_bytes)
            held = stack.pop_all()
        with held:
            return self._train(prepared, persistent=True, keeper=keeper)

    @staticmethod
    def _check_checkpoint(checkpoint: str | os.PathLike[str] | None, go_on: bool, ranks: Ranks) -> None:
        if checkpoint is None:
            return
        if go_on:
            raise ValueError(
                "warm_start=True goes on with the model in memory, checkpoint= with the one in its folder. Set "
                "warm_start=False, or leave out checkpoint and save the model."
            )
        if ranks.size > 1:
            raise ValueError(
                f"checkpoint= is for fits of one process, and this one has {ranks.size} ranks. Leave it out; "
                "save(path) writes the model of all ranks, and warm_start=True goes on with one that load(path) "
                "returned."
            )

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> AugmentReduceClassifier:
        """One pass over a part of a stream; the first call has to name all `classes`."""
        with self._unchanged_if_refused():
            ranks = self._ranks()
            with ranks.agree_on_errors("the checks of partial_fit"):
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
            prepared = self._prepare(noise, rows, ranks, anew=first, stream=True)
        return self._train(prepared, persistent=False)

    def fit_stream(
        self, blocks: Iterable[Any], classes: Any = None, *, buffer_rows: int = BUFFER_ROWS
    ) -> AugmentReduceClassifier:  # fmt: skip
        """One pass over an iterable of blocks (X, y) or (X, y, sample_weight), of any sizes; no more than a buffer and
        a block are in memory.

        The rows of about `buffer_rows` are mixed before they are trained on, by `partial_fit`: so the first call has to
        name all `classes`, further calls are further passes, and rows that come sorted are better sorted at random
        first. If the pass ends by an error, what was trained on stays.
        """
        if not is_integer(buffer_rows) or buffer_rows < 2:
            raise ValueError(f"Expected buffer_rows to be a whole number >= 2, found {buffer_rows!r}.")
        if hasattr(self, "_fitted"):
            seed = mix(self._fitted.seed, 9, self._fitted.rows_seen)
        else:
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        any_rows = False
        for block in stream.shuffled(stream.checked_blocks(blocks), buffer_rows, seed):
            self.partial_fit(block.X, block.y, None if any_rows else classes, block.weight)
            any_rows = True
        if not any_rows:
            raise ValueError("Expected blocks of rows, but the stream has none. Was an iterator passed a second time?")
        return self

    @contextlib.contextmanager
    def _unchanged_if_refused(self) -> Iterator[None]:
        """Refused input leaves the estimator and its model unchanged."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _noise(self) -> Noise:
        return compiled(resolve_noise(self.model))

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
        """Rows to predict for."""
        with config_context(array_api_dispatch=False):
            if is_mapped(X):
                mapped.check_features(self, X, reset=False)
                return X
            return validate_data(self, X, reset=False, **ACCEPTED)

    def _ranks(self) -> Ranks:
        """The processes of this fit; a model that is there has to be of the same ones."""
        ranks = ranks_of(self.process_group)
        fitted: fitting.Fitted | None = getattr(self, "_fitted", None)
        if fitted is None or fitted.partition is None:
            return ranks
        return fitted.partition.ranks if fitted.partition.ranks.group is ranks.group else ranks

    def _prepare(
        self, noise: Noise, rows: fitting.TrainingRows, ranks: Ranks, *, anew: bool, stream: bool = False
    ) -> Fit:  # fmt: skip
        """Resolve all settings; allocate parameters, or check that training can continue with the present ones."""
        partition, seed = None, None
        if ranks.size > 1:
            ranks.agree(agreement.facts_of_fit(self.get_params(deep=False), rows, self.classes_), "the fit")
            partition = Partition(ranks, ClassShard(len(self.classes_), ranks.rank, ranks.size), not self.sync)
            if self.random_state is None:
                seed = agreement.common_seed(ranks, self._seed())
        with ranks.agree_on_errors("the preparation of a fit"):
            if not anew:
                linear.check_same_ranks(self._fitted, partition)
            return self._prepare_here(noise, rows, partition, seed, anew=anew, stream=stream)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _prepare_here(
        self, noise: Noise, rows: fitting.TrainingRows, partition: Partition | None, seed: int | None, *, anew: bool,
        stream: bool,
    ) -> Fit:  # fmt: skip
        options = self.get_params(deep=False)
        n_here = len(self.classes_) if partition is None else len(partition.shard)
        plain = Shape(len(rows.active()), rows.X.n_features, len(self.classes_), rows.X.n_nonzero, stream)
        if isinstance(rows.X, MappedRows):
            mapped.check_device(self.device)
            if solves_directly(options, noise, plain) or is_small(Gumbel(), plain):
                rows = dataclasses.replace(rows, X=rows.X.in_memory())
        dtype = resolve_dtype(options["dtype"], rows.torch_dtype)
        if anew:
            check_weights(n_here, rows.X.n_features, dtype)
        if solves_directly(options, noise, plain):
            rows = merged(rows)
        active, own = rows.active(), rows.X
        scaling = fitting.units(own, active, rows.weight, options, stream) if anew else self._fitted.scaling
        if scaling is not None:
            rows = dataclasses.replace(rows, X=scaling.apply(own, own.dtype))
        check_scale(rows.X.largest(), rows.weight, len(active), len(self.classes_), dtype)
        shape = Shape.of(rows.X, len(self.classes_), active, rows.weight, stream=stream)
        rows = dataclasses.replace(rows, groups=shape.groups)
        held_out = fitting.n_held_out(len(active), self.validation_fraction) if self.early_stopping else 0
        settings = resolve(options, noise, shape.without(held_out), rows.torch_dtype)
        settings = dataclasses.replace(settings, direct=solves_directly(options, noise, plain))
        if partition is not None:
            check_over_ranks(settings)
        searched = anew and isinstance(self.prior_variance, str) and self.preset is None and not stream
        exact = settings.direct or (searched and is_small(Gumbel(), shape))
        bytes_needed = check_memory(settings, shape, self.early_stopping, anew, exact, n_here)
        if anew:
            seed = self._seed() if seed is None else seed
            with one_torch_thread(), memory_errors("This fit", bytes_needed):
                self._fitted = fitting.start(settings, shape.n_classes, shape.n_features, seed, bytes_needed, partition)
            self._fitted.scaling, self._fitted.centred = scaling, self.preset is None
        else:
            self.densify()
            self._apply_coefficients()
            fitting.check_can_go_on(self._fitted, settings)
            self._fitted.partition = partition  # `sync` may be another
        return Fit(settings, own, rows, shape, options, state_bytes(settings, shape, self.early_stopping))

    def _train(
        self, fit: Fit, *, persistent: bool, keeper: Checkpoints | None = None
    ) -> AugmentReduceClassifier:  # fmt: skip
        """Choose the prior, train, and set the fitted attributes, also after an interruption."""

        def work(stop_asked: interrupts.StopAsked) -> None:
            settings, rows, watch = fit.settings, fit.rows, Stopwatch()
            if self._fitted.partition is not None:
                stop_asked = interrupts.asked_anywhere(stop_asked, self._fitted.partition)
            self._fitted.class_mean = None
            try:
                if keeper is not None and keeper.found is not None:
                    if self._fitted.ended:
                        return
                    settings = fitting.for_the_rest(self._fitted, settings, watch)
                if prior_search.wanted(fit.options, self._fitted, persistent=persistent):
                    with threads(self.n_jobs):
                        settings, rows = prior_search.find(
                            self._fitted, settings, fit.X, rows, fit.shape, fit.options, stop_asked
                        )
                    watch.lap("search")
                    if keeper is not None and not stop_asked():
                        keeper.write()
                elif isinstance(fit.options["prior_variance"], str) and self._fitted.found is not None:
                    settings = prior_search.with_found(settings, self._fitted.found)
                if stop_asked():
                    return
                if settings.direct:
                    direct_fit.run(self._fitted, settings, rows, fit.options, stop_asked, watch)
                else:
                    fitting.run(
                        self._fitted, settings, rows, fit.options, persistent=persistent, stop_asked=stop_asked,
                        watch=watch, keeper=keeper,
                    )  # fmt: skip
                self._fitted.class_mean = linear.mean_over_classes(self._fitted)
                if keeper is not None:
                    keeper.write()
            finally:
                self._publish()

        with memory_errors("This fit", self._fitted.bytes_needed, loads=True):
            interrupts.run_whole(work)
        if persistent and self.preset is None and not self._fitted.run.stopped_early:
            diagnosis.warn(self._fitted, self.history_, stacklevel=4)
        return self

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
        """Drops the cached coefficients, which share memory with the weights and would not after a copy."""
        self._apply_coefficients()
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_coefficients"}

    # ---- prediction ----

    def _scores_of(self, X: Any) -> linear.LinearScores:
        check_is_fitted(self)
        partition, error = self._fitted.partition, None
        try:
            X = self._checked_features(X)
            self._apply_coefficients()
        except Exception as found:
            if partition is None:
                raise
            error = found
        if partition is not None:
            agreement.same_rows(partition.ranks, X, error)
        return linear.LinearScores.of(X, self._fitted)

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
            return self.classes_[predict.argmax(scores_of, scores_of.n_rows, len(self.classes_)).numpy()]

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
            classes, probabilities = predict.top_k(noise, scores_of, scores_of.n_rows, K, k)
        return self.classes_[classes.numpy()], probabilities.to(scores_of.dtype).numpy()

    @contextlib.contextmanager
    def _predicting(self, scores_of: linear.LinearScores, numbers: int) -> Iterator[None]:
        """Set the threads, and check the memory, for a prediction of that many numbers per row."""
        needed = predict.bytes_needed(scores_of.n_rows, len(self.classes_), numbers)
        check_prediction(needed, scores_of.n_rows, len(self.classes_))
        n_jobs = 1 if scores_of.partition is not None else self.n_jobs  # blocks of rows in one order on all ranks
        with threads(n_jobs), memory_errors("This prediction", needed, loads=True):
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
        noise = self._noise()
        with self._predicting(scores_of, 1):
            if integral == "importance" and not noise.conjugate:
                values = predict.log_likelihood_importance(
                    noise, scores_of, codes, len(self.classes_), n_samples=n_samples,
                    generator=torch.Generator().manual_seed(self._fitted.seed),
                )  # fmt: skip
            else:
                values = predict.log_likelihood(noise, scores_of, codes, len(self.classes_))
        return float(np.average(values.numpy(), weights=sample_weight))

    def diagnose(self, X: Any, y: Any) -> diagnosis.Diagnosis:
        """Print what may be wrong with this model, judged on these rows (best held-out ones) or on training statistics.

        `"over-fit" in clf.diagnose(X, y)`; other names: "under-fit", "not converged", "loose bound", "unscaled
        columns", "other units", "label noise", "worse than class frequencies".
        """
        check_is_fitted(self)
        X = self._checked_features(X)
        codes = labels.encode(self.classes_, np.asarray(y))
        if len(codes) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} rows but y has {len(codes)} labels.")
        self._apply_coefficients()
        with threads(1 if self._fitted.partition is not None else self.n_jobs):
            return diagnosis.diagnose(self._fitted, self._noise(), as_rows(X), X, codes, self.history_)

    def sparsify(self) -> AugmentReduceClassifier:
        """Store the weights as a CSR matrix (weights never updated are zero). For prediction; `densify` reverts it."""
        check_is_fitted(self)
        self._apply_coefficients()
        if self._fitted.sparse_weight is None:
            weight = self._fitted.parameters.weight
            self._fitted.sparse_weight = sp.csr_matrix(weight.numpy())
            self._fitted.parameters.weight = torch.empty(0, weight.shape[1], dtype=weight.dtype)
            self._publish()
        return self

    def densify(self) -> AugmentReduceClassifier:
        """Store the weights as a dense array again, as training needs them."""
        check_is_fitted(self)
        self._apply_coefficients()
        if self._fitted.sparse_weight is not None:
            self._fitted.parameters.weight = torch.from_numpy(self._fitted.sparse_weight.toarray())
            self._fitted.sparse_weight = None
            self._publish()
        return self

    # ---- files ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model and the training state (exact resume) to one file, atomically and without pickle.

        With a process group all ranks call it, and the first one writes the file, an ordinary one of all classes.
        """
        check_is_fitted(self)
        self._apply_coefficients()
        partition = self._fitted.partition
        if partition is None:
            with one_torch_thread():
                saving.save(self, path)
            return
        whole = copy.copy(self)
        whole._fitted = saving.gathered(self._fitted)
        with partition.ranks.agree_on_errors("the saving of a model"), one_torch_thread():
            if partition.ranks.rank == 0:
                saving.save(whole, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **objects: Any) -> AugmentReduceClassifier:
        """Load a model saved by `save`; an invalid file raises `ModelFileError`.

        Parameters that were objects of your own (a noise) have to be passed again. So do `n_jobs` and `device`, which
        are not stored. Other parameters may be passed, too. With a `process_group` each rank keeps its own classes.
        """
        ranks = ranks_of(objects.get("process_group"))
        with ranks.agree_on_errors("the loading of a model"):
            size = check_load(path)
            with one_torch_thread(), memory_errors("This model", size):
                clf: AugmentReduceClassifier = saving.load(cls, path, objects)
        if ranks.size > 1:
            clf._share_out(ranks)
        return clf

    def _share_out(self, ranks: Ranks) -> None:
        """Keep this rank's classes of a model that all ranks have loaded."""
        fitted = self._fitted
        facts = {
            "the number of classes K": len(self.classes_),
            "iterations": fitted.clock.iteration,
            "seed": fitted.seed,
        }
        ranks.agree(facts | {"biases (hash)": agreement.digest(fitted.parameters.bias.numpy())}, "the loaded model")
        with ranks.agree_on_errors("the sharing out of classes"):
            shard = ClassShard(len(self.classes_), ranks.rank, ranks.size)
            saving.shared_out(fitted, Partition(ranks, shard, not self.sync))
        fitted.class_mean = linear.mean_over_classes(fitted) if fitted.sparse_weight is None else None
        self._publish()


def _within(dtype: np.dtype, values: np.ndarray) -> np.ndarray:
    """Convert to this dtype, clipped to its range."""
    return np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)


__all__ = ["AugmentReduceClassifier"]
