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
from ._cpu_types import OPTIONS, Array, Arrays, Buffers, Rule

CHUNK = 64  # features transposed at a time
AHEAD = 4  # classes whose rows are sent for before their turn


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


@njit(**OPTIONS)
def _with_rate(rule: Rule, kind: int, rate: Any) -> Rule:
    return Rule(kind, rule.prior, rate, rule.a, rule.b, rule.c, rule.d, rule.eps, rule.variance, rule.bias_rate)


@njit(**OPTIONS)
def _step(rule: Rule, w: Array, s: Array, r: Array, g: Array, c: Array, n: int) -> None:
    """One step on n entries; for row-wise Adagrad s is the row's one number."""
    prior = rule.prior == PRIOR_UNBIASED
    if rule.prior == PRIOR_TOUCHED:
        _pull(w, g, n, rule.variance)
    if rule.kind == ROWWISE_ADAGRAD:
        s[0] += w.dtype.type(_mean_square(g, n))
        rate = rule.rate / (np.sqrt(s[0]) + rule.eps)
        fixed = _with_rate(rule, rule.kind, rate)
        if prior:
            _fixed_prior(fixed, w, s, r, g, c, n)
        else:
            _fixed_loop(fixed, w, s, r, g, c, n)
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


# Between compiled functions arrays travel as plain tuples, in the order of the named ones in `_cpu_types`. Views are
# made where they are used: one chosen between two has its references counted, which costs as much as a short row.


@njit(**OPTIONS)
def _step_row(rule: Rule, arrays: tuple, k: int, g: Array, c: Array) -> None:
    """One step on the whole of class row k."""
    weight, state, state2, inverse_counts = arrays[0], arrays[1], arrays[2], arrays[6]
    if rule.prior == PRIOR_UNBIASED:
        for d in range(weight.shape[1]):
            c[d] *= inverse_counts[d]
    _step(rule, weight[k], state[k], state2[k if rule.kind >= ADAM else 0], g, c, weight.shape[1])


@njit(**OPTIONS)
def _step_at(rule: Rule, arrays: tuple, k: int, g: Array, c: Array, n: int, few: tuple) -> None:
    """One step on the n entries `at` of class row k, gathered and put back."""
    weight, state, state2 = arrays[0], arrays[1], arrays[2]
    at, few_w, few_s, few_r = few[3], few[6], few[7], few[8]
    _gather(few_w, weight[k], at, n)
    if rule.kind == ROWWISE_ADAGRAD:
        _step(rule, few_w, state[k], few_r, g, c, n)
    else:
        _gather(few_s, state[k], at, n)
        if rule.kind >= ADAM:
            _gather(few_r, state2[k], at, n)
        _step(rule, few_w, few_s, few_r, g, c, n)
        _scatter(state[k], few_s, at, n)
        if rule.kind >= ADAM:
            _scatter(state2[k], few_r, at, n)
    _scatter(weight[k], few_w, at, n)


@njit(cache=True, **OPTIONS)
def push_biases(classes: Array, g: Array, c: Array, arrays_: tuple, rule_: tuple, few_: tuple) -> None:
    """One step on the biases of distinct classes; where the rows share a number, biases do not."""
    arrays, rule, few, n = Arrays(*arrays_), Rule(*rule_), Buffers(*few_), classes.shape[0]
    kind = ADAGRAD if rule.kind == ROWWISE_ADAGRAD else rule.kind
    rule = _with_rate(rule, kind, rule.bias_rate)
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
def _sum_bias(j: int, groups: tuple, indptr: Array, grad: Array, share: Array, bias_g: Array, bias_c: Array) -> int:
    """Gradient and prior share of the bias of class j; returns how many non-zeros its pairs hold."""
    start, order, row, nonzeros = groups[1], groups[2], groups[3], 0
    g = c = grad.dtype.type(0)
    for p in range(start[j], start[j + 1]):
        nonzeros += indptr[row[p] + 1] - indptr[row[p]]
        g += grad[order[p]]
        if share.shape[0] > 0:
            c += share[order[p]]
    bias_g[j], bias_c[j] = g, c
    return nonzeros


