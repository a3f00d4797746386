"""Steps over ranks: against the number of classes K, and two ranks of one thread against one process of one thread.

    python -m benchmarks.speed.bench_ranks --save

First part: ms a step of a softmax at D 32 on two ranks (gloo, one machine), sizes K in turns within one run, and their
ratio to the first. Second part: seconds of an epoch of debian-deps, one process and two ranks in turns; the speed-up is
that of the medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset, random_like
from augment_reduce.kernels.threads import num_threads
from augment_reduce.local.base import Clock
from augment_reduce.local.cross_fitting import CrossFitted
from augment_reduce.sharding import ClassShard, Partition, Ranks
from augment_reduce.training.step import settle, step
from benchmarks.common import report, row
from benchmarks.speed.bench_classes import make_problem
from tests.helpers.rank_processes import run_on_ranks


def steps_of_sizes(group: Any, sizes: list[int], options: argparse.Namespace, late: bool) -> list[list[float]]:
    """Milliseconds of steps at each K, taken in turns."""
    ranks, made = Ranks.of(group), []
    for K in sizes:
        partition = Partition(ranks, ClassShard(K, ranks.rank, ranks.size), late)
        made.append(
            make_problem(K, options.B, options.S, options.D, options.nnz, "uniform-shared", CrossFitted(), partition)
        )
    spent: list[list[float]] = [[] for _ in sizes]
    order, generator = np.random.default_rng(1), torch.Generator()
    with num_threads(1), torch.inference_mode():
        for t in range(1, options.steps + 1):
            for (problem, state), times in zip(made, spent, strict=True):
                rows = np.sort(order.choice(problem.n_rows, options.B, replace=False))
                began = time.perf_counter()
                step(problem, state, rows, Clock(t, 1), generator=generator.manual_seed(t), want_bound=t % 10 == 0)
                times.append(1e3 * (time.perf_counter() - began))
        for problem, state in made:
            settle(problem, state)
    return [times[len(times) // 4 :] for times in spent]


def epoch(group: Any, dataset: str, epochs: float, sync: bool) -> float:
    """Seconds of the steps of a fit."""
    if dataset == "tiny":
        data = random_like("bibtex", n_rows=400)
    else:
        data = load_dataset("debian-deps", download=False, min_count=5 if dataset == "debian-5k" else 1)
    clf = AugmentReduceClassifier(
        dtype="float32", n_jobs=1, max_epochs=epochs, prior_variance=3.0, random_state=0, process_group=group, sync=sync
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.fit(data.train.X.astype(np.float32), data.train.y)
    return clf.fit_seconds_["train"] / epochs


def of_classes(options: argparse.Namespace) -> list[dict[str, Any]]:
    sizes, rows = [int(K) for K in options.classes], []
    for late in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            found = run_on_ranks(steps_of_sizes, 2, Path(folder), sizes, options, late, limit=options.limit)[0]
        shape = f"{'late' if late else 'sync'} B={options.B} S={options.S} D={options.D} nnz={options.nnz}, 2 ranks"
        rows += [row("ranks", f"{shape}, K={K:,}", "ms per step", times) for K, times in zip(sizes, found, strict=True)]
        ratios = [float(np.median(times) / np.median(found[0])) for times in found]
        rows += [
            row("ranks", f"{shape}, K={K:,}", f"times K={sizes[0]:,}", [r]) for K, r in zip(sizes, ratios, strict=True)
        ]
    return rows


def of_epochs(options: argparse.Namespace) -> list[dict[str, Any]]:
    ways = {"one process": (1, True), "two ranks, late": (2, False), "two ranks, sync": (2, True)}
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeat):
        for way, (n_ranks, sync) in ways.items():
            arguments = (options.dataset, options.epochs, sync)
            with tempfile.TemporaryDirectory() as folder:
                spent[way].append(max(run_on_ranks(epoch, n_ranks, Path(folder), *arguments, limit=options.limit)))
    rows = [row("ranks", f"{options.dataset}, {way}", "s per epoch", times) for way, times in spent.items()]
    one = np.median(spent["one process"])
    return rows + [
        row("ranks", f"{options.dataset}, {way}", "times as fast as one process", [float(one / np.median(times))])
        for way, times in spent.items()
        if way != "one process"
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", type=float, default=[1e5, 1e6, 1e7])
    parser.add_argument("--B", type=int, default=256)
    parser.add_argument("--S", type=int, default=50)
    parser.add_argument("--D", type=int, default=32)
    parser.add_argument("--nnz", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dataset", default="debian-full", choices=["debian-full", "debian-5k", "tiny"])
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=["classes", "epochs"])
    parser.add_argument("--limit", type=float, default=1_800)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.classes, options.B, options.S, options.steps = [100, 1000], 8, 4, 8
        options.dataset, options.repeat, options.limit = "tiny", 1, 100
    rows = of_classes(options) if options.only != "epochs" else []
    rows += of_epochs(options) if options.only != "classes" else []
    report(rows, save=options.save)
    return rows


if __name__ == "__main__":
    main()
