"""The named datasets: found, checked, downloaded, preprocessed."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from augment_reduce.data import (
    DATASETS,
    PAPER_SHAPES,
    DataFileError,
    DatasetNotFoundError,
    cache_folder,
    download,
    load_dataset,
    random_like,
)
from augment_reduce.data.datasets import choose_per_class, divide_by_training_maximum
from augment_reduce.data.registry import HOMES
from tests.helpers import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not on this machine")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """No data folder set, and an empty cache."""
    monkeypatch.delenv("AUGMENT_REDUCE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put(root: Path, name: str, contents: str | bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


# --- preprocessing ----------------------------------------------------------------------------------------------------


def test_eurlex_is_scaled_by_the_training_maximum_and_reduced_to_first_labels(tmp_path):
    put(tmp_path, "eurlex-4k/train.txt", "3 4 5\n1,2 0:4 1:0.5\n3 0:1 2:-2\n2,4 1:0.25\n")
    put(tmp_path, "eurlex-4k/test.txt.gz", gzip.compress(b"4 4 5\n3 0:8 3:7\n0,1 0:1\n2 2:6\n1 1:1\n"))
    dataset = load_dataset("eurlex-4k", tmp_path)
    assert dataset.test is not None
    X, y = dataset.train
    np.testing.assert_array_equal(X.toarray(), [[1, 1, 0, 0], [0.25, 0, -2, 0], [0, 0.5, 0, 0]])
    assert dataset.class_names == ["1", "2", "3"]
    assert y.tolist() == [0, 2, 1]
    X, y = dataset.test  # the row with first label 0 is gone; features never positive in training stay as they are
    np.testing.assert_array_equal(X.toarray(), [[2, 0, 0, 7], [0, 0, 6, 0], [0, 2, 0, 0]])
    assert y.tolist() == [2, 1, 0]
    assert dataset.statistics() == {"n_train": 3, "n_test": 3, "n_features": 4, "n_classes": 3}
    assert dataset.relevant(dataset.train).toarray().tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert dataset.relevant(dataset.test).shape == (4, 3)  # the rows as they are in the file
    pairs = load_dataset("eurlex_4k", tmp_path / "eurlex-4k", reduction="all")
    assert len(pairs.train) == 5


def test_training_maximum_in_place():
    train, test = sparse.csr_matrix(np.float32([[2, 0, 3]])), sparse.csr_matrix(np.float32([[1, 5, 6]]))
    divide_by_training_maximum(train, test)
    np.testing.assert_array_equal(train.toarray(), [[1, 0, 1]])
    np.testing.assert_array_equal(test.toarray(), [[0.5, 5, 2]])


@pytest.mark.parametrize(
    ("name", "n_rows", "n_features", "n_labels"),
    [("eurlex-4k", 15_539, 5_000, 3_993), ("amazoncat-13k", 1_186_239, 203_882, 13_330)],
)
def test_files_with_the_headers_of_the_large_sets(tmp_path, name, n_rows, n_features, n_labels):
    rows = [f"{i % n_labels} {i % (n_features - 9)}:0.5 {n_features - 1}:2\n" for i in range(20_000)]
    body = "".join(rows) * (n_rows // len(rows)) + "".join(rows[: n_rows % len(rows)])
    put(tmp_path, f"{name}/train.txt", f"{n_rows} {n_features} {n_labels}\n{body}")
    put(tmp_path, f"{name}/test.txt", f"1 {n_features} {n_labels}\n7 0:1\n")
    dataset = load_dataset(name, tmp_path)
    assert dataset.statistics() == {
        "n_train": n_rows, "n_test": 1, "n_features": n_features, "n_classes": min(n_labels, n_rows)
    }  # fmt: skip
    assert dataset.train.X.nnz == 2 * n_rows
    assert dataset.train.X.data.max() == 1.0


def test_choose_per_class_takes_so_many_of_each():
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(7), 20))
    mask = choose_per_class(y, 7, 16, seed=3)
    assert np.bincount(y[mask]).tolist() == [16] * 7
    np.testing.assert_array_equal(mask, choose_per_class(y, 7, 16, seed=3))
    assert (mask != choose_per_class(y, 7, 16, seed=4)).any()


def test_synthetic_is_the_generator_of_section_4_1():
    dataset = load_dataset("synthetic", seed=1)
    X, y = dataset.train
    assert X.shape == (300_000, 0)
    assert 8_950 < dataset.n_classes < 9_120  # the paper got 9,035; the spread between seeds is about 20
    assert y.max() == dataset.n_classes - 1
    assert np.bincount(y).min() >= 1
    p = dataset.probabilities
    assert p is not None
    assert 0.997 < p.sum() < 1
    # p_k ∝ u²: K Σ p² → E u⁴ / (E u²)² = 9/5 (u itself would give 4/3, u³ 16/7)
    assert 10_000 * (p**2).sum() == pytest.approx(9 / 5, rel=0.05)
    frequencies = np.bincount(y) / len(y)
    assert np.abs(frequencies - p).mean() == pytest.approx(1.4e-5, rel=0.2)  # sampling error alone
    np.testing.assert_array_equal(y, load_dataset("synthetic", seed=1).train.y)
    assert dataset.test is None


def test_wordnet_layout_in_miniature(tmp_path):
    put(tmp_path, "wordnet_glosses/train.txt", "a b a\nc a b\n")
    put(tmp_path, "wordnet_glosses/valid.txt", "a z\n")
    put(tmp_path, "wordnet_glosses/test.txt.gz", gzip.compress(b"\nc\n"))
    text = load_dataset("wordnet-glosses", tmp_path, verify=False)
    assert text.vocabulary == ["<unk>", "a", "b", "c"]
    assert text.train.ids.tolist() == [1, 2, 1, 3, 1, 2]
    assert [text.train.line(i).tolist() for i in range(text.train.n_lines)] == [[1, 2, 1], [3, 1, 2]]
    assert text.words(text.validation.ids) == ["a", "<unk>"]
    assert text.test.n_lines == 2
    assert load_dataset("wordnet-glosses", tmp_path, verify=False, min_count=2).vocabulary == ["<unk>", "a", "b"]


# --- where files are looked for ---------------------------------------------------------------------------------------


def test_debian_deps_is_in_the_package():
    dataset = load_dataset("debian-deps", download=False)
    assert dataset.statistics() == {"n_train": 220_019, "n_test": 51_532, "n_features": 21_494, "n_classes": 31_298}
    assert dataset.feature_names is not None
    assert len(dataset.feature_names) == 21_494
    assert dataset.train.original is not None
    libc6 = dataset.class_names.index("libc6")
    assert int(dataset.train.original.labels[:, libc6].sum()) == 17_434
    frequent = load_dataset("debian_deps", min_count=5)
    assert frequent.n_classes == 5_694
    assert np.bincount(frequent.train.y).min() == 5
    assert frequent.test is not None
    assert int(frequent.relevant(frequent.test).sum()) == len(frequent.test)


def test_search_order(tmp_path, monkeypatch):
    """The path given, the environment variable, the cache: each hides the next."""
    places = [tmp_path / "given", tmp_path / "environment", cache_folder()]
    monkeypatch.setenv("AUGMENT_REDUCE_DATA", str(places[1]))
    for count, root in enumerate(reversed(places), start=1):
        put(root, "eurlex-4k/train.txt", f"{count} 2 2\n" + "0 0:1\n" * count)
        put(root, "eurlex-4k/test.txt", "1 2 2\n0 0:1\n")
        path = places[0] if root == places[0] else None
        assert len(load_dataset("eurlex-4k", path).train) == count


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("synthetic", "debian-deps")])
def test_a_missing_dataset_says_what_to_get_and_where_to_put_it(tmp_path, name):
    with pytest.raises(DatasetNotFoundError) as caught:
        load_dataset(name, tmp_path, download=False)
    message = str(caught.value)
    home = HOMES[name]
    assert home.page in message
    assert str(tmp_path) in message
    assert str(cache_folder() / home.folders[0]) in message
    assert "AUGMENT_REDUCE_DATA" in message
    assert any(file.names[0] in message for file in home.files.values())


def test_bad_requests(tmp_path):
    with pytest.raises(ValueError, match=r"a dataset among mnist.*'bibtext'\. Did you mean 'bibtex'"):
        load_dataset("bibtext")
    with pytest.raises(DatasetNotFoundError, match="found no folder there"):
        load_dataset("mnist", tmp_path / "absent")
    with pytest.raises(ValueError, match="no reduction"):
        load_dataset("mnist", reduction="first")
    with pytest.raises(ValueError, match="min_count"):
        load_dataset("debian-deps", min_count=0)
    with pytest.raises(ValueError, match="a reduction among"):
        load_dataset("debian-deps", reduction="some")
    dataset = load_dataset("synthetic")
    with pytest.raises(ValueError, match="has one label a row"):
        dataset.relevant(dataset.train)


def test_an_altered_file_is_refused(tmp_path):
    source = Path(download.__file__).parent / "debian_deps"
    for file in source.glob("*.gz"):
        put(tmp_path, f"debian_deps/{file.name}", file.read_bytes())
    text = gzip.decompress((source / "debian_deps_test.txt.gz").read_bytes())
    put(tmp_path, "debian_deps/debian_deps_test.txt.gz", gzip.compress(text, 1))  # packed otherwise: the same data
    assert len(load_dataset("debian-deps", tmp_path).train) == 220_019
    altered = put(
        tmp_path, "debian_deps/debian_deps_test.txt.gz", gzip.compress(text.replace(b" 0:1 ", b" 0:2 ", 1), 1)
    )
    with pytest.raises(DataFileError, match=r"the sha256 c5718abc.*cut short or altered.*verify=False"):
        load_dataset("debian-deps", tmp_path)
    assert len(load_dataset("debian-deps", tmp_path, verify=False).train) == 220_019
    altered.write_bytes(gzip.compress(text, 1)[:-1000])
    with pytest.raises(DataFileError, match="cut short"):
        load_dataset("debian-deps", tmp_path)


def test_cache_folder_by_platform(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "augment-reduce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for platform, folder in {"linux": ".cache/augment-reduce", "darwin": "Library/Caches/augment-reduce"}.items():
        monkeypatch.setattr(download.sys, "platform", platform)
        assert cache_folder() == tmp_path / folder
    monkeypatch.setattr(download.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "augment-reduce" / "Cache"


# --- the real files ---------------------------------------------------------------------------------------------------

REAL = {
    "mnist": (60_000, 10_000, 784, 10),
    "omniglot": (25_968, 6_492, 784, 1_623),
    "bibtex": (4_880, 2_512, 1_836, 146),
}


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_datasets_have_the_expected_statistics(name):
    dataset = load_dataset(name, DATA, download=False)
    assert tuple(dataset.statistics().values()) == REAL[name]
    assert dataset.test is not None
    X, y = dataset.train
    assert X.dtype == np.float32
    assert X.max() == 1.0
    assert X.min() == 0.0
    assert len(np.unique(y)) == dataset.n_classes
    assert np.isin(dataset.test.y, y).all()
    assert len(dataset.class_names) == dataset.n_classes


@needs_data
def test_mnist_contents():
    dataset = load_dataset("mnist", DATA)
    assert np.bincount(dataset.train.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert float(dataset.train.X.mean()) == pytest.approx(0.1306604, abs=1e-6)  # the well-known mean pixel


@needs_data
def test_omniglot_split_takes_16_of_each_class_by_seed():
    one, other = load_dataset("omniglot", DATA, seed=1), load_dataset("omniglot", DATA, seed=2)
    assert one.test is not None
    assert set(np.bincount(one.train.y)) == {16}
    assert set(np.bincount(one.test.y)) == {4}
    assert not np.array_equal(one.test.X, other.test.X if other.test is not None else None)
    everything = np.concatenate([one.train.X, one.test.X])
    assert float(everything.mean()) * 255 == pytest.approx(21.427, abs=5e-4)


@needs_data
def test_omniglot_splits_by_people_without_a_seed():
    """Rows are ordered by class, then by who drew them: of every 20 the last 4 are for testing."""
    data = load_dataset("omniglot", DATA, seed=None)
    assert data.train.X.shape == (25_968, 784)
    np.testing.assert_array_equal(data.test.y, np.repeat(np.arange(1_623), 4))
    with np.load(DATA / "omniglot" / "omniglot_28x28.npz") as z:
        np.testing.assert_array_equal(data.test.X[:4], z["images"][16:20].reshape(4, -1) / np.float32(255))
    with pytest.raises(ValueError, match="only Omniglot knows"):
        load_dataset("synthetic", seed=None)


@needs_data
def test_wordnet_glosses_statistics():
    text = load_dataset("wordnet-glosses", DATA)
    assert (len(text.train), len(text.validation), len(text.test)) == (1_525_191, 88_346, 86_738)
    assert (text.train.n_lines, text.validation.n_lines, text.test.n_lines) == (105_694, 6_026, 5_939)
    assert text.n_classes == 53_775 + 1
    assert (text.test.ids == 0).mean() == pytest.approx(0.014, abs=1e-3)
    counts = np.bincount(text.train.ids)
    assert counts[0] == 0
    assert (np.diff(counts[1:]) <= 0).all()  # most frequent first
    assert (counts >= 2).sum() == 33_452


# --- random data of the same shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER_SHAPES)
def test_random_data_have_the_shape_and_repeat(name):
    shape, n_rows = PAPER_SHAPES[name], 4_000
    one, again, other = random_like(name, 0, n_rows), random_like(name, 0, n_rows), random_like(name, 1, n_rows)
    X, y = one.train
    assert X.shape == (n_rows, shape.n_features)
    assert one.n_classes == shape.n_classes
    assert len(np.unique(y)) == shape.n_classes
    assert isinstance(X, np.ndarray) == shape.dense
    csr = sparse.csr_matrix(X)
    assert (np.diff(csr.indptr) == shape.nonzeros).all()
    assert (np.diff(csr.indices.reshape(n_rows, -1), axis=1) > 0).all()  # ascending and distinct in every row
    assert csr.data.min() > 0
    assert (csr != sparse.csr_matrix(again.train.X)).nnz == 0
    np.testing.assert_array_equal(y, again.train.y)
    assert (csr != sparse.csr_matrix(other.train.X)).nnz > 0
    assert "timing only" in one.notes[0]
    assert one.test is None


def test_random_features_follow_zipf():
    """Ranks r to 2 r take the share log 2 / log(D + 1) of a row's 71 features, whatever r (beyond the very first)."""
    X = random_like("amazoncat-13k", 0, 20_000).train.X
    counts = np.sort(np.bincount(X.indices, minlength=X.shape[1]))[::-1] / 20_000
    expected = 71 * np.log(2) / np.log(203_883)
    for start in (100, 1_000, 10_000):
        assert counts[start : 2 * start].sum() == pytest.approx(expected, rel=0.1)
    assert counts[0] <= 1.0


