"""Precision, perplexity, calibration: every number here was worked out by hand, or is what a definition demands."""

import numpy as np
import pytest
import torch
from scipy import sparse

from augment_reduce.model.bounds import softmax_bound
from augment_reduce.reports.figures import Reliable, draw_reliability
from augment_reduce.reports.metrics import (
    class_codes,
    expected_calibration_error,
    perplexity,
    precision_at,
    reliability_curve,
)

#  bins of (0, .25], (.25, .5], (.5, .75], (.75, 1]:   one row   none   two rows   three rows
SURE = [0.2, 0.6, 0.75, 0.8, 0.9, 1.0]
RIGHT = [1, 0, 1, 1, 0, 1]


def test_reliability_by_hand():
    found = reliability_curve(SURE, RIGHT, n_bins=4)
    np.testing.assert_array_equal(found.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(found.count, [1, 0, 2, 3])  # 0.75 is in the bin that ends there
    np.testing.assert_array_equal(found.weight, [1, 0, 2, 3])
    np.testing.assert_allclose(found.confidence, [0.2, np.nan, 0.675, 0.9], rtol=1e-15)
    np.testing.assert_allclose(found.accuracy, [1.0, np.nan, 0.5, 2 / 3], rtol=1e-15)


def test_expected_calibration_error_by_hand():
    by_hand = (1 * 0.8 + 2 * 0.175 + 3 * (0.9 - 2 / 3)) / 6
    assert expected_calibration_error(SURE, RIGHT, n_bins=4) == pytest.approx(by_hand, rel=1e-14)
    assert expected_calibration_error(SURE, RIGHT, n_bins=1) == pytest.approx(4.25 / 6 - 4 / 6, rel=1e-13)


def test_weights_by_hand_and_as_repeated_rows():
    weight = [1.0, 3.0, 1.0, 0.0, 1.0, 1.0]
    found = reliability_curve(SURE, RIGHT, weight, n_bins=4)
    np.testing.assert_array_equal(found.count, [1, 0, 2, 2])  # the row of weight 0 is absent
    np.testing.assert_allclose(found.confidence[2:], [(3 * 0.6 + 0.75) / 4, 0.95], rtol=1e-15)
    np.testing.assert_allclose(found.accuracy[2:], [1 / 4, 1 / 2], rtol=1e-15)
    by_hand = (1 * 0.8 + 4 * (2.55 / 4 - 1 / 4) + 2 * 0.45) / 7
    assert found.error == pytest.approx(by_hand, rel=1e-14)
    times = np.repeat(np.arange(6), np.array(weight, int))
    for strategy in ("uniform", "quantile"):
        for n_bins in (1, 2, 3, 4, 7):
            weighted = reliability_curve(SURE, RIGHT, weight, n_bins=n_bins, strategy=strategy)
            repeated = reliability_curve(np.take(SURE, times), np.take(RIGHT, times), n_bins=n_bins, strategy=strategy)
            np.testing.assert_array_equal(weighted.edges, repeated.edges)
            np.testing.assert_allclose(weighted.confidence, repeated.confidence, rtol=1e-14)
            assert weighted.error == pytest.approx(repeated.error, rel=1e-13)


def test_equal_mass_by_hand():
    found = reliability_curve(SURE[::-1], RIGHT[::-1], n_bins=3, strategy="quantile")  # rows in any order
    np.testing.assert_array_equal(found.edges, [0.2, 0.6, 0.8, 1.0])
    np.testing.assert_array_equal(found.count, [2, 2, 2])
    np.testing.assert_allclose(found.confidence, [0.4, 0.775, 0.95], rtol=1e-15)
    np.testing.assert_array_equal(found.accuracy, [0.5, 1.0, 0.5])
    assert found.error == pytest.approx((0.1 + 0.225 + 0.45) / 3, rel=1e-14)


def test_equal_mass_keeps_equal_confidences_together():
    sure, right = [0.1, 0.5, 0.5, 0.5, 0.5, 0.9], [0, 1, 0, 1, 0, 1]
    found = reliability_curve(sure, right, n_bins=3, strategy="quantile")
    np.testing.assert_array_equal(found.count, [5, 1])
    same = reliability_curve([0.3] * 4, [1, 0, 0, 0], n_bins=10, strategy="quantile")
    np.testing.assert_array_equal(same.count, [4])
    assert same.error == pytest.approx(0.05, rel=1e-14)


def test_tenths_fall_where_people_expect_them():
    """0.7 * 10 is 7.000000000000001 in floating point; 0.7 still belongs to (0.6, 0.7]. 0 belongs to the first bin."""
    sure = np.arange(11) / 10
    found = reliability_curve(sure, np.ones(11), n_bins=10)
    np.testing.assert_array_equal(found.count, [2, *[1] * 9])


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_calibrated_and_overconfident_models(strategy):
    """A model right as often as it says has an error near that of chance alone; one that adds 0.1 has 0.1 more."""
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.1, 0.9, size=200_000)
    right = rng.random(len(truth)) < truth
    assert expected_calibration_error(truth, right, strategy=strategy) < np.sqrt(15 / len(truth))
    assert expected_calibration_error(truth + 0.1, right, strategy=strategy) == pytest.approx(0.1, abs=0.004)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": [0.5, 1.2]}, r"confidence in \[0, 1\].*1 of 2.*row 1: 1.2"),
        ({"confidence": [np.nan, 0.5]}, "row 0: nan"),
        ({"correct": [0, 2]}, "correct to be 0 or 1"),
        ({"correct": [1]}, "shapes"),
        ({"confidence": [[0.5], [0.5]]}, r"predict_topk"),
        ({"sample_weight": [1.0, -1.0]}, "sample_weight >= 0"),
        ({"sample_weight": [0.0, 0.0]}, "at least one row"),
        ({"confidence": [], "correct": []}, "at least one row"),
        ({"n_bins": 0}, "n_bins of at least 1"),
        ({"strategy": "equal"}, "'uniform', 'quantile'"),
    ],
)
def test_nonsense_is_refused(change, message):
    good = {"confidence": [0.5, 0.6], "correct": [0, 1]}
    with pytest.raises(ValueError, match=message):
        expected_calibration_error(**(good | change))


