"""Candidate classes of a row's features: counted right, ranked right, and certain."""

import numba
import numpy as np
import pytest
import torch
from numba import set_num_threads
from scipy import sparse

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu import candidates as candidates_kernels
from augment_reduce.kernels.cpu import work as work_kernels
from augment_reduce.kernels.cpu.row_groups import group_rows
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import DenseRows, SparseRows, as_rows
from augment_reduce.sampling import FeatureCandidates, Minibatch, TrainingData
from augment_reduce.sampling import candidates as candidates_module


def data(n_rows=300, n_features=40, n_classes=30, seed=0):
    """Rows with one to six features, one row in ten with none, some values zero in so many words."""
    rng = np.random.default_rng(seed)
    X = sparse.random_array((n_rows, n_features), density=0.08, rng=rng, format="csr")
    X = sparse.csr_matrix(X[rng.permutation(n_rows)])
    X.data[::9] = 0.0
    X = sparse.vstack([X[: n_rows - n_rows // 10], sparse.csr_matrix((n_rows // 10, n_features))], format="csr")
    return X, np.minimum(rng.zipf(1.4, n_rows) - 1, n_classes - 1)


def studied(X, y, n_classes=30, size=8, rows=None, **settings):
    rows = np.arange(len(y)) if rows is None else rows
    sampler = FeatureCandidates(**settings).bind(np.bincount(y, minlength=n_classes), cpu.draw_without_replacement)
    sampler.prepare(TrainingData(as_rows(X), rows, y[rows]), size)
    return sampler


def minibatch(X, y, rows, n_classes=30):
    weight = torch.zeros(n_classes, X.shape[1])
    return Minibatch(as_rows(X), rows, torch.from_numpy(y[rows]), Parameters(weight, weight[:, 0], [], []), cpu, 0)


def plain_counts(X, y, n_classes=30):
    """(D, K): how often label k came with feature d."""
    return (X != 0).T.astype(int).toarray() @ np.eye(n_classes, dtype=int)[y]


def test_lists_that_are_long_enough_hold_the_counts():
    X, y = data()
    sampler = studied(X, y, per_feature=30)
    expected = plain_counts(X, y)
    expected[:, sampler.certain(8)] = 0
    found = np.zeros_like(expected)
    for d, (classes, counts) in enumerate(zip(sampler.listed, sampler.counts, strict=True)):
        found[d, classes[classes >= 0]] = counts[classes >= 0]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(sampler.seen, np.count_nonzero(X.toarray(), axis=0))


def test_short_lists_keep_whoever_is_frequent():
    """Space-Saving: a label with more than n / M of a feature's n rows is listed; no count is too low."""
    X, y = data(3000, 10, seed=1)
    sampler = studied(X, y, per_feature=4, size=1)
    true = plain_counts(X, y)
    true[:, sampler.certain(1)] = 0
    for d in range(10):
        listed = dict(zip(sampler.listed[d].tolist(), sampler.counts[d].tolist(), strict=True))
        assert set(np.flatnonzero(true[d] > true[d].sum() / 4)) <= set(listed)
        assert all(count >= true[d, k] for k, count in listed.items())
        assert sum(listed.values()) == true[d].sum()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n_own", "per_feature"), [(1, 1), (3, 4), (40, 30)])
def test_ranked_as_by_hand(n_own, per_feature, threads, monkeypatch):
    X, y = data()
    sampler = studied(X, y, n_own=n_own, per_feature=per_feature)
    rows = np.random.default_rng(1).permutation(300)[:90]
    monkeypatch.setattr("augment_reduce.kernels.cpu.work.WORTH_A_THREAD", 1)
    set_num_threads(threads)
    try:
        own, n_own_found = sampler.own(minibatch(X, y, rows), 8)
    finally:
        set_num_threads(1)
    table = np.zeros((X.shape[1], 30))
    for d, (classes, counts) in enumerate(zip(sampler.listed, sampler.counts, strict=True)):
        for k, count in zip(classes[classes >= 0], counts[classes >= 0], strict=True):
            table[d, k] = count / sampler.seen[d] / np.sqrt(np.bincount(y, minlength=30)[k])
    points = (X[rows] != 0).astype(float) @ table
    for b, n in enumerate(rows):
        points[b, sampler.certain(8)] = 0.0
        order = np.lexsort((np.arange(30), -np.round(points[b], 12)))[:n_own]
        expected = [k for k in order if points[b, k] > 0]
        assert n_own_found[b] == len(expected)
        found = own[b, : len(expected)]
        np.testing.assert_allclose(points[b, found], points[b, expected], rtol=1e-12)  # equals may change places
        assert len(set(found)) == len(found)
        assert (own[b, len(expected) :] == y[n]).all()


def test_rows_that_differ_in_their_labels_alone_are_found():
    """Whatever the order of their features, and zeros that are written down; not where a value differs."""
    indptr = np.array([0, 2, 4, 7, 9, 9, 9, 11, 13, 15])
    indices = np.array([3, 5, 5, 3, 3, 4, 5, 3, 5, 1, 2, 1, 2, 3, 5])
    values = np.array([1.0, 2.0, 2.0, 1.0, 1.0, 0.0, 2.0, 1.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    labels = np.array([7, 4, 7, 9, 1, 2, 6, 6, 0])
    certain, weight = np.zeros(10, np.bool_), np.ones(10)
    equal = group_rows(SparseRows(indptr, indices, values, 6), np.arange(8)).equal
    same = candidates_kernels.labels_of_duplicates(equal, np.arange(8), labels[:8], certain, weight, 5)
    found = [set(same.labels[same.start[g] : same.start[g + 1]]) if g >= 0 else set() for g in same.group]
    #        the same three times, another value, two without any, two of one label, one that is not trained on
    assert found == [{4, 7}, {4, 7}, {4, 7}, set(), set(), set(), set(), set(), set()]
    assert sorted(same.share) == pytest.approx([1 / 3, 2 / 3])
    assert same.most == 2
    nobody = np.empty(0, np.int64)
    assert candidates_kernels.labels_of_duplicates(equal, nobody, nobody, certain, weight, 5).most == 0
    best = candidates_kernels.labels_of_duplicates(equal, np.arange(8), labels[:8], certain, np.arange(10.0), 1)
    assert (best.labels.tolist(), best.most) == ([7], 1)  # 2/3 times 7 is more than 1/3 times 4
    certain[7] = True
    assert candidates_kernels.labels_of_duplicates(
        equal, np.arange(8), labels[:8], certain, weight, 5
    ).labels.tolist() == [4]


@pytest.mark.parametrize("n_own", [2, 12])
def test_labels_of_the_same_features_come_first(n_own):
    """Those for which n / sqrt(n_k) is largest, where there is no room; then the other candidates, once each."""
    rng = np.random.default_rng(0)
    X, y = data(n_features=12)
    X = sparse.csr_matrix(X[rng.integers(0, 60, 300)])
    sampler, n = studied(X, y, n_own=n_own, per_feature=30), np.bincount(y, minlength=30)
    rows = rng.permutation(300)[:90]
    (own, n_found), same_features = sampler.own(minibatch(X, y, rows), 8), sampler._duplicates
    sampler._duplicates = candidates_kernels.DuplicateLabels.none()
    by_features, n_by_features = sampler.own(minibatch(X, y, rows), 8)
    assert same_features.most > 2
    dense = X.toarray()
    for b, row in enumerate(rows):
        same = np.unique(y[(dense == dense[row]).all(1)])
        rivals = [k for k in same if not sampler.certain(8)[k]]
        rivals = rivals if dense[row].any() and len(same) > 1 else []
        first = own[b, : min(len(rivals), 4 * n_own)]
        points = {k: np.sum(y[(dense == dense[row]).all(1)] == k) / np.sqrt(n[k]) for k in rivals}
        best = sorted(points.values(), reverse=True)[: len(first)]
        np.testing.assert_allclose([points[k] for k in first], best, rtol=1e-12)
        others = [k for k in by_features[b, : n_by_features[b]] if k not in first][: max(0, n_own - len(rivals))]
        assert own[b, len(first) : n_found[b]].tolist()[: len(others)] == others
        assert n_found[b] <= max(n_own, len(first))


def test_the_surest_rival_leaves_no_gap_however_common_its_features():
    """Each row twice, with two rare labels, all of its features in a hundred other rows: lists of one forget them."""
    rng = np.random.default_rng(0)
    which = np.stack([rng.permutation(6)[:3] for _ in range(150)]) + 6 * np.arange(150)[:, None] % 12
    once = sparse.csr_matrix((rng.random(450) + 0.5, (np.arange(150).repeat(3), which.reshape(-1))), shape=(150, 12))
    X, y = sparse.vstack([once, once], format="csr"), rng.permutation(300)
    settings = {"n_sampled_classes": 8, "max_epochs": 40, "prior_variance": 1e3, "random_state": 0}
    clf = AugmentReduceClassifier(class_sampling=FeatureCandidates(n_own=1, per_feature=1), **settings).fit(X, y)
    gaps = clf.history_["bound_gap"][~np.isnan(clf.history_["bound_gap"])]
    alone = AugmentReduceClassifier(class_sampling=FeatureCandidates(n_own=1, per_feature=1), **settings)
    X.data[:450] += 1e-3 * rng.random(450)  # now no two rows are the same
    without = alone.fit(X, y).history_["bound_gap"]
    assert gaps[-1] < 0.5 * without[~np.isnan(without)][-1]


def test_a_class_that_is_shared_and_own_counts_once():
    own, n_own, shared = np.array([[3, 7], [5, 7], [0, 1]]), np.array([2, 1, 2]), np.array([7, 2, 5, 7, 3])
    mask, last = np.zeros((3, 5), np.bool_), np.full(8, -1, np.int32)
    candidates_kernels.mark_shared(own, n_own, shared, mask, last, np.empty(5, np.int32))
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert (last == -1).all()


def test_own_classes_are_certain_in_both_halves():
    X, y = data()
    rows = np.arange(50)
    sampled = studied(X, y, n_own=4).draw_halves(minibatch(X, y, rows), 8, generator=torch.Generator().manual_seed(0))
    assert sampled.own.shape == (50, 4)
    for half in sampled.halves:
        assert torch.equal(half.stands[-4:], torch.zeros(4))
        assert torch.equal(half.given[-4:], torch.zeros(4))
    for b in range(50):
        own, n, label = sampled.own[b], sampled.n_own[b], y[b]
        shared = sampled.classes[~sampled.mask[b, :-4]].tolist()
        assert not {*own[:n].tolist(), label} & set(shared)
        np.testing.assert_array_equal(sampled.mask[b, -4:], [k == label or p >= n for p, k in enumerate(own.tolist())])


def one_of_two(n_rows=600, n_classes=240, seed=0):
    """Two labels for every feature, half of the rows each, none frequent: the other one is all a row has to fear."""
    rng = np.random.default_rng(seed)
    feature = rng.integers(0, n_classes // 2, n_rows)
    X = sparse.csr_matrix((np.ones(n_rows), (np.arange(n_rows), feature)), shape=(n_rows, n_classes // 2))
    return X, 2 * feature + rng.integers(0, 2, n_rows)


def test_the_bound_is_tight_where_features_know_the_rival():
    """The gap, all classes summed, that eight of 240 shared classes leave: with and without candidates."""
    X, y = one_of_two()
    settings = {"n_sampled_classes": 8, "max_epochs": 30, "prior_variance": 100.0, "random_state": 0}
    gaps = {}
    for name in ("head-tail-shared", "candidates-shared"):
        history = AugmentReduceClassifier(class_sampling=name, **settings).fit(X, y).history_["bound_gap"]
        gaps[name] = history[~np.isnan(history)][-1]
    assert gaps["candidates-shared"] < 0.25 * gaps["head-tail-shared"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_heaviest_classes_of_a_feature_are_listed(dtype, threads, monkeypatch):
    """As a sort finds them: positive ones, none of the head; by several threads, and as a device finds them."""
    monkeypatch.setattr(work_kernels, "WORTH_A_THREAD", 1)
    X, y = data(n_features=150)
    weight = torch.randn(30, 150, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weight[:, 7] = -1.0  # a feature that speaks against everyone
    weight[3:, 9] = 0.0
    sampler = studied(X, y, per_feature=5)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        sampler.end_epoch(Parameters(weight, weight[:, 0], [], []), 300, 8)
    finally:
        numba.set_num_threads(before)
    free = weight.clone()
    free[torch.from_numpy(sampler.certain(8))] = -1.0
    assert sampler.certain(8).any()
    lists = [(sampler.heavy.copy(), sampler.heavy_weight.copy())]
    sampler.heavy[...], sampler.heavy_weight[...] = -1, 0
    monkeypatch.setattr(candidates_module, "WEIGHTS_AT_ONCE", 500)
    sampler._find_on_device(weight, 8, sampler.heavy, sampler.heavy_weight)
    for heavy, values in (*lists, (sampler.heavy, sampler.heavy_weight)):
        for d in range(150):
            best = [int(k) for k in free[:, d].argsort(descending=True)[:5] if free[k, d] > 0]
            assert set(heavy[d][heavy[d] >= 0]) == set(best)
            found = dict(zip(heavy[d].tolist(), values[d].tolist(), strict=True))
            assert all(found[k] == pytest.approx(float(weight[k, d])) for k in best)
        assert (heavy[7] == -1).all()


def test_rows_have_the_classes_that_weigh_most_on_them_besides():
    """Two by what labels said, two by what weights say now; a class that both name comes once, and nobody else."""
    X, y = data(n_features=40)
    sampler = studied(X, y, n_own=2, per_feature=30)
    rows = np.arange(50)
    by_labels, n_by_labels = sampler.own(minibatch(X, y, rows), 8)
    weight = torch.rand(30, 40, generator=torch.Generator().manual_seed(1))
    sampler.end_epoch(Parameters(weight, weight[:, 0], [], []), 300, 8)
    own, n_own = sampler.own(minibatch(X, y, rows), 8)
    points = (X[rows] != 0).astype(float) @ weight.numpy().T
    points[:, sampler.certain(8)] = -1.0
    met = 0
    for b in rows:
        first = by_labels[b, : n_by_labels[b]].tolist()
        mine = own[b, : n_own[b]].tolist()
        assert mine[: len(first)] == first
        heavy = [int(k) for k in np.argsort(-points[b])[:2]] if X[b].count_nonzero() else []
        assert mine[len(first) :] == [k for k in heavy if k not in first]
        met += len(first) + len(heavy) - len(mine)
    assert met > 0


def test_weights_are_looked_through_when_rows_enough_have_gone_by():
    X, y = data()
    sampler = studied(X, y)
    weight = torch.rand(30, 40)
    parameters = Parameters(weight, weight[:, 0], [], [])
    enough = -(-weight.numel() // (8 * candidates_module.A_PASS))  # rows, with |S| = 8
    sampler.end_epoch(parameters, enough - 1, 8)
    assert not len(sampler.heavy)
    sampler.end_epoch(parameters, 1, 8)
    assert (sampler.heavy >= 0).any()
    assert sampler.since == 0


def test_a_stream_goes_on_counting():
    X, y = one_of_two()
    clf = AugmentReduceClassifier(class_sampling="candidates-shared", n_sampled_classes=8, random_state=0)
    for begin in range(0, 600, 200):
        clf.partial_fit(X[begin : begin + 200], y[begin : begin + 200], classes=np.arange(240))
    assert float(clf._fitted.sampler["seen"].sum()) == 600
    again = AugmentReduceClassifier(
        class_sampling="candidates-shared", n_sampled_classes=8, warm_start=True, max_iter=3
    )
    assert float(again.fit(X, y).fit(X, y)._fitted.sampler["seen"].sum()) == 600


def test_an_index_beyond_the_features_is_told_before_anything_is_written():
    X, y = one_of_two()
    X.indices[17] = 2_000_000_000
    clf = AugmentReduceClassifier(class_sampling="candidates-shared", n_sampled_classes=8, prior_variance=None)
    with pytest.raises(ValueError, match=r"feature indices in \[0, n_features=120\), found 2000000000"):
        clf.fit(X, y)


def test_a_part_of_a_stream_without_features_forgets_nothing():
    X, y = one_of_two()
    clf = AugmentReduceClassifier(n_sampled_classes=8, class_sampling="candidates-shared", random_state=0)
    clf.partial_fit(X, y, classes=np.arange(240))
    clf.set_params(class_sampling="head-tail-shared").partial_fit(sparse.csr_matrix((2, 120)), y[:2])
    clf.set_params(class_sampling="candidates-shared").partial_fit(X[:5], y[:5])
    assert float(clf._fitted.sampler["seen"].sum()) == 605


def test_a_row_with_many_features_needs_no_more_room_than_there_are_classes():
    X = sparse.csr_matrix(np.ones((1, 4000)))
    lists = np.tile(np.arange(3, dtype=np.int32), (4000, 1)), np.ones((4000, 3), np.float32), np.ones(4000)
    csr, certain = (X.indptr, X.indices, X.data), np.zeros(3, np.bool_)
    weight = np.array([1.0, 1.0, 2.0])
    equal = group_rows(as_rows(X), np.array([0])).equal
    same = candidates_kernels.labels_of_duplicates(equal, np.array([0]), np.array([1]), certain, weight, 5)
    own, n_own = candidates_kernels.candidates_of_rows(
        csr, np.array([0]), np.array([1]), certain, lists, same, weight, 4
    )
    assert (own.tolist(), n_own.tolist()) == ([[2, 0, 1]], [3])


def test_dense_rows_are_refused_and_so_is_nothing_of_its_own():
    X, y = one_of_two()
    clf = AugmentReduceClassifier(class_sampling="candidates-shared", n_sampled_classes=8, max_iter=3)
    with pytest.raises(ValueError, match=r"expects sparse rows.*dense array.*'head-tail-shared'"):
        clf.fit(X.toarray(), y)
    with pytest.raises(ValueError, match="1 or more, found 0 and 16"):
        FeatureCandidates(n_own=0)
    with pytest.raises(TypeError, match="features of the rows"):
        FeatureCandidates().draw(torch.zeros(1), 3, generator=torch.Generator(), dtype=torch.float32)
    with pytest.raises(ValueError, match="120 features, as it was prepared for, found rows of 121"):
        studied(X, y, 240).own(minibatch(sparse.csr_matrix((600, 121)), y, np.arange(3), 240), 8)
    with pytest.raises(ValueError, match="expects sparse rows"):
        FeatureCandidates().prepare(TrainingData(DenseRows(np.ones((2, 2))), np.arange(2), np.arange(2)), 1)
