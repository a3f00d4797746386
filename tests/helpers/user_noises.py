"""Noises as a user would bring them: one class each, log_prob and log_cdf; then with scalar functions, which make them
fast. docs/noise.md quotes them."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from augment_reduce import Scalars
from augment_reduce.model.noise import Noise


class Laplace(Noise):
    """φ(ε) = e^-|ε| / 2        Φ(ε) = e^ε / 2 below 0, 1 - e^-ε / 2 above"""

    name = "laplace"

    def log_prob(self, eps: Tensor) -> Tensor:
        return -eps.abs() - math.log(2.0)

    def log_cdf(self, eps: Tensor) -> Tensor:
        # Both sides are computed everywhere, so each gets inputs where it is finite: far below 0, e^-ε would overflow.
        above = torch.log1p(-0.5 * torch.exp(-eps.clamp(min=0.0)))
        return torch.where(eps < 0.0, eps - math.log(2.0), above)


class StudentT3(Noise):
    """Student t with 3 degrees of freedom. With the angle x = 2 arccot(-ε / √3), in (0, 2π):

    φ(ε) = 2 / (π √3 (1 + ε²/3)²)        Φ(ε) = (x - sin x) / (2π)
    """

    name = "student-t3"

    def log_prob(self, eps: Tensor) -> Tensor:
        return math.log(2.0 / (math.pi * math.sqrt(3.0))) - 2.0 * torch.log1p(eps * eps / 3.0)

    def log_cdf(self, eps: Tensor) -> Tensor:
        below = eps < 0.0
        a = torch.where(below, -eps, eps) / math.sqrt(3.0)  # |ε| / √3, but with a gradient at 0
        log_tail = self._log_x_minus_sin(2.0 * torch.atan2(torch.ones_like(a), a)) - math.log(2.0 * math.pi)
        return torch.where(below, log_tail, torch.log1p(-torch.exp(log_tail)))

    @staticmethod
    def _log_x_minus_sin(x: Tensor) -> Tensor:
        """log(x - sin x), which cancels for small x: there by the series x³/6 (1 - x²/20 (1 - x²/42 (1 - ...)))."""
        near = x.clamp(max=1.0)
        series = torch.ones_like(x)
        for n in range(9, 1, -1):
            series = 1.0 - near * near / (2 * n * (2 * n + 1)) * series
        far = x.clamp(min=1.0)
        return torch.where(x < 1.0, 3.0 * torch.log(near) + torch.log(series / 6.0), torch.log(far - torch.sin(far)))


class Cauchy(Noise):
    """φ(ε) = 1 / (π (1 + ε²))        Φ(ε) = 1/2 + arctan(ε) / π"""

    name = "cauchy"

    def log_prob(self, eps: Tensor) -> Tensor:
        return -math.log(math.pi) - torch.log1p(eps * eps)

    def log_cdf(self, eps: Tensor) -> Tensor:
        # arctan2(1, -ε) / π is Φ without the difference of two nearly equal numbers; 1 - Φ likewise.
        below = torch.log(torch.atan2(torch.ones_like(eps), -eps.clamp(max=0.0)) / math.pi)
        above = torch.log1p(-torch.atan2(torch.ones_like(eps), eps.clamp(min=0.0)) / math.pi)
        return torch.where(eps < 0.0, below, above)


@njit
def laplace_log_prob(x):
    return -abs(x) - np.log(2.0)


@njit
def minus_sign(x):
    return -np.sign(x)


@njit
def nothing(x):
    return 0.0 * x


@njit
def laplace_log_cdf(x):
    return x - np.log(2.0) if x < 0.0 else np.log1p(-0.5 * np.exp(-x))


@njit
def laplace_hazard(x):
    return 1.0 if x < 0.0 else 1.0 / (2.0 * np.exp(x) - 1.0)


@njit
def laplace_bend(x):
    hazard = laplace_hazard(x)
    return 0.0 if x < 0.0 else -hazard * (1.0 + hazard)


class CompiledLaplace(Laplace):
    scalars = Scalars(laplace_log_prob, minus_sign, nothing, laplace_log_cdf, laplace_hazard, laplace_bend)


@njit
def student_log_prob(x):
    return np.log(2.0 / (np.pi * np.sqrt(3.0))) - 2.0 * np.log1p(x * x / 3.0)


@njit
def student_dlog_prob(x):
    return -4.0 * x / (3.0 + x * x)


@njit
def student_d2log_prob(x):
    return -4.0 * (3.0 - x * x) / (3.0 + x * x) ** 2


@njit
def student_tail(a):
    """Φ(-a) = (x - sin x) / (2π) for a >= 0, x = 2 arctan(√3 / a); where that cancels, by its series."""
    x = 2.0 * np.arctan2(np.sqrt(3.0), a)
    if x >= 1.0:
        return (x - np.sin(x)) / (2.0 * np.pi)
    series = 1.0
    for n in range(9, 1, -1):
        series = 1.0 - x * x / (2 * n * (2 * n + 1)) * series
    return x * x * x / 6.0 * series / (2.0 * np.pi)


@njit
def student_log_cdf(x):
    tail = student_tail(abs(x))
    return np.log(tail) if x < 0.0 else np.log1p(-tail)


@njit
def student_hazard(x):
    return np.exp(student_log_prob(x) - student_log_cdf(x))


@njit
def student_bend(x):
    hazard = student_hazard(x)
    return hazard * (student_dlog_prob(x) - hazard)


class CompiledStudentT3(StudentT3):
    scalars = Scalars(
        student_log_prob, student_dlog_prob, student_d2log_prob, student_log_cdf, student_hazard, student_bend
    )


@njit
def cauchy_log_prob(x):
    return -np.log(np.pi) - np.log1p(x * x)


@njit
def cauchy_dlog_prob(x):
    return -2.0 * x / (1.0 + x * x)


@njit
def cauchy_d2log_prob(x):
    return -2.0 * (1.0 - x * x) / (1.0 + x * x) ** 2


@njit
def cauchy_log_cdf(x):
    tail = np.arctan2(1.0, abs(x)) / np.pi
    return np.log(tail) if x < 0.0 else np.log1p(-tail)


@njit
def cauchy_hazard(x):
    return np.exp(cauchy_log_prob(x) - cauchy_log_cdf(x))


@njit
def cauchy_bend(x):
    hazard = cauchy_hazard(x)
    return hazard * (cauchy_dlog_prob(x) - hazard)


class CompiledCauchy(Cauchy):
    scalars = Scalars(cauchy_log_prob, cauchy_dlog_prob, cauchy_d2log_prob, cauchy_log_cdf, cauchy_hazard, cauchy_bend)
