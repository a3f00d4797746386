"""Threads that do not pay are let go, and called again."""

import itertools

import pytest

from augment_reduce.kernels import pace
from augment_reduce.kernels.pace import Pace


class Machine:
    """Steps take what `cost` says, by one thread or by two; calls of ten steps."""

    def __init__(self, cost):
        self.now, self.cost, self.used = 0.0, cost, []
        self.pace = Pace(lambda: self.now)

    def train(self, seconds):
        end = self.now + seconds
        while self.now < end:
            n = self.pace.threads(2)
            took = 10 * self.cost(n, self.now)
            self.now += took
            self.used.append((self.now, n))
            self.pace.note(n, took, 10)
        return self

    def share(self, n, since, until):
        """Of the calls that ended in between, those by n threads."""
        found = [m for when, m in self.used if since < when <= until]
        return found.count(n) / len(found)


def test_a_team_that_pays_is_asked_once_for_one_thread_and_a_short_fit_never():
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.0012).train(20.0)
    assert machine.share(2, 0.0, pace.BEGIN) == 1.0
    assert [n for _, n in machine.used].count(1) == 1


def test_a_team_that_is_slower_than_one_thread_waits():
    """Within a few calls of the first second; and tries again, ever more seldom."""
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.007).train(60.0)
    assert machine.share(1, 2.0, 60.0) > 0.95
    tries = [when for when, n in machine.used if n == 2 and when > 2.0]
    assert 10 <= len(tries) <= 60 / pace.SHORTEST / 2
    assert max(b - a for a, b in itertools.pairwise(tries)) <= pace.LONGEST + 0.1


@pytest.mark.parametrize("at_first", [True, False])
def test_strangers_come_and_go(at_first):
    """While they are there one thread goes on, when they are not two do."""

    def cost(n, now):
        crowded = (now % 40.0 < 20.0) is at_first
        return 0.002 if n == 1 else 0.006 if crowded else 0.0012

    machine = Machine(cost).train(120.0)
    for first in (0.0, 20.0, 40.0, 60.0, 80.0, 100.0):
        crowded = (first % 40.0 < 20.0) is at_first
        assert machine.share(1 if crowded else 2, first + 9.0, first + 19.9) > 0.95


def test_a_call_that_is_held_up_now_and_then_does_not_end_a_team():
    """One call in ten takes twice as long as by one thread; the team is the faster all the same."""
    calls = itertools.count()
    machine = Machine(lambda n, now: 0.002 if n == 1 else 0.004 if next(calls) % 10 == 0 else 0.0012).train(30.0)
    assert [n for _, n in machine.used].count(1) <= 5


def test_one_thread_that_was_slow_for_a_moment_is_not_held_against_the_team():
    """A call by one thread that a stranger held up: the team goes on, as it does where it is the faster."""
    machine = Machine(lambda n, now: (0.02 if now < 2.0 else 0.002) if n == 1 else 0.0012).train(30.0)
    assert machine.share(2, 3.0, 30.0) > 0.98
