"""Text, Parquet and Arrow files as folders of mapped rows: what `read_rows` reads, in memory that does not grow."""

import bz2
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import (
    ArrowRows,
    DataFileError,
    DataFileWarning,
    convert_rows,
    mapped_writer,
    open_mapped,
    read_rows,
)
from augment_reduce.data import convert as convert_module
from augment_reduce.data import mapped as mapped_module
from tests.helpers.cli_files import QUICK, D, K, done, draw, one_label, refused, run, svmlight, table, xml

NAMES = ["index", *(f"f{j}" for j in range(D)), "label"]


@pytest.fixture
def place(tmp_path):
    """One file of each format; rows without labels, without features, and sets of labels as numbers and as names."""
    X, labels = draw(300, 0)
    X[7] = 0
    svmlight(tmp_path / "one.svm", X, one_label(labels))
    svmlight(tmp_path / "numbers.svm", X, [str(3 * k) for k in labels.argmax(1)], base=0)
    svmlight(tmp_path / "real.svm", X, [str(k / 2) for k in labels.argmax(1)])
    (tmp_path / "packed.svm.gz").write_bytes(gzip.compress((tmp_path / "one.svm").read_bytes()))
    (tmp_path / "packed.svm.bz2").write_bytes(bz2.compress((tmp_path / "one.svm").read_bytes()))
    X, labels = draw(300, 2, n_labels=3)
    labels[5] = False
    xml(tmp_path / "sets.txt", X, labels)
    svmlight(tmp_path / "sets.svm", X, [",".join(f"n{10 - k}" for k in np.flatnonzero(row)) for row in labels])
    svmlight(tmp_path / "number-sets.svm", X, [",".join(str(9 + k) for k in np.flatnonzero(row)) for row in labels])
    numbered = table(tmp_path / "table.csv", *[X, one_label(labels)], NAMES)
    lines = numbered.read_text().splitlines()
    numbered.write_text("\n".join([lines[0], *(f"{i}{line[1:]}" for i, line in enumerate(lines[1:]))]) + "\n")
    (tmp_path / "bare.csv").write_text("\n".join(line.partition(",")[2] for line in lines[1:]) + "\n")
    return tmp_path


@pytest.mark.filterwarnings("ignore::augment_reduce.data.DataFileWarning")
@pytest.mark.parametrize("at_once", [1 << 18, 7])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("one.svm", {}),
        ("one.svm", {"n_features": D + 3}),
        ("numbers.svm", {}),
        ("numbers.svm", {"zero_based": True}),
        ("real.svm", {"zero_based": False}),
        ("packed.svm.gz", {}),
        ("packed.svm.bz2", {}),
        ("sets.txt", {"reduction": "all"}),
        ("sets.txt", {"reduction": "first"}),
        ("sets.svm", {"reduction": "all"}),
        ("sets.svm", {"reduction": "first"}),
        ("number-sets.svm", {"reduction": "first"}),
        ("table.csv", {}),
        ("table.csv", {"keep_index": True}),
        ("table.csv", {"ignore_columns": ["f3", "index"]}),
        ("table.csv", {"label_column": "f2", "ignore_columns": ["label"]}),
        ("bare.csv", {"header": False}),
    ],
)
def test_a_folder_has_the_rows_and_labels_of_its_file(name, how, at_once, place, monkeypatch):
    for module in (mapped_module, mapped_writer, convert_module):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
    monkeypatch.setattr(mapped_writer, "ENTRIES_AT_ONCE", at_once)
    expected = read_rows(place / name, **how)
    y = expected.y if expected.class_names is None else np.asarray(expected.class_names)[expected.y]
    found = convert_rows(place / name, place / "out", **how)
    X = expected.X.toarray() if sp.issparse(expected.X) else expected.X
    np.testing.assert_array_equal(found.X.toarray(), X)
    assert found.X.has_canonical_format
    np.testing.assert_array_equal(found.y, y)
    assert found.y.dtype.kind == y.dtype.kind
    assert found.feature_names == expected.feature_names
    assert found.zero_based == expected.zero_based
    kept = {"data.npy", "indices.npy", "indptr.npy", "labels.npy", "classes.json", "meta.json"}
    assert {path.name for path in found.path.iterdir()} - {"feature_names.json"} == kept
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_labels_that_are_rare_are_dropped_and_numbers_get_names(place):
    plain = convert_rows(place / "sets.txt", place / "a", reduction="all")
    counts = np.bincount(plain.coded.codes)
    rare = convert_rows(place / "sets.txt", place / "b", reduction="all", min_count=int(np.median(counts)) + 1)
    keep = counts >= int(np.median(counts)) + 1
    assert rare.classes.tolist() == plain.classes[keep].tolist()
    np.testing.assert_array_equal(rare.X.toarray(), plain.X.toarray()[keep[plain.coded.codes]])
    np.testing.assert_array_equal(rare.y, plain.y[keep[plain.coded.codes]])
    (place / "names").write_text("\n".join(f"z{9 - k}" for k in range(K)) + "\n")  # their order is another one
    for reduction in ("first", "all"):
        named = convert_rows(
            place / "sets.txt", place / f"n{reduction}", reduction=reduction, label_names=place / "names"
        )
        numbers = convert_rows(place / "sets.txt", place / f"m{reduction}", reduction=reduction)
        assert named.y.tolist() == [f"z{9 - k}" for k in numbers.y]
    with pytest.raises(ValueError, match="min_count"):
        convert_rows(place / "one.svm", place / "c", min_count=1000)
    with pytest.raises(DataFileError, match="label numbers"):
        convert_rows(place / "one.svm", place / "c", label_names=place / "names")


