"""Every parameter of the constructor, with values of the wrong type or size: refused at the edge, by name."""

import inspect

import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier

X = np.random.default_rng(0).normal(size=(40, 3))
Y = np.arange(40) % 4

NUMBERS = ["x", "", [], [1], {}, object(), 1j, np.nan, np.inf, -np.inf, -1, np.array([1, 2]), b"1", True]
COUNTS = [*NUMBERS, 0, 2.5, 3.0, np.float64(3)]
FLAGS = ["x", "yes", None, 1.0, 1, 0, [], {}, np.nan, object()]
NAMES = ["x", "", 0, 1, 2.0, [], {}, object(), True, np.nan, np.array(["a", "b"])]
WRONG = {
    "model": [*NAMES, None],
    "method": [*NAMES, None],
    "n_sampled_classes": COUNTS,
    "class_sampling": [*NAMES, None],
    "batch_size": COUNTS,
    "max_iter": [*COUNTS, 10**400],
    "max_epochs": [*NUMBERS, 0],
    "prior_variance": [*NUMBERS, 0],
    "intercept_prior_variance": [*NUMBERS, 0, "auto"],
    "fit_intercept": FLAGS,
    "feature_scaling": FLAGS,
    "optimizer": NAMES,
    "learning_rate": [*NUMBERS, 0],
    "local_step": NAMES,
    "early_stopping": FLAGS,
    "validation_fraction": [*NUMBERS, 0, 1, None],
    "n_iter_no_change": [*COUNTS, None],
    "tol": [*NUMBERS, None],
    "class_weight": ["x", "balance", 1, 2.0, [1, 2], object(), {0: "x"}, {0: -1}, {0: np.nan}, {0: np.inf}, {0: None}],
    "warm_start": FLAGS,
    "device": [*NAMES, None, "cuda:99", "gpu"],
    "n_jobs": ["x", 0, 2.5, [], {}, np.nan, True, object(), np.array([1, 2])],
    "dtype": ["x", "float16", "int64", 32, [], {}, object(), True, np.float16, np.int32],
    "init_scale": NUMBERS,
    "preset": NAMES,
    "random_state": ["x", 2.5, -1, [], {}, object(), np.nan, 10**400],
    "verbose": ["x", None, -1, 1.5, [], {}, np.nan, object()],
    "process_group": ["x", "", 0, 1, 2.5, [], {}, object(), True],
    "sync": FLAGS,
}


def test_every_parameter_is_tried():
    assert WRONG.keys() == inspect.signature(AugmentReduceClassifier).parameters.keys()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_name(name):
    for value in WRONG[name]:
        settings = {"max_iter": None if name == "max_epochs" else 2, name: value}
        clf = AugmentReduceClassifier(**settings)
        try:
            clf.fit(X, Y)
        except (ValueError, TypeError) as error:
            said = str(error)
            assert len(said) > 30, (value, said)
            if name == "random_state":  # scikit-learn's words
                assert "seed" in said.lower(), (value, said)
            else:
                assert said.startswith(("Expected", "Both")), (value, said)
                assert name in said, (value, said)
        else:
            pytest.fail(f"{name}={value!r} was accepted")
        assert not hasattr(clf, "coef_")


RIGHT = {
    "early_stopping": [np.True_, False],
    "warm_start": [np.False_],
    "verbose": [0, False, np.int64(0)],
    "n_jobs": [None, 1, -1, -100, 100, np.int32(2)],
    "max_iter": [np.int16(2)],
    "max_epochs": [0.01, np.float32(0.5), 1],
    "tol": [0, 0.0, np.float32(0.1)],
    "learning_rate": [1, np.float64(0.1)],
    "prior_variance": [None, "auto", 1],
    "intercept_prior_variance": [None, 1, 0.5],
    "fit_intercept": [True, False, np.True_],
    "feature_scaling": ["auto", True, np.False_],
    "optimizer": [None, "adagrad", "lbfgs"],
    "dtype": [np.float32, "float64", None],
    "class_weight": [None, "balanced", {0: 2, 1: 0, 2: 1.5, 3: np.float32(1)}],
    "batch_size": [1, 10**30],
    "n_sampled_classes": [1, 10**30],
    "init_scale": [0, None, 0.1],
    "random_state": [None, 0, np.random.RandomState(0)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_value_is_taken(name):
    for value in RIGHT[name]:
        AugmentReduceClassifier(**{"max_iter": None if name == "max_epochs" else 2, name: value}).fit(X, Y)


def test_partial_fit_refuses_early_stopping():
    """As SGDClassifier does; it was ignored."""
    clf = AugmentReduceClassifier(early_stopping=True)
    with pytest.raises(ValueError, match=r"early_stopping=True has no meaning for partial_fit"):
        clf.partial_fit(X, Y, classes=np.arange(4))
    assert not hasattr(clf, "classes_")


@pytest.mark.parametrize(("n", "fraction", "epochs"), [(300, 0.3, 4), (1000, 0.1, 3), (128, 0.5, 7), (50, 0.01, 5)])
def test_epochs_are_counted_on_the_rows_that_are_trained_on(n, fraction, epochs):
    generator = np.random.default_rng(0)
    features, y = generator.normal(size=(n, 3)), np.arange(n) % 3
    clf = AugmentReduceClassifier(
        early_stopping=True, validation_fraction=fraction, max_epochs=epochs, n_iter_no_change=10**6, random_state=0
    ).fit(features, y)
    assert clf.history_["epoch"][-1] == epochs
    trained = n - int(np.ceil(fraction * n))
    batch = min(max(32, trained // 100), trained)
    assert clf.n_iter_ == epochs * -(-trained // batch)
