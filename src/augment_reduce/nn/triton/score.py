# mypy: disallow-untyped-defs=False
# ruff: noqa: RET505 (Triton follows one branch of a constant condition; what comes after it is always compiled)
"""Triton: the matrix products. Scores with the bound's gradient by them, and the two products of the backward pass.

`GradClass` (B, S) is the only large array; scores are in registers only. Accumulation is in float32. If an output is
too small to occupy all multiprocessors, several programs compute partial sums, which its readers add up (split-K).
"""

import triton
import triton.language as tl

from .noise import SOFTMAX, about_cdf, exp

FAR = tl.constexpr(40.0)  # e^40 times the number of classes is far from overflow
HIGHEST = tl.constexpr(1e30)  # limit of a score; larger ones are NaN, and `finish` skips their rows


@triton.jit
def multiplied(a, b, total, PRECISION: tl.constexpr):
    """total + a b. Triton's interpreter multiplies the bits of bfloat16 numbers; "widen" converts to float32
    instead."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def scores(
    Hidden, Rows, RowBias, LogWeight, Classes, Label, V, NodeWeight, Tail, Expected, Share, Kind, Group, RowGroup,
    Others, GradClass, Sums, B, S, D,
    NOISE: tl.constexpr, IN_BATCH: tl.constexpr, J: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """psi = hidden rows^T + bias; grad_class = omega (phi / Phi)(v - psi), and each row's sums over this block of
    classes.

    `Sums` (3, blocks of S, B): sum of grad_class, of omega log Phi, of omega (phi / Phi)'. Softmax, `Sums` (2, blocks,
    B): sum of grad_class / e^ref, and ref; `GradClass` is in units of e^ref, too. ref is 0, or the block's largest log
    grad_class if that is so far above v that its exponential might overflow. `finish` converts the blocks of such a row
    to one ref.
    """
    block_b, block_s = tl.program_id(0), tl.program_id(1)
    b = block_b * BLOCK_B + tl.arange(0, BLOCK_B)
    s = block_s * BLOCK_S + tl.arange(0, BLOCK_S)
    in_b, in_s = b < B, s < S
    d = tl.arange(0, BLOCK_D)
    h_at = Hidden + b.to(tl.int64)[:, None] * D + d[None, :]
    w_at = Rows + s.to(tl.int64)[:, None] * D + d[None, :]
    psi = tl.zeros((BLOCK_B, BLOCK_S), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN_D:
            h = tl.load(h_at + start, mask=in_b[:, None], other=0.0)
            w = tl.load(w_at + start, mask=in_s[:, None], other=0.0)
        else:
            in_d = (start + d < D)[None, :]
            h = tl.load(h_at + start, mask=in_b[:, None] & in_d, other=0.0)
            w = tl.load(w_at + start, mask=in_s[:, None] & in_d, other=0.0)
        psi = multiplied(h, tl.trans(w), psi, PRECISION)
    # Before the bias, which may be -inf; and no minimum or maximum, which would drop NaN.
    psi = tl.where(tl.abs(psi) < HIGHEST, psi, float("nan")) + tl.load(RowBias + s, mask=in_s, other=0.0)[None, :]
    label = tl.load(Label + b, mask=in_b, other=-1)
    own = tl.load(Classes + s, mask=in_s, other=-1).to(tl.int32)
    counts = in_s[None, :] & (label >= 0)[:, None] & (own[None, :] != label[:, None])
    if IN_BATCH:  # weights that depend on the row, and masked labels: nn/_columns.py
        kind = tl.load(Kind + s, mask=in_s, other=2)
        row_group = tl.load(RowGroup + b, mask=in_b, other=-1)
        group = tl.load(Group + s, mask=in_s, other=-1)
        same = (group[None, :] == row_group[:, None]) & (kind == 1)[None, :]
        counts = counts & ~same & (kind < 2)[None, :]
        others = tl.load(Others + b, mask=in_b, other=0.0)
        expected = tl.load(Expected + s, mask=in_s, other=1.0)[None, :]
        expected += others[:, None] * tl.load(Share + s, mask=in_s, other=0.0)[None, :]
        log_weight = -tl.log(expected)
    else:
        log_weight = tl.load(LogWeight + s, mask=in_s, other=0.0)[None, :]
    sums_at = Sums + block_s.to(tl.int64) * B + b
    if NOISE == SOFTMAX:
        v = tl.load(V + b, mask=in_b, other=0.0)
        log_grad_class = tl.where(counts, psi + log_weight - v[:, None], -float("inf"))
        top = tl.max(log_grad_class, axis=1)
        ref = tl.where(top > FAR, top, 0.0)
        grad_class = exp(log_grad_class - ref[:, None])
        tl.store(sums_at, tl.sum(grad_class, axis=1), mask=in_b)
        tl.store(sums_at + tl.num_programs(1).to(tl.int64) * B, ref, mask=in_b)
    else:
        grad_class = tl.zeros((BLOCK_B, BLOCK_S), dtype=tl.float32)
        value = tl.zeros((BLOCK_B,), dtype=tl.float32)
        bend = tl.zeros((BLOCK_B,), dtype=tl.float32)
        omega = tl.where(counts, tl.exp(log_weight), 0.0)
        psi = tl.where(counts, psi, 0.0)
        for j in tl.static_range(J):
            v = tl.load(V + b * J + j, mask=in_b, other=0.0)
            node = tl.load(NodeWeight + j)
            log_cdf, ratio, second = about_cdf(v[:, None] - psi, Tail, NOISE)
            grad_class += node * ratio * omega
            value += node * tl.sum(log_cdf * omega, axis=1)
            bend += node * tl.sum(second * omega, axis=1)
        blocks = tl.num_programs(1).to(tl.int64)
        tl.store(sums_at, tl.sum(grad_class, axis=1), mask=in_b)
        tl.store(sums_at + blocks * B, value, mask=in_b)
        tl.store(sums_at + 2 * blocks * B, bend, mask=in_b)
    if STORE:
        at = GradClass + b.to(tl.int64)[:, None] * S + s[None, :]
        grad_class = tl.where(grad_class == grad_class, grad_class, 0.0)
        tl.store(at, grad_class.to(GradClass.dtype.element_ty), mask=in_b[:, None] & in_s[None, :])


@triton.jit
def stretch(n, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The range summed by this program, if SPLITS programs share the sum over n: whole blocks each."""
    size = tl.cdiv(tl.cdiv(n, BLOCK), SPLITS) * BLOCK
    first = tl.program_id(2) * size
    return first, tl.minimum(first + size, n)


