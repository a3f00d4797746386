# mypy: disallow-untyped-defs=False
"""Triton: operations on each row of the minibatch, between and after the matrix products.

    refine    q(v) corrected by the second sample ("fresh")
    finish    bound, floor, scaled hidden rows, the report for `learn`, stored parts of q(v)
    learn     update of the prediction, the loss, the counters

Reference: nn/_local.py and the second half of nn/_step.forward.
"""

import triton
import triton.language as tl

from .noise import SOFTMAX, about_density
from .prepare import FLOORED, HIGH, LOW, ROWS, ROWS_BEFORE, SKIPPED, count, put_nodes

LOG_2PI_E = tl.constexpr(2.8378770664093453)
LEAST = tl.constexpr(1e-2)
LARGEST_LOG = tl.constexpr(60.0)  # as in nn/_plain.py
FIELDS = tl.constexpr(16)  # scalars in the report of a block of rows, see `finish`
USED = tl.constexpr(11)
AT_ONCE = tl.constexpr(32)
GAP_RATE = tl.constexpr(0.01)  # as in nn/_step.py
LARGEST_MOVE, WIDEST = tl.constexpr(5.0), tl.constexpr(0.25)


@triton.jit
def newton(location, log_precision, slope, bend, alpha):
    """Natural gradient on (m, log precision), at most two deviations a step; NaN stays NaN."""
    slope_is, bend_is = slope == slope, bend == bend  # NaN, which a minimum or maximum would drop
    precision = tl.exp(log_precision)
    moved = (1.0 - alpha) * precision + alpha * tl.maximum(-bend, LEAST)
    reach = 2.0 / tl.sqrt(tl.maximum(precision, moved))
    move = tl.minimum(tl.maximum(alpha * slope / moved, -reach), reach)
    location = tl.where(slope_is & bend_is, location + move, float("nan"))
    return location, tl.where(bend_is, tl.minimum(tl.maximum(tl.log(moved), LOW), HIGH), float("nan"))


