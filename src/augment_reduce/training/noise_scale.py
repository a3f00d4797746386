"""The scale of the scores of a model with another noise, relative to softmax's on the same rows.

The search for a prior fits softmax models, which are cheap. A probit or a logistic model of the same rows has about the
same scores times a factor, and a prior variance times its square. The factor depends on the data: for two classes with
small margins it is the ratio of the noises' standard deviations; for many classes with large margins it is smaller for
noises with light tails. So it is measured, on the scores psi of left-out rows:

    rho = a(noise) / a(Gumbel),   a(noise) = argmax_a  sum_n log p_noise(y_n | a psi_n)

with a penalty (log rho)^2 towards the ratio of the deviations, which dominates if rows are few.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ..config.defaults import relative_variance
from ..model import quadrature
from ..model.mode_grid import ModeGrid
from ..model.noise import Gumbel, Noise

# Most rows, fewest rows, (row, class) pairs. Noises that are not smooth and log-concave need an adaptive quadrature.
SMOOTH, ANY = (300, 30, 200_000), (40, 10, 6_000)
PULL = 2.0  # weight of (log rho - log of the ratio of deviations)^2, in rows' nats
NEAR, FAR = 0.05, 8.0  # precision of a factor; largest distance from its expected value


def expected_scale(noise: Noise) -> float:
    """rho without data."""
    return math.sqrt(relative_variance(noise))


def relative_scale(noise: Noise, psi: np.ndarray, labels: np.ndarray) -> float:
    """rho, from scores (N, K) of a softmax for rows that it was not fitted to, and their labels."""
    expected = expected_scale(noise)
    if noise.conjugate or not len(labels):
        return expected
    most, fewest, pairs = SMOOTH if noise.smooth_log_concave else ANY
    n = min(len(labels), most, max(fewest, pairs // psi.shape[1]))
    some = np.linspace(0, len(labels) - 1, n).astype(np.int64)
    rows, of_rows = torch.from_numpy(psi[some].astype(np.float64)), torch.from_numpy(labels[some].astype(np.int64))
    own = _best_scale(Gumbel(), rows, of_rows, 1.0, 0.0)
    return _best_scale(noise, rows * own, of_rows, expected, PULL)


def _best_scale(noise: Noise, psi: Tensor, labels: Tensor, expected: float, pull: float) -> float:
    grid = ModeGrid(noise) if noise.smooth_log_concave and not noise.conjugate else None

    def loss(log_ratio: float) -> float:
        scaled = psi * (expected * math.exp(log_ratio))
        value = quadrature.log_likelihood(noise, scaled, labels) if grid is None else grid(scaled, labels)[0]
        return pull * log_ratio**2 - float(value.clamp(min=-1e6).sum())

    bounds = (-math.log(FAR), math.log(FAR))
    return expected * math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": NEAR}).x)
