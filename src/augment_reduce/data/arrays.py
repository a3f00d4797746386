"""Arrays from numpy's `.npy` files and `.npz` archives. Nothing is unpickled, and memory is allocated for the bytes
read, not for the sizes in a header."""

from __future__ import annotations

import errno
import io
import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from augment_reduce.data.files import (
    DEFLATE_AT_MOST,
    DataFileError,
    PathLike,
    most_bytes,
    open_data,
    read_exactly,
)

NPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
KINDS = "biufSU"  # of numbers and text
LARGEST_SIZE = 2**62
LARGEST_CHARACTER = 0x10FFFF
SURROGATES = 0xD800, 0xDFFF


@contextmanager
def as_data_errors(path: PathLike, expected: str, advice: str, where: str = "") -> Iterator[None]:
    """Turn any exception of a library that reads a file into a `DataFileError`, except genuine lack of memory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about odd headers; these are then read or refused
            yield
    except (DataFileError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # faults of the disk and permissions; EINVAL: a seek to an offset from a header
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataFileError(
            path, where=where, expected=expected, found=f"something else ({said[:200]})", advice=advice
        ) from error


def read_arrays(path: PathLike, wanted: Iterable[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of these names in an npz archive, and the names of all."""
    advice = "Write it with numpy.savez, scipy.sparse.save_npz or augment_reduce.data.write_npz; " \
             "arrays of Python objects are refused."  # fmt: skip
    with as_data_errors(path, "an npz archive of plain arrays", advice), open_data(path) as stream:
        seekable = stream if isinstance(stream, io.BufferedReader) else io.BytesIO(stream.read())
        with zipfile.ZipFile(seekable) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            return {name: _entry(path, archive, entries[name]) for name in wanted if name in entries}, list(entries)


def _entry(path: PathLike, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    where = f"array {info.filename.removesuffix('.npy')!r}"
    check_entry(path, info, where)
    with archive.open(info) as stream:
        array = read_array(path, stream, info.file_size, where)  # type: ignore[arg-type]
        if stream.read(1):
            raise DataFileError(path, where=where, expected="its end after the numbers", found="more bytes")
    return array


def check_entry(path: PathLike, info: zipfile.ZipInfo, where: str, at_most: int | None = None) -> None:
    """Refuse an entry that cannot be read, or expands far beyond the file's size, before decompressing it."""
    if info.flag_bits & 1:
        raise DataFileError(path, where=where, expected="a plain zip entry", found="an encrypted one")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataFileError(
            path, where=where, expected="an entry that is stored or deflated", found=f"method {info.compress_type}"
        )
    most = DEFLATE_AT_MOST * info.compress_size + 1024 if at_most is None else at_most
    if info.file_size > most:
        raise DataFileError(
            path,
            where=where,
            expected=f"at most {most:,} bytes, unpacked",
            found=f"a header that announces {info.file_size:,}",
            advice="The file is damaged, or made to fill the memory.",
        )


def read_array(path: PathLike, stream: BinaryIO, size: int | None, where: str) -> np.ndarray:
    """One array in npy format, of at most `size` bytes with its header."""
    with as_data_errors(path, "an array as numpy.save writes it", "Write it again with numpy.save.", where):
        shape, fortran, dtype = _header(stream)
    if dtype.hasobject or dtype.kind not in KINDS or dtype.itemsize == 0:
        raise DataFileError(
            path,
            where=where,
            expected="plain arrays of numbers or text",
            found=f"{'Python objects' if dtype.hasobject else dtype}",
            advice="Convert it to numbers or text before saving; nothing is unpickled.",
        )
    expected = math.prod(shape) * dtype.itemsize
    if len(shape) > 8 or any(not 0 <= n < LARGEST_SIZE for n in shape) or (size is not None and expected > size):
        raise DataFileError(
            path,
            where=where,
            expected=f"the {expected:,} bytes of an array of shape {shape}"[:200],
            found=f"{size:,}" if size is not None else "an impossible shape",
            advice="The file is cut short, or its header is damaged: write it again.",
        )
    data = read_exactly(stream, expected)
    if len(data) < expected:
        raise DataFileError(
            path,
            where=where,
            expected=f"the {expected:,} bytes of an array of shape {shape}",
            found=f"{len(data):,}",
            advice="The file is cut short: copy it again.",
        )
    with as_data_errors(path, "an array of that shape", "Write it again with numpy.save.", where):
        flat = np.frombuffer(data, dtype) if expected else np.empty(0, dtype)
        array = flat.reshape(shape, order="F" if fortran else "C")
    return _native_text(path, array, where) if dtype.kind in "SU" else array.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in readers:
        raise ValueError(f"npy format {version}")
    try:
        return readers[version](stream)
    except MemoryError:  # raised by Python's parser for a header nested too deeply
        raise ValueError("a header that is no dictionary") from None


def _native_text(path: PathLike, array: np.ndarray, where: str) -> np.ndarray:
    """Text as Python strings: bytes decoded as UTF-8; no invalid code points or surrogates."""
    with as_data_errors(path, "text in UTF-8", "Encode it anew.", where):
        text = (
            np.strings.decode(array, "utf-8")
            if array.dtype.kind == "S"
            else array.astype(array.dtype.newbyteorder("="))
        )
        points = np.ascontiguousarray(text).reshape(-1).view(np.uint32)
        if (points > LARGEST_CHARACTER).any() or ((points >= SURROGATES[0]) & (points <= SURROGATES[1])).any():
            raise ValueError("code points that are no characters")
        return text


def read_npy(path: PathLike) -> np.ndarray:
    """The array of an npy file."""
    where = "its array"
    with open_data(path) as stream:
        array = read_array(path, stream, most_bytes(path, stream), where)
        if stream.read(1):
            raise DataFileError(path, where=where, expected="the end of the file after the numbers", found="more bytes")
    return array
