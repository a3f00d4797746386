"""What the kernels pass around: named tuples, which Numba takes apart into their arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
INLINE: dict[str, Any] = {**OPTIONS, "forceinline": True}  # handing over ten arrays takes as long as a short row does
PART: dict[str, Any] = {**OPTIONS, "inline": "always"}  # never compiled by itself: half the time, where that is not hot


class Csr(NamedTuple):
    """Rows of a minibatch that touch U features: row b has `column[begin[b]:end[b]]`, there or in the whole data."""

    begin: Array  # (B,) int64
    end: Array
    column: Array  # uint32, the features
    slot: Array  # uint32, their numbers among the U; is `column` where all D count as touched
    value: Array  # no zeros
    feature: Array  # (U,) uint32, the feature of a slot; empty where all D count as touched


class Groups(NamedTuple):
    """Pairs by class: those of `classes[j]` are `order[start[j]:start[j+1]]`, in the order given."""

    classes: Array  # (G,) int64, ascending
    start: Array  # (G+1,) int64
    order: Array  # (P,) uint32, where the pair's score and gradient are
    row: Array  # (P,) uint32, its row in the minibatch


class Arrays(NamedTuple):
    """Weights (K, D) and biases (K,) with their one or two states; a state not needed has no entries."""

    weight: Array
    state: Array  # (K, D), or (K, 1) for row-wise Adagrad
    state2: Array
    bias: Array
    bias_state: Array
    bias_state2: Array
    inverse_counts: Array
    inverse_rows: Any


class Rule(NamedTuple):
    """An optimiser's step in numbers, in the dtype of the weights: see the entry rules in `rules`."""

    rate: Any
    a: Any  # the first number of `RowOptimizer.scalars_of` after the rate
    b: Any  # 1 - a
    c: Any  # the second
    d: Any  # 1 - c
    eps: Any  # the third
    variance: Any
    bias_rate: Any  # in place of `rate` where the entries are biases


class Buffers(NamedTuple):
    """One thread's scratch, for at least U touched features and G classes."""

    g: Array  # (U,) gradient of one class row; zero between classes, as are c and seen
    c: Array  # (U,) its prior share
    seen: Array  # (U,) uint8
    at: Array  # (max(U, G),) uint32, the touched features or classes
    few_g: Array  # (max(U, G),) their gradients, shares, weights and states, one after the other
    few_c: Array
    few_w: Array
    few_s: Array
    few_r: Array
