"""Threads that each have a stretch of the classes: where it begins and ends, and that nobody sees it in the results."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import _cpu_team, compiled
from augment_reduce.kernels._cpu_team import TeamByClasses, even_cuts, fair_cuts


def expected_pairs(cuts, S, labels):
    """Of a row, by stretch: S classes that may be any, and its label."""
    K = cuts[-1]
    return [S * (b - a) / K + np.mean((labels >= a) & (labels < b)) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("S", [1, 20])
@pytest.mark.parametrize("power", [1, 8], ids=["even", "most are low"])
def test_stretches_have_the_same_number_of_pairs(n, S, power):
    K = 1000
    labels = (np.random.default_rng(0).random(4000) ** power * K).astype(int)
    cuts = fair_cuts(n, K, S, labels)
    assert cuts[0] == 0
    assert cuts[-1] == K
    assert len(cuts) == n + 1
    one_class = S / K + np.bincount(labels).max() / len(labels)
    assert np.abs(np.array(expected_pairs(cuts, S, labels)) - (1 + S) / n).max() <= one_class


def test_more_threads_than_classes_leave_some_without():
    cuts = fair_cuts(5, 3, 2, np.array([0, 1, 2]))
    assert cuts[0] == 0
    assert cuts[-1] == 3
    assert (np.diff(cuts) >= 0).all()
    assert (np.diff(cuts) <= 1).all()


def test_classes_go_from_the_slow_to_the_fast_and_stay_where_they_are_if_they_are_even():
    cuts = np.array([0, 500, 1000])
    assert np.array_equal(even_cuts(cuts, np.array([1.0, 1.015])), cuts)
    assert np.array_equal(even_cuts(cuts, np.array([3.0, 1.0])), [0, 417, 1000])  # half way to 333
    assert np.array_equal(even_cuts(cuts[[0, 2]], np.array([2.0])), [0, 1000])
    assert np.array_equal(even_cuts(np.array([0, 0, 1000]), np.array([0.0, 1.0])), [0, 250, 1000])
    cuts, speeds = np.array([0, 10, 20, 1000]), np.array([1.0, 2.0, 4.0])
    for _ in range(20):  # of a thread that is twice as fast as one and half as fast as another
        cuts = even_cuts(cuts, np.diff(cuts) / speeds)
    assert np.abs(np.diff(cuts) - 1000 * speeds / 7).max() <= 0.03 * 1000 / 7


def fitted(n, cuts, K, prior, dense, monkeypatch):
    """Weights after some steps by n threads that have these stretches, of rows with `prior`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 48)).astype(np.float32) * (rng.random((200, 48)) < (1.0 if dense else 0.1))
    y = rng.permutation(np.arange(200) * (K // 200))
    used, run = [], TeamByClasses.run

    def noting(self, *arguments):
        used.append((self.n, self.cuts.tolist()))
        return run(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "WORTH_THREADS", 0)
        patch.setattr(compiled, "most_threads", lambda: n)
        patch.setattr(compiled.cpu, "FEW_WEIGHTS", 0)
        patch.setattr(TeamByClasses, "run", noting)
        patch.setattr(_cpu_team, "even_cuts", lambda cuts, seconds: cuts)
        if cuts is not None:
            patch.setattr(_cpu_team, "fair_cuts", lambda *a: np.array(cuts))
        clf = AugmentReduceClassifier(
            preset="paper", batch_size=45, n_sampled_classes=7, max_iter=11, random_state=0, prior_variance=prior
        )
        clf.partial_fit(x if dense else sp.csr_matrix(x), y, classes=np.arange(K))
    assert {each[0] for each in used} == {n}
    assert cuts is None or {tuple(each[1]) for each in used} == {tuple(cuts)}
    return clf.coef_, clf.intercept_


@pytest.mark.parametrize("K", [200, 20_000], ids=["counted", "sorted"])
@pytest.mark.parametrize("prior", [None, 2.0])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "sparse"])
def test_results_do_not_depend_on_who_has_which_classes(K, prior, dense, monkeypatch):
    """Also where a thread has none, or a single one, or nearly all."""
    expected = fitted(1, None, K, prior, dense, monkeypatch)
    assert np.isfinite(expected[0]).all()
    assert (expected[0] != 0).any()
    ways = [
        (2, None),
        (2, [0, 0, K]),
        (2, [0, K, K]),
        (2, [0, 1, K]),
        (3, [0, K // 3, K // 3, K]),
        (4, [0, 5, 6, 9, K]),
    ]
    for n, cuts in ways:
        found = fitted(n, cuts, K, prior, dense, monkeypatch)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), (n, cuts)
