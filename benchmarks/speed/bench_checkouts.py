"""Compare two versions of this library: the same fits and predictions by both, interleaved.

    git worktree add ../before 7ca29ca
    python -m benchmarks.speed.bench_checkouts ../before/src before-redesign --save   # every case, one thread
    python -m benchmarks.speed.bench_checkouts ../before/src before-redesign --cases first-fit --save
    python -m benchmarks.speed.bench_checkouts ../before/src before-redesign --threads 2 --save

Each version runs in a separate process. With one thread times are processor times (independent of other processes),
with more wall-clock times. A ratio is this version's time over the other's in the same repetition. `first-fit` starts a
new process each time: import, and a fit of a few steps as in the demo, from an empty and from a filled kernel cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
OURS = HERE.parents[2] / "src"
MODELS = ("softmax", "probit", "logistic")
PAPER = {"mnist": (500, 1, 1200), "bibtex": (488, 20, 400), "omniglot": (541, 50, 200)}  # B, |S|, steps
CASES = [
    *(f"default debian-deps {model}" for model in MODELS),
    *(f"paper {name} {model}" for name in PAPER for model in MODELS),
    "dense embeddings softmax", "predict_topk debian-deps softmax",
    *(f"log_likelihood debian-deps {model}" for model in MODELS),
]  # fmt: skip
FIRST = ("import", "import torch", "first fit, empty cache", "first fit, warm cache")


# ---- in a process of one version, which imports no other module of the benchmarks ----


def seconds_a_step(X: Any, y: Any, steps: int, **settings: Any) -> Callable[[], float]:
    """Of training, by the history of a fit that goes on: what a fit does once is not counted."""
    from augment_reduce import AugmentReduceClassifier

    clf = AugmentReduceClassifier(max_iter=steps, warm_start=True, random_state=0, **settings)

    def more() -> float:
        before = len(getattr(clf, "history_", {"seconds": []})["seconds"])
        clf.fit(X, y)
        n, seconds = (np.array(clf.history_[name])[[before, -1]] for name in ("iteration", "seconds"))
        return float((seconds[1] - seconds[0]) / (n[1] - n[0]))

    return more


def debian_deps() -> Any:
    from augment_reduce import load_dataset

    return load_dataset("debian-deps", min_count=5)


def default_fit(model: str, threads: int) -> Callable[[], float]:
    """Default settings but for the prior, whose search is no part of a step."""
    steps = {"softmax": 120, "probit": 40, "logistic": 60}[model]
    return seconds_a_step(*debian_deps().train, steps, model=model, prior_variance=1.0, n_jobs=threads)


def paper_fit(name: str, model: str, threads: int) -> Callable[[], float]:
    from augment_reduce.data import random_like

    B, S, steps = PAPER[name]
    steps = steps if model == "softmax" else steps // 2
    options = {"preset": "paper", "batch_size": B, "n_sampled_classes": S, "dtype": "float32", "n_jobs": threads}
    return seconds_a_step(*random_like(name).train, steps, model=model, **options)


def embeddings_fit(threads: int) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    N, D, K = 50_000, 512, 10_000
    X, y = rng.standard_normal((N, D)).astype(np.float32), rng.integers(K, size=N)
    options = {"class_sampling": "head-tail-shared", "prior_variance": 1.0, "n_jobs": threads}
    return seconds_a_step(X, y, 20, **options)


def prediction(kind: str, model: str, threads: int) -> Callable[[], float]:
    from augment_reduce import AugmentReduceClassifier

    data = debian_deps()
    options = {"max_iter": 30, "prior_variance": 1.0, "n_jobs": threads, "random_state": 0}
    clf = AugmentReduceClassifier(model, **options).fit(*data.train)
    n = 2_000 if model == "softmax" else 200

    def once() -> float:
        began = time.perf_counter()
        if kind == "predict_topk":
            clf.predict_topk(data.test.X[:n], k=5)
        else:
            clf.log_likelihood(data.test.X[:n], data.test.y[:n])
        return time.perf_counter() - began

    return once


def prepared(case: str, threads: int) -> Callable[[], float]:
    kind, *what = case.split()
    if kind == "default":
        return default_fit(what[1], threads)
    if kind == "paper":
        return paper_fit(*what, threads)
    if kind == "dense":
        return embeddings_fit(threads)
    return prediction(kind, what[1], threads)


def serve(case: str, threads: int) -> None:
    """One measurement for each line read, after one that compiles."""
    if threads == 1:
        time.perf_counter = time.process_time  # what history_["seconds"] is measured by
    import warnings

    warnings.simplefilter("ignore")
    measure = prepared(case, threads)
    measure()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(measure(), flush=True)


def serve_first() -> None:
    """Processor's seconds of importing torch, of importing the rest, and of a first short fit."""
    began = time.process_time()
    import torch  # noqa: F401

    with_torch = time.process_time()
    from augment_reduce import AugmentReduceClassifier

    imported = time.process_time()
    import warnings

    warnings.simplefilter("ignore")
    X, y = debian_deps().train
    X, y = X[:20_000], y[:20_000]
    began_fit = time.process_time()
    AugmentReduceClassifier(max_iter=3, random_state=0, n_jobs=2, prior_variance=1.0).fit(X, y)
    print(with_torch - began, imported - with_torch, time.process_time() - began_fit, flush=True)


# ---- in the process that compares them ----


def process(source: Path, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(server: subprocess.Popen[str]) -> str:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return server.stdout.readline()


def in_turns(sources: dict[str, Path], case: str, threads: int, turns: int) -> dict[str, list[float]]:
    servers = {name: process(source, ["--serve", case, str(threads)]) for name, source in sources.items()}
    try:
        for server in servers.values():
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n", f"{case}: a version could not be measured"
        found: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(turns):
            for name, server in servers.items():
                found[name].append(float(ask(server)))
        return found
    finally:
        for server in servers.values():
            server.kill()
            server.communicate()


def first_fits(sources: dict[str, Path], turns: int) -> dict[str, dict[str, list[float]]]:
    """By what is measured, then by version."""
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in sources} for what in FIRST}
    for _ in range(turns):
        for name, source in sources.items():
            with tempfile.TemporaryDirectory() as folder:
                for fit in FIRST[2:]:
                    run = process(source, ["--serve-first"], NUMBA_CACHE_DIR=folder)
                    torch, ours, seconds = map(float, run.communicate()[0].split())
                    found[fit][name].append(seconds)
                found["import"][name].append(ours)  # of the second process: byte code is there
                found["import torch"][name].append(torch)
    return found


def rows_of(case: str, quantity: str, other: str, found: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    from benchmarks.common import row

    for name, seconds in found.items():
        yield row("checkouts", case, f"{quantity}, {name}", seconds)
    ratios = [a / b for a, b in zip(found["this"], found[other], strict=True)]
    yield row("checkouts", case, f"{quantity}, this over {other}", ratios)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the other version's src")
    parser.add_argument("name", help="what to call it in the results")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=[*CASES, "first-fit"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    from benchmarks.common import report

    sources = {"this": OURS, options.name: options.source.resolve()}
    clock = "processor's seconds, 1 thread" if options.threads == 1 else f"seconds, {options.threads} threads"
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        if case == "first-fit":
            fits = first_fits(sources, options.turns)
            new = [row for what in fits for row in rows_of(what, "processor's seconds", options.name, fits[what])]
        else:
            new = [*rows_of(case, clock, options.name, in_turns(sources, case, options.threads, options.turns))]
        report(new, save=options.save)
        rows += new
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "--serve-first":
        serve_first()
    else:
        main()
