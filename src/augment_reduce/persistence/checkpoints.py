"""Checkpoints of one fit: a folder from which the same call of `fit` resumes.

    fit.json                       identifies the fit: version, parameters, rows (their shape and a hash), classes
    step-000000012000.safetensors  the model and the training state after iteration 12,000, as `save` writes it
    step-000000012000/             the same of a fit over ranks (`rank_checkpoints`)
    lock                           held by the process that writes; over ranks, by the first one

Every file is written atomically, and the last two states are kept: a kill at any time, also during a write, loses the
iterations since the last one. A fit with other rows, parameters or release than the folder's is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..kernels.rows import DenseRows
from ..sharding import Partition, Ranks, RankStopped
from ..support.atomic import check_writable, replaced_atomically, sync_folder
from ..training.fitted import Fitted, TrainingRows
from . import rank_checkpoints, rank_files, saving
from .encoding import encode
from .files import ModelFileError
from .tensor_file import parse_json

try:
    import fcntl
except ImportError:  # Windows has no flock: two fits with one folder are not detected
    fcntl = None  # type: ignore[assignment]

DESCRIPTION, LOCK = "fit.json", "lock"
STEP = re.compile(r"step-(\d{12})(\.safetensors)?")
KEPT = 2
SECONDS = 600.0  # between two checkpoints, by default
COMPARED = 64  # steps between the collectives by which ranks decide whether SECONDS have passed
MAY_DIFFER = ("n_jobs", "device", "verbose", "warm_start", "process_group")
BYTES_AT_ONCE = 1 << 24
ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the repr of an object
START_ANEW = "To fit anew, name another folder or remove this one."


class CheckpointError(ValueError):
    """A checkpoint folder that this fit cannot use."""


class Checkpoints:
    """The checkpoints of one running fit. `found`: the state to resume from; None: there is none."""

    def __init__(self, estimator: Any, folder: Path, every: int | None, partition: Partition | None = None) -> None:
        self.estimator, self.folder, self.every, self.partition = estimator, folder, every, partition
        self.ranks = Ranks(None) if partition is None else partition.ranks
        self.found: Fitted | None = None
        self.since = time.monotonic()

    def due(self, iteration: int) -> bool:
        """Whether to write one after this iteration; the same on every rank."""
        if self.every is not None:
            return iteration % self.every == 0
        is_time = time.monotonic() - self.since >= SECONDS
        if self.partition is None:
            return is_time
        return iteration % COMPARED == 0 and self.partition.any(is_time, "whether a checkpoint is due")

    def write(self) -> None:
        """Write the current state of the estimator. If that fails, warn and continue the fit."""
        iteration = self.estimator._fitted.clock.iteration
        path = self.folder / f"step-{iteration:012d}"
        try:
            if self.partition is None:
                saving.save(self.estimator, path.with_name(f"{path.name}.safetensors"))
            else:
                rank_checkpoints.save(self.estimator, path, self.partition)
            with self.ranks.agree_on_errors("removing old checkpoints"):
                if self.ranks.rank == 0:
                    self.remove_old(iteration)
        except (OSError, ValueError, MemoryError, RankStopped) as error:
            warnings.warn(
                f"No checkpoint was written after iteration {iteration:,}: {str(error).rstrip('.')}. The fit goes on; "
                f"what is in {self.folder} stays as it was.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.since = time.monotonic()

    def remove_old(self, iteration: int) -> None:
        there = steps_of(self.folder)
        good = [old for number, old in there if number <= iteration]  # later ones are of another run
        for old in {old for _, old in there} - set(good[:KEPT]):
            if old.is_dir():
                rank_files.remove(old)
            else:
                old.unlink()

    def check_space(self, bytes_of_state: int) -> None:
        """Refuse a folder without space for the states that are kept and the next one."""
        with self.ranks.agree_on_errors("looking for room for checkpoints"):
            if self.ranks.rank == 0:
                there = sum(size_of(path) for _, path in steps_of(self.folder))
                check_writable(self.folder / "step", max(0, (KEPT + 1) * bytes_of_state - there))


@contextlib.contextmanager
def checkpoints(
    estimator: Any, path: str | os.PathLike[str] | None, every: int | None, rows: TrainingRows,
    partition: Partition | None = None,
) -> Iterator[Checkpoints | None]:  # fmt: skip
    """The checkpoints of a fit of `estimator` to these rows, in the folder `path`, created if missing.

    Collective over the ranks of a `partition`: the first rank creates, locks and describes the folder, which has to be
    visible to all.
    """
    if path is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        kept = Checkpoints(estimator, Path(path), every, partition)
        with kept.ranks.agree_on_errors("the opening of a checkpoint folder"):
            if kept.ranks.rank == 0:
                made(kept.folder)
                stack.enter_context(locked(kept.folder))
                describe(kept.folder, description(estimator, rows))
        kept.found = last_state(kept)
        yield kept


def describe(folder: Path, now: dict[str, Any]) -> None:
    """Write the description of the fit; CheckpointError if the folder is of another fit."""
    if (folder / DESCRIPTION).exists():
        check_same(folder, now)
    elif steps_of(folder):
        raise CheckpointError(f"{folder} has checkpoints but no {DESCRIPTION} that says of which fit. {START_ANEW}")
    else:
        with replaced_atomically(folder / DESCRIPTION) as temporary:
            temporary.write_text(json.dumps(now, sort_keys=True), encoding="utf-8")


def check_every(path: object, every: object) -> None:
    if every is None:
        return
    if path is None:
        raise ValueError(f"every={every!r} says how often a checkpoint is written; name its folder, checkpoint=.")
    if not isinstance(every, int | np.integer) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"Expected every to be a whole number of iterations >= 1, or None (every ten minutes), found {every!r}."
        )


def made(folder: Path) -> Path:
    if not os.fspath(folder) or not folder.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {folder.parent} for the checkpoints {folder.name}; make it first.")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"Expected a folder for checkpoints, found a file: {folder}. Name another.")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise PermissionError(error.errno, f"no checkpoint folder can be made: {error.strerror}", str(folder)) from None
    sync_folder(folder.parent)
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One fit at a time. A killed process holds no lock."""
    check_writable(folder / LOCK)
    with open(folder / LOCK, "ab") as handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"Another fit is writing checkpoints to {folder}. Name another folder, or wait for its end."
                ) from None
            except OSError:  # a file system without locks
                pass
        yield


