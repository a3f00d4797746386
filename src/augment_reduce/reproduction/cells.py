"""One cell of the paper's tables (a dataset, a method, a seed): train, evaluate test rows during training, measure.

The results do not depend on interruptions: training resumes from a checkpoint bit for bit, so that a cell that was
killed and run again ends with the same weights and numbers (except times).
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..config.defaults import Shape, resolve
from ..estimator import AugmentReduceClassifier
from ..kernels.rows import as_rows
from ..model.noise import resolve_noise
from ..persistence.files import ModelFileError
from . import evaluate, synthetic
from .settings import METHODS, Study, study_named
from .sources import Source, load
from .store import Store, plain

CHECKPOINT_SECONDS = 60.0
CURVES = ("iteration", "seconds", "bound", "bound_gap")

Report = Callable[[int, str], None]  # iterations done, a note


@dataclass(frozen=True)
class Cell:
    """`kind` "timing" is for table 2 only, a few epochs; `asked` are the requested iterations instead of the
    paper's."""

    study: str
    method: str
    seed: int
    kind: str = "full"
    asked: int | None = None

    @property
    def of(self) -> Study:
        return study_named(self.study)

    @property
    def iterations(self) -> int:
        return self.asked or (self.of.timing_iterations if self.kind == "timing" else self.of.iterations)

    @property
    def key(self) -> str:
        kind = ".timing" if self.kind == "timing" else ""
        asked = f".iterations{self.asked}" if self.asked else ""
        return f"{self.study}.{self.method}.seed{self.seed}{kind}{asked}"

    def stops(self) -> list[int]:
        """Iterations after which the test rows are evaluated, including the last one."""
        n = 1 if self.kind == "timing" else min(METHODS[self.method].n_evaluations, self.iterations)
        return [math.ceil(self.iterations * (i + 1) / n) for i in range(n)]

    def estimator(self) -> AugmentReduceClassifier:
        """The paper's settings, on one core; all others are those of the preset."""
        method = METHODS[self.method]
        return AugmentReduceClassifier(
            method.model, method=method.method, n_sampled_classes=self.of.n_sampled_classes,
            batch_size=self.of.batch_size, preset="paper", random_state=self.seed, n_jobs=1, warm_start=True,
        )  # fmt: skip


