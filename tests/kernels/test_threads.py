"""Threads of our own: how many, whose error is told, and that neither torch's nor Numba's are started."""

import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import threads
from augment_reduce.kernels.threads import for_each, get_num_threads, num_threads, one_torch_thread
from augment_reduce.model import predict
from augment_reduce.training import diagnosis, direct_fit
from augment_reduce.training import fit as fitting


def test_every_thread_has_a_number_of_its_own():
    outside, seen = get_num_threads(), []
    with num_threads(3):
        assert get_num_threads() == 3
        with num_threads(1):
            assert get_num_threads() == 1
            with num_threads(None):
                assert get_num_threads() == 1
        assert get_num_threads() == 3
        other = threading.Thread(target=lambda: seen.append(get_num_threads()))
        other.start()
        other.join()
    assert get_num_threads() == outside
    assert seen == [threads.default_threads()]


def test_numbas_own_number_is_heeded(one_numba_thread):
    assert get_num_threads() == 1
    assert numba.get_num_threads() == 1


@pytest.mark.parametrize(("n_jobs", "expected"), [(None, 5), (1, 1), (3, 3), (100, 8), (-1, 8), (-2, 7), (-100, 1)])
def test_n_jobs_counts_as_in_scikit_learn(n_jobs, expected, monkeypatch):
    """None: as many as are set."""
    monkeypatch.setattr(fitting, "default_threads", lambda: 8)
    before = torch.get_num_threads()
    with num_threads(5):
        with fitting.threads(n_jobs):
            assert get_num_threads() == expected
            assert torch.get_num_threads() == 1
        assert get_num_threads() == 5
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("n_jobs", "expected"), [(None, 1), (-1, 2), (2, 2)])
@pytest.mark.parametrize("optimizer", ["adagrad", "lbfgs"])
def test_n_jobs_means_the_same_in_every_call(n_jobs, expected, optimizer, one_numba_thread, monkeypatch):
    """None: as many as the caller's thread has set, also in the thread that trains."""
    seen, get = {}, get_num_threads
    monkeypatch.setattr(fitting, "default_threads", lambda: 2)

    def note(module, function, name):
        original = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, **k: seen.update({name: get()}) or original(*a, **k))

    note(fitting, "train", "adagrad")
    note(direct_fit, "solve", "lbfgs")
    for name in ("scores", "proba", "argmax", "top_k", "log_likelihood"):
        note(predict, name, name)
    note(diagnosis, "diagnose", "diagnose")
    X, y = np.random.default_rng(0).standard_normal((40, 3)), np.arange(40) % 4
    clf = AugmentReduceClassifier(optimizer=optimizer, n_jobs=n_jobs, random_state=0, prior_variance=1.0).fit(X, y)
    clf.decision_function(X), clf.predict_proba(X), clf.predict(X), clf.predict_topk(X, 2), clf.log_likelihood(X, y)
    clf.diagnose(X, y)
    names = {optimizer, "scores", "proba", "argmax", "top_k", "log_likelihood", "diagnose"}
    assert seen == dict.fromkeys(names, expected)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_item_is_worked_on_once_with_one_thread_each(n):
    found, lock = [], threading.Lock()

    def work(item):
        with lock:
            found.append((item, get_num_threads() if n > 1 else 1, torch.get_num_threads()))

    with num_threads(n):
        for_each(work, range(50))
    assert sorted(found) == [(i, 1, 1) for i in range(50)]


@pytest.mark.parametrize("n", [1, 4])
def test_the_first_error_is_told_whoever_meets_it(n):
    begun = threading.Event()

    def work(item):
        if item == 5:
            begun.wait(10 if n > 1 else 0)  # a later one fails before it
        elif item == 6:
            begun.set()
        if item in (5, 6, 9):
            raise ValueError(f"item {item}")

    with num_threads(n), pytest.raises(ValueError, match="item 5"):
        for_each(work, range(40))


def test_one_torch_thread_is_given_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_torch_thread():
        _ = 1 / 0
    assert torch.get_num_threads() == before


WITHOUT_A_LAYER = """
import sys, warnings
import numpy as np, torch
import augment_reduce.estimator
from numba.np.ufunc import parallel
filters = list(warnings.filters)
X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
for model in ("softmax", "probit"):
    for settings in ({}, {"preset": "paper", "n_sampled_classes": 2}):
        clf = augment_reduce.AugmentReduceClassifier(model, max_iter=3, n_jobs=2, **settings).fit(X, np.arange(80) % 5)
        clf.predict_proba(X)
assert not parallel._is_initialized
import sklearn
sklearn.set_config(array_api_dispatch=True)  # tensors are taken as arrays
clf.fit(torch.from_numpy(X), torch.arange(80) % 5, sample_weight=torch.ones(80)).predict_proba(torch.from_numpy(X))
assert "sympy" not in sys.modules
assert warnings.filters == filters
"""


def test_no_threading_layer_is_needed_and_nothing_large_is_imported():
    """NUMBA_THREADING_LAYER=tbb without tbb; the first probit fit imported sympy, which changes warnings.filters."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_LAYER], capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_THREADING_LAYER": "tbb", "SCIPY_ARRAY_API": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
