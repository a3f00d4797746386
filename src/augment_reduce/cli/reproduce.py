"""`augment-reduce reproduce` with its arguments; its work is imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..reproduction.settings import METHODS, STUDIES, TARGETS

if TYPE_CHECKING:
    from ..reproduction.store import Store

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
    """Reproduce section 4 of the paper: tables, figure and synthetic study, compared with the published numbers.

    Every finished cell (a dataset, a method, a seed) is kept in the output folder, and the same command resumes an
    interrupted run, also within a cell. Writes report.html, results.json, csv files, figure2.png and .pdf.

    [bold]Example[/]: the Bibtex row of table 3, a few minutes.

    [cyan]augment-reduce reproduce table3 --dataset bibtex --output results[/]
    """
    from ..reproduction.command import carry_out, parse
    from ..reproduction.store import Store, is_disk_full

    choice = parse(target, dataset, method, seeds, iterations)
    store = Store(output).open()
    try:
        complete = carry_out(choice, store, data, jobs or available_cores(), quiet)
    except KeyboardInterrupt:
        _end(f"Interrupted. {_kept(store)} The same command goes on from there.", 130)
    except OSError as error:
        if not is_disk_full(error):
            raise
        _end(f"The disk is full ({error}). {_kept(store)} Make room, and the same command goes on from there.", 1)
    if not complete:
        raise typer.Exit(1)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kept(store: Store) -> str:
    finished, under_way = len(store.all_finished()), len(list(store.checkpoints.glob("*.safetensors")))
    text = f"{finished} finished cells are kept in {store.folder}"
    return text + (f", and {under_way} under way were saved." if under_way else ".")


def _end(message: str, code: int) -> None:
    from rich.console import Console

    Console(stderr=True).print(f"\n{message}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(code)
