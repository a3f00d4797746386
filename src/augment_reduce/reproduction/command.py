"""The work of `augment-reduce reproduce`: check the arguments, run missing cells, write and show the results."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from ..support.atomic import replaced_atomically
from . import figure, report, show, sources, tables
from .progress import CellProgress
from .runner import DATASETS_OF, Choice, plan, run
from .settings import METHODS, REAL, STUDIES, TARGETS, chosen
from .store import Store


def parse(
    target: str, dataset: list[str] | None, method: list[str] | None, seeds: str, iterations: int | None
) -> Choice:
    """Validate the arguments; an unknown name is refused with the choices."""
    (target,) = chosen([target], TARGETS, "target")
    datasets, methods = _split(dataset), _split(method)
    if datasets is not None:
        datasets = chosen(datasets, STUDIES, "dataset")
        outside = [name for name in datasets if name not in DATASETS_OF[target]]
        if outside:
            raise ValueError(
                f"Expected a dataset of {target}, which are {', '.join(DATASETS_OF[target])}; found {outside[0]!r}."
            )
    return Choice(
        target,
        None if datasets is None else tuple(datasets),
        None if methods is None else tuple(chosen(methods, METHODS, "method")),
        _seeds(seeds),
        iterations,
    )


def _split(values: list[str] | None) -> list[str] | None:
    return None if not values else [part for value in values for part in value.split(",") if part.strip()]


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        seeds = (-1,)
    if any(not 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"Expected --seeds to be whole numbers from 0 to 2^32 - 1, like 0,1,2; found {text!r}.")
    return seeds


def carry_out(choice: Choice, store: Store, data: Path | None, jobs: int, quiet: bool) -> bool:
    """Find the data, run missing cells, write and show the results. False if a cell failed."""
    progress = CellProgress(quiet=quiet)
    if choice.target != "report":
        store.add_statistics(sources.survey([study.name for study in choice.studies()], data))
        sources.load.cache_clear()
    found = store.statistics()
    failures = run(plan(choice, found, store), store, data, jobs, progress).of
    built = tables.build(store, choice.asked, choice.methods)
    publish(store, built, choice.asked)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    notes: list[str] = []
    for name in shown_tables(choice.target):
        rows = [row for row in built[name] if choice.datasets is None or row.get("dataset") in (None, *choice.datasets)]
        notes += show.to_terminal(name, rows, console) if rows else []
    for note in dict.fromkeys(notes):
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    progress.say(f"Written to {store.folder}: report.html, results.json, csv files, figure2.png, figure2.pdf.")
    for key, why in failures.items():
        progress.say(f"Failed: {key}: {why}")
    return not failures


def shown_tables(target: str) -> list[str]:
    every = ["table1", "table2", "table3", "bounds", "synthetic"]
    return {"all": every, "report": every, "figure2": ["bounds"]}.get(target, [target])


def publish(store: Store, built: dict[str, list[dict[str, object]]], asked: int | None) -> None:
    """Write results.json, the csv files, figure 2 and the report page."""
    show.write(store, built, asked)
    records = [r for r in store.all_finished() if r["asked_iterations"] == asked]
    missing = [name for name in REAL if "missing" in store.statistics().get(name, {})]
    panels = figure.bound_panels(store, records, missing)
    with contextlib.ExitStack() as stack:
        for suffix in ("png", "pdf"):
            temporary = stack.enter_context(replaced_atomically(store.folder / f"figure2.{suffix}"))
            figure.save_figure2(panels, temporary, suffix)
    store.write_text(store.folder / "report.html", report.page(store, built, asked))
