"""The demo: what will this package depend on?

Trained on 41,172 Debian packages, the model predicts on which of 5,694 others a package depends from its name, one-line
description, section, maintainer, architecture and tags; every (package, dependency) pair is an example. The data are
part of the package (data/debian_deps).
"""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning

from ..data import MultiLabelRows, all_pairs, frequent_labels, keep_labels, load_dataset
from ..estimator import AugmentReduceClassifier
from ..persistence.outputs import check_output, save_or_rescue
from .figures import BLUE, INK, ORANGE, Curve, draw_curves
from .metrics import class_codes, perplexity, precision_at

EPOCHS = 5  # half of the default, to keep the demo short
MIN_COUNT = 5  # dependencies named by fewer training packages are left out

QUICK_EVERY, QUICK_EPOCHS = 20, 3  # --quick: one training package in twenty
PAIRS_EVALUATED = 4000  # training and test pairs evaluated after each epoch; the final numbers are over all test pairs
TOP = 6

SHOWCASE = (  # picked for variety, before any prediction was seen
    ("xfce4-settings", "a graphical tool of the Xfce desktop"),
    ("python3-opencv", "Python bindings for the computer vision library"),
    ("r-cran-mcmc", "Markov chain Monte Carlo for R"),
    ("libnet-amazon-s3-perl", "a Perl interface to Amazon's storage service"),
    ("eog-plugin-map", "a map plugin of GNOME's image viewer"),
    ("ruby-openid-connect", "an OpenID client and server library in Ruby"),
)


@dataclass(frozen=True)
class DemoData:
    """Training and test packages with their frequent dependencies; the number of test packages without any."""

    train: MultiLabelRows
    test: MultiLabelRows
    n_test_left_out: int

    @property
    def class_names(self) -> np.ndarray:
        return np.asarray(self.train.label_names)


def run(output_dir: Path, *, seed: int = 0, n_jobs: int | None = None, quick: bool = False) -> dict[str, Any]:
    """Run the demo; returns the printed numbers."""
    output_dir.mkdir(parents=True, exist_ok=True)
    model_path, picture_path = output_dir / "model.safetensors", output_dir / "bound.png"
    check_output(model_path, [])
    console = Console(highlight=False)
    data = load_packages(quick)
    say_what_it_is(console, data)
    model, looks = train(data, console, seed=seed, n_jobs=n_jobs, epochs=QUICK_EPOCHS if quick else EPOCHS)
    results = evaluate(model, data, looks)
    say_how_good(console, data, results)
    say_predictions(console, model, data)
    draw(picture_path, model, looks)
    save_or_rescue(model, model_path)
    say_how_to_go_on(console, model_path, picture_path)
    return results


# ---- data ----


def load_packages(quick: bool) -> DemoData:
    loaded = load_dataset("debian-deps", download=False)
    train, test = loaded.train.original, loaded.test.original if loaded.test else None
    assert train is not None  # debian-deps has both parts, with sets of labels
    assert test is not None
    if quick:
        train = train.take(np.arange(0, train.n_rows, QUICK_EVERY))
    frequent, kept = frequent_labels(train, MIN_COUNT)
    known = keep_labels(test, kept)
    return DemoData(frequent, known, test.n_rows - known.n_rows)


def features_of(rows: MultiLabelRows, row: int) -> dict[str, list[str]]:
    """The features of one package by kind: n name parts, w words, s section, m maintainer, a architecture, t tags."""
    found: dict[str, list[str]] = {}
    for j in rows.X.indices[rows.X.indptr[row] : rows.X.indptr[row + 1]]:
        kind, _, value = (rows.feature_names or [])[j].partition("=")
        found.setdefault(kind, []).append(value)
    return found


def name_parts(name: str) -> set[str]:
    """A package's name as in the data: its sequences of at least two letters."""
    return set(re.findall(r"[a-z]{2,}", name.lower()))


