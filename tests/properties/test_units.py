"""Units of the features: a fit sees the same problem whatever units X has, and says what it learned in those of X."""

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.features import FeatureScaling
from augment_reduce.kernels.rows import as_rows

STEPS = {"batch_size": 50, "max_epochs": 20}  # by steps; without them rows as few as these are solved directly
WAYS = {"directly": {}, "by steps": STEPS}
each_way = pytest.mark.parametrize("way", WAYS)


def dense_rows(n=300, D=8, K=5, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D)) @ generator.normal(size=(D, D))
    y = (X @ generator.normal(size=(D, K)) / 3.0 + generator.gumbel(size=(n, K))).argmax(1)
    return X, y


def sparse_rows(n=300, D=60, K=5, seed=0):
    generator = np.random.default_rng(seed)
    X = sp.random_array((n, D), density=0.1, rng=generator, data_sampler=lambda size: generator.uniform(1, 4, size))
    y = (X @ generator.normal(size=(D, K)) + generator.gumbel(size=(n, K))).argmax(1)
    return sp.csr_matrix(X), y


def fitted(X, y, model="softmax", **settings):
    return AugmentReduceClassifier(model, random_state=0, **settings).fit(X, y)


@each_way
@pytest.mark.parametrize("rows", [dense_rows, sparse_rows])
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_a_constant_times_x_changes_no_prediction(rows, model, way):
    X, y = rows()
    expected = fitted(X, y, model, **WAYS[way]).predict_proba(X)
    for c in (1e-6, 1e-3, 3.0, 1e6):
        np.testing.assert_allclose(fitted(c * X, y, model, **WAYS[way]).predict_proba(c * X), expected, atol=1e-5)


@each_way
def test_columns_far_from_zero_change_no_prediction(way):
    X, y = dense_rows()
    far = 10.0 ** np.random.default_rng(1).uniform(1, 4, X.shape[1])
    expected = fitted(X, y, **WAYS[way])
    moved = fitted(X + far, y, **WAYS[way])
    np.testing.assert_allclose(moved.predict_proba(X + far), expected.predict_proba(X), atol=1e-5)
    np.testing.assert_allclose(moved.coef_, expected.coef_, atol=1e-5)


@each_way
def test_columns_of_any_scale_predict_as_well(way):
    """Columns that were alike have one unit, others each its own: another problem, but as good a fit."""
    X, y = dense_rows(900)
    scales = 10.0 ** np.random.default_rng(1).uniform(-3, 3, X.shape[1])
    plain = fitted(X[:600], y[:600], **WAYS[way]).log_likelihood(X[600:], y[600:])
    scaled = fitted(scales * X[:600], y[:600], **WAYS[way]).log_likelihood(scales * X[600:], y[600:])
    assert scaled > 1.01 * plain


@each_way
@pytest.mark.parametrize("sparse", [False, True])
def test_coefficients_are_those_of_x_in_its_own_units(sparse, way):
    X, y = dense_rows()
    X = 100.0 * X + 1000.0
    clf = fitted(X, y, **WAYS[way])
    given = sp.csr_matrix(X) if sparse else X  # centred columns: what a zero is worth goes to the biases
    np.testing.assert_allclose(clf.decision_function(given), X @ clf.coef_.T + clf.intercept_, rtol=1e-8, atol=1e-6)
    np.testing.assert_allclose(clf.predict_proba(given), clf.predict_proba(X), atol=1e-9)


def test_preset_and_rates_of_ones_own_see_x_as_it_is():
    X, y = dense_rows()
    for settings in ({"preset": "paper"}, {"learning_rate": 0.1}, {"feature_scaling": False}):
        assert fitted(100.0 * X, y, max_iter=3, **settings)._fitted.scaling is None
    assert fitted(100.0 * X, y, max_iter=3, learning_rate=0.1, feature_scaling=True)._fitted.scaling is not None


# ---- the units themselves ----


def scaling_of(X, **options):
    X = as_rows(X)
    return FeatureScaling.of(X, np.arange(X.n_rows), **options)


def test_columns_that_are_alike_have_one_unit_and_others_each_its_own():
    X, _ = dense_rows(2_000)
    alike = scaling_of(X)
    assert np.ptp(alike.scale) == 0.0
    assert alike.scale[0] == pytest.approx(np.sqrt(X.var(0).mean()))
    np.testing.assert_allclose(alike.centre, X.mean(0), rtol=1e-9)
    np.testing.assert_allclose(scaling_of(X, pooled=False).scale, X.std(0), rtol=1e-9)
    scales = 10.0 ** np.arange(-4, 4)
    np.testing.assert_allclose(scaling_of(scales * X).scale, scales * X.std(0), rtol=1e-9)


def test_zeros_of_sparse_rows_and_of_mostly_zero_columns_stay_zeros():
    X, _ = sparse_rows()
    for given in (X, X.toarray()):
        found = scaling_of(given)
        assert not found.centre.any()
        np.testing.assert_allclose(found.scale, np.sqrt((X.data**2).mean()), rtol=1e-9)
    indicators = sp.csr_matrix((np.ones_like(X.data), X.indices, X.indptr), X.shape)
    assert scaling_of(indicators).is_identity


def test_rows_count_by_their_weight():
    X, _ = dense_rows(200)
    weight = np.random.default_rng(0).integers(0, 4, 200).astype(float)
    by_weight = FeatureScaling.of(as_rows(X), np.flatnonzero(weight), weight)
    repeated = scaling_of(np.repeat(X, weight.astype(int), 0))
    np.testing.assert_allclose(by_weight.scale, repeated.scale, rtol=1e-12)
    np.testing.assert_allclose(by_weight.centre, repeated.centre, rtol=1e-12)


@pytest.mark.parametrize("largest", [1e-300, 1e300])
def test_extreme_and_constant_columns_have_a_finite_unit(largest):
    X, y = dense_rows(60)
    X[:, 0] *= largest / abs(X[:, 0]).max()
    X[:, 1] = largest
    found = scaling_of(X)
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    for settings in WAYS.values():
        clf = fitted(X, y, **settings)
        assert np.isfinite(clf.predict_proba(X)).all()
        assert clf.log_likelihood(X, y) > -np.log(5)


def test_outer_and_inner_undo_each_other():
    X, _ = dense_rows()
    found, generator = scaling_of(1e3 * X + 7.0), np.random.default_rng(0)
    weight, bias = generator.normal(size=(4, 8)), generator.normal(size=4)
    for a, b in zip(found.to_scaled(*found.to_original(weight, bias)), (weight, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    scores = found.of_block(X) @ weight.T + bias
    coef, intercept = found.to_original(weight, bias)
    np.testing.assert_allclose(X @ coef.T + intercept, scores, rtol=1e-9, atol=1e-9)
