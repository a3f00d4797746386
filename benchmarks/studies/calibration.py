"""Are the probabilities right? Expected calibration error of the three models on the real sets, and what slack does.

    python -m benchmarks.studies.calibration                # every set, into benchmarks/results and docs/images
    python -m benchmarks.studies.calibration --datasets bibtex --models softmax probit logistic --sampled 1 2 5 20 145
    python -m benchmarks.studies.calibration --datasets bibtex --models softmax --powers 0 0.6 0.9 1 1.5

The first fits the three models with the defaults, exact softmax, and the three as the paper ran them. The others ask
what the bound's slack does. More sampled classes mean less slack, but less noise in the gradient too; `--powers` keeps
all classes and lets eta lag, alpha = (1 + visits)^-power, so that only the slack differs: with power 0 there is none.
Runs add to calibration.csv (a row a fit) and reliability.csv (a row a bin, first seed); a fit done again replaces its
rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import AugmentReduceClassifier, NaturalGradient, StepSize, load_dataset
from augment_reduce.data import random_like
from augment_reduce.reports.figures import BLUE, GREEN, INK, ORANGE, Reliable, draw_reliability
from augment_reduce.reports.metrics import Reliability, reliability_curve
from augment_reduce.reproduction.evaluate import last_finite, row_log_likelihoods
from augment_reduce.reproduction.settings import STUDIES
from benchmarks.common import IMAGES, RESULTS, markdown, read, stamp, write

DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mnist", {}), "bibtex": ("bibtex", {}), "omniglot": ("omniglot", {}),
    "debian-5k": ("debian-deps", {"min_count": 5}),
}  # fmt: skip
TITLES = {"mnist": "MNIST", "bibtex": "Bibtex", "omniglot": "Omniglot", "debian-5k": "Debian, 5,694 classes"}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {}, "probit": {"model": "probit"}, "logistic": {"model": "logistic"},
    "exact softmax": {"method": "exact"}, "softmax, paper": {"preset": "paper"},
    "probit, paper": {"model": "probit", "preset": "paper"},
    "logistic, paper": {"model": "logistic", "preset": "paper"},
}  # fmt: skip
LOOKS = {"softmax": BLUE, "probit": ORANGE, "logistic": GREEN, "exact softmax": INK}
KEY = ("dataset", "model", "variant", "seed")
MEASURES = (
    "ECE", "ECE_equal_mass", "confidence", "accuracy", "log_likelihood", "bound_gap", "log_eta_ratio", "seconds"
)  # fmt: skip
BIN = ("bin", "low", "high", "confidence", "accuracy", "count")


@dataclass
class Task:
    """Training rows and test rows with their labels."""

    X: Any
    y: np.ndarray
    test_X: Any
    test_y: np.ndarray


def load(name: str, rows: int | None, tiny: bool) -> Task:
    """The set, or every n-th of its training rows; `tiny` is random data that are their own test rows."""
    if tiny:
        data = random_like("bibtex", n_rows=300).train
        return Task(data.X, np.asarray(data.y), data.X, np.asarray(data.y))
    source, options = DATASETS[name]
    data = load_dataset(source, download=False, **options)
    X, y, test = data.train.X, np.asarray(data.train.y), data.test
    if rows is not None and rows < len(y):
        kept = np.linspace(0, len(y) - 1, rows).astype(int)
        X, y = X[kept], y[kept]
    known = np.isin(test.y, y)
    return Task(X, y, test.X[known], np.asarray(test.y)[known])


def settings_of(dataset: str, model: str, epochs: float | None) -> dict[str, Any] | None:
    """Of the estimator; a preset takes the paper's minibatch, |S| and iterations. None: the paper has no such fit."""
    settings = dict(MODELS[model])
    if "preset" in settings:
        if dataset not in STUDIES:
            return None
        study = STUDIES[dataset]
        settings |= {"batch_size": study.batch_size, "n_sampled_classes": study.n_sampled_classes}
        settings["max_iter"] = study.iterations
    if epochs is not None:
        settings |= {"max_iter": None, "max_epochs": epochs}
    return settings


def measure(task: Task, settings: dict[str, Any], seed: int) -> tuple[dict[str, float], Reliability]:
    """Fit, then look at the first guess of every test row; (N,) numbers, in blocks."""
    clf = AugmentReduceClassifier(random_state=seed, **settings).fit(task.X, task.y)
    classes, probabilities = clf.predict_topk(task.test_X, 1)
    sure, right = probabilities[:, 0], classes[:, 0] == task.test_y
    bins = reliability_curve(sure, right)
    return {
        "ECE": bins.error,
        "ECE_equal_mass": reliability_curve(sure, right, strategy="quantile").error,
        "confidence": float(sure.mean()),
        "accuracy": float(right.mean()),
        "log_likelihood": clf.log_likelihood(task.test_X, task.test_y),
        "bound_gap": last_finite(clf.history_["bound_gap"]),
        "log_eta_ratio": log_eta_ratio(clf, task),
        "seconds": float(clf.history_["seconds"][-1]),
    }, bins


def log_eta_ratio(clf: AugmentReduceClassifier, task: Task, n_rows: int = 2000) -> float:
    """Mean log(eta / eta*) of training rows, softmax with stored eta: the sign of the slack. log eta* is -log p."""
    if "log_eta" not in clf._fitted.local:
        return float("nan")
    kept = np.linspace(0, len(task.y) - 1, min(n_rows, len(task.y))).astype(int)
    log_eta = clf._fitted.local["log_eta"].double().numpy()[kept]
    return float(np.mean(log_eta + row_log_likelihoods(clf, task.X[kept], task.y[kept])))


