"""The prior variance of a short fit, reviewed in the middle of it."""

import dataclasses

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config import defaults
from augment_reduce.training import fit as fitting
from augment_reduce.training import prior_search, review
from augment_reduce.training.review import AFTER, Review
from tests.training.test_prior_search import every_label, text


@pytest.fixture(autouse=True)
def _search_by_training(monkeypatch):
    monkeypatch.setattr(prior_search, "is_small", lambda *_: False)


SHORT = {"batch_size": 50, "max_epochs": 10, "random_state": 0}


@pytest.mark.parametrize("model", ["softmax", "probit"])
@pytest.mark.parametrize(("off", "moves"), [(1 / 64, 4.0), (64.0, 0.25)])
def test_a_variance_far_from_the_truth_is_corrected(model, off, moves, monkeypatch):
    """The weights that made the labels have variance 1."""
    X, y = text(1_500, strength=1.0)
    search = prior_search.Branches.search

    def wrong(self):
        found, judged, start = search(self)
        return dataclasses.replace(found, variance=off), judged, start

    monkeypatch.setattr(prior_search.Branches, "search", wrong)
    clf = AugmentReduceClassifier(model, **SHORT).fit(X, y)
    assert clf.prior_variance_ == pytest.approx(moves * off * clf._fitted.found.noise_scale**2)


def test_rows_that_judge_are_trained_on_after_the_review_and_not_before(monkeypatch):
    X, y = text(1_500)
    trained_on, make_problem = [], fitting.make_problem

    def recorded(fitted, settings, rows, active):
        trained_on.append((fitted.clock.iteration, active))
        return make_problem(fitted, settings, rows, active)

    monkeypatch.setattr(fitting, "make_problem", recorded)
    clf = AugmentReduceClassifier(**SHORT).fit(X, y)
    after = int(AFTER * clf.n_iter_)
    before = np.unique(np.concatenate([active for t, active in trained_on if t < after or t == 0]))
    assert 0 < 1_500 - len(before) <= 150
    assert trained_on[-1][0] == after
    np.testing.assert_array_equal(trained_on[-1][1], np.arange(1_500))
    assert clf.n_iter_ == clf.n_iter_planned_ == 300
    assert (np.diff(clf.history_["iteration"]) > 0).all()


def test_fewer_rows_judge_by_whole_documents():
    X, y, document = every_label(1_200)
    clf = AugmentReduceClassifier(**SHORT)
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Review, "pays", lambda self: bool(seen.append(self.branches)))
        clf.fit(X, y)
    (branches,) = seen
    every, n = branches.left_out, len(branches.left_out)
    branches.judge_fewer(n // 3)
    assert n // 3 <= len(branches.left_out) < n // 3 + 8
    assert not np.intersect1d(document[branches.left_out], document[branches.active]).size
    np.testing.assert_array_equal(np.union1d(branches.left_out, branches.active), np.arange(len(y)))
    assert set(branches.left_out) < set(every)
    assert len(branches.unit) == len(branches.left_out)


def test_one_seed_one_result_whatever_the_number_of_threads():
    X, y = text()
    fits = [AugmentReduceClassifier(n_jobs=n, **SHORT).fit(X, y) for n in (1, 2)]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)


def few_rows_a_class(K=200, rows=4, seed=0):
    """Rows of four of the six words of their class, and eight of any."""
    generator = np.random.default_rng(0)
    words, generator = generator.integers(600, size=(K, 6)), np.random.default_rng(seed)
    y = np.repeat(np.arange(K), rows)
    chosen = np.argsort(generator.random((K * rows, 6)), 1)[:, :4]
    X = np.zeros((K * rows, 600), np.float32)
    np.put_along_axis(X, np.take_along_axis(words[y], chosen, 1), 1.0, 1)
    np.put_along_axis(X, generator.integers(600, size=(K * rows, 8)), 1.0, 1)
    return sp.csr_matrix(X), y


def test_a_fit_that_still_learns_takes_more_steps(monkeypatch):
    """And ends with a better likelihood of other rows; not if the number of steps was set."""
    monkeypatch.setattr(defaults, "default_epochs", lambda shape: 10)
    X, y = few_rows_a_class()
    test_X, test_y = few_rows_a_class(seed=1)
    longer = AugmentReduceClassifier(batch_size=50, random_state=0).fit(X, y)
    as_set = AugmentReduceClassifier(**SHORT).fit(X, y)
    assert as_set.n_iter_ == 160
    assert longer.n_iter_ == longer.n_iter_planned_ == longer.history_["iteration"][-1] in (320, 480)
    assert longer.log_likelihood(test_X, test_y) > as_set.log_likelihood(test_X, test_y)
    easy = AugmentReduceClassifier(batch_size=50, random_state=0).fit(*text(1_500, strength=0.3))
    assert easy.n_iter_ == 300


@pytest.mark.parametrize("stop_at", [60, 120, 121, 200])
@pytest.mark.parametrize("extended", [False, True])
def test_an_interrupted_fit_ends_as_an_undisturbed_one(extended, stop_at, monkeypatch, tmp_path):
    """Before, at and after the review, through a file."""
    X, y = text()
    SHORT = {"batch_size": 50, "random_state": 0} | ({} if extended else {"max_epochs": 10})
    if extended:
        monkeypatch.setattr(defaults, "default_epochs", lambda shape: 10)
        monkeypatch.setattr(review, "EXTENSIONS", ((-1.0, 2),))
    whole = AugmentReduceClassifier(**SHORT).fit(X, y)
    assert whole.n_iter_ == (600 if extended else 300)
    train = fitting.train

    def stopped(problem, state, schedule, evaluators, progress, run, watch, stop_asked):
        return train(
            problem, state, schedule, evaluators, progress, run, watch, lambda: state.clock.iteration >= stop_at
        )

    clf = AugmentReduceClassifier(warm_start=True, **SHORT)
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "train", stopped)
        if stop_at == 120:  # while the review is under way
            patched.setattr(Review, "__call__", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                clf.fit(X, y)
        else:
            clf.fit(X, y)
    assert clf.n_iter_ == stop_at
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    back.set_params(max_iter=back.n_iter_planned_ - back.n_iter_, max_epochs=None).fit(X, y)
    np.testing.assert_array_equal(back.coef_, whole.coef_)
    assert back.prior_variance_ == whole.prior_variance_
    assert back.history_["iteration"].tolist() == whole.history_["iteration"].tolist()
