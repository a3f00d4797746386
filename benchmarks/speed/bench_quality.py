"""Time to quality against the learners people pick, side by side in one run: test log likelihood and precision.

    python -m benchmarks.speed.bench_quality --datasets bibtex mnist debian-5k --save
    python -m benchmarks.speed.bench_quality --datasets debian-full --methods ours exact pecos omikuji --save

Ours (softmax; probit and logistic by name), `exact` and `sampled-softmax` (the same estimator with that method) and
`torch exact` (peers/torch_exact.py: exact softmax as one would write it in torch) are evaluated after every few epochs,
the others once, at the end of their training. Seconds are of training alone. Peers are optional: those not installed
are left out and named. Precision is over test rows against all their labels; the log likelihood over (row, label)
examples, of a sample of them where K is large; peers/libraries.py says what it means for each tree. "scikit-learn
tuned" chooses C on a tenth of the training rows among `--grid`; choosing and the last fit may take `--cap` seconds
each, and are reported apart.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset, random_like
from benchmarks.common import report, row
from benchmarks.peers.libraries import GRID, PEERS, TimeUp, installed, likelihood
from benchmarks.peers.torch_exact import torch_exact

DATASETS = {
    "mnist": ("mnist", {}), "bibtex": ("bibtex", {}), "omniglot": ("omniglot", {}),
    "debian-5k": ("debian-deps", {"min_count": 5}), "debian-full": ("debian-deps", {}),
}  # fmt: skip


OURS = {
    "ours": {}, "ours probit": {"model": "probit"}, "ours logistic": {"model": "logistic"},
    "exact": {"method": "exact"}, "sampled-softmax": {"method": "sampled-softmax"},
}  # fmt: skip
CURVES = [*OURS, "torch exact"]


@dataclass
class Task:
    """Training examples, test examples for the likelihood, test rows with their label sets for precision."""

    X: sp.csr_matrix
    y: np.ndarray
    test_X: sp.csr_matrix
    test_y: np.ndarray
    rows_X: sp.csr_matrix
    relevant: sp.csr_matrix
    rows_train: sp.csr_matrix  # each training row once, with its set of labels, for learners that take sets
    sets_train: sp.csr_matrix
    n_classes: int


def indicator(y: np.ndarray, n_classes: int) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(len(y), np.float32), (np.arange(len(y)), y)), shape=(len(y), n_classes))


def load(name: str, tiny: bool, limit: int) -> Task:
    """`limit` test examples carry the likelihood, every n-th so that all kinds are there."""
    source, options = DATASETS[name]
    data = random_like("bibtex", n_rows=400) if tiny else load_dataset(source, download=False, **options)
    X, y = sp.csr_matrix(data.train.X), np.asarray(data.train.y)
    test = data.test if data.test is not None else data.train
    test_X, test_y = sp.csr_matrix(test.X), np.asarray(test.y)
    K = data.n_classes
    if getattr(test, "original", None) is not None and source == "debian-deps":
        relevant = data.relevant(test)
        rows_X = sp.csr_matrix(test.original.X)
        sets, rows_train = data.relevant(data.train), sp.csr_matrix(data.train.original.X)
    else:
        relevant, rows_X, sets, rows_train = indicator(test_y, K), test_X, indicator(y, K), X
    kept = np.linspace(0, len(test_y) - 1, min(limit, len(test_y))).astype(int)
    return Task(X, y, test_X[kept], test_y[kept], rows_X, sp.csr_matrix(relevant), rows_train, sp.csr_matrix(sets), K)


def precision(task: Task, top: np.ndarray) -> dict[str, float]:
    """P@1 and P@5 of (rows, 5) classes, best first."""
    hits = np.asarray(task.relevant[np.arange(len(top))[:, None], top].todense(), dtype=bool)
    return {"P@1": float(hits[:, 0].mean()), "P@5": float(hits.mean())}


def curve(task: Task, looks: list[float], seed: int, **settings) -> Iterator[tuple[float, dict[str, float]]]:
    """(seconds, measures) of our estimator after so many epochs each; kernels are loaded, or compiled, before."""
    AugmentReduceClassifier(dtype="float32", max_iter=2, **settings).fit(task.X, task.y)
    clf = AugmentReduceClassifier(warm_start=True, dtype="float32", random_state=seed, **settings)
    done = 0.0
    for epochs in looks:
        clf.set_params(max_epochs=epochs - done).fit(task.X, task.y)
        done = epochs
        classes, _ = clf.predict_topk(task.rows_X, min(5, task.n_classes))
        measures = {"log lik": clf.log_likelihood(task.test_X, task.test_y), **precision(task, classes)}
        yield float(clf.history_["seconds"][-1]), measures


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex"], choices=list(DATASETS))
    parser.add_argument("--methods", nargs="+", default=[*CURVES, *PEERS])
    parser.add_argument("--epochs", nargs="+", type=float, default=[1, 2, 4, 8, 16])
    parser.add_argument("--exact-epochs", nargs="+", type=float, default=[1, 2, 4, 8])
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
    parser.add_argument("--cap", type=float, default=600.0, help="seconds scikit-learn may take to tune, and to fit")
    parser.add_argument("--grid", nargs="+", type=float, default=GRID, help="of C, for scikit-learn tuned")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    results = []
    for name in options.datasets:
        task = load(name, options.tiny, options.limit)
        for method in options.methods:
            results += measure(name, method, task, options)
    report(results, save=options.save)
    return results


def measure(name: str, method: str, task: Task, options: argparse.Namespace) -> list[dict[str, object]]:
    found = by_epochs(method, task, options) if method in CURVES else peer(method, task, options)
    lines = []
    for label, measures in found:
        shown = "  ".join(f"{key} {value:.4f}" for key, value in measures.items() if key != "seconds")
        print(f"{name:12} {label:34} {measures['seconds']:8.1f} s  {shown}", flush=True)
        lines += [row("quality", f"{name} {label}", key, [value]) for key, value in measures.items()]
    return lines


Found = list[tuple[str, dict[str, float]]]  # a name and its measures, "seconds" among them


def by_epochs(method: str, task: Task, options: argparse.Namespace) -> Found:
    looks = [1.0] if options.tiny else options.exact_epochs if "exact" in method else options.epochs
    if method in OURS:
        found = curve(task, looks, options.seed, **OURS[method])
    else:
        found = (
            (seconds, {"log lik": value, **precision(task, top)}) for seconds, value, top in torch_exact(task, looks)
        )
    measured = zip(looks, found, strict=True)
    return [(f"{method}, {epochs:g} epochs", {"seconds": seconds, **found}) for epochs, (seconds, found) in measured]


def peer(method: str, task: Task, options: argparse.Namespace) -> Found:
    package, learn = PEERS[method]
    if not installed(package):
        print(f"{method}: {package} is not installed, left out")
        return []
    with tempfile.TemporaryDirectory() as folder:
        try:
            trained = learn(task, Path(folder), options.cap, options.grid)
        except TimeUp:
            print(f"{method}: not done within {options.cap:g} s, left out")
            return []
    measures = {"seconds": trained.seconds}
    if trained.tuning_seconds is not None:
        measures["tuning seconds"] = trained.tuning_seconds
    return [(method, measures | likelihood(trained) | precision(task, trained.top))]


if __name__ == "__main__":
    main()
