"""Probabilities of a fitted model are exact, whatever its noise, and sum to one before any renormalisation."""

import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce.model.noise import resolve_noise
from tests.helpers import oracles
from tests.helpers.user_noises import Laplace, StudentT3


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic", Laplace(), StudentT3()], ids=str)
def test_a_fits_probabilities_are_eq_5_to_1e_9_and_sum_to_one(model):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(80, 3))
    y = (X @ generator.normal(size=(3, 5)) + generator.gumbel(size=(80, 5))).argmax(1)
    clf = AugmentReduceClassifier(model, method="augment-reduce", max_iter=30, random_state=0).fit(X, y)
    psi, name = clf.decision_function(X[:2]), resolve_noise(model).name
    truth = [[float(oracles.log_likelihood(name, row, k)) for k in range(5)] for row in psi]
    found = clf.predict_log_proba(X[:2])
    assert np.abs(np.exp(found) - np.exp(truth)).max() < 1e-9
    assert np.abs(np.exp(found).sum(1) - 1).max() < 1e-9
