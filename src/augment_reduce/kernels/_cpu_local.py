"""The paper's E and M steps in few passes over the gaps: what `local` says in torch operations, which are its oracle.

`NaturalGradient` is closed form. `Reparameterised` asks its noise for phi / Phi in between, whatever noise that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ._cpu_math import exp, log
from ._cpu_types import OPTIONS, Array

if TYPE_CHECKING:
    from ..local import Clock, LocalState, NaturalGradient, Reparameterised
    from ..noise import Noise


@njit(**OPTIONS)
def _log_add(a: Any, b: Any) -> Any:
    """log(e^a + e^b), to rounding of the larger; one of them must be finite."""
    return max(a, b) + log(type(a)(1) + exp(-abs(a - b)))


@njit(**OPTIONS)
def _exponentials(gap: Array, by: Any, out: Array) -> Any:
    """out = e^(gap + by); returns their sum."""
    total = gap.dtype.type(0)
    for s in range(gap.shape[0]):
        out[s] = exp(gap[s] + by)
    for s in range(gap.shape[0]):
        total += out[s]
    return total


@njit(**OPTIONS)
def _sums(gap: Array, log_weight: Array, per_row: int, shift: Array, out: Array, log_sum: Array) -> None:
    """shift = the row's largest gap, out = omega e^(gap - shift), log_sum = log sum omega e^gap."""
    least = np.finfo(gap.dtype).min  # not -inf: where all are masked there would be -inf + inf
    for b in range(gap.shape[0]):
        top = least
        for s in range(gap.shape[1]):
            top = max(top, gap[b, s])
        shift[b] = top
        log_sum[b] = _exponentials(gap[b], log_weight[b * per_row] - top, out[b])
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


@njit(cache=True, **OPTIONS)
def e_and_m(
    state: tuple, rows: Array, gap: Array, log_weight: Array, per_row: int, step: tuple, flags: tuple, bound: Array,
    grad: Array,
) -> int:  # fmt: skip
    """Moves log eta of the rows, fills the bounds (where asked for) and their gradients; how often the floor acted.

    Loop by loop over the rows, without branches inside, so that each is done in vectors.
    """
    (log_eta, visits), (by_visits, uses_updated, floor) = state, flags
    B, hits, zero, one = gap.shape[0], 0, gap.dtype.type(0), gap.dtype.type(1)
    shift, log_sum, old = np.empty(B, gap.dtype), np.empty(B, gap.dtype), np.empty(B, gap.dtype)
    alpha, tilde, new = np.empty(B, gap.dtype), np.empty(B, gap.dtype), np.empty(B, gap.dtype)
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


def natural_gradient(
    rule: NaturalGradient, state: LocalState, rows: Tensor, gap: Tensor, log_weight: Tensor, clock: Clock,
    want_bound: bool,
) -> tuple[Tensor | None, Tensor, int]:  # fmt: skip
    """`rule.e_and_m`, for weights that are one number, or one a row."""
    gap = gap.contiguous()
    grad, bound = torch.empty_like(gap), torch.empty(len(gap) if want_bound else 0, dtype=gap.dtype)
    by_visits, size = rule.step_size.counts == "visits", rule.step_size
    number = np.float32 if gap.dtype == torch.float32 else np.float64
    hits = e_and_m(
        (state["log_eta"].numpy(), state["visits"].numpy()), rows.numpy(), gap.numpy(),
        log_weight.to(gap.dtype).reshape(-1).numpy(), int(log_weight.ndim > 0),
        tuple(number(v) for v in (size.scale, size.power, 0.0 if by_visits else size.now(clock))),
        (by_visits, rule.uses_updated, rule.floor), bound.numpy(), grad.numpy(),
    )  # fmt: skip
    return (bound if want_bound else None), grad, hits


