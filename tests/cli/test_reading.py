"""Data files on the command line: what was done with them is said, errors name options, labels may lie elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from augment_reduce import AugmentReduceClassifier
from augment_reduce.cli.wording import in_options
from tests.helpers.cli_files import QUICK, D, K, done, draw, one_label, refused, svmlight

NAMES = [f"f{j}" for j in range(D)]


def csv(path: Path, n: int, seed: int, *, index: bool = False, header: bool = True) -> Path:
    """As pandas writes it: with its index, or without, with a header, or without."""
    X, labels = draw(n, seed)
    lines = [",".join([*map(str, x), name]) for x, name in zip(X, one_label(labels), strict=True)]
    lines = [",".join([*NAMES, "kind"]), *lines] if header else lines
    if index:
        lines = [f"{'' if header and i == 0 else i - header},{line}" for i, line in enumerate(lines)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of one table, written in three ways."""
    folder = tmp_path_factory.mktemp("tables")
    for name, options in (("plain", {}), ("index", {"index": True}), ("bare", {"header": False})):
        csv(folder / f"{name}.csv", 120, 0, **options)
        result = done("fit", folder / f"{name}.csv", "-o", folder / f"{name}.model", *QUICK)
        (folder / f"{name}.said").write_text(result.stderr)
    return folder


def test_an_index_and_a_missing_header_are_said_in_one_line_and_change_nothing_else(place):
    assert (place / "plain.said").read_text() == ""
    for name, words in (("index", "left out as an index"), ("bare", "taken for a row")):
        said = (place / f"{name}.said").read_text()
        assert said.startswith("Note: ")
        assert said.count("\n") == 1
        assert f"{name}.csv" in said
        assert words in said
    assert "--keep-index" in (place / "index.said").read_text()
    assert "--header" in (place / "bare.said").read_text()
    models = [AugmentReduceClassifier.load(place / f"{name}.model") for name in ("plain", "index", "bare")]
    for model in models[1:]:
        np.testing.assert_array_equal(model.coef_, models[0].coef_)
    assert [list(getattr(m, "feature_names_in_", [])) for m in models] == [NAMES, NAMES, []]


@pytest.mark.parametrize("model", ["plain", "index"])
@pytest.mark.parametrize("options", [{}, {"index": True}])
def test_a_model_finds_its_columns_with_an_index_or_without(model, options, place, tmp_path):
    test = csv(tmp_path / "test.csv", 40, 1, **options)
    plain = csv(tmp_path / "plain.csv", 40, 1)
    expected = done("evaluate", place / "plain.model", plain, "--json").stdout
    found = done("evaluate", place / f"{model}.model", test, "--json", "--quiet").stdout
    assert json.loads(found)["log_likelihood"] == json.loads(expected)["log_likelihood"]
    one = done("predict", place / f"{model}.model", test, "--quiet").stdout
    assert one == done("predict", place / "plain.model", plain).stdout


def test_a_model_without_names_counts_columns(place, tmp_path):
    for options in ({"header": False}, {}, {"index": True}):
        test = csv(tmp_path / "test.csv", 40, 1, **options)
        result = json.loads(done("evaluate", place / "bare.model", test, "--json").stdout)
        assert result["rows"] == 40
    only = tmp_path / "only.csv"
    np.savetxt(only, draw(3, 2)[0], fmt="%d", delimiter=",")
    assert len(done("predict", place / "bare.model", only, "--no-header").stdout.splitlines()) == 3
    assert "8 feature columns" in refused("evaluate", place / "plain.model", only, "--no-header")


def test_options_overrule_what_was_guessed(tmp_path):
    data = csv(tmp_path / "i.csv", 60, 0, index=True)
    done("fit", data, "-o", tmp_path / "m", *QUICK, "--keep-index")
    assert AugmentReduceClassifier.load(tmp_path / "m").feature_names_in_[0] == ""
    assert len(done("predict", tmp_path / "m", data).stdout.splitlines()) == 60  # whose first column it wants
    assert done("fit", data, "-o", tmp_path / "m", *QUICK, "--ignore-column", "").stderr == ""
    years = tmp_path / "y.csv"
    years.write_text("2018,2019,kind\n" + "1,2,a\n2,1,b\n" * 20)
    assert "--no-header" in done("fit", years, "-o", tmp_path / "m", *QUICK).stderr
    assert list(AugmentReduceClassifier.load(tmp_path / "m").feature_names_in_) == ["2018", "2019"]
    assert done("fit", years, "-o", tmp_path / "m", *QUICK, "--header").stderr == ""


