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
A_LOOK = 0.1  # seconds of its steps that are judged together: that one call was held up says little
AGAIN = 8.0  # seconds after which what one thread needs is no longer sure
WORSE = 1.4  # times what a step took at best: something has changed
SHORTEST, LONGEST = 0.25, 4.0  # seconds that one thread goes on alone before the team is given another try


class Pace:
    """Seconds a step by the team and by one thread, and who is next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spent, self.best = 0.0, math.inf  # of the team
        self.seconds, self.steps = 0.0, 0  # of its steps since they were judged
        self.alone, self.alone_at = math.inf, -math.inf
        self.try_alone, self.until, self.wait = False, -math.inf, SHORTEST

    def threads(self, most: int) -> int:
        """How many of `most` threads take the next steps: all, or one."""
        return 1 if self.try_alone or self.clock() < self.until else most

    def note(self, n: int, seconds: float, n_steps: int) -> None:
        """A call of n threads took so long."""
        if n == 1:
            self.alone, self.alone_at, self.try_alone = seconds / max(1, n_steps), self.clock(), False
            return
        self.spent, self.seconds, self.steps = self.spent + seconds, self.seconds + seconds, self.steps + n_steps
        if self.seconds > A_LOOK:
            self.judge(self.seconds / max(1, self.steps), self.clock())
            self.seconds, self.steps = 0.0, 0

    def judge(self, pace: float, now: float) -> None:
        """The team's, of late."""
        self.best = min(self.best, pace)
        if pace > self.alone:
            self.until, self.wait = now + self.wait, min(LONGEST, 2 * self.wait)
            return
        self.wait = SHORTEST
        unsure = self.alone == math.inf or (pace > WORSE * self.best and now - self.alone_at > AGAIN)
        self.try_alone = self.spent > BEGIN and unsure
