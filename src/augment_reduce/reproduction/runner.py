"""Plan the cells of a target and run them: sequentially, or several at once in separate processes.

A cell that fails is reported and the others continue. A full disk and Ctrl-C end the run; finished cells are kept, and
the same command resumes from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..data import PAPER_SHAPES
from .cells import Cell, run_cell
from .progress import CellProgress
from .settings import METHODS, REAL, STUDIES, TABLE2, Study, shape_of
from .store import DiskFullError, Store, is_disk_full

DATASETS_OF = {
    **dict.fromkeys(("table1", "table2", "all", "report"), tuple(STUDIES)),
    **dict.fromkeys(("table3", "figure2"), REAL),
    "synthetic": ("synthetic",),
}
STOP_SECONDS = 120.0  # seconds that a cell may take to save its state after Ctrl-C


@dataclass(frozen=True)
class Choice:
    """The arguments of the command; None: all."""

    target: str
    datasets: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    asked: int | None = None

    def studies(self) -> list[Study]:
        return [STUDIES[name] for name in self.datasets or DATASETS_OF[self.target]]


@dataclass
class Failures:
    """Failed cells by key, with the reason."""

    of: dict[str, str] = field(default_factory=dict)


# ---- planning ----


def plan(choice: Choice, found: Mapping[str, Mapping[str, Any]], store: Store) -> list[Cell]:
    """The cells of a target, in the order of the paper's tables; if files are missing, those that can be timed."""
    cells: list[Cell] = []
    for study in choice.studies():
        missing = "missing" in found.get(study.name, {})
        for method in methods_of(choice, study):
            for seed in choice.seeds:
                full = Cell(study.name, method, seed, "full", choice.asked)
                timed = Cell(study.name, method, choice.seeds[0], "timing", choice.asked)
                stand_in = Cell(shape_of(study).name, method, choice.seeds[0], "timing", choice.asked)
                if missing:
                    cells += [stand_in] if choice.target in ("table2", "all") and method in TABLE2[study.name] else []
                elif choice.target == "table2":
                    cells += [full if store.finished(full.key) else timed]
                elif choice.target not in ("table1", "report"):
                    cells += [full]
    unique = list(dict.fromkeys(cells))
    if not unique and choice.target not in ("table1", "report"):
        _explain_empty(choice, found)
    return unique


def methods_of(choice: Choice, study: Study) -> list[str]:
    """The methods of a study in a target; figure 2 has the exact likelihood only where the paper has it."""
    shown = list(study.methods)
    if choice.target == "table2" and choice.methods is None:
        shown = [name for name in shown if name in TABLE2[study.name]]
    if choice.target == "figure2":
        line = ["exact"] if study.name in ("mnist", "bibtex") else []
        shown = [name for name in shown if name in ("one-vs-each", "softmax", *line)]
    return shown if choice.methods is None else [name for name in shown if name in choice.methods]


