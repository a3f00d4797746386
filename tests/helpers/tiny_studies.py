"""The paper's studies in miniature: 60 rows, 5 covariates, 7 classes, for tests of `augment_reduce.reproduction`.

As a script it is the command `reproduce` on such data, slowed down, for tests that stop it in the middle:

    python tiny_studies.py SECONDS_A_LOOK table3 --dataset bibtex ...
"""

import sys
import time
from typing import Any

import numpy as np
import typer
from scipy import sparse
from typer.testing import CliRunner, Result

from augment_reduce.cli.app import explained
from augment_reduce.cli.reproduce import reproduce
from augment_reduce.data import Dataset, DatasetNotFoundError, Split
from augment_reduce.reproduction import cells, sources

N_CLASSES = 7


def tiny_dataset(name: str, path: object = None, *, seed: int = 0, **options: object) -> Dataset:
    """In place of `load_dataset`; as there, EURLex and AmazonCat are not to be had."""
    if name in ("eurlex-4k", "amazoncat-13k"):
        raise DatasetNotFoundError(f"no {name} here")
    rng = np.random.default_rng(seed)
    names = [str(k) for k in range(N_CLASSES)]
    if name == "synthetic":
        y = np.concatenate([np.arange(N_CLASSES), rng.integers(N_CLASSES, size=200)])
        p = np.full(N_CLASSES, 1.0 / N_CLASSES)
        return Dataset(name, Split(sparse.csr_matrix((len(y), 0), dtype=np.float32), y), None, names, probabilities=p)
    parts = []
    centres = np.random.default_rng(1).normal(size=(N_CLASSES, 5))
    for n_rows in (60, 20):
        y = np.arange(n_rows) % N_CLASSES
        X = (centres[y] + rng.normal(size=(n_rows, 5))).astype(np.float32)
        parts.append(Split(sparse.csr_matrix(X) if name == "bibtex" else X, y))
    return Dataset(name, parts[0], parts[1], names, notes=("in miniature",))


def tiny_like(name: str) -> Dataset:
    """In place of `random_like`."""
    return Dataset(f"{name}-shape", tiny_dataset("bibtex").train, None, [str(k) for k in range(N_CLASSES)])


def install(set_attribute: Any = setattr) -> None:
    set_attribute(sources, "load_dataset", tiny_dataset)
    set_attribute(sources, "random_like", tiny_like)
    sources.load.cache_clear()


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(explained(reproduce))


def command(*arguments: str) -> Result:
    """`augment-reduce reproduce ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [*arguments, "--jobs", "1"])


def quiet(done: int, note: str) -> None:
    """A report to nobody."""


if __name__ == "__main__":
    pause, sys.argv[1:] = float(sys.argv[1]), sys.argv[2:]
    install()
    cells.CHECKPOINT_SECONDS = 0.0
    evaluate_point = cells.evaluate_point

    def slow_evaluation(*args: Any) -> dict[str, float]:
        time.sleep(pause)
        return evaluate_point(*args)

    cells.evaluate_point = slow_evaluation
    app()