@njit(cache=True, **OPTIONS)
def place(mu: Array, gamma: Array, rows: Array, u: Array, gap: Array, sigma: Array, eps: Array, z: Array) -> None:
    """eps = mu + sigma u with sigma = softplus(gamma), and z = eps - gap; a masked pair's z is harmless, zero."""
    zero, masked = gap.dtype.type(0), gap.dtype.type(-np.inf)
    for b in range(gap.shape[0]):
        sigma[b] = gamma[rows[b]]
    for b in range(gap.shape[0]):
        sigma[b] = _log_add(sigma[b], zero)
    for b in range(gap.shape[0]):
        eps[b] = mu[rows[b]] + sigma[b] * u[b]
        for s in range(gap.shape[1]):
            z[b, s] = eps[b] - gap[b, s] if gap[b, s] > masked else zero


@njit(cache=True, **OPTIONS)
def weigh(hazard: Array, gap: Array, omega: Array, strides: tuple, sums: Array) -> None:
    """hazard <- omega hazard, zero where masked; sums (B,) of it."""
    zero, masked = gap.dtype.type(0), gap.dtype.type(-np.inf)
    for b in range(gap.shape[0]):
        total = zero
        for s in range(gap.shape[1]):
            h = omega[b * strides[0] + s * strides[1]] * hazard[b, s]
            hazard[b, s] = h if gap[b, s] > masked else zero
            total += hazard[b, s]
        sums[b] = total


@njit(cache=True, **OPTIONS)
def climb(
    mu: Array, gamma: Array, visits: Array, rows: Array, u: Array, sigma: Array, slope: Array, step: tuple, flags: tuple
) -> None:
    """Eq. (9) from the slope g = d/deps log p~: the moves of `local.Reparameterised`."""
    (scale, power, alpha_now), (by_visits, entropy) = step, flags
    one = slope.dtype.type(1)
    for b in range(rows.shape[0]):
        n = rows[b]
        alpha = scale * exp(-power * log(one + slope.dtype.type(visits[n]))) if by_visits else alpha_now
        tail = one / sigma[b] if entropy else slope.dtype.type(0)
        mu[n] += alpha * slope[b]
        gamma[n] += alpha * (slope[b] * u[b] + tail) * -np.expm1(-sigma[b])
        visits[n] += 1


def reparameterised(
    rule: Reparameterised, state: LocalState, rows: Tensor, noise: Noise, gap: Tensor, log_weight: Tensor, clock: Clock,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """`rule.e_and_m` without its bound: the E step on one draw of q, the gradient by the gaps on another."""
    gap, index, family = gap.contiguous(), rows.numpy(), noise.variational_family()
    B, size = len(gap), rule.step_size
    omega = torch.exp(log_weight).to(gap.dtype)
    strides = tuple(0 if n == 1 else step for n, step in zip(omega.shape, omega.stride(), strict=True))
    strides = (0,) * (2 - len(strides)) + strides
    weights, mu, gamma = omega.reshape(-1).numpy(), state["mu"].numpy(), state["gamma"].numpy()
    by_visits = size.counts == "visits"
    number = np.float32 if gap.dtype == torch.float32 else np.float64
    numbers = tuple(number(v) for v in (size.scale, size.power, 0.0 if by_visits else size.now(clock)))
    sigma, eps, z = torch.empty(B, dtype=gap.dtype), torch.empty(B, dtype=gap.dtype), torch.empty_like(gap)

    def hazards(u: Tensor) -> tuple[Tensor, Tensor]:
        """omega (phi / Phi)(eps - gap) and its sums, at eps = mu + sigma u."""
        place(mu, gamma, index, u.numpy(), gap.numpy(), sigma.numpy(), eps.numpy(), z.numpy())
        found, sums = noise.dlog_cdf(z).contiguous(), torch.empty(B, dtype=gap.dtype)
        weigh(found.numpy(), gap.numpy(), weights, strides, sums.numpy())
        return found, sums

    def move() -> None:
        u = family.rsample((B,), generator=generator, dtype=gap.dtype)
        slope = hazards(u)[1].add_(noise.dlog_prob(eps))
        climb(
            mu, gamma, state["visits"].numpy(), index, u.numpy(), sigma.numpy(), slope.numpy(), numbers,
            (by_visits, rule.entropy_gradient),
        )  # fmt: skip

    if rule.uses_updated:
        move()
    grad = hazards(family.rsample((B,), generator=generator, dtype=gap.dtype))[0].neg_()
    if not rule.uses_updated:
        move()
    return grad
