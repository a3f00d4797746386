"""Milliseconds a step of the estimator on the CPU and on a GPU, by the size of its weights: where does a GPU pay?

    python -m benchmarks.speed.bench_device              # prints; --save appends to results/speed.csv
    python -m benchmarks.speed.bench_device --tiny       # small, on the CPU alone: does it run?

Sparse rows (50 non-zeros drawn by Zipf), default settings but for the number of steps; the two take turns, each fit
goes on from the last one, and a time is that of the training loop, without moving weights there and back.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier
from benchmarks.common import report, row

SHAPES = ((1_000, 10_000), (5_000, 20_000), (30_000, 20_000), (100_000, 20_000))  # K, D: 2^23 to 2^31 weights


def rows_of_zipf(n: int, D: int, K: int, per_row: int, seed: int = 0) -> tuple[sp.csr_matrix, np.ndarray]:
    rng = np.random.default_rng(seed)
    feature = np.minimum(((D + 1.0) ** rng.random((n, per_row)) - 1.0).astype(np.int64), D - 1)
    matrix = sp.csr_matrix(
        (np.ones(n * per_row, np.float32), (np.repeat(np.arange(n), per_row), feature.ravel())), shape=(n, D)
    )
    matrix.sum_duplicates()
    label = np.minimum(((K + 1.0) ** rng.random(n) - 1.0).astype(np.int64), K - 1)
    label[:K] = np.arange(min(K, n))  # every class is there
    return matrix, label


def one_pass(clf: AugmentReduceClassifier, X: sp.csr_matrix, y: np.ndarray, steps: int) -> float:
    """Milliseconds a step of `steps` more."""
    before = clf.n_iter_ if hasattr(clf, "n_iter_") else 0
    began = clf.history_["seconds"][-1] if before else 0.0
    clf.set_params(max_iter=before + steps).fit(X, y)
    return 1e3 * float(clf.history_["seconds"][-1] - began) / (clf.n_iter_ - before)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    shapes = ((50, 40),) if options.tiny else SHAPES
    devices = ["cpu", "cuda"] if torch.cuda.is_available() and not options.tiny else ["cpu"]
    found = []
    for K, D in shapes:
        X, y = rows_of_zipf(200 if options.tiny else max(50_000, 2 * K), D, K, 8 if options.tiny else 50)
        fits = {d: AugmentReduceClassifier(device=d, warm_start=True, random_state=0) for d in devices}
        for clf in fits.values():
            one_pass(clf, X, y, 3)  # compile, warm up
        times: dict[str, list[float]] = {d: [] for d in devices}
        for _ in range(options.turns):
            for device, clf in fits.items():
                times[device].append(one_pass(clf, X, y, 2 if options.tiny else options.steps))
        for device in devices:
            found.append(row("device", f"K {K} D {D} {device}", "milliseconds a step", times[device]))
            print(found[-1]["case"], found[-1]["p50"], flush=True)
        if len(devices) == 2:
            ratios = [a / b for a, b in zip(times["cpu"], times["cuda"], strict=True)]
            found.append(row("device", f"K {K} D {D}", "cpu / cuda", ratios))
    report(found, save=options.save)
    return found


if __name__ == "__main__":
    main()
