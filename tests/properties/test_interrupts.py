"""However a fit is left, the model goes on exactly from there, or says that it cannot."""

import ctypes
import signal
import sys
import threading
import time
import unittest.mock
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import augment_reduce.training.loop as training
from augment_reduce import AugmentReduceClassifier
from augment_reduce.training import interrupts
from augment_reduce.training import step as vem
from augment_reduce.training.interrupts import Worker, run_whole
from augment_reduce.training.loop import Plan

PACKAGE = training.__file__.rpartition("training")[0]


def rows(n=240, K=12, D=30, seed=0):
    generator = np.random.default_rng(seed)
    X = sp.random(n, D, density=0.2, random_state=1, format="csr", dtype=np.float32)
    return X, np.concatenate([np.arange(K), generator.integers(K, size=n - K)])


FITS = {
    "all classes": {},
    "probit": {"model": "probit"},
    "early stopping": {"early_stopping": True, "n_iter_no_change": 100, "validation_fraction": 0.3},
    "runs": {"class_sampling": "head-tail-shared", "n_sampled_classes": 6},
    "lists of features": {"class_sampling": "candidates-shared", "n_sampled_classes": 6, "max_iter": 90},
    "a sampler that learns": {"class_sampling": "cache-shared", "n_sampled_classes": 6},
    "amortised": {"local_step": "amortised", "n_sampled_classes": 3, "model": "logistic"},
    "paper": {"preset": "paper", "n_sampled_classes": 4, "max_iter": 90},
    "float64": {"dtype": "float64", "optimizer": "adam", "prior_variance": None},
}
each_fit = pytest.mark.parametrize("settings", FITS.values(), ids=FITS)


def classifier(**settings):
    return AugmentReduceClassifier(
        **{"max_iter": 60, "batch_size": 32, "random_state": 3, "warm_start": True} | settings
    )


def numbers(clf):
    """All that a fit leaves but its seconds."""
    fitted = clf._fitted
    parameters, run = fitted.parameters, fitted.run
    found = {f"history {name}": torch.tensor(column) for name, column in run.history.items() if name != "seconds"}
    found |= {f"q {name}": value for name, value in fitted.local.items()}
    found |= {f"sampler {name}": value for name, value in fitted.sampler.items()}
    found |= {f"state {i}": s for i, s in enumerate([*parameters.weight_state, *parameters.bias_state])}
    left = torch.tensor([fitted.clock.iteration, fitted.rows_seen, run.window.rows, run.without_gain, run.best])
    return found | {"weight": parameters.weight, "bias": parameters.bias, "left": left}


def assert_equal(found, expected):
    found, expected = numbers(found), numbers(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].nan_to_num(-7.0), value.nan_to_num(-7.0)), name


def resumed(clf, X, y, tmp_path, to):
    """The rest of the fit, from a file."""
    clf.save(tmp_path / "model.safetensors")
    clf = AugmentReduceClassifier.load(tmp_path / "model.safetensors")
    assert clf.n_iter_planned_ in (to, clf.n_iter_)
    return clf.set_params(max_iter=to - clf.n_iter_).fit(X, y) if clf.n_iter_ < to else clf


def interrupt_after(monkeypatch, call, what, times=1):
    """`what()` in the training thread when it has taken so many steps."""
    real, calls = training.step, []

    def step(*args, **kwargs):
        found = real(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            for _ in range(times):
                what()
        return found

    monkeypatch.setattr(training, "step", step)


class Preempted(Exception):
    """What a handler of SIGTERM may raise, or a tool that stops a cell."""


def asynchronous():
    thread = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Preempted))


def by_signal(number):
    def send():
        signal.pthread_kill(threading.main_thread().ident, number)
        time.sleep(0.01)  # so that two are not taken for one

    return send


@pytest.fixture
def sigterm_raises():
    def raises(*_):
        raise Preempted

    before = signal.signal(signal.SIGTERM, raises)
    yield
    signal.signal(signal.SIGTERM, before)


WAYS = {
    "Ctrl-C": (by_signal(signal.SIGINT), KeyboardInterrupt, 1),
    "Ctrl-C twice": (by_signal(signal.SIGINT), KeyboardInterrupt, 2),
    "SIGTERM": (by_signal(signal.SIGTERM), Preempted, 1),
    "SIGTERM five times": (by_signal(signal.SIGTERM), Preempted, 5),
    "asynchronous": (asynchronous, Preempted, 1),
}


