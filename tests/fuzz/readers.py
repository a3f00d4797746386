"""Data files of every format, mutated: each is refused with a DataFileError that names it, or gives rows that fit."""

from __future__ import annotations

import bz2
import gzip
import io
import random
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from PIL import Image

from augment_reduce.data import (
    DataFileError,
    DataFileWarning,
    LabelledRows,
    MultiLabelRows,
    arff,
    read_idx,
    read_labels,
    read_omniglot_zip,
    read_rows,
    read_xml_repository,
)

from .cases import Fuzzer, expect, mutated_bytes, mutated_text

N, D, K = 12, 5, 4
CSV_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"header": True, "keep_index": True}, {"header": False}, {"label_column": 0}, {"label_column": None},
)  # fmt: skip


class ReaderFuzzer(Fuzzer):
    """Reads with `read`; a DataFileError names the file, anything else that is raised is a failure."""

    packs = True  # whether the format may come packed

    def read(self, path: Path) -> None:
        raise NotImplementedError

    def content(self, rng: random.Random) -> bytes:
        raise NotImplementedError

    def write(self, rng: random.Random) -> Path:
        data, path = self.content(rng), self.path()
        if self.packs and rng.random() < 0.15:
            data = rng.choice((gzip.compress, bz2.compress))(data)
            data = mutated_bytes(rng, data, 2) if rng.random() < 0.6 else data
        path.write_bytes(data)
        return path

    def check(self, path: Path) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DataFileWarning)
                self.read(path)
        except DataFileError as error:
            expect(str(path) in str(error) or path.name in str(error), error)
            return False
        return True


def assert_rows_fit(rows: LabelledRows) -> None:
    """X of finite float32, a valid matrix; labels for its rows."""
    X = rows.X
    assert X.dtype == np.float32
    if sp.issparse(X):
        X.check_format(full_check=True)
        assert X.has_canonical_format
    assert np.isfinite(X.data if sp.issparse(X) else X).all()
    if rows.y is not None:
        assert rows.y.shape == (X.shape[0],)
        assert rows.y.dtype.kind in "biufU"
        np.unique(rows.y).tolist()
    if rows.labels is not None and rows.rows is None:
        assert rows.labels.shape[0] == X.shape[0]
        rows.labels.check_format(full_check=True)


# ---- text ----


class TextFuzzer(ReaderFuzzer):
    separators = b" "
    format = ""
    texts: tuple[bytes, ...]

    def content(self, rng: random.Random) -> bytes:
        text = rng.choice(self.texts)
        return text if rng.random() < 0.05 else mutated_text(rng, text, self.separators)

    def read(self, path: Path) -> None:
        rows = read_rows(path, self.format, reduction="all", need_labels=False)
        assert_rows_fit(rows)
        read_rows(path, need_labels=False)  # told from its contents, whatever these are by now


class Svmlight(TextFuzzer):
    name, format, separators = "svmlight", "svmlight", b" :"
    suffix = ".svm"
    texts = (
        b"# a comment\n-1 1:0.5 3:2 # end\n\n+1 2:1\n3 1:1e-2 4:-4\n",
        b"# Column indices are zero-based\nyes 0:0.5 3:2\nno 2:1\n 1:1\n",
        b"3,1 1:1\n 2:1\n0 1:2 9223372036854775806:1\n",
    )


class Xml(TextFuzzer):
    name, format, separators = "xml", "xml", b" :,"
    texts = (b"5 6 4\n1,3 0:1 5:2.5\n 2:-0.125\n\n0\n3,0,3 4:1e-3 1:7\n", b"2 3 2\n0 0:1\n1 2:1\n")

    def read(self, path: Path) -> None:
        found = read_xml_repository(path)
        assert isinstance(found, MultiLabelRows)
        super().read(path)


