"""Rows that come in blocks: the order of memory-mapped rows, and streams."""

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import write_mapped
from augment_reduce.kernels.rows import as_rows
from augment_reduce.training import order
from augment_reduce.training.order import BlockOrders, Orders, orders_of
from augment_reduce.training.stream import checked_blocks, shuffled

FAILURE_RATE = 1e-6  # chance that a right order fails; with a fixed seed it is always or never


def epoch_of(orders, epoch):
    return [orders.minibatch(epoch * orders.per_epoch + i) for i in range(orders.per_epoch)]


# ---- the order of mapped rows ----


@pytest.mark.parametrize(
    ("n", "batch", "block", "buffer"),
    [
        (1000, 32, 10, 8),
        (1000, 32, 7, 3),
        (999, 10, 1000, 1),
        (50, 64, 3, 4),
        (64, 8, 8, 2),
        (65, 8, 1, 1),
        (1, 1, 5, 2),
    ],
)
def test_every_row_comes_once_an_epoch_in_minibatches_of_one_size(n, batch, block, buffer):
    rows = np.sort(np.random.default_rng(0).choice(5 * n, n, replace=False))
    orders = BlockOrders(3, rows, min(batch, n), None, block, buffer)
    epochs = [epoch_of(orders, epoch) for epoch in range(3)]
    for minibatches in epochs:
        np.testing.assert_array_equal(np.sort(np.concatenate(minibatches)), rows)
        assert [len(m) for m in minibatches[:-1]] == [min(batch, n)] * (len(minibatches) - 1)
    if n > batch:
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))
        other = BlockOrders(4, rows, batch, None, block, buffer)
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epoch_of(other, 0)))


def test_the_order_is_found_again_at_any_iteration():
    rows = np.arange(500)
    one = BlockOrders(1, rows, 16, None, 9, 5)
    expected = [one.minibatch(done).copy() for done in range(3 * one.per_epoch)]
    for done in np.random.default_rng(0).permutation(len(expected)).tolist():
        np.testing.assert_array_equal(BlockOrders(1, rows, 16, None, 9, 5).minibatch(done), expected[done])
        np.testing.assert_array_equal(one.minibatch(done), expected[done])