def run_cell(cell: Cell, store: Store, data: Path | None, report: Report, *, at_once: int = 1) -> dict[str, Any]:
    """Run a cell to its end, from its checkpoint if there is one; store and return its numbers."""
    source = load(cell.of, data, cell.of.seed_of_rows(cell.seed))
    clf, points = train(cell, source, store, report)
    report(cell.iterations, "measuring")
    record = {
        "key": cell.key, "dataset": cell.study, "method": cell.method, "seed": cell.seed, "kind": cell.kind,
        "asked_iterations": cell.asked, "iterations": cell.iterations,
        "metrics": measure(cell, clf, source, points), "looks": points, "data": source.identity,
        "settings": settings_of(clf, source), "weights_sha256": fingerprint(clf), "versions": versions(),
        "machine": machine(), "cells_at_once": at_once, "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    record = plain(record)
    store.finish(cell.key, record, {name: clf.history_[name] for name in CURVES})
    return record


# ---- training ----


def train(
    cell: Cell, source: Source, store: Store, report: Report
) -> tuple[AugmentReduceClassifier, list[dict[str, float]]]:
    """Train to the end; save a checkpoint about every minute and when interrupted."""
    clf, points = resume(cell, source, store) or (cell.estimator(), [])
    report(done(clf), "compiling" if done(clf) == 0 else "going on")
    if done(clf) < cell.iterations:
        warm_up(cell, source)
    saved = time.monotonic()
    try:
        for stop in cell.stops():
            if stop > done(clf):
                clf.set_params(max_iter=stop - done(clf)).fit(source.X, source.y)
            if stop == done(clf) and all(point["iteration"] != stop for point in points):
                points.append(evaluate_point(clf, source, cell))
                report(stop, describe(points[-1]))
            if stop < cell.iterations and time.monotonic() - saved >= CHECKPOINT_SECONDS:
                checkpoint(cell, clf, points, source, store)
                saved = time.monotonic()
    except KeyboardInterrupt:
        if done(clf):
            checkpoint(cell, clf, points, source, store)
        raise
    return clf, points


def done(clf: AugmentReduceClassifier) -> int:
    return int(getattr(clf, "n_iter_", 0))


def warm_up(cell: Cell, source: Source) -> None:
    """Two steps on a few rows, to compile the kernels before the timed part."""
    n_rows = min(cell.of.batch_size, len(source.y))
    if len(np.unique(source.y[:n_rows])) > 1:
        cell.estimator().set_params(max_iter=2).fit(source.X[:n_rows], source.y[:n_rows])


def evaluate_point(clf: AugmentReduceClassifier, source: Source, cell: Cell) -> dict[str, float]:
    """A point of the learning curve: test log likelihood, or the error of the probabilities on synthetic data."""
    point = {"iteration": float(done(clf)), "seconds": float(clf.history_["seconds"][-1])}
    if cell.kind == "timing":
        return point
    if source.X_test is not None and source.y_test is not None:
        values = evaluate.row_log_likelihoods(clf, source.X_test, source.y_test)
        point["test_log_likelihood"] = float(values.mean())
    if source.dataset.probabilities is not None:
        errors = synthetic.probability_errors(clf, source.y, source.dataset.probabilities)
        point["error_to_frequencies"] = errors["error_to_frequencies"]
    return point


def describe(point: dict[str, float]) -> str:
    if "test_log_likelihood" in point:
        return f"test {point['test_log_likelihood']:.3f}"
    if "error_to_frequencies" in point:
        return f"error {point['error_to_frequencies']:.2e}"
    return ""


# ---- checkpoints ----


def checkpoint(
    cell: Cell, clf: AugmentReduceClassifier, points: list[dict[str, float]], source: Source, store: Store
) -> None:
    """Save the evaluations first: those later than the saved model are dropped when resuming."""
    store.save_points(cell.key, {"data": source.identity, "looks": points})
    clf.save(store.model_path(cell.key))


def resume(cell: Cell, source: Source, store: Store) -> tuple[AugmentReduceClassifier, list[dict[str, float]]] | None:
    """Model and evaluations of a checkpoint; None if there is none, it cannot be read, or the data differ."""
    kept, path = store.points(cell.key), store.model_path(cell.key)
    if kept is None or kept.get("data") != source.identity or not path.is_file():
        return None
    try:
        clf = AugmentReduceClassifier.load(path, n_jobs=cell.estimator().n_jobs)
    except ModelFileError:
        return None
    return clf, [point for point in kept["looks"] if point["iteration"] <= done(clf)]


# ---- measuring ----


def measure(
    cell: Cell, clf: AugmentReduceClassifier, source: Source, points: list[dict[str, float]]
) -> dict[str, float]:
    history = clf.history_
    mean, median = evaluate.seconds_per_epoch(history)
    found: dict[str, float] = {
        "seconds_per_epoch": mean,
        "seconds_per_epoch_median": median,
        "training_seconds": float(history["seconds"][-1]),
        "epochs": float(history["epoch"][-1]),
    }
    if cell.kind == "timing":
        return found
    found["bound"] = float(evaluate.moving_average(history["iteration"], history["bound"])[-1])
    found["bound_gap"] = evaluate.last_finite(history["bound_gap"])
    if source.X_test is not None and source.y_test is not None:
        found |= evaluate.heldout_metrics(clf, source.X_test, source.y_test)
        best = max(points, key=lambda point: point["test_log_likelihood"])
        found |= {"best_test_log_likelihood": best["test_log_likelihood"], "best_iteration": best["iteration"]}
    if source.dataset.probabilities is not None:
        found |= synthetic.probability_errors(clf, source.y, source.dataset.probabilities)
        found |= synthetic.total_bound(clf, source.y)
    else:
        found |= evaluate.training_metrics(clf, source.X, source.y)
    return found


def settings_of(clf: AugmentReduceClassifier, source: Source) -> dict[str, Any]:
    """The parameters given, and all resolved settings in one line."""
    given = clf.get_params(deep=False)
    shape = Shape.of(as_rows(source.X), len(clf.classes_))
    dtype = clf._fitted.parameters.weight.dtype
    resolved = resolve(given, resolve_noise(clf.model), shape, dtype)
    names = ("model", "method", "preset", "batch_size", "n_sampled_classes", "random_state", "n_jobs")
    return {
        **{name: given[name] for name in names},
        "dtype": str(dtype).removeprefix("torch."),
        "optimizer": repr(resolved.optimizer),
        "local_step": repr(resolved.local),
        "initial_scale": list(resolved.init_scale),
    }


def fingerprint(clf: AugmentReduceClassifier) -> str:
    """SHA-256 of the weights and biases: equal for equal runs."""
    digest = hashlib.sha256()
    for array in (clf.coef_, clf.intercept_):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    names = ("numpy", "scipy", "torch", "numba", "scikit-learn")
    return {"augment-reduce": __version__, "python": platform.python_version(), **{n: version(n) for n in names}}


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """Processor, cores, memory: the context of a time."""
    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    found: dict[str, Any] = {"system": platform.system(), "processor": name, "cores": os.cpu_count()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gb"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    return {**found, "torch_threads_in_training": 1, "torch_build": torch.__version__}