def test_a_reliability_diagram_of_several_models_and_sets(tmp_path):
    """Names, sets and errors are all in the picture; empty bins and a single row are no obstacle."""
    models = [
        Reliable("plain", reliability_curve(SURE, RIGHT, n_bins=4)),
        Reliable("one row", reliability_curve([1], [1])),
    ]
    draw_reliability(tmp_path / "p.svg", {"first": models, "second": models[:1]}, title="t", subtitle="s")
    text = (tmp_path / "p.svg").read_text()
    for words in ("plain", "one row", "first", "second", f"{models[0].bins.error:.3f}", "0.000"):
        assert f"<!-- {words} -->" in text


def test_slack_weighs_rows_by_how_far_eta_is_off():
    """docs/calibration.md: with eta held, a row's gradient is the exact one times eta* / eta, for every class alike."""
    rng = torch.Generator().manual_seed(0)
    psi = torch.randn(5, 9, dtype=torch.float64, generator=rng, requires_grad=True)
    log_eta = torch.randn(5, dtype=torch.float64, generator=rng) + 2.0
    gap, none = psi[:, 1:] - psi[:, :1], torch.zeros((), dtype=torch.float64)  # the label is class 0
    log_p = psi.log_softmax(dim=1)[:, 0]
    loose = torch.autograd.grad(softmax_bound(gap, none, log_eta).sum(), psi)[0]
    exact = torch.autograd.grad(log_p.sum(), psi)[0]
    weight = torch.exp(-log_p.detach() - log_eta)  # eta* = 1 / p
    assert (weight > 1.2).any()
    assert (weight < 0.8).any()
    torch.testing.assert_close(loose, weight[:, None] * exact, rtol=1e-12, atol=0.0)


def test_precision_at_counts_hits_by_hand():
    relevant = sparse.csr_matrix(np.array([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=bool))
    top = np.array([[2, 1, 0], [0, 3, 1]])
    assert precision_at(top, relevant, (1, 2, 3, 4)) == {
        1: 1 / 2,
        2: (1 / 2 + 1 / 2) / 2,
        3: pytest.approx((2 / 3 + 1 / 3) / 2),
    }
    with pytest.raises(ValueError, match="as many rows"):
        precision_at(top[:1], relevant)


def test_class_codes_and_perplexity():
    assert class_codes(np.array(["b", "z", "a"]), np.array(["a", "b"])).tolist() == [1, -1, 0]
    assert class_codes(np.array([7, 3]), np.array(["10", "7"])).tolist() == [1, -1]  # numbers against text
    assert class_codes(np.array(["7", "x"]), np.array([3, 7])).tolist() == [1, -1]
    assert perplexity(-np.log(8.0)) == pytest.approx(8.0)
    assert perplexity(-1e4) == np.inf