@each_fit
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.usefixtures("sigterm_raises")
def test_an_exception_in_the_caller_falls_between_two_steps(settings, way, monkeypatch, tmp_path):
    X, y = rows()
    what, expected, times = way
    monkeypatch.setattr(interrupts, "FORCE_AFTER", 1e9)  # however long this machine takes for a step
    whole = classifier(**settings).fit(X, y)
    for call in (1, 5):
        clf = classifier(**settings)
        with monkeypatch.context() as patch:
            interrupt_after(patch, call, what, times)
            with pytest.raises(expected):
                clf.fit(X, y)
        assert not clf._fitted.torn
        assert 0 < clf.n_iter_ <= clf.n_iter_planned_ == whole.n_iter_planned_
        assert_equal(resumed(clf, X, y, tmp_path, whole.n_iter_), whole)


def test_whoever_insists_has_the_exception_raised_in_the_step(monkeypatch, tmp_path):
    """A step that does not end: the second Ctrl-C reaches it, and the model says that it is torn."""
    X, y = rows()
    monkeypatch.setattr(interrupts, "FORCE_AFTER", 0.0)
    clf = classifier()

    def never_ends():
        for _ in range(3):
            by_signal(signal.SIGINT)()
        while True:
            time.sleep(0.001)

    interrupt_after(monkeypatch, 3, never_ends)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    monkeypatch.undo()
    assert clf._fitted.torn
    with pytest.warns(RuntimeWarning, match="in the middle of a step"):
        clf.save(tmp_path / "torn.safetensors")
    back = AugmentReduceClassifier.load(tmp_path / "torn.safetensors")
    with pytest.warns(RuntimeWarning, match=r"Going on.*does not end where an undisturbed fit"):
        back.fit(X, y)
    assert back._fitted.torn  # for ever
    assert not back.set_params(warm_start=False).fit(X, y)._fitted.torn  # but for a new model


# ---- an exception at any line of the training thread ----


class Stop(Exception):
    pass


