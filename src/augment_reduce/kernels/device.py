"""The kernels of `reference` for weights and rows, sparse or dense, that live on a GPU or on any other torch device.

    pairs    every (class, feature) entry that a pair touches, sorted, so that its gradients are summed in a fixed order
    shared   sparse rows times a dense tile (classes x the minibatch's features), and the same backwards

Weights, optimiser state and rows stay on the device. Classes, gradients and scores, which are small, come from the CPU
and go back there: that is where the local step runs and where classes are drawn, so that a fit makes the same numbers
as on the CPU, to rounding. Work is that of the non-zeros of the pairs, whatever K, D and N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu.backend import draw_without_replacement, uniforms
from .protocol import Parameters, Prior, RowOptimizer
from .reference import with_label
from .rows import DenseRows, Rows, SparseRows

__all__ = [
    "DeviceRows",
    "draw_without_replacement",
    "pair_scores",
    "push_pairs",
    "push_shared",
    "shared_scores",
    "uniforms",
    "with_label",
]

MOST = 1 << 26  # numbers of one intermediate array


@dataclass(frozen=True)
class DeviceRows:
    """`rows.Rows` with a copy on a device. Row pointers stay on the host, so that sizes are known without waiting."""

    source: Rows
    values: Tensor
    indices: Tensor | None  # None: dense
    device: torch.device
    mapped: ClassVar[bool] = False

    @classmethod
    def of(cls, X: Rows, device: torch.device, dtype: torch.dtype) -> DeviceRows:
        values = torch.from_numpy(np.ascontiguousarray(X.values)).to(device, dtype)
        if isinstance(X, DenseRows):
            return cls(X, values, None, device)
        return cls(X, values, torch.from_numpy(X.indices.astype(np.int64, copy=False)).to(device), device)

    @property
    def n_rows(self) -> int:
        return self.source.n_rows

    @property
    def n_features(self) -> int:
        return self.source.n_features

    @property
    def n_nonzero(self) -> int:
        return self.source.n_nonzero

    def feature_counts(self, rows: np.ndarray | None = None) -> np.ndarray:
        return self.source.feature_counts(rows)


class Batch(NamedTuple):
    """Rows of a minibatch, side by side: entry e is `value[e]` at `feature[e]` of row `row[e]`; `length` (B,)."""

    row: Tensor
    feature: Tensor
    value: Tensor
    length: Tensor


def load(X: DeviceRows, rows: np.ndarray) -> Batch:
    """The entries of sparse rows; a dense row has one for each feature."""
    B, D = len(rows), X.n_features
    if isinstance(X.source, SparseRows) and X.indices is not None:
        start = X.source.indptr[rows].astype(np.int64)
        length = X.source.indptr[rows + 1].astype(np.int64) - start
        before = np.cumsum(length) - length
        at = torch.from_numpy(np.arange(int(length.sum())) + np.repeat(start - before, length)).to(X.device)
        row = torch.from_numpy(np.repeat(np.arange(B), length)).to(X.device)
        return Batch(row, X.indices[at], X.values[at], torch.from_numpy(length).to(X.device))
    row = torch.arange(B, device=X.device).repeat_interleave(D)
    value = X.values[torch.from_numpy(rows).to(X.device)].reshape(-1)
    feature = torch.arange(D, device=X.device).repeat(B)
    return Batch(row, feature, value, torch.full((B,), D, dtype=torch.int64, device=X.device))


def summed(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive stretches along the first axis, in order: no atomics, the same from run to run."""
    if len(values) == 0:
        return values.new_zeros(len(lengths), *values.shape[1:])
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, initial=0)


