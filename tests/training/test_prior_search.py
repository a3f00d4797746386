"""The prior and the rate that a fit finds for itself."""

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import Adagrad, AugmentReduceClassifier
from augment_reduce.config.shape import Shape
from augment_reduce.kernels.cpu.row_groups import group_rows
from augment_reduce.kernels.rows import as_rows
from augment_reduce.training import prior_search
from augment_reduce.training.cross_validation import best_factor, losses_at

STEPS = {"batch_size": 50, "max_epochs": 20}


def text(n=1_500, D=300, K=30, strength=1.0, seed=0):
    """Rows of ten words; weights of a true softmax with that deviation."""
    generator = np.random.default_rng(seed)
    words = (D * generator.random((n, 10)) ** 2).astype(int)
    X = sp.csr_matrix((np.ones(10 * n, np.float32), words.ravel(), np.arange(0, 10 * n + 1, 10)), (n, D))
    X.sum_duplicates()
    y = (X @ (strength * generator.normal(size=(D, K))) + generator.gumbel(size=(n, K))).argmax(1)
    return X, y


def fitted(X, y, model="softmax", **settings):
    return AugmentReduceClassifier(model, random_state=0, **settings).fit(X, y)


@pytest.mark.parametrize("settings", [{}, STEPS], ids=["directly", "by steps"])
@pytest.mark.parametrize("strength", [0.2, 2.0])
def test_it_is_near_the_best_that_could_have_been_set(strength, settings):
    """By rows that chose nothing; the best of a grid over seven orders of magnitude."""
    X, y = text(strength=strength)
    train, test = slice(1_000), slice(1_000, None)
    found = fitted(X[train], y[train], **settings)
    grid = [fitted(X[train], y[train], prior_variance=10.0**e, **settings) for e in range(-4, 3)]
    best = max(clf.log_likelihood(X[test], y[test]) for clf in grid)
    assert found.log_likelihood(X[test], y[test]) > 1.03 * best


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_stronger_signals_have_weaker_priors(model):
    """And other noises the softmax's variance times the square of how large their scores are beside its."""
    fits = [fitted(*text(600, strength=strength), model, **STEPS) for strength in (0.1, 1.0, 3.0)]
    found = [clf.prior_variance_ for clf in fits]
    assert found == sorted(found)
    assert found[2] > 4.0 * found[0]
    of_softmax = fitted(*text(600, strength=1.0), **STEPS).prior_variance_
    assert found[1] / of_softmax == pytest.approx(fits[1]._fitted.found.noise_scale ** 2, rel=1e-9)


def test_a_fit_ends_where_it_would_have_ended_without_a_search():
    X, y = text(K=12)
    for settings in ({"max_iter": 400}, {"max_epochs": 10}):
        searched = fitted(X, y, batch_size=50, **settings)
        given = fitted(X, y, batch_size=50, prior_variance=1.0, **settings)
        assert searched.n_iter_ == searched.n_iter_planned_ == given.n_iter_
        assert searched.history_["iteration"][-1] == given.n_iter_


def test_one_seed_one_result_whatever_the_number_of_threads():
    X, y = text()
    fits = [fitted(X, y, n_jobs=n, **STEPS) for n in (1, 2)]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
    assert fits[0].prior_variance_ == fits[1].prior_variance_


def test_it_is_found_once(monkeypatch, tmp_path):
    X, y = text(400)
    clf = fitted(X, y, warm_start=True, **STEPS)
    found = clf.prior_variance_
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    monkeypatch.setattr(prior_search, "find", None)
    for each in (clf, back):
        each.fit(X, y)
        assert each.prior_variance_ == found
    np.testing.assert_array_equal(clf.coef_, back.coef_)


def test_what_was_set_is_not_searched(monkeypatch):
    monkeypatch.setattr(prior_search, "find", None)
    X, y = text(200)
    assert fitted(X, y, prior_variance=2.0).prior_variance_ == 2.0
    assert fitted(X, y, prior_variance=None).prior_variance_ is None
    assert fitted(X, y, preset="paper", max_iter=5).prior_variance_ is None


def test_a_rate_or_an_optimiser_that_was_set_is_kept():
    X, y = text(600)
    for settings in ({"learning_rate": 0.05}, {"optimizer": Adagrad(0.05)}, {"optimizer": "adam"}):
        clf = fitted(X, y, **settings, **STEPS)
        assert clf._fitted.found.rate == 1.0
        assert clf.prior_variance_ > 0


