"""The grids behind the defaults: log likelihood of training rows that were held out. Test rows have no part in it.

    python -m benchmarks.studies.hold_out bibtex --variances 0.2 0.3 0.5 --rates 0.1 0.2 0.4
    python -m benchmarks.studies.hold_out debian-5k --rates 0.2 0.4 --eps 0.3 1 --epochs 4 --local amortised
    python -m benchmarks.studies.hold_out omniglot --biases 1 14 33
    python -m benchmarks.studies.hold_out omniglot --samplers uniform-shared conditional --sampled 400

A tenth of the rows is held out (of the packages, for debian-deps, so that no package is on both sides). Every
combination of the values given is fitted; what is not given is left to the defaults. `eps` is in units of N / B, `half`
(when Adagrad's rate is half) in epochs, `biases` how many times the rate of the weights theirs is.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import Adagrad, AugmentReduceClassifier
from augment_reduce.config.defaults import Shape, default_adagrad, default_batch_size
from augment_reduce.data import load_dataset, random_like
from augment_reduce.kernels.rows import as_rows
from augment_reduce.model.noise import resolve_noise
from benchmarks.common import SCHEMAS, append

DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mnist", {}), "bibtex": ("bibtex", {}), "omniglot": ("omniglot", {}),
    "debian-5k": ("debian-deps", {"min_count": 5}), "debian-full": ("debian-deps", {}),
}  # fmt: skip
MOST_LOOKED_AT = 6_000
COLUMNS = SCHEMAS["hold_out"]


def split(name: str, tiny: bool) -> tuple[Any, np.ndarray, Any, np.ndarray]:
    """(X, y) to train on and (X, y) held out, of labels that were seen."""
    source, options = DATASETS[name]
    train = (random_like("bibtex", n_rows=300) if tiny else load_dataset(source, **options)).train
    y = np.asarray(train.y)
    group = np.arange(len(y)) if train.rows is None else np.asarray(train.rows)
    order = np.random.default_rng(0).permutation(int(group.max()) + 1)
    held = np.zeros(len(order), dtype=bool)
    held[order[: len(order) // 10]] = True
    out = held[group]
    looked_at = np.flatnonzero(out)[np.isin(y[out], y[~out])]
    looked_at = np.random.default_rng(1).permutation(looked_at)[:MOST_LOOKED_AT]
    return train.X[np.flatnonzero(~out)], y[~out], train.X[looked_at], y[looked_at]


def one_fit(data: tuple, model: str, cell: dict[str, Any]) -> dict[str, Any]:
    X, y, X_out, y_out = data
    shape = Shape.of(as_rows(X), int(y.max()) + 1)
    B = default_batch_size(shape)
    given: dict[str, Any] = {
        "prior_variance": cell["v"], "max_epochs": cell["epochs"], "class_sampling": cell["sampler"],
        "n_sampled_classes": cell["sampled"], "local_step": cell["local"],
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if cell["rate"] is not None:
        eps, half = (None if x is None else x * len(y) / B for x in (cell["eps"], cell["half"]))
        given["optimizer"] = Adagrad(cell["rate"], 0.5 * len(y) / B if eps is None else max(eps, 1e-10), half)
    if cell["biases"] is not None:
        optimizer = given.get("optimizer", default_adagrad(None, resolve_noise(model), shape, B))
        given["optimizer"] = replace(optimizer, bias_scale=cell["biases"])
    began = time.perf_counter()
    clf = AugmentReduceClassifier(model, dtype="float32", random_state=cell["seed"], n_jobs=1, **given).fit(X, y)
    seconds = time.perf_counter() - began
    gaps = clf.history_["bound_gap"][~np.isnan(clf.history_["bound_gap"])]
    numbers = clf.log_likelihood(X_out, y_out), clf.score(X_out, y_out), gaps[-1] if len(gaps) else np.nan
    return {
        "model": model,
        **cell,
        **dict(zip(COLUMNS[12:], (*(f"{n:.4f}" for n in numbers), f"{seconds:.1f}"), strict=True)),
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=list(DATASETS))
    parser.add_argument("--model", default="softmax")
    for name in ("rates", "eps", "half", "variances", "epochs", "biases"):
        parser.add_argument(f"--{name}", nargs="+", type=float, default=[None])
    parser.add_argument("--sampled", nargs="+", type=int, default=[None])
    parser.add_argument("--samplers", nargs="+", default=[None])
    parser.add_argument("--local", nargs="+", default=["none"], help="names of local steps; none: the default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output", type=Path, help="a csv file to append to")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    data = split(options.dataset, options.tiny)
    grid = {
        "rate": options.rates, "eps": options.eps, "half": options.half, "v": options.variances,
        "epochs": options.epochs, "sampler": options.samplers, "sampled": options.sampled,
        "local": [None if name == "none" else name for name in options.local], "seed": options.seeds,
        "biases": options.biases,
    }  # fmt: skip
    rows = []
    for values in itertools.product(*grid.values()):
        rows.append({"dataset": options.dataset, **one_fit(data, options.model, dict(zip(grid, values, strict=True)))})
        print(", ".join(f"{name} {rows[-1][name]}" for name in COLUMNS if rows[-1][name] is not None), flush=True)
        if options.output:
            append(options.output, rows[-1:], COLUMNS)
    return rows


if __name__ == "__main__":
    main()
