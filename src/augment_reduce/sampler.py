"""Which classes stand for the rest, and with what weights.

A sampler draws classes S for a minibatch and says omega such that, for every row with label y,

    E[ sum_{k in S} omega_k f_k ] = sum_{k != y} f_k          for any f,

which is all that the bounds need of it (paper, "Reduce by subsampling"). Classes are drawn for each row
(`classes` is (B, S)) or once for the whole minibatch (`classes` is (S,)); a pair in which a row meets its
own label is masked, and counts for nothing.

    sampler                    drawn                                          omega_k
    UniformPerRow              without replacement from the K-1 others        (K-1) / |S|
    UniformShared              without replacement from all K, label masked   (K-1) / |S without y|   (K where |S| = 1)
    FrequencyPerRow            with replacement from q over the others        (1 - q_y) / (|S| q_k)
    FrequencyShared            with replacement from q, label masked          1 / (|S| q_k)
    HeadAndTail                the most frequent for certain, one of each     1; in the tail 1 / E[times drawn]
                               stratum of the others, label masked
    HardNegativeCache          as HeadAndTail, and for certain what was       the same
                               hard for these rows at their last visit
    FeaturePointed             as HeadAndTail, and for each row, for          the same; 1
                               certain, what its features point at
    Conditional                with replacement from q(k | x) over the        (1 - q(y | x)) / (|S| q(k | x))
                               others: clusters of classes scored for the row
    AllClasses                 every class, label masked                      1
"""

from __future__ import annotations

from .samplers.base import (
    ClassSampler,
    DrawWithoutReplacement,
    Half,
    Minibatch,
    Sampled,
    certain_classes,
    frequencies,
)
from .samplers.cache import HardNegativeCache
from .samplers.conditional import Conditional
from .samplers.fixed import AllClasses, FrequencyPerRow, FrequencyShared, HeadAndTail, UniformPerRow, UniformShared
from .samplers.pointed import FeaturePointed

__all__ = [
    "SAMPLERS", "AllClasses", "ClassSampler", "Conditional", "DrawWithoutReplacement", "FeaturePointed",
    "FrequencyPerRow", "FrequencyShared", "Half", "HardNegativeCache", "HeadAndTail", "Minibatch", "Sampled",
    "UniformPerRow", "UniformShared", "certain_classes", "frequencies", "resolve_sampler",
]  # fmt: skip

SAMPLERS: dict[str, type[ClassSampler]] = {
    cls.name: cls
    for cls in (
        UniformPerRow, UniformShared, FrequencyPerRow, FrequencyShared, HeadAndTail, HardNegativeCache, FeaturePointed,
        Conditional, AllClasses,
    )
}  # fmt: skip


def resolve_sampler(class_sampling: str | ClassSampler) -> ClassSampler:
    """A sampler by its name, or the object itself."""
    if isinstance(class_sampling, ClassSampler):
        return class_sampling
    if isinstance(class_sampling, str) and class_sampling in SAMPLERS:
        return SAMPLERS[class_sampling]()
    raise ValueError(
        f"Expected class_sampling to be one of {', '.join(map(repr, SAMPLERS))} or a ClassSampler object, "
        f"found {class_sampling!r}."
    )
