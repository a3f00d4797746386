"""Push score gradients into the touched weights: sum them for one class row, take the optimiser's step, go on.

Sums run over pairs in the order given and round as plain torch does (no fused multiply-add), so that a sum
which cancels is zero here exactly where it is zero in `reference`: an entry counts as touched by its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from ..optim import ADAGRAD, ADAM, PRIOR_TOUCHED, PRIOR_UNBIASED, ROWWISE_ADAGRAD, SECTION4
from ._cpu_lanes import LANES, add_lanes, prefetch
from ._cpu_types import OPTIONS, Array, Arrays, Buffers, Csr, Groups, Rule

CHUNK = 64  # features transposed at a time


# The rules of optim.py for one entry: (rule, g, s, r) -> (step size h, gradient to follow, new s, new r).


@njit(**OPTIONS)
def _section4(rule: Rule, g: Any, s: Any, r: Any) -> tuple:
    s = rule.a * g * g + rule.b * s  # a = kappa, b = 1 - kappa
    return rule.rate / (type(s)(1) + np.sqrt(s)), g, s, r


@njit(**OPTIONS)
def _section4_every(rule: Rule, g: Any, s: Any, r: Any) -> tuple:
    s = s * rule.b ** (rule.c - type(s)(1) - r)  # what the iterations since r took from it; c = t
    s = rule.a * g * g + rule.b * s
    return rule.rate / (type(s)(1) + np.sqrt(s)), g, s, rule.c


@njit(**OPTIONS)
def _adagrad(rule: Rule, g: Any, s: Any, r: Any) -> tuple:
    s = s + g * g
    return rule.rate / (np.sqrt(s) + rule.eps), g, s, r


@njit(**OPTIONS)
def _adam(rule: Rule, g: Any, s: Any, r: Any) -> tuple:
    s = rule.a * s + rule.b * g  # a = beta1, b = 1 - beta1
    r = rule.c * r + rule.d * g * g  # c = beta2, d = 1 - beta2
    return rule.rate / (np.sqrt(r) + rule.eps), s, s, r


@njit(**OPTIONS)
def _fixed(rule: Rule, g: Any, s: Any, r: Any) -> tuple:
    return rule.rate, g, s, r


def _loop(entry: Callable, n_states: int, with_prior: bool) -> Callable:
    """The loop of `RowOptimizer.apply` over n entries, without branches; clears g and c behind it."""

    def loop(rule: Rule, w: Array, s: Array, r: Array, g: Array, c: Array, n: int) -> None:
        zero, one = w.dtype.type(0), w.dtype.type(1)
        for d in range(n):
            old, gradient = w[d], g[d]
            touched = gradient != zero
            old_s = s[d] if n_states > 0 else zero
            old_r = r[d] if n_states > 1 else zero
            h, follow, new_s, new_r = entry(rule, gradient, old_s, old_r)
            new = old + h * follow
            if with_prior:
                touched = touched or c[d] != zero
                new = new / (one + h * c[d] / rule.variance)
                c[d] = zero
            w[d] = new if touched else old
            if n_states > 0:
                s[d] = new_s if touched else old_s
            if n_states > 1:
                r[d] = new_r if touched else old_r
            g[d] = zero

    # Cached kernels are linked by name: two loops of one name could be taken for each other.
    loop.__name__ = loop.__qualname__ = f"{entry.__name__}_{'with' if with_prior else 'without'}_prior"
    return njit(**OPTIONS)(loop)


_section4_loop, _section4_prior = _loop(_section4, 1, False), _loop(_section4, 1, True)
_every_loop, _every_prior = _loop(_section4_every, 2, False), _loop(_section4_every, 2, True)
_adagrad_loop, _adagrad_prior = _loop(_adagrad, 1, False), _loop(_adagrad, 1, True)
_adam_loop, _adam_prior = _loop(_adam, 2, False), _loop(_adam, 2, True)
_fixed_loop, _fixed_prior = _loop(_fixed, 0, False), _loop(_fixed, 0, True)


@njit(**OPTIONS)
def _pull(w: Array, g: Array, n: int, variance: Any) -> None:
    """g <- g - w / v where the data gradient is not zero, and where it was not, neither is what comes out."""
    zero = w.dtype.type(0)
    least = np.nextafter(zero, w.dtype.type(1))
    for d in range(n):
        pulled = g[d] - w[d] / variance
        g[d] = (least if pulled == zero else pulled) if g[d] != zero else zero


@njit(**{**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}})
def _mean_square(g: Array, n: int) -> float:
    """Mean of g^2 over the entries where it is not zero."""
    total, count = 0.0, 0
    for d in range(n):
        total += np.float64(g[d]) * np.float64(g[d])
        count += g[d] != 0
    return total / max(count, 1)


@njit(inline="always", **OPTIONS)
def _step(rule: Rule, w: Array, s: Array, r: Array, g: Array, c: Array, n: int) -> None:
    """One step on n entries; for row-wise Adagrad s is the row's one number."""
    prior = rule.prior == PRIOR_UNBIASED
    if rule.prior == PRIOR_TOUCHED:
        _pull(w, g, n, rule.variance)
    if rule.kind == ROWWISE_ADAGRAD:
        s[0] += w.dtype.type(_mean_square(g, n))
        rate = rule.rate / (np.sqrt(s[0]) + rule.eps)
        rule = Rule(rule.kind, rule.prior, rate, rule.a, rule.b, rule.c, rule.d, rule.eps, rule.variance)
        if prior:
            _fixed_prior(rule, w, s, r, g, c, n)
        else:
            _fixed_loop(rule, w, s, r, g, c, n)
    elif rule.kind == SECTION4:
        if prior:
            _section4_prior(rule, w, s, r, g, c, n)
        else:
            _section4_loop(rule, w, s, r, g, c, n)
    elif rule.kind == ADAGRAD:
        if prior:
            _adagrad_prior(rule, w, s, r, g, c, n)
        else:
            _adagrad_loop(rule, w, s, r, g, c, n)
    elif rule.kind == ADAM:
        if prior:
            _adam_prior(rule, w, s, r, g, c, n)
        else:
            _adam_loop(rule, w, s, r, g, c, n)
    elif prior:
        _every_prior(rule, w, s, r, g, c, n)
    else:
        _every_loop(rule, w, s, r, g, c, n)


