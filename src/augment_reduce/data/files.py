"""Opening data files: gzip by content, blocks of whole lines, and the one error every reader raises."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

PathLike = str | os.PathLike[str]

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 18  # about the size of a core's cache; larger blocks parse more slowly
LONGEST_LINE = 1 << 28  # a line beyond 256 MB is no row: most likely a binary file, or line ends were lost


class DataFileError(ValueError):
    """A data file is not what it should be: which file, which line, expected, found, what to do."""

    def __init__(
        self, path: PathLike, *, expected: str, found: str, advice: str = "", line: int | None = None, where: str = ""
    ) -> None:
        self.path, self.line = str(path), line
        place = str(path) if line is None else f"{path}, line {line}"
        if where:
            place += f", {where}"
        message = f"{place}: expected {expected}, but found {found}."
        super().__init__(f"{message} {advice}" if advice else message)


def shown(text: str | bytes, limit: int = 40) -> str:
    """A piece of the file, short and quoted, for use in a message."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= limit else text[:limit] + "…")


def is_gzip(path: PathLike) -> bool:
    """Whether the file starts with gzip's two magic bytes; its name plays no part."""
    with open(path, "rb") as raw:
        return raw.read(2) == GZIP_MAGIC


@contextmanager
def open_data(path: PathLike) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes, unpacking gzip on the fly; a damaged gzip becomes a `DataFileError`."""
    path = Path(path)
    if path.is_dir():
        raise DataFileError(path, expected="a file", found="a folder", advice="Name the data file inside it.")
    try:
        packed = is_gzip(path)
    except FileNotFoundError:
        raise DataFileError(
            path, expected="a data file", found="nothing there", advice="Check the spelling and the current folder."
        ) from None
    with open(path, "rb") as raw:
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataFileError(
                path,
                expected="a whole gzip file",
                found=f"one that is cut short or damaged ({error})",
                advice="Copy or download it again.",
            ) from error


def line_blocks(path: PathLike, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, bytes) where the bytes are whole lines, each ended by a newline.

    Memory stays at a block plus the longest line, whatever the size of the file.
    """
    line, size = 1, 0
    held: list[bytes] = []  # a line that is not finished yet; joined once, so that a long one costs no more
    with open_data(path) as stream:
        start = stream.read(len(UTF8_BOM))
        piece = stream.read(block_bytes) if start == UTF8_BOM else start + stream.read(block_bytes)
        while piece:
            cut = piece.rfind(b"\n") + 1
            if cut:
                block = b"".join([*held, piece[:cut]])
                yield line, block
                line += block.count(b"\n")
                held, size = [], 0
            held.append(piece[cut:])
            size += len(piece) - cut
            if size > LONGEST_LINE:
                raise DataFileError(
                    path,
                    line=line,
                    expected=f"lines of at most {LONGEST_LINE:,} bytes",
                    found="a longer one",
                    advice="Is this a text file?",
                )
            piece = stream.read(block_bytes)
    if size:
        yield line, b"".join([*held, b"\n"])


def decode_line(path: PathLike, number: int, line: bytes) -> str:
    """The line as text, or an error naming the first byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataFileError(
            path,
            line=number,
            where=f"byte {error.start + 1}",
            expected="UTF-8 text",
            found=f"the byte 0x{line[error.start]:02x}",
            advice="Save the file as UTF-8 (plain ASCII is fine too).",
        ) from None


def first_bytes(path: PathLike, count: int = 1 << 16) -> bytes:
    """The first bytes of the unpacked contents, for telling formats apart."""
    with open_data(path) as stream:
        start = stream.read(count)
    return start.removeprefix(UTF8_BOM)


def read_names(path: PathLike) -> list[str]:
    """One name a line; line i is index i - 1."""
    names: list[str] = []
    for first, block in line_blocks(path):
        for offset, line in enumerate(block.split(b"\n")[:-1]):
            names.append(decode_line(path, first + offset, line).rstrip("\r"))
    return names


def empty_file(path: PathLike, expected: str) -> DataFileError:
    return DataFileError(path, expected=expected, found="an empty file", advice="Was it written or copied to the end?")