class Csv(TextFuzzer):
    name, format, separators = "csv", "csv", b",;"
    suffix = ".csv"
    texts = (
        b"a,b,kind\n1,2.5,cat\n-3,1e-2,dog\n0,0,cat\n",
        b',a,"the ""label"""\n0,1.5,"x,\ny"\n1,2,z\n2,3,x\n',
        b"5.1;3.5;True;setosa\r\n4.9;3;False;setosa\r\n6.3;3.3;True;virginica\r\n",
        b"sep=;\nUnnamed: 0;0;1;y\n3;1;2;a\n1;3;4;b\n",
        b"0,1,2,3\n4,5,6,7\n8,9,10,11\n",
    )

    def read(self, path: Path) -> None:
        refused: list[DataFileError] = []
        for options in CSV_OPTIONS:
            try:
                found = read_rows(path, "csv", need_labels=False, **options)
            except DataFileError as error:
                refused.append(error)
                continue
            assert_rows_fit(found)
            assert (found.y is None) == (options.get("label_column", -1) is None)
            assert found.feature_names is None or len(found.feature_names) == found.n_features
        if len(refused) == len(CSV_OPTIONS):
            raise refused[0]


class Labels(TextFuzzer):
    name = "labels"
    texts = (b"a\nb\nc\n" * 4, b"3,1\n0\n2,2\n" * 4, b"1.5\n2\n7\n" * 4)

    def read(self, path: Path) -> None:
        y, sets = read_labels(path, N)
        assert (y is None) != (sets is None)
        assert len(y) == N if y is not None else sets.shape[0] == N  # type: ignore[union-attr]


class Arff(TextFuzzer):
    name, separators, packs = "arff", b" ,{}", False
    texts = (
        b"@relation x\n@attribute zero {0,1}\n@attribute one {0,1}\n@attribute TAG_a {0,1}\n@attribute TAG_b {0,1}\n"
        b"@data\n{0 1,2 1}\n{1 1,2 1,3 1}\n{3 1}\n",
    )

    def read(self, path: Path) -> None:
        data = path.read_bytes()
        for view in (arff.label_names, arff.feature_names):
            view(data, path)
        text = path.with_suffix(".txt")
        text.write_bytes(arff.to_repository_text(data, path))
        read_xml_repository(text)


# ---- arrays ----


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def odd_header(rng: random.Random, data: bytes) -> bytes:
    """An npy header that says something else."""
    types = "'<f4'", "'|O'", "'<U3'", "'<f8'", "'|V8'", "[('a', '<f4')]", "'<M8[s]'", "'<c8'", "3", "'<U0'", "'('"
    shapes = (
        "(3,)", "(2**62, 8)", "(12, 5)", "(-1, 5)", "(0, 10**18)", "()", "(9223372036854775807,)", "3", "('a',)",
        f"({'1, ' * 40})", "(4611686018427387904, 4, 4)", "(True, 5)", "(" * 300, "(1000000000000,)", "(0, 5)",
    )  # fmt: skip
    order = rng.choice(("False", "True", "1"))
    text = f"{{'descr': {rng.choice(types)}, 'fortran_order': {order}, 'shape': {rng.choice(shapes)}, }}"
    text = text if rng.random() < 0.8 else rng.choice(("", "{", "f'{", "'\\x'", "{'a': 1}", "\x00", "1_", "0x", '"""'))
    header = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    version = bytes(rng.choice(((1, 0), (2, 0), (3, 0), (9, 9))))
    size = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + version + size + header + data[-40:]


class Npy(ReaderFuzzer):
    name = "npy"
    suffix = ".npy"

    def prepare(self) -> None:
        self.valid = [npy(np.arange(N * D, dtype=kind).reshape(N, D)) for kind in ("<f4", ">f8", "<i8", "|u1")]
        self.valid.append(npy(np.asfortranarray(np.ones((N, D)))))

    def content(self, rng: random.Random) -> bytes:
        data = rng.choice(self.valid)
        return odd_header(rng, data) if rng.random() < 0.3 else mutated_bytes(rng, data)

    def read(self, path: Path) -> None:
        assert_rows_fit(read_rows(path, "npy", need_labels=False))
        read_rows(path, need_labels=False)