def test_a_buffer_holds_a_few_blocks_that_are_read_once():
    """What is read between two reads of a block is at most the buffer, one block more where it is cut."""
    n, batch, block, buffer = 2000, 20, 25, 8
    orders = BlockOrders(0, np.arange(n), batch, None, block, buffer)
    minibatches = epoch_of(orders, 0)
    for first in range(0, len(minibatches), orders.per_buffer):
        held = np.concatenate(minibatches[first : first + orders.per_buffer]) // block
        assert len(np.unique(held)) <= buffer + 1
    where = [np.flatnonzero([(m // block == b).any() for m in minibatches]) for b in range(n // block)]
    assert sum(w[-1] - w[0] >= 2 * orders.per_buffer for w in where) == 0
    assert not np.array_equal(np.sort(minibatches[0]), np.arange(batch))


def test_blocks_meet_at_random_and_rows_of_a_buffer_too():
    """Over 400 epochs the first row is as often in each buffer, and in each minibatch of its buffer."""
    orders = BlockOrders(0, np.arange(320), 10, None, 8, 5)
    slots = [next(i for i, m in enumerate(epoch_of(orders, epoch)) if 0 in m) for epoch in range(400)]
    from scipy.stats import chisquare

    assert orders.per_epoch == 8 * orders.per_buffer
    for counts in (np.bincount(np.array(slots) // 4, minlength=8), np.bincount(np.array(slots) % 4, minlength=4)):
        assert chisquare(counts).pvalue > FAILURE_RATE


def test_rows_of_the_same_features_come_together_within_a_buffer():
    n, batch = 600, 30
    alike = np.repeat(np.arange(n // 3), 3)
    orders = BlockOrders(2, np.arange(n), batch, alike, 30, 4)
    minibatches = epoch_of(orders, 1)
    np.testing.assert_array_equal(np.sort(np.concatenate(minibatches)), np.arange(n))
    runs = sum(1 + int((np.diff(alike[m]) != 0).sum()) for m in minibatches)
    assert runs <= n // 3 + 2 * len(minibatches), "in one run, but where a minibatch or a buffer ends"


def rows_on_disk(folder, n=800, d=30, k=6):
    rng = np.random.default_rng(0)
    X = sp.random(n, d, density=0.3, format="csr", dtype=np.float32, random_state=1)
    y = (X @ rng.normal(size=(d, k)) * 4 + rng.gumbel(size=(n, k))).argmax(1)
    return write_mapped(folder, X, y), X, y


def test_rows_that_fit_a_buffer_come_as_in_memory_and_more_by_blocks(tmp_path, monkeypatch):
    data, X, _ = rows_on_disk(tmp_path / "a")
    rows = np.arange(800)
    for matrix in (data.X, X):
        assert type(orders_of(as_rows(matrix), 0, rows, 32, None)) is Orders
    monkeypatch.setattr(order, "BLOCK_BYTES", 720)  # ten rows of nine entries
    monkeypatch.setattr(order, "BUFFER_BLOCKS", 4)
    monkeypatch.setattr(order, "BUFFER_BATCHES", 2)
    found = orders_of(as_rows(data.X), 0, rows, 32, None)
    assert type(found) is BlockOrders
    assert (found.block_rows, found.per_buffer) == (10, 2)
    assert type(orders_of(as_rows(X), 0, rows, 32, None)) is Orders


@pytest.mark.parametrize("settings", [{}, {"early_stopping": True}, {"local_step": "natural-gradient"}])
def test_a_fit_by_blocks_learns_and_goes_on_bit_for_bit(settings, tmp_path, monkeypatch):
    for name, value in (("BLOCK_BYTES", 720), ("BUFFER_BLOCKS", 4), ("BUFFER_BATCHES", 2)):
        monkeypatch.setattr(order, name, value)
    data, X, y = rows_on_disk(tmp_path / "a")
    new = {"random_state": 0, "n_sampled_classes": 4, "batch_size": 32, "prior_variance": 3.0, "n_jobs": 1} | settings
    whole = AugmentReduceClassifier(max_iter=300, **new).fit(data)
    assert whole.score(X, y) > 0.9 * AugmentReduceClassifier(max_iter=300, **new).fit(X, y).score(X, y)

    from augment_reduce.training import loop

    real = loop.step

    def step(problem, state, rows, clock, **others):
        if clock.iteration == 137:
            raise KeyError
        return real(problem, state, rows, clock, **others)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", step)
        with pytest.raises(KeyError):
            AugmentReduceClassifier(max_iter=300, **new).fit(data, checkpoint=tmp_path / "c", every=50)
    resumed = AugmentReduceClassifier(max_iter=300, **new).fit(data, checkpoint=tmp_path / "c", every=50)
    np.testing.assert_array_equal(resumed.coef_, whole.coef_)


# ---- streams ----


def blocks_of(n, size, weights=False):
    X, y = np.arange(n, dtype=np.float64)[:, None], np.arange(n) % 3
    for i in range(0, n, size):
        part = slice(i, i + size)
        yield (X[part], y[part], X[part, 0]) if weights else (X[part], y[part])


@pytest.mark.parametrize(("n", "size", "buffer"), [(100, 7, 20), (100, 1, 10), (100, 100, 10), (5, 2, 50), (64, 8, 2)])
def test_a_shuffled_stream_has_every_row_once_with_its_label_and_weight(n, size, buffer):
    parts = list(shuffled(checked_blocks(blocks_of(n, size, weights=True)), buffer, seed=0))
    X = np.concatenate([part.X for part in parts])[:, 0]
    np.testing.assert_array_equal(np.sort(X), np.arange(n))
    np.testing.assert_array_equal(np.concatenate([part.y for part in parts]), X % 3)
    np.testing.assert_array_equal(np.concatenate([part.weight for part in parts]), X)
    assert max(len(part) for part in parts) <= max(buffer, size) + size
    again = list(shuffled(checked_blocks(blocks_of(n, size, weights=True)), buffer, seed=0))
    assert all(np.array_equal(a.X, b.X) for a, b in zip(parts, again, strict=True))


def test_a_buffer_mixes_what_comes_sorted():
    """Rows of one block are spread: hardly any two that were neighbours still are."""
    X = np.concatenate([part.X for part in shuffled(checked_blocks(blocks_of(2000, 50)), 500, seed=1)])[:, 0]
    assert (np.abs(np.diff(X)) == 1).mean() < 0.02
    assert np.abs(np.argsort(X) - np.arange(2000)).max() < 1999, "a buffer is no full shuffle"


def test_fit_stream_takes_blocks_of_any_kind_and_learns():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 8)).astype(np.float32)
    y = np.array([f"c{k}" for k in (3 * X[:, :5] + rng.gumbel(size=(4000, 5))).argmax(1)])
    order_of_labels = np.argsort(y, kind="stable")  # sorted within halves: a stream at its worst
    X, y = X[order_of_labels], y[order_of_labels]
    classes = np.unique(y)
    sizes = [(X[i::20], y[i::20]) for i in range(20)]
    for blocks in (sizes, [(sp.csr_matrix(a), b) for a, b in sizes], [(a, b, np.ones(len(b))) for a, b in sizes]):
        clf = AugmentReduceClassifier(random_state=0, n_jobs=1)
        for _ in range(3):
            clf.fit_stream(iter(blocks), classes, buffer_rows=1000)
        assert clf._fitted.rows_seen == 12_000
        assert clf.score(X, y) > 0.65
    again = AugmentReduceClassifier(random_state=0, n_jobs=1)
    for _ in range(3):
        again.fit_stream(blocks, classes, buffer_rows=1000)
    np.testing.assert_array_equal(again.coef_, clf.coef_)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([], "the stream has none"),
        ([(np.ones((2, 2)), [0, 1]), (np.ones((2, 3)), [0, 1])], "block 1 has 3"),
        ([(np.ones((2, 2)), [0, 1]), (sp.csr_matrix((2, 2)), [0, 1])], "sparse rows in all"),
        ([(np.ones((2, 2)), [0, 1]), (np.ones((2, 2)), [0, 1], [1, 1])], "row weights in all"),
        ([np.ones((2, 2))], "block 0 is a ndarray"),
        ([(np.ones((2, 2)),)], "block 0 is a tuple of 1"),
        ([(np.ones((2, 2)), [0])], "a label for each"),
        ([(np.ones(2), [0, 1])], "a table of rows"),
        ([(np.ones((2, 2)), [0, 1], [1])], "a weight or none"),
        ([(np.ones((2, 2)), [0, 7])], "7"),
    ],
)
def test_streams_that_are_none(blocks, said):
    with pytest.raises(ValueError, match=said):
        AugmentReduceClassifier(random_state=0).fit_stream(iter(blocks), [0, 1])
    with pytest.raises(ValueError, match="buffer_rows"):
        AugmentReduceClassifier().fit_stream(blocks, [0, 1], buffer_rows=1)


def test_empty_blocks_are_left_out():
    blocks = [(np.ones((0, 2)), []), (np.eye(2), [0, 1]), (np.ones((0, 2)), [])]
    assert AugmentReduceClassifier(random_state=0).fit_stream(blocks, [0, 1])._fitted.rows_seen == 2
