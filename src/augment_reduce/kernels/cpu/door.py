"""Do these arrays belong together? Asked once a call, in time that does not depend on D, K or N.

Compiled code does not check bounds: a weight matrix of four columns, read at the places of a million features, gives a
score made of foreign memory. So the lengths are compared here, before a kernel is called. What is in the arrays is
looked at where it is gone through anyway: rows and features when a minibatch is loaded, classes when they are sorted.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..rows import Rows, SparseRows
from .types import Array
from .work import OutOfRange, all_below


def _no(name: str, expected: str, found: object) -> ValueError:
    return ValueError(f"Expected {name} {expected}, found {found}.")


def check_rows_fit(X: Rows, rows: Array, weight: Array, bias: Array) -> None:
    """Data, which of its rows, weights (K, D) and biases (K,)."""
    if weight.ndim != 2 or bias.ndim != 1 or len(weight) != len(bias):
        raise _no("weight (K, D) and bias (K,)", "of the same classes", f"{weight.shape} and {bias.shape}")
    if weight.dtype != bias.dtype or weight.dtype.kind != "f":
        raise _no("weight and bias", "of the same floating dtype", f"{weight.dtype} and {bias.dtype}")
    if X.n_features != weight.shape[1]:
        raise _no("weight", f"with a column for each of the {X.n_features} features of X", f"{weight.shape[1]}")
    if rows.ndim != 1:
        raise _no("rows", "in one dimension", f"shape {rows.shape}")
    if isinstance(X, SparseRows) and not len(X.indices) == len(X.values) >= X.indptr[-1]:
        raise _no("indices and values of X", f"of {X.indptr[-1]} entries each", f"{len(X.indices)}, {len(X.values)}")


def check_pairs_fit(pairs: Array, rows: Array, own_rows: Array | None) -> None:
    """Classes of pairs (B, C): a line for each of the rows, or one for each of `own_rows`, which are places in them."""
    lines = rows if own_rows is None else own_rows
    if pairs.ndim != 2 or lines.ndim != 1 or len(pairs) != len(lines):
        raise _no("classes (B, C)", f"with a line for each of {len(lines)} rows", f"shape {pairs.shape}")
    if own_rows is not None and not all_below(np.ascontiguousarray(own_rows), len(rows)):
        raise OutOfRange(f"Expected own_rows in [0, {len(rows)}), found {own_rows.min()} to {own_rows.max()}.")


def check_classes_fit(classes: Array) -> None:
    if classes.ndim != 1:
        raise _no("classes", "shared by the minibatch, in one dimension", f"shape {classes.shape}")


def check_shapes(expected: tuple[int, ...], **given: Array | Tensor | None) -> None:
    """What goes by pairs, rows or weights has a number for each; by name, None where there is none."""
    for name, found in given.items():
        if found is not None and tuple(found.shape) != tuple(expected):
            raise _no(name, f"of shape {tuple(expected)}", f"{tuple(found.shape)}")


def check_states_fit(
    weight: Array, bias: Array, states: list[Array], bias_states: list[Array], n_states: int, *, rowwise: bool
) -> None:
    """What a rule keeps for each weight, or for each row of them, and for each bias."""
    K, D = weight.shape
    if len(states) < n_states or len(bias_states) < n_states:
        raise _no("the optimiser's state", f"of {n_states} arrays", f"{len(states)} and {len(bias_states)} of biases")
    for of_weights, of_biases in zip(states[:n_states], bias_states[:n_states], strict=True):
        check_shapes((K,) if rowwise else (K, D), weight_state=of_weights)
        check_shapes((K,), bias_state=of_biases)
    for state in (*states[:n_states], *bias_states[:n_states]):
        if state.dtype != weight.dtype:
            raise _no("the optimiser's state", f"of dtype {weight.dtype}, as the weights", f"{state.dtype}")
