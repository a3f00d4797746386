"""Rows in memory-mapped files: the fits of rows in memory, without a copy of them."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.features import FeatureScaling
from augment_reduce.data import DataFileError, open_mapped, write_mapped
from augment_reduce.data import mapped as mapped_module
from augment_reduce.kernels import rows as rows_module
from augment_reduce.kernels.cpu import row_groups
from augment_reduce.kernels.rows import MappedRows, as_rows, is_mapped

N, D, K = 500, 60, 25


def sample(dtype=np.float32, n=N):
    rng = np.random.default_rng(0)
    X = sp.random(n, D, density=0.15, format="csr", random_state=1, dtype=np.float64)
    X.data = (7.0 * X.data).astype(dtype)
    X.data[X.indptr[11] : X.indptr[12]] = 0
    X.eliminate_zeros()  # a row without features
    y = ((X @ rng.normal(size=(D, K))) + rng.gumbel(size=(n, K))).argmax(1)
    return X.astype(dtype), np.array([f"c{k:02d}" for k in y])


def on_disk(folder, X, **arrays):
    """The CSR matrix of memory-mapped arrays, without going through scipy's constructor, which converts some."""
    arrays = {"data": X.data, "indices": X.indices, "indptr": X.indptr} | arrays
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        (folder / f"{name}.npy").chmod(0o400)
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in arrays}
    return mapped_module.as_csr(mapped["data"], mapped["indices"], mapped["indptr"], X.shape)


def shuffled_entries(X, rng):
    """Every row's entries in random order, and one of them in two halves."""
    data, indices, indptr = [], [], [0]
    for n in range(X.shape[0]):
        part = slice(X.indptr[n], X.indptr[n + 1])
        value, index = X.data[part], X.indices[part]
        if len(value):
            value, index = np.append(value, value[:1] / 2), np.append(index, index[:1])
            value[0] /= 2
        order = rng.permutation(len(value))
        data.append(value[order])
        indices.append(index[order])
        indptr.append(indptr[-1] + len(order))
    return np.concatenate(data), np.concatenate(indices).astype(X.indices.dtype), np.array(indptr, X.indptr.dtype)


# ---- the same fit ----

SETTINGS = [
    {"max_epochs": 3},
    {"n_sampled_classes": 8, "class_sampling": "candidates-shared", "max_epochs": 3},
    {"n_sampled_classes": 8, "local_step": "amortised", "max_epochs": 3},
    {"n_sampled_classes": 8, "class_sampling": "conditional", "model": "probit", "max_epochs": 2},
    {"n_sampled_classes": 8, "early_stopping": True, "max_epochs": 3},
    {"feature_scaling": False, "max_epochs": 2},
    {"preset": "paper", "max_epochs": 2, "n_sampled_classes": 8},
    {},  # a direct fit
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_fit_to_mapped_rows_is_that_to_rows_in_memory_bit_for_bit(settings, tmp_path):
    X, y = sample()
    M = on_disk(tmp_path, X)
    a, b = (AugmentReduceClassifier(random_state=0, n_jobs=1, **settings).fit(rows, y) for rows in (X, M))
    np.testing.assert_array_equal(a.coef_, b.coef_)
    np.testing.assert_array_equal(a.intercept_, b.intercept_)
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(M))
    assert a.log_likelihood(X, y) == b.log_likelihood(M, y)
    np.testing.assert_array_equal(a.sparsify().predict_topk(X, 3)[1], b.sparsify().predict_topk(M, 3)[1])
    assert str(a.densify().diagnose(X, y)) == str(b.densify().diagnose(M, y))


