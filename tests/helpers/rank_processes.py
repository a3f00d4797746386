"""Run one function on several processes joined by gloo, under a time limit of their own.

    results = run_on_ranks(function, 2, tmp_path, *arguments)     # function(group, *arguments) on each rank

Every rank is a process of one thread, forked from a server that has imported the package and done nothing else: an
interpreter of its own would take some three seconds to import torch. At the limit, or GRACE seconds after a rank has
failed, all are killed; the error shows what each rank raised or printed. The function has to stand at the top of a
module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds from start to end, of all ranks
GRACE = 15.0  # seconds that the others have, once a rank has died
IMPORTED = ["augment_reduce.nn", "torch.distributed.checkpoint"]
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMBA")}


@dataclass
class Outcome:
    """How a rank ended: what the function returned, or the text of what it raised; `code` as of a process."""

    rank: int
    code: int | None  # None: killed at the limit; negative: by this signal
    value: Any = None
    error: str = ""  # type and message
    output: str = ""  # all that it printed, with the traceback

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.error


def run_on_ranks(
    function: Callable[..., Any], n_ranks: int, folder: Path, *arguments: Any, limit: float = LIMIT
) -> list[Any]:
    """What `function(group, *arguments)` returned on each rank; AssertionError with every traceback if one failed."""
    outcomes = try_on_ranks(function, n_ranks, folder, *arguments, limit=limit)
    if not all(one.ok for one in outcomes):
        raise AssertionError("\n".join(f"---- rank {o.rank}, exit code {o.code}\n{o.output}" for o in outcomes))
    return [one.value for one in outcomes]


def try_on_ranks(
    function: Callable[..., Any], n_ranks: int, folder: Path, *arguments: Any, limit: float = LIMIT,
    timeout: float = 30.0,
) -> list[Outcome]:  # fmt: skip
    """How each rank ended, whatever it did; `timeout` is that of the group's collectives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    place = _fresh(Path(folder))
    with _environment(ONE_THREAD):  # the first call starts the server
        ranks = [
            context.Process(target=_rank, args=(function, rank, n_ranks, place, timeout, arguments), daemon=True)
            for rank in range(n_ranks)
        ]
        for process in ranks:
            process.start()
    try:
        in_time = _wait(ranks, limit)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    return [_outcome(rank, place, process.exitcode if in_time[rank] else None) for rank, process in enumerate(ranks)]


def _wait(ranks: list[Any], limit: float) -> list[bool]:
    """Until all have ended or time is over: whether each had ended by itself."""
    end = time.monotonic() + limit
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + GRACE)
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            break
        time.sleep(0.02)
    return [not process.is_alive() for process in ranks]


def _rank(
    function: Callable[..., Any], rank: int, n_ranks: int, place: Path, timeout: float, arguments: tuple[Any, ...]
) -> None:
    """One rank's process: standard output, the result and the error go to files."""
    faulthandler.enable()
    with open(place / f"{rank}.out", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(place / "store"), n_ranks), rank=rank, world_size=n_ranks,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        value = function(dist.group.WORLD, *arguments)
        (place / f"{rank}.value").write_bytes(pickle.dumps(value))
        gc.collect()  # what still has the group
        dist.barrier()  # or one that ends first breaks the others' connections
        dist.destroy_process_group()
    except BaseException as error:
        (place / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no clean-up of a broken group, which may wait
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a group that is freed while the interpreter ends may abort the process


def _outcome(rank: int, place: Path, code: int | None) -> Outcome:
    value, error, output = (place / f"{rank}.{name}" for name in ("value", "error", "out"))
    return Outcome(
        rank, code,
        pickle.loads(value.read_bytes()) if value.exists() else None,
        error.read_text() if error.exists() else "",
        output.read_text() if output.exists() else "",
    )  # fmt: skip


def _fresh(folder: Path) -> Path:
    """A folder that no run before has used: the store and the results stand there."""
    for number in range(10_000):
        with contextlib.suppress(FileExistsError):
            place = folder / f"ranks-{number}"
            place.mkdir(parents=True)
            return place
    raise AssertionError(f"no free folder in {folder}")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
