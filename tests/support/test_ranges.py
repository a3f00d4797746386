"""What an optimiser, a local step or a sampler cannot be made with is refused when it is made, by name."""

import math

import numpy as np
import pytest

from augment_reduce import (
    Adagrad,
    Adam,
    FeatureCandidates,
    FrequencyShared,
    Newton,
    RowwiseAdagrad,
    SectionFour,
    StepSize,
)
from augment_reduce.local.amortised import Amortised
from augment_reduce.local.cross_fitting import CrossFitted
from augment_reduce.support.ranges import check_number

REFUSED = [
    (StepSize, {"scale": -1.0}),
    (StepSize, {"scale": math.inf}),
    (StepSize, {"power": -0.5}),
    (StepSize, {"scale": "1"}),
    (StepSize, {"counts": "rows"}),
    (Newton, {"n_nodes": 0}),
    (Newton, {"n_nodes": 10**9}),
    (Newton, {"n_moves": 0}),
    (Newton, {"n_nodes": 5.0}),
    (Newton, {"n_nodes": True}),
    (CrossFitted, {"n_nodes": 257}),
    (Amortised, {"floor": -1.0}),
    (CrossFitted, {"n_moves": -1}),
    (Amortised, {"n_nodes": 0}),
    (Adagrad, {"learning_rate": math.nan}),
    (Adagrad, {"eps": -1e-9}),
    (RowwiseAdagrad, {"learning_rate": -0.1}),
    (Adam, {"beta1": 1.0}),
    (Adam, {"beta2": -0.1}),
    (Adam, {"eps": math.inf}),
    (SectionFour, {"decay_every": 0}),
    (SectionFour, {"kappa": 1.5}),
    (SectionFour, {"decay": 2}),
    (FrequencyShared, {"power": 1e308}),
    (FeatureCandidates, {"power": -1.0}),
]


@pytest.mark.parametrize(("cls", "arguments"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name(cls, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"Expected (a )?{name}"):
        cls(**arguments)


def test_numbers_of_any_kind_are_numbers():
    for value in (3, 3.0, np.float32(3), np.int64(3)):
        check_number("x", value, 0, 3)
    check_number("x", np.int32(3), 0, 3, whole=True)


def test_a_rate_that_has_decayed_a_billion_times_takes_no_memory():
    """The rates of many decays are multiplied one at a time, as the authors do; not of a million million."""
    rule = SectionFour(decay_every=1, decay=0.9)
    few, many = rule.scalars(40)[0], rule.scalars(2**50)[0]
    rate = 0.02
    for _ in range(40):
        rate *= 0.9
    assert few == rate * 40.0 ** (-0.5 + 1e-16)
    assert many == 0.0
