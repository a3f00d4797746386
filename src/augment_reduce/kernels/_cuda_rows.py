# mypy: disallow-untyped-defs=False
"""Triton: what is done once for each row of the minibatch, between and after the matrix products.

    refine    q(v) corrected by the second sample ("fresh")
    finish    bound, floor, scaled hidden rows, what the prediction is to learn from, the rows' own memory
    learn     the prediction moves; the loss; the counters tick

Twin of nn/_local.py and of the second half of nn/_step.forward.
"""

import triton
import triton.language as tl

from ._cuda_noise import SOFTMAX, about_density
from ._cuda_prepare import HIGH, LOW, put_nodes

LOG_2PI_E = tl.constexpr(2.8378770664093453)
LEAST, TINY = tl.constexpr(1e-2), tl.constexpr(1e-37)
FIELDS = tl.constexpr(16)  # scalars a block of rows reports, see `finish`
USED = tl.constexpr(11)
AT_ONCE = tl.constexpr(32)
LARGEST_MOVE, WIDEST = tl.constexpr(5.0), tl.constexpr(0.25)


@triton.jit
def newton(location, log_precision, slope, bend, alpha):
    """Natural gradient on (m, log precision), at most two deviations a move."""
    precision = tl.exp(log_precision)
    moved = (1.0 - alpha) * precision + alpha * tl.maximum(-bend, LEAST)
    reach = 2.0 / tl.sqrt(tl.maximum(precision, moved))
    move = tl.minimum(tl.maximum(alpha * slope / moved, -reach), reach)
    return location + move, tl.minimum(tl.maximum(tl.log(moved), LOW), HIGH)


