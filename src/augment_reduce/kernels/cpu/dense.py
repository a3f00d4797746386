"""Dense rows against one class: scores of several rows at once, and sums of rows into one class's gradient.

Rows come from the second cache or from further away, and a vector that lies in two cache lines costs twice what one
in a single line does. So vectors begin where lines of the *rows* begin, wherever the caller's memory does (numpy's
begins 16 bytes into a line), without a difference in the results:

    dot = fold(lanes),   lane r = sum of x_d w_d over d = r, 16 + r, 32 + r, ..., one after the other

`fold` adds lanes half a turn apart, then a quarter, an eighth, a sixteenth. Vectors that begin in the middle have the
same lanes, turned; and folding does not see by how much, since it adds the same numbers in pairs (but for the sign of a
zero, if all of them are zeros).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils

from .lanes import (
    I32,
    I64,
    LANES,
    _all_lanes,
    _data,
    _lanes_at,
    add_rows4,
    add_rows8,
    add_rows16,
    add_rows64,
    has_fma,
    intrinsic,
)
from .types import INLINE, OPTIONS, Array

ROWS = 8  # scored at once: a class's weights are read once for all of them


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _fold4(builder: Any, vectors: list) -> Any:
    """The sums of four vectors of sixteen, side by side."""
    halves = [builder.fadd(_pick(builder, v, v, [*range(8)]), _pick(builder, v, v, [*range(8, 16)])) for v in vectors]
    ab, cd = (
        builder.fadd(
            _pick(builder, a, b, [0, 1, 2, 3, 8, 9, 10, 11]), _pick(builder, a, b, [4, 5, 6, 7, 12, 13, 14, 15])
        )
        for a, b in (halves[:2], halves[2:])
    )
    twos = builder.fadd(
        _pick(builder, ab, cd, [0, 1, 4, 5, 8, 9, 12, 13]), _pick(builder, ab, cd, [2, 3, 6, 7, 10, 11, 14, 15])
    )
    return builder.fadd(_pick(builder, twos, twos, [0, 2, 4, 6]), _pick(builder, twos, twos, [1, 3, 5, 7]))


class _Dots:
    """Code for the scores of so many rows with one class."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, n_rows: int) -> None:
        dtype = signature.args[0].dtype
        self.builder, self.number, self.align = builder, context.get_value_type(dtype), dtype.bitwidth // 8
        self.x, self.w = (_data(context, builder, signature.args[a], args[a]) for a in (0, 2))
        self.rows, self.first_w = [builder.extract_value(args[1], r) for r in range(n_rows)], args[3]
        vector = ir.VectorType(self.number, LANES)
        self.zeros = ir.Constant(vector, None)
        self.at_once = has_fma(context)
        kind, name = ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f{dtype.bitwidth}"
        self.fma = cgutils.get_or_insert_function(builder.module, kind, name) if self.at_once else None
        parts = [vector.as_pointer(), I32, ir.VectorType(ir.IntType(1), LANES), vector]
        name = f"llvm.masked.load.v{LANES}f{dtype.bitwidth}.p0"  # reads no memory but that of the lanes asked for
        self.some = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, parts), name)
        self.totals = [cgutils.alloca_once_value(builder, self.zeros) for _ in range(n_rows)]
        for total in self.totals:  # also when this is done again
            builder.store(self.zeros, total)

    def load(self, data: Any, at: Any, only: Any) -> Any:
        place = _lanes_at(self.builder, data, at, self.number)
        if only is None:
            return self.builder.load(place, align=self.align)
        return self.builder.call(self.some, [place, I32(self.align), only, self.zeros])

    def add(self, d: Any, only: Any = None) -> None:
        """Features d .. d + 16, or of these `only` some."""
        builder = self.builder
        weight = self.load(self.w, builder.add(self.first_w, d), only)
        for row, total in zip(self.rows, self.totals, strict=True):
            x = self.load(self.x, builder.add(row, d), only)
            builder.store(self.multiply_add(x, weight, builder.load(total)), total)

    def multiply_add(self, x: Any, weight: Any, total: Any) -> Any:
        """Rounded once, or where the processor cannot do that, twice; not what the compiler may choose: it would join
        the two here and not there."""
        if self.at_once:
            return self.builder.call(self.fma, [x, weight, total])
        return self.builder.fadd(total, self.builder.fmul(x, weight))

    def sums(self) -> list:
        found = [self.builder.load(total) for total in self.totals]
        folded = [_fold4(self.builder, found[i : i + 4]) for i in range(0, len(found), 4)]
        return [self.builder.extract_element(four, I32(i)) for four in folded for i in range(4)]


