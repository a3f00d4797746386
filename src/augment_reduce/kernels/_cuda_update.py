# mypy: disallow-untyped-defs=False
"""Triton: one optimiser step on every touched weight row, repeats of a class merged first. Twin of nn/_rows.py.

A step touches S sampled classes and B labels, with repeats within and between them. `rank` sorts these S + B numbers in
one launch by counting, for each, how many come before it: quadratic, and at 8,192 of them faster than a radix sort's
many launches. `update` then gives each class, at its first place in the sorted list, to one program, which adds up
all of its gradients in a fixed order. So results do not vary from run to run, and nothing is read back by the host.
"""

import triton
import triton.language as tl

from ._cuda_draw import ROUNDING, bits, step_key

ADAGRAD, ROWWISE, ADAM = (tl.constexpr(i) for i in range(3))


@triton.jit
def number(Classes, Label, i, S, n, n_classes):
    """The class at place i of (sampled classes, labels); n_classes, which sorts last, for a row that does not count.

    Beyond the list n_classes too: in no one's way, since there it is neither smaller nor first.
    """
    sampled = tl.load(Classes + i, mask=i < S, other=0).to(tl.int32)
    label = tl.load(Label + i - S, mask=(i >= S) & (i < n), other=-1)
    return tl.where(i < S, sampled, tl.where(label >= 0, label, n_classes))


@triton.jit
def rank(Classes, Label, Sorted, Order, S, n, n_classes, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """Sorted[r], Order[r]: the r-th smallest class, and its place; equal classes in the order of their places.

    An equal class counts if it stands before: all do in the stretches before this program's (BLOCK divides OTHERS),
    none in those after it, so that only one stretch has to look.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = number(Classes, Label, i, S, n, n_classes)
    here = (tl.program_id(0) * BLOCK) // OTHERS * OTHERS
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, here, OTHERS):
        other = number(Classes, Label, start + tl.arange(0, OTHERS), S, n, n_classes)
        before += tl.sum((other[None, :] <= mine[:, None]).to(tl.int32), axis=1)
    j = here + tl.arange(0, OTHERS)
    other = number(Classes, Label, j, S, n, n_classes)
    first = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
    before += tl.sum(first.to(tl.int32), axis=1)
    for start in range(here + OTHERS, n, OTHERS):
        other = number(Classes, Label, start + tl.arange(0, OTHERS), S, n, n_classes)
        before += tl.sum((other[None, :] < mine[:, None]).to(tl.int32), axis=1)
    tl.store(Sorted + before, mine, mask=i < n)
    tl.store(Order + before, i, mask=i < n)


@triton.jit
def at_random(x, key, place):
    """float32 to bfloat16, up with the probability that the cut-off part says."""
    low = (bits(key, place, 0) & 0xFFFF).to(tl.uint32)
    whole = x.to(tl.uint32, bitcast=True)
    kept = ((whole + low) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, kept, x).to(tl.bfloat16)


@triton.jit
def adam_move(g, First, Second, at, mask, n, log_beta1, log_beta2, rest1, rest2, rate, eps, t):
    """Moments decayed n steps at once (see nn/_rows.py), and the step with their biases corrected; rest = 1 - beta."""
    m = tl.load(First + at, mask=mask, other=0.0) * tl.exp(n * log_beta1) + rest1 * g
    v = tl.load(Second + at, mask=mask, other=0.0) * tl.exp(n * log_beta2) + rest2 * g * g
    tl.store(First + at, m, mask=mask)
    tl.store(Second + at, v, mask=mask)
    unbias = tl.sqrt(1.0 - tl.exp(t * log_beta2))
    return rate * unbias / (1.0 - tl.exp(t * log_beta1)) * m / (tl.sqrt(v) + eps * unbias)


@triton.jit(do_not_specialize=["key"])
def update(
    Sorted, Order, OfClass, OfClassBias, Hidden, AtLabel, Grad, Denominator, Weight, Bias, First, Second, FirstBias,
    SecondBias, Last, Rate, Steps, Counter, S, D, n, n_classes, key, eps,
    log_beta1, log_beta2, rest1, rest2,
    KIND: tl.constexpr, LAZY: tl.constexpr, HAS_BIAS: tl.constexpr, PER_ROW: tl.constexpr, ROUND: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    k = tl.load(Sorted + place)
    before = tl.load(Sorted + place - 1, mask=place > 0, other=-1)
    if (k != before) & (k < n_classes):
        d = tl.arange(0, BLOCK_D)
        in_d = d < D
        g = tl.zeros((BLOCK_D,), dtype=tl.float32)
        g_bias = 0.0
        first, more = place, 1
        while more == 1:
            members = first + tl.arange(0, MEMBERS)
            same = (members < n) & (tl.load(Sorted + members, mask=members < n, other=-1) == k)
            i = tl.load(Order + members, mask=same, other=0)
            sampled, labelled = same & (i < S), same & (i >= S)
            slot, b = i.to(tl.int64), (i - S).to(tl.int64)
            at_label = tl.load(AtLabel + b, mask=labelled, other=0.0)
            by_class = tl.load(
                OfClass + slot[:, None] * D + d[None, :], mask=sampled[:, None] & in_d[None, :], other=0.0
            )
            h = tl.load(Hidden + b[:, None] * D + d[None, :], mask=labelled[:, None] & in_d[None, :], other=0.0)
            g += tl.sum(by_class - at_label[:, None] * h.to(tl.float32), axis=0)
            if HAS_BIAS:
                g_bias += tl.sum(tl.load(OfClassBias + slot, mask=sampled, other=0.0) - at_label, axis=0)
            more = tl.min(same.to(tl.int32), axis=0)
            first += MEMBERS
        if not PER_ROW:
            upstream = tl.load(Grad).to(tl.float32) / tl.load(Denominator)
            g, g_bias = g * upstream, g_bias * upstream
        row = k.to(tl.int64)
        at = row * D + d
        rate, t = tl.load(Rate), tl.load(Steps).to(tl.float32)
        w = tl.load(Weight + at, mask=in_d, other=0.0).to(tl.float32)
        due = 1.0
        if LAZY:
            due = t - tl.load(Last + row).to(tl.float32)
            tl.store(Last + row, tl.load(Steps).to(tl.int32))
        if KIND == ADAM:
            w -= adam_move(g, First, Second, at, in_d, due, log_beta1, log_beta2, rest1, rest2, rate, eps, t)
        elif KIND == ROWWISE:
            touched = tl.maximum(tl.sum((g != 0.0).to(tl.float32), axis=0), 1.0)
            s = tl.load(First + row) + tl.sum(g * g, axis=0) / touched
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
        if HAS_BIAS:
            bias = tl.load(Bias + row).to(tl.float32)
            if KIND == ADAM:
                bias -= adam_move(
                    g_bias, FirstBias, SecondBias, row, True, due, log_beta1, log_beta2, rest1, rest2, rate, eps, t
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
