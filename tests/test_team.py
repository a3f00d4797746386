"""The threads that take steps together: how many, what happens when one leaves, and helpers that wait for work."""

import ctypes
import gc
import os
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import _cpu_meet, _cpu_team
from augment_reduce.kernels._cpu_team import Team


def fit_with_team(n_classes=60, **settings):
    """Class by class; with 8 classes, row by row."""
    X = np.random.default_rng(0).normal(size=(300, 784)).astype(np.float32)
    settings = {
        "preset": "paper",
        "batch_size": 200,
        "n_sampled_classes": n_classes // 3,
        "max_iter": 6,
        "random_state": 0,
    } | settings
    return AugmentReduceClassifier(**settings).fit(X, np.arange(300) % n_classes).coef_


def test_more_threads_than_there_are_cores_and_fits_side_by_side(monkeypatch):
    """A team takes no more threads than can run at once; a second one, meanwhile, is one thread; same numbers."""
    used, run = [], Team.run
    monkeypatch.setattr(Team, "run", lambda self, *a: used.append(self.n) or run(self, *a))
    expected = fit_with_team(n_jobs=1)
    assert set(used) == {1}
    used.clear()
    monkeypatch.setattr(_cpu_team, "CORES", 3)
    monkeypatch.setattr(_cpu_team, "get_num_threads", lambda: 4)
    assert np.array_equal(fit_with_team(), expected)
    assert set(used) == {3}
    with ThreadPoolExecutor(3) as fits:
        for found in [fits.submit(fit_with_team) for _ in range(3)]:
            assert np.array_equal(found.result(timeout=600), expected)


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def put_on(core):
    """Whether this thread is on that core now, and free to leave it: not where the system makes cores up."""
    os.sched_setaffinity(0, {core})
    there = ctypes.CDLL(None).sched_getcpu() == core
    os.sched_setaffinity(0, CORES)
    return there


@pytest.mark.skipif(not 2 <= len(CORES) <= 1024, reason="nowhere to go, or too many places")
@pytest.mark.parametrize("home", CORES[:4])
def test_who_waits_on_the_core_of_another_moves_over_and_stays_as_free_as_it_was(home):
    """The others were last seen on all cores but one, this thread's among them: it goes to that one, and says so."""
    n, left = len(CORES) + 1, next(core for core in CORES if core != home)
    counter = _cpu_meet.new_counter(n)
    counter[_cpu_meet.SEEN + 1 : _cpu_meet.SEEN + n - 1] = [1 + core for core in CORES if core != left]
    if not put_on(home):
        pytest.skip("the system does not say where a thread is")
    try:
        # it may have been moved before it could look, hence several tries: each fails less than once in a hundred
        went = next((core for _ in range(10) if put_on(home) and (core := _cpu_meet.move_over(counter, 0, n)) >= 0), -1)
        assert went == left
        assert counter[_cpu_meet.SEEN] == 1 + left
        assert os.sched_getaffinity(0) == set(CORES)
        counter[_cpu_meet.SEEN + n - 1] = 1 + left
        assert _cpu_meet.move_over(counter, 0, n) == -1  # somebody is everywhere
        assert _cpu_meet.move_over(_cpu_meet.new_counter(n), 0, n) == -1  # nobody has been seen
        os.sched_setaffinity(0, {home})
        assert _cpu_meet.move_over(counter, 0, n) == -1  # it may not
    finally:
        os.sched_setaffinity(0, CORES)


@numba.njit(nogil=True)
def meet(counter, tid):
    return _cpu_meet.together(counter, tid, 2)


@pytest.mark.skipif(not 2 <= len(CORES) <= 1024, reason="nowhere to go, or too many places")
@pytest.mark.parametrize("may_move", [True, False])
def test_at_one_meeting_in_sixteen_who_waits_looks_around(may_move):
    """The other was last seen on this thread's core, and comes late. Moved by the system first, it need not move: hence
    several tries, each of which fails less than once in a hundred."""
    if not put_on(CORES[0]):
        pytest.skip("the system does not say where a thread is")

    def moves(meeting):
        counter = _cpu_meet.new_counter(2)
        counter[_cpu_meet.ARRIVED], counter[_cpu_meet.MAY_MOVE] = 2 * (meeting - 1), may_move
        counter[_cpu_meet.SEEN + 1] = 1 + CORES[0]
        with ThreadPoolExecutor(1) as other:
            comes = other.submit(lambda: time.sleep(0.02) or meet(counter, 1))
            put_on(CORES[0])
            assert meet(counter, 0)
            assert comes.result(timeout=600)
        assert counter[_cpu_meet.SEEN] - 1 in CORES
        assert counter[_cpu_meet.ARRIVED] == 2 * meeting
        return counter[_cpu_meet.MOVES]

    moves(1)  # compiles
    look_around = _cpu_meet.LOOK_AROUND
    assert sum(moves(meeting) for meeting in (1, look_around - 1, look_around + 1)) == 0
    found = next((m for _ in range(10 if may_move else 2) if (m := moves(look_around))), 0)
    assert found == may_move
    assert os.sched_getaffinity(0) == set(CORES)


