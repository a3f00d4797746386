"""The learners people pick, for speed/bench_quality.py: each is trained, then asked for its guesses and its likelihood.

None is a dependency; what is not installed is left out and named. Two of the trees define a distribution over single
labels (fastText's hierarchical softmax, napkinXC's HSM): theirs is the log likelihood of that. The others (napkinXC's
PLT, PECOS, omikuji) score every label as its own yes or no; divided by their sum over all labels these scores are a
distribution too, of a label drawn from the row's set, and the likelihood of that is marked "normalised scores".
A label that a learner gives no probability counts as FLOOR, and such rows are counted: fastText lists no label below
about 1e-5, so that this is about the most it can have meant.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

FLOOR = 1e-5
GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
PAIRS = 2_000_000  # (row, label) scores held at once
Scores = tuple[np.ndarray, np.ndarray]  # of every test example: its label's score, the sum of all labels' scores


@dataclass
class Trained:
    """What a learner gives back: five guesses of every test row, and how likely the test examples' labels are."""

    top: np.ndarray
    scores: Scores
    seconds: float  # of training alone
    normalised: bool = False
    tuning_seconds: float | None = None


def likelihood(trained: Trained) -> dict[str, float]:
    """Mean log likelihood of the test examples, under a name that says what it is of, and how many were floored."""
    own, total = trained.scores
    p = own / np.where(total > 0.0, total, 1.0) if trained.normalised else own
    name = "log lik, normalised scores" if trained.normalised else "log lik"
    lost = ~(p > 0.0)
    return {name: float(np.log(np.where(lost, FLOOR, p)).mean()), "rows floored": float(lost.sum())}


# ---- scikit-learn ----