def find_package(rows: MultiLabelRows, name: str) -> int | None:
    """The row of a package, by the parts of its name; None unless exactly one row has exactly these."""
    names = np.asarray(rows.feature_names)
    of_name = np.flatnonzero(np.char.startswith(names, "n="))
    wanted = {f"n={part}" for part in name_parts(name)} & set(names[of_name])
    columns = rows.X[:, of_name].astype(bool)
    with_all = np.asarray(columns[:, np.isin(names[of_name], list(wanted))].sum(axis=1)).ravel() == len(wanted)
    without_more = np.asarray(columns.sum(axis=1)).ravel() == len(wanted)
    found = np.flatnonzero(with_all & without_more)
    return int(found[0]) if len(found) == 1 and wanted else None


# ---- training and evaluation ----


class Looks(NamedTuple):
    """The measures after each epoch, over the same pairs each time: the curves of the picture.

    The bound is the exact log likelihood minus the bound gap, which `fit` measures on fixed training pairs of its own
    (sum over all classes, each pair's own q).
    """

    seconds: list[float]
    bound: list[float]
    exact: list[float]
    test: list[float]


def train(
    data: DemoData, console: Console, *, seed: int, n_jobs: int | None, epochs: int
) -> tuple[AugmentReduceClassifier, Looks]:
    """Fit epoch by epoch and evaluate some pairs in between, for the picture; nothing is chosen by them."""
    names, pairs = data.class_names, all_pairs(data.train)
    X, y = pairs.X, names[pairs.y]
    train_look, test_look = (some_pairs(rows, names, seed) for rows in (data.train, data.test))
    model = AugmentReduceClassifier(max_epochs=1, warm_start=True, random_state=seed, n_jobs=n_jobs)
    looks = Looks([], [], [], [])
    console.print("\nTraining AugmentReduceClassifier(): softmax, with nothing set.", style="dim")
    with _progress() as bar:
        task = bar.add_task("epoch 1", total=epochs)
        for epoch in range(1, epochs + 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # for an epoch that is not the last
                model.fit(X, y)
            exact = model.log_likelihood(*train_look)
            looks.seconds.append(float(model.history_["seconds"][-1]))
            looks.bound.append(exact - float(model.history_["bound_gap"][-1]))
            looks.exact.append(exact)
            looks.test.append(model.log_likelihood(*test_look))
            status = f"epoch {epoch} of {epochs}   bound {looks.bound[-1]:.3f}   exact {exact:.3f}"
            bar.update(task, advance=1, description=f"{status}   test {looks.test[-1]:.3f}")
            if not bar.console.is_terminal:
                bar.console.print(f"{status}   test {looks.test[-1]:.3f}   {looks.seconds[-1]:.0f} s")
    return model, looks


def some_pairs(rows: MultiLabelRows, names: np.ndarray, seed: int) -> tuple[Any, np.ndarray]:
    pairs = all_pairs(rows)
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:PAIRS_EVALUATED]
    return rows.X[pairs.rows[chosen]], names[pairs.y[chosen]]


def _progress() -> Progress:
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


def evaluate(model: AugmentReduceClassifier, data: DemoData, looks: Looks) -> dict[str, Any]:
    """Evaluate all test pairs and packages; the dependencies of a package are those among the classes."""
    started = time.perf_counter()
    pairs = all_pairs(data.test)
    top = class_codes(model.predict_topk(data.test.X, 5)[0], data.class_names)
    return {
        "test_log_likelihood": model.log_likelihood(pairs.X, data.class_names[pairs.y]),
        "precision_at": precision_at(top, data.test.labels, (1, 5)),
        "bound": looks.bound[-1],
        "exact": looks.exact[-1],
        "training_seconds": looks.seconds[-1],
        "evaluation_seconds": time.perf_counter() - started,
        "classes": len(model.classes_),
    }


def draw(path: Path, model: AugmentReduceClassifier, looks: Looks) -> None:
    exact = Curve("exact log likelihood,\ntraining pairs", looks.seconds, looks.exact, INK, marker="o")
    bound = Curve("bound, training pairs", looks.seconds, looks.bound, BLUE, marker="o")
    test = Curve("exact log likelihood,\ntest pairs", looks.seconds, looks.test, ORANGE, marker="o")
    draw_curves(
        path,
        [exact, bound, test],
        title="The bound rises to the log likelihood it stands for",
        subtitle=f"Which of {len(model.classes_):,} packages will a Debian package depend on? A&R softmax, "
        "default settings; a dot an epoch",
        y_label="log likelihood of a (package, dependency) pair, nats",
        shade=(exact.name, bound.name),
    )


