"""Numbers so large or small that plain arithmetic overflows: right answers, or errors that say what to do."""

import copy
import fractions
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.exceptions import ConvergenceWarning

from augment_reduce import AugmentReduceClassifier
from augment_reduce.model import quadrature
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from augment_reduce.training.linear import LinearScores
from tests.helpers.user_noises import Laplace, StudentT3

NOISES = [Gumbel(), Normal(), Logistic(), Laplace(), StudentT3()]


def fitted(K=5, dtype=np.float64, **settings):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(100, 6))
    y = (X @ generator.normal(size=(6, K)) + generator.gumbel(size=(100, K))).argmax(1)
    with warnings.catch_warnings():  # 30 iterations may be too few: the tests are about predictions
        warnings.simplefilter("ignore", ConvergenceWarning)
        return AugmentReduceClassifier(**{"max_iter": 30, "random_state": 0} | settings).fit(X.astype(dtype), y)


SIZES = [1e10, 1e30, 1e38, 1e200, 1.7e308]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic", StudentT3()], ids=str)
@pytest.mark.parametrize(("K", "dtype"), [(2, np.float32), (5, np.float64), (40, np.float32)])
def test_probabilities_of_huge_rows_are_finite_and_sum_to_one(model, K, dtype):
    clf = fitted(K, dtype, model=model)
    rows = np.random.default_rng(1).normal(size=(len(SIZES), 6))
    rows = rows / np.abs(rows).max(1, keepdims=True) * np.array(SIZES)[:, None]
    tolerance = 1e-6 if dtype == np.float32 else 1e-8
    for X, one in ((rows, clf), (sp.csr_matrix(rows), copy.deepcopy(clf).sparsify())):
        P = one.predict_proba(X)
        assert np.isfinite(P).all()
        np.testing.assert_allclose(P.sum(1), 1.0, atol=tolerance)
        assert not np.isnan(one.predict_log_proba(X)).any()
        assert np.isfinite(one.decision_function(X)).all()
        classes, probabilities = one.predict_topk(X, 2)
        np.testing.assert_allclose(probabilities, np.sort(P, 1)[:, ::-1][:, :2], atol=tolerance)
        assert (classes[:, 0] == one.predict(X)).all()
        assert (P.max(1) > 0.99).all()


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
@pytest.mark.parametrize("size", [0.0, 1e3, 1e15, 1e30, 1e100, 1e307])
@pytest.mark.parametrize("at", [0.0, 1e30, -1e30, 1e300])
def test_only_differences_of_scores_matter_however_large(noise, size, at):
    """One far ahead, all alike, two alike far ahead; and all of that far away."""
    for psi, expected in (
        ([size, -size, -size], [1, 0, 0] if size else [1 / 3] * 3), ([size] * 3, [1 / 3] * 3),
        ([size, size, -size], [0.5, 0.5, 0] if size else [1 / 3] * 3),
    ):  # fmt: skip
        psi = torch.tensor([psi], dtype=torch.float64) + at
        if size and size < abs(at):
            expected = [1 / 3] * 3  # as the sums are rounded
            psi[:] = at
        p = quadrature.log_proba(noise, psi).exp()
        atol = 2e-7 if noise.name == "student-t3" else 1e-9  # heavy tails: at 1e3 the others still have a chance
        torch.testing.assert_close(p, torch.tensor([expected], dtype=torch.float64), atol=atol, rtol=0.0)
        for k in range(3):
            assert float(quadrature.log_likelihood(noise, psi, torch.tensor([k]))) <= 1e-9


