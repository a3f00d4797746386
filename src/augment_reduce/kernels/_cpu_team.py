"""`_cpu_step.whole_step` on several threads: each runs `team_step` from end to end, and they wait for each other.

    draw, by rows | sort, one; the others load rows | scores, by classes | E and M step, by rows | push, by classes

One call for each thread and step. Handing single kernels to a pool costs some 50 microseconds each time, as much as the
kernels of a small minibatch take; here a wait is a look at a number that the others raise (`_cpu_meet`). No sum is cut
in two, so the results are those of one thread to the last bit, as long as no row comes twice.
"""

from __future__ import annotations

import os
import threading
from functools import partial

import numba
import numpy as np
from numba import njit

from ._cpu_classes import cut, sort
from ._cpu_meet import LEFT, helpers, together
from ._cpu_push import push_biases, push_groups
from ._cpu_scores import pairs_dense, pairs_sparse
from ._cpu_step import all_finite, draw_rows, gradients
from ._cpu_types import OPTIONS, Array

BAD, ALONE = -1, -2  # what a thread returns: a score is not finite; another thread has left


@njit(**OPTIONS)
def _share_out(start: Array, G: int, each: int, D: int, cuts: Array) -> None:
    """Cut points of the classes, of about equal work: that of their pairs, and of the weights these touch."""
    total = 0
    for j in range(G):
        n = start[j + 1] - start[j]
        total += n * (each + 8) + min(D, n * each)
    n_threads, done, t = cuts.shape[0] - 1, 0, 1
    cuts[0], cuts[1:] = 0, G
    for j in range(G):
        n = start[j + 1] - start[j]
        done += n * (each + 8) + min(D, n * each)
        while t < n_threads and done * n_threads >= total * t:
            cuts[t] = j + 1
            t += 1


@njit(cache=True, **OPTIONS)
def team_step(
    tid: int, n: int, counter: Array, seed: int, sorting: tuple, rows: Array, labels: Array, source: Array, x: Array,
    csr: tuple, arrays: tuple, rule: tuple, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple, u: Array,
    scales: Array, each: int, share: Array, common: tuple, own: tuple, bound: Array,
) -> int:  # fmt: skip
    """Thread `tid` of n. Dense rows are loaded from `source` into `x`, where there is a source; sparse ones are `csr`.

    Returns how often the floor acted in its rows, or BAD, in all threads, where a score is not finite: then nothing was
    touched. `common` is everybody's, `own` this thread's scratch.
    """
    weight, bias, (few, table, sink) = arrays[0], arrays[3], own
    numbers, pairs, keys, orders, row, count, distinct, start, cuts, psi, grads, finite, n_groups, bias_g, bias_c = (
        common
    )
    (bits, passes), B, D, dense = sorting, rows.shape[0], weight.shape[1], x.shape[0] > 0
    lo, hi = B * tid // n, B * (tid + 1) // n
    draw_rows(lo, hi, seed, bias.shape[0], labels, numbers, pairs, table)
    if not together(counter, n):
        return ALONE
    if tid == 0:
        sort(pairs.reshape(-1), bias.shape[0], bits, passes, count, keys, orders, row, pairs.shape[1])
        n_groups[0] = cut(keys[passes & 1], distinct, start)
        _share_out(start, n_groups[0], D // 8 if dense else csr[3].shape[0] // B, D, cuts)
    elif source.shape[0] > 0:
        for b in range(B * (tid - 1) // (n - 1), B * tid // (n - 1)):
            x[b] = source[rows[b]]
    if not together(counter, n):
        return ALONE
    groups = (distinct[: n_groups[0]], start[: n_groups[0] + 1], orders[passes & 1], row)
    first, last = cuts[tid], cuts[tid + 1]
    if dense:
        pairs_dense(first, last, groups, x, weight, bias, psi.reshape(-1))
    else:
        pairs_sparse(first, last, groups, csr, weight, bias, psi.reshape(-1), sink)
    if not together(counter, n):
        return ALONE
    finite[tid] = all_finite(psi[lo:hi])
    if not together(counter, n):
        return ALONE
    if not finite[:n].all():
        return BAD
    hits = gradients(lo, hi, psi, rows, weigh, model, state, step, flags, u, scales, each, bound, grads)
    if not together(counter, n):
        return ALONE
    push_groups(first, last, groups, csr, x, grads.reshape(-1), share, arrays, rule, bias_g, bias_c, few)
    if not together(counter, n):
        return ALONE
    if tid == 0:
        push_biases(groups[0], bias_g, bias_c, arrays, rule, few)
    return hits


PLACES = threading.Lock()  # one team at a time: they share the helpers, and each waits for all of its own


def _free_places() -> None:
    global PLACES
    PLACES = threading.Lock()


if hasattr(os, "register_at_fork"):  # whoever held it is not in the child
    os.register_at_fork(after_in_child=_free_places)


def most_threads() -> int:
    """A team's threads run at once or not at all: no more than there are cores."""
    return min(numba.get_num_threads(), os.cpu_count() or 1)


class Team:
    """The scratch of such steps for one size of minibatch, and the call of all threads."""

    def __init__(self, n: int, B: int, S: int, sorting: tuple[int, int], dtype: np.dtype) -> None:
        pairs, bits = B * (1 + S), sorting[0]
        self.n, self.counter = n, np.zeros(16, np.int64)  # a cache line for itself
        sorted_pairs = (
            np.empty((2, pairs), np.uint32), np.empty((2, pairs), np.uint32), np.empty(pairs, np.uint32),
            np.empty((1 << bits) + 1, np.uint32), np.empty(pairs, np.int64), np.empty(pairs + 1, np.int64),
        )  # fmt: skip
        scores = np.empty((B, 1 + S), dtype), np.empty((B, 1 + S), dtype)
        flags = np.empty(n, np.bool_), np.empty(1, np.int64)
        biases = np.empty(pairs, dtype), np.empty(pairs, dtype)
        drawn = np.empty((B, S)), np.empty((B, 1 + S), np.int64)
        self.common = (*drawn, *sorted_pairs, np.empty(n + 1, np.int64), *scores, *flags, *biases)
        self.tables = np.empty((n, 1 << (4 * S).bit_length()), np.int64)
        self.sinks = np.empty((n, 64), dtype)

    def run(self, arguments: tuple, few: list[tuple], bound: Array) -> int:
        """The step; this thread is one of the team, and holds PLACES. Returns what `team_step` does, for all rows."""
        others, counter = helpers(self.n - 1), self.counter
        try:
            for tid, other in enumerate(others, start=1):
                other.start(partial(self._part, counter, tid, arguments, few, bound))
            found = [self._part(counter, 0, arguments, few, bound), *(other.wait() for other in others)]
            if any(not isinstance(hits, int) or hits == ALONE for hits in found):
                raise next(
                    (error for error in found if isinstance(error, BaseException)), RuntimeError("A thread left.")
                )
        except BaseException:  # also an interrupt: nobody must be left waiting, nor meet whoever comes next
            counter[LEFT] = 1
            self.counter = np.zeros_like(counter)
            for other in others:
                other.wait()
            raise
        numbers = [hits for hits in found if isinstance(hits, int)]
        return BAD if BAD in numbers else sum(numbers)

    def _part(self, counter: Array, tid: int, arguments: tuple, few: list[tuple], bound: Array) -> int:
        own = (few[tid], self.tables[tid], self.sinks[tid])
        try:
            return team_step(tid, self.n, counter, *arguments, self.common, own, bound)
        except BaseException:
            counter[LEFT] = 1
            raise
