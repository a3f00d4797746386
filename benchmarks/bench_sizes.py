"""Quality against the number of sampled classes, and against seconds: A&R, one-vs-each, sampled softmax, exact.

    python benchmarks/bench_sizes.py                     # MNIST, Bibtex, Omniglot; docs/results/sizes.csv and a picture
    python benchmarks/bench_sizes.py --datasets bibtex
    python benchmarks/bench_sizes.py --draw              # the picture again from the csv; fits nothing

Softmax; classes drawn uniformly for each row, everything else as the defaults have it, the same for all methods. Each
method and |S| is one fit, looked at after 1, 2, 4 ... epochs; the upper panels show where it ends, the lower ones the
way there with the largest |S|.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from bench_quality import Task, curve, load

from augment_reduce.figures import BLUE, FAINT, FONTS, GRID, INK, ORANGE

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZES = {"mnist": (1, 2, 4, 9), "bibtex": (1, 5, 20, 60, 145), "omniglot": (5, 20, 100, 400)}
EPOCHS = {"mnist": (1, 2, 4, 8, 16), "bibtex": (1, 2, 4, 8, 16, 30), "omniglot": (1, 2, 4, 10)}
METHODS = {"augment-reduce": BLUE, "one-vs-each": ORANGE, "sampled-softmax": "#8a8f98", "exact": INK}
COLUMNS = ("dataset", "method", "sampled", "epochs", "seconds", "log likelihood", "P@1")


def measure(dataset: str, task: Task, method: str, sampled: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"method": method, "n_jobs": options.n_jobs}
    if method != "exact":
        settings |= {"class_sampling": "uniform", "n_sampled_classes": sampled}
    next(curve(task, [2 / len(task.y)], options.seed, **settings))  # compiles
    looks = [float(e) for e in (EPOCHS[dataset][:2] if options.tiny else EPOCHS[dataset])]
    rows = []
    for epochs, (seconds, found) in zip(looks, curve(task, looks, options.seed, **settings), strict=True):
        numbers = (f"{seconds:.4g}", f"{found['log lik']:.5g}", f"{found['P@1']:.4g}")
        rows.append(dict(zip(COLUMNS, (dataset, method, sampled, epochs, *numbers), strict=True)))
    print(*rows[-1].values(), flush=True)
    return rows


def last_looks(rows: list[dict[str, Any]], dataset: str, method: str) -> list[dict[str, Any]]:
    """The end of each |S|'s fit, by |S|."""
    ends = {int(row["sampled"]): row for row in rows if (row["dataset"], row["method"]) == (dataset, method)}
    return [ends[size] for size in sorted(ends)]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = Figure(figsize=(0.9 + 3.6 * len(datasets), 7.0), dpi=160, facecolor="white")
    panels = figure.subplots(2, len(datasets), squeeze=False)
    left = 0.9 / figure.get_figwidth()
    figure.subplots_adjust(left=left, right=0.985, top=0.86, bottom=0.08, wspace=0.25, hspace=0.32)
    for column, dataset in enumerate(datasets):
        above, below = panels[:, column]
        for method, color in METHODS.items():
            ends = last_looks(rows, dataset, method)
            if not ends:
                continue
            value = [float(row["log likelihood"]) for row in ends]
            if method == "exact":
                above.axhline(value[-1], color=color, linestyle=":", label=method)
            else:
                above.plot([int(row["sampled"]) for row in ends], value, "o-", color=color, markersize=3, label=method)
            largest = ends[-1]["sampled"]
            way = [r for r in rows if (r["dataset"], r["method"], r["sampled"]) == (dataset, method, largest)]
            below.plot(
                [float(r["seconds"]) for r in way], [float(r["log likelihood"]) for r in way], color=color, marker="o",
                markersize=3, linestyle=":" if method == "exact" else "-",
                label=method if method == "exact" else f"{method}, |S| = {largest}",
            )  # fmt: skip
        above.set_title(dataset, loc="left", fontsize=10, color=INK, family=FONTS)
        for axes, label in ((above, "sampled classes"), (below, "seconds of training, one thread")):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel(label, fontsize=9, color=FAINT, family=FONTS)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(FAINT)
            axes.grid(axis="y", color=GRID)
            axes.tick_params(colors=FAINT, labelsize=8)
        below.legend(frameon=False, fontsize=7, labelcolor="linecolor", loc="lower right")
    for axes in panels[:, 0]:
        axes.set_ylabel("test log likelihood (nats)", fontsize=9, color=FAINT, family=FONTS)
    title = "Quality against sampled classes, and against time"
    figure.text(left, 0.945, title, fontsize=13, fontweight="bold", color=INK, family=FONTS)
    figure.text(left, 0.91, "softmax, default optimiser and prior", fontsize=9, color=FAINT, family=FONTS)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--output", type=Path, default=DOCS / "results" / "sizes.csv")
    parser.add_argument("--picture", type=Path, default=DOCS / "images" / "sizes.png")
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
    parser.add_argument("--n-jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if options.output.exists():
        with open(options.output, newline="") as file:
            rows = list(csv.DictReader(file))
    for dataset in [] if options.draw else options.datasets:
        task = load(dataset, options.tiny, options.limit)
        rows = [row for row in rows if row["dataset"] != dataset]
        for method in options.methods:
            sizes = (task.n_classes,) if method == "exact" else SIZES[dataset][: 2 if options.tiny else None]
            for sampled in sizes:
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
