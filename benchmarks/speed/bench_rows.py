"""Seconds per epoch from memory-mapped rows beside rows in memory, interleaved: what is committed is their ratio.

    python -m benchmarks.speed.bench_rows --save

`mapped`: the file is in the page cache, as far as the system keeps it there. `cold`: it is dropped from the cache
before every epoch, so each block comes from the disk, as where rows are many times larger than memory. Rows are random:
100,000 of 100 features each, 80 MB, more than a buffer of `training.order`.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import write_mapped
from augment_reduce.training import order
from benchmarks.common import report, row

N, D, K, NNZ, BATCH, SAMPLED = 100_000, 5_000, 2_000, 100, 512, 100
TINY = 2_000, 200, 50, 20, 64, 20
MODELS = {"softmax": {"model": "softmax"}, "probit": {"model": "probit"}}


def random_rows(n: int, d: int, k: int, nnz: int) -> tuple[sp.csr_matrix, np.ndarray]:
    rng = np.random.default_rng(0)
    each = d // nnz
    indices = (rng.integers(0, each, (n, nnz)) + each * np.arange(nnz)).astype(np.int32)
    data = rng.random(n * nnz, dtype=np.float32) + np.float32(0.5)
    return sp.csr_matrix((data, indices.ravel(), np.arange(n + 1) * nnz), shape=(n, d)), rng.integers(0, k, n)


class Ours:
    """One estimator, trained one epoch further each time it is asked: seconds of training."""

    def __init__(self, X: Any, y: np.ndarray, batch: int, sampled: int, threads: int, settings: dict[str, Any]) -> None:
        steps = -(-len(y) // batch)
        self.X, self.y = X, y
        self.clf = AugmentReduceClassifier(
            batch_size=batch, max_iter=steps, warm_start=True, prior_variance=1.0,
            class_sampling="head-tail-shared", n_sampled_classes=sampled, random_state=0, n_jobs=threads,
            **settings,
        )  # fmt: skip
        self.seconds()  # compiles

    def seconds(self) -> float:
        before = sum(self.clf.history_["seconds"][-1:]) if hasattr(self.clf, "history_") else 0.0
        self.clf.fit(self.X, self.y)
        return float(self.clf.history_["seconds"][-1] - before)


def drop(X: sp.csr_matrix, folder: Path) -> None:
    """Leave nothing of the file in memory."""
    for array in (X.data, X.indices, X.indptr):
        found = array
        while not isinstance(found, mmap.mmap):
            found = found.base
        with contextlib.suppress(OSError):
            found.madvise(mmap.MADV_DONTNEED)
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measured(
    X: sp.csr_matrix, M: sp.csr_matrix, y: np.ndarray, folder: Path, sizes: tuple[int, int], options: Any, model: str
) -> Any:
    memory, mapped = (Ours(rows, y, *sizes, options.threads, MODELS[model]) for rows in (X, M))
    times: dict[str, list[float]] = {"memory": [], "mapped": [], "cold": []}
    for _ in range(options.repeat):
        times["memory"].append(memory.seconds())
        times["mapped"].append(mapped.seconds())
        drop(M, folder)
        times["cold"].append(mapped.seconds())
    rows = [row("rows", model, f"s per epoch, {name}", values) for name, values in times.items()]
    for name in ("mapped", "cold"):
        ratios = [a / b for a, b in zip(times[name], times["memory"], strict=True)]
        rows.append(row("rows", model, f"{name} / memory", ratios))
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the rows are written; by default a temporary folder")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/speed.csv")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    n, d, k, nnz, *sizes = TINY if options.tiny else (N, D, K, NNZ, BATCH, SAMPLED)
    if options.tiny:
        order.BLOCK_BYTES, order.BUFFER_BLOCKS, order.BUFFER_BATCHES = 4096, 4, 2
    X, y = random_rows(n, d, k, nnz)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        M = write_mapped(Path(folder) / "rows", X, y).X
        rows = [
            found for model in options.models
            for found in measured(X, M, y, Path(folder) / "rows", (sizes[0], sizes[1]), options, model)
        ]  # fmt: skip
    report(rows, save=options.save)
    return rows


if __name__ == "__main__":
    main()
