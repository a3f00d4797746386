# mypy: disallow-untyped-defs=False
"""Triton: one optimiser step on every touched weight row, repeats of a class summed first; reference: nn/_rows.py.

A step touches S sampled classes and B labels, with repeats within and between them. `sort_blocks` and `merge` sort
these S + B numbers in two launches: blocks first, then each number's rank among all blocks. In `update` one program
processes each class, at its first position in the sorted list, and sums all of its gradients in a fixed order. So
results are deterministic, without synchronising with the host.
"""

import triton
import triton.language as tl

from .draw import ROUNDING, bits, step_key
from .prepare import LARGEST, SKIPPED

ADAGRAD, ROWWISE, ADAM = (tl.constexpr(i) for i in range(3))


@triton.jit
def sort_blocks(Classes, Label, Keys, S, n, n_classes, BLOCK: tl.constexpr):
    """Keys, sorted within each block of BLOCK positions: (class, position in (sampled classes, labels)) as one number.

    n_classes, which sorts last, is the label of a row that does not count; the list is padded with the largest number.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sampled = tl.load(Classes + i, mask=i < S, other=0).to(tl.int32)
    label = tl.load(Label + i - S, mask=(i >= S) & (i < n), other=-1)
    k = tl.where(i < S, sampled, tl.where(label >= 0, label, n_classes)).to(tl.int64)
    key = tl.where(i < n, (k << 32) | i.to(tl.int64), 0x7FFFFFFFFFFFFFFF)
    tl.store(Keys + i, tl.sort(key))


@triton.jit
def begin(Grad, Denominator, Scale, Steps, Go, Tally, B, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Decide whether the weights are updated, and count the step: `Go` is 1 if any row counts.

    They are not if the upstream gradient is not finite (a GradScaler that overflowed); the rows are counted then.
    """
    n = 0
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        n += tl.sum((tl.load(Scale + b, mask=b < B, other=0.0) != 0.0).to(tl.int32), axis=0)
    upstream = 0.0
    if not PER_ROW:
        upstream = tl.abs(tl.load(Grad).to(tl.float32) / tl.load(Denominator))
    go = tl.where((n > 0) & (upstream < LARGEST), 1, 0)
    tl.store(Go, go)
    tl.store(Steps, tl.load(Steps) + go)
    tl.store(Tally + SKIPPED, tl.load(Tally + SKIPPED) + tl.where(upstream < LARGEST, 0, n))