def exact_scores(x, coef, intercept):
    """In fractions, which do not overflow."""
    exact = [[fractions.Fraction(number) for number in numbers] for numbers in (x, intercept)]
    return [
        sum((a * fractions.Fraction(w) for a, w in zip(exact[0], of, strict=True)), bias)
        for of, bias in zip(coef, exact[1], strict=True)
    ]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_that_overflow_keep_their_order_and_their_ties(sparse, dtype):
    """Against fractions. The fourth class is the second, the last one has no weights."""
    generator = np.random.default_rng(0)
    most = float(np.finfo(dtype).max)
    X = generator.normal(size=(30, 4)) * np.exp(generator.uniform(0, np.log(1e300), size=(30, 1)))
    X[3] = 0.0
    sizes = most * np.array([[1e-40], [0.1], [1e-5], [0.1], [0.2], [0.0]])
    coef = (generator.normal(size=(6, 4)) * sizes).astype(dtype)
    coef[3] = coef[1]
    intercept = np.array([1.0, 2.0, -most, 2.0, 0.5 * most, 0.0], dtype)
    weight = sp.csr_matrix(coef) if sparse else torch.from_numpy(coef)
    scores = LinearScores(sp.csr_matrix(X) if sparse else X, weight, torch.from_numpy(intercept))
    psi = scores(0, 30)
    assert psi.isfinite().all()
    for row, x in zip(psi.tolist(), X.tolist(), strict=True):
        exact = exact_scores(x, coef.tolist(), intercept.tolist())
        assert max(range(6), key=row.__getitem__) == max(range(6), key=exact.__getitem__)
        assert row[1] == row[3]
        largest = max(abs(e) for e in exact)
        scale = max(abs(r) for r in row)
        for a, e in zip(row, exact, strict=True):
            assert abs(a / scale - float(e / largest)) < (1e-5 if dtype == np.float32 else 1e-13)


def test_weights_that_have_diverged_are_still_told_of():
    clf = fitted()
    clf.coef_[2] = np.inf
    with pytest.raises(ValueError, match=r"row 0 hold NaN or infinity.*diverged"):
        clf.predict_proba(np.ones((3, 6)))
    clf.coef_[2] = np.nan
    with pytest.raises(ValueError, match="diverged"):
        clf.predict(np.ones((3, 6)))


@pytest.mark.parametrize(
    ("largest", "dtype"), [(2e15, np.float64), (2e15, np.float32), (1e30, np.float32), (1e100, float), (1e300, float)]
)
def test_features_that_no_step_is_small_enough_for_are_refused(dtype, largest):
    X, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    X[7, 1] = -largest
    for rows in (X.astype(dtype), sp.csr_matrix(X.astype(dtype))):
        with pytest.raises(ValueError, match=r"largest is .*Scale the features"):
            AugmentReduceClassifier(max_iter=2, feature_scaling=False).fit(rows, y)
        for settings in ({}, {"max_iter": 20}):  # in units of their own they are like any others
            clf = AugmentReduceClassifier(random_state=0, **settings).fit(rows, y)
            p = clf.predict_proba(rows)
            assert np.isfinite(p).all()
            assert clf.log_likelihood(rows, y) > -1.2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weight", [1e300, 1e200, 1e-300, 5e-324, 1e-20])
@pytest.mark.parametrize("by", ["sample_weight", "class_weight", "both"])
def test_weights_of_rows_that_cannot_be_squared_are_refused(dtype, weight, by):
    X, y = np.random.default_rng(0).normal(size=(60, 3)).astype(dtype), np.arange(60) % 3
    root = np.sqrt(weight) if by == "both" else weight
    of_class = None if by == "sample_weight" else dict.fromkeys(range(3), root)
    clf = AugmentReduceClassifier(max_iter=2, class_weight=of_class)
    with pytest.raises(ValueError, match=r"sample_weight times class_weight.*it is .*Divide the weights by their mean"):
        clf.fit(X, y, sample_weight=None if by == "class_weight" else np.full(60, root))
    assert not hasattr(clf, "coef_")


@pytest.mark.parametrize("weight", [1e-300, 1e-30, 0.0])
def test_a_row_that_weighs_next_to_nothing_is_next_to_nothing(weight):
    X, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    weights = np.ones(60)
    weights[::4] = weight
    clf = AugmentReduceClassifier(max_iter=30, batch_size=60, random_state=0).fit(X, y, sample_weight=weights)
    other = AugmentReduceClassifier(max_iter=30, batch_size=60, random_state=0)
    other.fit(X, np.where(weights < 1, (y + 1) % 3, y), sample_weight=weights)  # whatever its label
    np.testing.assert_allclose(clf.coef_, other.coef_, atol=1e-12)
    assert np.abs(clf.coef_).max() > 0.01