@pytest.mark.parametrize(
    "change",
    [
        lambda X: {"indices": X.indices.astype(np.int64), "indptr": X.indptr.astype(np.int64)},
        lambda X: {"indptr": X.indptr.astype(np.int64)},
        lambda X: {"indices": X.indices.astype(np.uint16), "indptr": X.indptr.astype(np.uint32)},
        lambda X: {"indices": X.indices.astype(">i4")},
        lambda X: dict(zip(("data", "indices", "indptr"), shuffled_entries(X, np.random.default_rng(0)), strict=True)),
    ],
    ids=["int64", "mixed", "unsigned", "big-endian", "unsorted and repeated"],
)
def test_however_the_entries_are_stored(change, tmp_path):
    X, y = sample()
    M = on_disk(tmp_path, X, **change(X))
    settings = {"n_sampled_classes": 8, "class_sampling": "candidates-shared", "max_epochs": 3}
    a, b = (AugmentReduceClassifier(random_state=0, n_jobs=1, **settings).fit(rows, y) for rows in (X, M))
    np.testing.assert_allclose(a.coef_, b.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(M), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.uint16, bool])
@pytest.mark.parametrize("weights", [None, "float32", "float64"])
def test_features_of_any_dtype(dtype, weights, tmp_path):
    X, y = sample()
    X.data = np.maximum(1, np.round(X.data)).astype(dtype)
    wide = X.astype(np.float64)
    settings = {"n_sampled_classes": 8, "max_epochs": 2, "dtype": weights, "random_state": 0, "n_jobs": 1}
    a, b = (AugmentReduceClassifier(**settings).fit(rows, y) for rows in (wide, on_disk(tmp_path, X)))
    np.testing.assert_array_equal(a.coef_, b.coef_)


def test_weights_of_rows_parts_of_a_stream_and_going_on(tmp_path):
    X, y = sample()
    M = on_disk(tmp_path, X)
    weight = np.random.default_rng(1).integers(0, 3, N).astype(float)
    settings = {"random_state": 0, "n_jobs": 1, "n_sampled_classes": 8, "max_epochs": 2}
    fits = [
        lambda rows: AugmentReduceClassifier(**settings).fit(rows, y, weight),
        lambda rows: AugmentReduceClassifier(**settings).partial_fit(rows, y, np.unique(y)).partial_fit(rows, y),
        lambda rows: AugmentReduceClassifier(warm_start=True, **settings).fit(rows, y).fit(rows, y),
        lambda rows: AugmentReduceClassifier(class_weight="balanced", **settings).fit(rows, y),
    ]
    for fit in fits:
        np.testing.assert_array_equal(fit(X).coef_, fit(M).coef_)


