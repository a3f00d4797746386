"""Two noises as a user would bring them: one class each, log_prob and log_cdf only. docs/noise.md quotes them."""

import math

import torch
from torch import Tensor

from augment_reduce.noise import Noise


class Laplace(Noise):
    """φ(ε) = e^-|ε| / 2        Φ(ε) = e^ε / 2 below 0, 1 - e^-ε / 2 above"""

    name = "laplace"

    def log_prob(self, eps: Tensor) -> Tensor:
        return -eps.abs() - math.log(2.0)

    def log_cdf(self, eps: Tensor) -> Tensor:
        # Both sides are computed everywhere, so each sees only inputs it can bear: far below 0, e^-ε would overflow.
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
        a = torch.where(below, -eps, eps) / math.sqrt(3.0)  # |ε| / √3, but with a slope at 0
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
