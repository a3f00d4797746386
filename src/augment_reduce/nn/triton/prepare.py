# mypy: disallow-untyped-defs=False
"""Triton: the start of a step. psi_y and q(v) of every row; the drawn classes, with their weight rows gathered.

Reference: the first half of nn/_step.forward, nn/_draw.SharedSampler.draw and nn/_local.Local.predict.
"""

import triton
import triton.language as tl

from .draw import MAIN, NODE, SECOND, draw, normal, step_key
from .noise import SOFTMAX

LOW, HIGH = tl.constexpr(-4.605170185988091), tl.constexpr(9.210340371976184)  # log precision lies between
NOTHING = tl.constexpr(-9223372036854775807)
LARGEST = tl.constexpr(1e15)  # as in nn/_plain.py
ROWS, FLOORED, BAD_TARGETS, BAD_TARGET, SKIPPED, ROWS_BEFORE, BAD_WEIGHTS = (tl.constexpr(i) for i in range(7))

_SIZES = ["n_classes", "n_certain", "n_random", "n_random_2", "n_halvings", "grid_a", "grid_b", "key"]


@triton.jit
def put_nodes(V, Node, b, in_b, location, log_precision, Counter, key, NOISE: tl.constexpr, J: tl.constexpr):
    """v_j = m + z_j / sqrt(precision); softmax: v = c."""
    if NOISE == SOFTMAX:
        tl.store(V + b, location, mask=in_b)
    else:
        sigma = tl.exp(-0.5 * log_precision)
        if J == 1:
            z = normal(step_key(key, Counter, NODE), b.to(tl.uint32))
            tl.store(V + b, location + z * sigma, mask=in_b)
        else:
            for j in tl.static_range(J):
                tl.store(V + b * J + j, location + tl.load(Node + j) * sigma, mask=in_b)