# ---- words ----


def say_what_it_is(console: Console, data: DemoData) -> None:
    n_pairs, uniform = data.train.labels.nnz, np.log(data.train.n_labels)
    console.print("[bold]What will this package depend on?[/]\n")
    console.print(
        f"{data.train.n_rows:,} Debian packages, each with the packages it needs: {n_pairs:,} pairs to learn from, "
        f"{data.train.n_labels:,} classes (packages that at least {MIN_COUNT} others need), {data.train.n_features:,} "
        "features (parts of the name, words of the description, section, maintainer, tags). "
        f"Guessing blindly has a log likelihood of {-uniform:.2f} a pair."
    )


def say_how_good(console: Console, data: DemoData, results: dict[str, Any]) -> None:
    p, ll = results["precision_at"], results["test_log_likelihood"]
    exact, bound = results["exact"], results["bound"]
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    grid.add_row(
        "test log likelihood", f"{ll:.3f}", f"exact, a pair; as unsure as a fair choice among {perplexity(ll):,.0f}"
    )
    grid.add_row("precision at 1", f"{p[1]:.3f}", "the first guess is a dependency")
    grid.add_row(
        "precision at 5",
        f"{p[5]:.3f}",
        f"of five guesses; {best_precision(data.test, 5):.3f} would be perfect",
    )
    grid.add_row("bound", f"{bound:.3f}", "on training pairs: the part of the objective that the data make")
    grid.add_row("exact log likelihood", f"{exact:.3f}", f"on training pairs, {exact - bound:.3f} above the bound")
    grid.add_row(
        "seconds", f"{results['training_seconds']:.0f}", f"to train, {results['evaluation_seconds']:.0f} to evaluate"
    )
    console.print()
    console.print(grid)
    console.print(
        f"\nOver {data.test.n_rows:,} packages not seen in training "
        f"({data.n_test_left_out:,} more need only rarer ones).",
        style="dim",
    )


def best_precision(rows: MultiLabelRows, k: int) -> float:
    """P@k of an oracle: rows with fewer than k labels cannot have k hits."""
    return float(np.minimum(rows.labels_per_row, k).mean() / k)


def say_predictions(console: Console, model: AugmentReduceClassifier, data: DemoData) -> None:
    """The most probable dependencies of a few test packages; true ones are ticked."""
    console.print("\n[bold]Some packages it has never seen[/]  [dim](✓ is a true dependency)[/]\n")
    for name, what in SHOWCASE:
        row = find_package(data.test, name)
        if row is None:
            continue
        true = set(data.class_names[data.test.labels[row].indices])
        k = min(TOP, len(model.classes_))
        classes, probabilities = (found[0] for found in model.predict_topk(data.test.X[[row]], k))
        console.print(f"[bold]{name}[/], {what}, will need")
        console.print("   " + ", ".join(_guess(c, p, c in true) for c, p in zip(classes, probabilities, strict=True)))
        words = ", ".join(features_of(data.test, row).get("w", []))
        hits = sum(c in true for c in classes)
        console.print(
            f"   {hits} of these {k} are among its {len(true)} true ones; judged by the words {words}\n", style="dim"
        )


def _guess(name: str, probability: float, right: bool) -> str:
    shown = f"{name} ({probability:.0%})"
    return f"[green]{shown} ✓[/]" if right else shown


def say_how_to_go_on(console: Console, model_path: Path, picture_path: Path) -> None:
    folder = Path(__file__).parents[1] / "data" / "debian_deps"
    size = model_path.stat().st_size
    console.print(f"The picture of the bound and the likelihood over time: [bold]{picture_path}[/]")
    console.print(f"The model: [bold]{model_path}[/] ({size / 1e6:,.0f} MB)\n")
    console.print("Go on with:")
    test = folder / "debian_deps_test.txt.gz"
    commands = (
        f"augment-reduce predict {model_path} {test} --top 3",
        f"augment-reduce evaluate {model_path} {test} --reduction all --skip-unseen "
        f"--label-names {folder / 'label_names.txt.gz'}",
        "augment-reduce fit --help",
    )
    for command in commands:
        console.print(f"  [cyan]{command}[/]", soft_wrap=True)
