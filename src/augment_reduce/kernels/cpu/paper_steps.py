"""The paper's E and M steps in few passes over the gaps: what `local` says in torch operations, which are its oracle.

`NaturalGradient` for the softmax; `Reparameterised` generated from the scalar functions of a noise. Both are called

    e_and_m(first, rows, gap, weights, per_row, state, step, flags, draws, bound, grad) -> how often the floor acted

and move q of `rows`, fill their bounds (where asked for) and d bound / d gap. `state` is kept for all rows: two numbers
of q, the second empty where it has one, and the visits. `weights` are one number, or (`per_row` 1) one for each of
these rows: log omega for the softmax, omega for other noises. `step` is (scale, power, alpha now). `draws` say how
those of q are made; the first row has number `first` among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from ..cache import cached_njit
from .draws import standard_draws
from .math import exp, log, row_max, row_sum
from .scalars import Scalars
from .types import OPTIONS, Array


@njit(**OPTIONS)
def _log_add(a: Any, b: Any) -> Any:
    """log(e^a + e^b), to rounding of the larger; one of them must be finite."""
    return max(a, b) + log(type(a)(1) + exp(-abs(a - b)))


@njit(**OPTIONS)
def _sums(gap: Array, log_weight: Array, per_row: int, shift: Array, out: Array, log_sum: Array) -> None:
    """shift = the row's largest gap, out = omega e^(gap - shift), log_sum = log sum omega e^gap."""
    least, flat = np.finfo(gap.dtype).min, out.reshape(-1)  # not -inf: where all are masked there would be -inf + inf
    if gap.shape[1] == 1:  # rows in vectors, since they have nothing to be done in vectors
        for b in range(gap.shape[0]):
            shift[b] = max(least, gap[b, 0])
            out[b, 0] = gap[b, 0] + (log_weight[b * per_row] - shift[b])
    else:
        for b in range(gap.shape[0]):
            shift[b] = top = row_max(gap[b], least)
            for s in range(gap.shape[1]):
                out[b, s] = gap[b, s] + (log_weight[b * per_row] - top)
    for i in range(flat.shape[0]):
        flat[i] = exp(flat[i])
    if gap.shape[1] == 1:
        log_sum[:] = flat
    else:
        for b in range(gap.shape[0]):
            log_sum[b] = row_sum(out[b])
    for b in range(gap.shape[0]):
        log_sum[b] = log(log_sum[b]) + shift[b]


@njit(**OPTIONS)
def _blend(old: Array, log_sum: Array, visits: Array, step: tuple, by_visits: bool, tilde: Array, new: Array) -> None:
    """log eta~ = log(1 + sum), and eta <- (1 - alpha) eta + alpha eta~ in logs. `visits` is overwritten by alpha."""
    scale, power, alpha_now = step
    zero, one = old.dtype.type(0), old.dtype.type(1)
    for b in range(old.shape[0]):
        tilde[b] = _log_add(log_sum[b], zero)
    if by_visits:
        for b in range(old.shape[0]):
            visits[b] = scale * exp(-power * log(one + visits[b]))
    else:
        visits[:] = alpha_now
    for b in range(old.shape[0]):
        new[b] = _log_add(log(one - visits[b]) + old[b], log(visits[b]) + tilde[b])


@njit(**OPTIONS)
def keep(first: int, rows: Array, state: tuple, kept: Array) -> None:
    """q of these rows, in columns `first` and after of `kept` (2, B)."""
    for b in range(rows.shape[0]):
        kept[0, first + b] = state[0][rows[b]]
    for b in range(rows.shape[0] if state[1].shape[0] > 0 else 0):
        kept[1, first + b] = state[1][rows[b]]


@njit(**OPTIONS)
def put_back(rows: Array, state: tuple, kept: Array) -> None:
    """The first rows of a minibatch as they were before their E step."""
    for b in range(rows.shape[0]):
        state[0][rows[b]] = kept[0, b]
        state[2][rows[b]] -= 1
    for b in range(rows.shape[0] if state[1].shape[0] > 0 else 0):
        state[1][rows[b]] = kept[1, b]


@cached_njit(**OPTIONS)
def natural_gradient(
    first: int, rows: Array, gap: Array, log_weight: Array, per_row: int, state: tuple, step: tuple, flags: tuple,
    draws: tuple, bound: Array, grad: Array,
) -> int:  # fmt: skip
    """Loop by loop over the rows, without branches inside, so that each is done in vectors."""
    (log_eta, _, visits), (by_visits, uses_updated, floor) = state, flags
    B, hits, zero, one = gap.shape[0], 0, gap.dtype.type(0), gap.dtype.type(1)
    scratch = np.empty((6, B), gap.dtype)  # at once: six small ones take as long as a loop
    shift, log_sum, old, alpha, tilde, new = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], scratch[5]
    for b in range(B):
        old[b], alpha[b] = log_eta[rows[b]], visits[rows[b]]
    _sums(gap, log_weight, per_row, shift, grad, log_sum)
    _blend(old, log_sum, alpha, step, by_visits, tilde, new)
    for b in range(B):
        log_eta[rows[b]], visits[rows[b]] = new[b], visits[rows[b]] + 1
    held = new if uses_updated else old
    for b in range(bound.shape[0]):
        bound[b] = one - held[b] - exp(tilde[b] - held[b])
    if floor:
        for b in range(B):
            guard = _log_add(log_sum[b] - log_weight[b * per_row], zero) - one
            hits += guard > held[b]
            held[b] = max(held[b], guard)
    for b in range(B):
        shift[b] = -exp(shift[b] - held[b])
    for b in range(B):
        for s in range(gap.shape[1]):
            grad[b, s] *= shift[b]
    return hits


