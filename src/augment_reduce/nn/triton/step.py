"""A head's step on a GPU, by Triton: `forward`, `backward` and `backward_and_update`, as in nn/_step.py.

A step is 11 launches (13 with local="fresh", one more with `combine`), allocates through torch only and does not
synchronise, so that it can be captured in a CUDA graph together with its network:

    prepare ─► (scores of the second sample ─► refine) ─► scores ─► finish ─► learn
    grad_hidden (─► combine), grad_rows ─► sort_blocks ─► merge ─► sum_chunks ─► update

Matrix products run in bfloat16 if `hidden` is bfloat16. For float32 they follow torch.set_float32_matmul_precision:
"highest" float32, "high" tf32, "medium" bfloat16. Sums are float32 always. Offsets into the weights are 64 bits wide.
Memory beyond the weights: B |S| numbers of the product's dtype, and a few times (B + |S|) D.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from ...kernels.constants import tail_gap_powers
from ...local.amortised import LABEL_RATE, LARGEST_RESIDUAL, OFFSET_RATE, SLOPE_RATE
from ...model.noise import Gumbel, Logistic, Normal
from .. import _hash
from .._columns import UNUSED, Columns, label_rows_of, with_labels
from .._draw import EVERY, UNIFORM, Drawn, SharedSampler
from .._local import MEAN_RATE, REFINE_NODES, hermite
from .._plain import LARGEST, LabelPart, RowGradient
from .._rows import ADAM, ROWWISE, RowUpdate
from .._step import Step
from .._targets import SKIPPED
from . import prepare as prepare_kernels
from . import rows as row_kernels
from . import score as score_kernels
from . import update as update_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NOISES = {Gumbel: 0, Normal: 1, Logistic: 2}
GIVEN = 4
TAIL_TERMS = 9  # as in `noise`
ROW_BLOCK, REPORT_BLOCK = 16, 32  # rows of a program in `prepare`, and in `finish`
SORTED = 64 if INTERPRETED else 512  # positions that one program sorts
MOST_MERGED = 1 << 15  # positions; beyond it torch.sort is faster than ranking them in all blocks


class Tile(NamedTuple):
    """Shape of one program's block (rows, columns, depth of a step of the product) and how it is compiled.

    `splits` programs share each block's sum.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1


# Of bfloat16 products, by kernel and whether there are many features. `scores` keeps its tile in registers until its
# end, and noises other than softmax's need more of them; grad_* have small outputs, and small tiles occupy all
# multiprocessors.
TILES: dict[tuple[str, bool], Tile] = {
    ("scores", False): Tile(128, 128, 64, 4, 3),
    ("scores", True): Tile(128, 256, 64, 8, 3),
    ("noise", False): Tile(64, 64, 64, 4, 3),
    ("noise", True): Tile(64, 128, 64, 4, 3),
    ("grad_hidden", False): Tile(128, 128, 64, 8, 3, 4),
    ("grad_hidden", True): Tile(128, 128, 64, 8, 4),
    ("grad_rows", False): Tile(128, 128, 64, 4, 4, 4),
    ("grad_rows", True): Tile(128, 128, 64, 4, 4),
}
FLOAT32 = Tile(64, 64, 32, 4, 2)
CHUNK = 16  # positions of one class that are summed at a time
WIDEST_ROW = 512  # features that one program of `update` holds; more are processed in blocks
UPDATE_BLOCK, UPDATE_FEW, UPDATE_WARPS = 128, 2, 1  # features of a program, positions it reads first


class Saved(NamedTuple):
    """Tensors for the backward pass. `scale` (B,) is row weight times floor factor, `at_label` (B,) row weight times
    grad_label."""

    hidden: Tensor
    rows: Tensor
    label_rows: Tensor
    classes: Tensor
    label: Tensor
    grad_class: Tensor
    scale: Tensor
    at_label: Tensor
    scaled: Tensor
    scale_columns: Tensor
    denominator: Tensor


