"""From the paper's preset to the defaults, one improvement after another: what each buys on test rows.

    python -m benchmarks.studies.ablate_defaults --output benchmarks/results/defaults.csv
    python -m benchmarks.studies.ablate_defaults --datasets bibtex --models softmax --seeds 0 1 2
    python -m benchmarks.studies.ablate_defaults --datasets debian-5k debian-full --seeds 0
    python -m benchmarks.studies.ablate_defaults --table benchmarks/results/defaults.csv        # as markdown

step         what is new in it; the rest is as in the line above
paper        preset="paper" with the paper's B, |S| and iterations
E step       by each row's visits, with the old q held by the M step, floored; probit, logistic: stochastic Newton
optimiser    our Adagrad, start, minibatch and number of epochs; classes still drawn for each row, |S| of the paper
prior        the default prior
halves       the default E step for a sample: on one half of it, with the M step on the other (from four classes on)
classes      after `prior`, without halves: the default sampler, all classes up to 2,000, else the frequent ones always
             and a shared sample of the rest
whole E step the E step that fits the sampler: with all classes all the way
default      nothing set: biases faster than weights

The paper has no settings for debian-deps (every dependency of a package an example): there `paper` has B = 500, |S| =
the square root of K, and 20 epochs; likelihood and accuracy are of 3,000 test examples.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.defaults import Shape, default_adagrad, default_batch_size, default_sampler
from augment_reduce.data import load_dataset
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.remembered import NaturalGradient, Newton
from augment_reduce.model.noise import resolve_noise
from augment_reduce.reproduction.settings import STUDIES, Study
from augment_reduce.reproduction.sources import load
from augment_reduce.sampling import resolve_sampler
from benchmarks.common import COMMON, SCHEMAS, kept, read

DEBIAN = {
    #            name           title                   N_train  N_test   D        K      |B| |S|  iterations  timing
    "debian-5k": Study("debian-5k", "Debian, 5,694", 179_142, 42_199, 21_494, 5_694, 500, 75, 7_166, 100),
    "debian-full": Study("debian-full", "Debian, 31,298", 220_019, 51_532, 21_494, 31_298, 500, 177, 8_801, 100),
}
STEPS = ("paper", "E step", "optimiser", "prior", "halves", "classes", "whole E step", "default")
COLUMNS = SCHEMAS["defaults"]


def settings(step: str, study: Study, model: str, iterations: int | None) -> dict[str, Any]:
    """What the estimator is given for a line of the table."""
    e_step = {"local_step": NaturalGradient() if model == "softmax" else Newton()}
    of_paper = {"n_sampled_classes": study.n_sampled_classes, "class_sampling": "uniform"}
    preset = {
        "preset": "paper", "batch_size": study.batch_size, "max_iter": iterations or study.iterations, **of_paper
    }  # fmt: skip
    ours = {"max_iter": iterations} if iterations else {}
    return {
        "paper": preset,
        "E step": preset | e_step,
        "optimiser": ours | of_paper | e_step | {"prior_variance": None},
        "prior": ours | of_paper | e_step,
        "halves": ours | of_paper,
        "classes": ours | e_step,
        "whole E step": ours,
        "default": ours,
    }[step]


def one_fit(study: Study, model: str, step: str, seed: int, iterations: int | None) -> dict[str, Any]:
    clf = AugmentReduceClassifier(model, random_state=seed, n_jobs=1, **settings(step, study, model, iterations))
    X, y, X_test, y_test = rows_of(study, seed)
    if step not in ("paper", "E step", "default"):
        shape, noise = Shape.of(as_rows(X), len(np.unique(y))), resolve_noise(model)
        sampler = resolve_sampler(default_sampler(shape)) if step in ("classes", "whole E step") else None
        adagrad = default_adagrad(None, noise, shape, default_batch_size(shape, sampler))
        clf.optimizer = replace(adagrad, bias_scale=1.0)
    clf.fit(X, y)
    gaps = clf.history_["bound_gap"][~np.isnan(clf.history_["bound_gap"])]
    accuracy = float(np.mean(clf.predict(X_test) == y_test))
    values = (clf.log_likelihood(X_test, y_test), accuracy, gaps[-1] if len(gaps) else np.nan)
    row = (study.name, model, step, seed, *(f"{x:.4f}" for x in values), f"{clf.history_['seconds'][-1]:.1f}")
    return dict(zip(COLUMNS, row, strict=True))


def rows_of(study: Study, seed: int) -> tuple[Any, np.ndarray, Any, np.ndarray]:
    """X and y to train on, and to test on."""
    if study.name not in DEBIAN:
        source = load(study, None, study.seed_of_rows(seed))
        assert source.y_test is not None
        return source.X, source.y, source.X_test, source.y_test
    data = load_dataset("debian-deps", download=False, **({"min_count": 5} if study.name == "debian-5k" else {}))
    some = np.linspace(0, len(data.test.y) - 1, 3_000).astype(np.int64)
    return data.train.X, data.train.y, data.test.X[some], data.test.y[some]


def table(path: Path) -> str:
    """Means over seeds, as markdown."""
    rows = read(path, (*COMMON, *COLUMNS))
    lines = ["| | |" + " | ".join(STEPS) + " |", "|---" * (len(STEPS) + 2) + "|"]
    for dataset, model in dict.fromkeys((row["dataset"], row["model"]) for row in rows):
        cells = []
        for step in STEPS:
            found = [row for row in rows if (row["dataset"], row["model"], row["step"]) == (dataset, model, step)]
            cells.append(
                f"{np.mean([float(r[COLUMNS[4]]) for r in found]):.3f} / "
                f"{np.mean([float(r[COLUMNS[5]]) for r in found]):.3f}".replace("0.", ".", 0)
                if found else "-"
            )  # fmt: skip
        lines.append(f"| {dataset} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex", "mnist", "omniglot"])
    parser.add_argument("--models", nargs="+", default=["softmax", "probit", "logistic"])
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, help="of every fit, for a trial")
    parser.add_argument("--output", type=Path, help="a csv file to append to, a line as soon as it is there")
    parser.add_argument("--table", type=Path, help="print this file as a table, and do nothing else")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.table))
        return []
    rows: list[dict[str, Any]] = []
    for dataset in options.datasets:
        cells = itertools.product(options.models, options.steps, options.seeds)
        fits = (one_fit((STUDIES | DEBIAN)[dataset], *cell, options.iterations) for cell in cells)
        rows += kept(fits, COLUMNS, options.output)
    return rows


if __name__ == "__main__":
    main()