@njit(**OPTIONS)
def _gather(to: Array, source: Array, at: Array, n: int) -> None:
    for i in range(n):
        to[i] = source[at[i]]


@njit(**OPTIONS)
def _scatter(to: Array, source: Array, at: Array, n: int) -> None:
    for i in range(n):
        to[at[i]] = source[i]


@njit(inline="always", **OPTIONS)
def _step_class(rule: Rule, arrays: Arrays, k: int, n: int, g: Array, c: Array, few: Buffers) -> None:
    """One step on class row k: on all of it (n < 0), or on its n entries few.at, gathered and put back."""
    w, s, r = arrays.weight[k], arrays.state[k], arrays.state2[k if rule.kind >= ADAM else 0]
    to_w, to_s, to_r, m = w, s, r, w.shape[0]
    if n >= 0:
        to_w, to_r, m = few.few_w, few.few_r, n
        _gather(to_w, w, few.at, n)
        if rule.kind != ROWWISE_ADAGRAD:
            to_s = few.few_s
            _gather(to_s, s, few.at, n)
        if rule.kind >= ADAM:
            _gather(to_r, r, few.at, n)
    _step(rule, to_w, to_s, to_r, g, c, m)
    if n >= 0:
        _scatter(w, to_w, few.at, n)
        if rule.kind != ROWWISE_ADAGRAD:
            _scatter(s, to_s, few.at, n)
        if rule.kind >= ADAM:
            _scatter(r, to_r, few.at, n)


@njit(cache=True, **OPTIONS)
def push_biases(classes: Array, g: Array, c: Array, arrays_: tuple, rule_: tuple, few_: tuple) -> None:
    """One step on the biases of distinct classes; where the rows share a number, biases do not."""
    arrays, rule, few, n = Arrays(*arrays_), Rule(*rule_), Buffers(*few_), classes.shape[0]
    kind = ADAGRAD if rule.kind == ROWWISE_ADAGRAD else rule.kind
    rule = Rule(kind, rule.prior, rule.rate, rule.a, rule.b, rule.c, rule.d, rule.eps, rule.variance)
    for i in range(n):
        c[i] *= arrays.inverse_rows
    _gather(few.few_w, arrays.bias, classes, n)
    _gather(few.few_s, arrays.bias_state, classes, n)
    if rule.kind >= ADAM:
        _gather(few.few_r, arrays.bias_state2, classes, n)
    _step(rule, few.few_w, few.few_s, few.few_r, g, c, n)
    _scatter(arrays.bias, few.few_w, classes, n)
    _scatter(arrays.bias_state, few.few_s, classes, n)
    if rule.kind >= ADAM:
        _scatter(arrays.bias_state2, few.few_r, classes, n)