def test_random_rows_fewer_than_classes():
    assert len(np.unique(random_like("omniglot", 0, 100).train.y)) == 100
    with pytest.raises(ValueError, match="a name among mnist"):
        random_like("cifar")
    with pytest.raises(ValueError, match="n_rows of at least 1"):
        random_like("mnist", 0, 0)


def test_a_prepared_omniglot_that_is_none_is_refused_by_name(tmp_path):
    from augment_reduce.data.datasets import prepared_omniglot

    whole = {
        "images": np.zeros((2, 28, 28), np.uint8), "labels": np.array([0, 1]), "sample": np.array([1, 1]),
        "alphabet": np.array([0, 0]), "character": np.array([1, 2]), "alphabet_names": np.array(["Greek"]),
    }  # fmt: skip
    path = tmp_path / "omniglot_28x28.npz"
    np.savez(path, **whole)
    assert prepared_omniglot(path).alphabet_names == ["Greek"]
    for name, other, message in (
        ("labels", np.array([0]), "each of the drawings"),
        ("images", np.zeros((2, 784)), "whole numbers for each"),
        ("alphabet", np.array([0, 1]), "'alphabet': expected numbers below 1"),
        ("sample", None, "an array 'sample'"),
    ):
        np.savez(path, **{k: v for k, v in (whole | {name: other}).items() if v is not None})
        with pytest.raises(DataFileError, match=message):
            prepared_omniglot(path)
