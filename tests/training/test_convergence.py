"""On small problems A&R ends where exact optimisation of eq. (5) ends; MAP ends at the MAP optimum."""

import numpy as np
import pytest
import torch

from augment_reduce import Adagrad, AugmentReduceClassifier
from augment_reduce.model import quadrature
from augment_reduce.model.noise import resolve_noise

N, D, K = 400, 3, 6


def rows(seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(N, D))
    return X, (X @ generator.normal(size=(D, K)) + generator.gumbel(size=(N, K))).argmax(1)


def optimum(model, X, y, prior_variance=None):
    """(log likelihood a row, objective) at the maximum, by L-BFGS on the exact log likelihood and its gradient."""
    noise = resolve_noise(model)
    x, labels = torch.from_numpy(X), torch.from_numpy(y)
    w = torch.zeros(K, D, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(K, dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS(
        [w, b], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-8, tolerance_change=1e-12
    )
    shrink = 0.0 if prior_variance is None else 1 / (2 * prior_variance)

    def loss():
        lbfgs.zero_grad()
        psi = x @ w.T + b
        value, grad = quadrature.log_likelihood_and_grad(noise, psi.detach(), labels)
        penalty = shrink * ((w**2).sum() + (b**2).sum())
        (penalty - (grad * psi).sum()).backward()
        return penalty.detach() - value.sum()

    lbfgs.step(loss)
    value = quadrature.log_likelihood(noise, (x @ w.T + b).detach(), labels).sum()
    return float(value) / N, -float(loss())


def penalised(clf, X, y, prior_variance):
    shrink = ((clf.coef_**2).sum() + (clf.intercept_**2).sum()) / (2 * prior_variance)
    return N * clf.log_likelihood(X, y) - shrink


@pytest.mark.parametrize(
    ("model", "sampling", "size", "off"),
    [
        ("softmax", "uniform", 3, 1e-3), ("softmax", "uniform", 5, 1e-3), ("softmax", "frequency-shared", 12, 1e-3),
        ("softmax", "uniform", 4, 2.5e-3), ("probit", "uniform", 3, 1e-3), ("probit", "frequency-shared", 12, 1e-3),
        ("logistic", "uniform", 4, 2.5e-3), ("logistic", "uniform", 5, 1e-3),
    ],
)  # fmt: skip
def test_augment_reduce_converges_to_maximum_likelihood(model, sampling, size, off):
    """With four of the five others q is cross-fitted, and such a fit ends a little off (docs/math.md)."""
    X, y = rows()
    clf = AugmentReduceClassifier(
        model=model, class_sampling=sampling, n_sampled_classes=size, batch_size=40, max_epochs=400,
        prior_variance=None, random_state=0,
    ).fit(X, y)  # fmt: skip
    best, _ = optimum(model, X, y)
    assert best - off < clf.log_likelihood(X, y) <= best + 1e-9


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_augment_reduce_converges_to_the_map_optimum(model):
    """A prior strong enough to matter: a factor of two in it moves the optimum by far more than the tolerance."""
    X, y = rows()
    v = 0.05
    clf = AugmentReduceClassifier(
        model=model, class_sampling="uniform", n_sampled_classes=3, batch_size=40, max_epochs=400, prior_variance=v,
        intercept_prior_variance=v, random_state=0,
    ).fit(X, y)  # fmt: skip
    _, best = optimum(model, X, y, v)
    found = penalised(clf, X, y, v)
    assert best - 1e-3 * N < found <= best + 1e-6
    assert abs(optimum(model, X, y, 2 * v)[1] - best) > 10 * 1e-3 * N


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_exact_method_converges_too(model):
    X, y = rows()
    clf = AugmentReduceClassifier(
        model=model, method="exact", batch_size=200, max_epochs=150, prior_variance=None, random_state=0
    ).fit(X, y)
    best, _ = optimum(model, X, y)
    assert best - 1e-4 < clf.log_likelihood(X, y) <= best + 1e-9


def test_one_sampled_class_still_converges():
    X, y = rows()
    clf = AugmentReduceClassifier(
        class_sampling="uniform", n_sampled_classes=1, batch_size=40, max_epochs=800, random_state=0,
        optimizer=Adagrad(0.3),
    ).fit(X, y)  # fmt: skip
    assert clf.log_likelihood(X, y) > optimum("softmax", X, y)[0] - 3e-3


def test_weighted_and_repeated_fits_agree_at_convergence():
    """scikit-learn's sample-weight checks, with all classes and whole batches: then nothing is left to chance."""
    X, y = rows()
    weight = np.random.default_rng(1).integers(1, 4, size=N)
    settings = {"class_sampling": "uniform", "n_sampled_classes": K - 1, "prior_variance": 1.0, "random_state": 0}
    weighted = AugmentReduceClassifier(max_iter=600, batch_size=N, **settings).fit(X, y, sample_weight=weight)
    repeated = AugmentReduceClassifier(max_iter=600, batch_size=3 * N, **settings)
    repeated.fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    unweighted = AugmentReduceClassifier(max_iter=600, batch_size=N, **settings).fit(X, y)
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-9)
    assert np.abs(weighted.predict_proba(X) - unweighted.predict_proba(X)).max() > 0.03
