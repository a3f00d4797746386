"""What Numba's own loops do not give: sixteen numbers at a time, and asking for memory before it is needed.

Numba vectorises long loops, but not sixteen steps of a short one. These few instructions are written
for LLVM directly, which makes them one AVX-512 register of float32, two of AVX2, four of NEON.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.np.arrayobj import make_array

LANES = 16
I32, I64 = ir.IntType(32), ir.IntType(64)


def intrinsic(in_python: Callable[..., Any]) -> Callable[[Callable[..., tuple]], Any]:
    """An instruction for compiled code; where compilation is switched off, what it does in Python. Callers leave out
    the first argument of the definition."""
    return lambda definition: in_python if numba.config.DISABLE_JIT else numba_intrinsic(definition)  # type: ignore[attr-defined]


def has_fma(context: Any) -> bool:
    """Whether code is made for a processor that multiplies and adds in one operation; else it would be a call for every
    number. All 64-bit ARM ones do."""
    features = getattr(context.codegen(), "_tm_features", "+fma")  # all of the last ten years do, too
    return platform.machine().lower() not in ("x86_64", "amd64") or "+fma" in features.split(",")


@intrinsic(lambda a, b, c: a * b + c)
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> tuple:
    """a b + c, rounded once, or where the processor cannot do that, twice; not what the compiler may choose: it would
    join the two in one copy of a loop and not in another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if has_fma(context):
            return builder.fma(*args)
        return builder.fadd(builder.fmul(args[0], args[1]), args[2])

    return a(a, a, a), codegen


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return make_array(array_type)(context, builder, array).data


def _lanes_at(builder: Any, data: Any, index: Any, number: Any, lanes: int = LANES) -> Any:
    """Pointer to the sixteen numbers, or so many, from data[index] on."""
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(number, lanes).as_pointer())


def _all_lanes(builder: Any, x: Any, lanes: int = LANES) -> Any:
    """x, sixteen times, or so many."""
    nothing = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, x, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _send_for(builder: Any, data: Any, index: Any, to_write: bool = False) -> None:
    """Ask for the cache line of data[index]."""
    at = builder.bitcast(builder.gep(data, [index]), cgutils.voidptr_t)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
    builder.call(function, [at, I32(int(to_write)), I32(2), I32(1)])


def _ask_for(to_write: bool) -> Any:
    """Code that asks for the cache line of args[0][args[1]]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _send_for(builder, _data(context, builder, signature.args[0], args[0]), args[1], to_write)
        return context.get_dummy_value()

    return codegen


@intrinsic(lambda array, index: None)
def prefetch(typing_context: Any, array: Any, index: Any) -> tuple:
    """Ask for the cache line of array[index] without waiting for it."""
    return types.void(array, types.uint64), _ask_for(to_write=False)


def _add_lanes(to: Any, i: int, x: Any, source: Any, j: int) -> None:
    to[i : i + LANES] += x * source[j : j + LANES]


@intrinsic(_add_lanes)
def add_lanes(typing_context: Any, to: Any, i: Any, x: Any, source: Any, j: Any) -> tuple:
    """to[i:i+16] += x * source[j:j+16], for flat arrays; product and sum are rounded apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, align = args[2].type, signature.args[2].bitwidth // 8
        target = _lanes_at(builder, _data(context, builder, signature.args[0], args[0]), args[1], number)
        origin = _lanes_at(builder, _data(context, builder, signature.args[3], args[3]), args[4], number)
        product = builder.fmul(_all_lanes(builder, args[2]), builder.load(origin, align=align))
        builder.store(builder.fadd(builder.load(target, align=align), product), target, align=align)
        return context.get_dummy_value()

    return types.void(to, types.uint64, x, source, types.uint64), codegen


def _dot_lanes(to: Any, i: int, index: Any, value: Any, n: int, table: Any) -> None:
    to[i : i + LANES] = value[:n] @ table.reshape(-1, LANES)[index[:n]]


