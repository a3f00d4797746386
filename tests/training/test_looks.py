"""What a fit takes its time for: steps, and at most a tenth of that looks; what of it is shown."""

import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.model import predict
from augment_reduce.training import fit as fitting
from augment_reduce.training import looks, progress
from augment_reduce.training import loop as training
from augment_reduce.training.loop import SECONDS, Stopwatch
from tests.helpers.user_noises import StudentT3


def rows(n=300, K=6, D=4, seed=0, dtype=np.float64):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D)).astype(dtype)
    return X, np.concatenate([np.arange(K), generator.integers(K, size=n - K)])


def planned(X, y, **settings):
    """(plan, problem, settings) of a fit, without its steps."""
    found, train = [], fitting.train
    settings = {"prior_variance": None if "preset" in settings else 1.0} | settings

    def note(problem, state, schedule, *rest):
        found.append((schedule.plan, problem))
        return train(problem, state, schedule, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "train", note)
        resolved = []
        plan_of = looks.plan_of
        patch.setattr(
            looks, "plan_of", lambda f, p, s, *a, **k: resolved.append((s, a[0])) or plan_of(f, p, s, *a, **k)
        )
        patch.setattr(training, "step", lambda *a, **k: (_ for _ in ()).throw(StopIteration))
        with pytest.raises((StopIteration, RuntimeError)):
            AugmentReduceClassifier(random_state=0, **settings).fit(X, y)
    return *found[0], *resolved[0]