def cdiv(n: int, size: int) -> int:
    """As triton.cdiv, which takes the host a hundred times as long."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tile(kernel: str, dtype: torch.dtype, D: int) -> Tile:
    if INTERPRETED:
        return Tile(32, 16, 16, 4, 1, 2)
    return TILES[kernel, D > 256] if dtype == torch.bfloat16 else FLOAT32


def forward(step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    """See nn/_step.py."""
    with torch.cuda.device_of(hidden):  # Triton launches on the current device
        return _forward(step, hidden, weight, bias)


def _forward(step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    hidden, weight = hidden.contiguous(), weight.contiguous()
    B, D = hidden.shape
    dtype, precision = product(hidden)
    noise, J, local = NOISES[type(step.noise)], 1 if step.local.softmax else step.local.n_nodes, step.local
    main, second = _plan(step, _hash.MAIN), _plan(step, _hash.SECOND)
    fresh = local.mode == "fresh" and step.parts is None
    S, S2 = main.size, second.size if fresh else 0
    new = functools.partial(torch.empty, device=hidden.device)
    wide, Q = functools.partial(new, dtype=torch.float32), local.n_parts
    label, row_weight, psi_y = new(B, dtype=torch.int32), wide(B), wide(B)
    planes = local.mode == "log-sum-exp"
    J_first = max(REFINE_NODES, J) if fresh and noise != 0 else J
    predicted, used, v_first = wide(Q, B), wide(Q, B), wide(B, J_first)
    v = wide(B, J) if fresh else v_first
    label_rows = new(B, D, dtype=dtype)
    copied = hidden if hidden.dtype == dtype else new(B, D, dtype=dtype)
    classes, log_weight, row_bias = new(S + S2, dtype=torch.int64), wide(S + S2), wide(S + S2)
    rows = new(S + S2, D, dtype=dtype)
    node, node_weight, tail = _tables(J, hidden.device)
    node_first, weight_first, _ = _tables(J_first, hidden.device)
    sampler_args = _sampler_args(step, main, second)
    block_d = _block_d(D, 128)
    grid = (cdiv(B, ROW_BLOCK) + cdiv(S, ROW_BLOCK) + cdiv(S2, ROW_BLOCK),)
    memory = local.mode == "persistent" and step.index is not None
    prepare_kernels.prepare[grid](
        hidden, weight, _or(bias, weight), step.target, _or(step.sample_weight, psi_y), _or(step.index, step.target),
        _or(None if step.parts is None else step.parts.float().contiguous(), psi_y),
        local.heights(hidden.float()) if planes else psi_y,
        local.slope, local.offset, local.label_slope, local.mean, local.label_mean, local.memory, local.visits,
        node_first, *sampler_args.tensors, step.counter, step.tally,
        label, row_weight, psi_y, label_rows, predicted, used, v_first, copied, classes, log_weight, rows, row_bias,
        B, D, S, S2, len(local.visits), step.ignore_index, step.key, len(weight), *sampler_args.sizes,
        NOISE=noise, J=J_first, KIND=main.kind, KIND_2=second.kind, HAS_BIAS=bias is not None,
        HAS_WEIGHT=step.sample_weight is not None, HAS_MEMORY=memory, HAS_PARTS=step.parts is not None,
        PLANES=planes, COPY=copied is not hidden, BLOCK=ROW_BLOCK, BLOCK_D=block_d,
    )  # fmt: skip
    main_columns = _columns(step, classes[:S], label, rows[:S], label_rows, row_bias[:S], log_weight[:S], weight, bias)
    C = len(main_columns.classes)
    shape = tile("scores" if noise == 0 else "noise", dtype, D)
    sums = wide(2 if noise == 0 else 3, cdiv(max(C, S2), shape.columns), B)
    grad_class = new(B, C, dtype=dtype)

    def score(of: _Columns, at: Tensor, weights: Tensor, store: bool) -> int:
        size, with_labels = len(of.classes), of.labels
        n_blocks = cdiv(size, shape.columns)
        extra = (
            (psi_y, psi_y, label, of.classes, of.classes, psi_y) if with_labels is None
            else (with_labels.expected, with_labels.share, with_labels.kind, with_labels.group, with_labels.row_group,
                  with_labels.n)
        )  # fmt: skip
        score_kernels.scores[(cdiv(B, shape.rows), n_blocks)](
            copied, of.rows, of.row_bias, of.log_weight, of.classes, label, at, weights, tail, *extra, grad_class, sums,
            B, size, D, NOISE=noise, IN_BATCH=with_labels is not None, J=len(weights), STORE=store,
            PRECISION=precision, EVEN_D=D % shape.depth == 0,
            BLOCK_B=shape.rows, BLOCK_S=shape.columns, BLOCK_D=shape.depth,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip
        return n_blocks

    if fresh:
        second_columns = _Columns(classes[S:], rows[S:], row_bias[S:], log_weight[S:])
        n_blocks = score(second_columns, v_first, weight_first, False)
        row_kernels.refine[(cdiv(B, 128),)](
            sums, psi_y, used, v_first, weight_first, v, node, step.counter, local.learned, B, n_blocks, step.key,
            local.second_share,
            NOISE=noise, J_FIRST=J_first, J=J, BLOCK=128,
        )  # fmt: skip
    n_blocks = score(main_columns, v, node_weight, True)

    per_row = step.reduction == "none"
    row_loss, scale, at_label = wide(B), wide(B), wide(B)
    scaled, scale_columns = (new(B if not per_row else 0, n, dtype=dtype) for n in (D, 16))
    reports = max(1, cdiv(B, REPORT_BLOCK))
    report, rho = wide(reports, 16 + 3 * D), wide(B if planes else 0)
    loss, denominator = wide(()), wide(())
    row_kernels.finish[(reports,)](
        hidden, sums, grad_class, psi_y, predicted, used, v, node_weight, row_weight, label,
        _or(step.index, step.target), local.mean, local.label_mean, local.memory, local.visits, local.learned,
        step.tally, row_loss, scale, at_label, scaled, scale_columns, rho, report,
        B, D, C, n_blocks, len(local.visits), float(step.floor or 0.0),
        math.log1p(LARGEST_RESIDUAL) if step.floor is None else float(step.floor), float(step.z_loss),
        NOISE=noise, J=J, FLOOR=step.floor is not None, Z_LOSS=step.z_loss > 0.0, LEARN=step.learn, HAS_MEMORY=memory,
        PLANES=planes, SCALED=not per_row, COLUMNS=shape.columns, BLOCK=REPORT_BLOCK, BLOCK_D=block_d,
    )  # fmt: skip
    row_kernels.learn[(cdiv(D, 32) if step.learn else 1,)](
        report, local.slope, local.offset, local.label_slope, local.mean, local.label_mean, local.learned, step.counter,
        step.tally, denominator if step.gauge is None else step.gauge, loss, denominator, D, reports,
        NOISE=noise, LEARN=step.learn, PLANES=planes, GAUGE=step.gauge is not None, MEAN=step.reduction == "mean",
        BLOCK=128, BLOCK_D=32,
        OFFSET_RATE=OFFSET_RATE, SLOPE_RATE=SLOPE_RATE, LABEL_RATE=LABEL_RATE, MEAN_RATE=MEAN_RATE,
    )  # fmt: skip
    if planes and step.learn:
        local.learn_planes(hidden.float(), rho, label >= 0, report[:, 2].sum())
    step.used = used
    of = main_columns
    saved = Saved(
        hidden, of.rows, label_rows, of.touched, label, grad_class, scale, at_label, scaled, scale_columns, denominator
    )
    return (row_loss if per_row else loss), saved


class _Columns(NamedTuple):
    """Columns of scores with their weight rows. With in-batch `labels`, `touched` has the rows for the gradients: the
    number of classes, a row of no class, for a column that is masked for all rows."""

    classes: Tensor
    rows: Tensor
    row_bias: Tensor
    log_weight: Tensor
    labels: Columns | None = None
    touched: Any = None


def _columns(
    step: Step, classes: Tensor, label: Tensor, rows: Tensor, label_rows: Tensor, row_bias: Tensor, log_weight: Tensor,
    weight: Tensor, bias: Tensor | None,
) -> _Columns:  # fmt: skip
    """The drawn classes and the labels of other rows (nn/_columns.py), for the kernel that scores them."""
    if not step.in_batch:
        return _Columns(classes, rows, row_bias, log_weight, None, classes)
    assert step.sampler is not None
    usable, safe = label >= 0, label.clamp_min(0).to(torch.int64)
    source = label_rows_of(len(label), label.device)
    of_label, is_usable, own_rows = (x if source is None else x[source] for x in (safe, usable, label_rows))
    every = torch.cat([classes, of_label])
    labels = with_labels(
        classes, safe, usable, step.group, step.sampler.expected(every), step.sampler.share_of(every), source
    )
    assert labels.kind is not None
    zero = own_rows.new_zeros(())
    both = torch.cat([rows, torch.where(is_usable[:, None], own_rows, zero)])
    of_bias = torch.zeros_like(of_label, dtype=row_bias.dtype) if bias is None else bias[of_label].to(row_bias.dtype)
    touched = torch.where(labels.kind == UNUSED, len(weight), every)
    return _Columns(every, both, torch.cat([row_bias, of_bias]), log_weight, labels, touched)


def backward(step: Step, saved: Saved, grad: Tensor, with_rows: bool = True) -> tuple[Tensor, RowGradient | None]:
    """See nn/_step.py."""
    upstream = _with_grad(step, saved, grad)
    with torch.cuda.device_of(saved.hidden):
        grad_hidden = _grad_hidden(step, upstream.for_hidden, upstream.grad)
        if not with_rows:
            return grad_hidden, None
        of_class, of_bias = _grad_rows(upstream.for_hidden, True)
    return grad_hidden, _row_gradient(upstream, upstream.for_hidden, of_class, of_bias)


def backward_and_update(step: Step, saved: Saved, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """See nn/_step.py."""
    assert step.update is not None
    upstream = _with_grad(step, saved, grad)
    if upstream.per_row:
        step.tally[SKIPPED] += ((upstream.for_rows.scale == 0.0) & (saved.scale != 0.0) & (grad != 0.0)).sum()
    with torch.cuda.device_of(saved.hidden):
        grad_hidden = _grad_hidden(step, upstream.for_hidden, upstream.grad)
        of_class, of_bias = _grad_rows(upstream.for_rows, bias is not None)
        if weight is None or step.update.pending.waits:  # only the biases are updated, or all in step()
            rows = _row_gradient(upstream, upstream.for_rows, of_class, of_bias)
            step.update.take(weight, bias, rows, step.key, step.counter[0])
        else:
            _update(step, step.update, upstream, of_class, of_bias, weight, bias)
    return grad_hidden


def _row_gradient(upstream: _Upstream, saved: Saved, of_class: Tensor, of_bias: Tensor) -> RowGradient:
    """The gradient by the touched rows, as of plain torch."""
    g = upstream.grad.new_ones(()) if upstream.per_row else (upstream.grad / saved.denominator).float()
    of_class, of_bias = of_class.sum(0), of_bias.sum(0)
    counts = saved.scale != 0.0
    labels = LabelPart(saved.label[counts].to(torch.int64), (-saved.at_label * g)[counts], saved.hidden[counts].float())
    return RowGradient(saved.classes, of_class * g, of_bias * g, labels)


def sort_touched(classes: Tensor, label: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """The S + B touched classes, sorted, and their positions in (classes, label); a label of -1 comes last."""
    S, n = len(classes), len(classes) + len(label)
    if n > MOST_MERGED:
        every = torch.cat([classes.to(torch.int32), torch.where(label >= 0, label, n_classes)])
        ordered, order = torch.sort(every, stable=True)
        return ordered, order.to(torch.int32)
    blocks = cdiv(n, SORTED)
    keys = torch.empty(blocks * SORTED, dtype=torch.int64, device=classes.device)
    ordered = torch.empty(n, dtype=torch.int32, device=classes.device)
    order = torch.empty_like(ordered)
    update_kernels.sort_blocks[(blocks,)](classes, label, keys, S, n, n_classes, BLOCK=SORTED, num_warps=8)
    update_kernels.merge[(blocks * SORTED // 32,)](
        keys, ordered, order, n, STEPS=SORTED.bit_length(), BLOCKS=next_power_of_2(blocks), SIZE=SORTED, BLOCK=32
    )
    return ordered, order


def product(hidden: Tensor) -> tuple[torch.dtype, str]:
    """dtype and input precision of the matrix products."""
    precision = torch.get_float32_matmul_precision()
    if hidden.dtype == torch.bfloat16 or precision == "medium":
        return torch.bfloat16, "widen" if INTERPRETED else "ieee"
    return torch.float32, "tf32" if precision == "high" else "ieee"


class _Plan(NamedTuple):
    kind: int
    size: int
    n_random: int
    given: Drawn | None


def _plan(step: Step, stream: int) -> _Plan:
    given = step.drawn if stream == _hash.MAIN else step.second
    if given is not None:
        return _Plan(GIVEN, len(given.classes), 1, given)
    sampler = step.sampler
    if sampler is None:  # no second sample
        return _Plan(EVERY, 0, 1, None)
    size = sampler.n_drawn(stream)
    return _Plan(sampler.kind, size, max(1, size - sampler.n_certain), None)


class _SamplerArgs(NamedTuple):
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]


def _sampler_args(step: Step, main: _Plan, second: _Plan) -> _SamplerArgs:
    sampler: SharedSampler | None = step.sampler
    certain = cumulative = step.counter  # placeholders, never read
    K, n_certain = 2, 0
    if sampler is not None:
        K, n_certain = sampler.n_classes, sampler.n_certain
        certain = sampler.certain if n_certain else certain
        cumulative = sampler.cumulative if sampler.kind not in (UNIFORM, EVERY) else cumulative
    grid_a, grid_b = _hash.grid_of(K)
    given = [
        tensor
        for plan in (main, second)
        for tensor in ((plan.given.classes, plan.given.log_weight) if plan.given else (step.counter, step.counter))
    ]
    sizes = (n_certain, main.n_random, second.n_random, max(1, math.ceil(math.log2(K))) + 1, grid_a, grid_b)
    return _SamplerArgs((certain, cumulative, *given), sizes)


class _Upstream(NamedTuple):
    """The upstream gradient with the saved tensors; with reduction "none" it is part of the rows' scales.

    `for_rows` skips rows whose upstream gradient is not finite; `for_hidden` passes it on.
    """

    for_hidden: Saved
    for_rows: Saved
    grad: Tensor
    per_row: bool


def _with_grad(step: Step, saved: Saved, grad: Tensor) -> _Upstream:
    grad = grad.contiguous()
    if step.reduction != "none":
        return _Upstream(saved, saved, grad, False)
    g = grad.float()
    usable = (saved.scale * g).abs() < LARGEST
    finite = torch.where(usable, g, 0.0)
    return _Upstream(_scaled_by(saved, g), _scaled_by(saved, finite), g, True)


def _scaled_by(saved: Saved, g: Tensor) -> Saved:
    """With each row's upstream gradient in its scale; rows that do not count have 0, for any g."""
    counts = saved.scale != 0.0
    scale, at_label = torch.where(counts, saved.scale * g, 0.0), torch.where(counts, saved.at_label * g, 0.0)
    scaled = (torch.where(counts[:, None], saved.hidden.float(), 0.0) * scale[:, None]).to(saved.grad_class.dtype)
    columns = torch.zeros(len(g), 16, dtype=saved.grad_class.dtype, device=g.device)
    columns[:, 0] = scale
    return saved._replace(scale=scale, at_label=at_label, scaled=scaled, scale_columns=columns)