@intrinsic(_dot_lanes)
def dot_lanes(typing_context: Any, to: Any, i: Any, index: Any, value: Any, n: Any, table: Any) -> tuple:
    """to[i:i+16] = sum over q < n of value[q] * table[16 index[q] : 16 index[q] + 16], for flat arrays."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, align = context.get_value_type(signature.args[3].dtype), signature.args[3].dtype.bitwidth // 8
        data = [_data(context, builder, signature.args[a], args[a]) for a in (0, 2, 3, 5)]
        target, indices, values, rows = data
        total = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(number, LANES), None))
        with cgutils.for_range(builder, args[4]) as loop:
            at = builder.zext(builder.load(builder.gep(indices, [loop.index])), I64)
            row = builder.load(_lanes_at(builder, rows, builder.mul(at, I64(LANES)), number), align=align)
            x = _all_lanes(builder, builder.load(builder.gep(values, [loop.index])))
            product = builder.fmul(x, row, flags=("contract",))
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        builder.store(builder.load(total), _lanes_at(builder, target, args[1], number), align=align)
        return context.get_dummy_value()

    return types.void(to, types.uint64, index, value, types.intp, table), codegen


def _dot2_lanes(to: Any, x: Any, i: int, w: Any, j: int, k: int, n: int, coming: int) -> None:
    row = x.reshape(-1)[i : i + n * LANES].reshape(n, LANES)
    for a, first in enumerate((j, k)):
        to[a * LANES : (a + 1) * LANES] = (row * w.reshape(-1)[first : first + n * LANES].reshape(n, LANES)).sum(0)


@intrinsic(_dot2_lanes)
def dot2_lanes(typing_context: Any, to: Any, x: Any, i: Any, w: Any, j: Any, k: Any, n: Any, coming: Any) -> tuple:
    """to[:16] = x[i:i+16] * w[j:j+16] + x[i+16:i+32] * w[j+16:j+32] + ..., n times, and to[16:32] the same with k.

    For flat arrays. Each line of x that is read sends for one of x[coming:]: all at once they would have to wait.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, align = context.get_value_type(signature.args[1].dtype), signature.args[1].dtype.bitwidth // 8
        target, rows, weights = (_data(context, builder, signature.args[a], args[a]) for a in (0, 1, 3))
        zeros = ir.Constant(ir.VectorType(number, LANES), None)
        totals = [(cgutils.alloca_once_value(builder, zeros), args[a]) for a in (4, 5)]
        with cgutils.for_range(builder, args[6]) as loop:
            d = builder.mul(loop.index, I64(LANES))
            row = builder.load(_lanes_at(builder, rows, builder.add(args[2], d), number), align=align)
            for total, first in totals:
                weight = builder.load(_lanes_at(builder, weights, builder.add(first, d), number), align=align)
                product = builder.fmul(row, weight, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            _send_for(builder, rows, builder.add(args[7], d))
        for a, (total, _) in enumerate(totals):
            place = _lanes_at(builder, target, I64(a * LANES), number)
            builder.store(builder.load(total), place, align=align)
        return context.get_dummy_value()

    place = types.uint64
    return types.void(to, x, place, w, place, place, types.intp, place), codegen


def _add_rows(width: int, lanes: int) -> Any:
    """An intrinsic that adds rows to `width` times so many sums, which stay in registers meanwhile."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, align = context.get_value_type(signature.args[0].dtype), signature.args[0].dtype.bitwidth // 8
        target, rows, starts, factors = (_data(context, builder, signature.args[a], args[a]) for a in (0, 2, 4, 5))
        steps = [I64(j * lanes) for j in range(width)]
        places = [_lanes_at(builder, target, builder.add(args[1], step), number, lanes) for step in steps]
        totals = [cgutils.alloca_once_value(builder, builder.load(place, align=align)) for place in places]
        with cgutils.for_range_slice(builder, args[6], args[7], I64(1)) as (p, _):
            first = builder.add(builder.load(builder.gep(starts, [p])), args[3])
            factor = _all_lanes(builder, builder.load(builder.gep(factors, [p])), lanes)
            for step, total in zip(steps, totals, strict=True):
                row = builder.load(_lanes_at(builder, rows, builder.add(first, step), number, lanes), align=align)
                builder.store(builder.fadd(builder.load(total), builder.fmul(factor, row)), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=align)
        return context.get_dummy_value()

    def add_rows(typing_context: Any, to: Any, i: Any, x: Any, d: Any, first: Any, a: Any, p: Any, last: Any) -> tuple:
        place = types.int64
        return types.void(to, place, x, place, first, a, place, place), codegen

    def in_python(to: Any, i: int, x: Any, d: int, first: Any, a: Any, p: int, last: int) -> None:
        n = width * lanes
        for q in range(p, last):
            to[i : i + n] += a[q] * x[first[q] + d : first[q] + d + n]

    add_rows.__name__ = add_rows.__qualname__ = f"add_rows{width * lanes}"
    return intrinsic(in_python)(add_rows)


# add_rows64(to, i, x, d, first, a, p, last): to[i:i+64] += a[p] * x[first[p]+d : first[p]+d+64], for p up to last, one
# after the other, for flat arrays; products and sums are rounded apart.
add_rows64, add_rows16, add_rows8, add_rows4 = _add_rows(4, 16), _add_rows(1, 16), _add_rows(1, 8), _add_rows(1, 4)
