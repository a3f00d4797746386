"""Where the paper's text, its authors' code and our defaults differ: which points matter, one changed at a time.

    python -m benchmarks.studies.ablate_paper --output benchmarks/results/ablations.csv

Every row is `preset="paper"` (the authors' code, at the paper's settings) with one thing changed; "against_the_code" is
its mean test log likelihood less that of the unchanged preset, over the same seeds. "nan": the weights diverged.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from augment_reduce import AugmentReduceClassifier
from augment_reduce.local.base import StepSize
from augment_reduce.local.remembered import NaturalGradient, Newton, Reparameterised
from augment_reduce.optim import SectionFour
from augment_reduce.reproduction.evaluate import heldout_metrics
from augment_reduce.reproduction.settings import STUDIES, Study
from augment_reduce.reproduction.sources import load
from benchmarks.common import COMMON, SCHEMAS, stamp, write


def softmax_step(counts: str = "epoch", power: float = 0.9, *, updated: bool = True, floor: bool = False) -> dict:
    return {"local_step": NaturalGradient(StepSize(1.0, power, counts), uses_updated=updated, floor=floor)}


def noise_step(scale: float, counts: str, *, entropy: bool, updated: bool = True) -> dict:
    step = Reparameterised(StepSize(scale, 0.9, counts), uses_updated=updated, entropy_gradient=entropy)
    return {"local_step": step}


OPTIMISER: dict[str, dict[str, Any]] = {
    "optimiser state decays everywhere (text)": {"optimizer": SectionFour(first_kappa_one=True, every_entry=True)},
    "kappa 0.1 in the first iteration too (text)": {"optimizer": SectionFour()},
}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "softmax": {
        "as the authors' code": {},
        "alpha by iteration (text)": softmax_step("iteration"),
        "alpha by visits of the row": softmax_step("visits"),
        "alpha by visits, power 0.6": softmax_step("visits", 0.6),
        "M step holds eta from before the E step": softmax_step(updated=False),
        "floor under eta": softmax_step(floor=True),
        **OPTIMISER,
    },
    "probit": {
        "as the authors' code": {},
        "with the entropy's gradient (text)": noise_step(0.001, "epoch", entropy=True),
        "alpha 0.01 by iteration, entropy (text)": noise_step(0.01, "iteration", entropy=True),
        "M step holds q from before the E step": noise_step(0.001, "epoch", entropy=False, updated=False),
        "stochastic Newton (ours)": {"local_step": Newton()},
        **OPTIMISER,
    },
}
CHANGES["logistic"] = CHANGES["probit"]
COLUMNS = SCHEMAS["ablations"]


def one_run(study: Study, model: str, change: dict[str, Any], seed: int, steps: int) -> dict[str, float]:
    clf = AugmentReduceClassifier(
        model, preset="paper", n_sampled_classes=study.n_sampled_classes, batch_size=study.batch_size,
        random_state=seed, n_jobs=1, max_iter=steps, **change,
    )  # fmt: skip
    source = load(study, None, study.seed_of_rows(seed))
    try:
        clf.fit(source.X, source.y)
    except FloatingPointError as error:  # a finding, not a failure of the study
        print(f"{model}, seed {seed}: {error}", flush=True)
        return dict.fromkeys(("test_log_likelihood", "test_accuracy", "test_log_likelihood_floored"), math.nan)
    return heldout_metrics(clf, source.X_test, source.y_test)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex", "mnist"], choices=["bibtex", "mnist", "omniglot"])
    parser.add_argument("--models", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--changes", nargs="+", type=int, help="only these, by place in the list, from 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, help="instead of the paper's, for a trial")
    parser.add_argument("--output", type=Path, help="a csv file for the table")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for dataset in options.datasets:
        study = STUDIES[dataset]
        steps = options.iterations or study.iterations
        for model in options.models:
            base = None
            for place, (name, change) in enumerate(CHANGES[model].items()):
                if options.changes and place not in options.changes:
                    continue
                runs = [one_run(study, model, change, seed, steps) for seed in options.seeds]
                values = np.array([run["test_log_likelihood"] for run in runs])
                base = values.mean() if base is None else base
                rows.append(dict(zip(COLUMNS, (
                    dataset, model, name, f"{values.mean():.4f}", f"{values.std(ddof=len(values) > 1):.4f}",
                    f"{values.mean() - base:+.4f}", f"{np.mean([run['test_accuracy'] for run in runs]):.4f}",
                    f"{np.mean([run['test_log_likelihood_floored'] for run in runs]):.4f}", len(runs),
                ), strict=True)))  # fmt: skip
                print(", ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.output:
        write(options.output, [stamp() | row for row in rows], (*COMMON, *COLUMNS))
    return rows


if __name__ == "__main__":
    main()