@triton.jit
def to_hidden(
    total, LabelRows, Scale, AtLabel, Grad, Denominator, Out, b, d, B, D,
):  # fmt: skip
    """Out = g (scale_b total_b - at_label_b label_rows_b), g = upstream gradient over the denominator."""
    in_b, in_d = b < B, d < D
    g = tl.load(Grad).to(tl.float32) / tl.load(Denominator)
    scale = tl.load(Scale + b, mask=in_b, other=0.0)
    counts = scale != 0.0  # the other rows have no gradient, even if g is not finite
    at_label = tl.where(counts, g * tl.load(AtLabel + b, mask=in_b, other=0.0), 0.0)
    scale = tl.where(counts, g * scale, 0.0)
    at = b.to(tl.int64)[:, None] * D + d[None, :]
    inside = in_b[:, None] & in_d[None, :]
    own = tl.load(LabelRows + at, mask=inside, other=0.0).to(tl.float32)
    out = scale[:, None] * total - at_label[:, None] * own
    out = tl.where(counts[:, None], out, 0.0)  # NaN if a class has weights that are not finite
    tl.store(Out + at, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def grad_hidden(
    GradClass, Rows, LabelRows, Scale, AtLabel, Grad, Denominator, Partial, Out, B, S, D,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """grad_class rows, and from it the gradient by hidden; with SPLITS > 1 sums over parts of S, for `combine`."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_b, in_d = b < B, d < D
    p_at = GradClass + b.to(tl.int64)[:, None] * S
    total = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    first, end = stretch(S, BLOCK_S, SPLITS)
    for start in range(first, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        in_s = s < S
        p = tl.load(p_at + s[None, :], mask=in_b[:, None] & in_s[None, :], other=0.0)
        w_at = Rows + s.to(tl.int64)[:, None] * D + d[None, :]
        if EVEN_D:
            w = tl.load(w_at, mask=in_s[:, None], other=0.0)
        else:
            w = tl.load(w_at, mask=in_s[:, None] & in_d[None, :], other=0.0)
        total = multiplied(p, w, total, PRECISION)
    if SPLITS == 1:
        to_hidden(total, LabelRows, Scale, AtLabel, Grad, Denominator, Out, b, d, B, D)
    else:
        at = (tl.program_id(2).to(tl.int64) * B + b)[:, None] * D + d[None, :]
        tl.store(Partial + at, total, mask=in_b[:, None] & in_d[None, :])


@triton.jit
def combine(
    Partial, LabelRows, Scale, AtLabel, Grad, Denominator, Out, B, D,
    SPLITS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (b < B)[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = (b.to(tl.int64) + split * B)[:, None] * D + d[None, :]
        total += tl.load(Partial + at, mask=inside, other=0.0)
    to_hidden(total, LabelRows, Scale, AtLabel, Grad, Denominator, Out, b, d, B, D)


@triton.jit
def _over_rows(
    GradClass, Scaled, ScaleColumns, s, d, B, S, D,
    WITH_BIAS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    in_s, in_d = s < S, d < D
    total = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK_S, 16), dtype=tl.float32)
    first, end = stretch(B, BLOCK_B, SPLITS)
    for start in range(first, end, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        in_b = b < B
        row = b.to(tl.int64)[:, None]
        p = tl.load(GradClass + row * S + s[None, :], mask=in_b[:, None] & in_s[None, :], other=0.0)
        if EVEN_D:
            h = tl.load(Scaled + row * D + d[None, :], mask=in_b[:, None], other=0.0)
        else:
            h = tl.load(Scaled + row * D + d[None, :], mask=in_b[:, None] & in_d[None, :], other=0.0)
        total = multiplied(tl.trans(p), h, total, PRECISION)
        if WITH_BIAS:
            columns = tl.load(ScaleColumns + row * 16 + tl.arange(0, 16)[None, :], mask=in_b[:, None], other=0.0)
            of_bias = multiplied(tl.trans(p), columns, of_bias, PRECISION)
    return total, of_bias


@triton.jit
def grad_rows(
    GradClass, Scaled, ScaleColumns, Out, OutBias, B, S, D,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Out (SPLITS, S, D) = grad_class^T scaled, and OutBias (SPLITS, S) = grad_class^T scale, in sums over parts of B.

    That is the gradient by the sampled rows, without the factor g. `ScaleColumns` (B, 16) has the scales in column 0
    and zeros elsewhere: an additional small product is cheaper than a sum over registers.
    """
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.program_id(2).to(tl.int64) * S
    if HAS_BIAS and tl.program_id(1) == 0:
        total, of_bias = _over_rows(
            GradClass, Scaled, ScaleColumns, s, d, B, S, D, True, SPLITS, PRECISION, EVEN_D, BLOCK_S, BLOCK_D, BLOCK_B
        )
        tl.store(OutBias + part + s, tl.sum(of_bias, axis=1), mask=s < S)
    else:
        total, of_bias = _over_rows(
            GradClass, Scaled, ScaleColumns, s, d, B, S, D, False, SPLITS, PRECISION, EVEN_D, BLOCK_S, BLOCK_D, BLOCK_B
        )
    at = (part + s)[:, None] * D + d[None, :]
    tl.store(Out + at, total, mask=(s < S)[:, None] & (d < D)[None, :])