class Npz(ReaderFuzzer):
    name = "npz"
    suffix = ".npz"

    def prepare(self) -> None:
        rng = np.random.default_rng(0)
        X = sp.random(N, D, density=0.4, format="csr", dtype=np.float32, random_state=0)
        dense, y = rng.normal(size=(N, D)), np.arange(N) % K
        words = {
            "y": np.array([f"ä{k}" for k in y]),
            "class_names": np.array(list("abcd")),
            "feature_names": np.array(list("vwxyz")),
        }
        self.valid: list[dict[str, Any]] = [{"X": dense, "y": y}, {"data": dense.astype("f2"), "target": y[:, None]}]
        self.valid += [{"X": dense, **words}, {"X": dense, "y": np.eye(K)[y], "other": np.array([{}], dtype=object)}]
        for kind in ("csr", "csc", "coo", "bsr", "dia"):
            out = io.BytesIO()
            sp.save_npz(out, X.asformat(kind))
            out.seek(0)
            self.valid.append({**np.load(out), "y": y.astype("S")})
        self.packed = []
        for arrays in self.valid:
            out = io.BytesIO()
            np.savez(out, **arrays)
            self.packed.append(out.getvalue())

    def content(self, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutated_bytes(rng, rng.choice(self.packed))
        return self.with_odd_entries(rng, rng.choice(self.valid))

    def with_odd_entries(self, rng: random.Random, arrays: dict[str, Any]) -> bytes:
        """An archive whose checksums are right, with something odd in one of its arrays, or about an entry."""
        entries = {f"{name}.npy": npy(array) for name, array in arrays.items()}
        for name in rng.sample(list(entries), rng.choice((1, 1, 2))):
            match rng.randrange(6):
                case 0:
                    del entries[name]
                case 1:
                    entries[name] = mutated_bytes(rng, entries[name])
                case 2:
                    entries[name] = odd_header(rng, entries[name])
                case _:
                    entries[name] = npy(odd_array(rng, arrays[name.removesuffix(".npy")]))
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return odd_entry(rng, out.getvalue()) if rng.random() < 0.2 else out.getvalue()

    def read(self, path: Path) -> None:
        assert_rows_fit(read_rows(path, "npz", need_labels=False))
        for n in (N, 3):
            try:
                y, sets = read_labels(path, n)
            except DataFileError as error:
                expect(str(path) in str(error), error)
            else:
                assert len(y) == n if y is not None else sets.shape[0] == n  # type: ignore[union-attr]


def odd_array(rng: random.Random, array: Any) -> np.ndarray:
    """Other numbers, another type, another shape."""
    array = np.array(array)
    match rng.randrange(6):
        case 0 if array.dtype.kind in "iuf" and array.size:
            flat = array.reshape(-1)
            value = rng.choice((-1, 0, 1, 2**31, 2**62, -(2**62), np.nan, np.inf, 1e39, 1e308))
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flat[rng.randrange(flat.size)] = np.array(value).astype(array.dtype)
            return array
        case 1:
            kind = rng.choice(("f4", "i4", "u8", "?", "c8", "U5", "S3", "f2", "O", "M8[s]", ">i8"))
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return array.astype(kind)
            except (ValueError, TypeError):
                return array
        case 2:
            return array[: array.shape[0] // 2] if array.ndim else array[None]
        case 3:
            return np.concatenate([array, array]) if array.ndim else np.array([array.item()] * 3)
        case 4:
            return array.reshape(-1) if array.ndim != 1 else array[:, None]
        case _:
            return np.array(
                rng.choice(("csr", "coo", "xyz", b"dia", 3, -1, (10**12, D), (N, 10**17), (N, -D), (2**63 - 1, 1), []))
            )


def odd_entry(rng: random.Random, data: bytes) -> bytes:
    """Flags, methods and sizes of the zip's entries: encrypted, packed in another way, far larger than they are."""
    found = bytearray(data)
    places = [i for i in range(len(found) - 4) if found[i : i + 4] in (b"PK\x03\x04", b"PK\x01\x02")]
    for at in rng.sample(places, min(len(places), 2)):
        central = found[at + 2] == 1
        offset, value = rng.choice((
            (6, b"\x01\x00"), (8, b"\x0c\x00"), (8, b"\x0e\x00"), (8, b"\x63\x00"), (18, b"\xff\xff\xff\x7f"),
            (22, b"\xff\xff\xff\x7f"), (14, b"\x00\x00\x00\x00"), (26, b"\xff\xff"), (4, b"\xff\x00"),
        ))  # fmt: skip
        at += offset + 2 * central
        found[at : at + len(value)] = value
    return bytes(found)


# ---- images ----


class Idx(ReaderFuzzer):
    name = "idx"

    def prepare(self) -> None:
        self.valid = []
        for code, kind in ((0x08, ">u1"), (0x0C, ">i4"), (0x0E, ">f8")):
            array = np.arange(24).reshape(2, 3, 4).astype(kind)
            self.valid.append(bytes([0, 0, code, 3]) + struct.pack(">3I", *array.shape) + array.tobytes())

    def content(self, rng: random.Random) -> bytes:
        data = bytearray(rng.choice(self.valid))
        if rng.random() < 0.5:
            return mutated_bytes(rng, bytes(data))
        data[3] = rng.choice((0, 1, 2, 3, 8, 9, 33, 255))
        sizes = [rng.choice((0, 1, 2, 24, 2**16, 2**31, 2**32 - 1)) for _ in range(data[3])]
        return bytes(data[:4]) + struct.pack(f">{data[3]}I", *sizes) + bytes(data[16:]) * rng.choice((1, 1, 3))

    def read(self, path: Path) -> None:
        found = read_idx(path)
        assert found.size > 0
        assert found.dtype.byteorder in "=|"


ODD_NUMBERS = (0, 255, 256, 32_767, 40_000, "9" * 5000, "\u0661")


class Zip(ReaderFuzzer):
    name = "zip"
    suffix = ".zip"

    def prepare(self) -> None:
        out = io.BytesIO()
        picture = Image.new("1", (105, 105), 1)
        picture.putpixel((0, 0), 0)
        picture.save(out, "PNG")
        self.png = out.getvalue()
        header = b"IHDR" + struct.pack(">2I", 20_000, 20_000) + self.png[24:29]  # more pixels than Pillow will unpack
        self.large_png = self.png[:12] + header + struct.pack(">I", zlib.crc32(header)) + self.png[33:]

    def content(self, rng: random.Random) -> bytes:
        out = io.BytesIO()
        how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with warnings.catch_warnings(), zipfile.ZipFile(out, "w", how) as archive:
            warnings.simplefilter("ignore")  # a name twice
            for label in range(1, 4):
                numbers = [rng.choice(ODD_NUMBERS) if rng.random() < 0.08 else label for _ in range(3)]
                png = mutated_bytes(rng, self.png) if rng.random() < 0.2 else self.png
                png = rng.choice((b"", self.large_png, b"\0" * 2_000_000)) if rng.random() < 0.05 else png
                name = f"images/Greek/character{numbers[0]}/{numbers[1]}_{numbers[2]}.png"
                archive.writestr(name[: rng.choice((200, 6000))], png)
        data = out.getvalue()
        data = odd_entry(rng, data) if rng.random() < 0.3 else data
        return mutated_bytes(rng, data) if rng.random() < 0.3 else data

    def read(self, path: Path) -> None:
        found = read_omniglot_zip(path)
        n = len(found.images)
        assert found.images.shape == (n, 28, 28)
        assert n > 0
        assert [len(part) for part in found[1:5]] == [n] * 4


READERS: dict[str, type[Fuzzer]] = {
    cls.name: cls for cls in (Npz, Npy, Zip, Idx, Csv, Svmlight, Xml, Arff, Labels)
}  # fmt: skip
