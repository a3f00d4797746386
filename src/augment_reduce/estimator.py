"""AugmentReduceClassifier, the scikit-learn estimator: parameters, fits, streams. Other methods: `classifier/`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state

from .classifier.files import Files
from .classifier.fitting import Fitting
from .classifier.predictions import Predictions
from .config import labels, mapped
from .config.validation import is_integer
from .kernels.rows import as_rows
from .local.base import LocalStep
from .model.noise import Noise
from .optim import RowOptimizer
from .persistence.checkpoints import check_every, checkpoints
from .sampling import ClassSampler
from .support.seeds import mix
from .training import stream
from .training.fitted import TrainingRows

BUFFER_ROWS = 1 << 16  # of a stream, mixed before they are trained on


class AugmentReduceClassifier(ClassifierMixin, Predictions, Fitting, Files):
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

        Memory-mapped arrays, CSR or dense (float32 or float64, C-ordered), are never copied: memory does not grow with
        the rows but for a few numbers each. `fit(rows)`, without y, takes what has rows and labels:
        `open_mapped(folder)`, `load_dataset(name).train`.

        `checkpoint` names a folder for the training state, written every `every` iterations (None: every ten minutes),
        the last two kept. The same call, with the same rows and parameters, goes on from there bit for bit, whatever
        ended the fit; once it has ended it returns the fitted model. Small fits without steps, of a second or two, are
        written at their end only, and a fit that was ended while it chose its prior chooses again. Over ranks all of
        them see the folder, and each writes its own classes; another number of ranks goes on to rounding.
        """
        with contextlib.ExitStack() as stack, self._unchanged_if_refused():
            ranks = self._ranks()
            with ranks.agree_on_errors("the checks of fit"):
                noise = self._checked_noise()
                go_on = self.warm_start and hasattr(self, "_fitted")
                self._check_checkpoint(checkpoint, every, go_on)
                X, y = mapped.rows_and_labels(X, y)
                X, y, weight = self._checked_rows(X, y, sample_weight, reset=not go_on)
                if go_on:
                    codes = labels.encode(self.classes_, y)
                else:
                    self.classes_, codes = labels.classes_of(y)
                    labels.check_classes(self.classes_)
                rows = TrainingRows(
                    as_rows(X), codes, labels.row_weights(self.class_weight, self.classes_, codes, weight)
                )
            partition = self._agreed(rows, ranks, checkpoint=checkpoint, every=every)
            keeper = stack.enter_context(checkpoints(self, checkpoint, every, rows, partition))
            if keeper is not None and keeper.found is not None:
                self.__dict__.pop("_coefficients", None)
                self._fitted, go_on = keeper.found, True
            prepared = self._prepare(noise, rows, partition, anew=not go_on)
            if keeper is not None:
                keeper.check_space(prepared.state_bytes)
            held = stack.pop_all()
        with held:
            return self._train(prepared, persistent=True, keeper=keeper)

    @staticmethod
    def _check_checkpoint(checkpoint: str | os.PathLike[str] | None, every: int | None, go_on: bool) -> None:
        check_every(checkpoint, every)
        if checkpoint is not None and go_on:
            raise ValueError(
                "warm_start=True goes on with the model in memory, checkpoint= with the one in its folder. Set "
                "warm_start=False, or leave out checkpoint and save the model."
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
                rows = TrainingRows(
                    as_rows(X), codes, labels.row_weights(self.class_weight, self.classes_, codes, weight)
                )
            prepared = self._prepare(noise, rows, self._agreed(rows, ranks), anew=first, stream=True)
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


__all__ = ["AugmentReduceClassifier"]
