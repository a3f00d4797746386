"""Progress of the cells: a bar over all cells and one for each running cell; in a log, lines."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 60.0  # seconds between two lines about a running cell, in a log


class CellProgress:
    """A context manager around the run; silent if `quiet`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.moving = self.console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="cyan"),
            console=self.console,
            disable=not self.moving,
        )
        self.tasks: dict[str, Any] = {}
        self.totals: dict[str, int] = {}
        self.started: dict[str, float] = {}
        self.last_line: dict[str, float] = {}
        self.over_all = self.bar.add_task("[bold]cells", total=1, note="")
        self.n_cells = self.n_done = 0

    def __enter__(self) -> CellProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def begin(self, n_cells: int, n_waiting: int) -> None:
        self.n_cells, self.n_done = n_cells, n_cells - n_waiting
        if self.n_done:
            self.say(f"{self.n_done} of {n_cells} cells are finished already.")
        self._count()

    def start(self, key: str, iterations: int) -> None:
        self.totals[key], self.started[key] = iterations, time.monotonic()
        self.last_line[key] = time.monotonic()
        self.tasks[key] = self.bar.add_task(key, total=iterations, note="loading")

    def advance(self, key: str, done: int, note: str) -> None:
        self.bar.update(self.tasks[key], completed=done, note=note)
        if not self.moving and time.monotonic() - self.last_line[key] > LINE_SECONDS:
            self.last_line[key] = time.monotonic()
            self.say(f"{key}: {done:,} of {self.totals[key]:,} iterations  {note}")

    def finish(self, key: str, record: dict[str, Any]) -> None:
        self._end(key, f"{summary(record)}  ({time.monotonic() - self.started[key]:,.0f} s)")

    def fail(self, key: str, why: str) -> None:
        self._end(key, f"failed: {why}")

    def _end(self, key: str, text: str) -> None:
        self.n_done += 1
        self.bar.remove_task(self.tasks[key])
        self.say(f"[{self.n_done}/{self.n_cells}] {key}: {text}")
        self._count()

    def _count(self) -> None:
        note = f"{self.n_done} of {self.n_cells}"
        self.bar.update(self.over_all, total=max(1, self.n_cells), completed=self.n_done, note=note)


def summary(record: dict[str, Any]) -> str:
    """A finished cell in a line."""
    metrics = record["metrics"]
    parts = []
    if "test_log_likelihood" in metrics:
        parts.append(f"test log likelihood {metrics['test_log_likelihood']:.3f}")
        parts.append(f"accuracy {metrics['test_accuracy']:.3f}")
    if "bound_total" in metrics:
        parts.append(f"bound {metrics['bound_total']:.3e}, error {metrics['error_to_frequencies']:.2e}")
    parts.append(f"{metrics['seconds_per_epoch']:.3g} s an epoch")
    return ", ".join(parts)