def variants(options: argparse.Namespace, n_classes: int) -> list[tuple[str, dict[str, Any]]]:
    """What is changed in every fit: nothing, or |S|, or how far eta lags behind when no class is left out."""
    if options.sampled:
        return [(f"|S| = {sampled}", {"n_sampled_classes": sampled}) for sampled in options.sampled]
    if options.powers:
        everything = {"class_sampling": "uniform", "n_sampled_classes": n_classes - 1}
        steps = {power: NaturalGradient(StepSize(1.0, power, "visits"), uses_updated=True) for power in options.powers}
        return [(f"power {power:g}", everything | {"local_step": step}) for power, step in steps.items()]
    return [("", {})]


def runs(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(the row of a fit, the rows of its bins), fit by fit."""
    for dataset in options.datasets:
        task = load(dataset, options.rows, options.tiny)
        for model in options.models:
            settings = settings_of(dataset, model, options.epochs)
            for variant, changes in variants(options, len(np.unique(task.y))) if settings is not None else []:
                for seed in options.seeds:
                    found, bins = measure(task, settings | changes, seed)
                    key = dict(zip(KEY, (dataset, model, variant, seed), strict=True))
                    print(*key.values(), *(f"{name} {value:.4f}" for name, value in found.items()), flush=True)
                    row = key | {name: f"{value:.5g}" for name, value in found.items()}
                    yield row, bin_rows(key, bins) if seed == options.seeds[0] else []


def bin_rows(key: dict[str, Any], bins: Reliability) -> list[dict[str, Any]]:
    values = zip(bins.edges[:-1], bins.edges[1:], bins.confidence, bins.accuracy, bins.count, strict=True)
    return [key | dict(zip(BIN, (m, *(f"{value:.6g}" for value in row)), strict=True)) for m, row in enumerate(values)]


# ---- the files ----


def merge(path: Path, rows: Iterable[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Add rows, measured now, to a result file; one with the same key replaces the old one."""
    new = [stamp() | row for row in rows]
    write(path, {tuple(str(row[name]) for name in key): row for row in [*read(path), *new]}.values())


def bins_of(rows: list[dict[str, str]]) -> Reliability:
    """The bins of one fit as they were written."""
    low, high, sure, right, count = (np.array([float(row[name]) for row in rows]) for name in BIN[1:])
    return Reliability(np.append(low, high[-1]), sure, right, count.astype(np.int64), count)


def draw(source: Path, figure: Path) -> None:
    """A panel for each set, of the fits in which nothing was changed."""
    panels: dict[str, list[Reliable]] = {}
    fits: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read(source):
        if not row["variant"]:
            fits.setdefault((row["dataset"], row["model"]), []).append(row)
    for dataset in TITLES:
        models = [name for name in MODELS if (dataset, name) in fits]
        if models:
            panels[TITLES[dataset]] = [
                Reliable(name, bins_of(fits[dataset, name]), LOOKS[name.split(",")[0]], _style(name)) for name in models
            ]
    if panels:
        draw_reliability(figure, panels, title="How sure, how right", subtitle="test rows; numbers: calibration error")


def _style(model: str) -> str:
    return ":" if "paper" in model else "--" if "exact" in model else "-"


def table(rows: list[dict[str, str]], *, slack: bool) -> str:
    """Markdown: a line for each fit, means over seeds; those with something changed (`slack`), or the others."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        if bool(row["variant"]) == slack:
            groups.setdefault((row["dataset"], row["model"], row["variant"]), []).append(row)
    names = [name for name in MEASURES if name != "seconds"]
    titles = [name.replace("_", " ") for name in names]
    head = ["", "model", *(["changed"] if slack else []), *titles, "confidence - accuracy"]
    lines = []
    for (dataset, model, variant), group in sorted(groups.items(), key=place):
        mean = {name: float(np.mean([float(row[name]) for row in group])) for name in names}
        cells = [shown(name, mean[name]) for name in names] + [f"{mean['confidence'] - mean['accuracy']:+.3f}"]
        changed = [variant.replace("|", "\\|")] if slack else []
        lines.append(([TITLES[dataset], model, *changed, *cells], group))
    return markdown(head, lines)


def place(group: tuple[tuple[str, str, str], object]) -> tuple[int, int]:
    """In the order of the sets and the models above."""
    dataset, model, _ = group[0]
    return list(TITLES).index(dataset), list(MODELS).index(model)


def shown(name: str, value: float) -> str:
    return "-" if np.isnan(value) else f"{value:+.3f}" if name == "log_eta_ratio" else f"{value:.3f}"


def main(arguments: list[str] | None = None) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["mnist", "bibtex", "omniglot"], choices=list(DATASETS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sampled", nargs="+", type=int, help="|S|, each in a fit of its own, instead of the default")
    parser.add_argument("--powers", nargs="+", type=float, help="of the softmax's local step size, with every class")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=float, help="instead of the defaults', for a trial")
    parser.add_argument("--rows", type=int, help="train on so many rows, for a trial")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files")
    parser.add_argument("--figure", type=Path, default=IMAGES / "reliability.png")
    parser.add_argument("--draw", action="store_true", help="draw and print what the result files have; fit nothing")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    fits, bins = options.results / "calibration.csv", options.results / "reliability.csv"
    if not options.draw:
        for fit, of_bins in runs(options):  # written after each: what is done stays done
            merge(fits, [fit], KEY)
            merge(bins, of_bins, (*KEY, "bin"))
    draw(bins, options.figure)
    rows = read(fits)
    for slack in (False, True):
        print(table(rows, slack=slack), end="\n\n")
    return rows


if __name__ == "__main__":
    main()