def _dots(n_rows: int) -> Any:
    """An intrinsic for the scores of so many rows, a multiple of four, with one class."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dots, before, n = _Dots(context, builder, signature, args, n_rows), args[4], args[5]
        first = _all_lanes(builder, builder.sub(I32(LANES), builder.trunc(before, I32)))
        begun = builder.icmp_signed(">=", ir.Constant(ir.VectorType(I32, LANES), [*range(LANES)]), first)
        in_two = builder.icmp_signed(">", before, I64(0))
        with builder.if_then(in_two):
            dots.add(builder.sub(before, I64(LANES)), begun)
        with cgutils.for_range(builder, n) as loop:
            dots.add(builder.add(before, builder.mul(loop.index, I64(LANES))))
        with builder.if_then(in_two):
            dots.add(builder.add(before, builder.mul(n, I64(LANES))), builder.not_(begun))
        return context.make_tuple(builder, signature.return_type, dots.sums())

    def dots(typing_context: Any, x: Any, rows: Any, w: Any, j: Any, before: Any, n: Any) -> tuple:
        place = types.int64
        return types.UniTuple(x.dtype, n_rows)(x, types.UniTuple(place, n_rows), w, place, place, place), codegen

    def in_python(x: Any, rows: tuple, w: Any, j: int, before: int, n: int) -> list:
        width = n * LANES + (LANES if before > 0 else 0)
        flat, weights = x.reshape(-1), w.reshape(-1)[j : j + width]
        return [flat[row : row + width] @ weights for row in rows]

    dots.__name__ = dots.__qualname__ = f"dots{n_rows}"
    return intrinsic(in_python)(dots)


# dots8(x, (row, ...), w, j, before, n): for each of the rows, which begin at these places of x, its product with the
# weights from w[j] on. n vectors are read from `before` on; where that is not zero, also the parts of a vector on
# either side of them, and nothing of what lies beside the row or the weights.
dots8, dots4 = _dots(ROWS), _dots(ROWS // 2)


@njit(**OPTIONS)
def before_a_line(x: Array) -> int:
    """How many numbers of a row of x come before one whose place in memory is a whole number of vectors, if that is the
    same for all rows: vectors from there on do not lie in two lines."""
    D, size, first = x.shape[1], x.itemsize, x.ctypes.data
    return -(first // size) % LANES if D > 0 and D % LANES == 0 and first % size == 0 else 0


@njit(**OPTIONS)
def _rest(x: Array, row: int, weight: Array, k: int) -> float:
    """What the features that do not fill a vector add to a score."""
    D, total = x.shape[1], x.dtype.type(0)
    for d in range(D // LANES * LANES, D):
        total += x[row, d] * weight[k, d]
    return total


@njit(**INLINE)
def score_class(
    k: int, p: int, last: int, order: Array, row: Array, x: Array, at: Array, before: int, weight: Array, bias: Array,
    out: Array,
) -> None:  # fmt: skip
    """out[order[p]] = x[at[row[p]]] . weight[k] + bias[k] for pairs p..last; `before` is `before_a_line` of x."""
    D = weight.shape[1]
    n, j, first, beyond, b = D // LANES - (before > 0), k * D, p, last - 1, bias[k]
    while p < last:
        r0, r1, r2 = at[row[p]], at[row[min(p + 1, beyond)]], at[row[min(p + 2, beyond)]]
        r3 = at[row[min(p + 3, beyond)]]
        if p + 4 < last:
            r4, r5, r6 = at[row[p + 4]], at[row[min(p + 5, beyond)]], at[row[min(p + 6, beyond)]]
            r7 = at[row[min(p + 7, beyond)]]
            rows = (r0 * D, r1 * D, r2 * D, r3 * D, r4 * D, r5 * D, r6 * D, r7 * D)
            found = dots8(x, rows, weight, j, before, n)
            for i in range(min(8, last - p)):
                out[order[p + i]] = b + found[i]
            p += 8
        else:
            four = dots4(x, (r0 * D, r1 * D, r2 * D, r3 * D), weight, j, before, n)
            for i in range(min(4, last - p)):
                out[order[p + i]] = b + four[i]
            p += 4
    for q in range(first, last if D % LANES > 0 else first):
        out[order[q]] += _rest(x, at[row[q]], weight, k)


@njit(**INLINE)
def sum_features(d: int, end: int, D: int, x: Array, start: Array, first: Array, pull: Array, g: Array) -> None:
    """g[k D + d : k D + end] += pull[p] x[first[p] + d : first[p] + end] for the pairs p of class k, start[k] to
    start[k + 1], one after the other; products and sums are rounded apart. x and g are flat.

    As wide as there is room for, a class's sums in registers."""
    K = start.shape[0] - 1
    while d + 4 <= end:
        n = end - d
        for k in range(K):
            at, p, last = k * D + d, start[k], start[k + 1]
            if n >= 4 * LANES:
                add_rows64(g, at, x, d, first, pull, p, last)
            elif n >= LANES:
                add_rows16(g, at, x, d, first, pull, p, last)
            elif n >= 8:
                add_rows8(g, at, x, d, first, pull, p, last)
            else:
                add_rows4(g, at, x, d, first, pull, p, last)
        d += 4 * LANES if n >= 4 * LANES else LANES if n >= LANES else 8 if n >= 8 else 4
    for k in range(K if d < end else 0):
        for p in range(start[k], start[k + 1]):
            for e in range(d, end):
                g[k * D + e] = g[k * D + e] + pull[p] * x[first[p] + e]