def _explain_empty(choice: Choice, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Explain an empty plan: missing files, or names that do not go together."""
    hints = [str(found[study.name]["missing"]) for study in choice.studies() if "missing" in found.get(study.name, {})]
    if hints:
        raise FileNotFoundError(" ".join(hints))
    anything = Choice(choice.target, choice.datasets)
    cells = "; ".join(f"{study.name}: {', '.join(methods_of(anything, study))}" for study in choice.studies())
    raise ValueError(
        f"{choice.target} has no cell with method {' or '.join(choice.methods or ())} here. Its cells are {cells}."
    )


def cost(cell: Cell) -> float:
    """Approximate relative cost of a cell: the longest start first if several run at once."""
    study, method = cell.of, METHODS[cell.method]
    shape = PAPER_SHAPES.get(study.of_shape or study.name)
    classes = study.n_classes if method.method == "exact" else study.n_sampled_classes + 1
    per_pair = 10 + (shape.nonzeros if shape else 0)
    integrals = 1.0 if method.model == "softmax" else 1.5
    return cell.iterations * study.batch_size * classes * per_pair * integrals


# ---- running ----


def run(cells: Sequence[Cell], store: Store, data: Path | None, jobs: int, progress: CellProgress) -> Failures:
    """Run the cells that are not finished yet."""
    waiting = [cell for cell in cells if store.finished(cell.key) is None]
    failures = Failures()
    with progress:
        progress.begin(len(cells), len(waiting))
        if jobs == 1 or len(waiting) <= 1:
            _one_by_one(waiting, store, data, progress, failures)
        else:
            _several(sorted(waiting, key=cost, reverse=True), store, data, jobs, progress, failures)
    return failures


def _one_by_one(
    cells: Sequence[Cell], store: Store, data: Path | None, progress: CellProgress, failures: Failures
) -> None:
    for cell in cells:
        progress.start(cell.key, cell.iterations)
        try:
            record = run_cell(cell, store, data, partial(progress.advance, cell.key))
        except Exception as error:
            if is_disk_full(error):
                raise DiskFullError(str(error)) from error
            failures.of[cell.key] = reason(error)
            progress.fail(cell.key, failures.of[cell.key])
        else:
            progress.finish(cell.key, record)


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    known = isinstance(error, ValueError | MemoryError | FloatingPointError | OSError)
    return text if known and text else f"{type(error).__name__}: {text}"


def _work(cell: Cell, folder: Path, data: Path | None, at_once: int, parent_id: int, parent: Connection) -> None:
    """Run a cell in a separate process; report to the parent, and stop if the parent has ended."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches the parent, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def report(done: int, note: str) -> None:
        if os.getppid() != parent_id:
            raise KeyboardInterrupt
        parent.send(("advance", (done, note)))

    try:
        record = run_cell(cell, Store(folder), data, report, at_once=at_once)
        parent.send(("finish", record))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        parent.send(("full" if is_disk_full(error) else "fail", reason(error)))


@dataclass
class Running:
    cell: Cell
    process: Any  # multiprocessing's SpawnProcess
    messages: Connection
    ready: bool = False  # has reported: it can be interrupted, and will save its state
    ended: bool = False


def _several(
    cells: Sequence[Cell], store: Store, data: Path | None, jobs: int, progress: CellProgress, failures: Failures
) -> None:
    queue, running = list(cells), list[Running]()
    try:
        while queue or running:
            while queue and len(running) < jobs:
                running.append(_start(queue.pop(0), store, data, jobs))
                progress.start(running[-1].cell.key, running[-1].cell.iterations)
            wait([x for r in running for x in (r.messages, r.process.sentinel)], timeout=1.0)
            for r in running:
                _listen(r, progress, failures)
            running = [r for r in running if not r.ended]
    finally:
        _stop(running)


def _start(cell: Cell, store: Store, data: Path | None, jobs: int) -> Running:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(cell, store.folder, data, jobs, os.getpid(), theirs))
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: no Ctrl-C during imports
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, usual)
    theirs.close()
    return Running(cell, process, ours)


def _listen(r: Running, progress: CellProgress, failures: Failures) -> None:
    """Receive messages of a cell; one that ended without a final message was killed."""
    exited = not r.process.is_alive()  # before reading: all messages have then arrived
    key = r.cell.key
    try:
        while r.messages.poll():
            word, content = r.messages.recv()
            r.ready = True
            if word == "advance":
                progress.advance(key, *content)
                continue
            r.ended = True
            if word == "full":
                raise DiskFullError(content)
            if word == "finish":
                progress.finish(key, content)
            else:
                failures.of[key] = content
                progress.fail(key, content)
    except EOFError:
        pass
    if exited and not r.ended:
        r.ended = True
        code = r.process.exitcode
        failures.of[key] = f"its process ended with code {code}" + (
            "; it may have run out of memory: use fewer --jobs" if code == -9 else ""
        )
        progress.fail(key, failures.of[key])
    if r.ended:
        r.process.join()
        r.messages.close()


def _stop(running: Sequence[Running]) -> None:
    """Ask running cells to save their state and end; kill them after a while."""
    alive = [r for r in running if r.process.is_alive()]
    for r in alive:
        if hasattr(os, "setpgrp") and (r.ready or r.messages.poll()):
            os.kill(r.process.pid, signal.SIGINT)
        else:  # has nothing to save
            r.process.terminate()
    until = time.monotonic() + STOP_SECONDS
    for r in alive:
        r.process.join(max(0.1, until - time.monotonic()))
        if r.process.is_alive():
            r.process.terminate()
