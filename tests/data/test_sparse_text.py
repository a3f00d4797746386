"""Sparse text, gzip or not: what is read, and every fault by its line."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_svmlight_file

from augment_reduce.data import DataFileError, MultiLabelRows, read_svmlight, read_xml_repository
from augment_reduce.data import sparse_text as sparse_text_module
from augment_reduce.data.files import line_blocks
from augment_reduce.data.sparse_blocks import fast_block
from augment_reduce.data.sparse_lines import Block, Rules, careful_block
from tests.helpers import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not on this machine")


def write(folder: Path, contents: str | bytes, name: str = "rows.txt") -> Path:
    path = folder / name
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


# --- XML repository ---------------------------------------------------------------------------------------------------

TINY = "5 6 4\n1,3 0:1 5:2.5\n 2:-0.125\n\n0\n3,0,3 4:1e-3 1:7\n"


def assert_is_tiny(rows: MultiLabelRows) -> None:
    X = np.zeros((5, 6), np.float32)
    X[0, 0], X[0, 5], X[1, 2], X[4, 1], X[4, 4] = 1, 2.5, -0.125, 7, 1e-3
    labels = np.zeros((5, 4), bool)
    labels[0, [1, 3]] = labels[3, 0] = labels[4, [0, 3]] = True
    np.testing.assert_array_equal(rows.X.toarray(), X)
    np.testing.assert_array_equal(rows.labels.toarray(), labels)
    assert rows.X.dtype == np.float32
    assert rows.X.indices.dtype == np.int32
    assert rows.labels.dtype == bool
    assert rows.X[4].indices.tolist() == [1, 4]  # ascending, whatever the file's order
    assert (rows.n_rows, rows.n_features, rows.n_labels) == (5, 6, 4)


@pytest.mark.parametrize(
    "contents",
    [
        TINY.encode(),
        TINY.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + TINY.encode(),
        TINY.rstrip("\n").encode(),
        TINY.encode() + b"\n  \n\n",
        gzip.compress(TINY.encode()),
        gzip.compress(TINY[:20].encode()) + gzip.compress(TINY[20:].encode()),
    ],
    ids=["plain", "crlf", "bom", "no-last-newline", "blank-tail", "gzip", "gzip-two-members"],
)
def test_xml_repository_reads_the_same_rows_however_packed(tmp_path, contents):
    assert_is_tiny(read_xml_repository(write(tmp_path, contents)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13])
def test_blocks_cut_anywhere_give_the_same_rows(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sparse_text_module, "line_blocks", lambda path: line_blocks(path, block_bytes=size))
    assert_is_tiny(read_xml_repository(write(tmp_path, TINY)))


def test_line_blocks_number_their_lines(tmp_path):
    path = write(tmp_path, "".join(f"line {i}\n" for i in range(1, 400)))
    for first, block in line_blocks(path, block_bytes=64):
        assert block.startswith(f"line {first}\n".encode())
        assert block.endswith(b"\n")


def test_a_row_may_start_with_a_feature(tmp_path):
    rows = read_xml_repository(write(tmp_path, "1 3 2\n0:1 2:4\n"))
    assert rows.labels.nnz == 0
    assert rows.X.toarray().tolist() == [[1, 0, 4]]


def test_no_rows_is_fine_if_the_header_says_so(tmp_path):
    rows = read_xml_repository(write(tmp_path, "0 3 2\n"))
    assert rows.X.shape == (0, 3)
    assert rows.labels.shape == (0, 2)


XML_FAULTS = {
    "header-two-numbers": ("3 5\n", 1, "three whole numbers"),
    "header-not-numbers": ("a b c\n", 1, "three whole numbers"),
    "header-negative": ("-1 5 2\n", 1, "three whole numbers"),
    "header-missing": ("1,2 0:1 3:1\n", 1, "read_svmlight"),
    "fewer-rows": ("3 5 2\n0 1:1\n1 2:1\n", None, "3 rows.*found only 2"),
    "more-rows": ("1 5 2\n0 1:1\n1 2:1\n", 3, "end of the file after 1 rows.*another row, '1 2:1'"),
    "bad-value": ("2 5 2\n0 1:1\n1 2:x\n", 3, "finite number.*'2:x'"),
    "no-value": ("1 5 2\n0 1:\n", 2, "finite number.*'1:'"),
    "no-colon": ("1 5 2\n0 1:1 3\n", 2, "index:value.*'3'"),
    "two-colons": ("1 5 2\n0 1:1:1\n", 2, "'1:1:1'"),
    "bad-index": ("1 5 2\n0 a:1\n", 2, "index:value.*'a:1'"),
    "float-index": ("1 5 2\n0 1.0:1\n", 2, "whole number.*'1.0:1'"),
    "exponent-index": ("1 5 2\n0 1e0:1\n", 2, "whole number.*'1e0:1'"),
    "negative-index": ("1 5 2\n0 -1:1\n", 2, "a negative feature index in '-1:1'"),
    "index-at-D": ("2 5 2\n0 4:1\n0 5:1\n", 3, "at most 4.*'5' in '5:1'.*header declares 5 features"),
    "index-beyond-int64": (f"1 5 2\n0 {2**63}:1\n", 2, "at most 4"),
    "label-at-K": ("2 5 2\n1 4:1\n0,2 4:1\n", 3, "labels as whole numbers from 0 to 1.*'2'"),
    "label-text": ("1 5 2\ncat 4:1\n", 2, "labels as whole numbers.*'cat'"),
    "label-negative": ("1 5 2\n-1 4:1\n", 2, "labels as whole numbers.*'-1'"),
    "label-empty": ("1 5 2\n0,,1 4:1\n", 2, "single commas"),
    "label-blank-after-comma": ("1 5 2\n0, 1 4:1\n", 2, "index:value.*'1'"),
    "label-after-blank": ("1 5 2\n 1 4:1\n", 2, "index:value.*'1'"),
    "feature-twice": ("2 5 2\n0 1:1\n0 3:1 1:2 3:4\n", 3, "feature 3 twice"),
    "nan": ("1 5 2\n0 1:nan\n", 2, "finite number.*'1:nan'"),
    "infinity": ("1 5 2\n0 1:-inf\n", 2, "finite number.*'1:-inf'"),
    "beyond-float32": ("1 5 2\n0 1:1e39\n", 2, "finite number"),
    "underscore": ("1 5 2\n0 1:1_0\n", 2, "finite number"),
    "not-utf8": (b"2 5 2\n0 1:1\n1 2:\xff\n", 3, "byte 5: expected UTF-8 text, but found the byte 0xff"),
    "control-byte": (b"1 5 2\n0 1:1 \x00\n", 2, "index:value"),
    "empty": ("", None, "an empty file"),
}


@pytest.mark.parametrize("fault", XML_FAULTS)
def test_xml_faults_name_file_line_and_remedy(tmp_path, fault):
    contents, line, message = XML_FAULTS[fault]
    path = write(tmp_path, contents)
    with pytest.raises(DataFileError, match=message) as caught:
        read_xml_repository(path)
    assert str(path) in str(caught.value)
    assert caught.value.line == line


def test_a_late_fault_is_found_by_its_line(tmp_path):
    lines = [f"{i % 3} {i % 50}:1 {50 + i % 7}:0.5" for i in range(40_000)]
    lines[31_415] += " 99:1 98:1e"
    path = write(tmp_path, f"{len(lines)} 100 3\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataFileError, match="'98:1e'") as caught:
        read_xml_repository(path)
    assert caught.value.line == 31_415 + 2  # counted from 1, after the header


@pytest.mark.parametrize("cut", [3, 12, 40, -9, -4])
def test_a_cut_gzip_is_refused(tmp_path, cut):
    path = write(tmp_path, gzip.compress(TINY.encode())[:cut])
    with pytest.raises(DataFileError, match=r"a whole gzip file.*again"):
        read_xml_repository(path)


def test_a_damaged_gzip_is_refused(tmp_path):
    packed = bytearray(gzip.compress(TINY.encode()))
    packed[20] ^= 0xFF
    with pytest.raises(DataFileError, match="a whole gzip file"):
        read_xml_repository(write(tmp_path, bytes(packed)))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(DataFileError, match="nothing there"):
        read_xml_repository(tmp_path / "absent.txt")
    with pytest.raises(DataFileError, match="a folder"):
        read_xml_repository(tmp_path)


# --- the fast parser against the careful one --------------------------------------------------------------------------


def random_row(rng: random.Random) -> str:
    numbers = [
        lambda: str(rng.randint(0, 99)),
        lambda: f"{rng.uniform(-9, 9):.6f}",
        lambda: repr(rng.uniform(0, 1)),
        lambda: f"{rng.uniform(-1, 1):.3e}",
        lambda: f".{rng.randint(0, 999)}",
        lambda: f"{rng.randint(0, 99)}.",
        lambda: f"+{rng.randint(0, 9)}",
        lambda: "-0",
        lambda: str(rng.randint(10**16, 10**21)),
    ]
    labels = ",".join(str(rng.randint(0, 30)) for _ in range(rng.randint(0, 3)))
    indices = rng.sample(range(500), rng.randint(0, 6))
    if rng.random() < 0.7:
        indices.sort()
    features = [f"{i}:{rng.choice(numbers)()}" for i in indices]
    return labels + " " * bool(features) + rng.choice([" ", "  ", "\t"]).join(features) + rng.choice(["", " ", "\r"])


def assert_same_block(one: Block, other: Block) -> None:
    assert one.labels == other.labels
    for a, b in zip(one[1:], other[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rules", [Rules(highest=499, n_labels=31), Rules(highest=499)], ids=["integers", "any-label"])
def test_fast_parser_equals_the_careful_one(rules):
    rng = random.Random(0)
    for _ in range(200):
        block = "".join(random_row(rng) + "\n" for _ in range(rng.randint(1, 20))).encode()
        fast = fast_block(block, rules)
        assert fast is not None
        assert_same_block(fast, careful_block("x", 1, block, rules))


@pytest.mark.parametrize("rules", [Rules(highest=499, n_labels=31), Rules(highest=499)], ids=["integers", "any-label"])
def test_fast_parser_never_accepts_what_the_careful_one_refuses(rules):
    """Rows with one to three bytes changed: the fast parser agrees, or leaves the block to the careful one."""
    rng = random.Random(1)
    alphabet = b" ,:.-+eE\n\t\r019x\xc3\xa9\xff\x00"
    refused = 0
    for _ in range(3000):
        block = bytearray("".join(random_row(rng) + "\n" for _ in range(2)).encode())
        for _ in range(rng.randint(1, 3)):
            block[rng.randrange(len(block) - 1)] = rng.choice(alphabet)
        fast = fast_block(bytes(block), rules)
        try:
            careful = careful_block("x", 1, bytes(block), rules)
        except DataFileError:
            refused += 1
            assert fast is None, bytes(block)
        else:
            if fast is not None:
                assert_same_block(fast, careful)
    assert 500 < refused < 2900  # the changes do break some rows and spare others


def test_decimals_are_rounded_as_python_rounds_them(tmp_path):
    rng = random.Random(2)
    tokens = [f"{rng.uniform(-1000, 1000):.{rng.randint(0, 15)}f}" for _ in range(5000)]
    path = write(tmp_path, f"1 5000 1\n0 {' '.join(f'{i}:{t}' for i, t in enumerate(tokens))}\n")
    expected = np.asarray([float(t) for t in tokens]).astype(np.float32)
    np.testing.assert_array_equal(read_xml_repository(path).X.toarray()[0], expected)


# --- svmlight ---------------------------------------------------------------------------------------------------------

SVMLIGHT = "# a comment\n-1 1:0.5 3:2 # end\n\n+1 2:1\n3 1:1e-2 4:-4\n"


def test_svmlight_agrees_with_scikit_learn(tmp_path):
    path = write(tmp_path, SVMLIGHT)
    X, y = read_svmlight(path)
    X_expected, y_expected = load_svmlight_file(str(path))
    np.testing.assert_array_equal(X.toarray(), X_expected.toarray().astype(np.float32))
    np.testing.assert_array_equal(y, y_expected)
    assert y.dtype == np.int64
    assert X.shape == (3, 4)


@pytest.mark.parametrize(
    ("zero_based", "n_features", "columns"),
    [("auto", None, [0, 2]), (False, None, [0, 2]), (True, None, [1, 3]), ("auto", 9, [0, 2]), (True, 9, [1, 3])],
)
def test_svmlight_indices_from_zero_or_one(tmp_path, zero_based, n_features, columns):
    X, _ = read_svmlight(write(tmp_path, "1 1:1 3:1\n"), zero_based=zero_based, n_features=n_features)
    assert X.indices.tolist() == columns
    assert X.shape[1] == (n_features or columns[-1] + 1)


def test_svmlight_a_zero_anywhere_means_counted_from_zero(tmp_path):
    X, _ = read_svmlight(write(tmp_path, "1 1:1 3:1\n2 0:1\n"))
    assert X.indices.tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    ("labels", "dtype", "values"),
    [
        (["7", "-2", "+3"], "i", [7, -2, 3]),
        (["7", "0.5", "1e2"], "f", [7.0, 0.5, 100.0]),
        (["cat", "7", "Zürich"], "U", ["cat", "7", "Zürich"]),
    ],
)
def test_svmlight_labels_keep_their_kind(tmp_path, labels, dtype, values):
    path = write(tmp_path, "".join(f"{label} 1:1\n" for label in labels))
    _, y = read_svmlight(path)
    assert y.dtype.kind == dtype
    assert y.tolist() == values


def test_svmlight_label_sets(tmp_path):
    rows = read_svmlight(write(tmp_path, "3,1 1:1\n 2:1\n0 1:2\n"))
    assert isinstance(rows, MultiLabelRows)
    assert rows.labels.toarray().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    named = read_svmlight(write(tmp_path, "dog,cat 1:1\nemu 1:2\n"))
    assert isinstance(named, MultiLabelRows)
    assert named.label_names == ["cat", "dog", "emu"]
    assert named.labels.toarray().tolist() == [[1, 1, 0], [0, 0, 1]]


def test_svmlight_indices_beyond_int32(tmp_path):
    X, _ = read_svmlight(write(tmp_path, f"1 {2**40}:1 5:1\n0 {2**63 - 2}:2\n"), zero_based=True)
    assert X.indices.dtype == np.int64
    assert X.indices.tolist() == [5, 2**40, 2**63 - 2]


def test_svmlight_rows_without_features(tmp_path):
    X, y = read_svmlight(write(tmp_path, "1\n2\n"))
    assert X.shape == (2, 0)
    assert y.tolist() == [1, 2]


SVMLIGHT_FAULTS = {
    "qid": ("1 qid:3 1:2\n", {}, 1, "query ids"),
    "no-label": ("1 1:1\n\n# note\n 2:1\n", {}, 4, "a label"),
    "beyond-n-features": ("1 1:1\n1 4:1\n", {"n_features": 3}, 2, "at most 3"),
    "zero-and-n-features": ("1 0:1\n1 3:1\n", {"n_features": 3}, 2, "at most 2"),
    "zero-where-from-one": ("1 1:1\n1 0:1\n", {"zero_based": False}, 2, "at least 1"),
    "beyond-int64": (f"1 1:1\n1 {2**63}:1\n", {}, 2, "at most 9223372036854775807"),
    "thousands-of-digits": (f"1 1:1\n1 {'9' * 5000}:1\n", {}, 2, "at most 9223372036854775807"),
    "nan-label": ("1 1:1\nnan 1:1\n", {}, 2, "a label on every row.*'nan'"),
    "only-comments": ("# nothing\n\n", {}, None, "an empty file"),
    "not-utf8": (b"1 1:1\n\xe9t\xe9 1:1\n", {}, 2, "byte 1: expected UTF-8"),
}


@pytest.mark.parametrize("fault", SVMLIGHT_FAULTS)
def test_svmlight_faults(tmp_path, fault):
    contents, options, line, message = SVMLIGHT_FAULTS[fault]
    with pytest.raises(DataFileError, match=message) as caught:
        read_svmlight(write(tmp_path, contents), **options)
    assert caught.value.line == line


def test_reading_needs_memory_for_the_result_only(tmp_path):
    """30 MB of text with three rows in it: the peak stays at a few blocks of 256 kB."""
    noise = b"# " + b"x" * 97 + b"\n"
    path = write(tmp_path, gzip.compress(noise * 300_000 + b"1 1:1\n2 2:1\n3 3:1\n", 1))
    tracemalloc.start()
    try:
        X, _ = read_svmlight(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert X.shape == (3, 3)
    assert peak < 6e6


# --- the real files ---------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    ("name", "shape", "nonzeros", "pairs"),
    [
        ("bibtex/bibtex_train", (4880, 1836, 159), 334_250, None),
        ("bibtex/bibtex_test", (2515, 1836, 159), 173_496, None),
        ("debian_deps/debian_deps_train", (44_736, 21_494, 31_298), None, 220_019),
        ("debian_deps/debian_deps_test", (10_982, 21_494, 31_298), None, 51_532),
    ],
)
def test_real_repository_files(name, shape, nonzeros, pairs):
    rows = read_xml_repository(DATA / f"{name}.txt.gz")
    assert (rows.n_rows, rows.n_features, rows.n_labels) == shape
    assert nonzeros is None or rows.X.nnz == nonzeros
    assert pairs is None or rows.labels.nnz == pairs
    assert rows.labels_per_row.min() >= 1
