"""Quality by the number of sampled classes and by seconds: the results of `benchmarks/studies/sizes.py`.

A report includes it if `sizes.csv` is in its folder: softmax with our own optimiser and prior, not the paper's.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .figure import Line, Panel

COLUMNS = (
    "date", "machine", "version",
    "dataset", "method", "sampled", "epochs", "seconds", "log_likelihood", "precision_at_1",
)  # fmt: skip
METHODS = {"augment-reduce": "softmax", "one-vs-each": "one-vs-each", "sampled-softmax": "sampled-softmax"}
TITLES = {"mnist": "MNIST", "bibtex": "Bibtex", "omniglot": "Omniglot", "debian-5k": "debian-deps, 5,694 classes"}

Row = Mapping[str, str]


def read(path: Path) -> list[Row]:
    """The rows of such a file; none if there is no file or it has other columns."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader) if tuple(reader.fieldnames or ()) == COLUMNS else []


def panels(rows: Sequence[Row]) -> list[Panel]:
    """For every dataset: the final value by number of classes (exact as a line), and the curve of the largest."""
    found = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        here = [row for row in rows if row["dataset"] == dataset]
        title, y_label = TITLES.get(dataset, dataset), "test log likelihood"
        exact = _way(here, "exact")
        ends, ways = [], [Line("exact", *exact)] if exact is not None else []
        for method, known_as in METHODS.items():
            sizes = sorted({int(row["sampled"]) for row in here if row["method"] == method})
            if sizes:
                last = [_way(here, method, size) for size in sizes]
                ends.append(Line(known_as, np.array(sizes, float), np.array([y[-1] for _, y in filter(None, last)])))
                ways.append(Line(known_as, *(last[-1] or ())))
        level = None if exact is None else float(exact[1][-1])
        found.append(Panel(title, tuple(ends), "sampled classes", y_label, level, log_x=True))
        found.append(Panel(title, tuple(ways), "seconds of training", y_label, log_x=True))
    return found


def _way(rows: Sequence[Row], method: str, sampled: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """Seconds and log likelihoods of one fit."""
    fit = [row for row in rows if row["method"] == method and sampled in (None, int(row["sampled"]))]
    if not fit:
        return None
    return np.array([float(row["seconds"]) for row in fit]), np.array([float(row["log_likelihood"]) for row in fit])