@triton.jit
def collect(Sums, which: tl.constexpr, b, in_b, B, n_blocks):
    """The sum over all blocks of classes, always in the same order; many at a time, since each is a wait for memory."""
    total = tl.zeros_like(b).to(tl.float32)
    for start in range(0, n_blocks, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        at = Sums + (which * n_blocks + i).to(tl.int64)[:, None] * B + b[None, :]
        total += tl.sum(tl.load(at, mask=(i < n_blocks)[:, None] & in_b[None, :], other=0.0), axis=0)
    return total


@triton.jit
def about_label(V, NodeWeight, b, in_b, psi_y, NOISE: tl.constexpr, J: tl.constexpr):
    """E over the nodes of (log phi, its two derivatives) at v - psi_y."""
    value = tl.zeros_like(psi_y)
    first = tl.zeros_like(psi_y)
    second = tl.zeros_like(psi_y)
    for j in tl.static_range(J):
        v = tl.load(V + b * J + j, mask=in_b, other=0.0)
        node = tl.load(NodeWeight + j)
        log_phi, slope, bend = about_density(v - psi_y, NOISE)
        value += node * log_phi
        first += node * slope
        second += node * bend
    return value, first, second


@triton.jit(do_not_specialize=["key"])
def refine(
    Sums, PsiY, Used, VFirst, WeightFirst, V, Node, Counter, Learned, B, n_blocks, key, share,
    NOISE: tl.constexpr, J_FIRST: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the sums at the first nodes (J_FIRST of them) to q(v) moved, and the nodes of the bound itself."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_b = b < B
    psi_y = tl.load(PsiY + b, mask=in_b, other=0.0)
    used = tl.load(Used + b, mask=in_b, other=0.0)
    log_precision = tl.zeros_like(used)
    pulls = collect(Sums, 0, b, in_b, B, n_blocks)
    _, first, second = about_label(VFirst, WeightFirst, b, in_b, psi_y, NOISE, J_FIRST)
    slope = pulls + first
    if NOISE == SOFTMAX:
        move = tl.log(tl.maximum(pulls + tl.exp(tl.minimum(psi_y - used, 60.0)), TINY))
        used += tl.where(tl.load(Learned) > 0, share, 1.0) * move
    else:
        log_precision = tl.load(Used + B + b, mask=in_b, other=0.0)
        bend = collect(Sums, 2, b, in_b, B, n_blocks) + second
        used, log_precision = newton(used, log_precision, slope, bend, 0.7)
        tl.store(Used + B + b, log_precision, mask=in_b)
    tl.store(Used + b, used, mask=in_b)
    put_nodes(V, Node, b, in_b, used, log_precision, Counter, key, NOISE, J)


@triton.jit
def finish(
    Hidden, Sums, PsiY, Predicted, Used, V, NodeWeight, RowWeight, Index, Mean, LabelMean, Memory, Visits,
    Learned, RowLoss, Scale, AtLabel, Scaled, ScaleColumns, Report, B, D, n_blocks, n_rows, floor, largest,
    NOISE: tl.constexpr, J: tl.constexpr, FLOOR: tl.constexpr, LEARN: tl.constexpr, HAS_MEMORY: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Everything about a row that its sums over classes decide. `Report` (blocks, FIELDS + 3 D): sums for `learn`."""
    pid = tl.program_id(0)
    b = pid * BLOCK + tl.arange(0, BLOCK)
    in_b = b < B
    psi_y = tl.load(PsiY + b, mask=in_b, other=0.0)
    used = tl.load(Used + b, mask=in_b, other=0.0)
    weight = tl.load(RowWeight + b, mask=in_b, other=0.0)
    seen = (weight != 0.0).to(tl.float32)
    pulls = collect(Sums, 0, b, in_b, B, n_blocks)
    value, first, second = about_label(V, NodeWeight, b, in_b, psi_y, NOISE, J)
    slope = pulls + first
    shrink = tl.zeros_like(psi_y) + 1.0
    if NOISE == SOFTMAX:
        log_precision = tl.zeros_like(used)
        bend = log_precision
        own = tl.exp(tl.minimum(psi_y - used, 60.0))
        slope = tl.log(tl.maximum(pulls + own, TINY))  # log Z~ - c, as in nn/_plain.py
        if FLOOR:
            shrink = tl.exp(tl.minimum(floor - slope, 0.0))
        used_now = used - tl.log(shrink)
        lift = 1.0 - own * shrink
        bound = 1.0 - used_now + psi_y - own * shrink - pulls * shrink
    else:
        log_precision = tl.load(Used + B + b, mask=in_b, other=0.0)
        bend = collect(Sums, 2, b, in_b, B, n_blocks) + second
        lift = -first
        if FLOOR:
            most = tl.exp(floor) * (1.0 + tl.abs(lift))
            shrink = tl.where(pulls > most, most / pulls, 1.0)
        slope = pulls * shrink + first
        bound = value + collect(Sums, 1, b, in_b, B, n_blocks) * shrink - 0.5 * (log_precision - LOG_2PI_E)
    loss = tl.where(seen > 0.0, -bound, 0.0) * weight
    scale = weight * shrink
    tl.store(RowLoss + b, loss, mask=in_b)
    tl.store(Scale + b, scale, mask=in_b)
    if SCALED:
        column = tl.arange(0, 16)[None, :]
        at_column = ScaleColumns + b.to(tl.int64)[:, None] * 16 + column
        tl.store(at_column, tl.where(column == 0, scale[:, None], 0.0).to(Scaled.dtype.element_ty), mask=in_b[:, None])
    tl.store(AtLabel + b, tl.where(seen > 0.0, lift, 0.0) * weight, mask=in_b)
    label = psi_y - tl.load(LabelMean)
    out = Report + pid.to(tl.int64) * (3 * D + FIELDS)
    tl.store(out, tl.sum(loss, axis=0))
    tl.store(out + 1, tl.sum(weight, axis=0))
    tl.store(out + 2, tl.sum(seen, axis=0))
    tl.store(out + 3, tl.sum(tl.where(shrink < 1.0, seen, 0.0), axis=0))
    rho = tl.zeros_like(psi_y)
    rho_2 = tl.zeros_like(psi_y)
    if LEARN:
        if pid == 0:
            tl.store(Learned, tl.load(Learned) + 1)  # read by `learn`, which comes after
        predicted = tl.load(Predicted + b, mask=in_b, other=0.0)
        if NOISE == SOFTMAX:
            rho = (tl.exp(tl.minimum(used + slope - predicted, largest)) - 1.0) * seen
        else:
            precision = tl.exp(log_precision)
            move = slope / tl.maximum(precision, WIDEST)
            if not FLOOR:
                reach = 2.0 / tl.sqrt(precision)
                move = tl.minimum(tl.maximum(move, -reach), reach)
            rho = tl.minimum(tl.maximum(used + move - predicted, -LARGEST_MOVE), LARGEST_MOVE) * seen
            off = -bend / precision - 1.0 + log_precision - tl.load(Predicted + B + b, mask=in_b, other=0.0)
            rho_2 = tl.minimum(tl.maximum(off, -1.0), 1.0) * seen
        tl.store(out + 4, tl.sum(label * seen, axis=0))
        tl.store(out + 5, tl.sum(label * label * seen, axis=0))
        tl.store(out + 6, tl.sum(rho, axis=0))
        tl.store(out + 7, tl.sum(rho_2, axis=0))
        tl.store(out + 8, tl.sum(rho * label, axis=0))
        tl.store(out + 9, tl.sum(rho_2 * label, axis=0))
        if HAS_MEMORY:
            row = tl.load(Index + b, mask=in_b, other=-1)
            kept = (seen > 0.0) & (row >= 0) & (row < n_rows)
            visits = tl.load(Visits + row, mask=kept, other=0)
            if NOISE == SOFTMAX:
                alpha = tl.exp(-0.9 * tl.log(2.0 + visits.to(tl.float32)))
                tl.store(Memory + row, used + tl.log(1.0 - alpha + alpha * tl.exp(slope)), mask=kept)
            else:
                alpha = tl.exp(-0.6 * tl.log(2.0 + visits.to(tl.float32)))
                location, new_precision = newton(used, log_precision, slope, bend, alpha)
                tl.store(Memory + row, location, mask=kept)
                tl.store(Memory + n_rows + row, new_precision, mask=kept)
            tl.store(Visits + row, visits + 1, mask=kept)
    energy = tl.zeros((BLOCK,), dtype=tl.float32)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, D, BLOCK_D):
        in_d = start + d < D
        mask = in_b[:, None] & in_d[None, :]
        at = b.to(tl.int64)[:, None] * D + (start + d)[None, :]
        h = tl.load(Hidden + at, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            tl.store(Scaled + at, (h * scale[:, None]).to(Scaled.dtype.element_ty), mask=mask)
        if LEARN:
            centred = tl.where(mask, h - tl.load(Mean + start + d, mask=in_d, other=0.0)[None, :], 0.0)
            energy += tl.sum(centred * centred, axis=1)
            to = out + start + d + FIELDS
            tl.store(to, tl.sum(centred * seen[:, None], axis=0), mask=in_d)
            tl.store(to + D, tl.sum(centred * rho[:, None], axis=0), mask=in_d)
            if NOISE != SOFTMAX:
                tl.store(to + 2 * D, tl.sum(centred * rho_2[:, None], axis=0), mask=in_d)
    if LEARN:
        tl.store(out + 10, tl.sum(energy * seen, axis=0))


@triton.jit
def scalars_of(Report, width, n_blocks, BLOCK: tl.constexpr):
    """The scalars of the report, summed over all blocks of rows; see `scalar`."""
    field = tl.arange(0, FIELDS)
    total = tl.zeros((FIELDS,), dtype=tl.float32)
    for start in range(0, n_blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = Report + i.to(tl.int64)[:, None] * width + field[None, :]
        total += tl.sum(tl.load(at, mask=(i < n_blocks)[:, None] & (field < USED)[None, :], other=0.0), axis=0)
    return total


@triton.jit
def scalar(totals, which: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, FIELDS) == which, totals, 0.0), axis=0)


@triton.jit
def columns_of(Report, field, d, in_d, width, n_blocks, BLOCK: tl.constexpr):
    """Sum of a stretch of the report's vectors over all blocks of rows."""
    total = tl.zeros_like(d).to(tl.float32)
    for start in range(0, n_blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = Report + i.to(tl.int64)[:, None] * width + (d + field)[None, :]
        total += tl.sum(tl.load(at, mask=(i < n_blocks)[:, None] & in_d[None, :], other=0.0), axis=0)
    return total


@triton.jit
def learn(
    Report, Slope, Offset, LabelSlope, Mean, LabelMean, Learned, Counter, Tally, Loss, Denominator, D, n_blocks,
    NOISE: tl.constexpr, LEARN: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    OFFSET_RATE: tl.constexpr, SLOPE_RATE: tl.constexpr, LABEL_RATE: tl.constexpr, MEAN_RATE: tl.constexpr,
):  # fmt: skip
    """One program a stretch of features; the last also does what there is only one of. Normalised least squares."""
    width = 3 * D + FIELDS
    totals = scalars_of(Report, width, n_blocks, BLOCK)
    n = tl.maximum(scalar(totals, 2), 1.0)
    if LEARN:
        rate = tl.maximum(1.0 / tl.load(Learned).to(tl.float32), MEAN_RATE)
        d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < D
        energy = tl.maximum(scalar(totals, 10), 1e-12)
        mean = tl.load(Mean + d, mask=in_d, other=0.0)
        slope = tl.load(Slope + d, mask=in_d, other=0.0)
        mean += rate * columns_of(Report, FIELDS, d, in_d, width, n_blocks, BLOCK) / n
        slope += SLOPE_RATE * columns_of(Report, D + FIELDS, d, in_d, width, n_blocks, BLOCK) / energy
        tl.store(Mean + d, mean, mask=in_d)
        tl.store(Slope + d, slope, mask=in_d)
        if NOISE != SOFTMAX:
            slope = tl.load(Slope + D + d, mask=in_d, other=0.0)
            slope += SLOPE_RATE * columns_of(Report, 2 * D + FIELDS, d, in_d, width, n_blocks, BLOCK) / energy
            tl.store(Slope + D + d, slope, mask=in_d)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        denominator = tl.maximum(scalar(totals, 1), 1.17549435e-38) if MEAN else 1.0
        tl.store(Denominator, denominator)
        tl.store(Loss, scalar(totals, 0) / denominator)
        tl.store(Tally, tl.load(Tally) + scalar(totals, 2).to(tl.int64))
        tl.store(Tally + 1, tl.load(Tally + 1) + scalar(totals, 3).to(tl.int64))
        tl.store(Counter, tl.load(Counter) + 1)
        if LEARN:
            fast = tl.maximum(rate, OFFSET_RATE)
            tl.store(Offset, tl.load(Offset) + fast * scalar(totals, 6) / n)
            tl.store(LabelMean, tl.load(LabelMean) + rate * scalar(totals, 4) / n)
            if NOISE != SOFTMAX:
                tl.store(Offset + 1, tl.load(Offset + 1) + fast * scalar(totals, 7) / n)
                by = LABEL_RATE / tl.maximum(scalar(totals, 5), 1e-12)
                tl.store(LabelSlope, tl.load(LabelSlope) + by * scalar(totals, 8))
                tl.store(LabelSlope + 1, tl.load(LabelSlope + 1) + by * scalar(totals, 9))
