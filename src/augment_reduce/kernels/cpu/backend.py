"""Numba twins of `reference`: the same names, shapes and results, at the speed of the memory they touch.

    pairs    sorted by class: a weight row and its optimiser state are visited once, while they are in cache
    shared   sixteen classes side by side: sparse rows times a small dense tile, and the same backwards

Work and scratch are those of the non-zeros of the pairs, whatever K, D and N. Results do not depend on the number of
threads (`threads.num_threads`). Data are read where they lie, through a memory map as well.
CSR rows must not hold a feature twice; explicit zeros are fine.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..protocol import Parameters, Prior, RowOptimizer
from ..rows import DenseRows, MappedDenseRows, Rows, SparseRows
from . import classes as classes_kernels
from . import paper_steps, products
from . import push as push_kernels
from . import scores as scores_kernels
from .arguments import arrays_of, bias_sums, buffers, contiguous, in_shares, rule_kernels, rule_of, values_of
from .batch import Batch, in_place, load
from .by_rows import StepByRows
from .classes import check_classes, group_by_class
from .cross_fitted import CrossFittedGrid, CrossFittedSoftmax
from .door import check_classes_fit, check_pairs_fit, check_rows_fit, check_shapes
from .few_weights import line_of, push_rows
from .lanes import LANES
from .rules import RuleKernels, push_biases
from .types import Array, Arrays, Csr, Groups, Rule
from .work import WORK, run, split

__all__ = [
    "cross_fitted_grid",
    "cross_fitted_softmax",
    "draw_without_replacement",
    "few_weights",
    "natural_gradient",
    "pair_scores",
    "push_pairs",
    "push_shared",
    "reparameterised",
    "shared_scores",
    "step_by_rows",
    "uniforms",
    "with_label",
]  # fmt: skip

# Several verbs of a step in one pass, which the local steps look for.
cross_fitted_softmax, cross_fitted_grid = CrossFittedSoftmax, CrossFittedGrid
natural_gradient, reparameterised = paper_steps.natural_gradient, paper_steps.draw_e_and_m
NO_LABELS = np.empty(0, np.int64)
FEW_CLASSES = 2**11
PAIRS_A_CLASS = 1  # from so many on biases are summed row by row
FEW_WEIGHTS = 2**15  # entries of K x D whose gradient stays in the second cache: no need to go class by class


def few_weights(X: Rows, weight: Tensor | Array) -> bool:
    """Whether rows are dense and weights so few that going row by row, each once, is the fastest way.

    It looks at every class in every step, so these must be few too."""
    return isinstance(X, DenseRows) and 0 < math.prod(weight.shape) <= FEW_WEIGHTS and len(weight) <= FEW_CLASSES


def _read_in_place(X: Rows, rows: Array, weight: Array) -> tuple[Array, Array] | None:
    """Dense rows where they lie, and their places there, for `few_weights`; a copy of those that stay on disk."""
    if not few_weights(X, weight) or not len(rows):
        return None
    if isinstance(X, MappedDenseRows) and X.dtype == weight.dtype:
        return X.block(rows), np.arange(len(rows))
    x = in_place(X, rows, weight.dtype)
    return None if x is None else (x, rows)


def step_by_rows(
    X: Rows, labels: Tensor, e_and_m: Callable[..., int], parameters: Parameters, optimizer: RowOptimizer,
    prior: Prior | None,
) -> StepByRows | None:  # fmt: skip
    """Score to push in one pass, for classes of each row, by one of `paper_steps`; None where going row by row is not
    the fastest way, or rows cannot be read where they lie."""
    weight = contiguous("weight", parameters.weight)
    x = in_place(X, NO_LABELS, weight.dtype) if few_weights(X, weight) else None
    if x is None:
        return None
    return StepByRows(x, values_of(labels, torch.int64), e_and_m, parameters, optimizer, prior)


def pair_scores(
    X: Rows, rows: Array, classes: Tensor, weight: Tensor, bias: Tensor, own_rows: Array | None = None
) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[b, c]] + bias[classes[b, c]]"""
    w, beta, pairs = contiguous("weight", weight), contiguous("bias", bias), values_of(classes, torch.int64)
    check_rows_fit(X, rows, w, beta)
    check_pairs_fit(pairs, rows, own_rows)
    out = np.empty(pairs.shape, w.dtype)
    read = _read_in_place(X, rows, w) if pairs.size else None
    if read is not None:
        x, rows = read
        check_classes(pairs, len(w))
        scores_kernels.score_rows(pairs, x, rows if own_rows is None else rows[own_rows], w, beta, out)
        return torch.from_numpy(out)
    n_classes = pairs.shape[1] if own_rows is None else 0  # what shared classes need, and the push after them
    batch = load(X, rows, w.dtype, n_classes=n_classes) if pairs.size and w.shape[1] else None
    if batch is None or batch.empty:
        check_classes(pairs, len(w))
        return torch.from_numpy(beta.take(pairs, out=out, mode="clip"))
    groups = group_by_class(pairs, len(w))
    if own_rows is not None:
        groups = groups._replace(row=own_rows.astype(np.uint32)[groups.row])
    scores_kernels.score_pairs(batch, groups, w, beta, out.reshape(-1))
    return torch.from_numpy(out)


