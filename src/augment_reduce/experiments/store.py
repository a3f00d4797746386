"""The results folder: what is finished stays, what is under way can go on, and versions are not mixed.

    reproduce.json        what this folder is, and which release fills it
    statistics.json       table 1 as found
    cells/KEY.json, .npz  a finished cell: numbers, settings, versions, machine; and its curves
    checkpoints/KEY.*     a cell under way: the model, and what was looked at so far

Every file is written whole or not at all. KEY is dataset.method.seedN, with .timing or .iterationsN behind it where the
cell is shorter than the paper's.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..atomic import replaced_atomically

FORMAT, FORMAT_VERSION = "augment-reduce results", 1


class ResultsFolderError(ValueError):
    """A results folder that cannot be used, and what to do instead."""


class DiskFullError(OSError):
    """No room left; says what is kept."""


def is_disk_full(error: BaseException) -> bool:
    """Whether writing failed for lack of room, also as reported by libraries that do not raise OSError."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


class Store:
    """One results folder. `open` makes it or checks it; nothing else touches its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        self.checkpoints = folder / "checkpoints"

    def open(self) -> Store:
        """Make the folder, or refuse one that holds something else or the results of another release."""
        identity = self.folder / "reproduce.json"
        if self.folder.exists() and not self.folder.is_dir():
            raise ResultsFolderError(f"Expected a folder for the results, but {self.folder} is a file.")
        if identity.exists():
            self._check(identity)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ResultsFolderError(
                f"Expected an empty folder or one with results, but {self.folder} holds other files and no "
                f"{identity.name}. Name another one with --output; it is made if it does not exist."
            )
        try:
            for folder in (self.cells, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            if is_disk_full(error):
                raise
            raise PermissionError(f"Cannot write into {self.folder.absolute()}: {error.strerror}.") from error
        if not identity.exists():
            self.write_json(identity, {"format": FORMAT, "version": FORMAT_VERSION, "written_by": __version__})
        return self

    def _check(self, identity: Path) -> None:
        found = _read_json(identity) or {}
        if found.get("format") != FORMAT:
            raise ResultsFolderError(
                f"{identity} does not describe a folder of results. Name another folder with --output."
            )
        if found.get("version") != FORMAT_VERSION or found.get("written_by") != __version__:
            raise ResultsFolderError(
                f"The results in {self.folder} were made by augment-reduce {found.get('written_by')} (layout "
                f"{found.get('version')}); this is {__version__} (layout {FORMAT_VERSION}), and results of two "
                "releases are not mixed. Name another folder with --output, or move this one away, or install the "
                "release that made it."
            )

    # ---- finished cells ----

    def finished(self, key: str) -> dict[str, Any] | None:
        """A finished cell's numbers; None if it is not finished (a file that cannot be read counts as not)."""
        return _read_json(self.cells / f"{key}.json")

    def all_finished(self) -> list[dict[str, Any]]:
        found = (_read_json(path) for path in sorted(self.cells.glob("*.json")))
        return [record for record in found if record is not None]

    def curves(self, key: str) -> dict[str, np.ndarray]:
        """A finished cell's curves by name; empty where there are none."""
        path = self.cells / f"{key}.npz"
        if not path.is_file():
            return {}
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays.items())

    def finish(self, key: str, record: Mapping[str, Any], curves: Mapping[str, np.ndarray]) -> None:
        """Keep a cell. The curves first: the json says that all is there. Then its checkpoint may go."""
        with replaced_atomically(self.cells / f"{key}.npz") as temporary, open(temporary, "wb") as out:
            np.savez_compressed(out, **curves)  # type: ignore[arg-type]
        self.write_json(self.cells / f"{key}.json", record)
        self.forget_checkpoint(key)

    # ---- cells under way ----

    def model_path(self, key: str) -> Path:
        return self.checkpoints / f"{key}.safetensors"

    def looks(self, key: str) -> dict[str, Any] | None:
        return _read_json(self.checkpoints / f"{key}.json")

    def save_looks(self, key: str, looks: Mapping[str, Any]) -> None:
        self.write_json(self.checkpoints / f"{key}.json", looks)

    def forget_checkpoint(self, key: str) -> None:
        for suffix in (".safetensors", ".json"):
            (self.checkpoints / f"{key}{suffix}").unlink(missing_ok=True)

    # ---- the rest ----

    def statistics(self) -> dict[str, dict[str, Any]]:
        return _read_json(self.folder / "statistics.json") or {}

    def add_statistics(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        if found:
            self.write_json(self.folder / "statistics.json", {**self.statistics(), **found})

    def write_json(self, path: Path, contents: Mapping[str, Any]) -> None:
        self.write_text(path, json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        with replaced_atomically(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def plain(value: Any) -> Any:
    """A value as JSON has it: NumPy numbers as numbers, NaN and infinities as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value