@njit(**OPTIONS)
def _sum_dense(j: int, groups: tuple, x: Array, grad: Array, share: Array, g: Array, c: Array) -> None:
    """g = sum of grad x and c = sum of share [x != 0] over the pairs of class j."""
    start, order, row = groups[1], groups[2], groups[3]
    p, last = start[j], start[j + 1]
    if share.shape[0] > 0:
        for q in range(p, last):
            x0, a0 = x[row[q]], share[order[q]]
            for d in range(x0.shape[0]):
                c[d] = c[d] + (a0 if x0[d] != 0 else share.dtype.type(0))
    while p + 4 <= last:
        x0, x1, x2, x3 = x[row[p]], x[row[p + 1]], x[row[p + 2]], x[row[p + 3]]
        a0, a1, a2, a3 = grad[order[p]], grad[order[p + 1]], grad[order[p + 2]], grad[order[p + 3]]
        _add4(g, x0, x1, x2, x3, a0, a1, a2, a3)
        p += 4
    while p < last:
        _add(g, x[row[p]], grad[order[p]])
        p += 1


@njit(**OPTIONS)
def _sum_sparse(j: int, groups: tuple, csr: tuple, grad: Array, share: Array, g: Array, c: Array) -> None:
    """As _sum_dense, by slots."""
    start, order, row, indptr, slots, values = groups[1], groups[2], groups[3], csr[0], csr[2], csr[3]
    for p in range(start[j], start[j + 1]):
        begin, end = indptr[row[p]], indptr[row[p] + 1]
        slot, value, a = slots[begin:end], values[begin:end], grad[order[p]]
        for q in range(slot.shape[0]):
            g[slot[q]] += a * value[q]
        if share.shape[0] > 0:
            for q in range(slot.shape[0]):
                c[slot[q]] += share[order[p]]


@njit(**OPTIONS)
def _mark(j: int, groups: tuple, csr: tuple, w: Array, s: Array, seen: Array, at: Array) -> Any:
    """List the slots that the pairs of class j touch, each once, and send for their weights and states."""
    start, row, indptr, columns, slots, n = groups[1], groups[3], csr[0], csr[1], csr[2], np.uint64(0)
    for p in range(start[j], start[j + 1]):
        begin, end = indptr[row[p]], indptr[row[p] + 1]
        slot, column = slots[begin:end], columns[begin:end]
        for q in range(slot.shape[0]):
            at[n] = slot[q]
            n += np.uint64(seen[slot[q]] == 0)
            seen[slot[q]] = 1
            prefetch(w, column[q])
            prefetch(s, column[q])
    return np.int64(n)


@njit(**OPTIONS)
def _collect(n: int, feature: Array, inverse_counts: Array, prior: int, few: tuple) -> None:
    """Take the sums out of g and c, leaving zeros, and turn slots into features."""
    g, c, seen, at, few_g, few_c = few[0], few[1], few[2], few[3], few[4], few[5]
    for i in range(n):
        u = at[i]
        d = feature[u] if feature.shape[0] > 0 else u
        few_g[i] = g[u]
        if prior == PRIOR_UNBIASED:
            few_c[i] = c[u] * inverse_counts[d]
            c[u] = 0
        g[u] = 0
        seen[u] = 0
        at[i] = d


@njit(cache=True, **OPTIONS)
def push_groups(
    lo: int,
    hi: int,
    groups: tuple,
    csr: tuple,
    x: Array,
    grad: Array,
    share: Array,
    arrays: tuple,
    rule_: tuple,
    bias_g: Array,
    bias_c: Array,
    few: tuple,
) -> None:
    """Classes lo..hi of the groups, from dense rows `x` or, where it has none, from `csr`.

    A class row whose pairs hold many non-zeros for its length is stepped as a whole, another where it is
    touched: either way the work is that of the non-zeros. Gradients of the biases are left in bias_g.
    """
    classes, weight, state, indptr, feature, g, c = groups[0], arrays[0], arrays[1], csr[0], csr[4], few[0], few[1]
    rule, D, dense, numbered = Rule(*rule_), weight.shape[1], x.shape[0] > 0, feature.shape[0] > 0
    for j in range(lo, hi):
        k = classes[j]
        if j + AHEAD < hi:
            for d in range(0, min(D, 64), 16):
                prefetch(weight, classes[j + AHEAD] * D + d)
                prefetch(state, classes[j + AHEAD] * state.shape[1] + d)
        nonzeros = _sum_bias(j, groups, indptr, grad, share, bias_g, bias_c)
        if dense:
            _sum_dense(j, groups, x, grad, share, g, c)
            _step_row(rule, arrays, k, g, c)
        elif not numbered and 4 * nonzeros > D:
            _sum_sparse(j, groups, csr, grad, share, g, c)
            _step_row(rule, arrays, k, g, c)
        elif nonzeros > 0:
            n = _mark(j, groups, csr, weight[k], state[k], few[2], few[3])
            _sum_sparse(j, groups, csr, grad, share, g, c)
            _collect(n, feature, arrays[6], rule.prior, few)
            _step_at(rule, arrays, k, few[4], few[5], n, few)


