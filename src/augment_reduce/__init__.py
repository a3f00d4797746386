"""Softmax, multinomial probit and multinomial logistic for very many classes, at a cost that does not grow with them.

    draw ──► score ──► reduce ──► solve ──► gradient ──► push
    which    psi of    a few sums  q of each  d bound /   weight rows
    classes  label     a row over  row from   d psi       move
             + sampled the classes its sums

    sampling/ model/scores.py  model/bounds.py, local/       optim.py         joined in training/step.py: START HERE

Names are imported when first used, so that `augment-reduce --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _address_space
from ._version import __version__

_address_space.check()

if TYPE_CHECKING:
    from .data import load_dataset
    from .estimator import AugmentReduceClassifier
    from .local.amortised import Amortised
    from .local.base import StepSize
    from .local.cross_fitting import CrossFitted
    from .local.remembered import NaturalGradient, Newton, Reparameterised
    from .model.noise import Gumbel, Logistic, Noise, Normal
    from .optim import Adagrad, Adam, RowwiseAdagrad, SectionFour
    from .persistence.files import ModelFileError
    from .sampling import (
        AllClasses,
        ClassSampler,
        Conditional,
        FeatureCandidates,
        FrequencyPerRow,
        FrequencyShared,
        HardNegativeCache,
        HeadAndTail,
        UniformPerRow,
        UniformShared,
    )

_HOME = {
    "AugmentReduceClassifier": "estimator",
    "ModelFileError": "persistence.files",
    "load_dataset": "data",
    **dict.fromkeys(("Noise", "Gumbel", "Normal", "Logistic"), "model.noise"),
    **dict.fromkeys(
        (
            "ClassSampler",
            "UniformPerRow",
            "UniformShared",
            "FrequencyPerRow",
            "FrequencyShared",
            "HeadAndTail",
            "HardNegativeCache",
            "FeatureCandidates",
            "Conditional",
            "AllClasses",
        ),
        "sampling",
    ),
    "Amortised": "local.amortised",
    "CrossFitted": "local.cross_fitting",
    "Grid": "local.grid",
    "Scalars": "kernels.cpu.scalars",
    **dict.fromkeys(("NaturalGradient", "Newton", "Reparameterised"), "local.remembered"),
    "StepSize": "local.base",
    **dict.fromkeys(("SectionFour", "Adagrad", "RowwiseAdagrad", "Adam"), "optim"),
}

__all__ = [
    "Adagrad",
    "Adam",
    "AllClasses",
    "Amortised",
    "AugmentReduceClassifier",
    "ClassSampler",
    "Conditional",
    "CrossFitted",
    "FeatureCandidates",
    "FrequencyPerRow",
    "FrequencyShared",
    "Grid",
    "Gumbel",
    "HardNegativeCache",
    "HeadAndTail",
    "Logistic",
    "ModelFileError",
    "NaturalGradient",
    "Newton",
    "Noise",
    "Normal",
    "Reparameterised",
    "RowwiseAdagrad",
    "Scalars",
    "SectionFour",
    "StepSize",
    "UniformPerRow",
    "UniformShared",
    "__version__",
    "load_dataset",
]


_RENAMED = {"FeaturePointed": "sampling"}  # which warns


def __getattr__(name: str) -> Any:
    if name in _HOME or name in _RENAMED:
        return getattr(import_module(f".{(_HOME | _RENAMED)[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
