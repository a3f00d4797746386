"""Small fits that reach every kernel of the CPU, by name, for a comparison of compiled code with the same in Python.

NUMBA_DISABLE_JIT=1 python -m tests.helpers.uncompiled_fits fits.npz
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier, SectionFour
from augment_reduce.optim import OPTIMIZERS
from tests.helpers.user_noises import CompiledStudentT3

N, K, S = 24, 8, 4
WIDTH = {"sparse": 6, "dense": 32, "wide": 4000, "empty": 1}
ZEROS = {"sparse": 0.5, "wide": 0.995, "empty": 1.0}
MODELS = ("softmax", "probit", "logistic")
SHARED = {"class_sampling": "head-tail-shared"}
PER_ROW = {"class_sampling": "uniform"}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind of rows, the estimator's parameters)"""
    for kind in ("sparse", "dense"):
        for model in MODELS:
            for settings in ({"class_sampling": "all"}, SHARED, PER_ROW, {"preset": "paper"}):
                yield kind, {"model": model, **settings}
        for optimizer in OPTIMIZERS:
            for sampling in (SHARED, PER_ROW):
                yield kind, {"model": "softmax", "optimizer": optimizer, **sampling}
    for model in (*MODELS, CompiledStudentT3()):
        yield "sparse", {"model": model, "class_sampling": "candidates-shared"}
        yield "sparse", {"model": model, "local_step": "grid", **SHARED}
    for kind in ("wide", "empty"):
        for sampling in (SHARED, PER_ROW):
            yield kind, {"model": "softmax", **sampling}
    yield "sparse", {"model": "softmax", "local_step": "amortised", **SHARED}
    yield "sparse", {"model": "softmax", "optimizer": SectionFour(every_entry=True), **PER_ROW}
    for sampling in ("frequency", "cache-shared", "conditional"):
        yield "sparse", {"model": "softmax", "class_sampling": sampling, "dtype": "float32"}


def rows(kind: str) -> tuple[Any, np.ndarray]:
    """Sparse rows come twice each, so that they are scored as groups; dense ones have two vectors of features; wide
    ones more features than a minibatch has non-zeros; empty ones no non-zeros."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((N, WIDTH[kind]))
    y = np.arange(N) % K
    if kind == "dense":
        return X, y
    X[generator.random(X.shape) < ZEROS[kind]] = 0.0
    return sp.csr_matrix(np.repeat(X[: N // 2], 2, axis=0)), y


def fits() -> dict[str, np.ndarray]:
    found = {}
    for kind, parameters in cases():
        settings = {"n_sampled_classes": S, "batch_size": 12, "max_iter": 3, "random_state": 0, **parameters}
        if "preset" not in settings:
            settings["prior_variance"] = 1.0
        X, y = rows(kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # three steps are too few, and the tests say so elsewhere
            clf = AugmentReduceClassifier(**settings).fit(X, y)
        name = " ".join([kind, *(str(value) for value in parameters.values())])
        found[name] = np.concatenate([clf.coef_.ravel(), clf.intercept_, clf.predict_proba(X[:2]).ravel()])
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **fits())
