"""A classifier whose classes are shared out over processes. Every process reads the same rows and runs the same lines.

torchrun --nproc-per-node 2 examples/torchrun_fit.py
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_fit.py --checkpoints /shared/run

With a folder for checkpoints, which every rank sees, a fit whose ranks died goes on from the last one when torchrun has
started them again.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import scipy.sparse as sp
import torch.distributed as dist

from augment_reduce import AugmentReduceClassifier


def texts(n_rows: int, n_classes: int = 2_500, n_features: int = 2_000) -> tuple[sp.csr_matrix, np.ndarray]:
    """Random texts: each class has ten words of its own, a text has some of them and some others."""
    generator = np.random.default_rng(0)
    words = generator.integers(n_features, size=(n_classes, 10))
    y = np.arange(n_rows) % n_classes
    own = np.take_along_axis(words[y], generator.integers(10, size=(n_rows, 6)), axis=1)
    columns = np.concatenate([own, generator.integers(n_features, size=(n_rows, 2))], axis=1)
    index = np.repeat(np.arange(n_rows), columns.shape[1])
    X = sp.coo_matrix((np.ones(columns.size, np.float32), (index, columns.ravel())), (n_rows, n_features)).tocsr()
    return X, y


def main(
    n_rows: int = 20_000, max_epochs: int = 5, path: str = "model.safetensors", checkpoints: str | None = None,
    every: int | None = None,
) -> float:  # fmt: skip
    store, rank, size = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun on one node keeps its store when it starts ranks again: what those before wrote must not be read
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    X, y = texts(n_rows)
    n_test = n_rows // 4
    clf = AugmentReduceClassifier(
        max_epochs=max_epochs, prior_variance=1.0, n_jobs=1, random_state=0, process_group=dist.group.WORLD
    )
    clf.fit(X[n_test:], y[n_test:], checkpoint=checkpoints, every=every)
    score = clf.log_likelihood(X[:n_test], y[:n_test])  # the same on every rank
    clf.save(path)  # one file of all classes, written by the first rank
    if dist.get_rank() == 0:
        sys.stdout.write(f"{len(clf.classes_):,} classes, {len(clf.coef_):,} of them here: {score:.3f} a row\n")
    dist.barrier()
    dist.destroy_process_group()
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--model", default="model.safetensors", help="the file to write")
    parser.add_argument("--checkpoints", help="a folder that every rank sees")
    parser.add_argument("--every", type=int, help="iterations from one checkpoint to the next; by default ten minutes")
    given = parser.parse_args()
    main(given.rows, given.epochs, given.model, given.checkpoints, given.every)
