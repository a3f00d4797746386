"""Results of small fits stay what they were, on any machine: to rounding, which 40 steps do not blow up."""

import json

import numpy as np
import pytest

from tests.helpers.golden_fits import FILE, FITS, HEADS, fit, head_numbers, name_of, numbers_of_fit

KNOWN = json.loads(FILE.read_text(encoding="utf-8"))
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # of the largest number; sums of another machine may be in another order


def check(found, name, tolerance):
    expected = np.array(KNOWN[name])
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("case", FITS, ids=name_of)
def test_a_fit_is_what_it_was(case):
    one, two = (fit(*case, n_jobs=n) for n in (1, 2))
    np.testing.assert_array_equal(one.coef_, two.coef_)
    check(numbers_of_fit(one), name_of(case), TOLERANCE[case[-1]])


@pytest.mark.parametrize("case", HEADS, ids=name_of)
def test_a_head_is_what_it_was(case):
    check(head_numbers(*case), name_of(("head", *case)), TOLERANCE["float32"])


def test_there_is_nothing_else():
    assert len(KNOWN) == len(FITS) + len(HEADS) == 30