# ---- identity of the fit ----


def description(estimator: Any, rows: TrainingRows) -> dict[str, Any]:
    """The values that have to be equal for an exact resume."""
    parameters = {
        name: ADDRESS.sub("", json.dumps(encode(name, value), sort_keys=True))
        for name, value in estimator.get_params(deep=False).items()
        if name not in MAY_DIFFER
    }
    return {
        "version": __version__,
        "parameters": parameters,
        "rows": rows.X.n_rows,
        "features": rows.X.n_features,
        "classes": len(estimator.classes_),
        "dtype": str(rows.X.dtype),
        "contents": hash_of(rows, estimator.classes_),
    }


def hash_of(rows: TrainingRows, classes: np.ndarray) -> str:
    """Hash of all features, labels and weights, as stored."""
    digest, X = hashlib.blake2b(digest_size=16), rows.X
    arrays = [X.values] if isinstance(X, DenseRows) else [X.indptr, X.indices, X.values]
    arrays += [rows.codes] if rows.weight is None else [rows.codes, rows.weight]
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        step = max(1, BYTES_AT_ONCE // max(1, array.itemsize * int(np.prod(array.shape[1:]))))
        for first in range(0, len(array), step):
            digest.update(np.ascontiguousarray(array[first : first + step]).reshape(-1).view(np.uint8).data)
    digest.update(repr(classes.dtype.kind).encode())
    digest.update("\0".join(map(str, classes.tolist())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_same(folder: Path, now: dict[str, Any]) -> None:
    path = folder / DESCRIPTION
    try:
        then = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(then, dict) or not isinstance(then.get("parameters"), dict):
            raise ValueError("it is no table")
    except ValueError as error:
        raise CheckpointError(f"{path} does not say of which fit its checkpoints are ({error}). {START_ANEW}") from None
    differences = [
        f"{what} {_shown(a)}, now {_shown(b)}"
        for what, a, b in (
            ("release", then.get("version"), now["version"]),
            *((what, then.get(what), now[what]) for what in ("rows", "features", "classes", "dtype")),
            *(
                (name, then["parameters"].get(name), now["parameters"].get(name))
                for name in sorted(then["parameters"].keys() | now["parameters"].keys())
            ),
        )
        if a != b
    ]
    if not differences and then.get("contents") != now["contents"]:
        differences = ["other features, labels or weights of the rows"]
    if differences:
        raise CheckpointError(
            f"The checkpoints in {folder} are of another fit: {'; '.join(differences)}. A fit goes on with the same "
            f"rows, parameters and release only. {START_ANEW}"
        )


def _shown(value: object) -> str:
    return str(value)[:60]


# ---- states ----


def steps_of(folder: Path) -> list[tuple[int, Path]]:
    """Iterations and files, the last one first."""
    found = ((STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def last_state(kept: Checkpoints) -> Fitted | None:
    """The last state that can be read, the same on every rank; a warning names those that cannot."""
    ranks, folder, reasons = kept.ranks, kept.folder, []
    own = [[number, path.name] for number, path in steps_of(folder)] if ranks.rank == 0 else []
    steps = json.loads(ranks.gather_text(json.dumps(own), "looking for checkpoints")[0])
    for iteration, name in steps:
        fitted, reason = load_state(kept, folder / name)
        if reason:
            reasons.append(reason)
            continue
        if reasons:
            warnings.warn(
                f"Going on from the checkpoint of iteration {iteration:,}: the last one cannot be read. {reasons[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
        return fitted
    if reasons:
        raise CheckpointError(
            f"None of the {len(steps)} checkpoints in {folder} can be read. {reasons[0]} {START_ANEW}"
        )
    return None


def load_state(kept: Checkpoints, path: Path) -> tuple[Fitted | None, str]:
    """(the state or None, the reason why it cannot be read or ""). From a file of one process each rank keeps its own
    classes."""
    fitted, reason = None, ""
    if not path.suffix:
        return rank_checkpoints.load(kept.estimator, path, kept.ranks, kept.partition)
    try:
        fitted = saving.load_fitted(kept.estimator, path)
        if kept.partition is not None:
            saving.shared_out(fitted, kept.partition)
    except (ModelFileError, FileNotFoundError) as error:
        reason = str(error)
    reasons = kept.ranks.gather_text(reason, "reading a checkpoint")
    return fitted, next((text for text in reasons if text), "")


__all__ = ["CheckpointError", "Checkpoints", "checkpoints"]
