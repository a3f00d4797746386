"""How large scores of another noise are beside a softmax's."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from augment_reduce.config.defaults import relative_variance
from augment_reduce.model import quadrature
from augment_reduce.model.noise import Logistic, Normal, resolve_noise
from augment_reduce.training.cross_validation import losses_at
from augment_reduce.training.noise_scale import relative_scale

DRAWS = {"probit": np.random.Generator.normal, "logistic": np.random.Generator.logistic}


def drawn(model, n=4_000, K=6, spread=3.0, seed=0):
    """Utilities, and labels that this noise draws with them."""
    generator = np.random.default_rng(seed)
    psi = spread * generator.normal(size=(n, K))
    return psi, (psi + DRAWS[model](generator, size=psi.shape)).argmax(1)


def softmax_scale(psi, labels):
    found = minimize_scalar(lambda a: losses_at(a, psi, labels).mean(), bounds=(0.05, 20.0), method="bounded")
    return found.x


@pytest.mark.parametrize("model", ["probit", "logistic"])
@pytest.mark.parametrize("given", [0.2, 1.0, 5.0])
def test_it_is_the_best_scale_over_the_best_of_a_softmax(model, given):
    """On a grid, with the exact likelihood of both; whatever the units of the scores. 300 rows: all are looked at."""
    psi, labels = drawn(model, n=300)
    noise, grid = resolve_noise(model), np.geomspace(0.4, 2.5, 60)
    values = [
        float(quadrature.log_likelihood(noise, torch.from_numpy(a * psi), torch.from_numpy(labels)).sum()) for a in grid
    ]
    best = grid[int(np.argmax(values))]
    assert best == pytest.approx(1.0, rel=0.15)  # the labels were drawn with these scores; 3 standard errors
    rho = relative_scale(noise, given * psi, labels)
    assert rho == pytest.approx(best / softmax_scale(psi, labels), rel=0.05)


def test_it_is_not_the_ratio_of_deviations_where_classes_are_many():
    """Why it is measured: 200 classes, most of them far below."""
    psi, labels = drawn("probit", n=800, K=200, spread=2.0)
    rho = relative_scale(Normal(), psi, labels)
    assert rho < 0.85 * math.sqrt(relative_variance(Normal()))


def test_few_rows_leave_it_where_it_is_expected():
    psi = np.eye(3) * 4.0
    for noise in (Normal(), Logistic()):
        assert relative_scale(noise, psi, np.arange(3)) == pytest.approx(math.sqrt(relative_variance(noise)), rel=0.5)
        assert relative_scale(noise, psi[:0], np.arange(0)) == math.sqrt(relative_variance(noise))


def test_a_softmax_is_its_own_measure():
    psi, labels = drawn("logistic")
    assert relative_scale(resolve_noise("softmax"), psi, labels) == 1.0