class RaiseAtLine:
    """Counts the lines that the training thread runs in this package, and raises at one of them."""

    def __init__(self, at=None):
        self.at, self.lines, self.where, self.ended = at, 0, None, False

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if self.ended or not code.co_filename.startswith(PACKAGE) or code.co_filename.endswith("interrupts.py"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise Stop
        return self


def fit_traced(clf, X, y, tracer):
    """In a new thread, since one that is there is not traced. (An old one may become idle at any moment.)"""
    threading.settrace(tracer)
    try:
        with unittest.mock.patch.object(Worker, "any", Worker):
            clf.fit(X, y)
    finally:
        threading.settrace(None)
        tracer.ended = True  # later fits may get this thread
        Worker.idle.clear()


TRACED = ("all classes", "probit", "early stopping", "runs", "a sampler that learns", "amortised", "paper")


@pytest.mark.parametrize("name", TRACED)
def test_an_exception_at_any_line_is_exact_or_said(name, tmp_path):
    X, y = rows(n=100)
    settings = FITS[name] | {"max_iter": 6, "batch_size": 32}
    whole, tracer = classifier(**settings).fit(X, y), RaiseAtLine()  # once before: loading kernels has lines, too
    fit_traced(classifier(**settings), X, y, tracer)
    assert tracer.lines > 500
    generator, seen = np.random.default_rng(0), {True: 0, False: 0}
    for at in sorted(generator.choice(np.arange(1, tracer.lines), 25, replace=False).tolist()):
        clf, stopped = classifier(**settings), RaiseAtLine(at)
        with pytest.raises(Stop):
            fit_traced(clf, X, y, stopped)
        torn = clf._fitted.torn
        seen[torn] += 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            after = resumed(clf, X, y, tmp_path, whole.n_iter_)
        assert len([w for w in said if "in the middle of a step" in str(w.message)]) >= torn, stopped.where
        if not torn:
            try:
                assert_equal(after, whole)
            except AssertionError as error:
                raise AssertionError(f"after an exception at {stopped.where}: {error} differs") from None
    assert seen[False] > 0
    assert seen[True] > 0


def test_a_step_whose_scores_are_not_finite_has_not_happened(tmp_path):
    X, y = rows()
    clf = classifier(learning_rate=1e38, prior_variance=None, optimizer="adam")
    with pytest.raises(FloatingPointError, match=r"After iteration \d"):
        clf.fit(X, y)
    assert not clf._fitted.torn


@pytest.mark.parametrize(("settings", "name"), [({}, "push"), (FITS["runs"], "push_groups")], ids=["torch", "fused"])
def test_an_error_after_weights_have_moved_is_said(settings, name, monkeypatch):
    """push has moved the weights, the clock has not been set."""
    X, y = rows()
    clf = classifier(**settings)
    real, calls = getattr(vem, name), []

    def push(*args):
        real(*args)
        calls.append(1)
        if len(calls) == 7:
            raise MemoryError("no room")

    monkeypatch.setattr(vem, name, push)
    with pytest.raises(MemoryError, match="no room"):
        clf.fit(X, y)
    assert clf.n_iter_ == 6
    assert clf._fitted.torn


# ---- what a fit that goes on looks at ----


@pytest.mark.parametrize("interrupted_at", [1, 7, 30, 61, 118])
@pytest.mark.parametrize("seed", [0, 3])
def test_early_stopping_resumed_looks_when_the_whole_fit_looks(interrupted_at, seed, monkeypatch, tmp_path):
    X, y = rows(n=400, K=40, seed=seed)
    settings = {
        "early_stopping": True, "n_iter_no_change": 4, "max_iter": 120, "random_state": seed, "learning_rate": 0.5,
        "tol": 0.0,
    }  # fmt: skip
    whole = classifier(**settings).fit(X, y)
    clf = classifier(**settings)
    with monkeypatch.context() as patch:
        interrupt_after(patch, interrupted_at, by_signal(signal.SIGINT))
        if whole.n_iter_ >= interrupted_at:
            with pytest.raises(KeyboardInterrupt):
                clf.fit(X, y)
        else:
            clf.fit(X, y)
    if clf.n_iter_ < 120 and not clf._fitted.run.stopped_early:
        clf = resumed(clf, X, y, tmp_path, 120)
    assert_equal(clf, whole)


def test_a_fit_that_ended_makes_a_new_plan():
    X, y = rows()
    clf = classifier(max_iter=40).fit(X, y)
    assert clf._fitted.run.plan is None
    clf.set_params(max_iter=400).fit(X, y)
    one = classifier(max_iter=400).fit(X, y)
    step = np.diff(one.history_["iteration"]).max()
    assert np.diff(clf.history_["iteration"][-5:]).max() == step


@pytest.mark.parametrize(
    ("last", "validate", "gap", "record"), [(60, 3, 9, 1), (57, 4, 0, 2), (450, 22, 44, 2), (5, 0, 0, 1)]
)
def test_what_a_plan_asks_for(last, validate, gap, record):
    plan, every = Plan(last, record, 3, validate, gap, 8), range(1, last + 1)
    looks = [t for t in every if t == last or ((validate or gap) and t % (validate or gap) == 0)]
    assert [t for t in every if plan.looks(t)] == looks
    assert [t for t in every if plan.wants_bound(t)] == [t for t in every if t % 3 == 0 or t == last]
    assert [t for t in every if plan.records(t)] == sorted({*(t for t in every if t % record == 0), *looks})


# ---- run_whole by itself ----


def test_results_errors_and_settings_pass_between_the_threads():
    seen = []
    with np.errstate(divide="raise"):
        run_whole(
            lambda stop_asked: seen.append((np.geterr()["divide"], stop_asked(), threading.current_thread().name))
        )
    assert seen == [("raise", False, "augment-reduce-training")]
    with pytest.raises(ZeroDivisionError):
        run_whole(lambda stop_asked: 1 / 0)


def test_threads_are_used_again_and_by_fits_side_by_side():
    names = []
    for _ in range(5):
        run_whole(lambda stop_asked: names.append(threading.get_ident()))
        time.sleep(0.01)
    assert len(set(names)) <= 2
    barrier = threading.Barrier(4)
    others = [threading.Thread(target=lambda: run_whole(lambda _: barrier.wait(60))) for _ in range(3)]
    for other in others:
        other.start()
    run_whole(lambda _: barrier.wait(60))
    for other in others:
        other.join(60)


@pytest.mark.parametrize("at", range(1, 40))
def test_an_exception_at_any_line_of_the_caller_leaves_nobody_at_work(at):
    """Traced in this thread: whichever line raises, the job has ended, or never began, when run_whole returns."""
    begun, ended = [], []

    def work(stop_asked):  # the caller looks up now and then: enough lines will come
        begun.append(1)
        until = time.monotonic() + 60
        while not stop_asked() and time.monotonic() < until:
            time.sleep(0.001)
        ended.append(1)

    class Tracer(RaiseAtLine):
        def __call__(self, frame, event, argument):
            if not frame.f_code.co_filename.endswith("interrupts.py"):
                return None
            if event == "line":
                self.lines += 1
                if self.lines == self.at:
                    raise Stop
            return self

    tracer, before = Tracer(at), sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(Stop):
            run_whole(work)
    finally:
        sys.settrace(before)
    assert begun == ended