def test_entries_beyond_32_bits_are_stored_in_64(place, monkeypatch):
    expected = convert_rows(place / "sets.svm", place / "a", reduction="first")
    monkeypatch.setattr(mapped_writer, "INT32_MAX", 200)
    found = convert_rows(place / "sets.svm", place / "b", reduction="first")
    assert (expected.X.indices.dtype, found.X.indices.dtype, found.X.indptr.dtype) == (np.int32, np.int64, np.int64)
    assert (found.X != expected.X).nnz == 0
    fits = [AugmentReduceClassifier(max_epochs=2, random_state=0).fit(rows) for rows in (expected, found)]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)


def test_large_feature_numbers(place):
    (place / "far.svm").write_text("a 1:1 3000000000:2\nb 2:1\n")
    found = convert_rows(place / "far.svm", place / "out")
    assert found.X.shape == (2, 3_000_000_000)
    assert found.X.indices.tolist() == [0, 2_999_999_999, 1]


@pytest.mark.parametrize(
    ("name", "text", "how", "said"),
    [
        ("a.svm", "a 1:1\nb 2:x\n", {}, "line 2"),
        ("a.svm", "a 1:1\n1:1\n", {}, "line 2.*no label"),
        ("a.svm", "a 1:1 1:2\n", {}, "feature 1 twice"),
        ("a.svm", "a,b 1:1\n", {}, "one label a row"),
        ("a.svm", "", {}, "empty file"),
        ("a.svm", "# nothing\n", {"format": "svmlight"}, "empty file"),
        ("a.svm", "a 5:1\n", {"n_features": 4}, "at most 4"),
        ("a.svm", "a 0:1 4:1\n", {"n_features": 4}, "at most 3"),
        ("a.txt", "3 2 2\n0 0:1\n", {"reduction": "all"}, "only 1 when the file ended"),
        ("a.txt", "1 2 2\n0 0:1\n1 1:1\n", {"reduction": "all"}, "line 3"),
        ("a.txt", "1 2 2\n5 0:1\n", {"reduction": "all"}, "label"),
        ("a.txt", "2 2 2\n0 0:1\n 1:1\n", {}, "rows with 0 to 1 labels"),
        ("a.csv", "a,b\n1,x\n2\n", {}, "line 3"),
        ("a.csv", "a,b\n1,\n", {}, "a label"),
        ("a.csv", "a,b\n", {}, "rows below the header"),
        ("a.csv", "a,b\n1,x\n", {"label_column": "c"}, "a column 'c'"),
    ],
)
def test_bad_files_are_refused_and_leave_nothing(name, text, how, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataFileError, match=said):
        convert_rows(tmp_path / name, tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_cut_short_or_no_text(place):
    whole = (place / "packed.svm.gz").read_bytes()
    (place / "cut.svm.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFileError, match="cut short"):
        convert_rows(place / "cut.svm.gz", place / "out")
    np.save(place / "array.npy", np.ones((3, 2)))
    with pytest.raises(DataFileError, match="write_mapped"):
        convert_rows(place / "array.npy", place / "out")
    with pytest.raises(ValueError, match="reduction"):
        convert_rows(place / "sets.txt", place / "out", reduction="most")


def test_rows_without_any_label_are_for_prediction(place):
    (place / "new.svm").write_text("1:1 3:2\n2:1\n")
    found = convert_rows(place / "new.svm", place / "out", n_features=D)
    assert found.y is None
    assert found.X.shape == (2, D)
    model = AugmentReduceClassifier(max_epochs=1, random_state=0).fit(*read_rows_of(place / "one.svm"))
    np.testing.assert_array_equal(model.predict(found.X), model.predict(found.X.copy()))


def read_rows_of(path):
    found = read_rows(path)
    return found.X, found.y


# ---- memory, and kills ----

CONVERTS = """
import sys
from augment_reduce.data import convert_rows

def high():
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

convert_rows(sys.argv[1], sys.argv[1] + ".warm")
before = high()
for path in sys.argv[2:]:
    convert_rows(path, path + ".rows")
    print(high() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_converting_takes_no_more_memory_for_a_longer_file(tmp_path):
    lines = [f"c{n % 7} " + " ".join(f"{j}:{n % 5 + 1}" for j in range(1 + n, 200 + n)) for n in range(50)]
    text = "\n".join(lines) + "\n"
    for name, times in (("0", 2), ("1", 30), ("2", 300)):  # 2 and 20 MB
        (tmp_path / name).write_text(text * times)
    command = [sys.executable, "-c", CONVERTS, *(str(tmp_path / name) for name in "012")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    short, long = map(int, result.stdout.split())
    assert long - short < (tmp_path / "2").stat().st_size / 5
    assert len(open_mapped(tmp_path / "2.rows")) == 15_000


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill here")
def test_a_killed_conversion_leaves_no_folder_and_the_next_removes_its_rest(place):
    code = (
        "import os, signal, sys; from augment_reduce.data import convert, convert_rows\n"
        "convert.finish = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_rows(sys.argv[1], sys.argv[2])"
    )
    result = subprocess.run([sys.executable, "-c", code, place / "one.svm", place / "out"], check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (place / "out").exists()
    assert [path for path in place.iterdir() if path.name.startswith(".out-")]
    convert_rows(place / "one.svm", place / "out")
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


# ---- Parquet and Arrow ----


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def test_row_groups_of_numbers_lists_and_sparse_lists(arrow, tmp_path):
    pa, pq = arrow
    X, labels = draw(300, 0)
    X, y = X.astype(np.float32), np.array(one_label(labels))
    S = sp.csr_matrix(X)
    parts = list(zip(S.indptr[:-1], S.indptr[1:], strict=True))
    columns = {f"f{j}": X[:, j] for j in range(D)}
    plain = pa.table(columns | {"label": pa.array(y).dictionary_encode(), "w": np.arange(300.0)})
    pq.write_table(plain, tmp_path / "plain.parquet", row_group_size=70)
    with pa.OSFile(str(tmp_path / "plain.arrow"), "wb") as sink, pa.ipc.new_file(sink, plain.schema) as out:
        out.write_table(plain, max_chunksize=70)
    lists = {"i": [S.indices[a:b] for a, b in parts], "v": [S.data[a:b] for a, b in parts], "x": list(X), "label": y}
    pq.write_table(pa.table({name: pa.array(column) for name, column in lists.items()}), tmp_path / "lists.parquet")
    wanted = [
        ArrowRows(tmp_path / "plain.parquet", "label", weight="w", batch_rows=64),
        ArrowRows(tmp_path / "plain.arrow", "label", weight="w", batch_rows=64),
        ArrowRows(tmp_path / "lists.parquet", "label", features=["x"], batch_rows=64),
        ArrowRows(tmp_path / "lists.parquet", "label", sparse=("i", "v"), n_features=D, batch_rows=64),
    ]
    for rows in wanted:
        for _ in range(2):  # again and again
            blocks = list(rows)
            assert max(len(block[1]) for block in blocks) <= 64
            found = [b[0].toarray() if sp.issparse(b[0]) else b[0] for b in blocks]
            np.testing.assert_array_equal(np.concatenate(found), X)
            np.testing.assert_array_equal(np.concatenate([block[1] for block in blocks]), y)
        assert rows.classes().tolist() == np.unique(y).tolist()
    assert np.concatenate([block[2] for block in wanted[0]]).tolist() == list(range(300))
    folder = tmp_path / "many"
    folder.mkdir()
    pq.write_table(plain.slice(0, 100), folder / "a.parquet")
    pq.write_table(plain.slice(100), folder / "b.parquet")
    rows = ArrowRows(folder, "label", features=[f"f{j}" for j in range(D)])
    np.testing.assert_array_equal(np.concatenate([block[0] for block in rows]), X)
    clf = AugmentReduceClassifier(random_state=0).fit_stream(rows, rows.classes())
    assert clf.classes_.tolist() == np.unique(y).tolist()
    found = convert_rows(tmp_path / "plain.parquet", tmp_path / "rows", label_column="label", ignore_columns=["w"])
    np.testing.assert_array_equal(found.X.toarray(), X)
    np.testing.assert_array_equal(found.y, y)
    assert found.feature_names == [f"f{j}" for j in range(D)]


def test_parquet_files_that_cannot_be_used(arrow, tmp_path):
    pa, pq = arrow

    def written(**columns):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    def read(path, **how):
        return list(ArrowRows(path, "y", **how))

    with pytest.raises(DataFileError, match=r"row 1, column 'x'.*null"):
        read(written(x=[1.0, None], y=[1, 2]))
    with pytest.raises(DataFileError, match=r"row 1, column 'y'.*null"):
        read(written(x=[1.0, 2.0], y=["a", None]))
    with pytest.raises(DataFileError, match="numbers"):
        read(written(x=["a", "b"], y=[1, 2]))
    with pytest.raises(DataFileError, match="one column 'y'"):
        read(written(x=[1.0, 2.0]))
    with pytest.raises(DataFileError, match="one column 'z'"):
        read(written(x=[1.0, 2.0], y=[1, 2]), features=["z"])
    with pytest.raises(DataFileError, match="feature indices from 0 to 2"):
        read(written(i=[[0], [3]], v=[[1.0], [1.0]], y=[1, 2]), sparse=("i", "v"), n_features=3)
    with pytest.raises(DataFileError, match=r"row 1.*as many feature indices"):
        read(written(i=[[0], [1, 2]], v=[[1.0], [1.0]], y=[1, 2]), sparse=("i", "v"), n_features=3)
    with pytest.raises(DataFileError, match=r"row 1, column 'x'.*one length"):
        read(written(x=[[0.0], [1.0, 2.0]], y=[1, 2]))
    with pytest.raises(ValueError, match="n_features"):
        ArrowRows(tmp_path / "a.parquet", "y", sparse=("i", "v"))
    path = written(x=[1.0] * 1000, y=[1] * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataFileError, match="whole Parquet"):
        read(path)
    (tmp_path / "text").write_text("a,b")
    for other in (tmp_path / "text", tmp_path / "none"):
        with pytest.raises(DataFileError):
            read(other)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataFileError, match="none of them"):
        read(tmp_path / "folder")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and more")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"augment-reduce\[arrow\]"):
        ArrowRows(tmp_path / "a.parquet", "y")


# ---- the command line ----


def test_the_round_with_a_folder_is_that_with_its_file(place):
    X, labels = draw(80, 1)
    svmlight(place / "test.svm", X[:, :-1], one_label(labels))  # lacks the last feature
    for name in ("one", "test"):
        summary = json.loads(done("convert", place / f"{name}.svm", place / name, "--json").stdout)
    assert summary["rows"] == 80
    assert summary["classes"] == len(np.unique(one_label(labels)))
    for source, model in (("one.svm", "a"), ("one", "b")):
        done("fit", place / source, "-o", place / model, *QUICK)
    a, b = (AugmentReduceClassifier.load(place / name) for name in "ab")
    np.testing.assert_array_equal(a.coef_, b.coef_)
    for command in (("evaluate", "--json"), ("predict", "--top", 2, "--layout", "csv")):
        said = [done(command[0], place / "a", place / name, *command[1:]).stdout for name in ("test.svm", "test")]
        assert said[0].replace("test.svm", "test") == said[1]
    assert done("fit", place / "one", "-o", place / "c", "--resume", place / "b", "--quiet").exit_code == 0
    assert "rows" in done("convert", place / "one.svm", place / "loud").stdout
    assert done("convert", place / "one.svm", place / "quiet", "--quiet").stdout == ""


def test_options_of_convert_reach_the_reader(place):
    done("convert", place / "sets.txt", place / "a", "--reduction", "all", "--min-count", 3, "--quiet")
    assert np.bincount(open_mapped(place / "a").coded.codes).min() >= 3
    done(
        "convert", place / "table.csv", place / "b", "--label-column", "f2", "--ignore-column", "label", "--keep-index"
    )
    assert open_mapped(place / "b").feature_names[0] == "index"
    done("convert", place / "numbers.svm", place / "c", "--zero-based", "--n-features", 20, "--quiet")
    assert open_mapped(place / "c").X.shape == (300, 20)


def test_what_convert_and_a_folder_refuse(place):
    assert "one label a row" in refused("convert", place / "sets.txt", place / "x")
    assert "--reduction" in refused("convert", place / "sets.txt", place / "x")
    assert "nothing there" in refused("convert", place / "none.svm", place / "x")
    done("convert", place / "one.svm", place / "rows", "--quiet")
    before = {path.name: path.read_bytes() for path in (place / "rows").iterdir()}
    message = refused("convert", place / "one.svm", place / "rows")
    assert "name a new folder" in message
    assert {path.name: path.read_bytes() for path in (place / "rows").iterdir()} == before
    assert "make it first" in refused("convert", place / "one.svm", place / "no" / "such")
    assert "as it is" in refused("fit", place / "rows", "-o", place / "m", "--reduction", "all")
    assert "--min-count" in refused("fit", place / "rows", "-o", place / "m", "--min-count", 2)
    (place / "rows" / "labels.npy").unlink()
    assert "labels.npy" in refused("fit", place / "rows", "-o", place / "m")
    (place / "empty").mkdir()
    assert "meta.json" in refused("fit", place / "empty", "-o", place / "m")
    assert not (place / "m").exists()
    assert "n-features" in run("convert", "--help").output


def test_a_model_refuses_a_folder_of_other_features(place):
    done("fit", place / "one.svm", "-o", place / "m", *QUICK)
    done("convert", place / "one.svm", place / "wide", "--n-features", D + 1, "--quiet")
    assert f"{D:,} features" in refused("evaluate", place / "m", place / "wide")
    with pytest.warns(DataFileWarning):
        table_rows = convert_rows(place / "table.csv", place / "table")
    done("fit", place / "table", "-o", place / "t", *QUICK)
    assert AugmentReduceClassifier.load(place / "t").feature_names_in_.tolist() == table_rows.feature_names
    shutil.copytree(place / "table", place / "other")
    names = [*table_rows.feature_names[1:], "new"]
    (place / "other" / "feature_names.json").write_text(json.dumps(names))
    assert "same columns" in refused("evaluate", place / "t", place / "other")


def test_a_full_disk_is_said_with_the_name_that_was_given(place, monkeypatch):
    def full(self, values):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(mapped_writer.Column, "add", full)
    message = refused("convert", place / "one.svm", place / "out", code=1)
    assert "out: No space left" in message.replace("\n", " ")
    assert not [path for path in place.iterdir() if "out" in path.name]