def test_a_rate_that_is_far_too_high_is_found_out(monkeypatch):
    """The rule's times 30: the search goes down."""
    from augment_reduce.config import defaults

    monkeypatch.setattr(prior_search, "is_small", lambda *_: False)
    rule = defaults.default_adagrad
    monkeypatch.setattr(
        defaults, "default_adagrad", lambda rate, *rest: rule(30.0 * rule(rate, *rest).learning_rate, *rest)
    )
    assert fitted(*text(), **STEPS)._fitted.found.rate < 0.5


def test_a_stream_finds_its_prior_in_the_first_part():
    X, y = text(1_200)
    clf = AugmentReduceClassifier(random_state=0)
    for part in np.split(np.arange(1_200), 4):
        clf.partial_fit(X[part], y[part], classes=np.arange(30))
        assert clf.prior_variance_ == clf._fitted.found.variance
    assert clf.n_iter_ > 0


# ---- rows to judge by ----


def every_label(n=300, K=40, seed=0):
    """Documents of ten words with one to seven labels each, every label a row."""
    generator = np.random.default_rng(seed)
    X, _ = text(n, seed=seed)
    times = generator.integers(1, 8, n)
    y = np.concatenate([generator.permutation(K)[:m] for m in times])
    return X[np.repeat(np.arange(n), times)], y, np.repeat(np.arange(n), times)


def same_groups(a, b):
    return len(np.unique(a)) == len(np.unique(b)) == len(np.unique(np.stack([a, b]), axis=1).T)


def test_labels_of_one_document_are_told_from_rows_that_agree():
    X, y, document = every_label()
    every = np.arange(len(y))
    groups = group_rows(as_rows(X), every)
    found = prior_search.documents(groups, every, y)
    assert same_groups(found, document)
    generator = np.random.default_rng(1)
    drawn = generator.integers(5, size=len(y))  # of five classes: most documents have one twice
    assert prior_search.documents(groups, every, drawn) is None
    alone = np.unique(document, return_index=True)[1]
    groups = group_rows(as_rows(X[alone]), np.arange(len(alone)))
    assert prior_search.documents(groups, np.arange(len(alone)), y[alone]) is None
    assert Shape.of(as_rows(X.toarray()), 5).groups is None
    assert prior_search.documents(None, every, y) is None


def test_documents_are_held_out_whole():
    X, y, document = every_label(1_200)
    held = []

    class Recorded(prior_search.Branches):
        def hold_out(self, active):
            held.append(super().hold_out(active))
            return held[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prior_search, "Branches", Recorded)
        patched.setattr(prior_search, "is_small", lambda *_: False)
        fitted(X, y, batch_size=50, max_epochs=8)
    kept, out = held[0]
    assert len(np.intersect1d(kept, out)) == 0
    assert len(kept) + len(out) == len(y)
    assert 0.05 * len(y) < len(out) <= 0.1 * len(y)
    assert not np.intersect1d(document[kept], document[out]).size
    assert set(y[kept]) == set(y)


def test_a_document_is_one_piece_of_evidence_however_many_rows_it_has():
    """Its rows gain and lose together: 25 times as many of them are not 25 times as much."""
    search = object.__new__(prior_search.Branches)
    generator = np.random.default_rng(0)
    gain = generator.normal(size=40)
    decided = {}
    for mean in np.linspace(0.0, 0.2, 21):
        for name, times, unit in (
            ("rows", 1, np.arange(40)), ("documents", 25, np.repeat(np.arange(40), 25)), ("many", 25, np.arange(1_000)),
        ):  # fmt: skip
            search.unit, of_row = unit, np.repeat(gain - gain.mean() + mean, times)
            decided.setdefault(name, []).append(search.is_better(3.0 - of_row, np.full(len(of_row), 3.0)))
    assert decided["documents"] == decided["rows"]
    assert sum(decided["many"]) > sum(decided["rows"]) > 0


# ---- the factor of all scores ----


def test_the_factor_corrects_scores_of_another_scale():
    generator = np.random.default_rng(0)
    psi = 2.0 * generator.normal(size=(4_000, 6))
    labels = (psi + generator.gumbel(size=psi.shape)).argmax(1)
    weight = np.ones(4_000)
    for scale in (0.25, 1.0, 4.0):
        factor, losses = best_factor(scale * psi, labels, weight)
        assert factor == pytest.approx(1.0 / scale, rel=0.08)
        np.testing.assert_allclose(losses, losses_at(factor, scale * psi, labels))
        expected = -np.log(np.exp(psi)[np.arange(4_000), labels] / np.exp(psi).sum(1)).mean()
        assert losses.mean() == pytest.approx(expected, rel=0.01)


def test_a_few_rows_that_are_told_apart_are_no_reason_for_certainty():
    psi = np.eye(3)[np.arange(9) % 3] * 5.0
    factor, _ = best_factor(psi, np.arange(9) % 3, np.ones(9))
    assert 0.5 < factor < 2.0
