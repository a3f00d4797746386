"""Plain torch, obvious and slow on purpose: the oracle that the fast kernels are compared with.

Every kernel module offers these names, with these shapes:

    pair_scores(X, rows, classes (B, C), weight, bias, own_rows (B,) | None)    -> psi (B, C)
    shared_scores(X, rows, classes (C,), weight, bias)    -> psi (B, C)
    push_pairs(X, rows, classes (B, C), grad (B, C), share (B, C) | None, parameters, optimizer, t, prior)
    push_shared(X, rows, classes (C,), grad (B, C), own (B, P), own_grad (B, P), share (B, C) | None,
                own_share (B, P) | None, parameters, optimizer, t, prior, own_rows (B,) | None)
    with_label(grad (B, S), row_scale)                    -> (B, 1 + S), scaled, minus their sum before them
    uniforms(seed, B, S)                                  -> (B, S) float64 in [0, 1), the same for the same seed
    draw_without_replacement(uniforms (B, S), n, labels)  -> (B, S) of range(n), no repeats within a row

`own_rows`: to which of `rows` each line belongs, where it is not line b to row b.
`grad` is the derivative of the whole objective by the score of that (row, class) pair; `share` is the
pair's weight in the prior (see `optim.Prior`).
A push sums the gradients of all pairs of a class first, then lets the optimiser take one step on the
entries touched. Nothing here knows of noise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .protocol import Parameters, Prior, RowOptimizer
from .rows import Rows


def pair_scores(
    X: Rows, rows: np.ndarray, classes: Tensor, weight: Tensor, bias: Tensor, own_rows: np.ndarray | None = None
) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[b, c]] + bias[classes[b, c]]"""
    x = X.dense(rows if own_rows is None else rows[own_rows], weight.dtype)
    return (x[:, None, :] * weight[classes]).sum(dim=-1) + bias[classes]


def shared_scores(X: Rows, rows: np.ndarray, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[c]] + bias[classes[c]]"""
    return X.dense(rows, weight.dtype) @ weight[classes].T + bias[classes]


def push_pairs(
    X: Rows,
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
    weight, bias = parameters.weight, parameters.bias
    x = X.dense(rows, weight.dtype)
    C = classes.shape[1]
    pair_row = torch.arange(len(x)).repeat_interleave(C)
    touched, slot = torch.unique(classes.reshape(-1), return_inverse=True)
    g_pair = grad.reshape(-1)
    g = torch.zeros(len(touched), x.shape[1], dtype=weight.dtype).index_add_(0, slot, g_pair[:, None] * x[pair_row])
    g_bias = torch.zeros(len(touched), dtype=weight.dtype).index_add_(0, slot, g_pair)
    c, c_bias = torch.zeros_like(g), torch.zeros_like(g_bias)
    if prior is not None and share is not None:
        s_pair = share.reshape(-1)
        c.index_add_(0, slot, s_pair[:, None] * (x[pair_row] != 0)).mul_(prior.inverse_counts)
        c_bias.index_add_(0, slot, s_pair).mul_(prior.inverse_rows)
    for value, gradient, prior_share, states, rule in (
        (weight, g, c, parameters.weight_state, optimizer),
        (bias, g_bias, c_bias, parameters.bias_state, optimizer.for_biases()),
    ):
        entries, entry_states = value[touched], [s[touched] for s in states]
        rule.apply(entries, gradient, prior_share, entry_states, t, prior)
        value[touched] = entries
        for s, new in zip(states, entry_states, strict=True):
            s[touched] = new


def push_shared(
    X: Rows,
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
    (B, C), P = grad.shape, own.shape[1]
    of_line = np.arange(B) if own_rows is None else own_rows
    place = np.concatenate([of_line.repeat(P), np.arange(B).repeat(C)])  # every pair in a line for itself
    pairs = torch.cat([own.flatten(), classes.repeat(B)])[:, None]
    all_grad, all_share = torch.cat([own_grad.flatten(), grad.flatten()])[:, None], None
    if share is not None and own_share is not None:
        all_share = torch.cat([own_share.flatten(), share.flatten()])[:, None]
    push_pairs(X, rows[place], pairs, all_grad, all_share, parameters, optimizer, t, prior)


def with_label(grad: Tensor, row_scale: Tensor | float) -> Tensor:
    """From derivatives by the gaps psi_k - psi_y to those by the scores; the label's, minus their sum, comes first."""
    scaled = grad * (row_scale[:, None] if isinstance(row_scale, Tensor) else row_scale)
    return torch.cat([-scaled.sum(dim=1, keepdim=True), scaled], dim=1)


def uniforms(seed: int, B: int, S: int) -> Tensor:
    """The outputs of splitmix64 from `seed` on (Steele, Lea and Flood 2014), their upper 53 bits as a fraction."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, B * S + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(B, S)


def draw_without_replacement(uniforms: Tensor, n: int, labels: Tensor | None = None) -> Tensor:
    """Floyd's algorithm, one row at a time: S of range(n), every subset equally likely, in O(S) memory.

    For j = n-S, ..., n-1: take floor(u (j+1)), or j itself if that was taken before. With labels they are S of
    range(n + 1) without the row's label: what lies from the label on moves up by one.
    """
    B, S = uniforms.shape
    out = torch.empty(B, S, dtype=torch.int64)
    for b in range(B):
        taken: set[int] = set()
        for s in range(S):
            j = n - S + s
            pick = min(int(float(uniforms[b, s]) * (j + 1)), j)
            pick = j if pick in taken else pick
            taken.add(pick)
            out[b, s] = pick
    return out if labels is None else step_over(out, labels)


def step_over(picks: Tensor, labels: Tensor) -> Tensor:
    """0..n-1 onto 0..n without the row's label."""
    return picks + (picks >= labels[:, None])
