"""Class samplers: the sampled classes and their weights.

A sampler draws classes S for a minibatch and weights omega such that, for every row with label y,

    E[ sum_{k in S} omega_k f_k ] = sum_{k != y} f_k          for any f,

as required by the bounds (paper, "Reduce by subsampling"). Classes are drawn for each row (`classes` is (B, S)) or once
for the whole minibatch (`classes` is (S,)); a row's own label is masked.

    sampler                    drawn                                          omega_k
    UniformPerRow              without replacement from the K-1 others        (K-1) / |S|
    UniformShared              without replacement from all K, label masked   (K-1) / |S without y|   (K where |S| = 1)
    FrequencyPerRow            with replacement from q over the others        (1 - q_y) / (|S| q_k)
    FrequencyShared            with replacement from q, label masked          1 / (|S| q_k)
    HeadAndTail                the most frequent always, one of each          1; in the tail 1 / E[number of draws]
                               stratum of the others, label masked
    HardNegativeCache          as HeadAndTail, and always classes with        the same
                               large gradients at the rows' last visit
    FeatureCandidates          as HeadAndTail, and for each row always        the same; 1
                               candidate classes by its features
    Conditional                with replacement from q(k | x) over the        (1 - q(y | x)) / (|S| q(k | x))
                               others: clusters of classes scored for the row
    AllClasses                 every class, label masked                      1
"""

from __future__ import annotations

import warnings
from typing import Any

from .base import (
    ClassSampler,
    DrawWithoutReplacement,
    Half,
    Minibatch,
    Sampled,
    TrainingData,
    certain_classes,
    frequencies,
)
from .cache import HardNegativeCache
from .candidates import FeatureCandidates
from .conditional import Conditional
from .fixed import AllClasses, FrequencyPerRow, FrequencyShared, HeadAndTail, UniformPerRow, UniformShared

__all__ = [
    "SAMPLERS", "AllClasses", "ClassSampler", "Conditional", "DrawWithoutReplacement", "FeatureCandidates",
    "FrequencyPerRow", "FrequencyShared", "Half", "HardNegativeCache", "HeadAndTail", "Minibatch", "Sampled",
    "TrainingData", "UniformPerRow", "UniformShared", "certain_classes", "frequencies", "resolve_sampler",
]  # fmt: skip

SAMPLERS: dict[str, type[ClassSampler]] = {
    cls.name: cls
    for cls in (
        UniformPerRow, UniformShared, FrequencyPerRow, FrequencyShared, HeadAndTail, HardNegativeCache,
        FeatureCandidates, Conditional, AllClasses,
    )
}  # fmt: skip
RENAMED = {"pointed-shared": FeatureCandidates.name, "FeaturePointed": FeatureCandidates.__name__}


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        return globals()[renamed(name)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def renamed(name: str) -> str:
    """The new name of a renamed sampler, with a warning; other names unchanged."""
    if name not in RENAMED:
        return name
    warnings.warn(f"{name!r} is now {RENAMED[name]!r}; use that.", FutureWarning, stacklevel=3)
    return RENAMED[name]


def resolve_sampler(class_sampling: str | ClassSampler) -> ClassSampler:
    """A sampler by its name, or the object itself."""
    if isinstance(class_sampling, ClassSampler):
        return class_sampling
    class_sampling = renamed(class_sampling) if isinstance(class_sampling, str) else class_sampling
    if isinstance(class_sampling, str) and class_sampling in SAMPLERS:
        return SAMPLERS[class_sampling]()
    raise ValueError(
        f"Expected class_sampling to be one of {', '.join(map(repr, SAMPLERS))} or a ClassSampler object, "
        f"found {class_sampling!r}."
    )
