"""The order of rows, the seeds, when training stops, what the history says."""

import copy
import itertools
import time
from collections import Counter

import numpy as np
import pytest
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu.order import shuffle
from augment_reduce.local.base import Clock
from augment_reduce.training import progress
from augment_reduce.training.loop import HISTORY
from augment_reduce.training.order import Orders, epoch_order


def rows(n=300, K=6, D=4, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D))
    return X, (X @ generator.normal(size=(D, K)) + generator.gumbel(size=(n, K))).argmax(1)


def test_an_epoch_visits_every_row_once_and_epochs_differ():
    those = np.arange(0, 2000, 2)  # trained on; the others are held out, say
    a, b = epoch_order(5, 1, those), epoch_order(5, 2, those)
    assert sorted(a) == those.tolist() == list(range(0, 2000, 2))  # and `those` are as they were
    assert not np.array_equal(a, b)
    assert np.array_equal(a, epoch_order(5, 1, those))
    assert not np.array_equal(a, epoch_order(6, 1, those))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n", [40, 43])
def test_minibatches_are_those_of_their_epochs(n, grouped):
    """One after the other, forwards and back; the last one of an epoch may be short."""
    numbers = np.arange(n) // 3 if grouped else None
    expected = [epoch_order(7, epoch, np.arange(n), 8, numbers) for epoch in range(20)]
    per_epoch = -(-n // 8)
    generator, orders, done = np.random.default_rng(0), Orders(7, np.arange(n), 8, numbers), 0
    for _ in range(200):
        epoch, slot = divmod(done, per_epoch)
        assert np.array_equal(orders.minibatch(done), expected[epoch][slot * 8 : (slot + 1) * 8])
        done = done + 1 if done < 80 else int(generator.integers(0, 80))


def test_a_clock_goes_on_into_the_next_epochs():
    clock = Clock(17, 3, 1, 5)
    later = [clock.later(i) for i in range(12)]
    assert [c.iteration for c in later] == list(range(17, 29))
    assert [c.epoch for c in later] == [3] * 4 + [4] * 5 + [5] * 3
    assert [c.place for c in later] == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    assert Clock(4, 2).later(100) == Clock(104, 2)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 1001])
def test_rows_are_shuffled_by_the_numbers_of_the_reference(n):
    order, expected = np.arange(n), list(range(n))
    shuffle(7, order)
    for i, u in zip(range(n - 1, 0, -1), reference.uniforms(7, 1, max(0, n - 1))[0].tolist(), strict=True):
        j = int(u * (i + 1))
        expected[i], expected[j] = expected[j], expected[i]
    assert order.tolist() == expected


@pytest.mark.parametrize(
    ("n", "batch_size", "ways", "most"), [(4, 1, 24, 64), (4, 2, 6, 31), (5, 2, 30, 73), (3, 7, 1, 0)]
)
def test_every_way_into_minibatches_is_as_likely_as_any_other(n, batch_size, ways, most):
    """Orders of four rows; two twos; two twos and one. 1,000 epochs for each: a chi-square that is as high as that one
    time in 100,000. Within a minibatch rows ascend."""
    times = Counter(tuple(epoch_order(3, epoch, np.arange(n), batch_size).tolist()) for epoch in range(1000 * ways))
    assert len(times) == ways
    assert sum((seen - 1000) ** 2 / 1000 for seen in times.values()) <= most
    for order in times:
        assert sorted(order) == list(range(n))
        assert all(a < b for i, (a, b) in enumerate(itertools.pairwise(order), start=1) if i % batch_size)


