"""The row rules' steps on the entries of one class row, or on biases: what `optim` says in torch operations.

A rule is one scalar function of one entry. Kernels that take steps are generated for one rule and one way in which the
prior acts, so that nothing is compiled that a fit does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..cache import KernelCache, cached_njit
from ..constants import (
    ADAGRAD,
    ADAM,
    PRIOR_TOUCHED,
    PRIOR_UNBIASED,
    ROWWISE_ADAGRAD,
    SECTION4,
    SECTION4_EVERY_ENTRY,
)
from .types import INLINE, OPTIONS, PART, Array, Arrays, Buffers, Rule

# The rules of optim.py for one entry: (rule, g, s, r) -> (step size h, gradient to follow, new s, new r), with g the
# gradient and s, r what the rule remembers of the entry.


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

    # Compiled code is linked by name: two loops of one name could be taken for each other.
    loop.__name__ = loop.__qualname__ = f"loop_of_{entry.__name__}_{'with' if with_prior else 'without'}_prior"
    return njit(**INLINE)(loop)


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
def _gather(to: Array, source: Array, at: Array, n: int) -> None:
    for i in range(n):
        to[i] = source[at[i]]


@njit(**OPTIONS)
def _scatter(to: Array, source: Array, at: Array, n: int) -> None:
    for i in range(n):
        to[at[i]] = source[i]


class Steps(NamedTuple):
    """The steps of one rule, for kernels: on a whole class row; on the entries `at` of one; on the biases lo..hi; and
    on those of a list of classes."""

    row: Callable[..., None]
    at: Callable[..., None]
    biases: Callable[..., None]
    listed_biases: Callable[..., None]


def _on_entries(entry: Callable, n_states: int, rowwise: bool, prior: int) -> Callable[..., None]:
    """One step on n entries; for a row-wise rule s is the row's one number."""
    unbiased, touched = prior == PRIOR_UNBIASED, prior == PRIOR_TOUCHED
    loop = _loop(_fixed, 0, unbiased) if rowwise else _loop(entry, n_states, unbiased)

    def step(rule: Rule, w: Array, s: Array, r: Array, g: Array, c: Array, n: int) -> None:
        if touched:
            _pull(w, g, n, rule.variance)
        if rowwise:
            s[0] += w.dtype.type(_mean_square(g, n))
            rate = rule.rate / (np.sqrt(s[0]) + rule.eps)
            loop(_with_rate(rule, rate), w, s, r, g, c, n)
        else:
            loop(rule, w, s, r, g, c, n)

    return njit(**INLINE)(step)


@njit(**OPTIONS)
def _with_rate(rule: Rule, rate: Any) -> Rule:
    return Rule(rate, rule.a, rule.b, rule.c, rule.d, rule.eps, rule.variance, rule.bias_rate)


# Between compiled functions arrays travel as plain tuples, in the order of the named ones in `types`. Views are made
# where they are used: one chosen between two has its references counted, which costs as much as a short row.


