"""Small fits and head trainings whose results are kept in golden_fits.json, which a change of the engine keeps.

python -m tests.helpers.golden_fits    # writes the file anew, where results are meant to change; say so in the commit
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.nn import AugmentReduceHead

FILE = Path(__file__).with_name("golden_fits.json")
N, D, K = 240, 40, 30
MODELS = ("softmax", "probit", "logistic")
SAMPLERS = ("all", "head-tail-shared", "pointed-shared", "uniform")
FITS = list(itertools.product(MODELS, SAMPLERS, ("float32", "float64")))
HEADS = list(itertools.product(MODELS, ("adagrad", "rowwise-adagrad")))


def projected(*arrays: Any) -> list[float]:
    """Three random projections of each array: any weight that changes changes them."""
    generator = np.random.default_rng(5)
    flat = [np.asarray(array, np.float64).ravel() for array in arrays]
    return [float(array @ generator.standard_normal(len(array))) for array in flat for _ in range(3)]


def fit(model: str, sampler: str, dtype: str, n_jobs: int = 1) -> AugmentReduceClassifier:
    generator = np.random.default_rng(3)
    X = sp.random(N, D, 0.2, "csr", dtype, random_state=generator, data_rvs=generator.standard_normal)
    y = (X @ generator.standard_normal((D, K)) + generator.gumbel(size=(N, K))).argmax(1)
    y[:K] = np.arange(K)
    clf = AugmentReduceClassifier(
        model, class_sampling=sampler, n_sampled_classes=8, batch_size=32, max_iter=40, prior_variance=2.0,
        learning_rate=0.2, n_jobs=n_jobs, dtype=dtype, random_state=11,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clf.fit(X, y)


def numbers_of_fit(clf: AugmentReduceClassifier) -> list[float]:
    return [*projected(clf.coef_, clf.intercept_), float(clf.history_["bound"][-1])]


def head_numbers(model: str, optimizer: str) -> list[float]:
    generator = torch.Generator().manual_seed(2)
    head = AugmentReduceHead(
        12, K, model=model, n_sampled_classes=8, optimizer=optimizer, learning_rate=0.1, generator=generator
    )
    losses = []
    for _ in range(20):
        hidden = torch.randn(16, 12, generator=generator).requires_grad_()
        loss = head(hidden, torch.randint(K, (16,), generator=generator))
        loss.backward()
        losses.append(float(loss.detach()))
    return [*projected(head.weight.detach(), head.bias.detach(), hidden.grad), losses[0], losses[-1]]


def name_of(case: tuple[str, ...]) -> str:
    return " ".join(case)


def main() -> None:
    found = {name_of(case): numbers_of_fit(fit(*case)) for case in FITS}
    found |= {name_of(("head", *case)): head_numbers(*case) for case in HEADS}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(found)} results in {FILE.name}\n")


if __name__ == "__main__":
    main()