@pytest.mark.parametrize("batch_size", [7, 100, 300, 10_000])
def test_any_batch_size_works(batch_size):
    X, y = rows()
    clf = AugmentReduceClassifier(batch_size=batch_size, max_epochs=3, random_state=0).fit(X, y)
    assert clf.n_iter_ == 3 * -(-300 // min(batch_size, 300))


def test_history_has_its_columns_and_ends_at_the_last_iteration():
    X, y = rows()
    history = AugmentReduceClassifier(max_iter=60, batch_size=50, random_state=0).fit(X, y).history_
    assert set(history) == set(HISTORY)
    assert len({len(column) for column in history.values()}) == 1
    assert history["iteration"][-1] == 60
    assert history["epoch"][-1] == 10
    assert (np.diff(history["seconds"]) >= 0).all()
    assert history["bound"][-5:].mean() > history["bound"][:5].mean()
    assert np.isfinite(history["bound_gap"][-1])
    assert history["bound_gap"][-1] >= 0


def test_early_stopping_stops_and_keeps_the_best():
    """60 rows, 40 features of noise: the fit overfits at once; the weights kept are those of the best look."""
    generator = np.random.default_rng(1)
    X, y = generator.normal(size=(60, 40)), generator.integers(3, size=60)
    clf = AugmentReduceClassifier(
        early_stopping=True,
        validation_fraction=0.3,
        max_iter=3000,
        n_iter_no_change=3,
        learning_rate=1.0,
        random_state=0,
    ).fit(X, y)
    scores = clf.history_["validation_log_likelihood"]
    scores = scores[~np.isnan(scores)]
    assert clf.n_iter_ < 3000
    assert scores[-1] < scores.max()
    from augment_reduce.training.fit import hold_out

    _, held = hold_out(np.arange(60), 0.3, clf._fitted.seed)
    assert clf.log_likelihood(X[held], y[held]) == pytest.approx(scores.max(), abs=1e-9)


def test_a_fit_that_goes_on_has_the_best_of_before_to_exceed(tmp_path):
    """It begins there, and keeps that where it finds no better; the same from a file."""
    X, y = rows()
    settings = {"early_stopping": True, "validation_fraction": 0.3, "n_iter_no_change": 3, "random_state": 0}
    clf = AugmentReduceClassifier(max_iter=300, warm_start=True, **settings).fit(X, y)
    best, kept = clf._fitted.run.best, clf.coef_.copy()
    clf.save(tmp_path / "model.safetensors")
    again = AugmentReduceClassifier.load(tmp_path / "model.safetensors")
    assert again._fitted.run.best == best
    for one in (clf, again):
        one.set_params(learning_rate=1e4, max_iter=20, warm_start=True).fit(X, y)
        assert one._fitted.run.best == best
        assert np.array_equal(one.coef_, kept)


def clf_after(clf, X, y):
    """What five more iterations of a copy of it end with."""
    return copy.deepcopy(clf).set_params(max_iter=5).fit(X, y).coef_


def test_what_an_interrupted_fit_found_best_is_not_what_another_ends_with(monkeypatch, tmp_path):
    """Early stopping, interrupted after a look; the next fit does without it, and its own weights stay."""
    import augment_reduce.training.loop as training

    X, y = rows()
    settings = {"early_stopping": True, "n_iter_no_change": 100, "warm_start": True}
    clf = AugmentReduceClassifier(max_iter=60, random_state=0, **settings)
    real, calls = training.step, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clf.fit(X, y)
    best = clf._fitted.run.best_parameters[0].clone()
    clf.save(tmp_path / "model.safetensors")
    loaded = AugmentReduceClassifier.load(tmp_path / "model.safetensors")
    for one in (clf, loaded):  # with early stopping it goes on where it stood, from a file too
        assert torch.equal(one._fitted.run.best_parameters[0], best)
    assert loaded._fitted.run.without_gain == clf._fitted.run.without_gain
    assert np.array_equal(loaded.set_params(max_iter=5).fit(X, y).coef_, clf_after(clf, X, y))
    clf.set_params(early_stopping=False, max_iter=50).fit(X, y)
    assert clf._fitted.run.best_parameters is None
    assert not torch.equal(clf._fitted.parameters.weight, best)


def test_an_interrupted_fit_keeps_what_it_learned_and_goes_on(monkeypatch):
    """Ctrl-C after 17 steps; warm_start then takes the remaining ones and ends where an undisturbed fit ends."""
    import augment_reduce.training.loop as training

    X, y = rows()
    whole = AugmentReduceClassifier(max_iter=40, random_state=0).fit(X, y)
    real, calls = training.step, []

    def interrupted(*args, **kwargs):
        if len(calls) == 17:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **kwargs)

    clf = AugmentReduceClassifier(max_iter=40, random_state=0, warm_start=True)
    monkeypatch.setattr(training, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    monkeypatch.undo()
    assert clf.n_iter_ == 17
    clf.set_params(max_iter=40 - 17).fit(X, y)
    assert np.array_equal(clf.coef_, whole.coef_)


@pytest.mark.parametrize("verbose", [0, 1])
def test_verbose_says_what_it_does(verbose, capsys):
    X, y = rows()
    AugmentReduceClassifier(max_iter=40, random_state=0, verbose=verbose).fit(X, y)
    said = capsys.readouterr().err
    assert ("model softmax" in said) == bool(verbose)
    assert ("bound" in said) == bool(verbose)


@pytest.mark.parametrize(("verbose", "patience", "said"), [(1, 0.0, True), (1, 30.0, False), (0, 0.0, False)])
def test_a_first_step_that_lasts_is_said_to_compile(verbose, patience, said, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", patience)
    with progress.TrainingProgress(3, verbose) as bar, bar.may_compile():
        time.sleep(0.2 if patience == 0.0 else 0.0)
    assert ("Compiling" in capsys.readouterr().err) is said
