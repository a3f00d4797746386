# mypy: disallow-untyped-defs=False
# ruff: noqa: RET505 (Triton follows one branch of a constant condition; what comes after it is always compiled)
"""Triton: the three noises, elementwise in float32; see model/noise.py for the formulas of the Normal.

Evaluated for every (row, class) pair, so the number of instructions matters: exponential, logarithm and reciprocal are
the GPU's approximations (relative error below 1e-6), which the interpreter does not have.
"""

import os

import triton
import triton.language as tl

SOFTMAX, PROBIT, LOGISTIC = (tl.constexpr(i) for i in range(3))
LOG_SQRT_2PI = tl.constexpr(0.9189385332046727)
TAIL_TERMS = tl.constexpr(9)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log_rest(x, log_far):
    """log(1 - x), 0 <= x < 1, given `log_far` from the logarithm; by a series near 0, for the accuracy of sums of
    10^7."""
    near = -x * (1.0 + x * (0.5 + x * (0.33333333 + x * 0.25)))
    return tl.where(x < 0.03, near, log_far)


@triton.jit
def about_cdf(t, Tail, NOISE: tl.constexpr):
    """(log Phi, phi / Phi, its derivative) at t.

    Normal, with a = |t|: rho = a + delta(a) = phi / Phi(-a), delta from a polynomial of degree 8 (error 1e-6).
    """
    if NOISE == SOFTMAX:
        ratio = exp(tl.minimum(-t, 60.0))
        return -ratio, ratio, -ratio
    elif NOISE == LOGISTIC:
        small = exp(-tl.abs(t))
        over = reciprocal(1.0 + small)
        ratio = tl.where(t < 0.0, over, small * over)
        rest = tl.where(t < 0.0, small * over, over)
        return log_rest(ratio, tl.minimum(t, 0.0) - log(1.0 + small)), ratio, -ratio * rest
    else:
        a = tl.minimum(tl.abs(t), 1e18)
        w = reciprocal(a + 3.5)
        x = 1.0 - 7.0 * w
        total = tl.load(Tail) + tl.zeros_like(a)
        for i in tl.static_range(1, TAIL_TERMS):
            total = total * x + tl.load(Tail + i)
        rho = a + total * w
        log_phi = -0.5 * a * a - LOG_SQRT_2PI
        phi = exp(log_phi)
        tail = phi * reciprocal(rho)  # Phi(-a)
        below = t < 0.0
        rest = 1.0 - tail
        far = log(tl.where(below, rho, rest))
        ratio = tl.where(below, rho, phi * reciprocal(rest))
        return tl.where(below, log_phi - far, log_rest(tail, far)), ratio, -ratio * (t + ratio)


@triton.jit
def about_density(t, NOISE: tl.constexpr):
    """(log phi, its derivative, its second derivative) at t."""
    if NOISE == SOFTMAX:
        e = tl.exp(tl.minimum(-t, 60.0))
        return -t - e, e - 1.0, -e
    elif NOISE == LOGISTIC:
        small = tl.exp(-tl.abs(t))
        over = 1.0 / (1.0 + small)
        half = (1.0 - small) * over  # |tanh(t / 2)|
        log_phi = -tl.abs(t) - 2.0 * tl.log(1.0 + small)
        return log_phi, tl.where(t > 0.0, -half, half), -2.0 * small * over * over
    else:
        return -0.5 * t * t - LOG_SQRT_2PI, -t, tl.zeros_like(t) - 1.0
