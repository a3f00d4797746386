"""Open data files: gzip and bzip2 recognised by content, blocks of whole lines, the error that all readers raise."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

PathLike = str | os.PathLike[str]

GZIP_MAGIC = b"\x1f\x8b"
BZIP2_MAGIC, BZIP2_BLOCKS = b"BZh", (b"1AY&SY", b"\x17rE8P\x90")  # starts of a first block, of an empty stream's end
DEFLATE_AT_MOST = 1100  # largest compression ratio; the format's limit is 1,032
PIECE_BYTES = 1 << 24  # bytes read at a time when a header declares the size, which may be wrong
UTF8_BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 18  # about the size of a core's cache; larger blocks are slower to parse
LONGEST_LINE = 1 << 28  # longer lines are refused: most likely a binary file, or lost line ends


class DataFileError(ValueError):
    """A data file is invalid: which file, which line, expected, found, what to do."""

    def __init__(
        self, path: PathLike, *, expected: str, found: str, advice: str = "", line: int | None = None, where: str = ""
    ) -> None:
        self.path, self.line, self.advice = str(path), line, advice
        place = str(path) if line is None else f"{path}, line {line}"
        if where:
            place += f", {where}"
        self.fact = f"{place}: expected {expected}, but found {found}."
        super().__init__(f"{self.fact} {advice}" if advice else self.fact)


class DataFileWarning(UserWarning):
    """How an ambiguous data file was read; `advice` says how to choose otherwise."""

    def __init__(self, path: PathLike, fact: str, advice: str, *, line: int | None = None) -> None:
        self.path, self.advice = str(path), advice
        self.fact = f"{path}: {fact}." if line is None else f"{path}, line {line}: {fact}."
        super().__init__(f"{self.fact} {advice}")


def shown(text: str | bytes, limit: int = 40) -> str:
    """A short quoted excerpt of the file, for a message."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= limit else text[:limit] + "…")


def is_gzip(path: PathLike) -> bool:
    """Whether the file starts with gzip's magic bytes, whatever its name."""
    with open(path, "rb") as raw:
        return raw.read(2) == GZIP_MAGIC


def packed_with(start: bytes) -> str | None:
    """ "gzip" or "bzip2" by the first ten bytes of a file, or None."""
    if start.startswith(GZIP_MAGIC):
        return "gzip"
    return "bzip2" if start.startswith(BZIP2_MAGIC) and start[4:10] in BZIP2_BLOCKS else None


@contextmanager
def open_data(path: PathLike) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes, decompressing on the fly; a damaged file raises a `DataFileError`."""
    path = Path(path)
    try:
        if path.is_dir():
            raise DataFileError(path, expected="a file", found="a folder", advice="Name the data file inside it.")
        raw = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        raise DataFileError(
            path, expected="a data file", found="nothing there", advice="Check the spelling and the current folder."
        ) from None
    except OSError as error:  # no permission, a name too long, a symlink loop
        raise DataFileError(
            path, expected="a data file that can be opened", found=f"one that cannot ({error.strerror})"
        ) from error
    except ValueError as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(path, expected="the name of a file", found=shown(str(path))) from None
    with raw:
        packer = packed_with(raw.peek(10)[:10])
        try:
            yield _unpacked(raw, packer)
        except (EOFError, zlib.error, OSError) as error:
            if packer is None or getattr(error, "errno", None) is not None:
                raise  # errors of decompression have no errno; those of the disk, say, are not the file's fault
            raise DataFileError(
                path,
                expected=f"a whole {packer} file",
                found=f"one that is cut short or damaged ({error})",
                advice="Copy or download it again.",
            ) from error


def _unpacked(raw: BinaryIO, packer: str | None) -> BinaryIO:
    if packer == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return cast(BinaryIO, bz2.BZ2File(raw)) if packer == "bzip2" else raw


def most_bytes(path: PathLike, stream: BinaryIO) -> int | None:
    """An upper limit of the bytes in this stream, or None if unknown."""
    size = os.stat(path).st_size
    if isinstance(stream, gzip.GzipFile):
        return DEFLATE_AT_MOST * size
    return None if isinstance(stream, bz2.BZ2File) else size


def read_exactly(stream: BinaryIO, size: int) -> bytearray:
    """Up to `size` bytes, fewer at the end of the file; memory grows with the bytes read, not with `size`."""
    found = bytearray()
    while len(found) < size and (piece := stream.read(min(PIECE_BYTES, size - len(found)))):
        found += piece
    return found


def line_blocks(path: PathLike, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, bytes) where the bytes are whole lines, each ended by a newline.

    Needs memory for a block and the longest line, whatever the size of the file.
    """
    line, size = 1, 0
    held: list[bytes] = []  # an unfinished line; joined once, so that long lines take linear time
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
    """The first bytes of the decompressed contents, to detect the format."""
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
