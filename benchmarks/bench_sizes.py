"""Quality against the number of sampled classes, and against seconds: A&R, one-vs-each, sampled softmax, exact.

    python benchmarks/bench_sizes.py                     # all four sets; docs/results/sizes.csv and a picture
    python benchmarks/bench_sizes.py --datasets bibtex
    python benchmarks/bench_sizes.py --draw              # the picture again from the csv; fits nothing

Softmax; classes drawn uniformly for each row (debian-deps: "pointed-shared", |S| for the minibatch and 32 more for each
row), everything else as the defaults have it, the same for all methods. Each method and |S| is one fit, looked at after
1, 2, 4 ... epochs; the upper panels show where it ends, the lower ones the way there with the largest |S|.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from bench_quality import Task, curve, load

from augment_reduce.experiments import figure, sizes
from augment_reduce.experiments.settings import METHODS
from augment_reduce.experiments.sizes import COLUMNS

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZES = {
    "mnist": (1, 2, 4, 9),
    "bibtex": (1, 5, 20, 60, 145),
    "omniglot": (5, 20, 100, 400),
    "debian-5k": (100, 250, 750, 2000),
}
EPOCHS = {
    "mnist": (1, 2, 4, 8, 16),
    "bibtex": (1, 2, 4, 8, 16, 30),
    "omniglot": (1, 2, 4, 10),
    "debian-5k": (0.5, 1, 2),
}
FITTED = (*sizes.METHODS, "exact")


def measure(dataset: str, task: Task, method: str, sampled: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"method": method, "n_jobs": options.n_jobs}
    if method != "exact":
        sampling = "pointed-shared" if dataset == "debian-5k" else "uniform"
        settings |= {"class_sampling": sampling, "n_sampled_classes": sampled}
    next(curve(task, [2 / len(task.y)], options.seed, **settings))  # compiles
    looks = [float(e) for e in (EPOCHS[dataset][:2] if options.tiny else EPOCHS[dataset])]
    rows = []
    for epochs, (seconds, found) in zip(looks, curve(task, looks, options.seed, **settings), strict=True):
        numbers = (f"{seconds:.4g}", f"{found['log lik']:.5g}", f"{found['P@1']:.4g}")
        rows.append(dict(zip(COLUMNS, (dataset, method, sampled, epochs, *numbers), strict=True)))
    print(*rows[-1].values(), flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The panels of the report on one sheet, a column for each set."""
    from matplotlib.figure import Figure

    panels = sizes.panels(rows)
    n = len(panels) // 2
    sheet = Figure(figsize=(0.6 + 3.6 * n, 6.6), dpi=160, facecolor="white", layout="constrained")
    places = sheet.subplots(2, n, squeeze=False)
    for i, panel in enumerate(panels):
        figure.draw(places[i % 2, i // 2], panel)
    shown = [line.method for panel in panels for line in panel.lines]
    looks = {m: {"color": figure.COLORS[m], "linestyle": figure.STYLES.get(m, "-")} for m in METHODS if m in shown}
    handles = [places[0, 0].plot([], [], label=METHODS[m].title, **look)[0] for m, look in looks.items()]
    sheet.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
    sheet.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(FITTED), choices=list(FITTED))
    parser.add_argument("--output", type=Path, default=DOCS / "results" / "sizes.csv")
    parser.add_argument("--picture", type=Path, default=DOCS / "images" / "sizes.png")
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
    parser.add_argument("--n-jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = [dict(row) for row in sizes.read(options.output)]
    for dataset in [] if options.draw else options.datasets:
        task = load(dataset, options.tiny, options.limit)
        rows = [row for row in rows if row["dataset"] != dataset]
        for method in options.methods:
            numbers = (task.n_classes,) if method == "exact" else SIZES[dataset][: 2 if options.tiny else None]
            for sampled in numbers:
                rows += measure(dataset, task, method, sampled, options)
                save(options.output, rows)
    draw(rows, options.picture)
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