@triton.jit
def collect(Sums, which: tl.constexpr, b, in_b, B, n_blocks):
    """The sum over all blocks of classes, always in the same order; many loads at a time, to hide their latency."""
    total = tl.zeros_like(b).to(tl.float32)
    for start in range(0, n_blocks, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        at = Sums + (which * n_blocks + i).to(tl.int64)[:, None] * B + b[None, :]
        total += tl.sum(tl.load(at, mask=(i < n_blocks)[:, None] & in_b[None, :], other=0.0), axis=0)
    return total


@triton.jit
def collect_exponentials(Sums, b, in_b, B, n_blocks):
    """(ref, total): the sum of `grad_class` over all blocks of classes is e^ref total; see `scores`. ref is mostly
    0."""
    ref = tl.zeros_like(b).to(tl.float32)
    for start in range(0, n_blocks, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        at = Sums + (n_blocks + i).to(tl.int64)[:, None] * B + b[None, :]
        ref = tl.maximum(ref, tl.max(tl.load(at, mask=(i < n_blocks)[:, None] & in_b[None, :], other=0.0), axis=0))
    total = tl.zeros_like(ref)
    for start in range(0, n_blocks, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        mask = (i < n_blocks)[:, None] & in_b[None, :]
        own_ref = tl.load(Sums + (n_blocks + i).to(tl.int64)[:, None] * B + b[None, :], mask=mask, other=0.0)
        sums = tl.load(Sums + i.to(tl.int64)[:, None] * B + b[None, :], mask=mask, other=0.0)
        total += tl.sum(sums * tl.exp(own_ref - ref[None, :]), axis=0)
    return ref, total


@triton.jit
def log_ratio(ref, total, label):
    """log(e^ref total + e^label), relative to the larger of the two."""
    ref = tl.where(total > 0.0, ref, -1e30)
    top = tl.maximum(ref, label)
    return top + tl.log(total * tl.exp(ref - top) + tl.exp(label - top))


@triton.jit
def to_one_scale(GradClass, Sums, ref, b, in_b, B, S, n_blocks, COLUMNS: tl.constexpr):
    """Multiply the blocks of `GradClass` by e^(their own ref - ref), so that a row is in units of e^ref."""
    for block in range(n_blocks):
        own_ref = tl.load(Sums + (n_blocks + block).to(tl.int64) * B + b, mask=in_b, other=0.0)
        factor = tl.exp(own_ref - ref)
        end = tl.minimum((block + 1) * COLUMNS, S)
        for start in range(0, COLUMNS, AT_ONCE):
            s = block * COLUMNS + start + tl.arange(0, AT_ONCE)
            mask = (in_b & (ref > 0.0))[:, None] & (s < end)[None, :]
            at = GradClass + b.to(tl.int64)[:, None] * S + s[None, :]
            grad_class = tl.load(at, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
            tl.store(at, grad_class.to(GradClass.dtype.element_ty), mask=mask)


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
    """The corrected q(v) from the sums at the first nodes (J_FIRST of them), and the nodes of the bound."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_b = b < B
    psi_y = tl.load(PsiY + b, mask=in_b, other=0.0)
    used = tl.load(Used + b, mask=in_b, other=0.0)
    log_precision = tl.zeros_like(used)
    if NOISE == SOFTMAX:
        ref, total = collect_exponentials(Sums, b, in_b, B, n_blocks)
        used += tl.where(tl.load(Learned) > 0, share, 1.0) * log_ratio(ref, total, psi_y - used)
    else:
        _, first, second = about_label(VFirst, WeightFirst, b, in_b, psi_y, NOISE, J_FIRST)
        slope = collect(Sums, 0, b, in_b, B, n_blocks) + first
        log_precision = tl.load(Used + B + b, mask=in_b, other=0.0)
        bend = collect(Sums, 2, b, in_b, B, n_blocks) + second
        used, log_precision = newton(used, log_precision, slope, bend, 0.7)
        tl.store(Used + B + b, log_precision, mask=in_b)
    tl.store(Used + b, used, mask=in_b)
    put_nodes(V, Node, b, in_b, used, log_precision, Counter, key, NOISE, J)


@triton.jit
def softmax_row(
    GradClass, Sums, psi_y, used, floor, z_loss, b, in_b, B, S, n_blocks, FLOOR: tl.constexpr, Z_LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """(bound, grad_label, log Z~ - c, factor of `GradClass`, whether the floor clipped, gap); see nn/_plain.py,
    and for the z-loss nn/_smoothing.py."""
    ref, total = collect_exponentials(Sums, b, in_b, B, n_blocks)
    if tl.max(ref, axis=0) > 0.0:
        to_one_scale(GradClass, Sums, ref, b, in_b, B, S, n_blocks, COLUMNS)
    slope = log_ratio(ref, total, psi_y - used)
    raised = tl.zeros_like(used)
    if FLOOR:
        raised = tl.maximum(slope - floor, 0.0)
    shrink = tl.exp(tl.minimum(ref - raised, LARGEST_LOG))
    own = tl.exp(tl.minimum(psi_y - used - raised, LARGEST_LOG))
    ratio = tl.exp(tl.minimum(slope, LARGEST_LOG))
    bound = 1.0 - used + psi_y - ratio
    if Z_LOSS:
        bound -= z_loss * (used * used + 2.0 * used * (ratio - 1.0))
        factor = 1.0 + 2.0 * z_loss * (used + raised)
        shrink, own = shrink * factor, own * factor
    return bound, 1.0 - own, slope, shrink, raised > 0.0, ratio - 1.0 - slope


@triton.jit
def noise_row(
    Sums, V, NodeWeight, psi_y, log_precision, floor, b, in_b, B, n_blocks,
    NOISE: tl.constexpr, J: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """As `softmax_row`, with the derivative instead of log Z~ - c, and with the second derivative."""
    total_class = collect(Sums, 0, b, in_b, B, n_blocks)
    value, first, second = about_label(V, NodeWeight, b, in_b, psi_y, NOISE, J)
    bend = collect(Sums, 2, b, in_b, B, n_blocks) + second
    shrink = tl.zeros_like(psi_y) + 1.0
    if FLOOR:
        most = tl.exp(floor) * (1.0 + tl.abs(first))
        shrink = tl.where(total_class > most, most / total_class, 1.0)
    bound = value + collect(Sums, 1, b, in_b, B, n_blocks) - 0.5 * (log_precision - LOG_2PI_E)
    slope = total_class * shrink + first
    gap = 0.5 * slope * slope / tl.maximum(tl.abs(bend), LEAST)
    return bound, -first, slope, bend, shrink, shrink < 1.0, gap


@triton.jit
def remember(Memory, Visits, Index, used, log_precision, slope, bend, b, in_b, seen, n_rows, NOISE: tl.constexpr):
    """Update the stored parts of each row with alpha = (2 + visits)^-power."""
    row = tl.load(Index + b, mask=in_b, other=-1)
    kept = seen & (row >= 0) & (row < n_rows)
    visits = tl.load(Visits + row, mask=kept, other=0)
    if NOISE == SOFTMAX:
        alpha = tl.exp(-0.9 * tl.log(2.0 + visits.to(tl.float32)))
        old, new = tl.log(1.0 - alpha), tl.log(alpha) + slope
        top = tl.maximum(old, new)
        tl.store(Memory + row, used + top + tl.log(tl.exp(old - top) + tl.exp(new - top)), mask=kept)
    else:
        alpha = tl.exp(-0.6 * tl.log(2.0 + visits.to(tl.float32)))
        location, new_precision = newton(used, log_precision, slope, bend, alpha)
        tl.store(Memory + row, location, mask=kept)
        tl.store(Memory + n_rows + row, new_precision, mask=kept)
    tl.store(Visits + row, visits + 1, mask=kept)


@triton.jit
def residuals(
    Predicted, used, log_precision, slope, bend, largest, b, in_b, seen, B,
    NOISE: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Residuals of the prediction, 0 for skipped rows; see amortised.residuals."""
    predicted = tl.load(Predicted + b, mask=in_b, other=0.0)
    rho_2 = tl.zeros_like(used)
    if NOISE == SOFTMAX:
        rho = tl.exp(tl.minimum(used + slope - predicted, largest)) - 1.0
    else:
        precision = tl.exp(log_precision)
        move = slope / tl.maximum(precision, WIDEST)
        if not FLOOR:
            reach = 2.0 / tl.sqrt(precision)
            move = tl.minimum(tl.maximum(move, -reach), reach)
        rho = tl.minimum(tl.maximum(used + move - predicted, -LARGEST_MOVE), LARGEST_MOVE)
        off = -bend / precision - 1.0 + log_precision - tl.load(Predicted + B + b, mask=in_b, other=0.0)
        rho_2 = tl.where(seen, tl.minimum(tl.maximum(off, -1.0), 1.0), 0.0)
    return tl.where(seen, rho, 0.0), rho_2


@triton.jit
def finish(
    Hidden, Sums, GradClass, PsiY, Predicted, Used, V, NodeWeight, RowWeight, Label, Index, Mean, LabelMean, Memory,
    Visits, Learned, Tally, RowLoss, Scale, AtLabel, Scaled, ScaleColumns, Rho, Report, B, D, S, n_blocks, n_rows,
    floor, largest, z_loss,
    NOISE: tl.constexpr, J: tl.constexpr, FLOOR: tl.constexpr, Z_LOSS: tl.constexpr, LEARN: tl.constexpr,
    HAS_MEMORY: tl.constexpr, PLANES: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All results of a row that depend on its sums over classes. `Report` (blocks, FIELDS + 3 D): sums for `learn`."""
    pid = tl.program_id(0)
    b = pid * BLOCK + tl.arange(0, BLOCK)
    in_b = b < B
    psi_y = tl.load(PsiY + b, mask=in_b, other=0.0)
    used = tl.load(Used + b, mask=in_b, other=0.0)
    weight = tl.load(RowWeight + b, mask=in_b, other=0.0)
    usable = tl.load(Label + b, mask=in_b, other=-1) >= 0
    if NOISE == SOFTMAX:
        log_precision = tl.zeros_like(used)
        bend = log_precision
        bound, grad_label, slope, shrink, floored, gap = softmax_row(
            GradClass, Sums, psi_y, used, floor, z_loss, b, in_b, B, S, n_blocks, FLOOR, Z_LOSS, COLUMNS
        )
    else:
        log_precision = tl.load(Used + B + b, mask=in_b, other=0.0)
        bound, grad_label, slope, bend, shrink, floored, gap = noise_row(
            Sums, V, NodeWeight, psi_y, log_precision, floor, b, in_b, B, n_blocks, NOISE, J, FLOOR
        )
    finite = (tl.abs(bound) < float("inf")) & (tl.abs(slope) < float("inf")) & (tl.abs(bend) < float("inf"))
    counts = weight != 0.0
    seen = counts & usable & finite
    count(Tally, SKIPPED, counts & usable & ~finite)
    count(Tally, FLOORED, floored & seen)
    loss = tl.where(seen, -bound, tl.where(counts, float("nan"), 0.0)) * weight
    scale = tl.where(seen, weight * shrink, 0.0)
    tl.store(RowLoss + b, loss, mask=in_b)
    tl.store(Scale + b, scale, mask=in_b)
    if SCALED:
        column = tl.arange(0, 16)[None, :]
        at_column = ScaleColumns + b.to(tl.int64)[:, None] * 16 + column
        tl.store(at_column, tl.where(column == 0, scale[:, None], 0.0).to(Scaled.dtype.element_ty), mask=in_b[:, None])
    tl.store(AtLabel + b, tl.where(seen, grad_label * weight, 0.0), mask=in_b)
    out = Report + pid.to(tl.int64) * (3 * D + FIELDS)
    tl.store(out, tl.sum(loss, axis=0))
    tl.store(out + 1, tl.sum(weight, axis=0))
    tl.store(out + 2, tl.sum(seen.to(tl.float32), axis=0))
    tl.store(out + 3, tl.sum(tl.where(seen, gap, 0.0), axis=0))
    rho = tl.zeros_like(psi_y)
    rho_2 = tl.zeros_like(psi_y)
    if LEARN:
        if (pid == 0) & (tl.load(Tally + ROWS) > tl.load(Tally + ROWS_BEFORE)):
            tl.store(Learned, tl.load(Learned) + 1)  # read by `learn`, which comes after
        rho, rho_2 = residuals(Predicted, used, log_precision, slope, bend, largest, b, in_b, seen, B, NOISE, FLOOR)
        if PLANES:
            tl.store(Rho + b, rho, mask=in_b)
        label = tl.where(seen, psi_y - tl.load(LabelMean), 0.0)
        tl.store(out + 4, tl.sum(label, axis=0))
        tl.store(out + 5, tl.sum(label * label, axis=0))
        tl.store(out + 6, tl.sum(rho, axis=0))
        tl.store(out + 7, tl.sum(rho_2, axis=0))
        tl.store(out + 8, tl.sum(rho * label, axis=0))
        tl.store(out + 9, tl.sum(rho_2 * label, axis=0))
        if HAS_MEMORY:
            remember(Memory, Visits, Index, used, log_precision, slope, bend, b, in_b, seen, n_rows, NOISE)
    energy = tl.zeros((BLOCK,), dtype=tl.float32)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, D, BLOCK_D):
        in_d = start + d < D
        mask = in_b[:, None] & in_d[None, :]
        at = b.to(tl.int64)[:, None] * D + (start + d)[None, :]
        h = tl.load(Hidden + at, mask=mask & seen[:, None], other=0.0).to(tl.float32)
        if SCALED:
            tl.store(Scaled + at, (h * scale[:, None]).to(Scaled.dtype.element_ty), mask=mask)
        if LEARN:
            mean = tl.load(Mean + start + d, mask=in_d, other=0.0)
            centred = tl.where(mask & seen[:, None], h - mean[None, :], 0.0)
            energy += tl.sum(centred * centred, axis=1)
            to = out + start + d + FIELDS
            tl.store(to, tl.sum(centred, axis=0), mask=in_d)
            tl.store(to + D, tl.sum(centred * rho[:, None], axis=0), mask=in_d)
            if NOISE != SOFTMAX:
                tl.store(to + 2 * D, tl.sum(centred * rho_2[:, None], axis=0), mask=in_d)
    if LEARN:
        tl.store(out + 10, tl.sum(energy, axis=0))


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
    """Sum of some columns of the report's vectors over all blocks of rows."""
    total = tl.zeros_like(d).to(tl.float32)
    for start in range(0, n_blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = Report + i.to(tl.int64)[:, None] * width + (d + field)[None, :]
        total += tl.sum(tl.load(at, mask=(i < n_blocks)[:, None] & in_d[None, :], other=0.0), axis=0)
    return total


@triton.jit
def learn(
    Report, Slope, Offset, LabelSlope, Mean, LabelMean, Learned, Counter, Tally, Gauge, Loss, Denominator, D, n_blocks,
    NOISE: tl.constexpr, LEARN: tl.constexpr, PLANES: tl.constexpr, GAUGE: tl.constexpr, MEAN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    OFFSET_RATE: tl.constexpr, SLOPE_RATE: tl.constexpr, LABEL_RATE: tl.constexpr, MEAN_RATE: tl.constexpr,
):  # fmt: skip
    """Normalised least squares. One program for each block of features; the last also updates the scalars."""
    width = 3 * D + FIELDS
    totals = scalars_of(Report, width, n_blocks, BLOCK)
    n = tl.maximum(scalar(totals, 2), 1.0)
    if LEARN:
        rate = tl.maximum(1.0 / tl.maximum(tl.load(Learned).to(tl.float32), 1.0), MEAN_RATE)
        d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < D
        energy = tl.maximum(scalar(totals, 10), 1e-12)
        mean = tl.load(Mean + d, mask=in_d, other=0.0)
        slope = tl.load(Slope + d, mask=in_d, other=0.0)
        mean += rate * columns_of(Report, FIELDS, d, in_d, width, n_blocks, BLOCK) / n
        slope += SLOPE_RATE * columns_of(Report, D + FIELDS, d, in_d, width, n_blocks, BLOCK) / energy
        tl.store(Mean + d, mean, mask=in_d)
        if not PLANES:
            tl.store(Slope + d, slope, mask=in_d)
        if NOISE != SOFTMAX:
            slope = tl.load(Slope + D + d, mask=in_d, other=0.0)
            slope += SLOPE_RATE * columns_of(Report, 2 * D + FIELDS, d, in_d, width, n_blocks, BLOCK) / energy
            tl.store(Slope + D + d, slope, mask=in_d)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        denominator = tl.maximum(scalar(totals, 1), 1.17549435e-38) if MEAN else 1.0
        tl.store(Denominator, denominator)
        tl.store(Loss, scalar(totals, 0) / denominator)
        tl.store(Tally + ROWS_BEFORE, tl.load(Tally + ROWS))
        tl.store(Counter, tl.load(Counter) + 1)
        if GAUGE:
            gap = scalar(totals, 3) / n
            calls = tl.load(Gauge + 2) + 1.0
            running = tl.load(Gauge + 1)
            tl.store(Gauge, gap)
            tl.store(Gauge + 1, running + (gap - running) * tl.maximum(1.0 / calls, GAP_RATE))
            tl.store(Gauge + 2, calls)
        if LEARN:
            fast = tl.maximum(rate, OFFSET_RATE)
            if not PLANES:
                tl.store(Offset, tl.load(Offset) + fast * scalar(totals, 6) / n)
            tl.store(LabelMean, tl.load(LabelMean) + rate * scalar(totals, 4) / n)
            if NOISE != SOFTMAX:
                tl.store(Offset + 1, tl.load(Offset + 1) + fast * scalar(totals, 7) / n)
                by = LABEL_RATE / tl.maximum(scalar(totals, 5), 1e-12)
                tl.store(LabelSlope, tl.load(LabelSlope) + by * scalar(totals, 8))
                tl.store(LabelSlope + 1, tl.load(LabelSlope + 1) + by * scalar(totals, 9))