def steps_of(entry: Callable, n_states: int, rowwise: bool, prior: int) -> Steps:
    """The steps of a rule; biases have a number each where the rows share one."""
    of_weights = of_biases = _on_entries(entry, n_states, rowwise, prior)
    if rowwise:
        of_biases = _on_entries(_adagrad, n_states, False, prior)
    unbiased, two = prior == PRIOR_UNBIASED, n_states > 1

    @njit(**INLINE)
    def row(rule: Rule, arrays: tuple, k: int, g: Array, c: Array) -> None:
        weight, state, state2, inverse_counts = arrays[0], arrays[1], arrays[2], arrays[6]
        if unbiased:
            for d in range(weight.shape[1]):
                c[d] *= inverse_counts[d]
        of_weights(rule, weight[k], state[k], state2[k if two else 0], g, c, weight.shape[1])

    @njit(**INLINE)
    def at(rule: Rule, arrays: tuple, k: int, g: Array, c: Array, n: int, few: tuple) -> None:
        weight, state, state2 = arrays[0], arrays[1], arrays[2]
        where, few_w, few_s, few_r = few[3], few[6], few[7], few[8]
        _gather(few_w, weight[k], where, n)
        if rowwise:
            few_s[0] = state[k, 0]
        else:
            _gather(few_s, state[k], where, n)
        if two:
            _gather(few_r, state2[k], where, n)
        of_weights(rule, few_w, few_s, few_r, g, c, n)
        if rowwise:
            state[k, 0] = few_s[0]
        else:
            _scatter(state[k], few_s, where, n)
        if two:
            _scatter(state2[k], few_r, where, n)
        _scatter(weight[k], few_w, where, n)

    @njit(**OPTIONS)
    def biases(lo: int, hi: int, g: Array, c: Array, arrays_: tuple, rule_: tuple) -> None:
        arrays, rule = Arrays(*arrays_), Rule(*rule_)
        first, last = (lo, hi) if two else (0, 0)  # of the second state, where there is one
        for i in range(hi - lo):
            c[i] *= arrays.inverse_rows
        of = _with_rate(rule, rule.bias_rate)
        of_biases(of, arrays.bias[lo:hi], arrays.bias_state[lo:hi], arrays.bias_state2[first:last], g, c, hi - lo)

    @njit(**PART)
    def listed_biases(classes: Array, g: Array, c: Array, arrays_: tuple, rule_: tuple, few_: tuple) -> None:
        arrays, rule, few, n = Arrays(*arrays_), Rule(*rule_), Buffers(*few_), classes.shape[0]
        for i in range(n):
            c[i] *= arrays.inverse_rows
            few.at[i] = classes[i]
        _gather(few.few_w, arrays.bias, few.at, n)
        _gather(few.few_s, arrays.bias_state, few.at, n)
        if two:
            _gather(few.few_r, arrays.bias_state2, few.at, n)
        of_biases(_with_rate(rule, rule.bias_rate), few.few_w, few.few_s, few.few_r, g, c, n)
        _scatter(arrays.bias, few.few_w, few.at, n)
        _scatter(arrays.bias_state, few.few_s, few.at, n)
        if two:
            _scatter(arrays.bias_state2, few.few_r, few.at, n)

    return Steps(row, at, biases, listed_biases)


def push_biases(steps: Steps) -> Callable[..., None]:
    """The kernel of one step on the biases of distinct classes."""
    listed_biases = steps.listed_biases

    def push_biases(classes: Array, g: Array, c: Array, arrays: tuple, rule: tuple, few: tuple) -> None:
        listed_biases(classes, g, c, arrays, rule, few)

    return push_biases


class RuleKernels:
    """The kernels of one rule and one way in which the prior acts, compiled when they are first asked for."""

    def __init__(self, steps: Steps, name: str | None) -> None:
        self.steps, self.name = steps, name  # name: None is not kept on disk
        self._generated: dict[tuple, Callable[..., Any]] = {}

    def generated(self, make: Callable[..., Callable[..., Any]], *settings: Any) -> Callable[..., Any]:
        """make(steps, *settings), compiled once for these settings: numbers, or compiled functions."""
        key = (make, *settings)
        if key not in self._generated:
            names = [self.name, *map(_name_of, settings)]
            kept = [name for name in names if name is not None]
            compile_ = cached_njit("_".join(kept), **OPTIONS) if kept == names else njit(**OPTIONS)
            self._generated[key] = compile_(make(self.steps, *settings))
        return self._generated[key]


def _name_of(setting: Any) -> str | None:
    """What sets it apart from others on disk; None: a compiled function that is not kept there."""
    if not callable(setting):
        return str(setting)
    cache = getattr(setting, "_cache", None)
    return cache.function.__qualname__ if isinstance(cache, KernelCache) else None


BUILT_IN: dict[int, tuple[Callable, int, bool, str]] = {
    SECTION4: (_section4, 1, False, "section4"),
    SECTION4_EVERY_ENTRY: (_section4_every, 2, False, "section4_every"),
    ADAGRAD: (_adagrad, 1, False, "adagrad"),
    ROWWISE_ADAGRAD: (_adagrad, 1, True, "rowwise_adagrad"),
    ADAM: (_adam, 2, False, "adam"),
}
_KERNELS: dict[tuple, RuleKernels] = {}


def kernels_of(kind: int, prior: int, entry: Any = None, n_states: int = 1) -> RuleKernels:
    """The kernels of a rule of ours, by its number, or of a user's scalar function; made once a process."""
    entry = getattr(entry, "__func__", entry)  # of a class attribute, bound to the object it was asked of
    key = (kind, prior) if entry is None else (entry, n_states, prior)
    if key not in _KERNELS:
        if entry is None:
            own, n_states, rowwise, name = BUILT_IN[kind]
            _KERNELS[key] = RuleKernels(steps_of(own, n_states, rowwise, prior), f"{name}_{prior}")
        else:
            own = njit(**OPTIONS)(getattr(entry, "py_func", entry))
            _KERNELS[key] = RuleKernels(steps_of(own, n_states, False, prior), None)
    return _KERNELS[key]
