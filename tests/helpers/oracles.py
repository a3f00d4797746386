"""Slow and obviously right: eq. (5) by arbitrary-precision quadrature, closed forms for two classes, enumeration.

p(y | psi) = int phi(eps) prod_{k != y} Phi(eps - (psi_k - psi_y)) d eps
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from mpmath import mp, mpf
from scipy.stats import multivariate_normal

DIGITS = 25


def _student_t3_cdf(x: mpf) -> mpf:
    angle = 2 * mp.acot(-x / mp.sqrt(3)) if x < 0 else 2 * (mp.pi - mp.acot(x / mp.sqrt(3))) if x > 0 else mp.pi
    return (angle - mp.sin(angle)) / (2 * mp.pi)


# name -> density and distribution function, as anyone would write them down
NOISE: dict[str, tuple[Callable[[mpf], mpf], Callable[[mpf], mpf]]] = {
    "softmax": (lambda x: mp.exp(-x - mp.exp(-x)), lambda x: mp.exp(-mp.exp(-x))),
    "probit": (mp.npdf, mp.ncdf),
    "logistic": (lambda x: mp.exp(-abs(x)) / (1 + mp.exp(-abs(x))) ** 2, lambda x: 1 / (1 + mp.exp(-x))),
    "laplace": (lambda x: mp.exp(-abs(x)) / 2, lambda x: mp.exp(x) / 2 if x < 0 else 1 - mp.exp(-x) / 2),
    "student-t3": (lambda x: 2 / (mp.pi * mp.sqrt(3) * (1 + x * x / 3) ** 2), _student_t3_cdf),
}
TAILS = {"softmax": (5, 80), "student-t3": (mp.inf, mp.inf)}


def log_likelihood(name: str, psi: Sequence[float], y: int) -> mpf:
    """log of eq. (5) to about 20 digits, for scores a few units apart."""
    phi, cdf = NOISE[name]
    with mp.workdps(DIGITS):
        gaps = [mpf(p) - mpf(psi[y]) for k, p in enumerate(psi) if k != y]
        middle = sorted({mpf(0), *gaps})  # kinks are here
        left, right = TAILS.get(name, (80, 80))  # beyond: less than e^-79
        points = [middle[0] - left, middle[0] - 4, *middle, middle[-1] + 8, middle[-1] + right]
        return mp.log(mp.quad(lambda e: phi(e) * mp.fprod(cdf(e - gap) for gap in gaps), points))


def gradient(name: str, psi: Sequence[float], y: int) -> list[float]:
    """d log p(y) / d psi_k: central differences so short, in so many digits, that they are exact to 1e-12."""
    with mp.workdps(DIGITS):
        h, at = mpf(10) ** -7, [mpf(p) for p in psi]
        steps = [[h if j == k else mpf(0) for j in range(len(psi))] for k in range(len(psi))]
        above = [log_likelihood(name, [p + d for p, d in zip(at, step, strict=True)], y) for step in steps]
        below = [log_likelihood(name, [p - d for p, d in zip(at, step, strict=True)], y) for step in steps]
        return [float((a - b) / (2 * h)) for a, b in zip(above, below, strict=True)]


def log_p_of_the_lower(name: str, gap: float) -> float:
    """Two classes, the other one `gap` > 0 higher: P(eps_1 - eps_2 > gap), the law of the difference being known."""
    with mp.workdps(60):
        d = mpf(gap)
        p = {
            "softmax": 1 / (1 + mp.exp(d)),
            "probit": mp.erfc(d / 2) / 2,  # the difference has variance 2
            "logistic": (mp.exp(-d) * (d - 1) + mp.exp(-2 * d)) / (1 - mp.exp(-d)) ** 2,
            "laplace": mp.exp(-d) * (2 + d) / 4,
        }[name]
        return float(mp.log(p))


def probit_by_mvn(psi: Sequence[float], y: int, tolerance: float) -> float:
    """p(y) for Gaussian noise: all of eps_k - eps_y < -gap_k at once, which have variances 2 and covariances 1."""
    gaps = np.delete(np.asarray(psi) - psi[y], y)
    covariance = np.eye(len(gaps)) + 1.0
    return float(
        multivariate_normal.cdf(-gaps, cov=covariance, abseps=tolerance, releps=0.0, rng=np.random.default_rng(0))
    )


def softmax_log_p(psi: Sequence[float]) -> list[float]:
    """log p of every class, eq. (1), by its definition."""
    with mp.workdps(DIGITS):
        total = mp.fsum(mp.exp(mpf(p)) for p in psi)
        return [float(mpf(p) - mp.log(total)) for p in psi]


def top_classes(psi: Sequence[float], k: int) -> list[int]:
    """The k highest scores, best first, ties to the lower class: by sorting pairs."""
    return [c for _, c in sorted((-p, c) for c, p in enumerate(psi) if not math.isnan(p))][:k]