@njit(**OPTIONS)
def _add(g: Array, x: Array, a: Any) -> None:
    for d in range(x.shape[0]):
        g[d] = g[d] + a * x[d]


@njit(**OPTIONS)
def _add4(g: Array, x0: Array, x1: Array, x2: Array, x3: Array, a0: Any, a1: Any, a2: Any, a3: Any) -> None:
    """As four times _add, bit for bit, but g is read and written once."""
    for d in range(x0.shape[0]):
        g[d] = (((g[d] + a0 * x0[d]) + a1 * x1[d]) + a2 * x2[d]) + a3 * x3[d]


@njit(**OPTIONS)
def _sum_dense(groups: Groups, j: int, x: Array, grad: Array, share: Array, few: Buffers) -> None:
    """g = sum of grad x and c = sum of share [x != 0] over the pairs of class j."""
    order, row = groups.order, groups.row
    p, last = groups.start[j], groups.start[j + 1]
    if share.shape[0] > 0:
        for q in range(p, last):
            x0, a0 = x[row[q]], share[order[q]]
            for d in range(x0.shape[0]):
                few.c[d] = few.c[d] + (a0 if x0[d] != 0 else share.dtype.type(0))
    while p + 4 <= last:
        x0, x1, x2, x3 = x[row[p]], x[row[p + 1]], x[row[p + 2]], x[row[p + 3]]
        a0, a1, a2, a3 = grad[order[p]], grad[order[p + 1]], grad[order[p + 2]], grad[order[p + 3]]
        _add4(few.g, x0, x1, x2, x3, a0, a1, a2, a3)
        p += 4
    while p < last:
        _add(few.g, x[row[p]], grad[order[p]])
        p += 1


@njit(**OPTIONS)
def _sum_sparse(groups: Groups, j: int, csr: Csr, grad: Array, share: Array, few: Buffers) -> None:
    """As _sum_dense, by slots."""
    for p in range(groups.start[j], groups.start[j + 1]):
        b, o = groups.row[p], groups.order[p]
        begin, end = csr.indptr[b], csr.indptr[b + 1]
        slot, value, a = csr.slot[begin:end], csr.value[begin:end], grad[o]
        for q in range(slot.shape[0]):
            few.g[slot[q]] += a * value[q]
        if share.shape[0] > 0:
            for q in range(slot.shape[0]):
                few.c[slot[q]] += share[o]


@njit(**OPTIONS)
def _mark(groups: Groups, j: int, csr: Csr, w: Array, s: Array, few: Buffers) -> Any:
    """List the slots that the pairs of class j touch, each once, and send for their weights and states."""
    n = np.uint64(0)
    for p in range(groups.start[j], groups.start[j + 1]):
        b = groups.row[p]
        begin, end = csr.indptr[b], csr.indptr[b + 1]
        slot, index = csr.slot[begin:end], csr.column[begin:end]
        for q in range(slot.shape[0]):
            few.at[n] = slot[q]
            n += np.uint64(few.seen[slot[q]] == 0)
            few.seen[slot[q]] = 1
            prefetch(w, index[q])
            prefetch(s, index[q])
    return np.int64(n)


@njit(**OPTIONS)
def _collect(n: int, csr: Csr, arrays: Arrays, prior: int, few: Buffers) -> None:
    """Take the sums out of g and c, leaving zeros, and turn slots into features."""
    for i in range(n):
        u = few.at[i]
        few.few_g[i] = few.g[u]
        few.g[u] = 0
        few.seen[u] = 0
        few.at[i] = csr.feature[u] if csr.feature.shape[0] > 0 else u
        if prior == PRIOR_UNBIASED:
            few.few_c[i] = few.c[u] * arrays.inverse_counts[few.at[i]]
            few.c[u] = 0


