"""The defaults on problems of many kinds, beside a tuned fit of ours and beside other libraries.

    python -m benchmarks.studies.zoo --seeds 0 1 2 --output benchmarks/results/zoo.csv    # fits what is not there yet
    python -m benchmarks.studies.zoo --summary benchmarks/results/zoo.csv --figure docs/images/zoo.png
    python -m benchmarks.tables        # the table of docs/defaults.md

`zoo_problems.py` has the problems. Half of them chose the rules of `config/defaults.py`, the other half only reports.
Test rows choose nothing: what is tuned is tuned on a part of the training rows.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.defaults import Shape, default_adagrad, default_batch_size, first_prior_variance, is_small
from augment_reduce.kernels.rows import as_rows
from augment_reduce.model.noise import resolve_noise
from benchmarks.common import COMMON, ROOT, SCHEMAS, append, markdown, read
from benchmarks.peers import libraries as peers
from benchmarks.studies.zoo_problems import ZOO, Problem

COLUMNS = SCHEMAS["zoo"]
CEILING, LOGISTIC = "ours-tuned", "sklearn-tuned"
OURS = ("ours-softmax", "ours-probit", "ours-logistic")
LINEAR = (LOGISTIC, "pecos", "omikuji", "napkinxc-plt", "fasttext")
GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
MOST_TESTED = 5_000
Result = tuple[float, float, float, float, str]  # log likelihood, precision at 1 and 5, seconds, note


# ---- what is measured ----


def measured(proba: Callable[[Any], np.ndarray], problem: Problem, seconds: float, note: str) -> Result:
    """From probabilities of all classes, of some rows at a time."""
    n, step = len(problem.test_y), max(1, 20_000_000 // problem.n_classes)
    own, first, five = [], [], []
    for begin in range(0, n, step):
        p, y = proba(problem.test_X[begin : begin + step]), problem.test_y[begin : begin + step]
        label = p[np.arange(len(y)), y]
        own.append(label)
        above = (p > label[:, None]).sum(1)
        first.append(above == 0)
        five.append(above < 5)
    log_p = np.log(np.maximum(np.concatenate(own), 1e-300)).mean()
    return float(log_p), float(np.concatenate(first).mean()), float(np.concatenate(five).mean()), seconds, note


def ours(problem: Problem, seed: int, model: str) -> Result:
    clf = AugmentReduceClassifier(model, random_state=seed)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        clf.fit(problem.X, problem.y)
    seconds = time.perf_counter() - started - clf.fit_seconds_["compile"]
    warned = " ".join(sorted({each.category.__name__ for each in found}))
    prior = "none" if clf.prior_variance_ is None else f"{clf.prior_variance_:.3g}"
    note = f"v {prior} temperature {clf.temperature_:.3g} {warned}".strip()
    return measured(clf.predict_proba, problem, seconds, note)


# ---- tuned ----


def parts(problem: Problem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows to choose by): a tenth, a fifth of few."""
    n = len(problem.y)
    order = np.random.default_rng([seed, 7]).permutation(n)
    out = order[: max(1, min(5_000, n // (10 if n > 1_000 else 5)))]
    kept = np.setdiff1d(order, out)
    return kept, out[np.isin(problem.y[out], problem.y[kept])]


def scaled(problem: Problem) -> Problem:
    """What a careful user does first: standardise dense columns, bring the non-zeros of sparse rows to size one."""
    if sp.issparse(problem.X):
        unit = np.sqrt((problem.X.data.astype(np.float64) ** 2).mean())
        own, test = (sp.csr_matrix(X / unit, dtype=np.float32) for X in (problem.X, problem.test_X))
        return Problem(own, problem.y, test, problem.test_y)
    scaler = StandardScaler().fit(problem.X)
    return Problem(scaler.transform(problem.X), problem.y, scaler.transform(problem.test_X), problem.test_y)


def tuned(problem: Problem, seed: int) -> Result:
    """Softmax: the prior by factors of four, then the rate, on validation rows; then all rows with what was best."""
    started, problem = time.perf_counter(), scaled(problem)
    kept, out = parts(problem, seed)
    gumbel, shape = resolve_noise("softmax"), Shape.of(as_rows(problem.X[kept]), problem.n_classes)
    found: dict[tuple[float, float | None], float] = {}

    def fit(X: Any, y: np.ndarray, v: float, rate: float | None) -> AugmentReduceClassifier:
        options = {} if rate is None else {"learning_rate": rate}
        clf = AugmentReduceClassifier(
            prior_variance=v, random_state=seed, feature_scaling=False, **options
        )  # fmt: skip
        return clf.fit(X, y)

    def at(v: float, rate: float | None) -> float:
        if (v, rate) not in found:
            clf = fit(problem.X[kept], problem.y[kept], v, rate)
            found[v, rate] = clf.log_likelihood(problem.X[out], problem.y[out])
        return found[v, rate]

    v = first_prior_variance(gumbel, shape)
    step = 4.0 if at(4.0 * v, None) > at(v, None) else 0.25
    for _ in range(8):
        if at(v * step, None) <= at(v, None):
            break
        v *= step
    rate = None
    if not is_small(gumbel, shape):
        usual = default_adagrad(None, gumbel, shape, default_batch_size(shape)).learning_rate
        rate = max((None, 0.4 * usual, 2.5 * usual), key=lambda rate: at(v, rate))
    before = time.perf_counter()
    clf = fit(problem.X, problem.y, v, rate)
    seconds = time.perf_counter() - before
    note = f"v {v:.3g} rate {'rule' if rate is None else f'{rate:.3g}'} of {len(found)} fits, {before - started:.0f} s"
    return measured(clf.predict_proba, problem, seconds, note)


def sklearn_tuned(problem: Problem, seed: int) -> Result:
    """C on validation rows, of columns as they are and, where they are dense, standardised."""
    kept, out = parts(problem, seed)
    found: dict[tuple[bool, float], float] = {}

    def fit(X: Any, y: np.ndarray, standardised: bool, C: float) -> Any:
        regression = LogisticRegression(C=C, max_iter=300, tol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return (make_pipeline(StandardScaler(), regression) if standardised else regression).fit(X, y)

    started = time.perf_counter()
    for standardised in (False,) if sp.issparse(problem.X) else (False, True):
        best, falls = -np.inf, 0
        for C in GRID:
            model = fit(problem.X[kept], problem.y[kept], standardised, C)
            found[standardised, C] = peers.mean_log_likelihood(model, problem.X[out], problem.y[out])
            falls = falls + 1 if found[standardised, C] < best else 0
            best = max(best, found[standardised, C])
            if falls == 2:
                break
    standardised, C = max(found, key=found.__getitem__)
    before = time.perf_counter()
    model = fit(problem.X, problem.y, standardised, C)
    seconds = time.perf_counter() - before
    note = f"C {C:g}{' standardised' if standardised else ''}, {before - started:.0f} s of tuning"
    return measured(model.predict_proba, problem, seconds, note)


# ---- other libraries ----


def of_peers(problem: Problem, seed: int, name: str) -> Result:
    if not sp.issparse(problem.X):
        raise NotApplicable("dense rows")
    X, test = (sp.csr_matrix(M, dtype=np.float32) for M in (problem.X, problem.test_X))
    n, K = len(problem.y), problem.n_classes
    sets = sp.csr_matrix((np.ones(n, np.float32), problem.y, np.arange(n + 1)), (n, K))
    task = SimpleNamespace(
        X=X, y=problem.y, test_X=test, test_y=problem.test_y, rows_X=test, rows_train=X, sets_train=sets, n_classes=K,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trained = peers.PEERS[name][1](task, Path(folder), 600.0)
    found = peers.likelihood(trained)
    hit = trained.top == problem.test_y[:, None]
    note = "normalised scores" if trained.normalised else ""
    log_p = next(value for key, value in found.items() if key.startswith("log lik"))
    return log_p, float(hit[:, 0].mean()), float(hit[:, :5].any(1).mean()), trained.seconds, note


def lightgbm(problem: Problem, seed: int) -> Result:
    """With its own defaults."""
    import lightgbm as library

    if sp.issparse(problem.X) or problem.n_classes > 60:
        raise NotApplicable("sparse rows, or many classes")
    started = time.perf_counter()
    model = library.LGBMClassifier(verbose=-1, n_jobs=2, random_state=seed).fit(problem.X, problem.y)
    return measured(model.predict_proba, problem, time.perf_counter() - started, "")


class NotApplicable(Exception):
    """This learner is not for such a problem."""


LEARNERS: dict[str, Callable[[Problem, int], Result]] = {
    **{f"ours-{name}": lambda p, s, name=name: ours(p, s, name) for name in ("softmax", "probit", "logistic")},  # type: ignore[misc]
    CEILING: tuned,
    LOGISTIC: sklearn_tuned,
    **{
        name: lambda p, s, name=name: of_peers(p, s, name)  # type: ignore[misc]
        for name in ("pecos", "omikuji", "napkinxc-plt", "fasttext")
    },
    "lightgbm": lightgbm,
}


def limited(problem: Problem, seed: int) -> Problem:
    """At most MOST_TESTED test rows."""
    rows = np.random.default_rng([seed, 8]).permutation(len(problem.test_y))[:MOST_TESTED]
    return Problem(problem.X, problem.y, problem.test_X[rows], problem.test_y[rows])


def run(options: argparse.Namespace) -> None:
    done: set[tuple[str, int, str]] = set()
    if options.output and options.output.exists():
        done = {(row["problem"], int(row["seed"]), row["learner"]) for row in read(options.output)}
    for entry in ZOO:
        if entry.name not in (options.problems or (entry.name,)) or options.half not in (entry.half, "both"):
            continue
        for seed in options.seeds:
            missing = [name for name in options.learners if (entry.name, seed, name) not in done]
            if not missing:
                continue
            try:
                problem = limited(entry.make(options.data, seed), seed)
            except (FileNotFoundError, OSError) as error:
                print(f"{entry.name}: left out, {error}", flush=True)
                break
            for name in missing:
                row = one(entry.name, entry.half, problem, seed, name, options.cap)
                if row and options.output:
                    append(options.output, [row], COLUMNS)


def one(name: str, half: str, problem: Problem, seed: int, learner: str, cap: float) -> dict[str, Any] | None:
    D = problem.X.shape[1]
    head = {"problem": name, "half": half, "N": len(problem.y), "D": D, "K": problem.n_classes, "seed": seed}
    try:
        with peers.at_most(cap):
            log_p, p1, p5, seconds, note = LEARNERS[learner](problem, seed)
    except (NotApplicable, ImportError, KeyError):
        return None
    except subprocess.CalledProcessError as error:
        print(f"{name} {seed} {learner}: failed, {error}", flush=True)
        return None
    except peers.TimeUp:
        log_p = p1 = p5 = float("nan")
        seconds, note = cap, f"not done after {cap:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    row = head | {
        "learner": learner, "log_likelihood": f"{log_p:.5f}", "precision_at_1": f"{p1:.4f}",
        "precision_at_5": f"{p5:.4f}", "seconds": f"{seconds:.2f}", "note": note,
    }  # fmt: skip
    print(f"{name} {seed} {learner}: {log_p:.4f} {p1:.3f} {p5:.3f}, {seconds:.1f} s, {note}", flush=True)
    return row


# ---- summary ----


Found = dict[str, dict[int, dict[str, Any]]]  # learner -> seed -> what was measured


def results(path: Path) -> dict[str, Found]:
    """Of every problem."""
    table: dict[str, Found] = defaultdict(lambda: defaultdict(dict))
    for row in read(path):
        numbers = {key: float(row[key]) for key in ("log_likelihood", "precision_at_1", "precision_at_5", "seconds")}
        of = {key: row[key] for key in (*COMMON, "half", "N", "D", "K")}
        table[row["problem"]][row["learner"]][int(row["seed"])] = numbers | of
    return table


def common_seeds(found: Found, learners: Iterable[str]) -> list[int]:
    """Seeds that all of these have. A learner that is not there, or was never done in time, does not count."""
    done = {
        name: {seed for seed, of in found[name].items() if np.isfinite(of["log_likelihood"])}
        for name in learners
        if name in found
    }
    sets = [seeds for seeds in done.values() if seeds]
    return sorted(set.intersection(*sets)) if sets else []


def mean(found: Found, learner: str, key: str, seeds: Iterable[int]) -> float:
    """Over these seeds; over its own where it has none of them."""
    own = common_seeds(found, (learner,))
    return float(np.mean([found[learner][seed][key] for seed in ([seed for seed in seeds if seed in own] or own)]))


def regret(found: Found, learner: str, against: str) -> float:
    """By how much the loss is larger than that of another, as a share of it; means over the seeds of both."""
    seeds = common_seeds(found, (learner, against))
    if not common_seeds(found, (learner,)) or not common_seeds(found, (against,)):
        return float("nan")
    loss, other = (-mean(found, name, "log_likelihood", seeds) for name in (learner, against))
    return (loss - other) / max(other, 1e-9)


def cell(found: Found, learner: str, seeds: Iterable[int]) -> str:
    """Log likelihood / precision at 1, seconds."""
    if learner not in found:
        return ""
    if not common_seeds(found, (learner,)):
        return f"not done in {next(iter(found[learner].values()))['seconds']:.0f} s"
    log_p, p1, seconds = (mean(found, learner, key, seeds) for key in ("log_likelihood", "precision_at_1", "seconds"))
    return f"{log_p:.3f} / {p1:.3f}, {seconds:.1f} s"


def best_other(found: Found, seeds: list[int]) -> str:
    """The other library with the most right guesses, but for scikit-learn's, which has a column of its own."""
    others = [name for name in found if name not in (*OURS, CEILING, LOGISTIC) and common_seeds(found, (name,))]
    hits = {name: mean(found, name, "precision_at_1", seeds) for name in others}
    if not hits:
        return ""
    name = max(hits, key=hits.__getitem__)
    return f"{name} {cell(found, name, seeds)}"


def summary(path: Path) -> str:
    """A line a problem, means over the seeds that all of its learners have; then regrets over all seeds of a pair."""
    found = results(path)
    return "\n".join([table(found), *comparisons(found)])


def table(problems: dict[str, Found]) -> str:
    heads = ("softmax", "probit", "logistic", "softmax, tuned", "LogisticRegression, tuned", "best other library")
    lines = []
    for name, found in problems.items():
        of, seeds = next(iter(found[OURS[0]].values())), common_seeds(found, found)
        cells = [cell(found, learner, seeds) for learner in (*OURS, CEILING, LOGISTIC)] + [best_other(found, seeds)]
        fits = [fit for by_seed in found.values() for fit in by_seed.values()]
        lines.append(((f"{name} ({of['half']})", f"{of['N']} x {of['D']}, {of['K']}", *cells), fits))
    return markdown(("problem (half)", "N x D, K", *heads), lines)


def comparisons(problems: dict[str, Found]) -> list[str]:
    """Sentences on each half: regrets against tuned fits, precision against other libraries."""
    lines = []
    for half in ("choose", "report"):
        own = {name: found for name, found in problems.items() if half_of(found) == half}
        for against in (CEILING, LOGISTIC):
            values = np.array([regret(found, OURS[0], against) for found in own.values()])
            values = values[np.isfinite(values)]
            if len(values):
                lines.append(
                    f"\n{half}, against {against}: regret median {np.median(values):.2%}, worst {values.max():.2%}, "
                    f"at least as good on {(values <= 0).mean():.0%} of {len(values)}"
                )
        for words, among in (("linear model", LINEAR), ("tree ensemble (LightGBM)", ("lightgbm",))):
            gaps = np.array([precision_gap(found, among) for found in own.values()])
            gaps = gaps[np.isfinite(gaps)]
            if len(gaps):
                lines.append(
                    f"\n{half}, precision at 1 against the best other {words}: at least equal on "
                    f"{(gaps >= 0).mean():.0%} of {len(gaps)}, worst {gaps.min():+.3f}"
                )
    return lines


def half_of(found: Found) -> str:
    return str(next(iter(next(iter(found.values())).values()))["half"])


def precision_gap(found: Found, among: Iterable[str]) -> float:
    """Ours minus that of the best of these."""
    others = [name for name in among if common_seeds(found, (name,))]
    if not common_seeds(found, OURS[:1]) or not others:
        return float("nan")
    seeds = common_seeds(found, (OURS[0], *others))
    best = max(mean(found, name, "precision_at_1", seeds) for name in others)
    return mean(found, OURS[0], "precision_at_1", seeds) - best


def figure(path: Path, target: Path) -> None:
    """Regret in log likelihood against the best learner of each problem, a line a problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = {name: found for name, found in results(path).items() if OURS[0] in found}
    axes = plt.subplots(figsize=(9, 0.3 * len(table) + 1.5))[1]
    shown = {
        OURS[0]: ("o", "C0"), CEILING: ("|", "C0"), LOGISTIC: ("x", "C1"), "lightgbm": ("^", "C2"),
        "napkinxc-plt": ("s", "C3"), "omikuji": ("d", "C4"), "pecos": ("v", "C5"), "fasttext": ("+", "C6"),
    }  # fmt: skip
    names = sorted(table, key=lambda name: (half_of(table[name]), name), reverse=True)
    for learner, (marker, colour) in shown.items():
        points = []
        for at, name in enumerate(names):
            found = table[name]
            seeds = common_seeds(found, found)
            done = [other for other in found if common_seeds(found, (other,))]
            losses = {other: -mean(found, other, "log_likelihood", seeds) for other in done}
            if learner in losses:
                best = max(min(losses.values()), 1e-3)
                points.append((min(1.0, max(losses[learner] / best - 1.0, 1e-4)), at))
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=learner, markersize=7, fillstyle="none")
    labels = [f"{name} ({half_of(table[name])})" for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("regret in log likelihood against the best learner (1 and above at the edge)")
    axes.axvline(0.01, color="0.7", linewidth=0.8)
    axes.grid(axis="y", color="0.9")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=4, frameon=False)
    axes.figure.savefig(target, dpi=150, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--problems", nargs="+", choices=[entry.name for entry in ZOO])
    parser.add_argument("--half", choices=("choose", "report", "both"), default="both")
    parser.add_argument("--learners", nargs="+", choices=list(LEARNERS), default=list(LEARNERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--cap", type=float, default=900.0, help="seconds that a learner may take, tuning included")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.summary))
        if options.figure:
            figure(options.summary, options.figure)
        return
    run(options)


if __name__ == "__main__":
    main()
