"""Softmax, multinomial probit and multinomial logistic for very many classes, at a cost that does not grow with them.

    rows ─► class sampler ─► sampled scores psi ─► augmented bound (E | M) ─► row optimiser ─► predict
    data/    sampler.py       scores.py             local.py | bounds.py       optim.py         predict.py
                          all joined in vem.py, where reading starts

Names are imported when first used, so that `augment-reduce --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _address_space
from ._version import __version__

_address_space.check()

if TYPE_CHECKING:
    from .amortised import Amortised
    from .crossed import CrossFitted
    from .data import load_dataset
    from .estimator import AugmentReduceClassifier
    from .files import ModelFileError
    from .local import NaturalGradient, Newton, Reparameterised, StepSize
    from .noise import Gumbel, Logistic, Noise, Normal
    from .optim import Adagrad, Adam, RowwiseAdagrad, SectionFour
    from .sampler import (
        AllClasses,
        ClassSampler,
        Conditional,
        FeaturePointed,
        FrequencyPerRow,
        FrequencyShared,
        HardNegativeCache,
        HeadAndTail,
        UniformPerRow,
        UniformShared,
    )

_HOME = {
    "AugmentReduceClassifier": "estimator",
    "ModelFileError": "files",
    "load_dataset": "data",
    **dict.fromkeys(("Noise", "Gumbel", "Normal", "Logistic"), "noise"),
    **dict.fromkeys(
        (
            "ClassSampler",
            "UniformPerRow",
            "UniformShared",
            "FrequencyPerRow",
            "FrequencyShared",
            "HeadAndTail",
            "HardNegativeCache",
            "FeaturePointed",
            "Conditional",
            "AllClasses",
        ),
        "sampler",
    ),
    "Amortised": "amortised",
    "CrossFitted": "crossed",
    **dict.fromkeys(("NaturalGradient", "Newton", "Reparameterised", "StepSize"), "local"),
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
    "FeaturePointed",
    "FrequencyPerRow",
    "FrequencyShared",
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
    "SectionFour",
    "StepSize",
    "UniformPerRow",
    "UniformShared",
    "__version__",
    "load_dataset",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
