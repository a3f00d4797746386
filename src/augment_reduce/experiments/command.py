"""`augment-reduce reproduce` as it is typed. Heavy imports wait until it runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .settings import METHODS, REAL, STUDIES, TARGETS, chosen

if TYPE_CHECKING:
    from .runner import Choice
    from .store import Store

WHAT, RUN, OUTPUT = "What", "How", "Output"
DEFAULT_OUTPUT = Path("reproduce-output")


def reproduce(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="; ".join(f"[bold]{name}[/]: {text}" for name, text in TARGETS.items())),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", help=f"Only these: {', '.join(STUDIES)}. Several by commas.", show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", help=f"Only these: {', '.join(METHODS)}. Several by commas.", show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="One run for each, by commas.", rich_help_panel=WHAT)] = "0",
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, help="Instead of the paper's, for a trial; kept apart from full results.", show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where mnist/, bibtex/, eurlex-4k/ and so on are. Else they are looked for in "
            "AUGMENT_REDUCE_DATA and the cache, and downloaded where that is possible.", show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cells at once, each on one core. Times are steadiest with 1. [dim]Default: one a core.[/dim]",
            show_default=False, rich_help_panel=RUN,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Results; also where a stopped run goes on.",
                           rich_help_panel=OUTPUT),
    ] = DEFAULT_OUTPUT,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:  # fmt: skip
    """Run section 4 of the paper again: its tables, its figure, the synthetic study, beside what it printed.

    Every finished cell (a dataset, a method, a seed) is kept in the output folder, and the same command goes on where
    it was stopped, also in the middle of a cell. Writes report.html, results.json, csv files, figure2.png and .pdf.

    [bold]Example[/]: the Bibtex row of table 3, a few minutes.

    [cyan]augment-reduce reproduce table3 --dataset bibtex --output results[/]
    """
    from .runner import Choice
    from .store import Store

    choice = parse(Choice, target, dataset, method, seeds, iterations)
    store = Store(output).open()
    try:
        complete = carry_out(choice, store, data, jobs or available_cores(), quiet)
    except KeyboardInterrupt:
        _end(f"Interrupted. {_kept(store)} The same command goes on from there.", 130)
    except OSError as error:
        from .store import is_disk_full

        if not is_disk_full(error):
            raise
        _end(f"The disk is full ({error}). {_kept(store)} Make room, and the same command goes on from there.", 1)
    if not complete:
        raise typer.Exit(1)


def parse(
    kind: type[Choice], target: str, dataset: list[str] | None, method: list[str] | None, seeds: str,
    iterations: int | None,
) -> Choice:  # fmt: skip
    """What was typed, checked: an unknown name is refused with the choices."""
    from .runner import DATASETS_OF

    (target,) = chosen([target], TARGETS, "target")
    datasets, methods = _split(dataset), _split(method)
    if datasets is not None:
        datasets = chosen(datasets, STUDIES, "dataset")
        outside = [name for name in datasets if name not in DATASETS_OF[target]]
        if outside:
            raise ValueError(
                f"Expected a dataset of {target}, which are {', '.join(DATASETS_OF[target])}; found {outside[0]!r}."
            )
    return kind(
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


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def carry_out(choice: Choice, store: Store, data: Path | None, jobs: int, quiet: bool) -> bool:
    """Survey the data, run what is missing, write and show the results. False if some cell failed."""
    from rich.console import Console

    from . import show, sources, tables
    from .board import Board
    from .runner import plan, run

    board = Board(quiet=quiet)
    if choice.target != "report":
        store.add_statistics(sources.survey([study.name for study in choice.studies()], data))
        sources.load.cache_clear()
    found = store.statistics()
    failures = run(plan(choice, found, store), store, data, jobs, board).of
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
    board.say(f"Written to {store.folder}: report.html, results.json, csv files, figure2.png, figure2.pdf.")
    for key, why in failures.items():
        board.say(f"Failed: {key}: {why}")
    return not failures


def shown_tables(target: str) -> list[str]:
    every = ["table1", "table2", "table3", "bounds", "synthetic"]
    return {"all": every, "report": every, "figure2": ["bounds"]}.get(target, [target])


def publish(store: Store, built: dict[str, list[dict[str, object]]], asked: int | None) -> None:
    """results.json, the csv files, figure 2 for papers, and the page."""
    from ..atomic import replaced_atomically
    from . import figure, report, show

    show.write(store, built, asked)
    records = [r for r in store.all_finished() if r["asked_iterations"] == asked]
    missing = [name for name in REAL if "missing" in store.statistics().get(name, {})]
    panels = figure.bound_panels(store, records, missing)
    with contextlib.ExitStack() as stack:
        for suffix in ("png", "pdf"):
            temporary = stack.enter_context(replaced_atomically(store.folder / f"figure2.{suffix}"))
            figure.save_figure2(panels, temporary, suffix)
    store.write_text(store.folder / "report.html", report.page(store, built, asked))


def _kept(store: Store) -> str:
    finished, under_way = len(store.all_finished()), len(list(store.checkpoints.glob("*.safetensors")))
    text = f"{finished} finished cells are kept in {store.folder}"
    return text + (f", and {under_way} under way were saved." if under_way else ".")


def _end(message: str, code: int) -> None:
    from rich.console import Console

    Console(stderr=True).print(f"\n{message}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(code)
