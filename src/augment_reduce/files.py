"""Model files: one safetensors file, its description as JSON in the header; no pickle, written whole or not at all.

The header holds `format`, `version`, `description` (JSON: parameters, clock, names of things) and `sha256`, which
covers the description and the bytes of every tensor. A file that was cut off, edited or written by another format
version is refused with a sentence that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "augment-reduce model"
FORMAT_VERSION = 1


class ModelFileError(ValueError):
    """A model file that cannot be trusted or read."""


@contextlib.contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; it takes the place of `path` only if the body ends well.

    The new bytes are on the disk before the name changes, so a crash at any moment leaves the old file or the new one.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} to write {path.name} to; make it first.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_model(path: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write `description` (JSON types only) and `tensors` to one file."""
    text = json.dumps(description, sort_keys=True, allow_nan=False)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "description": text,
        "sha256": fingerprint(text, contiguous),
    }
    with replaced_atomically(Path(path)) as temporary:
        save_file(contiguous, temporary, metadata=header)


def load_model(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file written by `save_model`; `ModelFileError` says what is wrong with any other."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No model file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Cloned: as they lie in the file they are not aligned, and a product of them may round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, OSError) as error:
        raise ModelFileError(
            f"{path} is not a whole model file: {error}. It may have been cut off or be of another kind; "
            "save the model again."
        ) from error
    if header.get("format") != FORMAT:
        raise ModelFileError(
            f"{path} is a safetensors file but not one of augment-reduce; expected one written by save()."
        )
    if header.get("version") != str(FORMAT_VERSION):
        raise ModelFileError(
            f"{path} has format version {header.get('version')!r}; this release reads version {FORMAT_VERSION}. "
            "Load it with the release that wrote it, or fit and save again."
        )
    if header.get("sha256") != fingerprint(header.get("description", ""), tensors):
        raise ModelFileError(
            f"The checksum of {path} does not match its contents: it was changed after it was saved. "
            "Restore it from a copy, or fit and save again."
        )
    return json.loads(header["description"]), tensors


def fingerprint(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the description and, in the order of their names, the tensors' names, shapes, types and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_names(prefix: str, names: np.ndarray) -> dict[str, Tensor]:
    """Class or feature names as tensors: numbers as they are, text as UTF-8 bytes and where each name ends."""
    if names.dtype.kind in "biuf":
        numbers = names.astype(np.uint8) if names.dtype.kind == "b" else names
        if numbers.dtype.kind == "u" and numbers.dtype != np.uint8:
            numbers = numbers.astype(np.int64)
        return {f"{prefix}.values": torch.from_numpy(np.ascontiguousarray(numbers))}
    strings = [name for name in names.tolist() if isinstance(name, str)]
    if len(strings) != len(names):
        raise ValueError(
            f"Names of type {type(names.tolist()[0]).__name__} cannot be saved; make the labels text or numbers "
            "before fit."
        )
    encoded = [name.encode("utf-8", "surrogatepass") for name in strings]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    blob = np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()
    return {f"{prefix}.text": torch.from_numpy(blob), f"{prefix}.ends": torch.from_numpy(ends)}


def unpack_names(prefix: str, tensors: dict[str, Tensor], dtype: str) -> np.ndarray:
    """The array that `pack_names` was given, with its numpy dtype."""
    if f"{prefix}.values" in tensors:
        return tensors[f"{prefix}.values"].numpy().astype(np.dtype(dtype))
    blob, ends = tensors[f"{prefix}.text"].numpy().tobytes(), tensors[f"{prefix}.ends"].tolist()
    starts = [0, *ends[:-1]]
    names = [blob[start:end].decode("utf-8", "surrogatepass") for start, end in zip(starts, ends, strict=True)]
    return np.array(names, dtype=np.dtype(dtype))
