"""The estimator inside a process group computes what one process does, whatever the number of ranks.

Many cases share the start of the processes: a fixture runs all of one number of ranks, a test looks at each. How a
model over ranks is used, and what goes wrong, is in test_sharded_use.py.
"""

import functools
import warnings

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from tests.helpers.rank_processes import run_on_ranks

N, D = 150, 24
MODELS = ("softmax", "probit", "logistic")
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}  # of the largest weight
BASE = {
    "class_sampling": "candidates-shared", "n_sampled_classes": 8, "batch_size": 32, "max_iter": 200, "n_jobs": 1,
    "prior_variance": 2.0, "learning_rate": 0.2, "random_state": 11, "sync": True,
}  # fmt: skip


@functools.cache
def data(kind, dtype, K):
    """Sparse rows, or dense ones; "documents": every label of a document a row; "one rank": labels of even classes."""
    generator = np.random.default_rng(3)
    n = N // 3 if kind == "documents" else N
    X = sp.random(n, D, 0.2, "csr", dtype, random_state=generator, data_rvs=generator.standard_normal)
    if kind == "documents":
        X = sp.vstack([X, X, X]).tocsr()
    y = (X @ generator.standard_normal((D, K)) + generator.gumbel(size=(N, K))).argmax(1)
    y[:K] = np.arange(K)
    if kind == "one rank":
        y[K:] -= y[K:] % 2
    weight = None
    if kind == "weights":
        weight = generator.integers(0, 4, N) * 0.5
    return (X.toarray() if kind == "dense" else X), y, weight


def case(model="softmax", kind="sparse", dtype="float64", K=31, **settings):
    return model, kind, dtype, K, tuple(settings.items())


def fit(group, model, kind, dtype, K, settings):
    X, y, weight = data(kind, dtype, K)
    clf = AugmentReduceClassifier(model, dtype=dtype, process_group=group, **BASE | dict(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clf.fit(X, y, sample_weight=weight)


def numbers(clf, kind, dtype, K):
    """All that is compared: weights and biases of all classes, and what is computed of them."""
    X, y, _ = data(kind, dtype, K)
    fitted = clf._fitted
    whole = (lambda t: t) if fitted.partition is None else fitted.partition.whole
    gaps = clf.history_["bound_gap"]
    return {
        "weight": whole(fitted.parameters.weight).numpy(), "bias": whole(fitted.parameters.bias).numpy(),
        "state": whole(fitted.parameters.weight_state[0]).numpy() if fitted.parameters.weight_state else np.zeros(1),
        "bound": clf.history_["bound"], "gap": gaps[np.isfinite(gaps)], "probability": clf.predict_proba(X[:9]),
        "score": clf.decision_function(X[:9]), "log likelihood": np.array([clf.log_likelihood(X[:40], y[:40])]),
    }  # fmt: skip


def run_cases(group, cases):
    return [numbers(fit(group, *each), *each[1:4]) for each in cases]


def assert_close(found, expected, dtype):
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        scale = max(1.0, float(np.abs(values).max(initial=0.0)))
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCE[dtype] * scale, err_msg=name)


# ---- equal to one process ----

OF_MODELS = [
    case("softmax"), case("probit"), case("logistic"), case("softmax", dtype="float32"),
    case("probit", dtype="float32", local_step="newton"), case("logistic", dtype="float32", local_step="newton"),
    case("softmax", "dense", class_sampling="all"), case("logistic", "dense", class_sampling="all"),
    case("softmax", K=30, class_sampling="uniform"),
]  # fmt: skip
OTHERS = [
    case(*which, **{"max_iter": 12} | settings)
    for which, settings in (
        (("softmax", "weights"), {}), (("softmax", "one rank"), {}), (("softmax", "documents"), {}),
        (("logistic", "documents"), {"max_iter": 15}), (("softmax", "dense"), {"class_sampling": "head-tail-shared"}),
        (("probit",), {"class_sampling": "uniform", "max_iter": 15}), ((), {"class_sampling": "uniform-shared"}),
        ((), {"class_sampling": "frequency"}), ((), {"n_sampled_classes": 3}),
        ((), {"class_sampling": "frequency-shared", "local_step": "natural-gradient"}),
        ((), {"class_sampling": "frequency", "local_step": "natural-gradient"}),
        (("probit",), {"class_sampling": "uniform", "local_step": "newton"}),
        (("logistic",), {"class_sampling": "uniform-shared", "local_step": "gradient"}),
        (("logistic",), {"local_step": "amortised"}), (("softmax", "documents"), {"local_step": "amortised"}),
        (("probit",), {"local_step": "cross-fitted", "max_iter": 15}), (("probit",), {"n_sampled_classes": 3}),
        ((), {"method": "one-vs-each"}), ((), {"method": "sampled-softmax"}), ((), {"method": "exact"}),
        (("probit",), {"method": "exact", "max_iter": 15}), ((), {"optimizer": "adam", "max_iter": 10}),
        ((), {"optimizer": "rowwise-adagrad", "early_stopping": True}), ((), {"prior_variance": None}),
        ((), {"preset": "paper", "learning_rate": None}), ((), {"init_scale": 0.1}),
        (("probit",), {"preset": "paper", "learning_rate": None, "max_iter": 20}),
        ((), {"class_weight": "balanced", "fit_intercept": False, "learning_rate": None}),
    )
]  # fmt: skip
TWO_CLASSES = case(K=2, class_sampling="all", max_iter=20)
SMALL = dict.fromkeys(("n_sampled_classes", "batch_size", "max_iter", "learning_rate"))
SEARCHES = [
    case("softmax", **SMALL, class_sampling="auto"), case("probit", K=5, **SMALL, class_sampling="auto"),
    case("softmax", **SMALL, class_sampling="auto", prior_variance="auto"),
    case("softmax", learning_rate=None, prior_variance="auto", max_epochs=6, max_iter=None),
]  # fmt: skip
LATE = [case(sync=False, max_iter=230)]
CASES = {
    2: [*OF_MODELS, *OTHERS, TWO_CLASSES, *SEARCHES, *LATE[:1] * 2],
    3: [
        case(dtype="float32"), case(K=33), case("probit", local_step="newton", max_iter=20),
        case("logistic", local_step="newton", max_iter=20), case("softmax", "documents", max_iter=50),
        case(K=3, class_sampling="all", max_iter=20),
    ],
    4: [case(), case(n_sampled_classes=2, max_iter=20), case("probit", local_step="newton", max_iter=20)],
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of all ranks, by their number; computed when first asked for."""
    return functools.cache(lambda W: run_on_ranks(run_cases, W, tmp_path_factory.mktemp("ranks"), CASES[W], limit=600))


@functools.cache
def one_process(each):
    return run_cases(None, [each])[0]


EQUAL = [(W, i) for W, cases in CASES.items() for i, each in enumerate(cases) if dict(each[4]).get("sync", True)]


@pytest.mark.parametrize(("W", "i"), EQUAL, ids=[f"{W} ranks, {CASES[W][i]}" for W, i in EQUAL])
def test_ranks_compute_what_one_process_does(results, W, i):
    each = CASES[W][i]
    for of_rank in results(W):
        assert_close(of_rank[i], one_process(each), each[2])


def test_the_same_ranks_twice_are_bit_equal(results):
    first, second = (i for i, each in enumerate(CASES[2]) if each == LATE[0])
    for of_rank in results(2):
        for name, values in of_rank[first].items():
            assert np.array_equal(values, of_rank[second][name], equal_nan=True)
            assert np.array_equal(values, results(2)[0][first][name], equal_nan=True)