@njit(**OPTIONS)
def _place(mu: Array, gamma: Array, rows: Array, u: Array, sigma: Array, eps: Array) -> None:
    """eps = mu + sigma u with sigma = softplus(gamma)."""
    zero = mu.dtype.type(0)
    for b in range(rows.shape[0]):
        sigma[b] = gamma[rows[b]]
    for b in range(rows.shape[0]):
        sigma[b] = _log_add(sigma[b], zero)
    for b in range(rows.shape[0]):
        eps[b] = mu[rows[b]] + sigma[b] * u[b]


@njit(**OPTIONS)
def _step_sizes(visits: Array, rows: Array, step: tuple, by_visits: bool, alpha: Array) -> None:
    scale, power, alpha_now = step
    one = alpha.dtype.type(1)
    for b in range(rows.shape[0]):
        alpha[b] = visits[rows[b]]
    if by_visits:
        for b in range(rows.shape[0]):
            alpha[b] = scale * exp(-power * log(one + alpha[b]))
    else:
        alpha[:] = alpha_now


def _hazards_of(noise: Scalars) -> Callable[..., None]:
    dlog_cdf = noise.dlog_cdf

    @njit(**OPTIONS)
    def hazards(eps: Array, gap: Array, omega: Array, per_row: int, out: Array, sums: Array) -> None:
        """out = omega (phi / Phi)(eps - gap), zero where masked; sums (B,) of it."""
        zero, masked, flat = gap.dtype.type(0), gap.dtype.type(-np.inf), out.reshape(-1)
        for b in range(gap.shape[0]):
            for s in range(gap.shape[1]):
                out[b, s] = eps[b] - gap[b, s] if gap[b, s] > masked else zero
        for i in range(flat.shape[0]):
            flat[i] = dlog_cdf(flat[i])
        for b in range(gap.shape[0]):
            for s in range(gap.shape[1]):
                out[b, s] = omega[b * per_row] * out[b, s] if gap[b, s] > masked else zero
            sums[b] = row_sum(out[b])

    return hazards


def _bound_of(noise: Scalars) -> Callable[..., None]:
    log_prob, log_cdf = noise.log_prob, noise.log_cdf

    @njit(**OPTIONS)
    def bound(q: tuple, entropy: float, gap: Array, omega: Array, per_row: int, out: Array) -> None:
        """Eq. (7) at one draw eps of q: log phi(eps) + sum omega log Phi(eps - gap) + H[q]."""
        sigma, eps = q
        number, masked = gap.dtype.type, gap.dtype.type(-np.inf)
        zero, z = number(0), np.empty(gap.shape[1], gap.dtype)
        for b in range(gap.shape[0]):
            for s in range(gap.shape[1]):
                z[s] = eps[b] - gap[b, s] if gap[b, s] > masked else zero
            for s in range(gap.shape[1]):
                z[s] = log_cdf(z[s])
            total = number(log_prob(eps[b]))
            for s in range(gap.shape[1]):
                total += omega[b * per_row] * z[s] if gap[b, s] > masked else zero
            out[b] = total + number(entropy) + log(sigma[b])

    return bound


def _climb_of(noise: Scalars) -> Callable[..., None]:
    dlog_prob = noise.dlog_prob

    @njit(**OPTIONS)
    def climb(state: tuple, rows: Array, draws: tuple, slope: Array, alpha: Array, entropy: bool) -> None:
        """The moves of `local.Reparameterised` by eq. (9); `slope` comes as the sum of the hazards."""
        (mu, gamma, visits), (u, sigma, eps) = state, draws
        one, B = slope.dtype.type(1), rows.shape[0]
        for b in range(B):
            slope[b] += dlog_prob(eps[b])
        for b in range(B):
            tail = one / sigma[b] if entropy else slope.dtype.type(0)
            sigma[b] = (slope[b] * u[b] + tail) * (one - exp(-sigma[b]))
        for b in range(B):
            n = rows[b]
            mu[n] += alpha[b] * slope[b]
            gamma[n] += alpha[b] * sigma[b]
            visits[n] += 1

    return climb


def draw_e_and_m(noise: Scalars) -> Callable[..., int]:
    """Algorithm 2 for a noise, to be compiled."""
    hazards, bound_at, climb = _hazards_of(noise), _bound_of(noise), _climb_of(noise)

    def reparameterised(
        first: int, rows: Array, gap: Array, omega: Array, per_row: int, state: tuple, step: tuple, flags: tuple,
        draws: tuple, bound: Array, grad: Array,
    ) -> int:  # fmt: skip
        """One draw of q (Normal, else logistic) for the E step and one for the M step, in the order of the flags; the
        bound is that of the M step's draw."""
        (by_visits, uses_updated, with_entropy), (normal, entropy, e_seed, m_seed) = flags, draws
        B = gap.shape[0]
        lines = np.empty((5, B), gap.dtype)
        sigma, eps, slope, u, alpha = lines[0], lines[1], lines[2], lines[3], lines[4]
        for turn in range(2):
            standard_draws(normal, e_seed if turn == 0 else m_seed, first, u)
            _place(state[0], state[1], rows, u, sigma, eps)
            if (turn == 0) == uses_updated:  # E step
                _step_sizes(state[2], rows, step, by_visits, alpha)
                hazards(eps, gap, omega, per_row, grad if uses_updated else np.empty(gap.shape, gap.dtype), slope)
                climb(state, rows, (u, sigma, eps), slope, alpha, with_entropy)
            else:
                if bound.shape[0] > 0:
                    bound_at((sigma, eps), entropy, gap, omega, per_row, bound)
                hazards(eps, gap, omega, per_row, grad, slope)
        for b in range(B):
            for s in range(gap.shape[1]):
                grad[b, s] = -grad[b, s]
        return 0

    return reparameterised
