"""Files as other programs write them, read or refused by name; and files that would fill the memory."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file

from augment_reduce.data import (
    DataFileError,
    arff,
    detect_format,
    read_idx,
    read_labels,
    read_npz,
    read_omniglot_zip,
    read_rows,
    read_svmlight,
    read_xml_repository,
)

X = np.float32([[0, 1.5, 0], [0, 2, 3], [0, 0, 4]])
XML = "3 3 4\n1,3 1:1.5\n0 1:2 2:3\n 2:4\n"
SVM = "a 1:1 2:2\nb 3:1\n"


def write(folder: Path, contents: str | bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


# ---- packed ----


@pytest.mark.parametrize("pack", [bz2.compress, gzip.compress])
def test_packed_files_of_every_format(pack, tmp_path):
    suffix = ".bz2" if pack is bz2.compress else ".gz"
    npy, npz = io.BytesIO(), io.BytesIO()
    np.save(npy, X)
    np.savez(npz, X=X, y=[0, 1, 2])
    idx = bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])
    for name, contents, format in (
        ("a.txt", XML.encode(), "xml"), ("b.svm", SVM.encode(), "svmlight"), ("c.csv", b"a,y\n1,u\n", "csv"),
        ("d.npz", npz.getvalue(), "npz"), ("e.npy", npy.getvalue(), "npy"),
    ):  # fmt: skip
        packed, plain = write(tmp_path, pack(contents), name + suffix), write(tmp_path, contents, name)
        if name != "d.npz":
            assert detect_format(packed) == format
        one, other = (read_rows(path, format, need_labels=False) for path in (packed, plain))
        np.testing.assert_array_equal(*(r.X.toarray() if sparse.issparse(r.X) else r.X for r in (one, other)))
    assert read_idx(write(tmp_path, pack(idx), "f" + suffix)).tolist() == [7, 8, 9]


def test_two_streams_of_bzip2_are_one_file(tmp_path):
    path = write(tmp_path, bz2.compress(SVM[:9].encode()) + bz2.compress(SVM[9:].encode()), "x.svm.bz2")
    assert read_rows(path).n_rows == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "tail"])
def test_a_damaged_bzip2_is_refused(damage, tmp_path):
    packed = bytearray(bz2.compress(SVM.encode() * 50))
    if damage == "flip":
        packed[len(packed) // 2] ^= 0xFF
    found = {"cut": packed[:-9], "flip": packed, "tail": packed[:30]}[damage]
    with pytest.raises(DataFileError, match=r"x.svm.bz2: expected a whole bzip2 file.*again"):
        read_rows(write(tmp_path, bytes(found), "x.svm.bz2"), "svmlight")


def test_a_label_like_bzip2s_mark_is_a_label(tmp_path):
    assert read_rows(write(tmp_path, "BZh9 1:1\nBZh8 2:1\n", "x.svm")).y.tolist() == ["BZh9", "BZh8"]  # type: ignore[union-attr]


# ---- sparse text ----


@pytest.mark.parametrize("name", ["x.svm", "x.libsvm", "x.svm.gz", "x.txt", "x"])
def test_a_first_line_of_three_numbers_makes_it_an_xml_file_whatever_its_name(name, tmp_path):
    path = write(tmp_path, gzip.compress(XML.encode()) if name.endswith("gz") else XML, name)
    assert detect_format(path) == "xml"
    assert read_rows(path, reduction="all").n_features == 3
    with pytest.raises(DataFileError, match=r"line 1: expected features as index:value.*format='xml'"):
        read_rows(path, "svmlight")


def test_four_numbers_are_refused_as_a_header_of_three(tmp_path):
    with pytest.raises(DataFileError, match=r"line 1: expected a header of three whole numbers.*'3 3 4 2'"):
        read_rows(write(tmp_path, XML.replace("3 3 4", "3 3 4 2"), "x.svm"))


@pytest.mark.parametrize("zero_based", [True, False])
def test_what_a_comment_says_of_the_indices_is_believed(zero_based, tmp_path):
    """Column 0 is empty, so the numbers themselves do not tell."""
    path = tmp_path / "x.svm"
    dump_svmlight_file(X, [1, 2, 3], str(path), zero_based=zero_based, comment="made by a test")
    found, _ = read_svmlight(path)
    np.testing.assert_array_equal(found.toarray(), X)
    assert read_rows(path).zero_based is zero_based
    other, _ = read_svmlight(path, zero_based=not zero_based, n_features=4)
    assert other.shape == (3, 4)  # whoever knows better may say so


def test_a_comment_that_is_not_true_is_an_error_with_its_line(tmp_path):
    with pytest.raises(DataFileError, match="line 2: expected feature indices of at least 1"):
        read_svmlight(write(tmp_path, "# column indices are one-based\n1 0:1\n", "x"))


def test_a_comment_below_the_first_row_says_nothing(tmp_path):
    found, _ = read_svmlight(write(tmp_path, "1 1:1\n# column indices are zero-based\n", "x"))
    assert found.shape == (1, 1)


def test_the_largest_index_counted_from_zero_is_one_feature_too_many(tmp_path):
    with pytest.raises(DataFileError, match="at most 9223372036854775807 features"):
        read_svmlight(write(tmp_path, f"1 0:1 {2**63 - 1}:1\n", "x"))


# ---- numpy ----


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<i2", "?", "u8", "f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_holds_the_features(kind, order, tmp_path):
    np.save(tmp_path / "x.npy", np.asarray(X.astype(kind), order=order))
    rows = read_rows(tmp_path / "x.npy", need_labels=False)
    assert rows.format == "npy"
    np.testing.assert_array_equal(rows.X, X.astype(kind).astype(np.float32))
    with pytest.raises(DataFileError, match=r"a label on every row.*\(labels=\)"):
        read_rows(tmp_path / "x.npy")


def test_npz_with_the_names_of_scikit_learn(tmp_path):
    np.savez(tmp_path / "x.npz", data=X, target=np.array([[2], [0], [1]]))
    rows = read_rows(tmp_path / "x.npz")
    np.testing.assert_array_equal(rows.X, X)
    assert rows.y is not None
    assert rows.y.tolist() == [2, 0, 1]
    np.savez(tmp_path / "none.npz", data2=X, target=[1, 2, 3])
    with pytest.raises(DataFileError, match=r"an array 'X'.*\['data2', 'target'\]"):
        read_rows(tmp_path / "none.npz")


def test_arrays_that_are_not_looked_at_do_no_harm(tmp_path):
    np.savez(tmp_path / "x.npz", X=X, y=[1, 2, 1], notes=np.array([{"a": 1}], dtype=object))
    assert read_rows(tmp_path / "x.npz").n_rows == 3


NPZ_FAULTS = {
    "names of other features": ({"X": X, "feature_names": ["a"]}, "'feature_names': expected 3 names"),
    "names in a table": ({"X": X, "class_names": [["a"]]}, "'class_names': expected names in one dimension"),
    "labels that are dates": ({"X": X, "y": np.array(["2020"] * 3, "M8[Y]")}, "'y': expected plain arrays"),
    "complex numbers": ({"X": X.astype(complex)}, "'X': expected plain arrays of numbers or text"),
    "bytes that are no text": ({"X": X, "y": np.array([b"\xff", b"a", b"b"])}, "'y': expected text in UTF-8"),
    "halves of characters": ({"X": X, "y": np.array(["a", "\ud800", "b"])}, "'y': expected text in UTF-8"),
    "an odd format": ({"format": "xyz", "shape": (3, 3), "data": X[0]}, "format 'xyz'"),
    "rows beyond reason": (
        {"format": "coo", "shape": (10**12, 3), "data": X[0], "row": [0, 1, 2], "col": [0, 1, 2]}, "000,000,000 rows"
    ),
    "an indptr that scipy does not look at": (
        {"format": "csr", "shape": (2, 3), "data": X[0], "indices": [0, 1, 2], "indptr": [0, 2**40, 0]}, "indptr"
    ),
    "float indices": (
        {"format": "csr", "shape": (1, 3), "data": X[0], "indices": [0.0, 1, 2], "indptr": [0, 3]}, "no whole numbers"
    ),
    "a shape below zero": ({"format": "csr", "shape": (-1, 3), "data": [], "indices": [], "indptr": [0]}, "matrix"),
}  # fmt: skip


@pytest.mark.parametrize("fault", NPZ_FAULTS)
def test_npz_faults_are_named(fault, tmp_path):
    arrays, message = NPZ_FAULTS[fault]
    np.savez(tmp_path / "x.npz", **{name: np.asarray(array) for name, array in arrays.items()})
    with pytest.raises(DataFileError, match=message) as caught:
        read_npz(tmp_path / "x.npz")
    assert str(tmp_path / "x.npz") in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976,), }",
            "4,611,686,018,427,387,904 bytes",
        ),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }", "array of shape"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 70 + "), }", "array"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", "Python objects"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3", "as numpy.save writes it"),
        ("(" * 5000, "as numpy.save writes it"),
        ("'''", "as numpy.save writes it"),
    ],
)
def test_npy_headers_that_ask_for_too_much_or_make_no_sense(header, message, tmp_path):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(12)
    with pytest.raises(DataFileError, match=message):
        read_rows(write(tmp_path, data, "x.npy"), need_labels=False)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("X.npy", data)
    with pytest.raises(DataFileError, match=message):
        read_npz(tmp_path / "x.npz")


# ---- labels in a file of their own ----


def test_labels_of_pecos(tmp_path):
    """X.npz and Y.npz, both sparse."""
    Y = sparse.csr_matrix(np.float32([[0, 1, 0, 2.5], [1, 0, 0, 0], [0, 0, 0, 0]]))
    Y.data[0] = 0.25  # any number but zero is a label
    sparse.save_npz(tmp_path / "X.npz", sparse.csr_matrix(X))
    sparse.save_npz(tmp_path / "Y.npz", Y)
    rows = read_rows(tmp_path / "X.npz", labels=tmp_path / "Y.npz", reduction="all")
    assert rows.y is not None
    assert rows.rows is not None
    assert rows.y.tolist() == [1, 3, 0]
    assert rows.rows.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(rows.X.toarray(), X[[0, 0, 1]])  # type: ignore[union-attr]
    one_each = sparse.csr_matrix(np.eye(3)[[2, 0, 1]])
    sparse.save_npz(tmp_path / "Y1.npz", one_each)
    assert read_rows(tmp_path / "X.npz", labels=tmp_path / "Y1.npz").y.tolist() == [2, 0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", ["npz", "npy", "txt", "txt.gz"])
def test_labels_of_each_row_in_a_file(suffix, tmp_path):
    names = np.array(["cat", "dog", "emu"])
    path = tmp_path / f"y.{suffix}"
    match suffix:
        case "npz":
            np.savez(path, y=names)
        case "npy":
            np.save(path, names[:, None])
        case "txt":
            path.write_text("cat\ndog\r\nemu\n")
        case _:
            path.write_bytes(gzip.compress(b"cat\ndog\nemu"))
    data = {
        "x.npy": lambda p: np.save(p, X), "x.csv": lambda p: p.write_text("a,b,c\n1,2,3\n4,5,6\n7,8,9\n"),
        "x.svm": lambda p: p.write_text(" 1:1\n 2:1\n 3:1\n"), "x.txt": lambda p: p.write_text("3 3 1\n 0:1\n 1:1\n\n"),
    }  # fmt: skip
    for name, make in data.items():
        make(tmp_path / name)
        rows = read_rows(tmp_path / name, labels=path)
        assert rows.n_features == 3
        assert rows.y is not None
        assert rows.y.tolist() == ["cat", "dog", "emu"]


def test_sets_of_label_numbers_on_lines(tmp_path):
    y, sets = read_labels(write(tmp_path, "3,1\n0\n2,2\n", "y.txt"), 3)
    assert y is None
    assert sets is not None
    assert sets.toarray().tolist() == [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    y, sets = read_labels(write(tmp_path, "Smith, J\n0\n2,2\n", "y.txt"), 3)
    assert y is not None
    assert y.tolist() == ["Smith, J", "0", "2,2"]


def test_labels_that_do_not_fit_the_rows_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    sparse.save_npz(tmp_path / "Y.npz", sparse.csr_matrix((4, 7)))
    cases = {
        "Y.npz: expected 3 rows of labels": tmp_path / "Y.npz",
        "y.txt: expected 3 lines": write(tmp_path, "a\nb\n", "y.txt"),
        "z.txt, line 2: expected a label": write(tmp_path, "a\n\nb\n", "z.txt"),
        "big.txt: expected label numbers": write(tmp_path, f"1,2\n{2**70}\n3\n", "big.txt"),
        "nothing there": tmp_path / "absent",
    }
    for message, path in cases.items():
        with pytest.raises(DataFileError, match=message):
            read_rows(tmp_path / "x.npy", labels=path)
    with pytest.raises(DataFileError, match=r"x.svm: expected rows without labels.*labels="):
        read_rows(write(tmp_path, "a 1:1\nb 2:1\nc 3:1\n", "x.svm"), labels=tmp_path / "y.txt")


# ---- what would fill the memory, or cannot be unpacked ----


def idx(*sizes: int, data: bytes = b"") -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_an_idx_header_that_claims_2_to_the_60_bytes(pack, tmp_path):
    path = write(tmp_path, pack(idx(2**31, 2**20, 2**9, data=bytes(5000))), "x")
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=r"1,152,921,504,606,846,976 bytes.*cut short"):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e7


@pytest.mark.parametrize(
    ("contents", "message"),
    [(idx(), "1 to 32 dimensions"), (idx(*[1] * 40), "1 to 32 dimensions"), (idx(3, 0), "something in it")],
)
def test_idx_files_of_no_use(contents, message, tmp_path):
    with pytest.raises(DataFileError, match=message):
        read_idx(write(tmp_path, contents, "x"))


def test_a_zip_entry_that_unpacks_to_far_more_than_it_can_hold(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", X=np.zeros((3000, 1000), np.float32))
    assert read_npz(tmp_path / "x.npz").X.shape == (3000, 1000)  # zeros, but not too many
    data = bytearray((tmp_path / "x.npz").read_bytes())
    for mark, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(mark) + offset
        data[at : at + 4] = (2**31).to_bytes(4, "little")
    with pytest.raises(DataFileError, match=r"array 'X'.*2,147,483,648|zip|something else"):
        read_npz(write(tmp_path, bytes(data), "x.npz"))


ENTRY_FAULTS = {"encrypted": (6, b"\x01\x00"), "method 99": (8, b"\x63\x00"), "method 12": (8, b"\x0c\x00")}


@pytest.mark.parametrize("fault", ENTRY_FAULTS)
def test_entries_that_cannot_be_unpacked_are_named(fault, tmp_path):
    offset, value = ENTRY_FAULTS[fault]
    for name, read in (("X.npy", read_npz), ("Greek/character01/0001_01.png", read_omniglot_zip)):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(name, b"x" * 100)
        data = bytearray((tmp_path / "x.zip").read_bytes())
        for mark, more in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
            at = data.index(mark) + offset + more
            data[at : at + 2] = value
        with pytest.raises(DataFileError, match=f"{name.removesuffix('.npy')}.*{fault}"):
            read(write(tmp_path, bytes(data), "x.zip"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Greek/character01/40000_01.png", "a label from 1 to 32,767"),
        ("Greek/character01/0000_01.png", "a label from 1"),
        ("Greek/character300/0001_01.png", "a character from 1 to 255"),
        ("Greek/character01/0001_256.png", "a drawer"),
        ("Greek/character01/0001_01.png", r"0001_01.png: expected at most 1,048,576 bytes"),
    ],
)
def test_drawings_with_numbers_or_sizes_beyond_reason(name, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(2_000_000))
    with pytest.raises(DataFileError, match=message):
        read_omniglot_zip(tmp_path / "x.zip")


def test_numpys_warnings_about_a_file_stay_inside(tmp_path):
    """Headers written by Python 2 make numpy warn: they are read in silence."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }" + b" " * 19 + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + X[:2].tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = read_rows(write(tmp_path, data, "x.npy"), need_labels=False)
    np.testing.assert_array_equal(rows.X, X[:2])


