"""Image files: the idx format of MNIST, and Omniglot's zips of PNG folders."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from augment_reduce.data.files import DataFileError, PathLike, empty_file, open_data

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

OMNIGLOT_ENTRY = re.compile(
    r"(?:.*/)?(?P<alphabet>[^/]+)/character(?P<character>\d+)/(?P<label>\d+)_(?P<sample>\d+)\.png"
)
OMNIGLOT_SIDE = 105


def read_idx(path: PathLike) -> np.ndarray:
    """Read an idx file (big-endian), gzip or not: two zero bytes, a type, the number of dimensions, sizes, data."""
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
        sizes = stream.read(4 * n_dimensions)
        if len(sizes) < 4 * n_dimensions:
            raise _cut_short(path, f"{n_dimensions} sizes of 4 bytes", len(sizes))
        shape = struct.unpack(f">{n_dimensions}I", sizes)
        dtype = np.dtype(IDX_TYPES[start[2]])
        expected = math.prod(shape) * dtype.itemsize
        data = stream.read(expected + 1)
    if len(data) < expected:
        raise _cut_short(path, f"{expected:,} bytes for an array of shape {shape}", len(data))
    if len(data) > expected:
        raise DataFileError(
            path,
            expected=f"the end after an array of shape {shape}",
            found="more bytes",
            advice="The header and the data do not belong together.",
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _cut_short(path: PathLike, expected: str, found: int) -> DataFileError:
    return DataFileError(path, expected=expected, found=f"{found:,}", advice="The file is cut short: copy it again.")


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
        try:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    match = OMNIGLOT_ENTRY.fullmatch(name)
                    if match is None or name.startswith("__MACOSX"):
                        continue
                    key = int(match["label"]) - 1, int(match["sample"])
                    image = _drawing(path, name, archive.read(name), side)
                    found[key] = match["alphabet"], int(match["character"]), image
        except (zipfile.BadZipFile, zlib.error, EOFError, FileNotFoundError) as error:
            raise DataFileError(
                path, expected="a whole zip file", found=f"another thing ({error})", advice="Download it again."
            ) from error
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
    return OmniglotImages(
        images=np.stack([found[key][2] for key in keys]),
        labels=np.asarray([label for label, _ in keys], np.int16),
        sample=np.asarray([sample for _, sample in keys], np.uint8),
        alphabet=np.asarray([number[found[key][0]] for key in keys], np.uint8),
        character=np.asarray([found[key][1] for key in keys], np.uint8),
        alphabet_names=names,
    )


def _drawing(path: PathLike, name: str, png: bytes, side: int) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as opened:
            if opened.size != (OMNIGLOT_SIDE, OMNIGLOT_SIDE):  # checked before any pixel is unpacked
                raise DataFileError(
                    path, where=name, expected=f"{OMNIGLOT_SIDE} x {OMNIGLOT_SIDE} pixels", found=f"{opened.size}"
                )
            ink = Image.fromarray(255 - np.asarray(opened.convert("L")))
    except (OSError, SyntaxError) as error:  # what Pillow raises for a damaged PNG
        raise DataFileError(
            path, where=name, expected="a PNG image", found=f"a damaged one ({error})", advice="Download it again."
        ) from error
    return np.asarray(ink.resize((side, side), Image.Resampling.LANCZOS))