def _grad_hidden(step: Step, saved: Saved, grad: Tensor) -> Tensor:
    (B, S), D = saved.grad_class.shape, saved.hidden.shape[1]
    dtype, precision = saved.grad_class.dtype, product(saved.hidden)[1]
    shape = tile("grad_hidden", dtype, D)
    out = torch.empty_like(saved.hidden)
    partial = torch.empty(shape.splits if shape.splits > 1 else 0, B, D, dtype=torch.float32, device=out.device)
    one = torch.ones_like(saved.denominator) if step.reduction == "none" else grad
    denominator = one if step.reduction == "none" else saved.denominator
    score_kernels.grad_hidden[(cdiv(B, shape.rows), cdiv(D, shape.columns), shape.splits)](
        saved.grad_class, saved.rows, saved.label_rows, saved.scale, saved.at_label, one, denominator, partial, out,
        B, S, D, SPLITS=shape.splits, PRECISION=precision, EVEN_D=D % shape.columns == 0,
        BLOCK_B=shape.rows, BLOCK_D=shape.columns, BLOCK_S=shape.depth,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if shape.splits > 1:
        block_d = _block_d(D, 128)
        score_kernels.combine[(cdiv(B, ROW_BLOCK), cdiv(D, block_d))](
            partial, saved.label_rows, saved.scale, saved.at_label, one, denominator, out, B, D,
            SPLITS=shape.splits, BLOCK_B=ROW_BLOCK, BLOCK_D=block_d,
        )  # fmt: skip
    return out


def _grad_rows(saved: Saved, has_bias: bool) -> tuple[Tensor, Tensor]:
    """(splits, S, D) and (splits, S): partial sums over parts of the minibatch."""
    (B, S), D = saved.grad_class.shape, saved.hidden.shape[1]
    dtype, precision = saved.grad_class.dtype, product(saved.hidden)[1]
    shape = tile("grad_rows", dtype, D)
    out = torch.empty(shape.splits, S, D, dtype=torch.float32, device=saved.grad_class.device)
    of_bias = torch.empty(shape.splits, S, dtype=torch.float32, device=saved.grad_class.device)
    score_kernels.grad_rows[(cdiv(S, shape.rows), cdiv(D, shape.columns), shape.splits)](
        saved.grad_class, saved.scaled, saved.scale_columns, out, of_bias, B, S, D,
        HAS_BIAS=has_bias, SPLITS=shape.splits, PRECISION=precision, EVEN_D=D % shape.columns == 0,
        BLOCK_S=shape.rows, BLOCK_D=shape.columns, BLOCK_B=shape.depth,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out, of_bias


def _update(
    step: Step, rule: RowUpdate, upstream: _Upstream, of_class: Tensor, of_bias: Tensor, weight: Tensor,
    bias: Tensor | None,
) -> None:  # fmt: skip
    saved, grad, per_row = upstream.for_rows, upstream.grad, upstream.per_row
    (K, D), S = weight.shape, len(saved.classes)
    if not weight.is_contiguous():
        raise ValueError("Expected contiguous weights for the head's own row optimiser; call .contiguous() on them.")
    ordered, order = sort_touched(saved.classes, saved.label, K)
    go = torch.empty(1, dtype=torch.int32, device=weight.device)
    update_kernels.begin[(1,)](
        grad,
        saved.denominator,
        saved.scale,
        rule.steps,
        go,
        step.tally,
        len(saved.scale),
        PER_ROW=per_row,
        BLOCK=min(4096, next_power_of_2(len(saved.scale))),
        num_warps=8,
    )
    n, splits, has_bias = len(ordered), len(of_class), bias is not None
    chunks, chunks_bias = (torch.empty(n // CHUNK, size, device=weight.device) for size in (D, 1))
    sum_block = _block_d(D, 128)
    if n >= CHUNK:
        update_kernels.sum_chunks[(n // CHUNK, cdiv(D, sum_block))](
            ordered, order, of_class, of_bias, saved.hidden, saved.at_label, chunks, chunks_bias, S, D, n,
            HAS_BIAS=has_bias, SPLITS=splits, CHUNK=CHUNK, BLOCK_D=sum_block,
        )  # fmt: skip
    counts, clip, decay = len(rule.last) > 0, rule.max_norm is not None, rule.weight_decay
    whole_row = rule.kind == ROWWISE or counts or clip  # they store or need one number a row
    measured = whole_row and (16 if INTERPRETED else WIDEST_ROW) < D
    block_d = next_power_of_2(D) if whole_row and not measured else _block_d(D, UPDATE_BLOCK)
    beta1, beta2 = (rule.beta1, rule.beta2) if rule.kind == ADAM else (0.5, 0.5)
    shrink, due = (torch.empty(n if measured else 0, device=weight.device) for _ in range(2))
    max_norm = float(rule.max_norm or 0.0)
    if measured:
        update_kernels.measure[(n,)](
            ordered, order, of_class, of_bias, chunks, chunks_bias, saved.hidden, saved.at_label, grad,
            saved.denominator, rule.first, rule.last, rule.steps, go, shrink, due, S, D, n, K, max_norm,
            SUMS=rule.kind == ROWWISE, CLIP=clip, COUNTS=counts, HAS_BIAS=has_bias, PER_ROW=per_row, SPLITS=splits,
            FEW=UPDATE_FEW, CHUNK=CHUNK, BLOCK_D=block_d,
        )  # fmt: skip
    update_kernels.update[(n, cdiv(D, block_d))](
        ordered, order, of_class, of_bias, chunks, chunks_bias, saved.hidden, saved.at_label, grad, saved.denominator,
        weight, _or(bias, weight), rule.first, rule.second, rule.first_bias, rule.second_bias, rule.last, rule.rate,
        rule.steps, go, step.counter, shrink, due, S, D, n, K, step.key, rule.eps,
        math.log(beta1), math.log(beta2), 1.0 - beta1, 1.0 - beta2, max_norm, decay,
        KIND=rule.kind, LAZY=rule.lazy, COUNTS=counts, CLIP=clip, DECAY=decay > 0.0, MEASURED=measured,
        HAS_BIAS=has_bias, PER_ROW=per_row, ROUND=weight.dtype == torch.bfloat16,
        SPLITS=splits, FEW=UPDATE_FEW, CHUNK=CHUNK, BLOCK_D=block_d,
        num_warps=8 if whole_row and block_d > 128 else UPDATE_WARPS,
    )  # fmt: skip


def _or(value: Tensor | None, stand_in: Tensor) -> Any:
    """An optional array for a kernel, or a placeholder that it does not read."""
    return stand_in if value is None else value.contiguous()


def _block_d(D: int, most: int) -> int:
    return min(most, next_power_of_2(D))


@functools.cache
def _tables(J: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of q(v), and the polynomial of the Normal's tail, highest power first, cut to degree 8."""
    z, weight = hermite(J, torch.float32, device)
    powers = np.array(tail_gap_powers(True))[::-1]
    shorter = chebyshev.cheb2poly(chebyshev.poly2cheb(powers)[:TAIL_TERMS])[::-1].copy()
    return z, weight, torch.tensor(shorter, dtype=torch.float32, device=device)
