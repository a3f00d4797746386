"""What a person sees while training: a bar with rate, time left and the bound; or a line now and then in a log."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

PATIENCE = 1.0  # seconds of a first step before we say why it takes so long
EVERY = 1.0  # seconds between two lines of a log


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("-- it/s" if task.speed is None else f"{task.speed:,.0f} it/s", style="cyan")


class TrainingProgress:
    """A context manager around the training loop. Silent where `verbose` is 0.

    On a terminal it is one moving line; elsewhere (a log file, a pipe) a line now and then, and one at the end.
    """

    def __init__(self, total: int, verbose: int, done: int = 0) -> None:
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
        self.task = self.bar.add_task("fit", total=total, completed=done, status="")
        self.printed = time.monotonic()

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

    def report(self, record: dict[str, float], last: bool) -> None:
        """Show the newest record of the history; in a log only looks, no more than one each EVERY, and the last."""
        if self.verbose == 0:
            return
        if self.moving:
            self.bar.update(self.task, status=described(record))
            return
        looked = not (math.isnan(record["bound_gap"]) and math.isnan(record["validation_log_likelihood"]))
        if last or (looked and time.monotonic() - self.printed >= EVERY):
            self.printed = time.monotonic()
            self.console.print(
                f"iteration {int(record['iteration']):,} of {self.total:,}  epoch {record['epoch']:.1f}  "
                f"{record['seconds']:.1f} s  {described(record)}",
                highlight=False,
                soft_wrap=True,
            )


def described(record: dict[str, float]) -> str:
    """What is known of the bound."""
    parts = []
    if not math.isnan(record["bound"]):
        parts.append(f"bound {record['bound']:.4f}")
    if not math.isnan(record["bound_gap"]):
        gap = round(record["bound_gap"], 3)
        parts.append(f"bound gap {gap if gap else 0.0:.3f} nat")  # not -0.000
    if not math.isnan(record["validation_log_likelihood"]):
        parts.append(f"validation {record['validation_log_likelihood']:.4f}")
    return "  ".join(parts)
