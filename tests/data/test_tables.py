"""Tables, archives, images, and the one entry point that tells formats apart."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import sparse

from augment_reduce.data import (
    DataFileError,
    detect_format,
    read_csv,
    read_idx,
    read_npz,
    read_omniglot_zip,
    read_rows,
    write_npz,
)
from tests.helpers import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not on this machine")

TINY = "5 6 4\n1,3 0:1 5:2.5\n 2:-0.125\n\n0\n3,0,3 4:1e-3 1:7\n"
SVMLIGHT = "# a comment\n-1 1:0.5 3:2 # end\n\n+1 2:1\n3 1:1e-2 4:-4\n"


def write(folder: Path, contents: str | bytes, name: str = "rows.txt") -> Path:
    path = folder / name
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


# --- csv --------------------------------------------------------------------------------------------------------------


def test_csv_label_by_name_position_or_last(tmp_path):
    path = write(tmp_path, "a,kind,b,y\n1,cat,2.5,7\n\n-3,dog,1e-2,8\n")
    table = read_csv(path, label_column="kind")
    assert table.feature_names == ["a", "b", "y"]
    assert table.y is not None
    assert table.y.tolist() == ["cat", "dog"]
    np.testing.assert_array_equal(table.X, np.float32([[1, 2.5, 7], [-3, 1e-2, 8]]))
    last = read_csv(path, ignore_columns=["kind"])
    assert last.y is not None
    assert last.y.tolist() == [7, 8]
    assert last.y.dtype == np.int64
    assert last.feature_names == ["a", "b"]
    first = read_csv(path, label_column="0", ignore_columns=["kind"])
    assert first.y is not None
    assert first.y.tolist() == [1, -3]
    assert read_csv(path, label_column=None, ignore_columns=["kind"]).y is None


def test_csv_quotes_semicolons_and_gzip(tmp_path):
    text = 'a;"the ""label"""\n1;"x;\ny"\n2;z\n'
    table = read_csv(write(tmp_path, gzip.compress(text.encode())))
    assert table.y is not None
    assert table.y.tolist() == ["x;\ny", "z"]


CSV_FAULTS = {
    "text": ("a,b,y\n1,2,u\n1,two,v\n", {}, 3, "column 'b': expected a finite number, but found 'two'"),
    "empty-cell": ("a,b,y\n1,,u\n", {}, 2, "column 'b'.*an empty cell"),
    "nan": ("a,b,y\n1,nan,u\n", {}, 2, "column 'b'.*'nan'"),
    "infinity": ("a,b,y\n1,2,u\ninf,1,v\n", {}, 3, "column 'a'.*'inf'"),
    "missing-label": ("a,y\n1,u\n2,\n", {}, 3, "expected a label"),
    "short-row": ("a,b,y\n1,2,u\n1,2\n", {}, 3, "3 fields.*found 2"),
    "no-rows": ("a,y\n", {}, None, "rows below the header"),
    "empty": ("", {}, None, "an empty file"),
    "unknown-column": ("a,y\n1,u\n", {"label_column": "z"}, 1, "a column 'z'.*a, y"),
    "position": ("a,y\n1,u\n", {"label_column": 2}, 1, "a column 2"),
    "two-of-a-name": ("a,y,y\n1,2,u\n", {"label_column": "y"}, 1, "more than one"),
    "not-utf8": (b"a,y\n1,\xff\n", {}, 2, "byte 3: expected UTF-8"),
}


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_csv_faults(tmp_path, fault):
    contents, options, line, message = CSV_FAULTS[fault]
    with pytest.raises(DataFileError, match=message) as caught:
        read_csv(write(tmp_path, contents, "t.csv"), **options)
    assert caught.value.line == line


@needs_data
def test_csv_on_a_published_choice_table():
    table = read_csv(
        DATA / "discrete_choice" / "Ecdat_Fishing.csv.gz", label_column="mode", ignore_columns=["rownames"]
    )
    assert table.X.shape == (1182, 11)
    assert set(np.asarray(table.y)) == {"beach", "boat", "charter", "pier"}


# --- npz --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "csr", "csc"])
def test_npz_round_trip(tmp_path, form):
    dense = np.float32([[0, 1.5, 0], [2, 0, 0]])
    X = dense if form == "dense" else sparse.csr_matrix(dense).asformat(form)
    path = tmp_path / "rows.npz"
    write_npz(path, X, np.asarray([1, 0]), class_names=["no", "yes"], feature_names=["a", "b", "c"])
    table = read_npz(path)
    found = table.X.toarray() if sparse.issparse(table.X) else table.X
    np.testing.assert_array_equal(found, dense)
    assert table.y is not None
    assert table.y.tolist() == [1, 0]
    assert table.class_names == ["no", "yes"]
    assert table.feature_names == ["a", "b", "c"]
    assert sparse.issparse(table.X) == (form != "dense")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npz"]