def test_labels_in_a_file_of_their_own(tmp_path):
    """X.npz and Y.npz of PECOS; a model of them is that of the same rows in one file."""
    X, labels = draw(120, 3, n_labels=2)
    sparse.save_npz(tmp_path / "X.npz", sparse.csr_matrix(X))
    sparse.save_npz(tmp_path / "Y.npz", sparse.csr_matrix(labels.astype(np.float32)))
    reading = ("--labels", tmp_path / "Y.npz", "--reduction", "all")
    done("fit", tmp_path / "X.npz", "-o", tmp_path / "m", *QUICK, *reading)
    result = json.loads(done("evaluate", tmp_path / "m", tmp_path / "X.npz", *reading, "--json").stdout)
    assert (result["rows"], result["examples"], result["classes"]) == (120, labels.sum(), K)
    np.save(tmp_path / "X.npy", X)
    np.savez(tmp_path / "both.npz", X=X, y=labels)
    done("fit", tmp_path / "both.npz", "-o", tmp_path / "same", *QUICK, "--reduction", "all")
    models = [AugmentReduceClassifier.load(tmp_path / name) for name in ("m", "same")]
    assert models[0].classes_.tolist() == models[1].classes_.tolist()
    assert len(done("predict", tmp_path / "m", tmp_path / "X.npy").stdout.splitlines()) == 120
    assert "(--labels)" in refused("fit", tmp_path / "X.npz", "-o", tmp_path / "m")
    message = refused("fit", csv(tmp_path / "t.csv", 9, 0), "-o", tmp_path / "m", *reading, "--label-column", "kind")
    assert "(--labels)" in message
    assert "(--label-column)" in message


def test_names_of_columns_and_labels_that_look_like_options_stay_as_they_are(tmp_path):
    data = tmp_path / "t.csv"
    data.write_text("label_column,max_iter,y\n1,x,u\n")
    message = refused("fit", data, "-o", tmp_path / "m")
    assert "column 'max_iter'" in message
    assert "(--ignore-column; --label-column names the label)" in message


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Say which it is (label_column).", "Say which it is (--label-column)."),
        ("read it as one (format='xml').", "read it as one (--format xml)."),
        ("If it is a row, say header=False.", "If it is a row, say --no-header."),
        ("every row's label_column, 'label_column'", "every row's --label-column, 'label_column'"),
        ("Lower learning_rate=0.5.", "Lower --learning-rate 0.5."),
        ("the format of the header is a model", "the format of the header is a model"),
        ("see zero_based.", "see --zero-based or --one-based."),
        ("Use method='augment-reduce' or 'exact'.", "Use --method augment-reduce or 'exact'."),
        ('or model="softmax".', "or --model softmax."),
    ],
)  # fmt: skip
def test_messages_name_options_in_place_of_arguments(said, shown):
    assert in_options(said) == shown


def test_a_comment_about_the_indices_counts_for_evaluation_too(tmp_path):
    X, labels = draw(60, 0)
    done("fit", svmlight(tmp_path / "a.svm", X, one_label(labels)), "-o", tmp_path / "m", *QUICK)
    few = X[:1].copy()
    few[0] = [0, 1, 0, 0, 1, 0, 0, 0]
    plain = done("predict", tmp_path / "m", svmlight(tmp_path / "b.svm", few, ["c0"])).stdout
    zero = svmlight(tmp_path / "c.svm", few, ["c0"], base=0)
    zero.write_text("# Column indices are zero-based\n" + zero.read_text())
    assert done("predict", tmp_path / "m", zero).stdout == plain
    assert done("predict", tmp_path / "m", zero, "--one-based").stdout != plain
