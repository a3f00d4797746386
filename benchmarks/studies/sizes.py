"""Quality against the number of sampled classes, and against seconds: A&R, one-vs-each, sampled softmax, exact.

    python -m benchmarks.studies.sizes                     # all four sets; benchmarks/results/sizes.csv and a picture
    python -m benchmarks.studies.sizes --datasets bibtex
    python -m benchmarks.studies.sizes --draw              # the picture again from the csv; fits nothing

Softmax; classes drawn uniformly for each row (debian-deps: "candidates-shared", |S| for the minibatch and 32 more
for each row), everything else as the defaults have it, the same for all methods. Each method and |S| is one fit, looked
at after 1, 2, 4 ... epochs; the upper panels show where it ends, the lower ones the way there with the largest |S|.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from augment_reduce.reproduction import figure, sizes
from augment_reduce.reproduction.settings import METHODS
from benchmarks.common import IMAGES, RESULTS, SCHEMAS, read, stamp, write
from benchmarks.speed.bench_quality import Task, curve, load

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
        sampling = "candidates-shared" if dataset == "debian-5k" else "uniform"
        settings |= {"class_sampling": sampling, "n_sampled_classes": sampled}
    next(curve(task, [2 / len(task.y)], options.seed, **settings))  # compiles
    looks = [float(e) for e in (EPOCHS[dataset][:2] if options.tiny else EPOCHS[dataset])]
    rows = []
    for epochs, (seconds, found) in zip(looks, curve(task, looks, options.seed, **settings), strict=True):
        numbers = (f"{seconds:.4g}", f"{found['log lik']:.5g}", f"{found['P@1']:.4g}")
        rows.append(stamp() | dict(zip(SCHEMAS["sizes"], (dataset, method, sampled, epochs, *numbers), strict=True)))
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
    parser.add_argument("--output", type=Path, default=RESULTS / "sizes.csv")
    parser.add_argument("--picture", type=Path, default=IMAGES / "sizes.png")
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
    parser.add_argument("--n-jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = read(options.output)
    for dataset in [] if options.draw else options.datasets:
        task = load(dataset, options.tiny, options.limit)
        rows = [row for row in rows if row["dataset"] != dataset]
        for method in options.methods:
            numbers = (task.n_classes,) if method == "exact" else SIZES[dataset][: 2 if options.tiny else None]
            for sampled in numbers:
                rows += measure(dataset, task, method, sampled, options)
                write(options.output, rows)
    draw(rows, options.picture)
    return rows


if __name__ == "__main__":
    main()
