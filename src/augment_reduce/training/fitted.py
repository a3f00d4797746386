"""What a fit is given and what outlives it: training rows, and the model with all that training needs to go on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..config.defaults import Settings, scales_features
from ..config.features import FeatureScaling
from ..kernels.cpu.row_groups import RowGroups
from ..kernels.protocol import Parameters
from ..kernels.rows import Rows
from ..local.base import Clock, LocalState
from ..optim import RowOptimizer
from ..sampling import TrainingData
from ..sharding import Partition
from ..support.memory import zeros
from ..support.seeds import mix
from .cross_validation import Found
from .loop import SECONDS, Run, Stopwatch

ROWS_FOR_UNITS = 100  # of a stream, from which its columns' means and deviations are known
TORN = (
    "an exception ended a fit in the middle of a step, so some weights have moved and others have not. It predicts "
    "as it is; training that goes on from it does not end where an undisturbed fit would."
)


@dataclass
class TrainingRows:
    """Checked rows with labels in 0..K-1 and weights (None: all one)."""

    X: Rows
    codes: np.ndarray
    weight: np.ndarray | None
    groups: RowGroups | None = None  # of duplicates among the active rows; None: dense, or not looked for

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.X.dtype == np.float32 else torch.float64

    def training_data(self, active: np.ndarray) -> TrainingData:
        """What a sampler may look at."""
        return TrainingData(self.X, active, self.codes[active], self.groups)

    def active(self) -> np.ndarray:
        """Rows that count: a weight of zero is a row that is not there."""
        if self.weight is None:
            return np.arange(self.X.n_rows)
        active = np.flatnonzero(self.weight > 0)
        if not len(active):
            raise ValueError(
                "All sample weights are zero: there is nothing to fit. Pass positive weights for some rows."
            )
        return active


@dataclass
class Fitted:
    """What outlives a fit: parameters, optimiser state, each row's q, clock, seed, history."""

    parameters: Parameters
    seed: int
    bytes_needed: int
    clock: Clock = field(default_factory=lambda: Clock(0, 0))
    local: LocalState = field(default_factory=dict)
    sampler: dict[str, Tensor] = field(default_factory=dict)  # what a sampler that learns has learned
    run: Run = field(default_factory=Run)
    rows_seen: int = 0
    stream_steps: int = 0  # of partial_fit, which rates that fall over a fit do not count
    class_counts: np.ndarray = field(default_factory=lambda: np.zeros(0))
    feature_counts: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sparse_weight: sp.csr_matrix | None = None  # in place of parameters.weight after sparsify()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))  # of the last fit
    scaling: FeatureScaling | None = None  # the weights are of (x - centre) / scale; None: of x
    found: Found | None = None  # the prior, where it was looked for
    factor: float = 1.0  # of all scores: 1 / temperature
    centred: bool = False  # whether coefficients are shown centred over the classes
    converged: bool = True
    torn: bool = False  # whether a fit was left in the middle of a step, so that none can go on exactly
    partition: Partition | None = None  # where other processes have some of the classes: `parameters` are of the rest
    late: dict[str, Tensor] = field(default_factory=dict)  # of a step over ranks, in a checkpoint (`ShardPass.pause`)
    class_mean: tuple[np.ndarray, float] | None = None  # of weights (D,) and biases over all classes, for a partition

    @property
    def n_classes(self) -> int:
        """K, of all processes."""
        return len(self.class_counts)

    @property
    def ended(self) -> bool:
        """Whether a fit has come to its end: it leaves no plan; the search before it leaves no history."""
        return self.run.plan is None and bool(self.run.history["iteration"])


def for_the_rest(fitted: Fitted, settings: Settings, watch: Stopwatch) -> Settings:
    """The settings with which a fit goes on from its checkpoint to the end that it was planned to have."""
    watch.seconds.update(fitted.seconds)
    if fitted.run.plan is None:  # from the search for the prior, which leaves no plan
        return settings
    return replace(settings, max_iter=fitted.run.plan.last - fitted.clock.iteration)


def start(
    settings: Settings, n_classes: int, n_features: int, seed: int, bytes_needed: int,
    partition: Partition | None = None,
) -> Fitted:  # fmt: skip
    """Fresh parameters: zeros, or Gaussian with the preset's scales, from the seed. Of a partition the rows that are
    here, of the same draws (for which there have to be all rows for a moment)."""
    generator = torch.Generator().manual_seed(mix(seed, 0, 0))
    scale_w, scale_b = settings.init_scale
    here = n_classes if partition is None or scale_w else len(partition.shard)
    weight = zeros((here, n_features), settings.dtype)
    bias = torch.zeros(n_classes, dtype=settings.dtype)
    if scale_w:
        weight.normal_(0.0, scale_w, generator=generator)
    if scale_b:
        bias.normal_(0.0, scale_b, generator=generator)
    if partition is not None:
        weight, bias = partition.own(weight) if scale_w else weight, partition.own(bias)
    parameters = Parameters(weight, bias, [], [])
    if not settings.direct:
        begin_state(parameters, settings.optimizer)
    return Fitted(
        parameters, seed, bytes_needed, class_counts=np.zeros(n_classes),
        feature_counts=np.zeros(n_features, np.int64), partition=partition,
    )  # fmt: skip


def units(
    X: Rows, active: np.ndarray, weight: np.ndarray | None, options: dict[str, Any], stream: bool
) -> FeatureScaling | None:
    """Of the features, for training; None: as they are.

    They stay where zero is where the intercept is not free, or where too few rows of a stream have been seen. A prior
    that was asked for in numbers is about the features as they are.
    """
    if not scales_features(options):
        return None
    few = stream and len(active) < ROWS_FOR_UNITS
    free = options["fit_intercept"] and options["intercept_prior_variance"] is None
    scaling = FeatureScaling.of(X, active, weight, centred=free and not few)
    if few:
        scaling = scaling.in_one_unit()
    return None if scaling.is_identity else scaling


def begin_state(parameters: Parameters, optimizer: RowOptimizer) -> None:
    parameters.weight_state = optimizer.init_state(parameters.weight)
    parameters.bias_state = optimizer.init_state(parameters.bias)


def check_can_go_on(fitted: Fitted, settings: Settings) -> None:
    """A fit that goes on needs the optimiser state it had; and goes on exactly only from between two steps."""
    if fitted.torn:
        warnings.warn(f"Going on: {TORN}", RuntimeWarning, stacklevel=4)
    if settings.direct:
        return
    if not fitted.parameters.weight_state:  # solved directly until now
        begin_state(fitted.parameters, settings.optimizer)
    expected = [tuple(s.shape) for s in settings.optimizer.init_state(fitted.parameters.bias.new_empty(0, 1))]
    found = fitted.parameters.weight_state
    if len(expected) != len(found) or any(len(e) != s.ndim for e, s in zip(expected, found, strict=True)):
        raise ValueError(
            f"optimizer={settings.optimizer.name!r} keeps another kind of state than the one this model was trained "
            "with, so it cannot go on. Use the same optimizer, or fit anew with warm_start=False."
        )
