"""How much of Omniglot's numbers is the split: the paper's preset on other choices of 16 training drawings of 20.

    python -m benchmarks.studies.omniglot_splits --splits drawers 0 1 2 --output benchmarks/results/omniglot_splits.csv

The paper does not say which four drawings of a character are for testing. A number draws them at random for each
character (0 is ours). `drawers` keeps the last four people of each alphabet for testing: nobody is on both sides of it,
though who drew two alphabets may be, which the files do not say. Both as `load_dataset("omniglot", seed=...)` has them.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset
from augment_reduce.reproduction.evaluate import heldout_metrics
from augment_reduce.reproduction.settings import METHODS, STUDIES
from benchmarks.common import SCHEMAS, kept

COLUMNS = SCHEMAS["omniglot_splits"]


def split(name: str, tiny: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X, y to train on and X, y to test on."""
    if tiny:
        rng = np.random.default_rng(0)
        return rng.random((48, 9)), np.arange(48) % 3, rng.random((12, 9)), np.arange(12) % 3
    data = load_dataset("omniglot", seed=None if name == "drawers" else int(name))
    assert data.test is not None
    return data.train.X, data.train.y, data.test.X, data.test.y


def one_fit(name: str, method: str, seed: int, iterations: int | None, tiny: bool) -> dict[str, Any]:
    X, y, X_test, y_test = split(name, tiny)
    study, rule = STUDIES["omniglot"], METHODS[method]
    steps = iterations or study.iterations
    clf = AugmentReduceClassifier(
        rule.model, method=rule.method, preset="paper", n_sampled_classes=min(study.n_sampled_classes, len(set(y)) - 1),
        batch_size=study.batch_size, max_iter=steps, random_state=seed, n_jobs=1,
    )  # fmt: skip
    found = heldout_metrics(clf.fit(X, y), X_test, y_test)
    values = name, method, seed, steps, f"{found['test_log_likelihood']:.4f}", f"{found['test_accuracy']:.4f}"
    return dict(zip(COLUMNS, values, strict=True))


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="+", default=["drawers"])
    parser.add_argument("--methods", nargs="+", default=["softmax", "one-vs-each"], choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--iterations", type=int, help="instead of the paper's, for a trial")
    parser.add_argument("--output", type=Path, help="a csv file to append to")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    cells = itertools.product(options.splits, options.methods, options.seeds)
    return kept((one_fit(*cell, options.iterations, options.tiny) for cell in cells), COLUMNS, options.output)


if __name__ == "__main__":
    main()
