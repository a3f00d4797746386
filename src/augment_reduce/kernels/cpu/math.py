"""Exponentials and logarithms that Numba's loops take sixteen at a time: plain arithmetic, and bits taken for numbers.

Like `lanes`, compiled into the kernels of other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import overload

from .lanes import intrinsic, multiply_add
from .types import OPTIONS

LOG_2 = Fraction("0.693147180559945309417232121458176568")


@intrinsic(lambda bits: bits.view(np.float32 if bits.itemsize == 4 else np.float64))
def _number_of_bits(typing_context: Any, bits: Any) -> tuple:
    """The float with these bits: int32 to float32, int64 to float64."""
    number = types.float32 if bits == types.int32 else types.float64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType() if number == types.float32 else ir.DoubleType())

    return number(bits), codegen


@intrinsic(lambda number: number.view(np.int32 if number.itemsize == 4 else np.int64))
def _bits_of_number(typing_context: Any, number: Any) -> tuple:
    """The bits of a float: float32 to int32, float64 to int64."""
    bits = types.int32 if number == types.float32 else types.int64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32 if bits == types.int32 else 64))

    return bits(number), codegen


def _named(function: Callable, number: type) -> Callable:
    """A name of its own, by which Numba keeps and links what it compiled."""
    function.__qualname__ = f"{function.__name__}_{number.__name__}"
    return function


def _exp_of(number: type, integer: type, mantissa: int, exponent: int, degree: int) -> Callable:
    """e^x = 2^n e^r with n the nearest integer to x / log 2 and e^r from its series, |r| <= log 2 / 2.

    Zero below the smallest normal number, infinite above half the largest, NaN of NaN.
    """
    bias, shift = integer(2 ** (exponent - 1) - 1), integer(mantissa)
    # Adding and taking away 1.5 x 2^mantissa rounds to an integer; log 2 in two parts makes n log 2 exact.
    rounder, per_log2 = number(1.5 * 2.0**mantissa), number(1.0 / math.log(2.0))
    top = _leading_bits(math.log(2.0), 9 if number is np.float32 else 32)
    log2_top, minus_log2_rest = number(top), number(Fraction(top) - LOG_2)
    largest, smallest = number(np.log(np.finfo(number).max / 2)), number(np.log(np.finfo(number).tiny))
    series = tuple(number(1.0 / math.factorial(j)) for j in range(degree, -1, -1))
    zero, infinity = number(0.0), number(np.inf)

    def exp(x: Any) -> Any:
        inside = min(max(x, smallest), largest)
        # n in its lowest bits: no conversion, which few processors do in vectors
        rounded = multiply_add(inside, per_log2, rounder)
        n = rounded - rounder
        r = multiply_add(n, minus_log2_rest, inside - n * log2_top)
        total = zero
        for coefficient in series:
            total = multiply_add(total, r, coefficient)
        value = total * _number_of_bits(integer((_bits_of_number(rounded) + bias) << shift))
        value = zero if x < smallest else value
        value = infinity if x > largest else value
        return value if x == x else x

    return _named(exp, number)


def _log_of(number: type, integer: type, mantissa: int, exponent: int, terms: int) -> Callable:
    """log x = e log 2 + 2 artanh(f / (2 + f)) with x = 2^e (1 + f), 1 + f within a factor sqrt 2 of one. -inf of zero.

    For normal numbers and zero; what is negative, infinite or NaN is for the caller to keep out.
    """
    shift, one_bits = integer(mantissa), integer(2 ** (exponent - 1) - 1)
    # The bits of 2^mantissa have room for a whole number in their lowest: that plus it, without a conversion.
    whole = integer((mantissa + 2 ** (exponent - 1) - 1) << mantissa)
    whole_and_bias = number(2.0**mantissa + 2 ** (exponent - 1) - 1)
    low, one, two, half = integer((1 << mantissa) - 1), number(1.0), number(2.0), number(0.5)
    root2, log2, minus_infinity, zero = number(math.sqrt(2.0)), number(LOG_2), number(-np.inf), number(0.0)
    series = tuple(number(1.0 / (2 * j + 1)) for j in range(terms, -1, -1))

    def log(x: Any) -> Any:
        bits = _bits_of_number(x)
        power = _number_of_bits(integer(integer(bits >> shift) | whole)) - whole_and_bias
        m = _number_of_bits(integer((bits & low) | integer(one_bits << shift)))
        large = m > root2
        power = power + one if large else power
        f = (m * half if large else m) - one
        ratio = f / (two + f)
        square, total = ratio * ratio, zero
        for coefficient in series:
            total = multiply_add(total, square, coefficient)
        return power * log2 + two * ratio * total if x > zero else minus_infinity

    return _named(log, number)


def even_and_odd(powers: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The coefficients of even powers and of odd ones, the highest first, as `powers` are: LLVM unrolls two chains of
    twelve, and not one of 25."""
    ascending = powers[::-1]
    return tuple(ascending[::2][::-1]), tuple(ascending[1::2][::-1])


