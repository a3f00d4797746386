"""Eq. (5): the probability that a class wins, for any noise, by quadrature over the winner's utility v.

With eps = v - psi_y, eq. (5) of the paper becomes one function P of a score, the same for every class of a row:

    p(y | psi) = P(psi_y),   P(s) = int r(v - s) e^{G(v)} dv,   r = phi / Phi,   G(v) = sum_k log Phi(v - psi_k)

(G runs over all K classes; r divides the winner's own Phi out again.) So one grid in v, and G on it, serve a label,
the top few or all K classes. Three layers, top to bottom:

    Crowd        G and its slope; many classes are interpolated from few scores, so that K drops out of the cost
    grid_for     nodes and weights: doubled trapezoid (smooth, log-concave noise) or adaptive panels (any noise)
    log_...      what callers use: functions of scores psi (B, K) and labels (B,); all return float64

Accuracy, float64, scores up to 1e3 apart: a log-likelihood errs by about 1e-10 plus the rounding 1e-16 |log p|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .noise import Gumbel, Noise

CHUNK = 1 << 18  # elements of a temporary array: 2 MiB, small enough to stay in a core's cache
BIN_WIDTH, DEGREE = (
    2.0,
    16,
)  # Chebyshev interpolation of log Phi over bins of scores: error 2e-13 for the built-in noises
DROP = 34.0  # an integrand is cut off where it is below e^-34 = 2e-15 of its peak
FIRST_NODES, MAX_NODES = 16, 1 << 15  # the trapezoid starts with 16 intervals and doubles
CONVERGED = 1e-8  # change of log P between J and 2J intervals; the error of 2J is then about its square
PANEL_TOLERANCE = 1e-11  # error of one adaptive panel, relative to the whole integral


class Nodes(NamedTuple):
    """Quadrature nodes of some rows: int f(v) e^{G(v)} dv ~ sum_q f(v_q) exp(log_weight_q).

    - `rows` (b,), each once; `v` (b, Q); `log_weight` (b, Q): log of (G's exponential times the rule's weight).
    """

    rows: Tensor
    v: Tensor
    log_weight: Tensor


class Crowd:
    """All utilities of each row together: G(v) = sum_k log Phi(v - psi_k) is the log probability that none exceeds v.

    As a function of psi, log Phi(v - psi) is smooth. So scores are put in bins of width 2, each with 16 Chebyshev
    points, and every class is spread over the points of its bin with the weights of polynomial interpolation: G is
    then a weighted sum over the M points `at`, whatever K is. `spread` goes back, from the points to the classes.
    Kept to the classes themselves (at = psi) where that is no saving, or `noise` fails the test of `interpolates`.
    """

    def __init__(self, noise: Noise, psi: Tensor, *, interpolate: bool) -> None:
        self.noise, self.psi = noise, psi
        self.low, self.top = psi.amin(1), psi.amax(1)
        self.n_bins = int(((self.top - self.low).max() / BIN_WIDTH).floor()) + 1
        self.at, self.weight = psi, None
        if interpolate and 2 * self.n_bins * DEGREE <= psi.shape[1]:
            points, to_points = (torch.from_numpy(a).to(psi.device) for a in _chebyshev())
            offset = torch.arange(self.n_bins, device=psi.device)[:, None] + (points + 1.0) / 2.0
            self.at = self.low[:, None] + BIN_WIDTH * offset.flatten()
            bins, polynomials = self._basis()
            moments = psi.new_zeros(DEGREE, len(psi), self.n_bins)
            for moment, polynomial in zip(moments, polynomials, strict=True):
                moment.scatter_add_(1, bins, polynomial)
            self.weight = (moments.permute(1, 2, 0) @ to_points).flatten(1)

    def _basis(self) -> tuple[Tensor, Iterator[Tensor]]:
        """The bin of every class (B, K), and the Chebyshev polynomials T_0, T_1, ... at its place in that bin."""
        place = (self.psi - self.low[:, None]) / BIN_WIDTH
        bins = place.floor().clamp_(max=self.n_bins - 1).long()
        x = 2.0 * (place - bins) - 1.0

        def polynomials() -> Iterator[Tensor]:
            old, new = x, torch.ones_like(x)  # T_-1 = T_1
            for _ in range(DEGREE):
                yield new
                old, new = new, 2.0 * x * new - old

        return bins, polynomials()

    def spread(self, values: Tensor) -> Tensor:
        """Values at the points `at` (B, M) to the classes (B, K): polynomial interpolation in each bin."""
        if self.weight is None:
            return values
        to_points = torch.from_numpy(_chebyshev()[1]).to(values.device)
        coefficients = values.unflatten(1, (self.n_bins, DEGREE)) @ to_points.T
        bins, polynomials = self._basis()
        total = torch.zeros_like(self.psi)
        for j, polynomial in enumerate(polynomials):
            total.addcmul_(coefficients[:, :, j].gather(1, bins), polynomial)
        return total

    def log_below(self, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """G(v) of `rows` (all by default) at v (b, Q)."""
        total = self._sum(self.noise.log_cdf, v, rows)
        return torch.where(
            total < 1.0, total.clamp(max=0.0), -math.inf
        )  # inf - inf, from far out in the tail: no chance

    def slope(self, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """G'(v) >= 0, like `log_below`."""
        total = self._sum(self.noise.dlog_cdf, v, rows)
        return torch.where(total > -1.0, total.clamp(min=0.0), math.inf)

    def _sum(self, function: Callable[[Tensor], Tensor], v: Tensor, rows: Tensor | None) -> Tensor:
        at = self.at if rows is None else self.at[rows]
        weight = self.weight if rows is None or self.weight is None else self.weight[rows]
        out = torch.empty_like(v)
        step = max(1, CHUNK // at.numel()) if at.numel() else 1
        for q in range(0, v.shape[1], step):
            terms = function(v[:, q : q + step, None] - at[:, None, :])
            out[:, q : q + step] = terms.sum(-1) if weight is None else (terms @ weight[:, :, None])[:, :, 0]
        return out

    def log_integrand(self, v: Tensor, s: Tensor, log_below: Tensor) -> Tensor:
        """log of r(v - s) e^{G(v)}, given G(v); -inf where Phi and with it e^G vanish (-inf minus -inf)."""
        log_ratio = self.noise.log_prob(v - s) - self.noise.log_cdf(v - s)
        return torch.nan_to_num(log_ratio + log_below, nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


@cache
def _chebyshev() -> tuple[np.ndarray, np.ndarray]:
    """Chebyshev points x_p on [-1, 1], and the matrix (j, p) that turns sums of T_j into weights of the points."""
    angle = math.pi * (np.arange(DEGREE) + 0.5) / DEGREE
    to_points = np.cos(np.arange(DEGREE)[:, None] * angle) * (2.0 / DEGREE)
    to_points[0] /= 2.0
    return np.cos(angle), to_points


def interpolates(noise: Noise, device: torch.device) -> bool:
    """Whether log Phi of this noise is smooth enough for `Crowd` to interpolate it: tried out, not believed."""
    psi = torch.linspace(0.0, 0.99 * BIN_WIDTH, 2 * DEGREE, dtype=torch.float64, device=device)[None]
    v = torch.linspace(-40.0, 42.0, 821, dtype=torch.float64, device=device)[None]
    rough, truth = (Crowd(noise, psi, interpolate=flag).log_below(v) for flag in (True, False))
    return bool(((rough - truth).abs() <= 1e-12 * (1.0 + truth.abs())).all())  # NaN counts as no


def grid_for(crowd: Crowd, s: Tensor) -> list[Nodes]:
    """Nodes that integrate r(v - s) e^{G(v)} for every score s (B, C) of a row; each row is in one of the groups."""
    return _trapezoid(crowd, s) if crowd.noise.smooth_log_concave else [_panels(crowd, s)]


def _log_sum(crowd: Crowd, v: Tensor, log_weight: Tensor, s: Tensor) -> Tensor:
    """log P(s) on given nodes: v, log_weight (b, Q), s (b, C) -> (b, C)."""
    total = torch.full_like(s, -math.inf)
    step = max(1, CHUNK // max(1, s.numel()))
    for q in range(0, v.shape[1], step):
        part = slice(q, q + step)
        terms = crowd.log_integrand(v[:, part, None], s[:, None, :], log_weight[:, part, None])
        total = torch.logaddexp(total, terms.logsumexp(1))
    return total


def _trapezoid(crowd: Crowd, s: Tensor) -> list[Nodes]:
    """Even nodes over the one interval that matters, doubled until log P settles.

    For an analytic integrand the error of this rule falls like e^{-c J}: each doubling squares it. Convergence is
    watched at the score itself, or at nine scores over the range of `s`, which all other classes lie between.
    """
    low, high = s.amin(1, keepdim=True), s.amax(1, keepdim=True)
    (lo, hi), watched = _support(crowd, high), high
    if s.shape[1] > 1:
        lo, watched = _support(crowd, low)[0], low + (high - low) * torch.linspace(0.0, 1.0, 9).to(s)
    groups, rows, n = [], torch.arange(len(s), device=s.device), FIRST_NODES
    v = lo + (hi - lo) * torch.arange(n + 1, device=s.device) / n
    below = crowd.log_below(v)
    total = _log_sum(crowd, v, below, watched) + torch.log((hi - lo) / n)
    change = torch.full_like(lo, math.inf)
    while len(rows):
        between = lo + (hi - lo) * (torch.arange(n, device=s.device) + 0.5) / n
        below_between = crowd.log_below(between, rows)
        added = _log_sum(crowd, between, below_between, watched) + torch.log((hi - lo) / n)
        old, total, n = total, torch.logaddexp(total, added) - math.log(2.0), 2 * n
        v, below = torch.cat([v, between], 1), torch.cat([below, below_between], 1)
        before, change = change, (total - old).abs().amax(1, keepdim=True)
        more = (torch.maximum(before * before, change) > CONVERGED)[:, 0] & (n < MAX_NODES)
        groups.append(Nodes(rows[~more], v[~more], below[~more] + torch.log((hi - lo) / n)[~more]))
        state = (rows, v, below, total, change, watched, lo, hi)
        rows, v, below, total, change, watched, lo, hi = (x[more] for x in state)
    return groups


def _support(crowd: Crowd, s: Tensor) -> tuple[Tensor, Tensor]:
    """The interval (B, 1) each, where the log-concave integrand of one score s (B, 1) is within e^-DROP of its peak.

    The mode: regula falsi (Illinois, every third step a bisection) on the slope, until the tangent shows that no more
    than 1 is missing to the peak. The ends: outwards by doubling, back by Newton, which on a concave function cannot
    step over the end it comes back to.
    """

    def slope(v: Tensor) -> Tensor:
        own = crowd.noise.dlog_prob(v - s) - crowd.noise.dlog_cdf(v - s)
        return torch.nan_to_num(own + crowd.slope(v), nan=1e300, posinf=1e300, neginf=-1e300)

    top = crowd.top[:, None]
    a, slope_a = _walk(slope, torch.minimum(s, top) - 1.0, -1.0)
    b, slope_b = _walk(slope, top + 4.0, 1.0)
    mode = a
    for step in range(100):
        mode = a + (b - a) * (slope_a / (slope_a - slope_b))
        mode = torch.where((mode >= a) & (mode <= b) & (step % 3 < 2), mode, 0.5 * (a + b))
        here = slope(mode)
        if ((here.abs() * (b - a) < 1.0) | (b - a < 1e-12 * (1.0 + mode.abs()))).all():
            break
        left = here > 0.0
        slope_a, slope_b = torch.where(left, here, 0.5 * slope_a), torch.where(left, 0.5 * slope_b, here)
        a, b = torch.where(left, mode, a), torch.where(left, b, mode)
    peak, sign = crowd.log_integrand(mode, s, crowd.log_below(mode)), torch.tensor([-1.0, 1.0], device=s.device)
    distance = torch.full_like(mode, 6.0).expand(-1, 2)
    inner, outer = torch.zeros_like(distance), torch.full_like(distance, math.inf)
    for _ in range(100):
        v = mode + sign * distance
        drop = peak - crowd.log_integrand(v, s, crowd.log_below(v))
        short, far = drop < DROP, drop > 1.5 * DROP
        if not (short | far).any():
            break
        inner, outer = torch.where(short, distance, inner), torch.where(far, distance, outer)
        newton = distance + (drop - DROP) / (sign * slope(v))
        halfway = torch.where(outer.isinf(), 2.0 * distance, 0.5 * (inner + outer))
        moved = torch.where(far & (newton > inner) & (newton < distance), newton, halfway)
        distance = torch.where(short | far, moved, distance)
    return mode - distance[:, :1], mode + distance[:, 1:]


def _walk(slope: Callable[[Tensor], Tensor], v: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """From v (B, 1), in steps 1, 2, 4, ... to the side `sign`, until the slope there points back."""
    here, step = slope(v), sign
    for _ in range(100):
        wrong = here * sign > 0.0
        if not wrong.any():
            break
        v, step = torch.where(wrong, v + step, v), 2.0 * step
        here = slope(v)
    return v, here


class _Panels(NamedTuple):
    """Stretches of v with 15 nodes each: n of them, any number for a row."""

    rows: Tensor
    ends: Tensor  # (n, 2)
    v: Tensor  # (n, 15)
    log_weight: Tensor  # (n, 15), as in Nodes
    log_sum: Tensor  # (n,) log of the integral over the panel, of all watched scores together
    log_error: Tensor  # (n,)


def _panels(crowd: Crowd, s: Tensor) -> Nodes:
    """Any noise: panels of 15 Gauss-Legendre nodes, halved until each is good to PANEL_TOLERANCE of the whole.

    What is watched is the sum over the scores s. The first panels end at the 64 largest scores, where kinks are, and
    1/4, 2, 16, ... 7e13 to both sides of the winner and of the largest s, so that heavy tails and second bumps are met.
    """
    ladder = 0.25 * 8.0 ** torch.arange(17, dtype=s.dtype, device=s.device)
    centres = torch.stack([s.amax(1), crowd.top], 1)[:, :, None]
    kinks = crowd.psi.topk(min(64, crowd.psi.shape[1]), dim=1).values
    edges = torch.cat([kinks, (centres + ladder).flatten(1), (centres - ladder).flatten(1)], 1).sort(1).values
    ends = torch.stack([edges[:, :-1], edges[:, 1:]], 2)
    rows, panel = (ends[:, :, 1] > ends[:, :, 0]).nonzero(as_tuple=True)
    kept = _measure(crowd, s, rows, ends[rows, panel])
    while True:
        peak = s.new_full((len(s),), -1e300).scatter_reduce_(0, kept.rows, kept.log_sum, "amax")
        whole = torch.zeros_like(peak).index_add_(0, kept.rows, torch.exp(kept.log_sum - peak[kept.rows]))
        bad = kept.log_error > (torch.log(whole) + peak + math.log(PANEL_TOLERANCE))[kept.rows]
        if not bad.any():
            return _padded(crowd, kept)
        a, b = kept.ends[bad].unbind(1)
        halves = torch.cat([torch.stack([a, 0.5 * (a + b)], 1), torch.stack([0.5 * (a + b), b], 1)])
        new = _measure(crowd, s, kept.rows[bad].repeat(2), halves)
        kept = _Panels(*(torch.cat([old[~bad], more]) for old, more in zip(kept, new, strict=True)))


def _measure(crowd: Crowd, s: Tensor, rows: Tensor, ends: Tensor) -> _Panels:
    """Integrate over the panels `ends` (n, 2), and say how far off that may be.

    Two signs of error: the 8-node rule on every other node disagrees; or, where the log integrand jumps by more than
    10 next to its largest node, a peak may hide there. (If log-concave, that peak is no higher than the jump.)
    """
    x, rule, coarse_rule = (torch.from_numpy(a).to(s.device) for a in _gauss_rules())
    half = 0.5 * (ends[:, 1:] - ends[:, :1])
    v = ends[:, :1] + half * (1.0 + x)
    log_weight, log_f = torch.empty_like(v), torch.empty_like(v)
    step = max(1, CHUNK // (len(x) * max(crowd.at.shape[1], s.shape[1])))
    for part in (slice(p, p + step) for p in range(0, len(rows), step)):
        log_weight[part] = crowd.log_below(v[part], rows[part]) + torch.log(half[part])
        log_f[part] = crowd.log_integrand(
            v[part, :, None], s[rows[part], None, :], log_weight[part, :, None]
        ).logsumexp(-1)
    peak, best = log_f.max(1, keepdim=True)
    f = torch.exp(log_f - peak.clamp(min=-1e300))
    log_error = torch.log((f @ (rule - coarse_rule)).abs())
    jumps = torch.nn.functional.pad(log_f.diff(dim=1).abs().nan_to_num(0.0, posinf=math.inf), (1, 1))
    jump = torch.maximum(jumps.gather(1, best), jumps.gather(1, best + 1))[:, 0]
    log_error = peak[:, 0] + torch.where(jump > 10.0, jump, log_error)
    log_error[half[:, 0] < 1e-14 * (1.0 + v.abs().amax(1))] = -math.inf  # as narrow as float64 can tell apart
    return _Panels(rows, ends, v, log_weight + torch.log(rule), torch.log(f @ rule) + peak[:, 0], log_error)


@cache
def _gauss_rules() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes on [-1, 1], the weights of 15-node Gauss-Legendre, and those of the 8-node rule on every other node."""
    x, rule = np.polynomial.legendre.leggauss(15)
    coarse_rule = np.zeros_like(rule)
    coarse_rule[::2] = np.linalg.solve(np.polynomial.legendre.legvander(x[::2], 7).T, [2.0] + [0.0] * 7)
    return x, rule, coarse_rule


def _padded(crowd: Crowd, panels: _Panels) -> Nodes:
    """All panels of a row side by side; nodes of weight zero fill the shorter rows."""
    order = panels.rows.argsort(stable=True)
    counts = panels.rows.bincount(minlength=len(crowd.psi))
    first = counts.cumsum(0) - counts
    rows, place = panels.rows[order], torch.arange(len(order), device=order.device)
    v = crowd.top[:, None, None].repeat(1, int(counts.max()), panels.v.shape[1])
    log_weight = torch.full_like(v, -math.inf)
    v[rows, place - first[rows]] = panels.v[order]
    log_weight[rows, place - first[rows]] = panels.log_weight[order]
    return Nodes(torch.arange(len(v), device=v.device), v.flatten(1), log_weight.flatten(1))


def _crowds(noise: Noise, psi: Tensor) -> Iterator[tuple[slice, Crowd]]:
    """Blocks of rows small enough for memory; float64 from here on."""
    if psi.ndim != 2 or psi.shape[1] < 1:
        raise ValueError(f"Expected scores psi of shape (rows, classes), but found {tuple(psi.shape)}.")
    interpolate = psi.shape[1] >= 2 * DEGREE and interpolates(noise, psi.device)
    step = max(1, CHUNK // max(512, psi.shape[1]))
    for block in (slice(start, min(start + step, len(psi))) for start in range(0, len(psi), step)):
        scores = psi[block].double()
        if not scores.isfinite().all():
            row = block.start + int(scores.isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(
                f"Expected finite scores psi, but row {row} holds NaN or infinity: the weights have diverged or the "
                "input has such a value. Lower the learning rate, add a prior, or check the features of that row."
            )
        yield block, Crowd(noise, scores, interpolate=interpolate)


@torch.no_grad()
def log_proba_of(noise: Noise, psi: Tensor, classes: Tensor) -> Tensor:
    """log p(k | psi) of a few classes k of each row: psi (B, K), classes (B, C) -> (B, C). Eq. (5), or (1) for softmax.

    One class: right to 1e-10 + 1e-16 |log p|, however small p is. Several share a grid: see `log_proba`.
    """
    _check_classes(psi, classes)
    if type(noise) is Gumbel:
        return psi.double().gather(1, classes) - psi.double().logsumexp(1, keepdim=True)
    return _by_quadrature(noise, psi, classes)


def _by_quadrature(noise: Noise, psi: Tensor, classes: Tensor) -> Tensor:
    out = torch.empty(classes.shape, dtype=torch.float64, device=psi.device)
    for block, crowd in _crowds(noise, psi):
        s = crowd.psi.gather(1, classes[block])
        for rows, v, log_weight in grid_for(crowd, s):
            out[block][rows] = _log_sum(crowd, v, log_weight, s[rows])
    return out


def log_likelihood(noise: Noise, psi: Tensor, labels: Tensor) -> Tensor:
    """log p(y | psi), eq. (5) (softmax: eq. (1) in closed form): psi (B, K), labels (B,) -> (B,). Natural logs, no floor."""
    return log_proba_of(noise, psi, labels[:, None])[:, 0]


@torch.no_grad()
def log_likelihood_by_quadrature(noise: Noise, psi: Tensor, labels: Tensor) -> Tensor:
    """`log_likelihood` without the short cut for softmax: eq. (5) as an integral for every noise."""
    _check_classes(psi, labels[:, None])
    return _by_quadrature(noise, psi, labels[:, None])[:, 0]


@torch.no_grad()
def log_likelihood_and_grad(noise: Noise, psi: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y | psi) (B,) and its gradient in all scores (B, K), on the same nodes.

    d log p / d psi_k = -E[r(v - psi_k)] for k != y, with E over v's density r(v - psi_y) e^{G(v)} / p; the label's
    gradient is minus the sum of the others', since only differences of scores matter. Softmax: [k = y] - softmax_k.
    """
    _check_classes(psi, labels[:, None])
    label = labels[:, None]
    if type(noise) is Gumbel:
        log_p = psi.double().log_softmax(1)
        return log_p.gather(1, label)[:, 0], (-log_p.exp()).scatter_add_(1, label, torch.ones_like(log_p[:, :1]))
    value = torch.empty(len(psi), dtype=torch.float64, device=psi.device)
    grad = torch.empty(psi.shape, dtype=torch.float64, device=psi.device)
    for block, crowd in _crowds(noise, psi):
        s, pull = crowd.psi.gather(1, label[block]), torch.zeros_like(crowd.at)
        for rows, v, log_weight in grid_for(crowd, s):
            log_f = crowd.log_integrand(v, s[rows], log_weight)
            value[block][rows] = log_p = log_f.logsumexp(1)
            density = torch.exp(log_f - log_p[:, None])
            v = torch.where(
                density > 0.0, v, v.gather(1, density.argmax(1, keepdim=True))
            )  # there r may be inf: no 0 * inf
            for q in range(0, v.shape[1], step := max(1, CHUNK // max(1, crowd.at[rows].numel()))):
                ratio = crowd.noise.dlog_cdf(v[:, q : q + step, None] - crowd.at[rows, None, :])
                pull[rows] += (density[:, None, q : q + step] @ ratio)[:, 0]
        others = crowd.spread(pull).scatter_(1, label[block], 0.0)
        grad[block] = (-others).scatter_(1, label[block], others.sum(1, keepdim=True))
    return value, grad


@torch.no_grad()
def log_proba(noise: Noise, psi: Tensor) -> Tensor:
    """log p(k | psi) of all classes, not renormalised: (B, K) -> (B, K). One grid a row: O(K J), never O(K^2).

    Smooth log-concave noise: every log p_k above -690 (p_k > 1e-300) is right to 1e-9; below that it is a rough lower
    value (for one label's exact log p, ask `log_likelihood`). Any other noise: every p_k is right to about 1e-10, so
    a p_k below that has the right order at best. The probabilities of a row sum to 1 within 1e-8 by themselves.
    """
    if type(noise) is Gumbel:
        return psi.double().log_softmax(1)
    out = torch.empty(psi.shape, dtype=torch.float64, device=psi.device)
    for block, crowd in _crowds(noise, psi):
        log_p = torch.empty_like(crowd.at)
        for rows, v, log_weight in grid_for(crowd, crowd.at):
            log_p[rows] = _log_sum(crowd, v, log_weight, crowd.at[rows])
        out[block] = crowd.spread(log_p)
    return out


@torch.no_grad()
def log_likelihood_importance(
    noise: Noise,
    psi: Tensor,
    labels: Tensor,
    *,
    generator: torch.Generator,
    n_samples: int = 1000,
    mean: float = 5.0,
    std: float = 5.0,
) -> Tensor:
    """The paper's estimate of eq. (5) (sec. 4): the mean of phi(eps) prod_{k != y} Phi(eps - gap_k) / N(eps; mean, std^2)
    over draws eps of that Gaussian, then its log, (B,); no clipping. exp of it is unbiased; the log is low by half its
    relative variance.
    """
    _check_classes(psi, labels[:, None])
    out = torch.empty(len(psi), dtype=torch.float64, device=psi.device)
    for block, crowd in _crowds(noise, psi):
        shape = (len(crowd.psi), n_samples)
        u = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(psi.device)
        s = crowd.psi.gather(1, labels[block, None])
        v = s + mean + std * u
        log_f = crowd.log_integrand(v, s, crowd.log_below(v))
        log_proposal = -0.5 * u * u - math.log(std * math.sqrt(2.0 * math.pi))
        out[block] = (log_f - log_proposal).logsumexp(1) - math.log(n_samples)
    return out


def _check_classes(psi: Tensor, classes: Tensor) -> None:
    if classes.shape[:1] != psi.shape[:1]:
        raise ValueError(f"Expected one label for each row of psi {tuple(psi.shape)}, but found {len(classes)} labels.")
    bad = ((classes < 0) | (classes >= psi.shape[1])).any(1).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"Expected labels in [0, n_classes={psi.shape[1]}), but {len(bad)} of {len(classes)} rows are outside; first "
            f"at row {row}: {classes[row].tolist()}. Labels are 0-based positions in classes_; encode them first."
        )
