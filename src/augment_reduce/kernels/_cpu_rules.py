"""The row optimisers' steps on the entries of one class row, or on biases: what `optim` says in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from ..optim import ADAGRAD, ADAM, PRIOR_TOUCHED, PRIOR_UNBIASED, ROWWISE_ADAGRAD, SECTION4
from ._cpu_types import INLINE, OPTIONS, Array, Arrays, Buffers, Rule
from .cache import cached_njit

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
    return njit(**INLINE)(loop)


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


@njit(**INLINE)
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


@njit(**INLINE)
def step_row(rule: Rule, arrays: tuple, k: int, g: Array, c: Array) -> None:
    """One step on the whole of class row k."""
    weight, state, state2, inverse_counts = arrays[0], arrays[1], arrays[2], arrays[6]
    if rule.prior == PRIOR_UNBIASED:
        for d in range(weight.shape[1]):
            c[d] *= inverse_counts[d]
    _step(rule, weight[k], state[k], state2[k if rule.kind >= ADAM else 0], g, c, weight.shape[1])


@njit(**INLINE)
def step_at(rule: Rule, arrays: tuple, k: int, g: Array, c: Array, n: int, few: tuple) -> None:
    """One step on the n entries `at` of class row k, gathered and put back."""
    weight, state, state2 = arrays[0], arrays[1], arrays[2]
    at, few_w, few_s, few_r = few[3], few[6], few[7], few[8]
    _gather(few_w, weight[k], at, n)
    if rule.kind == ROWWISE_ADAGRAD:
        few_s[0] = state[k, 0]
    else:
        _gather(few_s, state[k], at, n)
    if rule.kind >= ADAM:
        _gather(few_r, state2[k], at, n)
    _step(rule, few_w, few_s, few_r, g, c, n)
    if rule.kind == ROWWISE_ADAGRAD:
        state[k, 0] = few_s[0]
    else:
        _scatter(state[k], few_s, at, n)
    if rule.kind >= ADAM:
        _scatter(state2[k], few_r, at, n)
    _scatter(weight[k], few_w, at, n)


@njit(**OPTIONS)
def _of_biases(rule: Rule) -> Rule:
    """Their rate is their own; and where the rows share a number, biases do not."""
    return _with_rate(rule, ADAGRAD if rule.kind == ROWWISE_ADAGRAD else rule.kind, rule.bias_rate)


@njit(**OPTIONS)
def step_biases(lo: int, hi: int, g: Array, c: Array, arrays_: tuple, rule_: tuple) -> None:
    """One step on the biases of classes lo..hi."""
    arrays, rule = Arrays(*arrays_), _of_biases(Rule(*rule_))
    first, last = (lo, hi) if rule.kind >= ADAM else (0, 0)  # of the second state, where there is one
    for i in range(hi - lo):
        c[i] *= arrays.inverse_rows
    _step(rule, arrays.bias[lo:hi], arrays.bias_state[lo:hi], arrays.bias_state2[first:last], g, c, hi - lo)


@cached_njit(**OPTIONS)
def push_biases(classes: Array, g: Array, c: Array, arrays_: tuple, rule_: tuple, few_: tuple) -> None:
    """One step on the biases of distinct classes."""
    arrays, rule, few, n = Arrays(*arrays_), _of_biases(Rule(*rule_)), Buffers(*few_), classes.shape[0]
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
