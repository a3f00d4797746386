"""A noise whose functions and sums over classes are Numba loops over its scalar functions: for the CPU, no autograd.

`compiled(noise)` is the noise itself if it has no scalar functions. User-defined scalar functions are first compared
with the torch functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu.noise_loops import NoiseLoops, loops_of
from .noise import LocationScale, Noise, unmasked

CHECK_POINTS = (
    -40.0,
    -12.5,
    -5.0,
    -2.0,
    -0.75,
    -0.1,
    0.1,
    0.6,
    1.5,
    4.0,
    9.0,
    30.0,
)  # points of the comparison
TOLERANCE = 1e-6  # of a value, or absolute where it is below 1


class CompiledNoise(Noise):
    """Wraps a noise; calls that need autograd use the noise itself."""

    def __init__(self, noise: Noise) -> None:
        self.original, self.loops = noise, loops_of(noise.scalars)
        self.name, self.smooth_log_concave = noise.name, noise.smooth_log_concave
        self.conjugate, self.scalars = noise.conjugate, noise.scalars  # type: ignore[misc]

    def variational_family(self) -> LocationScale:
        return self.original.variational_family()

    def _each(self, name: str, eps: Tensor) -> Tensor:
        if not eps.is_cpu or eps.dtype not in (torch.float32, torch.float64) or eps.requires_grad:
            return getattr(self.original, name)(eps)
        return self.loops.elementwise(name, eps)

    def log_prob(self, eps: Tensor) -> Tensor:
        return self._each("log_prob", eps)

    def dlog_prob(self, eps: Tensor) -> Tensor:
        return self._each("dlog_prob", eps)

    def d2log_prob(self, eps: Tensor) -> Tensor:
        return self._each("d2log_prob", eps)

    def log_cdf(self, eps: Tensor) -> Tensor:
        return self._each("log_cdf", eps)

    def dlog_cdf(self, eps: Tensor) -> Tensor:
        return self._each("dlog_cdf", eps)

    def d2log_cdf(self, eps: Tensor) -> Tensor:
        return self._each("d2log_cdf", eps)

    def sum_log_cdf(self, gap: Tensor, log_weight: Tensor, eps: Tensor) -> Tensor:
        gap, log_weight = self._finite(gap, log_weight)
        return self.loops.sums("log_cdf", gap, torch.exp(log_weight), eps)

    def sum_slopes(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.loops.slopes(*self._finite(gap, log_weight), eps, weight)

    def hazards(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        return self.loops.hazards(*self._finite(gap, log_weight), eps, weight)

    def _finite(self, gap: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the infinity of masked pairs, which user-defined scalar functions need not support."""
        if isinstance(self.scalars, str):
            return gap, log_weight
        omega, finite = unmasked(gap, log_weight)
        return finite, omega.log()


def compiled(noise: Noise) -> Noise:
    """The noise with compiled loops, if it has scalar functions."""
    if noise.scalars is None or isinstance(noise, CompiledNoise):
        return noise
    found = CompiledNoise(noise)
    if not isinstance(noise.scalars, str):
        check_scalars(noise, found.loops)
    return found


def check_scalars(noise: Noise, loops: NoiseLoops) -> None:
    """ValueError, with the point, if a scalar function differs from the torch function of its name."""
    eps = torch.tensor(CHECK_POINTS, dtype=torch.float64)
    for name in loops.scalars._fields:
        expected, found = getattr(noise, name)(eps), loops.elementwise(name, eps)
        wrong = ~((found - expected).abs() <= TOLERANCE * expected.abs().clamp_min(1.0))
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"Expected scalars.{name} of {noise!r} to be its {name} in torch operations, but at eps = "
                f"{float(eps[at]):g} the first is {float(found[at]):.9g} and the second {float(expected[at]):.9g}. "
                "Correct either, or leave scalars out: the model is then the same, and slower."
            )


def original(noise: Noise) -> Noise:
    """The noise as passed by the user."""
    return noise.original if isinstance(noise, CompiledNoise) else noise


def loops_for(noise: Any) -> NoiseLoops | None:
    """The loops of a compiled noise."""
    return noise.loops if isinstance(noise, CompiledNoise) else None
