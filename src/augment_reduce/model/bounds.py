"""The objectives: lower bounds on log p(y | psi) of each row, from sampled or from all classes.

Shapes: `gap` (B, S) is psi_k - psi_y of the sampled classes (-inf: masked), `log_weight` log omega, broadcastable to
it. With all other classes and log_weight = 0 each is the full sum; with a sampler's classes and weights it estimates
that sum. A bound is maximised, has one value per row, without scaling by N / B; `..._grad` is its gradient by `gap`
(the gradient by the label's score is minus the sum).

    function            equation   is a bound   estimate from a sample
    softmax_bound       (8)        yes          unbiased
    noise_bound         (7)        yes          unbiased
    one_vs_each         (10)       yes          unbiased
    sampled_softmax     -          no           biased: log of an estimate
    exact               (1), (5)   is log p     needs every class
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import Gumbel, Noise
from .quadrature import log_likelihood_and_grad

SOFTMAX = Gumbel()  # with sums over the classes of this process only


class Nodes(NamedTuple):
    """E_q[f] ~ sum_j weight_j f(eps_j) for each row's q(eps): one draw (J = 1), Gauss-Hermite nodes, or a grid.

    - `eps` (B, J); `weight` (J,) or (B, J), summing to one; `entropy` (B,): H[q].
    """

    eps: Tensor
    weight: Tensor
    entropy: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """(B,) E_q[f] of values (B, J) at the nodes."""
        return values @ self.weight if self.weight.ndim == 1 else (values * self.weight).sum(dim=1)


def log_eta_tilde(gap: Tensor, log_weight: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """log of eta~ = 1 + sum_k omega_k exp(gap_k)   (Algorithm 1, E step); (B,). `noise` sums over classes."""
    return F.softplus(noise.log_total(gap + log_weight))


class Exponentials:
    """e^gap_k of a sample, computed once for the E step, the M step and the floor (softmax).

    Stored as e_k = omega_k exp(gap_k - shift) with shift = the row's largest gap, to avoid overflow.
    """

    def __init__(self, gap: Tensor, log_weight: Tensor, noise: Noise = SOFTMAX) -> None:
        largest = noise.largest(gap)[:, None]
        self.shift = largest.clamp_min_(torch.finfo(gap.dtype).min)  # all masked: no -inf + inf
        self.scaled = (gap + (log_weight - self.shift)).exp_()
        total = noise.summed(self.scaled.sum(dim=-1))
        self.log_sum = total.log_().add_(self.shift[:, 0])  # log sum_k omega_k e^gap_k
        self.log_eta_tilde = F.softplus(self.log_sum)

    def softmax_bound(self, log_eta: Tensor) -> Tensor:
        """Eq. (8), as the function of that name."""
        return 1.0 - log_eta - torch.exp(self.log_eta_tilde - log_eta)

    def softmax_bound_grad(self, log_eta: Tensor) -> Tensor:
        """-omega_k exp(gap_k - log eta), as the function of that name. Overwrites the exponentials: call last."""
        return self.scaled.mul_(-torch.exp(self.shift - log_eta[:, None]))


def softmax_bound(gap: Tensor, log_weight: Tensor, log_eta: Tensor) -> Tensor:
    """Eq. (8):  L = 1 - log eta - (1 + sum_{k != y} exp(gap_k)) / eta  <=  log softmax_y(psi).

    Any eta > 0 gives a bound; tight at eta* = 1 + sum exp(gap). Linear in the sum, so with a sampled sum
    value and gradient are unbiased, given eta.
    """
    return 1.0 - log_eta - torch.exp(log_eta_tilde(gap, log_weight) - log_eta)


def softmax_bound_grad(gap: Tensor, log_weight: Tensor, log_eta: Tensor) -> Tensor:
    """dL/dgap_k = -omega_k exp(gap_k - log eta), eta fixed."""
    return -torch.exp(gap + (log_weight - log_eta[:, None]))


def noise_bound(noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> Tensor:
    """Eq. (7):  L = E_q[log phi(eps) + sum_{k != y} log Phi(eps - gap_k)] + H[q]  <=  log p(y | psi), any noise."""
    return q.mean(noise.log_prob(q.eps) + noise.sum_log_cdf(gap, log_weight, q.eps)) + q.entropy


def noise_bound_grad(noise: Noise, gap: Tensor, log_weight: Tensor, q: Nodes) -> Tensor:
    """dL/dgap_k = -omega_k E_q[(phi / Phi)(eps - gap_k)], q fixed."""
    return noise.hazards(gap, log_weight, q.eps, q.weight).neg_()


def one_vs_each(gap: Tensor, log_weight: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """Eq. (10), Titsias 2016:  L = sum_{k != y} log sigmoid(-gap_k)  <=  log softmax_y(psi). No local parameters."""
    return noise.summed((torch.exp(log_weight) * F.logsigmoid(-gap)).sum(dim=-1))


def one_vs_each_grad(gap: Tensor, log_weight: Tensor) -> Tensor:
    """dL/dgap_k = -omega_k sigmoid(gap_k)."""
    return -torch.exp(log_weight) * torch.sigmoid(gap)


def sampled_softmax(gap: Tensor, log_weight: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """-log(1 + sum omega_k exp(gap_k)). Not a bound: by Jensen's inequality its mean is above log softmax_y.

    With uniform classes other than y this is Botev et al. 2017.
    """
    return -log_eta_tilde(gap, log_weight, noise)


def sampled_softmax_grad(gap: Tensor, log_weight: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """dL/dgap_k = -omega_k exp(gap_k) / (1 + sum omega exp(gap))."""
    return softmax_bound_grad(gap, log_weight, log_eta_tilde(gap, log_weight, noise))


def exact_softmax(gap: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """Eq. (1):  log p(y | psi) = -log(1 + sum_{k != y} exp(gap_k)), all other classes in `gap`."""
    return -log_eta_tilde(gap, gap.new_zeros(()), noise)


def exact_softmax_grad(gap: Tensor, noise: Noise = SOFTMAX) -> Tensor:
    """d log p / dgap_k = -softmax_k."""
    return softmax_bound_grad(gap, gap.new_zeros(()), log_eta_tilde(gap, gap.new_zeros(()), noise))


def exact_noise(noise: Noise, gap: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (5) and its gradient by quadrature: gap (B, K) over all classes in order, the label's masked."""
    psi = gap.scatter(1, labels[:, None], 0.0)
    value, grad = log_likelihood_and_grad(noise, psi, labels)
    return value.to(gap.dtype), grad.to(gap.dtype).scatter(1, labels[:, None], 0.0)
