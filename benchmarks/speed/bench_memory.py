"""Peak memory of a fit beside the bytes of its parts: data, weights, optimiser state, each in a process of its own.

    python -m benchmarks.speed.bench_memory --save

Peak is the operating system's (maximum resident set) at the end of a short fit, less that of a process which has
imported the package and holds the data. What is left should be weights, states, local parameters and small change.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import numpy as np

from benchmarks.common import ROOT, report, row

PAPER = {"preset": "paper"}
CASES = {
    "AmazonCat shape, section4": ("amazoncat-13k", {**PAPER, "batch_size": 1987, "n_sampled_classes": 60}),
    "AmazonCat shape, row-wise Adagrad": ("amazoncat-13k", {"optimizer": "rowwise-adagrad"}),
    "EURLex shape, section4": ("eurlex-4k", {**PAPER, "batch_size": 379, "n_sampled_classes": 50}),
    "MNIST shape, defaults": ("mnist", {}),
}


def peak_bytes() -> float:
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(shape: str, settings: dict, n_rows: int | None, steps: int) -> dict[str, float]:
    """One short fit in this process: bytes of its parts and of the peak."""
    from augment_reduce import AugmentReduceClassifier
    from augment_reduce.data import random_like

    X, y = random_like(shape, **({} if n_rows is None else {"n_rows": n_rows})).train
    before = peak_bytes()
    clf = AugmentReduceClassifier(max_iter=steps, dtype="float32", random_state=0, n_jobs=1, **settings).fit(X, y)
    parameters = clf._fitted.parameters
    held = [
        parameters.weight,
        parameters.bias,
        *parameters.weight_state,
        *parameters.bias_state,
        *clf._fitted.local.values(),
    ]
    data = sum(a.nbytes for a in (X.data, X.indices, X.indptr)) if hasattr(X, "indptr") else np.asarray(X).nbytes
    return {
        "data": data, "weights, states, local": sum(t.numel() * t.element_size() for t in held),
        "said before training": clf._fitted.bytes_needed, "peak above the data": peak_bytes() - before,
        "peak": peak_bytes(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--save", action="store_true", help="append to results/speed.csv")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    n_rows, steps = (200, 2) if options.tiny else (None, 12)
    if options.child:
        print(json.dumps(child(*CASES[options.child], n_rows, steps)))
        return []
    results = []
    for name in options.cases:
        command = [sys.executable, "-m", "benchmarks.speed.bench_memory", "--child", name]
        command += ["--tiny"] * options.tiny
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        for part, size in json.loads(said.splitlines()[-1]).items():
            results.append(row("memory", name, f"{part}, GB", [size / 1e9]))
    report(results, save=options.save)
    return results


if __name__ == "__main__":
    main()