@triton.jit
def merge(Keys, Sorted, Order, n, STEPS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sorted[r], Order[r]: the r-th smallest class and its position; a stable sort.

    A key's rank is the sum of the numbers of smaller keys in the sorted blocks (BLOCKS of SIZE), by bisection.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(Keys + i)
    first = (tl.arange(0, BLOCKS) * SIZE)[None, :]
    counts = first < n
    lower = tl.zeros((BLOCK, BLOCKS), dtype=tl.int32)
    upper = lower + SIZE
    for _ in tl.static_range(STEPS):
        middle = (lower + upper) // 2
        inside = counts & (middle < upper)
        smaller = inside & (tl.load(Keys + first + middle, mask=inside, other=0) < key[:, None])
        lower = tl.where(smaller, middle + 1, lower)
        upper = tl.where(smaller, upper, middle)
    rank = tl.sum(tl.where(counts, lower, 0), axis=1)
    place = (key & 0x7FFFFFFF).to(tl.int32)
    kept = key != 0x7FFFFFFFFFFFFFFF
    tl.store(Sorted + rank, (key >> 32).to(tl.int32), mask=kept)
    tl.store(Order + rank, place, mask=kept)


@triton.jit
def at_random(x, key, place):
    """Stochastic rounding of float32 to bfloat16."""
    low = (bits(key, place, 0) & 0xFFFF).to(tl.uint32)
    whole = x.to(tl.uint32, bitcast=True)
    kept = ((whole + low) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, kept, x).to(tl.bfloat16)


@triton.jit
def adam_move(g, First, Second, at, mask, n, log_beta1, log_beta2, rest1, rest2, rate, eps, t):
    """Moments decayed n steps at once (see nn/_rows.py), and the bias-corrected step; rest = 1 - beta."""
    m = tl.load(First + at, mask=mask, other=0.0) * tl.exp(n * log_beta1) + rest1 * g
    v = tl.load(Second + at, mask=mask, other=0.0) * tl.exp(n * log_beta2) + rest2 * g * g
    tl.store(First + at, m, mask=mask)
    tl.store(Second + at, v, mask=mask)
    unbias = tl.sqrt(1.0 - tl.exp(t * log_beta2))
    return rate * unbias / (1.0 - tl.exp(t * log_beta1)) * m / (tl.sqrt(v) + eps * unbias)


@triton.jit
def members(
    Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, first, end, k, d, in_d, S, D,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of class k at COUNT positions from `first` to `end`, and whether all are of class k."""
    at = first + tl.arange(0, COUNT)
    same = (at < end) & (tl.load(Sorted + at, mask=at < end, other=-1) == k)
    i = tl.load(Order + at, mask=same, other=0)
    sampled, labelled = same & (i < S), same & (i >= S)
    slot, b = i.to(tl.int64), (i - S).to(tl.int64)
    at_label = tl.load(AtLabel + b, mask=labelled, other=0.0)
    h = tl.load(Hidden + b[:, None] * D + d[None, :], mask=labelled[:, None] & in_d[None, :], other=0.0)
    g = -at_label[:, None] * h.to(tl.float32)
    g_bias = -at_label
    for split in tl.static_range(SPLITS):
        part = slot + split * S
        mask = sampled[:, None] & in_d[None, :]
        g += tl.load(OfClass + part[:, None] * D + d[None, :], mask=mask, other=0.0)
        if HAS_BIAS:
            g_bias += tl.load(OfClassBias + part, mask=sampled, other=0.0)
    return tl.sum(g, axis=0), tl.sum(g_bias, axis=0), tl.min(same.to(tl.int32), axis=0)


@triton.jit
def sum_chunks(
    Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, Chunks, ChunksBias, S, D, n,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Chunks (n / CHUNK, D): the sums of those chunks of CHUNK positions that belong to one class.

    A frequent label has hundreds of positions, which one program would sum sequentially.
    """
    first = tl.program_id(0) * CHUNK
    k = tl.load(Sorted + first)
    if tl.load(Sorted + first + CHUNK - 1) == k:
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < D
        g, g_bias, _ = members(
            Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, first, n, k, d, in_d, S, D, HAS_BIAS, SPLITS, CHUNK
        )
        tl.store(Chunks + tl.program_id(0).to(tl.int64) * D + d, g, mask=in_d)
        if HAS_BIAS and tl.program_id(1) == 0:
            tl.store(ChunksBias + tl.program_id(0), g_bias)


@triton.jit
def whole_chunks(Sorted, Chunks, ChunksBias, chunk, k, d, in_d, D, n, HAS_BIAS: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of the chunks of class k from `chunk` on, and the first chunk that is not entirely of class k."""
    g = tl.zeros_like(d).to(tl.float32)
    g_bias = 0.0
    more = 1
    while more == 1:
        c = chunk + tl.arange(0, CHUNK)
        last = c * CHUNK + (CHUNK - 1)
        whole = (last < n) & (tl.load(Sorted + last, mask=last < n, other=-1) == k)
        at = Chunks + c.to(tl.int64)[:, None] * D + d[None, :]
        g += tl.sum(tl.load(at, mask=whole[:, None] & in_d[None, :], other=0.0), axis=0)
        if HAS_BIAS:
            g_bias += tl.sum(tl.load(ChunksBias + c, mask=whole, other=0.0), axis=0)
        more = tl.min(whole.to(tl.int32), axis=0)
        chunk += tl.sum(whole.to(tl.int32), axis=0)
    return g, g_bias, chunk


@triton.jit
def gradient_of(
    Sorted, Order, OfClass, OfClassBias, Chunks, ChunksBias, Hidden, AtLabel, Grad, Denominator, place, k, d, in_d, S,
    D, n, HAS_BIAS: tl.constexpr, PER_ROW: tl.constexpr, SPLITS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The gradient by features d of class k, whose positions begin at `place`, and by its bias.

    Most classes have one or two positions. Others: positions up to the next chunk, whole chunks, the remainder.
    """
    g, g_bias, more = members(
        Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, place, n, k, d, in_d, S, D, HAS_BIAS, SPLITS, FEW
    )
    if more == 1:
        edge = tl.cdiv(place + FEW, CHUNK) * CHUNK
        g_1, bias_1, _ = members(
            Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, place + FEW, tl.minimum(edge, n), k, d, in_d, S,
            D, HAS_BIAS, SPLITS, CHUNK,
        )  # fmt: skip
        g_2, bias_2, chunk = whole_chunks(Sorted, Chunks, ChunksBias, edge // CHUNK, k, d, in_d, D, n, HAS_BIAS, CHUNK)
        g_3, bias_3, _ = members(
            Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, chunk * CHUNK, n, k, d, in_d, S, D, HAS_BIAS,
            SPLITS, CHUNK,
        )  # fmt: skip
        g += g_1 + g_2 + g_3
        g_bias += bias_1 + bias_2 + bias_3
    if not PER_ROW:
        upstream = tl.load(Grad).to(tl.float32) / tl.load(Denominator)
        g, g_bias = g * upstream, g_bias * upstream
    g = tl.where(tl.abs(g) < LARGEST, g, 0.0)  # not finite, or too large to be squared: no update
    return g, tl.where(tl.abs(g_bias) < LARGEST, g_bias, 0.0)


@triton.jit
def shrunk_by(square, max_norm):
    """The factor that clips a row of this squared norm to max_norm."""
    return tl.minimum(max_norm / tl.sqrt(tl.maximum(square, 1e-38)), 1.0)


@triton.jit
def measure(
    Sorted, Order, OfClass, OfClassBias, Chunks, ChunksBias, Hidden, AtLabel, Grad, Denominator, First, Last, Steps, Go,
    Shrink, Due, S, D, n, n_classes, max_norm,
    SUMS: tl.constexpr, CLIP: tl.constexpr, COUNTS: tl.constexpr, HAS_BIAS: tl.constexpr, PER_ROW: tl.constexpr,
    SPLITS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Per-row quantities for `update`, if a row is too wide for one program's registers: clipping factor, row-wise
    Adagrad's accumulator, steps since the last update. One program a class, at its first position."""
    place = tl.program_id(0)
    k = tl.load(Sorted + place)
    before = tl.load(Sorted + place - 1, mask=place > 0, other=-1)
    if (k != before) & (k < n_classes) & (tl.load(Go) > 0):
        row = k.to(tl.int64)
        if SUMS | CLIP:
            square = 0.0
            touched = 0.0
            of_bias = 0.0
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                g, g_bias = gradient_of(
                    Sorted, Order, OfClass, OfClassBias, Chunks, ChunksBias, Hidden, AtLabel, Grad, Denominator, place,
                    k, d, d < D, S, D, n, HAS_BIAS, PER_ROW, SPLITS, FEW, CHUNK,
                )  # fmt: skip
                square += tl.sum(g * g, axis=0)
                touched += tl.sum((g != 0.0).to(tl.float32), axis=0)
                of_bias = g_bias
            shrink = 1.0
            if CLIP:
                shrink = shrunk_by(square + (of_bias * of_bias if HAS_BIAS else 0.0), max_norm)
                tl.store(Shrink + place, shrink)
            if SUMS:
                s = tl.load(First + row) + square * shrink * shrink / tl.maximum(touched, 1.0)
                tl.store(First + row, s)
        if COUNTS:
            steps = tl.load(Steps)
            tl.store(Due + place, steps.to(tl.float32) - tl.load(Last + row).to(tl.float32))
            tl.store(Last + row, steps.to(tl.int32))


@triton.jit(do_not_specialize=["key"])
def update(
    Sorted, Order, OfClass, OfClassBias, Chunks, ChunksBias, Hidden, AtLabel, Grad, Denominator, Weight, Bias, First,
    Second, FirstBias, SecondBias, Last, Rate, Steps, Go, Counter, Shrink, Due, S, D, n, n_classes, key, eps,
    log_beta1, log_beta2, rest1, rest2, max_norm, weight_decay,
    KIND: tl.constexpr, LAZY: tl.constexpr, COUNTS: tl.constexpr, CLIP: tl.constexpr, DECAY: tl.constexpr,
    MEASURED: tl.constexpr, HAS_BIAS: tl.constexpr, PER_ROW: tl.constexpr, ROUND: tl.constexpr,
    SPLITS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for each position of the sorted list and block of features; it runs if its class starts there.

    If one block is the whole row, the quantities of `measure` are computed here.
    """
    place = tl.program_id(0)
    k = tl.load(Sorted + place)
    before = tl.load(Sorted + place - 1, mask=place > 0, other=-1)
    if (k != before) & (k < n_classes) & (tl.load(Go) > 0):
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < D
        g, g_bias = gradient_of(
            Sorted, Order, OfClass, OfClassBias, Chunks, ChunksBias, Hidden, AtLabel, Grad, Denominator, place, k, d,
            in_d, S, D, n, HAS_BIAS, PER_ROW, SPLITS, FEW, CHUNK,
        )  # fmt: skip
        row = k.to(tl.int64)
        at = row * D + d
        rate, t = tl.load(Rate), tl.load(Steps).to(tl.float32)
        w = tl.load(Weight + at, mask=in_d, other=0.0).to(tl.float32)
        if CLIP:
            if MEASURED:
                shrink = tl.load(Shrink + place)
            else:
                square = tl.sum(g * g, axis=0) + (g_bias * g_bias if HAS_BIAS else 0.0)
                shrink = shrunk_by(square, max_norm)
            g, g_bias = g * shrink, g_bias * shrink
        due = 1.0
        if COUNTS:
            if MEASURED:
                due = tl.load(Due + place)
            else:
                due = t - tl.load(Last + row).to(tl.float32)
                tl.debug_barrier()  # all warps have read it
                tl.store(Last + row, tl.load(Steps).to(tl.int32))
        if DECAY:
            w *= tl.exp(due * tl.log(1.0 - rate * weight_decay))
        decayed = due if LAZY else 1.0
        if KIND == ADAM:
            w -= adam_move(g, First, Second, at, in_d, decayed, log_beta1, log_beta2, rest1, rest2, rate, eps, t)
        elif KIND == ROWWISE:
            if MEASURED:
                s = tl.load(First + row)
            else:
                touched = tl.maximum(tl.sum((g != 0.0).to(tl.float32), axis=0), 1.0)
                s = tl.load(First + row) + tl.sum(g * g, axis=0) / touched
                tl.debug_barrier()
                tl.store(First + row, s)
            w -= rate / (tl.sqrt(s) + eps) * g
        else:
            s = tl.load(First + at, mask=in_d, other=0.0) + g * g
            tl.store(First + at, s, mask=in_d)
            w -= rate / (tl.sqrt(s) + eps) * g
        random = step_key(key, Counter, ROUNDING)
        if ROUND:
            tl.store(Weight + at, at_random(w, random, at.to(tl.uint32)), mask=in_d)
        else:
            tl.store(Weight + at, w, mask=in_d)
        if HAS_BIAS and tl.program_id(1) == 0:
            bias = tl.load(Bias + row).to(tl.float32)
            if KIND == ADAM:
                bias -= adam_move(
                    g_bias, FirstBias, SecondBias, row, True, decayed, log_beta1, log_beta2, rest1, rest2, rate, eps, t
                )
            else:
                s_bias = tl.load(FirstBias + row) + g_bias * g_bias
                tl.store(FirstBias + row, s_bias)
                bias -= rate / (tl.sqrt(s_bias) + eps) * g_bias
            if ROUND:
                own = (row + n_classes.to(tl.int64) * D).to(tl.uint32)
                tl.store(Bias + row, at_random(bias, random, own))
            else:
                tl.store(Bias + row, bias)
