"""G(v) = sum_k log Phi(v - psi_k), the log probability that no utility exceeds v, and its slope, for many v at once.

Many classes are interpolated from few scores, so that the cost is independent of K. `quadrature` integrates over v.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .compiled import loops_for
from .noise import Noise

CHUNK = 1 << 18  # elements of a temporary array: 2 MiB, small enough to stay in a core's cache
DEVICE_CHUNK = 1 << 26  # on a GPU: 512 MiB, to reduce the number of launches
BIN_WIDTHS, DEGREE = (2.0, 1.0, 0.5), 16  # of the interpolation of log Phi: widths to try, points in a bin
FURTHEST = 1e30  # limit of the distance below the largest score of a row

# Chebyshev points on [-1, 1], and the matrix (j, p) from sums of the polynomials T_j to weights of the points p.
_j, _angles = np.arange(DEGREE)[:, None], np.pi * (np.arange(DEGREE) + 0.5) / DEGREE
POINTS, TO_POINTS = np.cos(_angles), np.where(_j > 0, 2.0, 1.0) / DEGREE * np.cos(_j * _angles)


class MaxUtility:
    """The largest utility of each row, by its log CDF G(v) = sum_k log Phi(v - psi_k).

    As a function of psi, log Phi(v - psi) is smooth. So scores are binned, with 16 Chebyshev points a bin, and each
    class is distributed over the points of its bin with the weights of polynomial interpolation: G is then a weighted
    sum over the M points `at`, independent of K. `spread` is the transpose, from values at the points to the classes.
    Without binning (at = psi) if that is not cheaper, or if no width is accurate for this noise (`bin_width`).
    """

    def __init__(self, noise: Noise, psi: Tensor, width: float | None) -> None:
        self.noise, self.psi = noise, psi
        self.low, self.top = psi.amin(1), psi.amax(1)
        self.at: Tensor = psi
        self.weight: Tensor | None = None
        self.width = width or math.inf
        self.n_bins = int((self.top - self.low).max() / self.width) + 1
        if width and 2 * self.n_bins * DEGREE <= psi.shape[1]:
            self.at, self.weight = self.points(), self.weights_of_points()

    def points(self) -> Tensor:
        """(B, M): the Chebyshev points of the bins."""
        offset = self.psi.new_tensor(np.arange(self.n_bins)[:, None] + (POINTS + 1.0) / 2.0).flatten()
        return (self.low[:, None] + self.width * offset).minimum(self.top[:, None] + self.width)

    def weights_of_points(self) -> Tensor:
        """(B, M): the weight of each point, a sum over the classes."""
        moments = self.psi.new_zeros(DEGREE, len(self.psi), self.n_bins)
        for moment, (bins, polynomial) in zip(moments, self._basis(), strict=True):
            moment.scatter_add_(1, bins, polynomial)
        return (moments.permute(1, 2, 0) @ self.psi.new_tensor(TO_POINTS)).flatten(1)

    def _basis(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For j = 0, 1, ...: the bin of every class (B, K), and the Chebyshev polynomial T_j at its position in the
        bin."""
        place = (self.psi - self.low[:, None]) / self.width
        bins = place.floor().clamp_(max=self.n_bins - 1).long()
        x = 2.0 * (place - bins) - 1.0
        old, new = x, torch.ones_like(x)  # T_-1 = T_1
        for _ in range(DEGREE):
            yield bins, new
            old, new = new, 2.0 * x * new - old

    def spread(self, values: Tensor) -> Tensor:
        """Values at the points `at` (B, M) to the classes (B, K): polynomial interpolation in each bin."""
        if self.weight is None:
            return values
        coefficients = values.unflatten(1, (self.n_bins, DEGREE)) @ values.new_tensor(TO_POINTS.T)
        total = torch.zeros_like(self.psi)
        for coefficient, (bins, polynomial) in zip(coefficients.unbind(2), self._basis(), strict=True):
            total.addcmul_(coefficient.gather(1, bins), polynomial)
        return total

    def log_below(self, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """G(v) of `rows` (all by default) at v (b, Q)."""
        total = self._sum("log_cdf", v, rows)
        return torch.where(total < 1.0, total.clamp(max=0.0), -math.inf)  # else: inf - inf, far in the tail

    def slope(self, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """G'(v) >= 0, like `log_below`."""
        total = self._sum("dlog_cdf", v, rows)
        return torch.where(total > -1.0, total.clamp(min=0.0), math.inf)

    def _sum(self, name: str, v: Tensor, rows: Tensor | None) -> Tensor:
        """(b, Q): sum over the points of their weight times the noise's function of this name, at v - at."""
        at = self.at if rows is None else self.at[rows]
        weight = self.weight if rows is None or self.weight is None else self.weight[rows]
        loops = loops_for(self.noise)
        if loops is not None and v.is_cpu:
            return loops.sums(name, at, at.new_ones(()) if weight is None else weight, v)
        out, function = torch.empty_like(v), getattr(self.noise, name)
        for part in chunks(v.shape[1], at.numel(), v.device):
            terms = function(v[:, part, None] - at[:, None, :])
            out[:, part] = terms.sum(-1) if weight is None else (terms @ weight[:, :, None])[:, :, 0]
        return out

    def log_integrand(self, v: Tensor, s: Tensor, log_below: Tensor) -> Tensor:
        """log of r(v - s) e^{G(v)}, given G(v); -inf where Phi and with it e^G vanish (-inf minus -inf)."""
        log_ratio = self.noise.log_prob(v - s) - self.noise.log_cdf(v - s)
        return torch.nan_to_num(log_ratio + log_below, nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


def chunks(length: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of an axis, for temporary arrays with `elements` for each position on it."""
    step = max(1, (CHUNK if device.type == "cpu" else DEVICE_CHUNK) // max(1, elements))
    return (slice(start, start + step) for start in range(0, length, step))


def bin_width(noise: Noise, device: torch.device) -> float | None:
    """The widest bins over which `MaxUtility` interpolates log Phi of this noise to 1e-12, by evaluating the error."""
    v = torch.linspace(-40.0, 42.0, 411, dtype=torch.float64, device=device)[None]
    for width in BIN_WIDTHS:
        psi = torch.linspace(0.0, 0.99 * width, 2 * DEGREE, dtype=torch.float64, device=device)[None]
        rough, truth = MaxUtility(noise, psi, width).log_below(v), MaxUtility(noise, psi, None).log_below(v)
        if ((rough - truth).abs() <= 1e-12 * (1.0 + truth.abs())).all():  # NaN counts as no
            return width
    return None


def maxima(noise: Noise, psi: Tensor) -> Iterator[tuple[slice, MaxUtility]]:
    """The rows in blocks of bounded memory, in float64.

    Only differences matter, so the largest score of each row is subtracted: float64 cannot resolve a grid at 1e30.
    """
    width = bin_width(noise, psi.device) if psi.shape[1] >= 2 * DEGREE else None
    for block in chunks(len(psi), max(512, psi.shape[1]), psi.device):  # 512: for the nodes, if there are few classes
        scores = psi[block].double()
        yield block, MaxUtility(noise, (scores - scores.amax(1, keepdim=True)).clamp_(min=-FURTHEST), width)
