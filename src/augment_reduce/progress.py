"""What a person sees while training: a bar with rate, time left and the bound; or a line now and then in a log."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

PATIENCE = 1.0  # seconds of a first step before we say why it takes so long


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("-- it/s" if task.speed is None else f"{task.speed:,.0f} it/s", style="cyan")


class TrainingProgress:
    """A context manager around the training loop. Silent where `verbose` is 0.

    On a terminal it is one moving line; elsewhere (a log file, a pipe) it prints a line per record.
    """

    def __init__(self, total: int, verbose: int) -> None:
        self.console = Console(stderr=True)
        self.verbose = verbose
        self.total = total
        self.said_compiling = False
        self.moving = verbose > 0 and self.console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]fitting"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            disable=not self.moving,
            transient=False,
        )
        self.task = self.bar.add_task("fit", total=total, status="")

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, message: str) -> None:
        if self.verbose > 0:
            self.console.print(message, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def may_compile(self) -> Iterator[None]:
        """Around what comes first: if it lasts it compiles, and a person at a terminal is told, asked for or not."""
        timer = threading.Timer(PATIENCE, self.say_compiling)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def say_compiling(self) -> None:
        """Once is enough."""
        if not self.said_compiling and (self.verbose > 0 or self.console.is_terminal):
            self.said_compiling = True
            self.console.print(
                "Compiling for this kind of data, up to a minute; kept on disk, so that it happens once.",
                soft_wrap=True,
            )

    def advance(self, steps: int = 1) -> None:
        if self.moving:
            self.bar.advance(self.task, steps)

    def report(self, record: dict[str, float]) -> None:
        """Show the newest record of the history."""
        if self.verbose == 0:
            return
        parts = []
        if not math.isnan(record["bound"]):
            parts.append(f"bound {record['bound']:.4f}")
        if not math.isnan(record["bound_gap"]):
            parts.append(f"below log p by {record['bound_gap']:.3f}")
        if not math.isnan(record["validation_log_likelihood"]):
            parts.append(f"validation {record['validation_log_likelihood']:.4f}")
        status = "  ".join(parts)
        if self.moving:
            self.bar.update(self.task, status=status)
        else:
            iteration = int(record["iteration"])
            self.console.print(
                f"iteration {iteration:,} of {self.total:,}  epoch {record['epoch']:.1f}  "
                f"{record['seconds']:.1f} s  {status}",
                highlight=False,
                soft_wrap=True,
            )