def shared_scores(X: Rows, rows: Array, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """psi[b, c] = x[b] . weight[classes[c]] + bias[classes[c]]"""
    w, beta, chosen = contiguous("weight", weight), contiguous("bias", bias), values_of(classes, torch.int64)
    check_rows_fit(X, rows, w, beta)
    check_classes_fit(chosen)
    check_classes(chosen, len(w))
    out = np.empty((len(rows), len(chosen)), w.dtype)
    batch = load(X, rows, w.dtype, n_classes=0) if out.size and w.shape[1] else None
    if batch is not None and batch.full and batch.dense is not None:
        products.score_shared(batch.dense, chosen, w, beta, out)
        return torch.from_numpy(out)
    out[...] = beta[chosen]
    if batch is not None and batch.csr is not None and len(batch.csr.value):
        scores_kernels.score_shared(batch.csr, chosen, w, out)
    return torch.from_numpy(out)


def with_label(grad: Tensor, row_scale: Tensor | float) -> Tensor:
    """From derivatives by the gaps psi_k - psi_y to those by the scores; the label's, minus their sum, comes first."""
    g = values_of(grad, grad.dtype)
    scale = values_of(row_scale, grad.dtype) if isinstance(row_scale, Tensor) else np.array([row_scale], g.dtype)
    check_shapes(g.shape[:1], row_scale=row_scale if isinstance(row_scale, Tensor) else None)
    out = np.empty((g.shape[0], g.shape[1] + 1), g.dtype)
    classes_kernels.with_label(g, scale, int(isinstance(row_scale, Tensor)), out)
    return torch.from_numpy(out)


def uniforms(seed: int, B: int, S: int) -> Tensor:
    """B x S numbers in [0, 1), those of `reference` for the same seed."""
    out = np.empty((B, S))
    classes_kernels.splitmix(seed, out.reshape(-1))
    return torch.from_numpy(out)


def draw_without_replacement(uniforms: Tensor, n: int, labels: Tensor | None = None) -> Tensor:
    """Floyd's algorithm: S of range(n) a row, no repeats; the very picks of `reference` for the same uniforms."""
    u = uniforms.contiguous().numpy()
    B, S = u.shape
    if n < S:
        raise ValueError(f"Expected at most n={n} draws without replacement, found {S} a row.")
    out = np.empty((B, S), np.int64)
    own = NO_LABELS if labels is None else values_of(labels, torch.int64)
    check_shapes((B,), labels=labels)
    if out.size:
        cuts = split(B, lambda: np.full(B, 8 * S))
        size = classes_kernels.table_size(S)
        tables = WORK.array("table", (len(cuts) - 1) * size, np.int64).reshape(-1, size)
        run(classes_kernels.floyd, cuts, (u, n, own, out), [(table,) for table in tables])
    return torch.from_numpy(out)


def _csr(batch: Batch | None, B: int, dtype: np.dtype) -> Csr:
    """The sparse rows, or empty ones where there are none."""
    if batch is not None and batch.csr is not None:
        return batch.csr
    index = WORK.array("no_index", 0, np.uint32)
    nowhere = WORK.array("zeros", B, np.int64)
    return Csr(nowhere, nowhere, index, index, WORK.array("none", 0, dtype), index)


def _push_groups(
    groups: Groups,
    batch: Batch | None,
    B: int,
    grad: Array,
    share: Array,
    arrays: Arrays,
    rule: Rule,
    kernels: RuleKernels,
) -> None:
    dtype, D, G = arrays.weight.dtype, arrays.weight.shape[1], len(groups.classes)
    csr, x = _csr(batch, B, dtype), WORK.array("none", 0, dtype).reshape(0, 0)
    each, U = len(csr.value) // B, len(csr.feature) or D
    if batch is not None and batch.dense is not None:
        x, each, U = batch.dense, D // 8, D

    def work() -> Array:
        pairs = np.diff(groups.start)
        return pairs * (each + 8) + np.minimum(D, pairs * each)

    cuts = split(G, work)
    few, bias = buffers(len(cuts) - 1, U, G, dtype), bias_sums(G, dtype)
    at = np.arange(B)
    push = kernels.generated(push_kernels.push_groups, len(x) > 0)
    run(push, cuts, (groups, csr, x, at, grad, share, arrays, rule, *bias), [(f,) for f in few])
    run(kernels.generated(push_biases), [], (groups.classes, *bias, arrays, rule, few[0]))


def biases_in_line(X: Rows, D: int, K: int, n_pairs: int) -> bool:
    """Whether all biases are summed at once where no row of all the data has a feature, and going through all biases
    costs no more than going through the pairs."""
    without_features = D == 0 or (isinstance(X, SparseRows) and not len(X.values))
    return without_features and n_pairs >= PAIRS_A_CLASS * K


def _push_rows(
    pairs: Array,
    x: Array,
    in_line: bool,
    rows: Array,
    grad: Array,
    share: Array,
    arrays: Arrays,
    rule: Rule,
    kernels: RuleKernels,
) -> None:
    """Row by row, or biases alone where `x` has no columns: no sorting, but scratch of K numbers or four gradients."""
    K, dtype = len(arrays.weight), arrays.weight.dtype
    check_classes(pairs, K)
    most = min(K, pairs.size)
    if x.size or in_line:
        line = line_of(K, x.shape[1], len(share) > 0)
        sums = WORK.array("line", line[-1], dtype)
        run(
            kernels.generated(push_rows),
            [],
            (pairs, x, rows, grad.reshape(pairs.shape), share, arrays, rule, line, sums),
        )
        return
    of_all = (WORK.array("sum_g", K, dtype), WORK.array("sum_c", K, dtype), WORK.array("sum_seen", K, np.uint8))
    flat = (pairs.reshape(-1), WORK.array("touched", most + 1, np.int64))
    few = buffers(1, 0, most, dtype)[0]
    push = kernels.generated(push_kernels.push_pair_biases)
    run(push, [], (flat, grad, share, arrays, rule, of_all, *bias_sums(most, dtype), few))


def push_pairs(
    X: Rows,
    rows: Array,
    classes: Tensor,
    grad: Tensor,
    share: Tensor | None,
    parameters: Parameters,
    optimizer: RowOptimizer,
    t: int,
    prior: Prior | None,
) -> None:
    """One optimiser step on every entry (class, feature) that a pair with a non-zero feature touches."""
    arrays, pairs = arrays_of(parameters, optimizer, prior), values_of(classes, torch.int64)
    dtype = arrays.weight.dtype
    check_rows_fit(X, rows, arrays.weight, arrays.bias)
    check_pairs_fit(pairs, rows, None)
    check_shapes(pairs.shape, grad=grad, share=share)
    if pairs.size == 0:
        return
    rule, kernels = rule_of(optimizer, t, prior, dtype), rule_kernels(optimizer, prior, share is not None)
    g, c = values_of(grad, parameters.weight.dtype).reshape(-1), WORK.array("none", 0, dtype)
    if share is not None and in_shares(prior):
        c = values_of(share, parameters.weight.dtype).reshape(-1)
    read = _read_in_place(X, rows, arrays.weight)
    if read is not None:
        x, rows = read
        _push_rows(pairs, x, True, rows, g, c, arrays, rule, kernels)
        return
    batch = load(X, rows, dtype, n_classes=pairs.shape[1]) if arrays.weight.shape[1] else None
    if batch is None or batch.empty:
        in_line = biases_in_line(X, arrays.weight.shape[1], len(arrays.weight), pairs.size)
        _push_rows(pairs, WORK.array("none", 0, dtype).reshape(0, 0), in_line, rows, g, c, arrays, rule, kernels)
    else:
        _push_groups(group_by_class(pairs, len(arrays.weight)), batch, len(rows), g, c, arrays, rule, kernels)


def _push_blocks(
    classes: Array, csr: Csr, grad: Array, share: Array, arrays: Arrays, rule: Rule, kernels: RuleKernels
) -> None:
    dtype, nnz = arrays.weight.dtype, len(csr.value)
    U = (len(csr.feature) or arrays.weight.shape[1]) if nnz else 0
    cuts = split(len(grad), lambda: np.full(len(grad), 2 * nnz + 2 * U * LANES))
    n = len(cuts) - 1
    few, bias = buffers(n, U, len(grad) * LANES, dtype), bias_sums(len(grad) * LANES, dtype)
    tiles = WORK.array("tile_g", n * U * LANES, dtype).reshape(n, U * LANES)
    rows_g, rows_c = (WORK.array(name, n * U * LANES, dtype).reshape(n, LANES, U) for name in ("rows_g", "rows_c"))
    ones = WORK.array("ones", nnz, dtype)
    if len(share):
        ones[:] = 1
    scratch = [(few[i], tiles[i], rows_g[i], rows_c[i]) for i in range(n)]
    push = kernels.generated(push_kernels.push_blocks)
    run(push, cuts, (classes, csr, ones, grad, share, arrays, rule, *bias), scratch)
    run(kernels.generated(push_biases), [], (classes, *bias, arrays, rule, few[0]))


def _push_products(
    classes: Array, x: Array, grad: Array, share: Array, arrays: Arrays, rule: Rule, kernels: RuleKernels
) -> None:
    """As `_push_blocks`, for rows that are dense."""
    (B, D), n, dtype = x.shape, len(classes), arrays.weight.dtype

    def by_class(blocks: Array) -> Array:
        """(n, B) of (blocks, B, 16)"""
        return np.ascontiguousarray(blocks.transpose(0, 2, 1).reshape(-1, B)[:n])

    g, (bias_g, bias_c) = WORK.array("line_g", n * D, dtype).reshape(n, D), bias_sums(n, dtype)
    of_class = by_class(grad)
    products.multiply(of_class, x, g)
    bias_g[:] = of_class.sum(1)
    c = WORK.array("no_shares", D, dtype).reshape(1, D)
    if len(share):
        c, of_class = WORK.array("line_c", n * D, dtype).reshape(n, D), by_class(share)
        bias_c[:] = of_class.sum(1)
        products.count_shares(x, of_class, bias_c, c)
    cuts = split(n, lambda: np.full(n, 8 * D))
    run(kernels.generated(products.push_lines), cuts, (classes, g, c, arrays, rule), [()] * (len(cuts) - 1))
    few = buffers(1, 0, n, dtype)[0]
    run(kernels.generated(push_biases), [], (classes, bias_g, bias_c, arrays, rule, few))


def push_shared(
    X: Rows,
    rows: Array,
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
    own_rows: Array | None = None,
) -> None:
    """As push_pairs, for classes shared by the minibatch and each row's own beside them, its label for one."""
    arrays, kind, B = arrays_of(parameters, optimizer, prior), parameters.weight.dtype, len(rows)
    (K, D), dtype = arrays.weight.shape, arrays.weight.dtype
    chosen, own_class = values_of(classes, torch.int64), values_of(own, torch.int64)
    check_rows_fit(X, rows, arrays.weight, arrays.bias)
    check_classes_fit(chosen)
    check_pairs_fit(own_class, rows, own_rows)
    check_shapes((B, len(chosen)), grad=grad, share=share)
    check_shapes(own_class.shape, own_grad=own_grad, own_share=own_share)
    if B == 0:
        return
    with_shares = share is not None and own_share is not None
    rule, kernels = rule_of(optimizer, t, prior, dtype), rule_kernels(optimizer, prior, with_shares)
    check_classes(chosen, K)
    batch = load(X, rows, dtype, n_classes=0) if D else None

    # One step an entry: a row's own class that is among the shared ones joins their column, as repeated classes do.
    distinct, column = np.unique(chosen, return_inverse=True)
    own_column = np.searchsorted(distinct, own_class)
    own_column[np.append(distinct, -1)[own_column] != own_class] = -1
    alone = np.flatnonzero(own_column < 0)
    g, own_g = values_of(grad, kind), values_of(own_grad, kind)
    c = own_c = none = WORK.array("none", 0, dtype)
    shape = (-(-len(distinct) // LANES), B, LANES)
    blocks, blocks_c = WORK.array("blocks", shape[0] * B * LANES, dtype).reshape(shape), none.reshape(0, 0, 0)
    of_row = np.arange(B) if own_rows is None else own_rows
    classes_kernels.spread(g, column, own_g, own_column, of_row, blocks)
    if share is not None and own_share is not None and in_shares(prior):
        c, own_c = values_of(share, kind), values_of(own_share, kind)
        blocks_c = WORK.array("blocks_c", blocks.size, dtype).reshape(shape)
        classes_kernels.spread(c, column, own_c, own_column, of_row, blocks_c)
        own_c = own_c.reshape(-1)[alone]
    if len(distinct) and batch is not None and batch.full and batch.dense is not None:
        _push_products(distinct, batch.dense, blocks, blocks_c, arrays, rule, kernels)
    elif len(distinct):
        _push_blocks(distinct, _csr(batch, B, dtype), blocks, blocks_c, arrays, rule, kernels)
    if len(alone):
        groups = group_by_class(own_class.reshape(-1)[alone][:, None], K)
        groups = groups._replace(row=of_row[alone // own_class.shape[1]].astype(np.uint32)[groups.row])
        _push_groups(groups, batch, B, own_g.reshape(-1)[alone], own_c, arrays, rule, kernels)
