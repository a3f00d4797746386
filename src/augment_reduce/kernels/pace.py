"""Whether threads pay: beside strangers on its cores a team may be slower than one thread.

Threads that take steps together meet many times a millisecond, and whenever one of them is held up all of them are. On
a machine whose cores others use as well, a step by two can take several times as long as by one. Results do not depend
on the number of threads, so it may change while training goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BEGIN = 1.0  # seconds of a team's steps before one thread is given a try: short fits are not worth one
A_LOOK, CALLS = 0.1, 3  # seconds of steps, and calls, that are judged together: that one was held up says little
AGAIN, SURE = (
    8.0,
    60.0,
)  # seconds until it is asked again what one thread needs: if the team got slower; if not
WORSE = 1.4  # times what a step took at best: something has changed
SHORTEST, LONGEST = 0.25, 4.0  # seconds that one thread goes on alone before the team is given another try
A_TRY = 10  # part of the steps of a call that make a try


class Pace:
    """Seconds a step by the team and by one thread, and who is next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spent, self.best = 0.0, math.inf  # of the team
        self.seconds = 0.0  # since its steps were judged
        self.calls: list[float] = []  # what a step took in each of them
        self.alone, self.alone_at = math.inf, -math.inf
        self.tries: list[float] = []  # of one thread
        self.try_alone, self.until, self.wait = False, -math.inf, SHORTEST

    def threads(self, most: int) -> int:
        """How many of `most` threads take the next steps: all, or one."""
        return 1 if self.try_alone or self.clock() < self.until else most

    def steps_of(self, M: int, n: int) -> int:
        """How many of M steps n threads had better take in the next call: few, if it is but a try."""
        only_a_try = self.try_alone if n == 1 else self.wait > SHORTEST
        return max(1, M // A_TRY) if only_a_try else M

    def note(self, n: int, seconds: float, n_steps: int) -> None:
        """A call of n threads took so long."""
        if n == 1:
            self.tries.append(seconds / max(1, n_steps))
            if not self.try_alone or len(self.tries) >= CALLS:  # as fast as nobody held it up
                self.alone, self.alone_at, self.try_alone, self.tries = min(self.tries), self.clock(), False, []
            return
        self.spent, self.seconds = self.spent + seconds, self.seconds + seconds
        self.calls.append(seconds / max(1, n_steps))
        if self.seconds > A_LOOK and len(self.calls) >= CALLS:
            usual = sorted(self.calls)[: -(len(self.calls) // 3)]  # without the slowest third
            self.judge(sum(usual) / len(usual), self.clock())
            self.seconds, self.calls = 0.0, []

    def judge(self, pace: float, now: float) -> None:
        """The team's, of late."""
        self.best = min(self.best, pace)
        if pace > self.alone:
            self.until, self.wait = now + self.wait, min(LONGEST, 2 * self.wait)
            return
        self.wait = SHORTEST
        since = now - self.alone_at  # endless at first
        unsure = since > SURE or (pace > WORSE * self.best and since > AGAIN)
        self.try_alone = self.spent > BEGIN and unsure