@njit(cache=True, **OPTIONS)
def push_groups(
    lo: int,
    hi: int,
    groups_: tuple,
    csr_: tuple,
    x: Array,
    grad: Array,
    share: Array,
    arrays_: tuple,
    rule_: tuple,
    bias_g: Array,
    bias_c: Array,
    few_: tuple,
) -> None:
    """Classes lo..hi of the groups, from dense rows `x` or, where it has none, from `csr`.

    A class row whose pairs hold many non-zeros for its length is stepped as a whole, another where it is
    touched: either way the work is that of the non-zeros. Gradients of the biases are left in bias_g.
    """
    groups, csr, arrays, rule, few = Groups(*groups_), Csr(*csr_), Arrays(*arrays_), Rule(*rule_), Buffers(*few_)
    D = arrays.weight.shape[1]
    for j in range(lo, hi):
        nonzeros = 0
        total = total_c = grad.dtype.type(0)
        for p in range(groups.start[j], groups.start[j + 1]):
            nonzeros += csr.indptr[groups.row[p] + 1] - csr.indptr[groups.row[p]]
            total += grad[groups.order[p]]
            if share.shape[0] > 0:
                total_c += share[groups.order[p]]
        bias_g[j], bias_c[j] = total, total_c
        k, n, g, c = groups.classes[j], -1, few.g, few.c
        if x.shape[0] > 0:
            _sum_dense(groups, j, x, grad, share, few)
        elif csr.feature.shape[0] == 0 and 4 * nonzeros > D:
            _sum_sparse(groups, j, csr, grad, share, few)
        elif nonzeros == 0:
            n = 0
        else:
            n, g, c = _mark(groups, j, csr, arrays.weight[k], arrays.state[k], few), few.few_g, few.few_c
            _sum_sparse(groups, j, csr, grad, share, few)
            _collect(n, csr, arrays, rule.prior, few)
        if n < 0 and rule.prior == PRIOR_UNBIASED:
            for d in range(D):
                c[d] *= arrays.inverse_counts[d]
        if n != 0:
            _step_class(rule, arrays, k, n, g, c, few)


@njit(cache=True, **OPTIONS)
def spread(a: Array, column: Array, label_a: Array, label_column: Array, out: Array) -> None:
    """a (B, C) and the labels' own, by block of 16 distinct classes: out (blocks, B, 16). Column -1: left out."""
    out[...] = 0
    for b in range(a.shape[0]):
        for c in range(a.shape[1]):
            out[column[c] // LANES, b, column[c] % LANES] += a[b, c]
        if label_column[b] >= 0:
            out[label_column[b] // LANES, b, label_column[b] % LANES] += label_a[b]


@njit(**OPTIONS)
def _sum_block(csr: Csr, factor: Array, a: Array, tile: Array, to: Array, bias: Array) -> None:
    """to[s, u] = sum over non-zeros (b, u) of factor a[b, s], sixteen s at once. `tile` is zero before and after."""
    flat = a.reshape(-1)
    bias[:LANES] = 0
    for b in range(a.shape[0]):
        for q in range(csr.indptr[b], csr.indptr[b + 1]):
            i = np.uint64(q)
            add_lanes(tile, np.uint64(csr.slot[i]) * np.uint64(LANES), factor[i], flat, b * LANES)
        for s in range(LANES):
            bias[s] += a[b, s]
    for u0 in range(0, to.shape[1], CHUNK):
        for s in range(LANES):
            for u in range(u0, min(u0 + CHUNK, to.shape[1])):
                to[s, u] = tile[np.uint64(u * LANES + s)]
                tile[np.uint64(u * LANES + s)] = 0


@njit(cache=True, **OPTIONS)
def push_blocks(
    lo: int,
    hi: int,
    classes: Array,
    csr_: tuple,
    ones: Array,
    grad: Array,
    share: Array,
    arrays_: tuple,
    rule_: tuple,
    bias_g: Array,
    bias_c: Array,
    few_: tuple,
    tile: Array,
    rows_g: Array,
    rows_c: Array,
) -> None:
    """Blocks lo..hi of 16 distinct classes; grad[block, b] holds the gradients of one row's 16 scores."""
    csr, arrays, rule, few = Csr(*csr_), Arrays(*arrays_), Rule(*rule_), Buffers(*few_)
    U, numbered = rows_g.shape[1], csr.feature.shape[0] > 0
    if numbered:
        few.at[:U] = csr.feature
    for block in range(lo, hi):
        _sum_block(csr, csr.value, grad[block], tile, rows_g, bias_g[block * LANES :])
        if rule.prior == PRIOR_UNBIASED:
            _sum_block(csr, ones, share[block], tile, rows_c, bias_c[block * LANES :])
        for s in range(min(LANES, classes.shape[0] - block * LANES)):
            g, c = rows_g[s], rows_c[s]
            if rule.prior == PRIOR_UNBIASED:
                for u in range(U):
                    c[u] *= arrays.inverse_counts[csr.feature[u] if numbered else u]
            if U > 0:
                _step_class(rule, arrays, classes[block * LANES + s], U if numbered else -1, g, c, few)