def test_npz_as_scipy_writes_it_and_the_other_way_round(tmp_path):
    dense = np.random.default_rng(0).random((20, 30))
    X = sparse.csc_matrix(np.where(dense > 0.8, dense, 0.0))
    sparse.save_npz(tmp_path / "x.npz", X)
    table = read_npz(tmp_path / "x.npz")
    np.testing.assert_array_equal(table.X.toarray(), X.toarray().astype(np.float32))
    assert table.y is None
    write_npz(tmp_path / "y.npz", table.X, np.arange(20))
    np.testing.assert_array_equal(sparse.load_npz(tmp_path / "y.npz").toarray(), table.X.toarray())


def test_npz_faults(tmp_path):
    X = np.ones((3, 2))
    bad = X.copy()
    bad[2, 1] = np.nan
    cases = {
        "unpickle": ({"X": X, "y": np.asarray([1, "a", None], object)}, "plain arrays"),
        "no-X": ({"features": X}, "an array 'X'.*features"),
        "nan": ({"X": bad}, "row 2: expected finite numbers"),
        "three-dimensions": ({"X": np.ones((3, 2, 2))}, "2 dimensions"),
        "text": ({"X": np.full((3, 2), "a")}, "of numbers"),
        "too-few-labels": ({"X": X, "y": np.arange(2)}, "3 labels"),
        "nan-label": ({"X": X, "y": np.asarray([1, np.nan, 2])}, "a label on every row"),
        "not-indicator": ({"X": X, "y": np.full((3, 2), 2)}, "zeros and ones"),
    }
    for name, (arrays, message) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(DataFileError, match=message):
            read_npz(tmp_path / f"{name}.npz")
    whole = (tmp_path / "nan.npz").read_bytes()
    with pytest.raises(DataFileError, match="npz archive"):
        read_npz(write(tmp_path, whole[:-30], "cut.npz"))


def test_npz_with_indices_out_of_range_is_refused(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        format=b"csr",
        shape=(1, 2),
        data=np.ones(1),
        indices=np.asarray([5]),
        indptr=np.asarray([0, 1]),
    )
    with pytest.raises(DataFileError, match="npz archive"):
        read_npz(tmp_path / "x.npz")


