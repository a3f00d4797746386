"""Model files of the classifier, and models loaded with sharded classes."""

from __future__ import annotations

import copy
import os
from typing import Any, Self

from sklearn.utils.validation import check_is_fitted

from ..config.validation import check_load, ranks_of
from ..kernels.threads import one_torch_thread
from ..persistence import saving
from ..sharding import ClassShard, Partition, Ranks
from ..support.limits import memory_errors
from ..training import agreement, linear
from .coefficients import Coefficients


class Files(Coefficients):
    """`save` and `load`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model and the training state (exact resume) to one file, atomically and without pickle.

        With a process group it is collective: the first rank writes an ordinary file of all classes.
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
    def load(cls, path: str | os.PathLike[str], **objects: Any) -> Self:
        """Load a model saved by `save`; an invalid file raises `ModelFileError`.

        User-defined objects among the parameters (a noise), `n_jobs` and `device` are not stored and have to be passed
        again. Other parameters may be passed, too. With a `process_group` each rank keeps its own classes.
        """
        ranks = ranks_of(objects.get("process_group"))
        with ranks.agree_on_errors("the loading of a model"):
            size = check_load(path)
            with one_torch_thread(), memory_errors("This model", size):
                clf: Self = saving.load(cls, path, objects)
        if ranks.size > 1:
            clf._share_out(ranks)
        return clf

    def _share_out(self, ranks: Ranks) -> None:
        """Keep only this rank's classes of a model that every rank has loaded completely."""
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