def _log1p_of(number: type, terms: int) -> Callable:
    """log(1 + t) = 2 artanh(t / (2 + t)) for t in [0, 1], where its series has terms below 9^-n."""
    even, odd = even_and_odd([number(1.0 / (2 * j + 1)) for j in range(terms, -1, -1)])
    two, zero = number(2.0), number(0.0)

    def log1p(t: Any) -> Any:
        ratio = t / (two + t)
        x = ratio * ratio
        square, total, of_odd = x * x, zero, zero
        for coefficient in even:
            total = multiply_add(total, square, coefficient)
        for coefficient in odd:
            of_odd = multiply_add(of_odd, square, coefficient)
        return two * ratio * multiply_add(of_odd, x, total)

    return _named(log1p, number)


def _leading_bits(x: float, bits: int) -> float:
    """x cut to so many bits."""
    mantissa, power = math.frexp(x)
    return math.ldexp(math.floor(mantissa * 2.0**bits), power - bits)


_exp32 = njit(**OPTIONS)(_exp_of(np.float32, np.int32, 23, 8, 7))
_exp64 = njit(**OPTIONS)(_exp_of(np.float64, np.int64, 52, 11, 13))

_log32 = njit(**OPTIONS)(_log_of(np.float32, np.int32, 23, 8, 5))
_log64 = njit(**OPTIONS)(_log_of(np.float64, np.int64, 52, 11, 12))

_log1p32 = njit(**OPTIONS)(_log1p_of(np.float32, 7))
_log1p64 = njit(**OPTIONS)(_log1p_of(np.float64, 16))


def exp(x: Any) -> Any:
    """e^x in the precision of x, within two units of the last place."""
    return np.exp(x)


@overload(exp)
def _exp(x: Any) -> Any:
    compiled = _exp32 if x == types.float32 else _exp64

    def implementation(x: Any) -> Any:
        return compiled(x)

    return implementation


def log(x: Any) -> Any:
    """log x of a positive number or zero, in its precision."""
    return np.log(x)


@overload(log)
def _log(x: Any) -> Any:
    compiled = _log32 if x == types.float32 else _log64

    def implementation(x: Any) -> Any:
        return compiled(x)

    return implementation


def log1p(t: Any) -> Any:
    """log(1 + t) for t in [0, 1], in the precision of t; right however small t is."""
    return np.log1p(t)


@overload(log1p)
def _log1p(t: Any) -> Any:
    compiled = _log1p32 if t == types.float32 else _log1p64

    def implementation(t: Any) -> Any:
        return compiled(t)

    return implementation


@njit(**{**OPTIONS, "fastmath": {"reassoc", "nsz"}})
def row_sum(a: Any) -> Any:
    """Sum of a line of numbers, in whatever order is fastest: the next need not wait for the one before it."""
    total = a.dtype.type(0)
    for i in range(a.shape[0]):
        total += a[i]
    return total


@njit(**OPTIONS)
def row_max(a: Any, least: Any) -> Any:
    """The largest of a line of numbers, or `least`; four at a time, for the same reason."""
    n = a.shape[0]
    t0 = t1 = t2 = t3 = least
    for i in range(0, n // 4 * 4, 4):
        t0, t1, t2, t3 = max(t0, a[i]), max(t1, a[i + 1]), max(t2, a[i + 2]), max(t3, a[i + 3])
    for i in range(n // 4 * 4, n):
        t0 = max(t0, a[i])
    return max(max(t0, t1), max(t2, t3))
