"""The results folder: finished cells, checkpoints of running cells, no mix of versions.

    reproduce.json        identifies the folder and the release that writes it
    statistics.json       statistics of the data, for table 1
    cells/KEY.json, .npz  a finished cell: numbers, settings, versions, machine; and its curves
    checkpoints/KEY.*     a running cell: the model and the evaluations so far

Files are written atomically. KEY is dataset.method.seedN, with the suffix .timing or .iterationsN for cells shorter
than the paper's.
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
from ..support.atomic import replaced_atomically

FORMAT, FORMAT_VERSION = "augment-reduce results", 1


class ResultsFolderError(ValueError):
    """A results folder cannot be used; says what to do."""


class DiskFullError(OSError):
    """The disk is full; says what is kept."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk, also from libraries that do not raise OSError."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


class Store:
    """One results folder. `open` creates or validates it; all access to its files is here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        self.checkpoints = folder / "checkpoints"

    def open(self) -> Store:
        """Create the folder, or refuse one with other contents or results of another release."""
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
        """A finished cell's numbers; None if it is not finished or its file cannot be read."""
        return _read_json(self.cells / f"{key}.json")

    def all_finished(self) -> list[dict[str, Any]]:
        found = (_read_json(path) for path in sorted(self.cells.glob("*.json")))
        return [record for record in found if record is not None]

    def curves(self, key: str) -> dict[str, np.ndarray]:
        """A finished cell's curves by name, possibly none."""
        path = self.cells / f"{key}.npz"
        if not path.is_file():
            return {}
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays.items())

    def finish(self, key: str, record: Mapping[str, Any], curves: Mapping[str, np.ndarray]) -> None:
        """Store a finished cell: curves first, then the json, which marks it as complete; delete its checkpoint."""
        with replaced_atomically(self.cells / f"{key}.npz") as temporary, open(temporary, "wb") as out:
            np.savez_compressed(out, **curves)  # type: ignore[arg-type]
        self.write_json(self.cells / f"{key}.json", record)
        self.forget_checkpoint(key)

    # ---- running cells ----

    def model_path(self, key: str) -> Path:
        return self.checkpoints / f"{key}.safetensors"

    def points(self, key: str) -> dict[str, Any] | None:
        return _read_json(self.checkpoints / f"{key}.json")

    def save_points(self, key: str, points: Mapping[str, Any]) -> None:
        self.write_json(self.checkpoints / f"{key}.json", points)

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
    """A value for JSON: NumPy numbers as numbers, NaN and infinities as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value
