"""Threads that do not pay are let go, and called again."""

import itertools

import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import _cpu_team, compiled, pace
from augment_reduce.kernels.pace import Pace


class Machine:
    """Steps take what `cost` says, by one thread or by two; calls of so many steps, or fewer."""

    def __init__(self, cost, steps=10):
        self.now, self.cost, self.steps, self.used = 0.0, cost, steps, []
        self.pace = Pace(lambda: self.now)

    def train(self, seconds):
        end = self.now + seconds
        while self.now < end:
            n = self.pace.threads(2)
            M = self.pace.steps_of(self.steps, n)
            took = M * self.cost(n, self.now)
            self.now += took
            self.used.append((self.now, n, took))
            self.pace.note(n, took, M)
        return self

    def share(self, n, since, until):
        """Of the time of the calls that ended in between, that of n threads."""
        times = [0.0, 0.0, 0.0]
        for when, m, took in self.used:
            times[m] += took * (since < when <= until)
        return times[n] / sum(times)


@pytest.mark.parametrize("steps", [10, 120])
def test_a_team_that_pays_is_asked_for_one_thread_now_and_then_and_a_short_fit_never(steps):
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.0012, steps).train(200.0)
    assert machine.share(2, 0.0, pace.BEGIN) == 1.0
    assert 0 < machine.share(1, 0.0, 200.0) < 0.002
    assert [n for _, n, _ in machine.used].count(1) <= pace.CALLS * (1 + 200 / pace.SURE)


@pytest.mark.parametrize("steps", [10, 120])
def test_a_team_that_is_slower_than_one_thread_waits(steps):
    """Within a few calls of the first second; and tries again, ever more seldom and never for long."""
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.007, steps).train(120.0)
    assert machine.share(1, 5.0, 120.0) > 0.9
    tries = [when for when, n, _ in machine.used if n == 2 and when > 5.0]
    assert len(tries) > 10
    assert max(b - a for a, b in itertools.pairwise(tries)) <= pace.LONGEST + 0.3


@pytest.mark.parametrize("at_first", [True, False])
def test_strangers_come_and_go(at_first):
    """While they are there one thread goes on, when they are not two do."""

    def cost(n, now):
        crowded = (now % 40.0 < 20.0) is at_first
        return 0.002 if n == 1 else 0.006 if crowded else 0.0012

    machine = Machine(cost).train(120.0)
    for first in (0.0, 20.0, 40.0, 60.0, 80.0, 100.0):
        crowded = (first % 40.0 < 20.0) is at_first
        assert machine.share(1 if crowded else 2, first + 9.0, first + 19.9) > 0.9


@pytest.mark.parametrize("steps", [10, 120])
def test_a_call_that_is_held_up_now_and_then_does_not_end_a_team(steps):
    """One call in ten takes twice as long as by one thread; the team is the faster all the same."""
    calls = itertools.count()
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.004 if next(calls) % 10 == 0 else 0.0012, steps)
    assert machine.train(50.0).share(2, 2.0, 50.0) > 0.98


@pytest.mark.parametrize("team", [0.0012, 0.006])
def test_one_thread_that_was_held_up_when_it_was_tried_is_not_judged_by_that(team):
    """One of its calls is ten times as long: whoever is faster goes on."""
    calls = itertools.count()
    machine = Machine(lambda n, now: (0.02 if next(calls) == 0 else 0.002) if n == 1 else team).train(60.0)
    assert machine.share(2 if team < 0.002 else 1, 5.0, 60.0) > 0.9


def test_what_compiles_is_not_held_against_the_team(monkeypatch):
    """The first call of a fit may take a minute."""
    noted = []
    monkeypatch.setattr(Pace, "note", lambda self, *a: noted.append(a))
    compiled_so_far = iter([0, 1, 1, 1, 1, 1, 1, 1])
    monkeypatch.setattr(_cpu_team, "n_compiled", lambda: next(compiled_so_far))
    X, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 4
    settings = {"preset": "paper", "n_sampled_classes": 1, "batch_size": 10, "max_iter": 4, "dtype": "float32"}
    monkeypatch.setattr(compiled, "MOST", 1)
    AugmentReduceClassifier(**settings, random_state=0).fit(X, y)
    assert len(noted) == 3