@pytest.mark.parametrize(("entries", "n_rows"), [(40, 1 << 16), (1 << 18, 7), (1, 1)])
def test_parts_of_any_size_make_the_same_facts(entries, n_rows, tmp_path, monkeypatch):
    X, _ = sample()
    weight, active = np.random.default_rng(1).random(N), np.delete(np.arange(N), [3, 77])
    plain = as_rows(X)
    monkeypatch.setattr(rows_module, "ENTRIES_AT_ONCE", entries)
    monkeypatch.setattr(rows_module, "ROWS_AT_ONCE", n_rows)
    M = as_rows(on_disk(tmp_path, X))
    assert isinstance(M, MappedRows)
    assert M.canonical
    for own in (None, weight):
        a, b = (FeatureScaling.of(rows, active, own) for rows in (plain, M))
        np.testing.assert_allclose(a.scale, b.scale, rtol=1e-12)
        np.testing.assert_allclose(a.activity, b.activity, rtol=1e-12)
        np.testing.assert_allclose(plain.agreement(active, own), M.agreement(active, own), rtol=1e-12)
        scaled = a.apply(M, M.dtype)
        np.testing.assert_allclose(scaled.largest(), a.apply(plain, plain.dtype).largest(), rtol=1e-6)
    np.testing.assert_array_equal(plain.feature_counts(active), M.feature_counts(active))
    assert plain.largest() == M.largest()
    for a, b in zip(row_groups.group_rows(plain, active), row_groups.group_rows(M, active), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_of_the_rows_is_copied_or_written(tmp_path):
    X, y = sample()
    M = on_disk(tmp_path, X)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    rows = as_rows(M)
    assert is_mapped(M)
    assert rows.values is M.data
    assert rows.indices is M.indices
    assert np.shares_memory(FeatureScaling.of(rows, np.arange(N)).apply(rows, rows.dtype).values, M.data)
    AugmentReduceClassifier(max_epochs=1, random_state=0).fit(M, y)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not is_mapped(X)
    assert not is_mapped(X.toarray())


def test_of_very_many_rows_duplicates_are_found_among_neighbours(tmp_path, monkeypatch):
    X, _ = sample()
    times = np.random.default_rng(0).integers(1, 4, N)
    Y = X[np.repeat(np.arange(N), times)]
    M, active = as_rows(on_disk(tmp_path, Y)), np.delete(np.arange(Y.shape[0]), [0, 5, 100])
    expected = row_groups.group_rows(as_rows(Y), active)
    monkeypatch.setattr(row_groups, "MOST_SORTED", 0)
    monkeypatch.setattr(rows_module, "ENTRIES_AT_ONCE", 30)
    found = row_groups.group_rows(M, active)
    for a, b in ((expected.stored, found.stored), (expected.equal, found.equal)):
        np.testing.assert_array_equal(a == row_groups.NONE, b == row_groups.NONE)
        pairs = {(i, j) for i, j in zip(a, b, strict=True) if i != row_groups.NONE}
        assert len(pairs) == len({i for i, _ in pairs}) == len({j for _, j in pairs}), "one number for the other"
    numbers = found.stored[active]
    assert numbers.max() + 1 == len(np.unique(numbers)), "numbered from 0"


# ---- memory ----

MEMORY = """
import sys, threading, time
import numpy as np
import augment_reduce
from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import open_mapped

def anonymous():
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def peak_of(fit):
    base, peak, done = anonymous(), [0], []
    def watch():
        while not done:
            peak[0] = max(peak[0], anonymous() - base)
            time.sleep(0.0005)
    thread = threading.Thread(target=watch)
    thread.start()
    clf = fit()
    done.append(True)
    thread.join()
    return peak[0], clf

for folder in sys.argv[1:]:
    def fit():
        data = open_mapped(folder)
        clf = AugmentReduceClassifier(random_state=0, n_jobs=1, n_sampled_classes=20, max_iter=60).fit(data)
        clf.log_likelihood(*data)
        return clf
    if folder == sys.argv[1]:
        fit()  # kernels and scratch buffers are there
    print(peak_of(fit)[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_does_not_grow_with_the_rows_but_for_a_few_numbers_each(tmp_path):
    """Rows of 1.6 kB, four times as many. A copy of the values or of the indices would take 800 bytes a row; half of
    that leaves room for what an allocator keeps, a megabyte or so more in one run than in another."""
    folders, sizes, nnz = [], (6_000, 24_000), 200
    rng = np.random.default_rng(0)
    for n in sizes:
        folder = tmp_path / str(n)
        indices = np.sort(rng.integers(0, 5, (n, nnz)) + 5 * np.arange(nnz), axis=1).astype(np.int32)
        data = rng.random(n * nnz, dtype=np.float32) + 0.5
        X = sp.csr_matrix((data, indices.ravel(), np.arange(0, n * nnz + 1, nnz)), shape=(n, 5 * nnz))
        write_mapped(folder, X, rng.integers(0, 100, n))
        folders.append(folder)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    small, large = map(int, result.stdout.split())
    assert large - small < 400 * (sizes[1] - sizes[0])
    assert large < 0.8 * 1600 * sizes[1]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a["data"].__setitem__(700, np.nan), "NaN: in the memory-mapped row"),
        (lambda a: a["data"].__setitem__(0, -np.inf), "infinity: in the memory-mapped row 0"),
        (lambda a: a["indices"].__setitem__(9, D), rf"n_features={D}\), found {D} in the memory-mapped row"),
        (lambda a: a["indices"].__setitem__(9, -1), r"found -1"),
        (lambda a: a["indptr"].__setitem__(5, 0), "indptr of the CSR matrix to rise"),
        (lambda a: a["indptr"].__setitem__(-1, 10**6), "indptr of the CSR matrix to rise"),
        (lambda a: a.update(data=a["data"].astype(complex)), "real numbers"),
        (lambda a: a.update(indices=a["indices"].astype(float)), "whole numbers"),
    ],
)
def test_entries_that_no_fit_can_use_are_refused_as_in_memory(change, said, tmp_path):
    X, y = sample()
    arrays = {"data": X.data.copy(), "indices": X.indices.copy(), "indptr": X.indptr.copy()}
    change(arrays)
    M = on_disk(tmp_path, X, **arrays)
    clf = AugmentReduceClassifier(max_epochs=1)
    with pytest.raises(ValueError, match=said):
        clf.fit(M, y)
    assert not hasattr(clf, "classes_")
    fitted = AugmentReduceClassifier(max_epochs=1, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match=said):
        fitted.predict(M)


def test_labels_features_and_devices_that_do_not_fit(tmp_path):
    X, y = sample()
    M = on_disk(tmp_path, X)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        AugmentReduceClassifier().fit(M, y[:-1])
    with pytest.raises(ValueError, match="requires y to be passed"):
        AugmentReduceClassifier().fit(M)
    with pytest.raises(ValueError, match="NaN"):
        AugmentReduceClassifier().fit(M, np.where(np.arange(N) == 4, np.nan, 1.0))
    with pytest.raises(ValueError, match="only one class"):
        AugmentReduceClassifier().fit(M, np.zeros(N))
    with pytest.raises(ValueError, match="features"):
        AugmentReduceClassifier(max_epochs=1).fit(X[:, :-1], y).predict(M)


# ---- folders ----


def test_a_folder_holds_rows_and_labels_of_any_kind(tmp_path):
    X, y = sample()
    kinds = {"text": y, "whole": (np.unique(y, return_inverse=True)[1] * 3 - 5), "real": np.round(X.sum(1).A1 % 3) / 2}
    for name, labels in kinds.items():
        data = write_mapped(tmp_path / name, X, labels)
        assert (data.X != X).nnz == 0
        np.testing.assert_array_equal(data.y, labels)
        assert data.y.dtype.kind == labels.dtype.kind
        assert len(data) == N
    a, b = AugmentReduceClassifier(random_state=0, max_epochs=2), AugmentReduceClassifier(random_state=0, max_epochs=2)
    data = open_mapped(tmp_path / "text")
    np.testing.assert_array_equal(a.fit(data).coef_, b.fit(*data).coef_)
    np.testing.assert_array_equal(a.classes_, b.classes_)
    np.testing.assert_array_equal(a.fit(SimpleNamespace(X=X, y=y)).coef_, b.coef_)


def test_blocks_and_dense_rows_are_written_as_they_come(tmp_path):
    X, y = sample()
    blocks = ((X[i : i + 33], y[i : i + 33]) for i in range(0, N, 33))
    for data in (write_mapped(tmp_path / "a", blocks), write_mapped(tmp_path / "b", X.toarray(), y)):
        assert (data.X != X).nnz == 0
        np.testing.assert_array_equal(data.y, y)
    without = write_mapped(tmp_path / "c", X)
    assert without.y is None
    with pytest.raises(ValueError, match="requires y to be passed"):
        AugmentReduceClassifier().fit(without)
    with pytest.raises(ValueError, match="blocks of 60 features"):
        write_mapped(tmp_path / "d", iter([(X, y), (X[:, 1:], y)]))
    assert not (tmp_path / "d").exists()


def test_rows_without_any_entry_and_classes_without_any_row(tmp_path):
    data = write_mapped(tmp_path / "a", sp.csr_matrix((6, 3), dtype=np.float32), np.array([0, 1, 2] * 2))
    assert data.X.nnz == 0
    assert AugmentReduceClassifier(max_epochs=1, random_state=0).fit(data).predict(data.X).shape == (6,)
    X, y = sample()
    write_mapped(tmp_path / "b", X, y)
    np.save(tmp_path / "b" / "labels.npy", np.where(np.arange(N) % 2, 1, 3).astype(np.int32))
    clf = AugmentReduceClassifier(max_epochs=1, random_state=0).fit(open_mapped(tmp_path / "b"))
    assert clf.classes_.tolist() == ["c01", "c03"]


def damage_array(name, change):
    def damage(folder):
        path = folder / f"{name}.npy"
        np.save(path, change(np.load(path)))

    return damage


def damage_bytes(name, change):
    def damage(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def damage_meta(**entries):
    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | entries))

    return damage


def changed(array, at, value):
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_bytes("data.npy", lambda b: b[:-3]), "bytes of its header"),
        (damage_bytes("data.npy", lambda b: b + b"1"), "bytes of its header"),
        (damage_bytes("data.npy", lambda b: b.replace(b"(4", b"(5", 1)), "meta.json says"),
        (damage_bytes("indices.npy", lambda b: b.replace(b"<i4", b"<i8", 1)), "numbers of int32"),
        (damage_bytes("indices.npy", lambda b: b.replace(b"<i4", b"|O ", 1)), "indices.npy"),
        (damage_bytes("indices.npy", lambda b: b[:60]), "as numpy.save writes it"),
        (damage_bytes("indptr.npy", lambda b: b""), "as numpy.save writes it"),
        (damage_array("indptr", lambda a: a[:-1]), "meta.json says"),
        (damage_array("indptr", lambda a: changed(a, 7, 0)), "numbers that rise from 0"),
        (damage_array("indptr", lambda a: changed(a, 0, -1)), "numbers that rise from 0"),
        (damage_array("labels", lambda a: changed(a, 13, K)), "row 13: expected numbers of labels from 0"),
        (damage_array("labels", lambda a: changed(a, 13, -1)), "row 13"),
        (damage_array("labels", lambda a: a.astype(float)), "numbers of int32"),
        (damage_array("data", lambda a: a.reshape(-1, 1)), "shape"),
        (lambda folder: (folder / "labels.npy").unlink(), r"labels.npy: expected a file .* found none"),
        (lambda folder: (folder / "classes.json").unlink(), "classes.json"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json"),
        (lambda folder: (folder / "classes.json").write_text("[1, 2]"), "list of 25 labels"),
        (lambda folder: (folder / "classes.json").write_text(json.dumps(["b"] * K)), "ascending"),
        (damage_bytes("meta.json", lambda b: b[:-5]), "JSON"),
        (damage_meta(version=99), "version 99"),
        (damage_meta(format="other"), "description"),
        (damage_meta(shape=[N]), "'shape'"),
        (damage_meta(shape=[N + 1, D]), "indptr.npy"),
        (damage_meta(shape=[-1, D]), "'shape'"),
        (damage_meta(entries=1.5), "'entries'"),
        (damage_meta(entries=3), "data.npy"),
        (damage_meta(dtypes={"data": "float32"}), "'dtypes'"),
        (damage_meta(classes_kind="object"), "'classes_kind'"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_file_is_named(damage, said, tmp_path):
    X, y = sample()
    write_mapped(tmp_path / "rows", X, y)
    damage(tmp_path / "rows")
    with pytest.raises(DataFileError, match=said):
        open_mapped(tmp_path / "rows")


def test_what_is_no_folder_of_rows(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataFileError):
            open_mapped(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFileError, match="found a file"):
        open_mapped(tmp_path / "file")


def test_an_existing_folder_is_never_replaced_and_a_failure_leaves_none(tmp_path, monkeypatch):
    X, y = sample()
    write_mapped(tmp_path / "rows", X, y)
    with pytest.raises(FileExistsError, match="name a new folder"):
        write_mapped(tmp_path / "rows", X, y)
    with pytest.raises(ValueError, match="label for each"):
        write_mapped(tmp_path / "other", X, y[:-1])
    with pytest.raises(FileNotFoundError, match="make it first"):
        write_mapped(tmp_path / "no" / "such", X, y)
    (tmp_path / "empty").mkdir()
    write_mapped(tmp_path / "empty", X, y)
    shutil.rmtree(tmp_path / "empty")
    (tmp_path / ".other-0123abcd.part").mkdir()  # of a writer that was killed
    monkeypatch.setattr(
        "augment_reduce.data.mapped_writer.Column.add", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full") as raised:
        write_mapped(tmp_path / "other", X, y)
    assert raised.value.filename == str(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]
