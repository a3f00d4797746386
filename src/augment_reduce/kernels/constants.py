"""Numbers that the torch, Numba and Triton code share: each is written once, here."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.polynomial import chebyshev
from scipy.special import erfcx

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)

# Row rules, as numbers for compiled code; the last is a user's. And how the prior acts.
SECTION4, ADAGRAD, ROWWISE_ADAGRAD, ADAM, SECTION4_EVERY_ENTRY, OWN_RULE = range(6)
PRIOR_NONE, PRIOR_UNBIASED, PRIOR_TOUCHED = 0, 1, 2

# The tail gap of the Normal, delta(a) = phi(a) / Phi(-a) - a for a >= 0, as a polynomial.
TAIL_CENTRE = 3.5  # c: puts the fit where delta bends; half of it costs three digits, twice of it one or two

# The mode of f(eps) = log phi(eps) + sum omega log Phi(eps - gap): the bracket around the largest gap, halvings of it,
# Newton moves after them at most, the last of which is shorter than CLOSE deviations. And the least curvature: where f
# is flat, as a logistic's is between a label and a rival far above it, nodes must not be further apart than its edges.
BELOW, ABOVE, HALVINGS, MOVES, CLOSE, LEAST_CURVATURE = 8.0, 40.0, 6, 4, 0.1, 0.05
LEAST_PRECISION = 1e-2  # of a Gaussian q
LEAST_SHARE = 1e-7  # of a node of q: nodes with less have no weight


@functools.cache
def tail_gap_powers(double: bool) -> tuple[float, ...]:
    """Coefficients in t = (a - c) / (a + c) of (a + c) delta(a), the highest power first.

    t maps [0, inf] to [-1, 1], where the function is smooth. Interpolated at Chebyshev points, to 2e-15 (float64) and
    4e-8 (float32).
    """
    degree = 24 if double else 12
    t = chebyshev.chebpts1(degree + 1)
    a = TAIL_CENTRE * (1.0 + t) / (1.0 - t)
    below = a.copy()  # Laplace: delta(a) = 1/(a + 2/(a + 3/(a + ...))), which converges fast unless a is small
    for j in range(1000, 1, -1):
        below = a + j / below
    delta = np.where(a < 0.5, math.sqrt(2.0 / math.pi) / erfcx(a * math.sqrt(0.5)) - a, 1.0 / below)
    powers = chebyshev.cheb2poly(chebyshev.chebfit(t, (a + TAIL_CENTRE) * delta, degree))
    return tuple(powers[::-1].tolist())


@functools.cache
def grid_in_deviations(n_nodes: int, left: float, right: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes u_j = sinh(t_j) of the trapezoid rule in t from -left to right, and log(du_j) = log(cosh(t_j) dt).

    int f(mode + deviation u) du: close nodes at the mode, far ones in the tails, and for smooth f with tails that fall
    at least exponentially an error that falls exponentially with the number of nodes.
    """
    t = np.linspace(-left, right, n_nodes)
    return np.sinh(t), np.log(np.cosh(t) * (left + right) / (n_nodes - 1))