def test_threads_stay_where_they_are_if_the_process_gives_way_or_is_told_to(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("threads never move")
    monkeypatch.setattr(os, "getpriority", lambda *a: 0)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    assert _cpu_meet.may_move()
    assert _cpu_meet.new_counter(2)[_cpu_meet.MAY_MOVE] == 1
    monkeypatch.setenv("AUGMENT_REDUCE_STAY", "1")
    assert not _cpu_meet.may_move()
    monkeypatch.setenv("AUGMENT_REDUCE_STAY", "0")
    monkeypatch.setattr(os, "getpriority", lambda *a: 19)
    assert not _cpu_meet.may_move()
    monkeypatch.setattr(os, "getpriority", lambda *a: 0)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_BATCH)
    assert not _cpu_meet.may_move()
    assert _cpu_meet.new_counter(2)[_cpu_meet.MAY_MOVE] == 0


@pytest.mark.parametrize(("n_classes", "name"), [(60, "take_by_classes"), (8, "take_by_rows")])
@pytest.mark.parametrize("who", [0, 1], ids=["the caller", "another thread"])
def test_nobody_waits_for_a_thread_that_has_left(who, n_classes, name, monkeypatch):
    """Whoever fails, interrupted or not, the others come back, the error is told, and the next step is a step."""
    take, called = getattr(_cpu_team, name), []

    def failing(tid, *arguments):
        called.append(tid)
        if tid == who:
            raise KeyboardInterrupt if who == 0 else MemoryError
        return take(tid, *arguments)

    failing.overloads = take.overloads
    monkeypatch.setattr(_cpu_team, "get_num_threads", lambda: 2)
    monkeypatch.setattr(_cpu_team, "CORES", 2)
    expected = fit_with_team(n_classes)
    with monkeypatch.context() as patch:
        patch.setattr(_cpu_team, name, failing)
        with pytest.raises(KeyboardInterrupt if who == 0 else MemoryError):
            fit_with_team(n_classes)
    assert sorted(called) == [0, 1]
    assert np.array_equal(fit_with_team(n_classes), expected)
    assert not _cpu_team.PLACES.locked()


def test_a_helper_works_awake_and_asleep_and_keeps_nothing(monkeypatch):
    """Asked at once, it is awake; asked later, it was asleep. What it was given is gone when it has answered."""
    monkeypatch.setattr(_cpu_meet, "AWAKE", 50)
    helper = _cpu_meet.Helper()
    for pause in (0.0, 0.0, 0.05, 0.0, 0.05):
        time.sleep(pause)
        while pause and not helper.asleep:
            time.sleep(0.001)
        load = np.arange(3)
        kept = weakref.ref(load)
        helper.start(lambda given=load: int(given.sum()))
        assert helper.wait() == 3
        del load
        assert kept() is None
    load = np.arange(3)
    kept = weakref.ref(load)
    helper.start(lambda given=load: given[5])
    del load
    assert isinstance(helper.wait(), IndexError)
    gc.collect()
    assert kept() is None  # nor by the frames of an error
    helper.start(lambda: 7)
    assert helper.wait() == 7


def test_a_helper_makes_up_for_what_an_interrupt_left_undone(monkeypatch):
    """Asked and not woken; asked without a job; asked twice: it answers each time, and goes on."""
    monkeypatch.setattr(_cpu_meet, "AWAKE", 50)
    helper = _cpu_meet.Helper()
    assert helper.wait() == 0
    time.sleep(0.05)
    helper.job = lambda: 3
    helper.counter[_cpu_meet.ASKED] += 1
    assert helper.wait() == 3
    helper.counter[_cpu_meet.ASKED] += 1
    assert helper.wait() == 0
    helper.start(lambda: 4)
    helper.start(lambda: 5)
    assert helper.wait() in (0, 5)  # whoever asks twice without waiting has lost the first
    helper.start(lambda: 6)
    assert helper.wait() == 6


@pytest.mark.parametrize("n_classes", [60, 8])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_team_is_called_leaves_nobody_behind(when, n_classes, monkeypatch):
    """Between asking a helper and noticing that one has: the next fit is a fit, on the same helpers."""
    monkeypatch.setattr(_cpu_team, "get_num_threads", lambda: 2)
    monkeypatch.setattr(_cpu_team, "CORES", 2)
    expected, start = fit_with_team(n_classes), _cpu_meet.Helper.start

    def interrupted(self, job):
        if when == "after":
            start(self, job)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_cpu_meet.Helper, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit_with_team(n_classes)
    assert np.array_equal(fit_with_team(n_classes), expected)
    assert not _cpu_team.PLACES.locked()


FORKED = """
import os, numpy as np, test_team as t
t._cpu_team.get_num_threads = lambda: 2
before = t.fit_with_team()
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(t.fit_with_team(), before) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_helpers_of_its_own():
    """Those of its parent are not there, and it must not wait for them."""
    subprocess.run([sys.executable, "-c", FORKED], cwd=Path(__file__).parent, timeout=600, check=True)


def test_a_team_has_no_more_threads_than_there_is_work_for(monkeypatch):
    used, run = [], Team.run
    monkeypatch.setattr(Team, "run", lambda self, *a: used.append(self.n) or run(self, *a))
    monkeypatch.setattr(_cpu_team, "CORES", 64)
    monkeypatch.setattr(_cpu_team, "get_num_threads", lambda: 64)
    X = np.random.default_rng(0).normal(size=(300, 784)).astype(np.float32)
    settings = {"preset": "paper", "batch_size": 300, "n_sampled_classes": 2, "max_iter": 2, "random_state": 0}
    AugmentReduceClassifier(**settings).fit(X, np.arange(300) % 60)  # 300 x 3 x (196 + 16), class by class
    assert set(used) == {3}
    used.clear()
    AugmentReduceClassifier(**settings).fit(X, np.arange(300) % 8)  # few weights: one, two or four of their quarters
    assert set(used) == {2}
