"""The noise of the utilities: its density φ and its CDF Φ, in logs, with two derivatives of each.

Utility = ψ_k + ε_k with ε_k ~ φ, and the largest utility wins (paper, eq. 4 and 5). The noise determines the model:

    Gumbel    "softmax"     φ(ε) = exp(-ε - e^-ε)         Φ(ε) = exp(-e^-ε)
    Normal    "probit"      φ(ε) = exp(-ε²/2) / √(2π)     Φ(ε) = erfc(-ε/√2) / 2
    Logistic  "logistic"    φ(ε) = σ(ε) σ(-ε)             Φ(ε) = σ(ε)

A user-defined noise is a subclass of `Noise` that defines `log_prob` and `log_cdf`; docs/noise.md shows two.

Every function maps a tensor to a tensor of its shape and dtype (float32 or float64). The built-in ones have full
*relative* accuracy in both tails, and never return NaN for a number, ±inf included.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.constants import LOG_SQRT_2PI, TAIL_CENTRE, tail_gap_powers
from ..support.seeds import many_uniforms

BLOCK = 2**15  # elements at a time on the CPU: intermediate results fit in cache and reuse the same memory

Elementwise = Callable[[Tensor], Tensor]


class Noise(ABC):
    """Base of the noises. Define `log_prob` and `log_cdf`; their derivatives are computed by autograd by default.

    `smooth_log_concave`: log φ and log Φ are smooth and concave. Quadrature then uses the trapezoidal rule on one
    interval; otherwise it adapts to kinks and to more than one mode. False is always valid.

    `scalars`, for speed on the CPU: the same functions of one number, compiled by Numba (`augment_reduce.Scalars`).
    """

    name: str = "noise"
    smooth_log_concave: bool = False
    conjugate: ClassVar[bool] = False  # whether the best q is Gumbel(log η, 1), in closed form: the softmax
    scalars: ClassVar[Any] = None  # `Scalars`, the name of built-in ones, or None: torch operations only

    @abstractmethod
    def log_prob(self, eps: Tensor) -> Tensor:
        """log φ(ε)."""

    @abstractmethod
    def log_cdf(self, eps: Tensor) -> Tensor:
        """log Φ(ε), at most 0."""

    def dlog_prob(self, eps: Tensor) -> Tensor:
        """d log φ / dε."""
        return _by_autograd(self.log_prob, eps)

    def d2log_prob(self, eps: Tensor) -> Tensor:
        """d² log φ / dε²."""
        return _by_autograd(self.dlog_prob, eps)

    def dlog_cdf(self, eps: Tensor) -> Tensor:
        """d log Φ / dε = φ(ε) / Φ(ε), at least 0."""
        return _by_autograd(self.log_cdf, eps)

    def d2log_cdf(self, eps: Tensor) -> Tensor:
        """d² log Φ / dε²; at most 0 if Φ is log-concave."""
        return _by_autograd(self.dlog_cdf, eps)

    def dlog_cdf_and_derivative(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """(d log Φ / dε, d² log Φ / dε²) at once, for noises where one helps to compute the other."""
        return self.dlog_cdf(eps), self.d2log_cdf(eps)

    def variational_family(self) -> "LocationScale":
        """Standard form u of the family q: ε = μ + σ u (paper, sec. 3.2). Normal by default."""
        return Normal()

    # Sums over the classes of a row: gap (B, S) is ψ_k - ψ_y, -inf where masked; log ω broadcasts to it; eps (B, J) are
    # the nodes of q, and weight (J,) or (B, J) their weights.

    def sum_log_cdf(self, gap: Tensor, log_weight: Tensor, eps: Tensor) -> Tensor:
        """(B, J) Σ_k ω_k log Φ(ε_j - gap_k): the log probability that all other utilities are below ε_j."""
        omega, gap = unmasked(gap, log_weight)
        return (omega[:, None, :] @ self.log_cdf(eps[:, None, :] - gap[:, :, None]))[:, 0]

    def sum_slopes(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ_k ω_k (log Φ)'(ε_j - gap_k) (B, J), the same of (log Φ)'', and `hazards` (B, S)."""
        omega, gap = unmasked(gap, log_weight)
        first, second = self.dlog_cdf_and_derivative(eps[:, None, :] - gap[:, :, None])
        slope, bend = ((omega[:, None, :] @ each)[:, 0] for each in (first, second))
        return slope, bend, omega * over_nodes(first, weight)

    def hazards(self, gap: Tensor, log_weight: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        """(B, S) ω_k Σ_j weight_j (φ / Φ)(ε_j - gap_k)."""
        omega, gap = unmasked(gap, log_weight)
        return omega * over_nodes(self.dlog_cdf(eps[:, None, :] - gap[:, :, None]), weight)

    @property
    def alone(self) -> "Noise":
        """The same noise with sums over the classes of this process only."""
        return self

    def summed(self, sums: Tensor) -> Tensor:
        """Sums over the classes of all processes, from sums over those of this one: see `OverRanks`."""
        return sums

    def largest(self, gap: Tensor) -> Tensor:
        """(B,) max_k gap_k over the classes of all processes."""
        return gap.amax(dim=-1)

    def log_total(self, values: Tensor) -> Tensor:
        """(B,) log Σ_k e^values_k over the classes of all processes."""
        return torch.logsumexp(values, dim=-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


def unmasked(gap: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(ω, gap) with weight zero and a finite gap instead of -inf for masked pairs.

    So a user-defined noise is not evaluated at infinity, where a derivative by autograd would be NaN.
    """
    masked = gap == -torch.inf
    return torch.exp(log_weight).expand_as(gap).masked_fill(masked, 0.0), gap.masked_fill(masked, 0.0)


def over_nodes(values: Tensor, weight: Tensor) -> Tensor:
    """Σ_j weight_j values[..., j], with weight (J,) or (B, J)."""
    return values @ weight if weight.ndim == 1 else (values @ weight[:, :, None])[:, :, 0]


class LocationScale(Noise):
    """A noise that can be used as q(ε): with draws and an entropy."""

    entropy: float  # of the standard form; that of μ + σ u is this plus log σ

    @abstractmethod
    def rsample(
        self,
        shape: tuple[int, ...],
        *,
        generator: torch.Generator | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Independent draws u of the standard form, to be used as ε = μ + σ u."""


class Gumbel(Noise):
    """Standard Gumbel noise: the softmax model (paper, sec. 3.1).

    log φ(ε) = -ε - e^-ε        log Φ(ε) = -e^-ε
    """

    name = "softmax"
    smooth_log_concave = True
    conjugate = True
    scalars = "gumbel"

    def log_prob(self, eps: Tensor) -> Tensor:
        # The clamp changes ε = -inf only, where inf - inf would be NaN; the gradient there is that of the other term.
        return -eps.clamp_min(torch.finfo(eps.dtype).min) - torch.exp(-eps)

    def log_cdf(self, eps: Tensor) -> Tensor:
        return -torch.exp(-eps)

    def dlog_prob(self, eps: Tensor) -> Tensor:
        return torch.expm1(-eps)

    def d2log_prob(self, eps: Tensor) -> Tensor:
        return -torch.exp(-eps)

    def dlog_cdf(self, eps: Tensor) -> Tensor:
        return torch.exp(-eps)

    def d2log_cdf(self, eps: Tensor) -> Tensor:
        return -torch.exp(-eps)


class Logistic(LocationScale):
    """Standard logistic noise: the multinomial logistic model (paper, sec. 3.2).

    φ(ε) = σ(ε) σ(-ε)        Φ(ε) = σ(ε) = 1 / (1 + e^-ε)
    """

    name = "logistic"
    smooth_log_concave = True
    scalars = "logistic"
    entropy = 2.0

    def log_prob(self, eps: Tensor) -> Tensor:
        return self.log_cdf(eps) + self.log_cdf(-eps)

    def log_cdf(self, eps: Tensor) -> Tensor:
        # Not log(sigmoid(ε)), which in float32 is -inf from ε = -89 on; nor -softplus(-ε), off by 1e-10 beyond 20.
        return F.logsigmoid(eps)

    def dlog_prob(self, eps: Tensor) -> Tensor:
        return -torch.tanh(0.5 * eps)

    def d2log_prob(self, eps: Tensor) -> Tensor:
        return 2.0 * self.d2log_cdf(eps)

    def dlog_cdf(self, eps: Tensor) -> Tensor:
        return torch.neg(eps).sigmoid_()  # in place, to avoid an allocation; autograd needs the result only

    def d2log_cdf(self, eps: Tensor) -> Tensor:
        return torch.sigmoid(eps) * -self.dlog_cdf(eps)

    def variational_family(self) -> LocationScale:
        return self

    def rsample(
        self,
        shape: tuple[int, ...],
        *,
        generator: torch.Generator | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        return torch.logit(_uniforms(shape, generator, device)).to(dtype)


class Normal(LocationScale):
    """Standard Gaussian noise: the multinomial probit model (paper, sec. 3.2).

    φ(ε) = exp(-ε²/2) / √(2π)        Φ(ε) = erfc(-ε/√2) / 2

    All functions of Φ are computed from one function of a = |ε|, the tail gap δ(a) = φ(a) / Φ(-a) - a > 0. With
    ρ = a + δ, none of the following cancels, and the two rows are ordered, as `_by_sign` requires:

                      log Φ              (log Φ)' = φ/Φ        (log Φ)''
        ε = -a        log φ - log ρ      ρ                     -ρ δ
        ε = +a        log(1 - φ/ρ)       r = φ / (1 - φ/ρ)     -r (a + r)
    """

    name = "probit"
    smooth_log_concave = True
    scalars = "normal"
    entropy = 0.5 + LOG_SQRT_2PI

    def log_prob(self, eps: Tensor) -> Tensor:
        return (-0.5 * eps) * eps - LOG_SQRT_2PI  # in this order it overflows only where ε²/2 does

    def log_cdf(self, eps: Tensor) -> Tensor:
        return _closed(eps, self._log_cdf, self.dlog_cdf)

    def dlog_prob(self, eps: Tensor) -> Tensor:
        return -eps

    def d2log_prob(self, eps: Tensor) -> Tensor:
        return torch.full_like(eps, -1.0)

    def dlog_cdf(self, eps: Tensor) -> Tensor:
        return _closed(eps, self._dlog_cdf, self.d2log_cdf)

    def d2log_cdf(self, eps: Tensor) -> Tensor:
        return _closed(eps, self._d2log_cdf, _no_third_derivative)

    def dlog_cdf_and_derivative(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        if eps.requires_grad:
            return super().dlog_cdf_and_derivative(eps)
        a = eps.abs().clamp_max_(1e18)
        delta = _tail_gap(a)
        rho = a + delta
        phi = self.log_prob(a).exp_()
        r = phi.div_((phi / rho).neg_().add_(1.0))
        first = _by_sign(-eps, r, rho)
        return first, _by_sign(eps, delta.mul_(rho).neg_(), a.add_(r).mul_(r).neg_())

    # These three work in place on temporaries: on the CPU, allocating costs more than the arithmetic.

    def _log_cdf(self, eps: Tensor) -> Tensor:
        a = eps.abs()
        log_rho = _tail_gap(a).add_(a).log_()
        lower = self.log_prob(a).sub_(log_rho)
        upper = torch.exp(lower).neg_().log1p_()
        return _by_sign(eps, lower, upper)

    def _dlog_cdf(self, eps: Tensor) -> Tensor:
        a = eps.abs()
        rho = _tail_gap(a).add_(a)
        phi = self.log_prob(a).exp_()
        r = phi.div_((phi / rho).neg_().add_(1.0))
        return _by_sign(-eps, r, rho)

    def _d2log_cdf(self, eps: Tensor) -> Tensor:
        a = eps.abs().clamp_max_(1e18)  # beyond, the results are -1 and 0, and at inf they would be inf * 0
        delta = _tail_gap(a)
        rho = a + delta
        phi = self.log_prob(a).exp_()
        r = phi.div_((phi / rho).neg_().add_(1.0))
        return _by_sign(eps, delta.mul_(rho).neg_(), a.add_(r).mul_(r).neg_())

    def rsample(
        self,
        shape: tuple[int, ...],
        *,
        generator: torch.Generator | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        return torch.special.ndtri(_uniforms(shape, generator, device)).to(dtype)


NOISES: dict[str, type[Noise]] = {"softmax": Gumbel, "probit": Normal, "logistic": Logistic}


def resolve_noise(model: str | Noise) -> Noise:
    """The noise of a model, given by name or as an object. ValueError for anything else."""
    if isinstance(model, Noise):
        return model
    if isinstance(model, str) and model in NOISES:
        return NOISES[model]()
    expected = f"Expected model to be one of {', '.join(map(repr, NOISES))} or an instance of a subclass of Noise"
    if isinstance(model, type) and issubclass(model, Noise):
        raise ValueError(f"{expected}, but found the class {model.__name__}; pass an instance: {model.__name__}().")
    if hasattr(model, "log_prob") and hasattr(model, "log_cdf"):
        raise ValueError(
            f"{expected}, but found {model!r}, which has log_prob and log_cdf but is none. "
            "Let its class subclass augment_reduce.model.noise.Noise, which supplies the derivatives (docs/noise.md)."
        )
    raise ValueError(f"{expected}, but found {model!r}. To bring a noise of your own, see docs/noise.md.")


def _uniforms(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """Uniforms of (0, 1), in float64, for draws by quantiles; on the CPU the same as in `kernels.cpu.draws`, so that
    compiled steps have the same draws.

    A float32 uniform has steps of 2^-24: no logistic draw beyond ±16.6 and, once in 17 million, u = 0. In float64 the
    steps are 2^-53: both tails reach ±36.7, and u = 0 (one in 10^16) is replaced by half a step.
    """
    if torch.device(device).type == "cpu":
        u = many_uniforms(1, math.prod(shape), generator).reshape(shape)
    else:
        u = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    return u.clamp_min_(2.0**-54)


def _by_autograd(function: Elementwise, eps: Tensor) -> Tensor:
    """Elementwise derivative of an elementwise function; differentiable again if `eps` requires gradients."""
    again = eps.requires_grad and torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        x = eps if again else eps.detach().clone().requires_grad_()
        y = function(x)
        if not y.requires_grad:  # a constant, as a high derivative of a polynomial
            return torch.zeros_like(eps)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=again, materialize_grads=True)
        return slope.clone()  # if all are zero (twice through abs, say) autograd returns a tensor without memory


def _closed(eps: Tensor, value: Elementwise, derivative: Elementwise) -> Tensor:
    """value(eps). In inference mode, used in training, without autograd, whose overhead exceeds the computation."""
    how = _Closed.forward if torch.is_inference_mode_enabled() else _Closed.apply
    return how(eps, value, derivative)


class _Closed(torch.autograd.Function):
    """value(eps), with derivative(eps) as its gradient instead of autograd through `value`."""

    @staticmethod
    def forward(eps: Tensor, value: Elementwise, derivative: Elementwise) -> Tensor:
        if eps.device.type != "cpu" or eps.numel() <= BLOCK:
            return value(eps)
        result = torch.empty_like(eps, memory_format=torch.contiguous_format)
        for part, to in zip(eps.reshape(-1).split(BLOCK), result.view(-1).split(BLOCK), strict=True):
            to.copy_(value(part))
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.derivative = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.derivative(ctx.saved_tensors[0]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], eps: Tensor, *functions: Elementwise) -> tuple[Tensor, int]:
        return _Closed.apply(eps, *functions), in_dims[0]  # elementwise


def _no_third_derivative(eps: Tensor) -> Tensor:
    raise RuntimeError(
        "Expected at most two derivatives of Normal.log_cdf, but autograd asks for a third. "
        "Detach what Normal.d2log_cdf returns, or bring a noise whose log_cdf is written in torch operations."
    )


def _by_sign(sign: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """`upper` where `sign` is positive, `lower` where it is negative, given lower ≤ upper (at zero they are equal).

    Clamping ±inf between the two selects one by sign; torch.where on a random mask takes ten times as long.
    """
    return torch.copysign(sign.new_full((), math.inf), sign).clamp_(lower, upper)


def _tail_gap(a: Tensor) -> Tensor:
    """δ(a) = φ(a) / Φ(-a) - a of the Normal, for a ≥ 0: √(2/π) at 0, 1/a - 2/a³ + ... far out.

    (a + c) δ(a) is a smooth function of t = (a - c) / (a + c), which maps [0, ∞] to [-1, 1]: one polynomial suffices
    for the whole half-line. On the CPU it is several times as fast as torch.special.erfcx.
    """
    w = (a + TAIL_CENTRE).reciprocal_()
    t = (w * (-2.0 * TAIL_CENTRE)).add_(1.0)
    first, second, *rest = _tail_gap_coefficients(a.dtype, a.device)
    total = torch.addcmul(second, t, first)
    for coefficient in rest:
        torch.addcmul(coefficient, t, total, out=total)
    return total.mul_(w)


@functools.cache
def _tail_gap_coefficients(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Highest power first."""
    return torch.tensor(tail_gap_powers(dtype == torch.float64), dtype=dtype, device=device).unbind()
