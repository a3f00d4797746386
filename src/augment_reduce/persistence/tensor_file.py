"""The safetensors format: arrays by name in one file, beside a few strings; no pickle, nothing is executed.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {dtype, shape, data_offsets}, and "__metadata__" -> strings
    data       the arrays, one after the other, little-endian

Written and read here rather than by the `safetensors` package: its writer leaves temporary files when killed and
reports a full disk without errno; its reader maps the file into memory, so that truncating a file while it is read
crashes the process. Each reads the other's files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors package
MOST_DIMENSIONS = 4

PathLike = str | os.PathLike[str]


class TensorFileError(ValueError):
    """Not a complete safetensors file with arrays of `DTYPES`."""


class Place(NamedTuple):
    """The position of an array in the data."""

    name: str
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


# ---- writing ----


def save_file(tensors: Mapping[str, Tensor], path: PathLike, metadata: Mapping[str, str]) -> None:
    """Write the arrays, largest items first, so that each is aligned to its item size."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name in order:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > LARGEST_HEADER:
        raise ValueError(
            f"Expected a description of at most {LARGEST_HEADER:,} bytes, but it has {len(header):,}: a parameter is "
            "too large for a model file, such as a class_weight of millions of classes. Use class_weight='balanced'."
        )
    with open(path, "wb", buffering=0) as out:
        _write(out, len(header).to_bytes(8, "little") + header)
        for name in order:
            _write(out, _bytes_of(tensors[name].contiguous()))


def _write(out: Any, data: bytes | memoryview) -> None:
    """Write all bytes: an unbuffered write may be partial."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[out.write(rest) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


# ---- reading ----


def read_file(path: PathLike) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, arrays); allocates no more than the file's size. An invalid file raises `TensorFileError`."""
    with open(path, "rb") as source:
        size = os.fstat(source.fileno()).st_size
        header, data_begin = _header(source, size)
        metadata = header.pop("__metadata__", {})
        if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
            raise TensorFileError("its __metadata__ is not a table of strings")
        places = sorted((_place(name, entry) for name, entry in header.items()), key=lambda p: (p.begin, p.end))
        at = 0
        for place in places:
            if place.begin != at:
                raise TensorFileError(
                    f"the array {place.name!r} begins at byte {place.begin:,} of the data, not {at:,}"
                )
            at = place.end
        if at != size - data_begin:
            raise TensorFileError(f"its arrays take {at:,} bytes, but {size - data_begin:,} follow the header")
        return metadata, {place.name: _read(source, place) for place in places}


def _header(source: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(source.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        raise TensorFileError(f"it has {size:,} bytes, too few for its header" if length else "it has no header")
    try:
        header = parse_json(source.read(length).decode())
    except ValueError as error:
        raise TensorFileError(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise TensorFileError("its header is not a table of arrays")
    return header, 8 + length


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN or infinity, no repeated names, no excessive nesting; else a ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_refused)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:40]!r} occurs twice")
        found[name] = value
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _place(name: str, entry: Any) -> Place:
    """The entry of an array in the header, checked."""
    if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
        raise TensorFileError(f"the array {name[:40]!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise TensorFileError(f"the array {name[:40]!r} has dtype {str(dtype)[:40]!r}, none of {', '.join(DTYPES)}")
    if not (_sizes(shape) and len(shape) <= MOST_DIMENSIONS and math.prod(max(n, 1) for n in shape) < 2**60):
        raise TensorFileError(f"the array {name[:40]!r} has no valid shape: {str(shape)[:40]}")
    if not (_sizes(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == math.prod(shape) * _item(dtype)):
        raise TensorFileError(f"the array {name[:40]!r} has data_offsets that do not fit its shape")
    return Place(name, offsets[0], offsets[1], DTYPES[dtype], tuple(shape))


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**60 for n in values)


def _item(dtype: str) -> int:
    return torch.empty(0, dtype=DTYPES[dtype]).element_size()


def _read(source: BinaryIO, place: Place) -> Tensor:
    try:
        tensor = torch.empty(place.shape, dtype=place.dtype)
    except RuntimeError:  # torch's message for lack of memory
        raise MemoryError(
            f"Not enough memory for the array {place.name!r}: {place.end - place.begin:,} bytes."
        ) from None
    rest = _bytes_of(tensor)
    while len(rest):
        n = source.readinto(rest)  # type: ignore[attr-defined]
        if not n:
            raise TensorFileError("it was cut off while it was read")
        rest = rest[n:]
    if place.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        raise TensorFileError(f"the array {place.name!r} of bool has other bytes than 0 and 1")
    return tensor
