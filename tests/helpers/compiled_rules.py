"""The E steps that have compiled twins, each with its noise, for the tests of these twins."""

import torch

from augment_reduce.local.base import StepSize
from augment_reduce.local.remembered import NaturalGradient, Reparameterised
from augment_reduce.model.noise import Gumbel, Logistic, Normal

RULES = {
    "paper softmax": (Gumbel(), NaturalGradient(StepSize(1.0, 0.9, "epoch"), uses_updated=True, floor=False)),
    "our softmax": (Gumbel(), NaturalGradient()),
    "paper probit": (
        Normal(),
        Reparameterised(StepSize(0.01, 0.5, "epoch"), uses_updated=True, entropy_gradient=False),
    ),
    "our probit": (Normal(), Reparameterised()),
    "paper logistic": (Logistic(), Reparameterised(uses_updated=True)),
    "our logistic": (Logistic(), Reparameterised()),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
