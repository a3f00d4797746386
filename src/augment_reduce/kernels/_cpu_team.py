"""`_cpu_step.whole_step` on several threads: each runs `team_step` from end to end, and they wait for each other.

    draw, by rows | sort, one; the others load rows | scores, by classes | E and M step, by rows | push, by classes

One call for each thread and step. Handing single kernels to a pool costs some 50 microseconds each time, as much as the
kernels of a small minibatch take; here a wait is a look at a number that the others raise. No sum is cut in two, so the
results are those of one thread to the last bit, as long as no row comes twice.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, wait
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils

from ._cpu_classes import cut, floyd, sort, splitmix, with_label
from ._cpu_lanes import I32, I64, _data, intrinsic
from ._cpu_local import SOFTMAX, draw_e_and_m, e_and_m
from ._cpu_push import push_biases, push_groups
from ._cpu_scores import pairs_dense, pairs_sparse
from ._cpu_types import OPTIONS, Array
from ._cpu_work import pool

PATIENCE = 2_000  # looks before the core is offered to others
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what splitmix adds for each number
BAD, ALONE = -1, -2  # what a thread returns: a score is not finite; another thread has left
ARRIVED, LEFT = 0, 1  # places of the counter: how often threads came to a meeting; whether one is gone


@intrinsic
def _arrive(typing_context: Any, counter: Any) -> tuple:
    """counter[0] + 1, raised by one for all threads to see; also what was written before is seen."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _data(context, builder, signature.args[0], args[0])
        return builder.add(builder.atomic_rmw("add", at, I64(1), "seq_cst"), I64(1))

    return types.int64(counter), codegen


@intrinsic
def _now(typing_context: Any, counter: Any, i: Any) -> tuple:
    """counter[i] as it is now; what was written before it is seen."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load_atomic(at, "seq_cst", 8)

    return types.int64(counter, types.int64), codegen


@intrinsic
def _give_way(typing_context: Any) -> tuple:
    """Let others have the core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(**OPTIONS)
def _together(counter: Array, n: int) -> bool:
    """Wait until all n threads are here; False if one of them will never come. The counter grows by n at each place."""
    everyone = (_arrive(counter) + n - 1) // n * n
    looks = 0
    while _now(counter, ARRIVED) < everyone:
        if _now(counter, LEFT) != 0:
            return False
        looks += 1
        if looks > PATIENCE:
            _give_way()
    return True


@njit(**OPTIONS)
def _draw_rows(
    lo: int, hi: int, seed: int, n_classes: int, labels: Array, u: Array, pairs: Array, table: Array
) -> None:
    """Rows lo..hi of `_cpu_step._draw`: number i of splitmix depends on the seed and i alone."""
    splitmix(np.uint64(seed) + GOLDEN * np.uint64(lo * u.shape[1]), u[lo:hi].reshape(-1))
    floyd(lo, hi, u, n_classes - 1, labels, pairs[:, 1:], table)
    for b in range(lo, hi):
        pairs[b, 0] = labels[b]


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


@njit(**OPTIONS)
def _gradients(
    lo: int, hi: int, psi: Array, rows: Array, weigh: tuple, model: int, state: tuple, step: tuple, flags: tuple,
    u: Array, scales: Array, each: int, bound: Array, grads: Array,
) -> int:  # fmt: skip
    """Rows lo..hi of `_cpu_step.from_scores_to_gradients`, whose scores are finite."""
    B, S, hits = hi - lo, psi.shape[1] - 1, 0
    gap, grad = np.empty((B, S), psi.dtype), np.empty((B, S), psi.dtype)
    for b in range(B):
        for s in range(S):
            gap[b, s] = psi[lo + b, 1 + s] - psi[lo + b, 0]
    own_bound = bound[lo:hi] if bound.shape[0] > 0 else bound
    if model == SOFTMAX:
        hits = e_and_m((state[0], state[2]), rows[lo:hi], gap, weigh[0], 0, step, flags, own_bound, grad)
    else:
        draws = np.ascontiguousarray(u[:, lo:hi])
        draw_e_and_m(model, state, rows[lo:hi], gap, weigh[1], 0, step, flags, draws, own_bound, grad)
    with_label(grad, scales[lo * each :], each, grads[lo:hi])
    return hits


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
    _draw_rows(lo, hi, seed, bias.shape[0], labels, numbers, pairs, table)
    if not _together(counter, n):
        return ALONE
    if tid == 0:
        sort(pairs.reshape(-1), bias.shape[0], bits, passes, count, keys, orders, row, pairs.shape[1])
        n_groups[0] = cut(keys[passes & 1], distinct, start)
        _share_out(start, n_groups[0], D // 8 if dense else csr[3].shape[0] // B, D, cuts)
    elif source.shape[0] > 0:
        for b in range(B * (tid - 1) // (n - 1), B * tid // (n - 1)):
            x[b] = source[rows[b]]
    if not _together(counter, n):
        return ALONE
    groups = (distinct[: n_groups[0]], start[: n_groups[0] + 1], orders[passes & 1], row)
    first, last = cuts[tid], cuts[tid + 1]
    if dense:
        pairs_dense(first, last, groups, x, weight, bias, psi.reshape(-1))
    else:
        pairs_sparse(first, last, groups, csr, weight, bias, psi.reshape(-1), sink)
    if not _together(counter, n):
        return ALONE
    finite[tid] = np.isfinite(psi[lo:hi].sum()) or np.isfinite(psi[lo:hi]).all()
    if not _together(counter, n):
        return ALONE
    if not finite[:n].all():
        return BAD
    hits = _gradients(lo, hi, psi, rows, weigh, model, state, step, flags, u, scales, each, bound, grads)
    if not _together(counter, n):
        return ALONE
    push_groups(first, last, groups, csr, x, grads.reshape(-1), share, arrays, rule, bias_g, bias_c, few)
    if not _together(counter, n):
        return ALONE
    if tid == 0:
        push_biases(groups[0], bias_g, bias_c, arrays, rule, few)
    return hits


PLACES = threading.Lock()  # one team at a time: two that share the pool could each have what the other waits for


def _free_places() -> None:
    global PLACES
    PLACES = threading.Lock()


if hasattr(os, "register_at_fork"):  # whoever held it is not in the child
    os.register_at_fork(after_in_child=_free_places)


def most_threads() -> int:
    """A team's threads run at once or not at all: no more than the pool has, and the caller."""
    return min(numba.get_num_threads(), pool()._max_workers + 1)


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
        others: list[Future[int]] = []
        try:
            others.extend(pool().submit(self._part, tid, arguments, few, bound) for tid in range(1, self.n))
            found = [self._part(0, arguments, few, bound), *(other.result() for other in others)]
        except BaseException:  # also an interrupt: nobody must be left waiting
            self.counter[LEFT] = 1
            wait(others)
            self.counter[:] = 0
            raise
        return BAD if BAD in found else sum(found)

    def _part(self, tid: int, arguments: tuple, few: list[tuple], bound: Array) -> int:
        own = (few[tid], self.tables[tid], self.sinks[tid])
        try:
            return team_step(tid, self.n, self.counter, *arguments, self.common, own, bound)
        except BaseException:
            self.counter[LEFT] = 1
            raise
