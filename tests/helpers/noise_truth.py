"""The truth about every noise, by mpmath: log phi, log Phi and their derivatives, at any working precision."""

import math
from functools import cache

import mpmath
import numpy as np
import torch
from mpmath import mpf

from augment_reduce.model.noise import Gumbel, Logistic, Normal
from tests.helpers.user_noises import Laplace, StudentT3

FUNCTIONS = ("log_prob", "dlog_prob", "d2log_prob", "log_cdf", "dlog_cdf", "d2log_cdf")

# Each of these returns the six values, in the order of FUNCTIONS, at the working precision of mpmath.


def gumbel_truth(z):
    e = mpmath.exp(-z)
    return -z - e, mpmath.expm1(-z), -e, -e, e, -e


def logistic_truth(z):
    e = mpmath.exp(-abs(z))
    big, small = 1 / (1 + e), e / (1 + e)  # σ(|z|), σ(-|z|)
    cdf = (-mpmath.log1p(e), small) if z > 0 else (z - mpmath.log1p(e), big)
    score = mpmath.sign(z) * mpmath.expm1(-abs(z)) * big
    return -abs(z) - 2 * mpmath.log1p(e), score, -2 * big * small, *cdf, -big * small


def normal_hazard(a):
    """φ(a) / Φ(-a), and by how much it exceeds a, for a ≥ 0; erfc would cancel in the latter for large a."""
    if a < 30:
        hazard = mpmath.npdf(a) / (mpmath.erfc(a / mpmath.sqrt(2)) / 2)
        return hazard, hazard - a
    below = a
    for j in range(100, 1, -1):
        below = a + j / below
    return a + 1 / below, 1 / below


def normal_truth(z):
    hazard, excess = normal_hazard(abs(z))
    log_phi = -z * z / 2 - mpmath.log(2 * mpmath.pi) / 2
    if z < 0:
        cdf = log_phi - mpmath.log(hazard), hazard, -hazard * excess
    else:
        upper_tail = mpmath.exp(log_phi) / hazard
        r = mpmath.exp(log_phi) / (1 - upper_tail)
        cdf = mpmath.log1p(-upper_tail), r, -r * (z + r)
    return log_phi, -z, mpf(-1), *cdf


def laplace_truth(z):
    e = mpmath.exp(-abs(z)) / 2
    r = e / (1 - e)
    cdf = (mpmath.log1p(-e), r, -r - r * r) if z > 0 else (z - mpmath.log(2), mpf(1), mpf(0))
    return -abs(z) - mpmath.log(2), -mpmath.sign(z), mpf(0), *cdf


def student_t3_truth(z):
    phi = 6 * mpmath.sqrt(3) / (mpmath.pi * (3 + z * z) ** 2)
    s = z / mpmath.sqrt(3)
    cdf = mpf(1) / 2 + (mpmath.atan(s) + s / (1 + s * s)) / mpmath.pi
    r, score = phi / cdf, -4 * z / (3 + z * z)
    return mpmath.log(phi), score, -4 * (3 - z * z) / (3 + z * z) ** 2, mpmath.log(cdf), r, r * (score - r)


TRUTH = {Gumbel: gumbel_truth, Normal: normal_truth, Logistic: logistic_truth}
TRUTH |= {Laplace: laplace_truth, StudentT3: student_t3_truth}


def both_signs(magnitudes):
    return np.concatenate([-magnitudes[::-1], magnitudes])


@cache
def truth(kind, points):
    with mpmath.workdps(50):
        return list(zip(*(TRUTH[kind](mpf(z)) for z in points), strict=True))


def errors(values, exact, finfo):
    """Relative errors; a truth beyond the largest float must come out as ±inf, one below the normal floats near 0."""
    for value, true in zip(values.tolist(), exact, strict=True):
        if abs(true) > finfo.max:
            yield 0.0 if value == math.copysign(math.inf, true) else math.inf
        elif abs(true) < finfo.tiny:
            yield 0.0 if abs(value - true) <= finfo.tiny else math.inf
        else:
            yield float(abs(value - true) / abs(true)) if math.isfinite(value) else math.inf


def worst(noise, function, points, dtype):
    points = torch.tensor(points, dtype=dtype)
    exact = truth(type(noise), tuple(points.tolist()))[FUNCTIONS.index(function)]
    return max(errors(getattr(noise, function)(points), exact, torch.finfo(dtype)))