# ---- arff ----

ARFF = b"@attribute one {0,1}\n@attribute TAG_a {0,1}\n@data\n{0 1,1 1}\n"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (ARFF.replace(b"{0 1,1 1}", b"{0 1,2 1}"), "page.arff, line 4: .*indices below 2.*'2 1'"),
        (ARFF.replace(b"{0 1,1 1}", b"{0 1,0 1}"), "line 4: .*each once"),
        (ARFF.replace(b"{0 1,1 1}", b"{0,1}"), "line 4"),
        (ARFF.replace(b"{0 1,1 1}", b"{x 1}"), "line 4: .*'x 1'"),
        (ARFF.replace(b"TAG_a", b"two"), "labels named TAG_"),
        (ARFF.replace(b"one {", b"TAG_b {").replace(b"TAG_a", b"two"), "another order"),
        (ARFF.replace(b"one {0,1}", b" "), "line 1: expected the name of an attribute"),
        (ARFF.replace(b"one", b"\xff"), "line 1, byte 12: expected UTF-8"),
    ],
)
def test_arff_faults_are_named(contents, message):
    with pytest.raises(DataFileError, match=message):
        arff.to_repository_text(contents, "page.arff")


def test_an_arff_row_of_nothing_is_a_row(tmp_path):
    text = arff.to_repository_text(ARFF + b"{}\n")
    assert read_xml_repository(write(tmp_path, text, "x")).n_rows == 2


@pytest.mark.parametrize("name", ["loop.csv", "x" * 300 + ".csv", "a\0b.csv", "loop.npz", "loop.svm"])
def test_a_file_that_cannot_be_opened_is_refused_as_any_other(name, tmp_path):
    """A loop of links, a name that is too long or none at all: they were OSErrors and a ValueError of Python's."""
    if name.startswith("loop"):
        (tmp_path / name).symlink_to(name)
    with pytest.raises(DataFileError, match=r"can be opened.*(levels|long)|the name of a file"):
        read_rows(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused_as_any_other(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1,2\n")
    path.chmod(0)
    with pytest.raises(DataFileError, match="can be opened"):
        read_rows(path)
