"""Time to quality against the learners people pick, side by side in one run: test log likelihood and precision.

    python benchmarks/bench_quality.py --datasets bibtex mnist debian-5k --save
    python benchmarks/bench_quality.py --datasets debian-full --methods ours exact pecos omikuji --save

Ours and `exact` (the same estimator, method="exact") are looked at after every few epochs; the others once, at the
end of their training. Seconds are of training alone. Peers are optional: those not installed are left out and named.
Precision is over test rows against all their labels; the log likelihood over (row, label) examples, of a sample of
them where K is large; trees give none, or (fastText, napkinXC's HSM) probabilities of a tree, not looked up here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from common import report, row

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset, random_like

DATASETS = {
    "mnist": ("mnist", {}), "bibtex": ("bibtex", {}), "omniglot": ("omniglot", {}),
    "debian-5k": ("debian-deps", {"min_count": 5}), "debian-full": ("debian-deps", {}),
}  # fmt: skip


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
    """(seconds, measures) of our estimator after so many epochs each."""
    clf = AugmentReduceClassifier(warm_start=True, dtype="float32", random_state=seed, **settings)
    done = 0.0
    for epochs in looks:
        clf.set_params(max_epochs=epochs - done).fit(task.X, task.y)
        done = epochs
        classes, _ = clf.predict_topk(task.rows_X, min(5, task.n_classes))
        measures = {"log lik": clf.log_likelihood(task.test_X, task.test_y), **precision(task, classes)}
        yield float(clf.history_["seconds"][-1]), measures


def logistic_regression(task: Task, folder: Path, C: float = 1.0) -> Callable[[], tuple[np.ndarray, float]]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=C, max_iter=200, tol=1e-3).fit(task.X, task.y)

    def predict() -> tuple[np.ndarray, float]:
        log_p = model.predict_log_proba(task.test_X)
        likelihood = log_p[np.arange(len(task.test_y)), np.searchsorted(model.classes_, task.test_y)].mean()
        return model.classes_[np.argsort(-model.decision_function(task.rows_X), axis=1)[:, :5]], float(likelihood)

    return predict


def pecos(task: Task, folder: Path) -> Callable[[], tuple[np.ndarray, float]]:
    """In the interpreter that PECOS_PYTHON names, since PECOS needs an older NumPy than we do."""
    for name, matrix in (("X", task.rows_train), ("Y", task.sets_train), ("test", task.rows_X)):
        sp.save_npz(folder / f"{name}.npz", matrix)
    script = Path(__file__).with_name("peer_pecos.py")
    said = subprocess.run(
        [os.environ["PECOS_PYTHON"], str(script), str(folder)], check=True, capture_output=True, text=True
    ).stdout
    top = np.load(folder / "top.npy")
    predict = lambda: (top, np.nan)  # noqa: E731
    predict.seconds = float(said.split()[-1])  # type: ignore[attr-defined]
    return predict


def omikuji(task: Task, folder: Path) -> Callable[[], tuple[np.ndarray, float]]:
    from omikuji import Model

    path = folder / "train.txt"
    _write(path, task)
    model = Model.train_on_data(str(path), n_threads=2) if hasattr(Model, "train_on_data") else None
    top = model.predict
    return lambda: (
        np.array([_padded(top(list(zip(r.indices, r.data, strict=True)), top_k=5)) for r in task.rows_X]),
        np.nan,
    )


def napkinxc(task: Task, folder: Path, kind: str) -> Callable[[], tuple[np.ndarray, float]]:
    from napkinxc import models

    model = getattr(models, kind)(str(folder / kind), threads=2)
    if kind == "HSM":
        model.fit(task.X, [[int(label)] for label in task.y])
    else:
        model.fit(task.rows_train, [list(map(int, labels.indices)) for labels in task.sets_train])
    return lambda: (np.array([_filled(labels) for labels in model.predict(task.rows_X, top_k=5)]), np.nan)


def fasttext(task: Task, folder: Path) -> Callable[[], tuple[np.ndarray, float]]:
    import fasttext as library

    path = folder / "fasttext.txt"
    with open(path, "w") as file:
        for features, labels in zip(task.rows_train, task.sets_train, strict=True):
            words = " ".join(f"f{d}" for d in features.indices)
            file.writelines(f"__label__{label} {words}\n" for label in labels.indices)
    model = library.train_supervised(str(path), loss="hs", epoch=10, lr=0.5, dim=100, thread=2, verbose=0)
    texts = [" ".join(f"f{d}" for d in r.indices) + "\n" for r in task.rows_X]

    def predict() -> tuple[np.ndarray, float]:
        found = [[int(name[9:]) for _, name in model.f.predict(text, 5, 0.0, "strict")] for text in texts]
        return np.array([_filled(labels) for labels in found]), np.nan

    return predict


def _best(scores: sp.csr_matrix) -> np.ndarray:
    return np.array([_filled(r.indices[np.argsort(-r.data)].tolist()) for r in sp.csr_matrix(scores)])


def _filled(labels: list[int]) -> list[int]:
    return (list(labels) + [0] * 5)[:5]


def _padded(pairs: list[tuple[int, float]]) -> list[int]:
    return _filled([label for label, _ in pairs])


def _write(path: Path, task: Task) -> None:
    with open(path, "w") as file:
        file.write(f"{task.rows_train.shape[0]} {task.rows_train.shape[1]} {task.n_classes}\n")
        for features, labels in zip(task.rows_train, task.sets_train, strict=True):
            pairs = " ".join(f"{d}:{v:g}" for d, v in zip(features.indices, features.data, strict=True))
            file.write(f"{','.join(map(str, labels.indices))} {pairs}\n")


PEERS: dict[str, tuple[str, Callable[[Task, Path], Callable[[], tuple[np.ndarray, float]]]]] = {
    "scikit-learn LogisticRegression": ("sklearn", logistic_regression),
    "pecos": ("pecos", pecos),
    "omikuji": ("omikuji", omikuji),
    "napkinxc-plt": ("napkinxc", lambda task, folder: napkinxc(task, folder, "PLT")),
    "napkinxc-hsm": ("napkinxc", lambda task, folder: napkinxc(task, folder, "HSM")),
    "fasttext": ("fasttext", fasttext),
}


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex"], choices=list(DATASETS))
    parser.add_argument("--methods", nargs="+", default=["ours", "exact", *PEERS])
    parser.add_argument("--epochs", nargs="+", type=float, default=[1, 2, 4, 8, 16])
    parser.add_argument("--exact-epochs", nargs="+", type=float, default=[1, 2, 4, 8])
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
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
    found: list[tuple[str, float, dict[str, float]]] = []
    if method in ("ours", "exact"):
        settings = {} if method == "ours" else {"method": "exact"}
        looks = [1.0] if options.tiny else options.epochs if method == "ours" else options.exact_epochs
        found = [
            (f"{method}, {e:g} epochs", s, m)
            for e, (s, m) in zip(looks, curve(task, looks, options.seed, **settings), strict=True)
        ]
    else:
        package, learn = PEERS[method]
        if (package == "pecos" and "PECOS_PYTHON" not in os.environ) or (
            package != "pecos" and find_spec(package) is None
        ):
            print(f"{method}: {package} is not installed, left out")
            return []
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            predict = learn(task, Path(folder))
            seconds = getattr(predict, "seconds", time.perf_counter() - started)
            top, likelihood = predict()
        found = [(method, seconds, {"log lik": likelihood, **precision(task, top)})]
    lines = []
    for label, seconds, measures in found:
        print(
            f"{name:12} {label:34} {seconds:8.1f} s  " + "  ".join(f"{k} {v:.4f}" for k, v in measures.items()),
            flush=True,
        )
        lines.append(row("quality", f"{name} {label}", "seconds", [seconds]))
        lines += [row("quality", f"{name} {label}", key, [value]) for key, value in measures.items()]
    return lines


if __name__ == "__main__":
    main()
