"""From validated rows to a trained model: settings, memory, the search for the prior, training."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
from sklearn.utils import check_random_state

from ..config import mapped
from ..config.defaults import Settings, is_small, resolve, resolve_dtype, solves_directly
from ..config.shape import Shape
from ..config.validation import check_memory, check_over_ranks, check_scale, check_weights, ranks_of, state_bytes
from ..kernels.rows import MappedDenseRows, MappedRows, Rows
from ..kernels.threads import one_torch_thread
from ..model.noise import Gumbel, Noise
from ..persistence.checkpoints import Checkpoints
from ..sharding import ClassShard, Partition, Ranks
from ..support.limits import memory_errors
from ..training import agreement, diagnosis, direct_fit, interrupts, linear, prior_search, review
from ..training import fit as fitting
from ..training.fit import threads
from ..training.fitted import Fitted, TrainingRows, check_can_go_on, for_the_rest, start, units
from ..training.loop import Stopwatch
from ..training.merging import merged
from .coefficients import Coefficients


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `_prepare` passes to `_train`."""

    settings: Settings
    X: Rows  # scaled features
    rows: TrainingRows  # the training rows
    shape: Shape
    options: dict[str, Any]
    state_bytes: int  # of a checkpoint


class Fitting(Coefficients):
    """The part that `fit` and `partial_fit` share."""

    def _ranks(self) -> Ranks:
        """The ranks of this fit; those of the existing model if its process group is the same."""
        ranks = ranks_of(self.process_group)
        fitted: Fitted | None = getattr(self, "_fitted", None)
        if fitted is None or fitted.partition is None:
            return ranks
        return fitted.partition.ranks if fitted.partition.ranks.group is ranks.group else ranks

    def _agreed(self, rows: TrainingRows, ranks: Ranks, **more: Any) -> Partition | None:
        """This rank's classes, after checking that all ranks have the same rows, parameters and `more`; None for one
        process."""
        if ranks.size == 1:
            return None
        facts = agreement.facts_of_fit(self.get_params(deep=False), rows, self.classes_)
        ranks.agree(facts | {name: repr(value) for name, value in more.items()}, "the fit")
        return Partition(ranks, ClassShard(len(self.classes_), ranks.rank, ranks.size), not self.sync)

    def _prepare(
        self, noise: Noise, rows: TrainingRows, partition: Partition | None, *, anew: bool, stream: bool = False
    ) -> Fit:  # fmt: skip
        """Resolve all settings; allocate parameters, or check that training can continue with the existing ones."""
        ranks, seed = Ranks(None) if partition is None else partition.ranks, None
        if partition is not None and self.random_state is None:
            seed = agreement.common_seed(ranks, self._seed())
        with ranks.agree_on_errors("the preparation of a fit"):
            if not anew:
                linear.check_same_ranks(self._fitted, partition)
            return self._prepare_here(noise, rows, partition, seed, anew=anew, stream=stream)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _prepare_here(
        self, noise: Noise, rows: TrainingRows, partition: Partition | None, seed: int | None, *, anew: bool,
        stream: bool,
    ) -> Fit:  # fmt: skip
        options = self.get_params(deep=False)
        n_here = len(self.classes_) if partition is None else len(partition.shard)
        plain = Shape(len(rows.active()), rows.X.n_features, len(self.classes_), rows.X.n_nonzero, stream)
        if isinstance(rows.X, MappedRows | MappedDenseRows):
            mapped.check_device(self.device)
            if solves_directly(options, noise, plain) or is_small(Gumbel(), plain):
                rows = dataclasses.replace(rows, X=rows.X.in_memory())
        dtype = resolve_dtype(options["dtype"], rows.torch_dtype)
        if anew:
            check_weights(n_here, rows.X.n_features, dtype)
        if solves_directly(options, noise, plain):
            rows = merged(rows)
        active, own = rows.active(), rows.X
        scaling = units(own, active, rows.weight, options, stream) if anew else self._fitted.scaling
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
                self._fitted = start(settings, shape.n_classes, shape.n_features, seed, bytes_needed, partition)
            self._fitted.scaling, self._fitted.centred = scaling, self.preset is None
        else:
            self.densify()
            self._apply_coefficients()
            check_can_go_on(self._fitted, settings)
            self._fitted.partition = partition  # `sync` may have changed
        return Fit(settings, own, rows, shape, options, state_bytes(settings, shape, self.early_stopping))

    def _train(
        self, fit: Fit, *, persistent: bool, keeper: Checkpoints | None = None
    ) -> Self:  # fmt: skip
        """Choose the prior, train, and set the fitted attributes, also after an interruption."""

        def work(stop_asked: interrupts.StopAsked) -> None:
            settings, rows, watch = fit.settings, fit.rows, Stopwatch()
            if self._fitted.partition is not None:
                stop_asked = interrupts.asked_anywhere(stop_asked, self._fitted.partition)
            self._fitted.class_mean = None
            try:
                if keeper is not None and keeper.found is not None:
                    if self._fitted.ended:
                        self._fitted.class_mean = linear.mean_over_classes(self._fitted)
                        return
                    settings = for_the_rest(self._fitted, settings, watch)
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
                    judge = review.review_of(
                        self._fitted, settings, rows, fit.shape, fit.options, stop_asked, persistent=persistent
                    )
                    fitting.run(
                        self._fitted, settings, rows, fit.options, persistent=persistent, stop_asked=stop_asked,
                        watch=watch, keeper=keeper, review=judge,
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