# --- idx and Omniglot -------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize(
    ("code", "dtype"), [(0x08, "u1"), (0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8")]
)
def test_idx_types(tmp_path, code, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = read_idx(write(tmp_path, gzip.compress(idx_bytes(array, code))))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.dtype(dtype)


def test_idx_faults(tmp_path):
    whole = idx_bytes(np.arange(24, dtype="i4").reshape(4, 6), 0x0C)
    cases = {
        "cut short": whole[:-1],
        "cut shor": whole[:7],
        "more bytes": whole + b"\0",
        "type code": b"\0\0\x07\x01" + whole[4:],
        "web page": b"<html></html>",
        "empty file": b"",
    }
    for message, contents in cases.items():
        with pytest.raises(DataFileError, match=message):
            read_idx(write(tmp_path, contents))


def drawing(side: int = 105) -> bytes:
    picture = Image.new("1", (side, side), 1)
    picture.putpixel((0, 0), 0)
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def test_omniglot_zip_in_miniature(tmp_path):
    path = tmp_path / "tiny.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("Greek/character02/0005_02", "Greek/character02/0005_01", "Angelic/character01/0002_01"):
            archive.writestr(f"images/{name}.png", drawing())
        archive.writestr("__MACOSX/images/Greek/character02/0005_01.png", b"no picture")
        archive.writestr("images/readme.txt", b"hello")
    found = read_omniglot_zip(path)
    assert found.labels.tolist() == [1, 4, 4]
    assert found.sample.tolist() == [1, 1, 2]
    assert found.character.tolist() == [1, 2, 2]
    assert [found.alphabet_names[i] for i in found.alphabet] == ["Angelic", "Greek", "Greek"]
    assert found.images.shape == (3, 28, 28)
    assert found.images[0, 0, 0] > 0  # the one black pixel is ink, and ink is bright
    assert found.images[0, 5:, 5:].max() == 0


def test_omniglot_faults(tmp_path):
    for message, png in {"105 x 105": drawing(64), "a PNG image": drawing()[:60]}.items():
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr("Greek/character02/0005_02.png", png)
        with pytest.raises(DataFileError, match=message):
            read_omniglot_zip(tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(DataFileError, match="PNG files alphabet"):
        read_omniglot_zip(tmp_path / "x.zip")
    with pytest.raises(DataFileError, match="a whole zip file"):
        read_omniglot_zip(write(tmp_path, b"PK\x03\x04 and no more", "x.zip"))


@needs_data
def test_omniglot_original_zip_gives_the_prepared_images():
    found = read_omniglot_zip(DATA / "omniglot" / "images_background_small1.zip")
    assert found.alphabet_names == ["Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"]
    with np.load(DATA / "omniglot" / "omniglot_28x28.npz") as prepared:
        rows = 20 * found.labels.astype(int) + found.sample - 1
        assert len(rows) == 2720
        np.testing.assert_array_equal(found.images, prepared["images"][rows])
        np.testing.assert_array_equal(found.character, prepared["character"][rows])


# --- read_rows --------------------------------------------------------------------------------------------------------


def test_read_rows_tells_the_format(tmp_path):
    np.savez(tmp_path / "p.npz", X=np.eye(2), y=[0, 1])
    cases = {
        "xml": write(tmp_path, TINY, "a.txt"),
        "svmlight": write(tmp_path, gzip.compress(SVMLIGHT.encode()), "b.dat"),
        "csv": write(tmp_path, "a,b\n1,2\n", "c.data"),
        "npz": (tmp_path / "p.npz").rename(tmp_path / "q"),
    }
    for name, path in cases.items():
        assert detect_format(path) == name
        assert read_rows(path, reduction="first").format == name
    assert detect_format(write(tmp_path, "3\n4 1:2\n", "d.txt")) == "svmlight"
    assert detect_format(write(tmp_path, "time:utc,y\n1,2\n", "e.csv.gz")) == "csv"
    assert detect_format(write(tmp_path, "1 " + "7:1.5 " * 20_000, "f.txt")) == "svmlight"  # one very long line
    with pytest.raises(DataFileError, match=r"svmlight, XML-repository, npz or csv.*format="):
        detect_format(write(tmp_path, "hello\n", "g.txt"))
    with pytest.raises(DataFileError, match="an empty file"):
        detect_format(write(tmp_path, "", "h.txt"))
    with pytest.raises(ValueError, match=r"a format among.*'parquet'"):
        read_rows(cases["csv"], "parquet")


def test_read_rows_reduces_label_sets_only_when_told(tmp_path):
    path = write(tmp_path, TINY)
    first = read_rows(path, reduction="first")
    assert first.y is not None
    assert first.rows is not None
    assert first.labels is not None
    assert first.y.tolist() == [1, 0, 0]
    assert first.rows.tolist() == [0, 3, 4]
    assert first.X.shape == (3, 6)
    assert first.labels.shape == (5, 4)
    pairs = read_rows(path, reduction="all")
    assert pairs.y is not None
    assert pairs.y.tolist() == [1, 3, 0, 0, 3]
    with pytest.raises(DataFileError, match=r"one label a row.*0 to 2 labels.*'first'.*'all'"):
        read_rows(path)
    with pytest.raises(ValueError, match=r"a reduction among.*'last'"):
        read_rows(path, reduction="last")
    unlabelled = read_rows(path, need_labels=False)
    assert unlabelled.y is None
    assert unlabelled.X.shape == (5, 6)
    single = read_rows(write(tmp_path, "2 3 2\n1 0:1\n0 1:1\n"))
    assert single.y is not None
    assert single.y.tolist() == [1, 0]


def test_read_rows_for_prediction_needs_no_labels(tmp_path):
    path = write(tmp_path, " 1:1\n 2:1\n")
    assert read_rows(path, "svmlight", need_labels=False).y is None
    with pytest.raises(DataFileError, match="a label"):
        read_rows(path, "svmlight")
    np.savez(tmp_path / "x.npz", X=np.eye(2))
    assert read_rows(tmp_path / "x.npz", need_labels=False).y is None
    with pytest.raises(DataFileError, match="a label on every row"):
        read_rows(tmp_path / "x.npz")


def test_read_rows_checks_the_number_of_features(tmp_path):
    svm = read_rows(write(tmp_path, "1 1:1\n"), n_features=7)
    assert svm.n_features == 7
    assert svm.zero_based is False
    with pytest.raises(DataFileError, match="7 features, but found 6"):
        read_rows(write(tmp_path, TINY), n_features=7, reduction="first")
