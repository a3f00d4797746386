"""What a fit says of itself when it went wrong."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from augment_reduce import AugmentReduceClassifier


def blobs(n=1_200, K=6, D=4, spread=1.0, seed=0):
    generator = np.random.default_rng(seed)
    y = generator.integers(K, size=n)
    return 2.0 * generator.normal(size=(K, D))[y] + spread * generator.normal(size=(n, D)), y


def fitted(X, y, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return AugmentReduceClassifier(random_state=0, **settings).fit(X, y)


def warned(X, y, **settings):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        AugmentReduceClassifier(random_state=0, **settings).fit(X, y)
    return [str(each.message) for each in found if issubclass(each.category, ConvergenceWarning)]


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_a_fit_with_nothing_set_has_nothing_to_say(model):
    X, y = blobs()
    assert warned(X[:800], y[:800], model=model) == []
    clf = fitted(X[:800], y[:800], model=model)
    assert clf.diagnose(X[800:], y[800:]).findings == ()
    assert "nothing found" in str(clf.diagnose(X[800:], y[800:]))


def test_a_fit_that_ends_too_early_says_so_with_the_number():
    X, y = blobs()
    (said,) = warned(X, y, batch_size=20, max_epochs=4, learning_rate=0.01)
    assert said.startswith("not converged: the fit ended after 240 iterations (4.0 epochs) while the log likelihood")
    assert "Set a larger max_epochs" in said
    assert warned(X, y, batch_size=20, max_epochs=60) == []


def test_columns_of_other_scales_taken_as_they_are_end_worse_than_frequencies():
    X, y = blobs()
    far = X + 1e3
    settings = {"feature_scaling": False, "batch_size": 50, "max_epochs": 3, "prior_variance": 10.0}
    (said,) = warned(far, y, **settings)
    assert said.startswith("worse than class frequencies: on the training rows the log likelihood is")
    assert "feature_scaling='auto'" in said
    found = fitted(far, y, **settings).diagnose(far, y)
    assert "unscaled columns" in found
    assert "worse than class frequencies" in found
    assert warned(far, y, **settings | {"feature_scaling": True}) == []


def test_over_and_under_fit():
    X, y = blobs(120, D=60, spread=4.0)
    new, labels = blobs(1_000, D=60, spread=4.0)[0], blobs(1_000, D=60, spread=4.0)[1]
    weak = fitted(X, y, prior_variance=1e6, batch_size=20, max_epochs=300)
    assert "over-fit" in weak.diagnose(new, labels)
    strong = fitted(*blobs(), prior_variance=1e-4)
    found = strong.diagnose(*blobs())
    assert "under-fit" in found
    assert found.best_factor > 1.0
    assert "larger prior_variance" in str(found)


def test_a_loose_bound():
    X, y = blobs(600, K=40)
    loose = fitted(X, y, n_sampled_classes=1, batch_size=50, max_epochs=10, model="logistic")
    assert "loose bound" in loose.diagnose(X, y)


def test_rows_in_other_units_than_those_of_the_fit():
    X, y = blobs()
    clf = fitted(X, y)
    assert "other units" not in clf.diagnose(X, y)
    for other in (1_000.0 * X, X + 1_000.0):
        assert "other units" in clf.diagnose(other, y)


def test_labels_at_random():
    X, y = blobs(3_000, spread=0.3)
    generator = np.random.default_rng(1)
    clf = fitted(X[:1_500], y[:1_500])
    noisy = np.where(generator.random(1_500) < 0.2, generator.integers(6, size=1_500), y[1_500:])
    found = clf.diagnose(X[1_500:], noisy)
    assert "label noise" in found
    assert found.random_labels == pytest.approx(0.2, abs=0.04)
    assert "label noise" not in clf.diagnose(X[1_500:], y[1_500:])


def test_wrong_input_is_refused():
    X, y = blobs(100)
    clf = fitted(X, y)
    with pytest.raises(ValueError, match="100 rows but y has 99"):
        clf.diagnose(X, y[:-1])
    with pytest.raises(ValueError, match="features"):
        clf.diagnose(X[:, :2], y)
