"""Small data: the optimum of the exact objective, as scikit-learn's; and the integrals that it needs."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.linear_model import LogisticRegression

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.defaults import Shape, is_small
from augment_reduce.model import quadrature
from augment_reduce.model.mode_grid import ModeGrid
from augment_reduce.model.noise import Gumbel, resolve_noise
from tests.helpers.user_noises import StudentT3
from tests.training.test_convergence import optimum


def rows(n=240, D=6, K=4, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D)) * 10.0 ** generator.uniform(-1, 1, D) + generator.normal(size=D)
    y = ((X - X.mean(0)) / X.std(0) @ generator.normal(size=(D, K)) + generator.gumbel(size=(n, K))).argmax(1)
    return X, y


def fitted(X, y, model="softmax", *, sample_weight=None, **settings):
    return AugmentReduceClassifier(model, random_state=0, **settings).fit(X, y, sample_weight=sample_weight)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("variance", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(("K", "C"), [(4, 1.0), (2, 2.0)])
def test_the_same_coefficients_as_logistic_regression(K, C, variance, sparse):
    """C = v with three classes and more; two weight vectors of variance v make one of variance 2 v."""
    X, y = rows(K=K)
    given = sp.csr_matrix(X) if sparse else X
    clf = fitted(given, y, prior_variance=variance)
    theirs = LogisticRegression(C=C * variance, tol=1e-12, max_iter=1_000, solver="newton-cholesky").fit(X, y)
    np.testing.assert_allclose(clf.coef_, theirs.coef_, atol=1e-3 * abs(theirs.coef_).max())
    np.testing.assert_allclose(clf.intercept_, theirs.intercept_, atol=1e-3 * max(1.0, abs(theirs.intercept_).max()))
    np.testing.assert_allclose(clf.predict_proba(X), theirs.predict_proba(X), atol=1e-5)


def test_more_columns_than_rows():
    X, y = rows(40, 200, 3)
    for given in (X, sp.csr_matrix(X)):
        clf = fitted(given, y, prior_variance=0.1)
        theirs = LogisticRegression(C=0.1, tol=1e-10, max_iter=100_000).fit(X, y)
        np.testing.assert_allclose(clf.coef_, theirs.coef_, atol=1e-3 * abs(theirs.coef_).max())


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic", StudentT3()], ids=str)
def test_the_optimum_of_every_model(model):
    """Against L-BFGS of torch on the exact log likelihood, whose biases are under the prior."""
    X, y = rows(120, 3, 6)
    X = (X - X.mean(0)) / X.std(0)
    y = np.concatenate([np.arange(6), y[6:]])
    clf = fitted(X, y, model, prior_variance=0.3, intercept_prior_variance=0.3, optimizer="lbfgs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.training.test_convergence.N", 120), patch.setattr("tests.training.test_convergence.D", 3)
        noise = model if isinstance(model, str) else None
        if noise is None:
            patch.setattr("tests.training.test_convergence.resolve_noise", lambda _: model)
        _, best = optimum(model, X, y, 0.3)
    shrink = ((clf.coef_**2).sum() + (clf.intercept_**2).sum()) / 0.6
    assert 120 * clf.log_likelihood(X, y) - shrink == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("variance", [0.001, 0.1])
@pytest.mark.parametrize("settings", [{}, {"batch_size": 20, "max_epochs": 200}])
def test_intercepts_are_free(variance, settings):
    """However strong the prior, the mean probability is the base rate: the gradient of a free bias is zero there."""
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(200, 3)), (np.arange(200) < 12).astype(int)
    clf = fitted(X, y, prior_variance=variance, **settings)
    assert clf.predict_proba(X)[:, 1].mean() == pytest.approx(0.06, abs=1e-6 if not settings else 0.01)
    under_prior = fitted(X, y, prior_variance=variance, intercept_prior_variance=variance, **settings)
    assert under_prior.predict_proba(X)[:, 1].mean() > 0.08


@pytest.mark.parametrize("settings", [{}, {"batch_size": 20, "max_epochs": 5}])
def test_without_intercepts(settings):
    X, y = rows()
    clf = fitted(X, y, fit_intercept=False, **settings)
    assert (clf.intercept_ == 0.0).all()
    assert (clf.feature_centre_ == 0.0).all()
    with pytest.raises(ValueError, match="fit_intercept=False needs optimizer='adagrad' or 'lbfgs'"):
        fitted(X, y, fit_intercept=False, optimizer="adam")


@pytest.mark.parametrize("sparse", [False, True])
def test_weights_are_repeated_rows_in_any_order(sparse):
    X, y = rows(150)
    X = X * (np.random.default_rng(2).random(X.shape) < 0.5)
    make = sp.csr_matrix if sparse else np.asarray
    weight = np.random.default_rng(1).integers(0, 4, 150)
    order = np.random.default_rng(2).permutation(weight.sum())
    weighted = fitted(make(X), y, sample_weight=weight)
    repeated = fitted(make(np.repeat(X, weight, 0)[order]), np.repeat(y, weight)[order])
    assert weighted.prior_variance_ == pytest.approx(repeated.prior_variance_, rel=1e-12)
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-9)


@pytest.mark.parametrize("model", ["probit", "logistic"])
@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
def test_the_grid_around_the_mode_is_the_quadrature(model, spread):
    generator = torch.Generator().manual_seed(0)
    psi = spread * torch.randn(200, 9, dtype=torch.float64, generator=generator)
    labels = torch.randint(9, (200,), generator=generator)
    noise = resolve_noise(model)
    value, grad = ModeGrid(noise)(psi, labels)
    expected, expected_grad = quadrature.log_likelihood_and_grad(noise, psi, labels)
    torch.testing.assert_close(value, expected, rtol=5e-7, atol=5e-7)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_it_can_be_asked_for_and_goes_on_by_steps():
    X, y = rows()
    direct = fitted(X, y, optimizer="lbfgs", warm_start=True)
    steps = fitted(X, y, batch_size=32, max_epochs=1)
    assert direct.log_likelihood(X, y) > steps.log_likelihood(X, y)
    direct.set_params(optimizer=None, batch_size=32, max_iter=5).fit(X, y)
    afresh = fitted(X, y, batch_size=32, max_iter=5)
    assert direct.log_likelihood(X, y) > afresh.log_likelihood(X, y) + 0.05


def test_a_file_keeps_units_prior_and_temperature(tmp_path):
    X, y = rows()
    clf = fitted(1e3 * X + 5.0, y)
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    np.testing.assert_array_equal(back.coef_, clf.coef_)
    assert (back.prior_variance_, back.temperature_) == (clf.prior_variance_, clf.temperature_)


ODD = {
    "one row a class": (np.eye(12), np.arange(12)),
    "all rows equal": (np.ones((20, 3)), np.arange(20) % 4),
    "two rows": (np.array([[0.0], [1.0]]), np.array([0, 1])),
    "no features": (np.zeros((30, 2)), np.arange(30) % 3),
    "a class of one row": (np.random.default_rng(0).normal(size=(40, 2)), np.array([0] * 39 + [1])),
    "separable": (np.repeat(np.eye(3), 10, 0), np.repeat(np.arange(3), 10)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
@pytest.mark.parametrize("settings", [{}, {"batch_size": 8, "max_epochs": 5}])
def test_what_can_choose_nothing_falls_back_and_drops_no_class(name, model, settings):
    X, y = ODD[name]
    for given in (X, sp.csr_matrix(X)):
        clf = fitted(given, y, model, **settings)
        p = clf.predict_proba(given)
        assert p.shape == (len(X), len(np.unique(y)))
        assert np.isfinite(p).all()
        assert (p > 0).all()
        assert clf.prior_variance_ > 0


@pytest.mark.parametrize(("n_rows", "n_features", "small"), [(500, 40_000, True), (1_000, 200_000, False)])
def test_very_many_columns_are_left_to_steps(n_rows, n_features, small):
    """The optimum rotates them to a basis of at most N vectors of D numbers: 1.6 GB here, and twice that on the way."""
    assert is_small(Gumbel(), Shape(n_rows, n_features, 10, 10 * n_rows)) == small
