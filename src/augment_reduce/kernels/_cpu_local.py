"""The paper's E and M steps in few passes over the gaps: what `local` says in torch operations, which are its oracle.

`NaturalGradient` for the softmax, `Reparameterised` for the Normal and the logistic; other noises go by `local` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..noise import LOG_SQRT_2PI, Logistic, Normal
from ..seeds import draw_seed
from ._cpu_draws import standard_draws
from ._cpu_math import exp, log, row_max, row_sum
from ._cpu_noise import logistic, logistic_log_cdf, normal, normal_log_cdf
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit

if TYPE_CHECKING:
    from ..local import Clock, LocalState, NaturalGradient, Reparameterised, StepSize
    from ..noise import Noise

SOFTMAX, PROBIT, LOGISTIC = 0, 1, 2
ENTROPY = (0.0, Normal.entropy, Logistic.entropy)  # of q's standard form
MODELS = {"softmax": SOFTMAX, "probit": PROBIT, "logistic": LOGISTIC}


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


@cached_njit(**OPTIONS)
def e_and_m(
    state: tuple, rows: Array, gap: Array, log_weight: Array, per_row: int, step: tuple, flags: tuple, bound: Array,
    grad: Array,
) -> int:  # fmt: skip
    """Moves log eta of the rows, fills the bounds (where asked for) and their gradients; how often the floor acted.

    Loop by loop over the rows, without branches inside, so that each is done in vectors.
    """
    (log_eta, visits), (by_visits, uses_updated, floor) = state, flags
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
def _hazards(model: int, eps: Array, gap: Array, omega: Array, per_row: int, out: Array, sums: Array) -> None:
    """out = omega (phi / Phi)(eps - gap), zero where masked; sums (B,) of it."""
    zero, masked, flat = gap.dtype.type(0), gap.dtype.type(-np.inf), out.reshape(-1)
    for b in range(gap.shape[0]):
        for s in range(gap.shape[1]):
            out[b, s] = eps[b] - gap[b, s]
    if model == PROBIT:
        for i in range(flat.shape[0]):
            flat[i] = normal(flat[i])
    else:
        for i in range(flat.shape[0]):
            flat[i] = logistic(flat[i])
    for b in range(gap.shape[0]):
        for s in range(gap.shape[1]):
            out[b, s] = omega[b * per_row] * out[b, s] if gap[b, s] > masked else zero
        sums[b] = row_sum(out[b])


@njit(**OPTIONS)
def _bound(model: int, q: tuple, entropy: float, gap: Array, omega: Array, per_row: int, out: Array) -> None:
    """Eq. (7) at one draw eps of q: log phi(eps) + sum omega log Phi(eps - gap) + H[q]."""
    sigma, eps = q
    number, masked = gap.dtype.type, gap.dtype.type(-np.inf)
    zero, half, norm = number(0), number(0.5), number(LOG_SQRT_2PI)
    z = np.empty(gap.shape[1], gap.dtype)
    for b in range(gap.shape[0]):
        for s in range(gap.shape[1]):
            z[s] = eps[b] - gap[b, s]
        if model == PROBIT:
            for s in range(gap.shape[1]):
                z[s] = normal_log_cdf(z[s])
            total = -half * eps[b] * eps[b] - norm
        else:
            for s in range(gap.shape[1]):
                z[s] = logistic_log_cdf(z[s])
            total = logistic_log_cdf(eps[b]) + logistic_log_cdf(-eps[b])
        for s in range(gap.shape[1]):
            total += omega[b * per_row] * z[s] if gap[b, s] > masked else zero
        out[b] = total + number(entropy) + log(sigma[b])


@njit(**OPTIONS)
def _climb(
    model: int, state: tuple, rows: Array, draws: tuple, slope: Array, step: tuple, by_visits: bool, entropy: bool
) -> None:
    """The moves of `local.Reparameterised` by eq. (9); `slope` comes as the sum of the hazards."""
    (mu, gamma, visits), (u, sigma, eps), (scale, power, alpha_now) = state, draws, step
    one, two, B = slope.dtype.type(1), slope.dtype.type(2), rows.shape[0]
    alpha = np.empty(B, slope.dtype)
    for b in range(B):
        alpha[b] = visits[rows[b]]
    if by_visits:
        for b in range(B):
            alpha[b] = scale * exp(-power * log(one + alpha[b]))
    else:
        alpha[:] = alpha_now
    for b in range(B):  # + d log phi / d eps: -eps, or -tanh(eps / 2)
        slope[b] += -eps[b] if model == PROBIT else two * logistic(eps[b]) - one
    for b in range(B):
        tail = one / sigma[b] if entropy else slope.dtype.type(0)
        sigma[b] = (slope[b] * u[b] + tail) * (one - exp(-sigma[b]))
    for b in range(B):
        n = rows[b]
        mu[n] += alpha[b] * slope[b]
        gamma[n] += alpha[b] * sigma[b]
        visits[n] += 1


@cached_njit(**OPTIONS)
def draw_e_and_m(
    model: int, state: tuple, rows: Array, gap: Array, omega: Array, per_row: int, step: tuple, flags: tuple,
    seeds: tuple, first: int, bound: Array, grad: Array,
) -> None:  # fmt: skip
    """Algorithm 2 on a draw of q for each of its steps, in the order of the flags; the bound, where asked for, is that
    of the M step's draw. Row b has number first + b of the draws that a step's seed gives."""
    by_visits, uses_updated, entropy = flags
    B = gap.shape[0]
    sigma, eps, slope = np.empty(B, gap.dtype), np.empty(B, gap.dtype), np.empty(B, gap.dtype)
    u = np.empty(B, gap.dtype)
    for turn in range(2):
        standard_draws(model == PROBIT, seeds[turn], first, u)
        if (turn == 0) == uses_updated:  # E step
            target = grad if uses_updated else np.empty(gap.shape, gap.dtype)
            _place(state[0], state[1], rows, u, sigma, eps)
            _hazards(model, eps, gap, omega, per_row, target, slope)
            _climb(model, state, rows, (u, sigma, eps), slope, step, by_visits, entropy)
        else:
            _place(state[0], state[1], rows, u, sigma, eps)
            if bound.shape[0] > 0:
                _bound(model, (sigma, eps), ENTROPY[model], gap, omega, per_row, bound)
            _hazards(model, eps, gap, omega, per_row, grad, slope)
    for b in range(B):
        for s in range(gap.shape[1]):
            grad[b, s] = -grad[b, s]


def step_numbers(size: StepSize, clock: Clock, dtype: torch.dtype) -> tuple[tuple, bool]:
    """(scale, power, alpha now) in the dtype of the weights, and whether alpha goes by the rows' visits."""
    number = np.float32 if dtype == torch.float32 else np.float64
    by_visits = size.counts == "visits"
    return (number(size.scale), number(size.power), number(0.0 if by_visits else size.now(clock))), by_visits