SHAPES = {
    "two rows": ((2, 2, 3), {"batch_size": 2}),
    "small": ((300, 6, 4), {"batch_size": 32}),
    "few steps": ((5_000, 150, 40), {"max_iter": 30}),
    "many steps": ((5_000, 150, 40), {"max_epochs": 30}),
    "many classes": ((6_000, 5_000, 10), {"max_epochs": 1}),
    "the paper": ((5_000, 150, 40), {"preset": "paper", "n_sampled_classes": 20, "max_iter": 500}),
    "no features": ((400, 50, 1), {"max_iter": 100_000}),
}


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic", StudentT3()], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_looks_at_the_gap_are_counted_to_take_a_tenth_of_the_steps(model, shape):
    """By operations. A look that takes next to no time comes at the end of any fit."""
    size, more = SHAPES[shape]
    X, y = rows(*size)
    plan, problem, settings, n_iter = planned(X, y, model=model, **more)
    n_looks = (
        sum(plan.looks_at_gap(t) for t in range(1, n_iter + 1)) if n_iter < 10**5 else -(-n_iter // plan.gap_every)
    )
    if not plan.gap_every:
        assert plan.gap_rows == 0
        return
    noise = problem.noise.name
    one = looks.A_LOOK.get(noise, looks.OTHER_LOOK)
    one += plan.gap_rows * size[1] * looks.A_LOOKED_AT_PAIR.get(noise, looks.OTHER_LOOKED_AT_PAIR)
    of_steps = n_iter * looks.seconds_of_step(problem, settings)
    assert n_looks <= 21
    assert n_looks * one <= max(0.105 * of_steps, looks.CHEAP)
    assert 1 <= plan.gap_rows <= min(size[0], looks.MOST_ROWS)


def test_longer_fits_are_looked_at_more_often_and_at_more_rows():
    X, y = rows(3_000, 100, 10)
    plans = [planned(X, y, model="probit", max_iter=n)[0] for n in (20, 200, 2_000, 20_000)]
    often = [plan.last // plan.gap_every if plan.gap_every else 0 for plan in plans]
    assert often == sorted(often)
    assert often[-1] > often[0]
    assert plans[-1].gap_rows > plans[0].gap_rows


def test_looks_do_not_depend_on_the_time_they_take(monkeypatch):
    """Two machines, one of them slow: the same history, but for its seconds."""
    X, y = rows()
    fits = [AugmentReduceClassifier(max_iter=300, random_state=0).fit(X, y)]
    real = looks.bound_gap_look

    def slow(*args):
        look = real(*args)
        return lambda: (time.sleep(0.02), look())[1]

    monkeypatch.setattr(looks, "bound_gap_look", slow)
    fits.append(AugmentReduceClassifier(max_iter=300, random_state=0).fit(X, y))
    for name, column in fits[0].history_.items():
        if name != "seconds":
            np.testing.assert_array_equal(column, fits[1].history_[name])


def test_every_fit_has_a_gap_at_its_end_where_that_is_cheap():
    for K, n in ((2, 20), (6, 60), (6, 300)):
        X, y = rows(n, K)
        clf = AugmentReduceClassifier(max_iter=40, random_state=0).fit(X, y)
        assert np.isfinite(clf.history_["bound_gap"][-1])


# ---- seconds ----


def test_seconds_are_those_of_training_alone(monkeypatch, tmp_path):
    """Compiling, looks and validation take their time (here: they sleep), and are shown apart."""
    X, y = rows()
    clf = AugmentReduceClassifier(
        max_iter=40, early_stopping=True, n_iter_no_change=100, random_state=0, warm_start=True
    )
    clf.fit(X, y)  # kernels are loaded
    compiled, real = [0.0], {name: getattr(looks, name) for name in ("bound_gap_look", "validation_look")}
    step, calls = training.step, []

    def sleepy(name, seconds):
        def look(*args):
            found = real[name](*args)
            return lambda: (time.sleep(seconds), found())[1]

        return look

    def first_call_compiles(*args, **kwargs):
        if not calls:
            time.sleep(0.4)
            compiled[0] += 0.4
        calls.append(1)
        return step(*args, **kwargs)

    monkeypatch.setattr(looks, "bound_gap_look", sleepy("bound_gap_look", 0.05))
    monkeypatch.setattr(looks, "validation_look", sleepy("validation_look", 0.03))
    monkeypatch.setattr(training, "compile_seconds", lambda: compiled[0])
    monkeypatch.setattr(training, "step", first_call_compiles)
    before = clf.history_["seconds"][-1]
    began = time.perf_counter()
    clf.fit(X, y)
    wall, found, history = time.perf_counter() - began, clf.fit_seconds_, clf.history_
    n = {name: int(np.isfinite(history[name][history["iteration"] > 40]).sum()) for name in history}
    assert tuple(found) == SECONDS
    assert found["compile"] == pytest.approx(0.4)
    assert found["look"] >= 0.05 * n["bound_gap"] > 0
    assert found["validate"] >= 0.03 * n["validation_log_likelihood"] > 0
    assert sum(found.values()) <= wall
    assert found["train"] <= wall - found["compile"] - found["look"] - found["validate"]
    # but for what came after the last record
    assert history["seconds"][-1] - before == pytest.approx(found["train"], abs=0.1 * found["train"] + 0.02)
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    assert back.fit_seconds_ == found
    assert back._fitted.run.seconds == clf._fitted.run.seconds


def test_a_stopwatch_counts_every_second_once(monkeypatch):
    clock, compiled = [100.0], [7.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(training, "compile_seconds", lambda: compiled[0])
    watch = Stopwatch()
    for name, seconds, of_compiling in (
        ("prepare", 2.0, 1.5),
        ("train", 3.0, 0.0),
        ("look", 0.5, 0.5),
        ("train", 1.0, 0),
    ):
        clock[0] += seconds
        compiled[0] += of_compiling
        assert watch.lap(name) == seconds - of_compiling
    assert watch.seconds == {
        "prepare": 0.5, "search": 0.0, "compile": 2.0, "train": 4.0, "validate": 0.0, "look": 0.0, "checkpoint": 0.0,
    }  # fmt: skip
    assert watch.describe() == "6.5 s: prepare 0.5 s, compile 2.0 s, train 4.0 s"


# ---- what is shown ----


def lines_of(said):
    return [line for line in said.splitlines() if line.startswith("iteration")]


@pytest.mark.parametrize("n", [2, 300])
def test_a_short_fit_prints_a_line_and_a_long_one_no_more_than_its_looks(n, capsys, monkeypatch):
    X, y = rows(n, 2)
    monkeypatch.setattr(progress, "EVERY", 1e9)  # whatever the machine is busy with
    clf = AugmentReduceClassifier(random_state=0, verbose=1, batch_size=32).fit(X, y)
    lines = lines_of(capsys.readouterr().err)
    assert len(lines) == 1
    assert f"iteration {clf.n_iter_:,} of {clf.n_iter_:,}" in lines[0]
    monkeypatch.setattr(progress, "EVERY", 0.0)
    AugmentReduceClassifier(random_state=0, verbose=1, batch_size=32).fit(X, y)
    assert 1 <= len(lines_of(capsys.readouterr().err)) <= 21


def test_a_resumed_fit_counts_on(capsys):
    X, y = rows()
    clf = AugmentReduceClassifier(max_iter=20, random_state=0, warm_start=True).fit(X, y)
    clf.set_params(verbose=1, max_iter=30).fit(X, y)
    said = capsys.readouterr().err
    assert "iteration 50 of 50" in said
    assert " s: " in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("gap", "said"), [(-1e-9, "bound gap 0.000 nat"), (0.0, "bound gap 0.000 nat"), (0.0123, "bound gap 0.012 nat")]
)
def test_a_gap_of_nothing_has_no_sign(gap, said):
    record = {"bound": -1.0, "bound_gap": gap, "validation_log_likelihood": float("nan")}
    assert progress.described(record) == f"bound -1.0000  {said}"


# ---- threads ----


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_prediction_is_bit_equal_whatever_the_number_of_threads(model, sparse, monkeypatch):
    """1,500 classes: some are interpolated; several blocks, so that threads share them."""
    X, y = rows(1_600, 1_500, 5, dtype=np.float32)
    X = sp.csr_matrix(X) if sparse else X
    clf = AugmentReduceClassifier(model, max_iter=3, random_state=0).fit(X, y)
    monkeypatch.setattr(fitting, "default_threads", lambda: 4)
    monkeypatch.setattr(predict, "SMALL_BLOCK", 1 << 12)
    some, torch_threads = X[:60], torch.get_num_threads()
    found = []
    for n_jobs in (1, 2, 4):
        torch.set_num_threads(n_jobs)
        clf.set_params(n_jobs=n_jobs)
        top = clf.predict_topk(some, 3)
        found.append([clf.predict_proba(some), clf.predict_log_proba(some), clf.decision_function(some), *top])
        found[-1].append(clf.log_likelihood(some, y[:60]))
    torch.set_num_threads(torch_threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
