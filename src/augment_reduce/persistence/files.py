"""Model files: one safetensors file, its description as JSON in the header; no pickle, written atomically.

The header holds `format`, `version`, `description` (JSON: parameters, clock, names of things) and `sha256`, which
covers the description and the bytes of every tensor. A truncated or edited file, or one of another format version,
is refused. The checksum detects damage, not tampering: anybody can compute it, so the contents
are validated, too (`model_checks`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..support.atomic import replaced_atomically
from .tensor_file import DTYPES, TensorFileError, parse_json, read_file, save_file

FORMAT = "augment-reduce model"
FORMAT_VERSION = 1
NUMBER_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
TEXT_DTYPE = re.compile(r"[<>|=]?U\d{1,9}|[|]?O")


class ModelFileError(ValueError):
    """A model file that cannot be trusted or read."""


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
    with replaced_atomically(path) as temporary:
        save_file(contiguous, temporary, metadata=header)


def load_model(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file written by `save_model`; any other raises `ModelFileError`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No model file at {path}.")
    try:
        header, tensors = read_file(path)
    except TensorFileError as error:
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
            f"{path} has format version {header.get('version', '')[:20]!r}; this release reads version "
            f"{FORMAT_VERSION}. Load it with the release that wrote it, or fit and save again."
        )
    text = header.get("description", "")
    if not text.isascii() or header.get("sha256") != fingerprint(text, tensors):
        raise ModelFileError(
            f"The checksum of {path} does not match its contents: it was changed after it was saved. "
            "Restore it from a copy, or fit and save again."
        )
    try:
        description = parse_json(text)
    except ValueError as error:
        raise ModelFileError(f"{path}: description: expected JSON, found other text ({error}).") from None
    if not isinstance(description, dict):
        raise ModelFileError(f"{path}: description: expected a table of entries, found a {type(description).__name__}.")
    return description, tensors


def fingerprint(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the description and, in the order of their names, the tensors' names, shapes, types and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode("utf-8", "backslashreplace"))
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- names ----


def pack_names(prefix: str, names: np.ndarray) -> dict[str, Tensor]:
    """Class or feature names as tensors: numbers as they are, text as UTF-8 bytes and where each name ends."""
    if names.dtype.kind in "biuf":
        stored = _stored_dtype(names.dtype)
        if stored is None:
            raise ValueError(f"Names of dtype {names.dtype} cannot be saved; make the labels float64 before fit.")
        numbers = names.astype(str(stored).removeprefix("torch."))  # in this machine's byte order
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


def _stored_dtype(dtype: np.dtype) -> torch.dtype | None:
    """The dtype in which names of that dtype are stored: bool and unsigned ones as integers that torch has."""
    if dtype.kind == "b":
        return torch.uint8
    if dtype.kind == "u" and dtype.itemsize > 1:
        return torch.int64
    return DTYPES.get(f"{dtype.kind.upper()}{8 * dtype.itemsize}")


def unpack_names(prefix: str, tensors: dict[str, Tensor], dtype: str) -> np.ndarray:
    """The inverse of `pack_names`, with the original numpy dtype (of text, its kind). Tensors that `pack_names` cannot
    have written raise a ValueError that names the entry."""
    if f"{prefix}.values" in tensors:
        return _unpack_numbers(f"{prefix}.values", tensors[f"{prefix}.values"], dtype)
    if not TEXT_DTYPE.fullmatch(dtype):
        raise ValueError(f"{prefix}: expected the dtype of text, found {dtype[:20]!r}")
    missing = next((name for name in ("text", "ends") if f"{prefix}.{name}" not in tensors), None)
    if missing is not None:
        raise ValueError(f"{prefix}.{missing}: expected an array, found none")
    blob, ends = tensors[f"{prefix}.text"], tensors[f"{prefix}.ends"]
    if blob.dtype != torch.uint8 or blob.ndim != 1:
        raise ValueError(f"{prefix}.text: expected a row of bytes, found shape {tuple(blob.shape)} of {blob.dtype}")
    if ends.dtype != torch.int64 or ends.ndim != 1:
        raise ValueError(f"{prefix}.ends: expected a row of int64, found shape {tuple(ends.shape)} of {ends.dtype}")
    starts = [0, *ends.tolist()]
    if starts[-1] != len(blob) or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"{prefix}.ends: expected numbers that rise from 0 to {len(blob)}, the bytes of {prefix}.text")
    text = blob.numpy().tobytes()
    try:
        names = [text[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(starts)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{prefix}.text: expected UTF-8 ({error})") from None
    return np.array(names, dtype=object) if dtype.endswith("O") else np.array(names, dtype=np.str_)


def _unpack_numbers(name: str, values: Tensor, dtype: str) -> np.ndarray:
    if not NUMBER_DTYPE.fullmatch(dtype):
        raise ValueError(f"{name}: expected the dtype of numbers, found {dtype[:20]!r}")
    wanted = np.dtype(dtype)
    stored = _stored_dtype(wanted)
    if values.dtype != stored or values.ndim != 1:
        raise ValueError(f"{name}: expected a row of {stored}, found shape {tuple(values.shape)} of {values.dtype}")
    numbers = values.numpy().astype(wanted)
    if not np.array_equal(numbers.astype(values.numpy().dtype), values.numpy()):
        raise ValueError(f"{name}: expected numbers of {wanted}, found others")
    return numbers
