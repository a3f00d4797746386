"""Dense rows in memory-mapped files: fits equal those to rows in memory, without a copy."""

import subprocess
import sys

import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config.features import FeatureScaling
from augment_reduce.kernels import rows as rows_module
from augment_reduce.kernels.rows import DenseRows, MappedDenseRows, as_rows
from augment_reduce.training import order
from tests.data.test_mapped_rows import MEMORY

N, D, K = 400, 12, 25


def sample(dtype=np.float32):
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(N, D)) * np.geomspace(0.1, 300.0, D) + 3.0).astype(dtype)
    y = (np.log(np.abs(X) + 0.1) @ rng.normal(size=(D, K)) + rng.gumbel(size=(N, K))).argmax(1)
    return X, np.array([f"c{k:02d}" for k in y])


def on_disk(folder, X):
    np.save(folder / "X.npy", X)
    return np.load(folder / "X.npy", mmap_mode="r")


SETTINGS = [
    {"max_epochs": 3},
    {"n_sampled_classes": 8, "max_epochs": 3},
    {"n_sampled_classes": 8, "local_step": "amortised", "max_epochs": 3},
    {"n_sampled_classes": 8, "class_sampling": "conditional", "model": "probit", "max_epochs": 2},
    {"n_sampled_classes": 8, "early_stopping": True, "max_epochs": 3, "dtype": "float64"},
    {"feature_scaling": False, "max_epochs": 2, "learning_rate": 1e-3},
    {},  # a direct fit
]


@pytest.mark.parametrize(
    ("settings", "dtype"), [*((each, np.float32) for each in SETTINGS), *((each, np.float64) for each in SETTINGS[:2])]
)
def test_a_fit_to_mapped_rows_is_that_to_rows_in_memory_bit_for_bit(settings, dtype, tmp_path):
    X, y = sample(dtype)
    M = on_disk(tmp_path, X)
    a, b = (AugmentReduceClassifier(random_state=0, n_jobs=1, **settings).fit(rows, y) for rows in (X, M))
    np.testing.assert_array_equal(a.coef_, b.coef_)
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(M))
    np.testing.assert_array_equal(a.predict_topk(X, 3)[1], b.predict_topk(M, 3)[1])
    assert a.log_likelihood(X, y) == b.log_likelihood(M, y)
    assert str(a.diagnose(X, y)) == str(b.diagnose(M, y))


@pytest.mark.parametrize("at_once", [1, 100, 10**6])
def test_parts_of_any_size_make_the_same_facts(at_once, tmp_path, monkeypatch):
    X, _ = sample(np.float64)
    monkeypatch.setattr(rows_module, "NUMBERS_AT_ONCE", at_once)
    plain, mapped, active = DenseRows(X), as_rows(on_disk(tmp_path, X)), np.delete(np.arange(N), [3, 77])
    assert isinstance(mapped, MappedDenseRows)
    scaling = FeatureScaling.of(plain, active)
    np.testing.assert_array_equal(scaling.scale, FeatureScaling.of(mapped, active).scale)
    for a, b in ((plain, mapped), (scaling.apply(plain, plain.dtype), scaling.apply(mapped, mapped.dtype))):
        assert a.largest() == b.largest()
        assert a.n_nonzero == b.n_nonzero
        np.testing.assert_array_equal(a.feature_counts(active), b.feature_counts(active))
        np.testing.assert_array_equal(a.block(active), b.block(active))
        np.testing.assert_array_equal(a.values[:5] if a is plain else a.block(np.arange(5)), b.block(np.arange(5)))
        np.testing.assert_allclose(a.agreement(active), b.agreement(active), rtol=1e-12)
    assert np.shares_memory(scaling.apply(mapped, mapped.dtype).values, mapped.values)


def test_larger_files_are_shuffled_by_blocks_and_each_row_comes_once(tmp_path, monkeypatch):
    X, y = sample()
    monkeypatch.setattr(order, "BLOCK_BYTES", 10 * X[0].nbytes)
    monkeypatch.setattr(order, "BUFFER_BLOCKS", 4)
    monkeypatch.setattr(order, "BUFFER_BATCHES", 1)
    orders = order.orders_of(as_rows(on_disk(tmp_path, X)), 0, np.arange(N), 16, None)
    assert isinstance(orders, order.BlockOrders)
    assert orders.block_rows == 10
    rows = np.concatenate([orders.minibatch(i) for i in range(orders.per_epoch)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(N))
    assert isinstance(order.orders_of(as_rows(X), 0, np.arange(N), 16, None), order.Orders)
    settings = {"random_state": 0, "n_sampled_classes": 8, "max_epochs": 5, "prior_variance": 1.0}
    a, b = (AugmentReduceClassifier(**settings).fit(rows, y) for rows in (X, on_disk(tmp_path, X)))
    assert abs(a.log_likelihood(X, y) - b.log_likelihood(X, y)) < 0.05  # a different order of rows


def test_other_arrays_and_devices(tmp_path):
    X, y = sample()
    for other in (np.asfortranarray(X), X.astype(np.int64)):  # loaded into memory
        clf = AugmentReduceClassifier(max_epochs=1, random_state=0, n_sampled_classes=8)
        found = clf.fit(on_disk(tmp_path, other), y).coef_
        np.testing.assert_array_equal(found, clf.fit(np.array(other), y).coef_)
    with_nan = X.copy()
    with_nan[7, 3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        AugmentReduceClassifier(max_epochs=1).fit(on_disk(tmp_path, with_nan), y)


DENSE = MEMORY.replace(
    "data = open_mapped(folder)", "data = np.load(folder + '/X.npy', mmap_mode='r'), np.load(folder + '/y.npy')"
).replace(".fit(data)", ".fit(*data)")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_does_not_grow_with_the_rows_but_for_a_few_numbers_each(tmp_path):
    """Rows of 2.4 kB, four times as many: a copy would add 18,000 rows. The limit is a quarter of that, for labels,
    order and memory that the allocator keeps."""
    folders, sizes, rng = [], (6_000, 24_000), np.random.default_rng(0)
    for n in sizes:
        folder = tmp_path / str(n)
        folder.mkdir()
        np.save(folder / "X.npy", rng.random((n, 600), dtype=np.float32))
        np.save(folder / "y.npy", rng.integers(0, 100, n))
        folders.append(folder)
    assert "X.npy" in DENSE
    assert ".fit(*data)" in DENSE
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DENSE, *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    small, large = map(int, result.stdout.split())
    assert large - small < 600 * (sizes[1] - sizes[0])
