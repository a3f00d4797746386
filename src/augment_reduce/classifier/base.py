"""The attributes that the base classes of the classifier share."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from ..model.compiled import compiled
from ..model.noise import Noise, resolve_noise
from ..training.fitted import Fitted


class ClassifierBase(BaseEstimator):
    """Parameters and fitted attributes that are used in more than one base class."""

    model: str | Noise
    preset: str | None
    prior_variance: float | str | None
    early_stopping: bool
    validation_fraction: float
    random_state: int | np.random.RandomState | None
    device: str
    n_jobs: int | None
    process_group: Any
    sync: bool

    classes_: np.ndarray
    history_: dict[str, np.ndarray]
    _fitted: Fitted

    def _noise(self) -> Noise:
        return compiled(resolve_noise(self.model))