def natural_gradient(
    rule: NaturalGradient, state: LocalState, rows: Tensor, gap: Tensor, log_weight: Tensor, clock: Clock,
    want_bound: bool,
) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
    """`rule.e_and_m`, for weights that are one number, or one a row."""
    gap = gap.contiguous()
    grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
    numbers, by_visits = step_numbers(rule.step_size, clock, gap.dtype)
    hits = e_and_m(
        (state["log_eta"].numpy(), state["visits"].numpy()), rows.numpy(), gap.numpy(),
        log_weight.to(gap.dtype).reshape(-1).numpy(), int(log_weight.ndim > 0), numbers,
        (by_visits, rule.uses_updated, rule.floor), bound.numpy(), grad.numpy(),
    )  # fmt: skip
    return (bound if want_bound else None), grad, hits


def reparameterised(
    rule: Reparameterised, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
    generator: torch.Generator, want_bound: bool,
) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
    """`rule.e_and_m`, for the built-in noises and weights that are one number, or one a row."""
    gap = gap.contiguous()
    grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
    numbers, by_visits = step_numbers(rule.step_size, clock, gap.dtype)
    draw_e_and_m(
        MODELS[noise.name], (state["mu"].numpy(), state["gamma"].numpy(), state["visits"].numpy()), rows.numpy(),
        gap.numpy(), torch.exp(log_weight).to(gap.dtype).reshape(-1).numpy(), int(log_weight.ndim > 0), numbers,
        (by_visits, rule.uses_updated, rule.entropy_gradient), (draw_seed(generator), draw_seed(generator)), 0,
        bound.numpy(), grad.numpy(),
    )  # fmt: skip
    return (bound if want_bound else None), grad, 0