@triton.jit
def gather(Weight, Bias, Rows, RowBias, classes, slot, inside, D, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy the weight rows of these classes into `Rows`, in its dtype."""
    d = tl.arange(0, BLOCK_D)
    for start in range(0, D, BLOCK_D):
        mask = inside[:, None] & (start + d < D)[None, :]
        row = tl.load(Weight + classes[:, None] * D + (start + d)[None, :], mask=mask, other=0.0)
        at = Rows + slot.to(tl.int64)[:, None] * D + (start + d)[None, :]
        tl.store(at, row.to(Rows.dtype.element_ty), mask=mask)
    bias = tl.zeros_like(slot).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(Bias + classes, mask=inside, other=0.0).to(tl.float32)
    tl.store(RowBias + slot, bias, mask=inside)


@triton.jit
def count(Tally, place: tl.constexpr, which):
    """Add the number of rows for which `which` holds to a place of the tally."""
    n = tl.sum(which.to(tl.int32), axis=0)
    if n > 0:
        tl.atomic_add(Tally + place, n.to(tl.int64))


@triton.jit
def labels(Target, SampleWeight, RowWeight, Tally, b, in_b, n_classes, ignore_index, HAS_WEIGHT: tl.constexpr):
    """(class, whether the row counts); targets out of range and sample weights below 0 are counted and skipped."""
    y = tl.load(Target + b, mask=in_b, other=0)
    wanted = in_b & (y != ignore_index)
    inside = wanted & (y >= 0) & (y < n_classes)
    if tl.sum((wanted & ~inside).to(tl.int32), axis=0) > 0:
        count(Tally, BAD_TARGETS, wanted & ~inside)
        tl.store(Tally + BAD_TARGET, tl.max(tl.where(wanted & ~inside, y, NOTHING), axis=0))
    weight = inside.to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(SampleWeight + b, mask=in_b, other=0.0).to(tl.float32)
        valid = (weight >= 0.0) & (weight < LARGEST)
        count(Tally, BAD_WEIGHTS, inside & ~valid)
        weight = tl.where(inside & valid, weight, 0.0)
    counts = weight != 0.0
    tl.store(RowWeight + b, weight, mask=in_b)
    return tl.where(counts, y, 0).to(tl.int64), counts


@triton.jit
def label_scores(
    Hidden, Weight, Bias, LabelRows, Copied, Mean, Slope, y, b, in_b, D,
    NOISE: tl.constexpr, HAS_BIAS: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """psi_y, slope (h - mean) of the one or two predicted parts, and whether h and psi_y are usable.

    Usable: finite, and at most LARGEST. Also copies the labels' weight rows.
    """
    psi_y = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.zeros((BLOCK,), dtype=tl.float32)
    second = tl.zeros((BLOCK,), dtype=tl.float32)
    n_fit = tl.zeros((BLOCK,), dtype=tl.int32)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, D, BLOCK_D):
        in_d = start + d < D
        mask = in_b[:, None] & in_d[None, :]
        at = b.to(tl.int64)[:, None] * D + (start + d)[None, :]
        h = tl.load(Hidden + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(Weight + y[:, None] * D + (start + d)[None, :], mask=mask, other=0.0).to(tl.float32)
        psi_y += tl.sum(h * w, axis=1)
        n_fit += tl.sum((tl.abs(h) < LARGEST).to(tl.int32), axis=1)  # False for NaN, too; columns beyond D are 0
        tl.store(LabelRows + at, w.to(LabelRows.dtype.element_ty), mask=mask)
        if COPY:
            tl.store(Copied + at, h.to(Copied.dtype.element_ty), mask=mask)
        centred = h - tl.load(Mean + start + d, mask=in_d, other=0.0)[None, :]
        first += tl.sum(centred * tl.load(Slope + start + d, mask=in_d, other=0.0)[None, :], axis=1)
        if NOISE != SOFTMAX:
            second += tl.sum(centred * tl.load(Slope + D + start + d, mask=in_d, other=0.0)[None, :], axis=1)
    if HAS_BIAS:
        psi_y += tl.load(Bias + y, mask=in_b, other=0.0).to(tl.float32)
    usable = (n_fit == tl.cdiv(D, BLOCK_D) * BLOCK_D) & (tl.abs(psi_y) < LARGEST)
    return tl.where(usable, psi_y, 0.0), tl.where(usable, first, 0.0), tl.where(usable, second, 0.0), usable


@triton.jit
def predict(
    GivenParts, Heights, Offset, LabelSlope, LabelMean, Predicted, psi_y, first, second, b, in_b, B,
    NOISE: tl.constexpr, HAS_PARTS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """The parts of q(v) predicted by the linear map, and with PLANES the log-sum-exp; returns those to use, which the
    caller may have passed."""
    label = psi_y - tl.load(LabelMean)
    first += tl.load(Offset) + tl.load(LabelSlope) * label
    if PLANES:
        first += tl.load(Heights + b, mask=in_b, other=0.0)
    if NOISE == SOFTMAX:
        first = tl.maximum(first, psi_y)
    else:
        second += tl.load(Offset + 1) + tl.load(LabelSlope + 1) * label
        second = tl.minimum(tl.maximum(second, LOW), HIGH)
        tl.store(Predicted + B + b, second, mask=in_b)
    tl.store(Predicted + b, first, mask=in_b)
    if HAS_PARTS:
        first = tl.load(GivenParts + b, mask=in_b, other=0.0)
        if NOISE != SOFTMAX:
            second = tl.load(GivenParts + B + b, mask=in_b, other=0.0)
    return first, second


@triton.jit
def recall(Memory, Visits, Index, first, second, b, in_b, n_rows, NOISE: tl.constexpr):
    """The stored parts of rows visited before."""
    row = tl.load(Index + b, mask=in_b, other=-1)
    known = in_b & (row >= 0) & (row < n_rows)
    known = known & (tl.load(Visits + row, mask=known, other=0) > 0)
    first = tl.where(known, tl.load(Memory + row, mask=known, other=0.0), first)
    if NOISE != SOFTMAX:
        second = tl.where(known, tl.load(Memory + n_rows + row, mask=known, other=0.0), second)
    return first, second


@triton.jit(do_not_specialize=_SIZES)
def prepare(
    Hidden, Weight, Bias, Target, SampleWeight, Index, GivenParts, Heights,
    Slope, Offset, LabelSlope, Mean, LabelMean, Memory, Visits, Node,
    Certain, Cumulative, Given, GivenLog, Given2, GivenLog2, Counter, Tally,
    Label, RowWeight, PsiY, LabelRows, Predicted, Used, V, Copied, Classes, LogWeight, Rows, RowBias,
    B, D, S, S2, n_rows, ignore_index, key, n_classes, n_certain, n_random, n_random_2, n_halvings, grid_a, grid_b,
    NOISE: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr, KIND_2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_MEMORY: tl.constexpr, HAS_PARTS: tl.constexpr, PLANES: tl.constexpr,
    COPY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Three kinds of programs: for a block of rows, for a block of the main sample's slots, for one of the second's."""
    pid = tl.program_id(0)
    row_blocks, main_blocks = tl.cdiv(B, BLOCK), tl.cdiv(S, BLOCK)
    if pid < row_blocks:
        b = pid * BLOCK + tl.arange(0, BLOCK)
        in_b = b < B
        y, counts = labels(Target, SampleWeight, RowWeight, Tally, b, in_b, n_classes, ignore_index, HAS_WEIGHT)
        psi_y, first, second, usable = label_scores(
            Hidden, Weight, Bias, LabelRows, Copied, Mean, Slope, y, b, in_b, D, NOISE, HAS_BIAS, COPY, BLOCK, BLOCK_D
        )
        count(Tally, ROWS, counts & usable)
        count(Tally, SKIPPED, counts & ~usable)
        tl.store(Label + b, tl.where(counts & usable, y, -1).to(tl.int32), mask=in_b)
        tl.store(PsiY + b, psi_y, mask=in_b)
        first, second = predict(
            GivenParts, Heights, Offset, LabelSlope, LabelMean, Predicted, psi_y, first, second, b, in_b, B, NOISE,
            HAS_PARTS, PLANES,
        )  # fmt: skip
        if HAS_MEMORY and not HAS_PARTS:
            first, second = recall(Memory, Visits, Index, first, second, b, in_b, n_rows, NOISE)
        tl.store(Used + b, first, mask=in_b)
        if NOISE != SOFTMAX:
            tl.store(Used + B + b, second, mask=in_b)
        put_nodes(V, Node, b, in_b, first, second, Counter, key, NOISE, J)
    elif pid < row_blocks + main_blocks:
        slot = (pid - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = slot < S
        classes, log_weight = draw(
            slot, inside, Certain, Cumulative, Given, GivenLog, Counter, key, n_classes, n_certain, n_random,
            n_halvings, grid_a, grid_b, KIND, MAIN,
        )  # fmt: skip
        tl.store(Classes + slot, classes, mask=inside)
        tl.store(LogWeight + slot, log_weight, mask=inside)
        gather(Weight, Bias, Rows, RowBias, classes, slot, inside, D, HAS_BIAS, BLOCK_D)
    else:
        slot = (pid - row_blocks - main_blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = slot < S2
        classes, log_weight = draw(
            slot, inside, Certain, Cumulative, Given2, GivenLog2, Counter, key, n_classes, n_certain, n_random_2,
            n_halvings, grid_a, grid_b, KIND_2, SECOND,
        )  # fmt: skip
        tl.store(Classes + S + slot, classes, mask=inside)
        tl.store(LogWeight + S + slot, log_weight, mask=inside)
        gather(Weight, Bias, Rows, RowBias, classes, S + slot, inside, D, HAS_BIAS, BLOCK_D)
