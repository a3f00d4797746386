"""The output path of a model: checked before any work; if writing fails, the model is saved elsewhere."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..support.atomic import check_writable


class Saves(Protocol):
    """A fitted model."""

    def save(self, path: Path, /) -> None: ...


class SavedElsewhereError(OSError):
    """The model could not be saved at its path; it is saved in another file."""


def check_output(output: Path, inputs: Sequence[Path], option: str = "--output", needed_bytes: int = 0) -> None:
    """Refuse an output that cannot be written, or that is an input, before any work is done."""
    check_writable(output, needed_bytes)
    if any(output.exists() and given.exists() and output.samefile(given) for given in inputs):
        raise ValueError(f"{output} is also a file to be read; writing would destroy it. Choose another {option}.")


def save_or_rescue(model: Saves, output: Path) -> None:
    """Save a model; if that fails, save it elsewhere and say where, since it took long to train."""
    try:
        model.save(output)
        return
    except OSError as error:
        reason = error
    for folder in dict.fromkeys((output.parent.absolute(), Path.cwd(), Path(tempfile.gettempdir()))):
        other = _free_name(folder, output)
        try:
            model.save(other)
        except OSError:
            continue
        raise SavedElsewhereError(f"{_sentence(reason)} The model is whole, but in another file: {other}") from reason
    raise SavedElsewhereError(
        f"{_sentence(reason)} Nor could it be written elsewhere, so the model is lost. Make room, and fit again."
    ) from reason


def _free_name(folder: Path, output: Path) -> Path:
    stem, suffix = output.stem[:50], output.suffix[:20]
    names = (folder / f"{stem}-rescued{n or ''}{suffix}" for n in itertools.count())
    return next(name for name in names if not name.exists())


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}." if error.filename is not None else str(error)
