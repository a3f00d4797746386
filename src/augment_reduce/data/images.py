"""Image files: the idx format of MNIST, and Omniglot's zips of PNG folders."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from augment_reduce.data.arrays import as_data_errors, check_entry
from augment_reduce.data.files import DataFileError, PathLike, empty_file, most_bytes, open_data, read_exactly

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

OMNIGLOT_ENTRY = re.compile(
    r"(?:.*/)?(?P<alphabet>[^/]+)/character(?P<character>\d{1,9})/(?P<label>\d{1,9})_(?P<sample>\d{1,9})\.png", re.ASCII
)
OMNIGLOT_SIDE = 105
LARGEST_PNG = 1 << 20  # bytes of a drawing, which usually takes a few hundred
MOST_LABELS = 32_767
MOST_ALPHABETS = 256
MOST_DIMENSIONS = 32


def read_idx(path: PathLike) -> np.ndarray:
    """Read an idx file (big-endian), packed or not: two zero bytes, a type, the number of dimensions, sizes, data."""
    with open_data(path) as stream:
        start = stream.read(4)
        if not start:
            raise empty_file(path, "an idx file")
        if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in IDX_TYPES:
            raise DataFileError(
                path,
                expected="an idx file (two zero bytes, then a type code from 0x08 to 0x0e)",
                found=f"the bytes {start.hex(' ')}",
                advice="Is this one of the idx files of MNIST, or a web page saved in its place?",
            )
        n_dimensions = start[3]
        if not 1 <= n_dimensions <= MOST_DIMENSIONS:
            raise DataFileError(path, expected=f"1 to {MOST_DIMENSIONS} dimensions", found=f"{n_dimensions}")
        sizes = stream.read(4 * n_dimensions)
        if len(sizes) < 4 * n_dimensions:
            raise _cut_short(path, f"{n_dimensions} sizes of 4 bytes", f"{len(sizes)} bytes")
        shape = struct.unpack(f">{n_dimensions}I", sizes)
        dtype = np.dtype(IDX_TYPES[start[2]])
        expected = math.prod(shape) * dtype.itemsize
        most = most_bytes(path, stream)
        if most is not None and expected > most:
            raise _cut_short(path, f"{expected:,} bytes for an array of shape {shape}", f"at most {most:,}")
        data = read_exactly(stream, expected)  # reads what there is, whatever the header says
        surplus = stream.read(1)
    if len(data) < expected:
        raise _cut_short(path, f"{expected:,} bytes for an array of shape {shape}", f"{len(data):,}")
    if surplus:
        raise DataFileError(
            path,
            expected=f"the end after an array of shape {shape}",
            found="more bytes",
            advice="The header and the data do not belong together.",
        )
    if not expected:
        raise DataFileError(path, expected="an array with something in it", found=f"one of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _cut_short(path: PathLike, expected: str, found: str) -> DataFileError:
    return DataFileError(path, expected=expected, found=found, advice="The file is cut short: copy it again.")


class OmniglotImages(NamedTuple):
    """Omniglot's drawings, ordered by label, then by sample.

    `images` uint8 (N, 28, 28), ink 255 on 0; `labels` the character number of the file name minus 1; `sample` the
    drawer, from 1; `alphabet` an index into `alphabet_names`; `character` the number within its alphabet, from 1.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int16]
    sample: npt.NDArray[np.uint8]
    alphabet: npt.NDArray[np.uint8]
    character: npt.NDArray[np.uint8]
    alphabet_names: list[str]


def read_omniglot_zip(*paths: PathLike, side: int = 28) -> OmniglotImages:
    """Read the original zips (`images_background.zip`, `images_evaluation.zip`, …) as one set.

    Every PNG alphabet/characterNN/NNNN_MM.png is 105 x 105, black on white; it is inverted, so that ink is 255, and
    resized to `side` x `side` by Pillow's LANCZOS filter. No thresholding, cropping or centring.
    """
    found: dict[tuple[int, int], tuple[str, int, np.ndarray]] = {}
    for path in paths:
        with (
            as_data_errors(path, "a whole zip file", "Download it again."),
            open_data(path) as stream,
            zipfile.ZipFile(stream) as archive,
        ):
            for info in archive.infolist():
                match = OMNIGLOT_ENTRY.fullmatch(info.filename)
                if match is None or info.filename.startswith("__MACOSX"):
                    continue
                key, of_alphabet = _place(path, match)
                check_entry(path, info, info.filename, LARGEST_PNG)
                found[key] = *of_alphabet, _drawing(path, info.filename, archive.read(info), side)
    if not found:
        raise DataFileError(
            " and ".join(map(str, paths)),
            expected="PNG files alphabet/characterNN/NNNN_MM.png in the zip",
            found="none",
            advice="The zips are at https://github.com/brendenlake/omniglot, folder python.",
        )
    keys = sorted(found)
    names = sorted({alphabet for alphabet, _, _ in found.values()})
    number = {name: i for i, name in enumerate(names)}
    if len(names) > MOST_ALPHABETS:
        raise DataFileError(
            " and ".join(map(str, paths)), expected=f"at most {MOST_ALPHABETS} alphabets", found=f"{len(names):,}"
        )
    return OmniglotImages(
        images=np.stack([found[key][2] for key in keys]),
        labels=np.asarray([label for label, _ in keys], np.int16),
        sample=np.asarray([sample for _, sample in keys], np.uint8),
        alphabet=np.asarray([number[found[key][0]] for key in keys], np.uint8),
        character=np.asarray([found[key][1] for key in keys], np.uint8),
        alphabet_names=names,
    )


def _place(path: PathLike, match: re.Match[str]) -> tuple[tuple[int, int], tuple[str, int]]:
    """((label from 0, drawer), (alphabet, character in it)) of an entry's name."""
    label, sample, character = (int(match[name]) for name in ("label", "sample", "character"))
    if not (1 <= label <= MOST_LABELS and 1 <= sample <= 255 and 1 <= character <= 255):
        raise DataFileError(
            path,
            where=match[0],
            expected=f"a label from 1 to {MOST_LABELS:,}, a drawer and a character from 1 to 255",
            found=f"{label}, {sample} and {character}",
        )
    return (label - 1, sample), (match["alphabet"], character)


def _drawing(path: PathLike, name: str, png: bytes, side: int) -> npt.NDArray[np.uint8]:
    with (
        as_data_errors(path, "a PNG image", "Download it again.", where=name),
        Image.open(io.BytesIO(png), formats=["PNG"]) as opened,
    ):
        if opened.size != (OMNIGLOT_SIDE, OMNIGLOT_SIDE):  # checked before decompressing pixels
            raise DataFileError(
                path, where=name, expected=f"{OMNIGLOT_SIDE} x {OMNIGLOT_SIDE} pixels", found=f"{opened.size}"
            )
        ink = Image.fromarray(255 - np.asarray(opened.convert("L")))
    return np.asarray(ink.resize((side, side), Image.Resampling.LANCZOS))
