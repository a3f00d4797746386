"""What it costs that ranks do not wait for each other's sums (`sync=False`): against ranks that do, and one process.

    python -m benchmarks.studies.late_ranks debian-5k --epochs 10 --seeds 0 --save

Softmax, float32, one thread a rank, every fit with the same draws. Cross-fitted (the default): the gradient of a step
is pushed one step late. Amortised: c(x) learns one step late, and the label's gradient is another (`local/late.py`).
The log likelihood is that of test rows, the gap that of training rows at the end.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset, random_like
from benchmarks.common import RESULTS, SCHEMAS, append
from tests.helpers.rank_processes import run_on_ranks

DATASETS = {"debian-5k": {"min_count": 5}, "debian-full": {}}
WAYS: dict[str, dict[str, Any]] = {
    "late": {"sync": False},
    "sync": {"sync": True},
    "one process": {},
    "late, amortised": {"local_step": "amortised", "sync": False},
    "sync, amortised": {"local_step": "amortised", "sync": True},
    "one process, amortised": {"local_step": "amortised"},
}
ROWS = 20_000  # of the test rows


def one_fit(group: Any, dataset: str, way: str, settings: dict[str, Any], tiny: bool) -> dict[str, float]:
    data = (
        random_like("bibtex", n_rows=1500)
        if tiny
        else load_dataset(
            "debian-deps",
            download=False,
            **DATASETS[dataset],  # type: ignore[arg-type]
        )
    )
    train, test = data.train, data.train if tiny else data.test
    X, X_test = train.X.astype(np.float32), test.X.astype(np.float32)[:ROWS]
    clf = AugmentReduceClassifier(
        dtype="float32",
        n_jobs=1,
        process_group=group,
        **WAYS[way],
        **settings,  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.fit(X, train.y)
    spent = time.perf_counter() - began
    gaps = clf.history_["bound_gap"][np.isfinite(clf.history_["bound_gap"])]
    return {
        "log_likelihood": clf.log_likelihood(X_test, test.y[:ROWS]), "bound_gap": float(gaps[-1]),
        "seconds": spent, "train_seconds": clf.fit_seconds_["train"],
    }  # fmt: skip


def measure(options: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    settings = {"max_epochs": options.epochs, "prior_variance": options.v, "random_state": seed}
    if options.tiny:
        settings |= {"n_sampled_classes": 20}
    n_ranks = 1 if "process" in way else options.ranks
    arguments = (options.dataset, way, settings, options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_ranks(one_fit, n_ranks, Path(folder), *arguments, limit=options.limit)[0]
    numbers = {name: f"{found[name]:.5g}" for name in ("seconds", "train_seconds")}
    return {
        "dataset": options.dataset, "way": way, "ranks": n_ranks, "epochs": options.epochs, "v": options.v,
        "seed": seed, "log_likelihood": f"{found['log_likelihood']:.5f}", "bound_gap": f"{found['bound_gap']:.5f}",
        **numbers,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=list(DATASETS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--v", type=float, default=3.0)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=float, default=7_200)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for seed in options.seeds:
        for way in options.ways:
            rows.append(measure(options, way, seed))
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            if options.save:
                append(RESULTS / "late_ranks.csv", rows[-1:], SCHEMAS["late_ranks"])
    return rows


if __name__ == "__main__":
    main()