def blocks(B: int, size: int) -> list[slice]:
    """Rows in blocks, so that an array with `size` numbers for each of B rows stays below MOST."""
    step = max(1, MOST // max(1, size))
    return [slice(start, min(start + step, B)) for start in range(0, B, step)]


def mean_length(X: DeviceRows) -> int:
    return X.n_features if X.indices is None else -(-len(X.values) // max(1, X.n_rows))


def pair_scores(
    X: DeviceRows, rows: np.ndarray, classes: Tensor, weight: Tensor, bias: Tensor, own_rows: np.ndarray | None = None
) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[b, c]] + bias[classes[b, c]], on the CPU."""
    rows = rows if own_rows is None else rows[own_rows]
    own = classes.to(weight.device)
    psi = bias[own]
    for part in blocks(len(rows), mean_length(X) * classes.shape[1]):
        batch = load(X, rows[part])
        at = own[part][batch.row] * weight.shape[1] + batch.feature[:, None]
        psi[part] += summed(weight.view(-1)[at] * batch.value[:, None], batch.length)
    return psi.cpu()


def shared_scores(X: DeviceRows, rows: np.ndarray, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[c]] + bias[classes[c]], on the CPU."""
    own = classes.to(weight.device)
    psi = bias[own].repeat(len(rows), 1)
    if len(rows) and weight.shape[1]:
        x, features = tile(load(X, rows), len(rows))
        for part in class_blocks(len(own), len(features)):
            psi[:, part] += x @ weight[own[part][:, None], features].T
    return psi.cpu()


def tile(batch: Batch, B: int) -> tuple[Tensor, Tensor]:
    """The minibatch as a dense (B, U) matrix over the U features it has, and those features."""
    features, column = torch.unique(batch.feature, return_inverse=True)
    x = torch.zeros(B, len(features), dtype=batch.value.dtype, device=batch.value.device)
    x[batch.row, column] = batch.value  # CSR rows hold no feature twice
    return x, features


def class_blocks(n: int, n_features: int) -> list[slice]:
    return blocks(n, max(1, n_features))


def push_pairs(
    X: DeviceRows,
    rows: np.ndarray,
    classes: Tensor,
    grad: Tensor,
    share: Tensor | None,
    parameters: Parameters,
    optimizer: RowOptimizer,
    t: int,
    prior: Prior | None,
) -> None:
    """One optimiser step on every entry (class, feature) that a pair with a non-zero feature touches."""
    weight = parameters.weight
    D = weight.shape[1]
    own, g = classes.to(weight.device), grad.to(weight.device, weight.dtype)
    s = None if prior is None or share is None else share.to(weight.device, weight.dtype)
    batch = load(X, rows)
    entry = (own[batch.row] * D + batch.feature[:, None]).reshape(-1)
    of_entry = (g[batch.row] * batch.value[:, None]).reshape(-1)
    shares = None if s is None else (s[batch.row] * (batch.value != 0)[:, None]).reshape(-1)
    entries, sums, sum_shares = merged(entry, of_entry, shares)
    if prior is not None:
        sum_shares = sum_shares * prior.inverse_counts.to(weight.device)[entries % max(1, D)]
    step_on_entries(parameters, entries, sums, sum_shares, optimizer, t, prior)
    touched, sums, sum_shares = merged(own.reshape(-1), g.reshape(-1), None if s is None else s.reshape(-1))
    of_bias = scaled(sum_shares, prior)
    step_on(parameters.bias, parameters.bias_state, touched, sums, of_bias, optimizer.for_biases(), t, prior)


def merged(key: Tensor, g: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct keys, and the sums of what belongs to each."""
    ordered, order = torch.sort(key, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    sums = summed(g[order], counts)
    return distinct, sums, torch.zeros_like(sums) if share is None else summed(share[order], counts)


def scaled(share: Tensor, prior: Prior | None) -> Tensor:
    return share if prior is None else share * prior.inverse_rows


def step_on(
    value: Tensor, states: list[Tensor], at: Tensor, g: Tensor, share: Tensor, optimizer: RowOptimizer, t: int,
    prior: Prior | None,
) -> None:  # fmt: skip
    """The optimiser's rule on the numbers `at`, which are distinct."""
    entries, entry_states = value[at], [s[at] for s in states]
    optimizer.apply(entries, g, share, entry_states, t, prior)
    value[at] = entries
    for s, new in zip(states, entry_states, strict=True):
        s[at] = new


def step_on_entries(
    parameters: Parameters, entries: Tensor, g: Tensor, share: Tensor, optimizer: RowOptimizer, t: int,
    prior: Prior | None,
) -> None:  # fmt: skip
    """The same for entries of the weights, in order. A rule with one number a row wants each row's entries together."""
    weight, states = parameters.weight, parameters.weight_state
    if not optimizer.rowwise:
        step_on(weight.view(-1), [s.view(-1) for s in states], entries, g, share, optimizer, t, prior)
        return
    D = weight.shape[1]
    touched, counts = torch.unique_consecutive(entries // max(1, D), return_counts=True)
    if not len(touched):
        return
    row = torch.arange(len(touched), device=weight.device).repeat_interleave(counts)
    column = torch.arange(len(entries), device=weight.device) - (torch.cumsum(counts, 0) - counts)[row]

    def padded(values: Tensor) -> Tensor:
        return values.new_zeros(len(touched), int(counts.max())).index_put_((row, column), values)

    w, state = padded(weight.view(-1)[entries]), [s[touched] for s in states]
    optimizer.apply(w, padded(g), padded(share), state, t, prior)
    weight.view(-1)[entries] = w[row, column]
    for s, new in zip(states, state, strict=True):
        s[touched] = new


def push_shared(
    X: DeviceRows,
    rows: np.ndarray,
    classes: Tensor,
    grad: Tensor,
    own: Tensor,
    own_grad: Tensor,
    share: Tensor | None,
    own_share: Tensor | None,
    parameters: Parameters,
    optimizer: RowOptimizer,
    t: int,
    prior: Prior | None,
    own_rows: np.ndarray | None = None,
) -> None:
    """As push_pairs, for classes shared by the minibatch and each row's own beside them, its label for one."""
    device, dtype = parameters.weight.device, parameters.weight.dtype
    distinct, column = np.unique(classes.numpy(), return_inverse=True)
    own_column = np.searchsorted(distinct, own.numpy())
    among = np.append(distinct, -1)[own_column] == own.numpy()
    of_row = np.arange(len(rows)) if own_rows is None else own_rows
    where = column, own_column, among, of_row, len(distinct)
    coefficients = [by_class(grad, own_grad, *where).to(device, dtype)]
    if share is not None and own_share is not None:
        coefficients.append(by_class(share, own_share, *where).to(device, dtype))
    if len(distinct):
        _push_tile(X, rows, torch.from_numpy(distinct).to(device), coefficients, parameters, optimizer, t, prior)
    b, p = (torch.from_numpy(index) for index in np.nonzero(~among))
    if len(b):  # one step an entry: those among the shared classes had theirs above
        rest = own_share[b, p][:, None] if own_share is not None and share is not None else None
        push_pairs(
            X, rows[of_row[b.numpy()]], own[b, p][:, None], own_grad[b, p][:, None], rest, parameters, optimizer, t,
            prior,
        )  # fmt: skip


def by_class(
    of_class: Tensor, of_own: Tensor, column: np.ndarray, own_column: np.ndarray, among: np.ndarray,
    of_row: np.ndarray, n: int,
) -> Tensor:  # fmt: skip
    """(n, B): coefficients of the rows in each distinct class; repeats, and a row's own among them, add up."""
    total = torch.zeros(n, of_class.shape[0], dtype=of_class.dtype)
    total.index_add_(0, torch.from_numpy(column.reshape(-1)), of_class.T.contiguous())
    b, p = (torch.from_numpy(index) for index in np.nonzero(among))
    at = torch.from_numpy(own_column[among]), torch.from_numpy(of_row)[b]
    total.index_put_(at, of_own[b, p], accumulate=True)
    return total


def _push_tile(
    X: DeviceRows, rows: np.ndarray, distinct: Tensor, coefficients: list[Tensor], parameters: Parameters,
    optimizer: RowOptimizer, t: int, prior: Prior | None,
) -> None:  # fmt: skip
    """A dense tile (classes x the minibatch's features) of gradients and one of prior shares, then the rule on it."""
    weight, bias = parameters.weight, parameters.bias
    x, features = tile(load(X, rows), len(rows))
    felt = prior is not None and len(coefficients) > 1
    for part in class_blocks(len(distinct), len(features)):
        k = distinct[part]
        a = coefficients[0][part]
        g, g_bias = a @ x, a.sum(1)
        c, c_bias = torch.zeros_like(g), torch.zeros_like(g_bias)
        if felt:
            assert prior is not None
            s = coefficients[1][part]
            c = s @ (x != 0).to(x.dtype) * prior.inverse_counts.to(weight.device)[features]
            c_bias = s.sum(1) * prior.inverse_rows
        at = (k[:, None], features)
        entries = weight[at]
        states = [s[k] if optimizer.rowwise else s[at] for s in parameters.weight_state]
        optimizer.apply(entries, g, c, states, t, prior)
        weight[at] = entries
        for s, new in zip(parameters.weight_state, states, strict=True):
            s[k if optimizer.rowwise else at] = new
        step_on(bias, parameters.bias_state, k, g_bias, c_bias, optimizer.for_biases(), t, prior)