class TimeUp(Exception):
    """The time that a learner may take is over."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt the body, which must come back to Python now and then, when the time is over."""

    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def fit_logistic(X: sp.csr_matrix, y: np.ndarray, C: float) -> Any:
    """tol is of the mean gradient, which with K balanced classes begins near 1 / K: a tol of 1e-3 would end there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=C, max_iter=200, tol=1e-6).fit(X, y)


def mean_log_likelihood(model: Any, X: sp.csr_matrix, y: np.ndarray) -> float:
    log_p = model.predict_log_proba(X)
    return float(log_p[np.arange(len(y)), np.searchsorted(model.classes_, y)].mean())


def tuned_C(task: Any, cap: float, grid: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """(C, seconds): the best on a tenth of the training rows, from strong priors to weak ones.

    Ends at the second fall in a row, or when the time is over; held-out rows with a label of no other row are left out.
    One value is no choice.
    """
    if len(grid) == 1:
        return grid[0], 0.0
    order = np.random.default_rng(seed).permutation(len(task.y))
    held, kept = np.split(order, [-(-len(order) // 10)])
    held = held[np.isin(task.y[held], task.y[kept])]
    started, found = time.perf_counter(), {}
    with contextlib.suppress(TimeUp), at_most(cap):
        for C in grid:
            found[C] = mean_log_likelihood(fit_logistic(task.X[kept], task.y[kept], C), task.X[held], task.y[held])
            print(f"    C {C:g}: {found[C]:.4f} on held-out rows", flush=True)
            tried = list(found.values())
            if len(tried) > 2 and tried[-1] < tried[-2] < tried[-3]:
                break
    return max(found, key=found.__getitem__, default=1.0), time.perf_counter() - started


def logistic_regression(task: Any, folder: Path, cap: float, grid: Sequence[float], *, tuned: bool = False) -> Trained:
    C, tuning = tuned_C(task, cap, grid) if tuned else (1.0, None)
    started = time.perf_counter()
    with at_most(cap):
        model = fit_logistic(task.X, task.y, C)
    seconds = time.perf_counter() - started
    print(f"    C {C:g}, {int(model.n_iter_.max())} of at most 200 iterations", flush=True)
    own = np.exp(model.predict_log_proba(task.test_X))[
        np.arange(len(task.test_y)), np.searchsorted(model.classes_, task.test_y)
    ]
    top = model.classes_[np.argsort(-model.decision_function(task.rows_X), axis=1)[:, :5]]
    return Trained(top, (own, np.ones(len(own))), seconds=seconds, tuning_seconds=tuning)


# ---- trees ----


def pecos(task: Any, folder: Path, *_: Any) -> Trained:
    """In the interpreter that PECOS_PYTHON names, since PECOS needs an older NumPy than we do."""
    matrices = {"X": task.rows_train, "Y": task.sets_train, "rows": task.rows_X, "test": task.test_X}
    for name, matrix in matrices.items():
        sp.save_npz(folder / f"{name}.npz", matrix)
    np.save(folder / "y.npy", task.test_y)
    script = Path(__file__).with_name("pecos_process.py")
    said = subprocess.run(
        [os.environ["PECOS_PYTHON"], str(script), str(folder)], check=True, capture_output=True, text=True
    ).stdout
    top, own, total = (np.load(folder / f"{name}.npy") for name in ("top", "own", "total"))
    return Trained(top, (own, total), normalised=True, seconds=float(said.split()[-1]))


def omikuji(task: Any, folder: Path, *_: Any) -> Trained:
    from omikuji import Model

    path = folder / "train.txt"
    write_sets(path, task)
    started = time.perf_counter()
    model = Model.train_on_data(str(path), n_threads=2)
    seconds = time.perf_counter() - started

    def scored(X: sp.csr_matrix, k: int, beam: int) -> Iterator[list[tuple[int, float]]]:
        for row in X:
            yield model.predict(list(zip(row.indices, row.data, strict=True)), beam_size=beam, top_k=k)

    top = np.array([first_five([label for label, _ in pairs]) for pairs in scored(task.rows_X, 5, 10)])
    everything = scored(task.test_X, task.n_classes, task.n_classes)
    return Trained(top, label_scores(everything, task.test_y), normalised=True, seconds=seconds)


def napkinxc(task: Any, folder: Path, *_: Any, kind: str) -> Trained:
    from napkinxc import models

    model = getattr(models, kind)(str(folder / kind), threads=2)
    started = time.perf_counter()
    if kind == "HSM":
        model.fit(task.X, [[int(label)] for label in task.y])
    else:
        model.fit(task.rows_train, [list(map(int, labels.indices)) for labels in task.sets_train])
    seconds = time.perf_counter() - started

    def scored() -> Iterator[list[tuple[int, float]]]:
        step = max(1, PAIRS // task.n_classes)
        for start in range(0, len(task.test_y), step):
            yield from model.predict_proba(task.test_X[start : start + step], top_k=task.n_classes)

    top = np.array([first_five(labels) for labels in model.predict(task.rows_X, top_k=5)])
    return Trained(top, label_scores(scored(), task.test_y), normalised=kind != "HSM", seconds=seconds)


def fasttext(task: Any, folder: Path, *_: Any) -> Trained:
    import fasttext as library

    path = folder / "fasttext.txt"
    with open(path, "w") as file:
        for words, labels in zip(texts(task.rows_train), task.sets_train, strict=True):
            file.writelines(f"__label__{label} {words}" for label in labels.indices)
    started = time.perf_counter()
    model = library.train_supervised(str(path), loss="hs", epoch=10, lr=0.5, dim=100, thread=2, verbose=0)
    seconds = time.perf_counter() - started

    def scored(X: sp.csr_matrix, k: int) -> Iterator[list[tuple[int, float]]]:
        for words in texts(X):
            yield [(int(name[9:]), p) for p, name in model.f.predict(words, k, 0.0, "strict")]

    top = np.array([first_five([label for label, _ in pairs]) for pairs in scored(task.rows_X, 5)])
    return Trained(top, label_scores(scored(task.test_X, -1), task.test_y), seconds=seconds)


def label_scores(scored: Iterable[list[tuple[int, float]]], labels: np.ndarray) -> Scores:
    """The score of each example's own label, 0 where it is not among those listed, and the sum of those listed."""
    found = [
        (next((p for label, p in pairs if label == own), 0.0), sum(p for _, p in pairs))
        for pairs, own in zip(scored, labels.tolist(), strict=True)
    ]
    own, total = np.array(found).T
    return own, total


def first_five(labels: Sequence[int]) -> list[int]:
    return (list(labels) + [0] * 5)[:5]


def texts(X: sp.csr_matrix) -> Iterator[str]:
    """Rows as fastText reads them: the names of the features that are there, without their values."""
    return (" ".join(f"f{d}" for d in row.indices) + "\n" for row in X)


def write_sets(path: Path, task: Any) -> None:
    with open(path, "w") as file:
        file.write(f"{task.rows_train.shape[0]} {task.rows_train.shape[1]} {task.n_classes}\n")
        for features, labels in zip(task.rows_train, task.sets_train, strict=True):
            pairs = " ".join(f"{d}:{v:g}" for d, v in zip(features.indices, features.data, strict=True))
            file.write(f"{','.join(map(str, labels.indices))} {pairs}\n")


PEERS: dict[str, tuple[str, Callable[[Any, Path, float], Trained]]] = {
    "scikit-learn LogisticRegression": ("sklearn", logistic_regression),
    "scikit-learn tuned": ("sklearn", partial(logistic_regression, tuned=True)),
    "pecos": ("pecos", pecos),
    "omikuji": ("omikuji", omikuji),
    "napkinxc-plt": ("napkinxc", partial(napkinxc, kind="PLT")),
    "napkinxc-hsm": ("napkinxc", partial(napkinxc, kind="HSM")),
    "fasttext": ("fasttext", fasttext),
}


def installed(package: str) -> bool:
    return "PECOS_PYTHON" in os.environ if package == "pecos" else find_spec(package) is not None
