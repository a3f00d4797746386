"""Classes shared by the minibatch or drawn for each row: quality against seconds, at equal |S| and at equal time.

    python -m benchmarks.speed.bench_shared                 # Bibtex, Omniglot, Debian's 5,694 classes
    python -m benchmarks.speed.bench_shared --datasets bibtex --seconds 10
    python -m benchmarks.speed.bench_shared --draw          # the picture again from the result file; fits nothing

Softmax, augment and reduce, other parameters by default. Three fits for each distribution of the draws: |S| for each
row, the same |S| shared, and ten times as many (at most K - 1) shared. Each is evaluated after 1/4, 1/2, 1, 2, 4 ...
epochs, until it has trained for `--seconds`, without evaluation and compilation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce.reports.figures import BLUE, FAINT, FONTS, GRID, INK, ORANGE
from benchmarks.common import IMAGES, RESULTS, SCHEMAS, markdown, read, stamp, write
from benchmarks.speed.bench_quality import DATASETS, Task, curve, load

SIZES = {"bibtex": 20, "omniglot": 50, "debian-5k": 100, "mnist": 3, "debian-full": 100}  # |S| for each row
SECONDS = {"bibtex": 10.0, "omniglot": 60.0, "debian-5k": 60.0, "mnist": 10.0, "debian-full": 120.0}
TITLES = {"bibtex": "Bibtex, 146 classes", "omniglot": "Omniglot, 1,623", "debian-5k": "Debian, 5,694"}
KINDS = {"for each row": ("", 1), "shared": ("-shared", 1), "shared, more": ("-shared", 10)}
COLORS = {"for each row": ORANGE, "shared": FAINT, "shared, more": BLUE}
STYLES = {"uniform": "--", "frequency": "-"}
COLUMNS = SCHEMAS["shared"]


def measure(dataset: str, task: Task, law: str, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One curve: the measures after each look, until the time is over."""
    suffix, times = KINDS[kind]
    sampled = min(times * SIZES[dataset], task.n_classes - 1)
    settings = {"class_sampling": law + suffix, "n_sampled_classes": sampled, "n_jobs": options.n_jobs}
    next(curve(task, [2 / len(task.y)], options.seed, **settings))  # compiles
    budget = SECONDS[dataset] if options.seconds is None else options.seconds
    looks = [0.25 * 2**i for i in range(2 if options.tiny else 16)]
    rows = []
    for epochs, (seconds, found) in zip(looks, curve(task, looks, options.seed, **settings), strict=True):
        values = (
            dataset,
            law,
            kind,
            sampled,
            epochs,
            f"{seconds:.4g}",
            f"{found['log lik']:.5g}",
            f"{found['P@1']:.4g}",
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        print(*values, flush=True)
        if seconds >= budget:
            break
    return rows


# ---- the table and the picture, from the result file ----


def curves_of(rows: list[dict[str, Any]], dataset: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["dataset"] == dataset:
            found.setdefault((row["law"], row["kind"]), []).append(row)
    return found


def points(looks: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seconds, epochs, value = (
        np.array([float(row[name]) for row in looks]) for name in ("seconds", "epochs", "log_likelihood")
    )
    return seconds, epochs, value


def at_equal_time(curves: dict[tuple[str, str], list[dict[str, Any]]]) -> tuple[float, dict[tuple[str, str], float]]:
    """(seconds, log likelihood of each): at the end of the shortest looks, between looks linear in log seconds."""
    measured = {name: points(looks) for name, looks in curves.items()}
    common = min(seconds[-1] for seconds, _, _ in measured.values())
    return common, {
        name: float(np.interp(np.log(common), np.log(seconds), value)) for name, (seconds, _, value) in measured.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    r"""Markdown: what a second buys. Equal |S|: compare "for each row" with "shared"; equal time: the last column."""
    head = ("", "drawn by", "classes", r"\|S\|", "seconds an epoch", "after one epoch", "at equal time")
    lines = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        curves = curves_of(rows, dataset)
        common, equal = at_equal_time(curves)
        for (law, kind), looks in curves.items():
            seconds, epochs, value = points(looks)
            one = f"{value[epochs == 1.0][0]:.3f}" if (epochs == 1.0).any() else "-"
            cells = (
                TITLES.get(dataset, dataset), law, kind, str(looks[0]["sampled"]), f"{seconds[-1] / epochs[-1]:.3g}",
                one, f"{equal[law, kind]:.3f} ({common:.2g} s)",
            )  # fmt: skip
            lines.append((cells, looks))
    return markdown(head, lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Test log likelihood against seconds, a panel for each set; names above, in their colours."""
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = Figure(figsize=(0.7 + 3.9 * len(datasets), 4.6), dpi=160, facecolor="white")
    every = figure.subplots(1, len(datasets), squeeze=False)[0]
    figure.subplots_adjust(left=0.8 / figure.get_figwidth(), right=0.985, top=0.77, bottom=0.12, wspace=0.2)
    for axes, dataset in zip(every, datasets, strict=True):
        for (law, kind), looks in curves_of(rows, dataset).items():
            seconds, _, value = points(looks)
            name = f"{law}, {looks[0]['sampled']} {kind.removesuffix(', more')}"
            axes.plot(seconds, value, STYLES[law], color=COLORS[kind], marker="o", markersize=3, label=name)
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.grid(axis="y", color=GRID)
        axes.tick_params(colors=FAINT, labelsize=8)
        axes.set_xlabel("seconds of training", fontsize=9, color=FAINT, family=FONTS)
        axes.set_title(TITLES.get(dataset, dataset), loc="left", fontsize=10, color=INK, family=FONTS)
        axes.legend(frameon=False, fontsize=7.5, labelcolor="linecolor", loc="lower right", handlelength=3.2)
    every[0].set_ylabel("test log likelihood (nats)", fontsize=9, color=FAINT, family=FONTS)
    left = 0.8 / figure.get_figwidth()
    figure.text(left, 0.92, "Classes shared, or for each row", fontsize=13, fontweight="bold", color=INK, family=FONTS)
    figure.text(left, 0.865, "softmax; quality against seconds of training", fontsize=9, color=FAINT, family=FONTS)
    figure.savefig(path)


# ---- the command ----


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=list(TITLES), choices=list(DATASETS))
    parser.add_argument("--laws", nargs="+", default=list(STYLES), choices=list(STYLES))
    parser.add_argument("--seconds", type=float, help="of training, for each looks; the default depends on the set")
    parser.add_argument("--limit", type=int, default=5000, help="test examples for the likelihood")
    parser.add_argument("--n-jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS / "shared.csv")
    parser.add_argument("--figure", type=Path, default=IMAGES / "shared.png")
    parser.add_argument("--draw", action="store_true", help="draw and print what the result file has; fit nothing")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    for dataset in [] if options.draw else options.datasets:
        task = load(dataset, options.tiny, options.limit)
        for law in options.laws:
            for kind in KINDS:
                new = measure(dataset, task, law, kind, options)
                old = [
                    row
                    for row in read(options.results)
                    if (row["dataset"], row["law"], row["kind"]) != (dataset, law, kind)
                ]
                write(options.results, [*old, *(stamp() | row for row in new)])
    rows = read(options.results)
    draw(rows, options.figure)
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