@njit(**OPTIONS)
def _sum_biases(pairs: tuple, grad: Array, share: Array, sums: tuple, bias_g: Array, bias_c: Array) -> int:
    """Gradients and shares of the biases of the classes met, listed as they are met; returns how many. No sorting:
    `sums` holds K numbers, zero before and after."""
    classes, touched = pairs
    g, c, seen = sums
    n = 0
    for p in range(classes.shape[0]):
        k = classes[p]
        touched[n] = k
        n += seen[k] == 0
        seen[k] = 1
        g[k] += grad[p]
        if share.shape[0] > 0:
            c[k] += share[p]
    for i in range(n):
        k = touched[i]
        bias_g[i], bias_c[i] = g[k], c[k]
        g[k], c[k], seen[k] = 0, 0, 0
    return n


@njit(cache=True, **OPTIONS)
def push_rows(
    pairs: tuple, x: Array, at: Array, grad: Array, share: Array, arrays: tuple, rule_: tuple, sums: tuple,
    bias_g: Array, bias_c: Array, few: tuple,
) -> None:  # fmt: skip
    """All pairs (flat, `per_row` of every row in turn), from dense rows x[at], where a gradient of size K x D is small.

    The rows are read once, in their order, instead of once for every class; each class still sums its pairs in the
    order given. Where x has no columns there are only biases.
    """
    rule, D = Rule(*rule_), arrays[0].shape[1]
    n = _sum_biases(pairs, grad, share, sums, bias_g, bias_c)
    if x.shape[1] > 0:
        classes, g, c, per_row = pairs[0], few[0], few[1], pairs[0].shape[0] // at.shape[0]
        for b in range(at.shape[0]):
            row = x[at[b]]
            for p in range(b * per_row, (b + 1) * per_row):
                k = classes[p]
                _add(g[k * D : (k + 1) * D], row, grad[p])
                if share.shape[0] > 0:
                    mine = c[k * D : (k + 1) * D]
                    for d in range(D):
                        mine[d] = mine[d] + (share[p] if row[d] != 0 else share.dtype.type(0))
        for i in range(n):
            k = pairs[1][i]
            _step_row(rule, arrays, k, g[k * D : (k + 1) * D], c[k * D : (k + 1) * D])
    push_biases(pairs[1][:n], bias_g, bias_c, arrays, rule_, few)


@njit(**OPTIONS)
def _sum_block(indptr: Array, slot: Array, factor: Array, a: Array, tile: Array, to: Array, bias: Array) -> None:
    """to[s, u] = sum over non-zeros (b, u) of factor a[b, s], sixteen s at once. `tile` is zero before and after."""
    flat = a.reshape(-1)
    bias[:LANES] = 0
    for b in range(a.shape[0]):
        for q in range(indptr[b], indptr[b + 1]):
            i = np.uint64(q)
            add_lanes(tile, np.uint64(slot[i]) * np.uint64(LANES), factor[i], flat, b * LANES)
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
    csr: tuple,
    ones: Array,
    grad: Array,
    share: Array,
    arrays: tuple,
    rule_: tuple,
    bias_g: Array,
    bias_c: Array,
    few: tuple,
    tile: Array,
    rows_g: Array,
    rows_c: Array,
) -> None:
    """Blocks lo..hi of 16 distinct classes; grad[block, b] holds the gradients of one row's 16 scores."""
    indptr, slot, value, feature, inverse_counts, at = csr[0], csr[2], csr[3], csr[4], arrays[6], few[3]
    rule, U, numbered = Rule(*rule_), rows_g.shape[1], feature.shape[0] > 0
    if numbered:
        at[:U] = feature
    for block in range(lo, hi):
        _sum_block(indptr, slot, value, grad[block], tile, rows_g, bias_g[block * LANES :])
        if rule.prior == PRIOR_UNBIASED:
            _sum_block(indptr, slot, ones, share[block], tile, rows_c, bias_c[block * LANES :])
        for s in range(min(LANES, classes.shape[0] - block * LANES) if U > 0 else 0):
            k, g, c = classes[block * LANES + s], rows_g[s], rows_c[s]
            if not numbered:
                _step_row(rule, arrays, k, g, c)
                continue
            if rule.prior == PRIOR_UNBIASED:
                for u in range(U):
                    c[u] *= inverse_counts[feature[u]]
            _step_at(rule, arrays, k, g, c, U, few)
