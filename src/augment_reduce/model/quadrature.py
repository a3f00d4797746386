"""Eq. (5): the probability that a class wins, for any noise, by quadrature over the winner's utility v.

With eps = v - psi_y, eq. (5) of the paper becomes one function P of a score, the same for every class of a row:

    p(y | psi) = P(psi_y),   P(s) = int r(v - s) e^{G(v)} dv,   r = phi / Phi,   G(v) = sum_k log Phi(v - psi_k)

(G includes all K classes; r divides by the winner's own Phi.) So one grid in v, and G on it, suffice for a label,
the top k or all K classes. Three layers:

    MaxUtility   G and its slope, by interpolation from few scores, so that the cost of a node is independent of K
    grid_for     nodes and weights: doubled trapezoid (smooth, log-concave noise) or adaptive panels (any noise)
    log_...      the interface: functions of scores psi (B, K) and labels (B,); all compute and return float64
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor

from .max_utility import MaxUtility, chunks, maxima
from .noise import Noise

DROP = 34.0  # an integrand is truncated where it is below e^-34 = 2e-15 of its peak
FIRST_NODES, MAX_NODES = 16, 1 << 15  # the trapezoid starts with 16 intervals and doubles
CONVERGED = 1e-8  # change of log P between J and 2J intervals; the error of 2J is then about its square
PANEL_TOLERANCE = 1e-11  # error of one adaptive panel, relative to the whole integral

# Gauss-Legendre nodes and weights, and the weights of the 8-node rule on every other of those nodes.
X, RULE = legendre.leggauss(15)
COARSE_RULE = np.zeros_like(RULE)
COARSE_RULE[::2] = np.linalg.solve(legendre.legvander(X[::2], 7).T, 2.0 * np.eye(8)[0])


class Nodes(NamedTuple):
    """int f(v) e^{G(v)} dv ~ sum_q f(v_q) exp(log_weight_q), for distinct rows (b,); v, log_weight (b, Q)."""

    rows: Tensor
    v: Tensor
    log_weight: Tensor


def grid_for(maximum: MaxUtility, s: Tensor) -> list[Nodes]:
    """Nodes that integrate r(v - s) e^{G(v)} for every score s (B, C) of a row; each row is in one of the groups."""
    return _trapezoid(maximum, s) if maximum.noise.smooth_log_concave else [_panels(maximum, s)]


def _log_sum(maximum: MaxUtility, v: Tensor, log_weight: Tensor, s: Tensor) -> Tensor:
    """log P(s) on given nodes: v, log_weight (b, Q), s (b, C) -> (b, C)."""
    total = torch.full_like(s, -math.inf)
    for part in chunks(v.shape[1], s.numel(), v.device):
        terms = maximum.log_integrand(v[:, part, None], s[:, None, :], log_weight[:, part, None])
        total = torch.logaddexp(total, terms.logsumexp(1))
    return total


def _trapezoid(maximum: MaxUtility, s: Tensor) -> list[Nodes]:
    """The trapezoidal rule on one interval, with doubled numbers of nodes until log P converges.

    For an analytic integrand the error of this rule decreases like e^{-c J}: each doubling squares it. Convergence is
    tested at the score itself, or at nine scores over the range of `s`. The interval extends below the best score by at
    most 64 times its length there: scores further below have no probability.
    """
    low, high = s.amin(1, keepdim=True), s.amax(1, keepdim=True)
    (lo, hi), watched = _support(maximum, high), high
    if s.shape[1] > 1:
        least, lowest = hi - 64.0 * (hi - lo), _support(maximum, low)[0]
        lo, low = lowest.maximum(least), torch.where(lowest < least, least + (hi - lo), low)
        watched = low + (high - low) * torch.linspace(0.0, 1.0, 9).to(s)
    groups, rows, n, change = [], torch.arange(len(s), device=s.device), FIRST_NODES, torch.full_like(lo, math.inf)
    v = lo + (hi - lo) * torch.arange(n + 1, device=s.device) / n
    below = maximum.log_below(v)
    total = _log_sum(maximum, v, below, watched) + torch.log((hi - lo) / n)
    while len(rows):
        between = lo + (hi - lo) * (torch.arange(n, device=s.device) + 0.5) / n
        below_between = maximum.log_below(between, rows)
        added = _log_sum(maximum, between, below_between, watched) + torch.log((hi - lo) / n)
        old, total, n = total, torch.logaddexp(total, added) - math.log(2.0), 2 * n
        v, below = torch.cat([v, between], 1), torch.cat([below, below_between], 1)
        before, change = change, (total - old).abs().amax(1, keepdim=True)
        more = (torch.maximum(before * before, change) > CONVERGED)[:, 0] & (n < MAX_NODES)
        groups.append(Nodes(rows[~more], v[~more], below[~more] + torch.log((hi - lo) / n)[~more]))
        state = (rows, v, below, total, change, watched, lo, hi)
        rows, v, below, total, change, watched, lo, hi = (x[more] for x in state)
    return groups


def _support(maximum: MaxUtility, s: Tensor) -> tuple[Tensor, Tensor]:
    """The interval, (B, 1) each end, on which the log-concave integrand of a score s (B, 1) is above e^-DROP of its
    peak.

    The mode: regula falsi (Illinois, every third step a bisection) on the slope, until the tangent bounds the distance
    to the peak by 1. The ends: outwards by doubling, then Newton's method, which on a concave function approaches the
    end from outside.
    """

    def slope(v: Tensor) -> Tensor:
        own = maximum.noise.dlog_prob(v - s) - maximum.noise.dlog_cdf(v - s)
        return torch.nan_to_num(own + maximum.slope(v), nan=1e300, posinf=1e300, neginf=-1e300)

    top, sign = maximum.top[:, None], torch.tensor([-1.0, 1.0], dtype=s.dtype, device=s.device)
    v = torch.cat([torch.minimum(s, top) - 1.0, top + 4.0], 1)
    for step in range(100):  # until the slopes at both ends have the right signs
        slopes = slope(v)
        if not (outwards := slopes * sign > 0.0).any():
            break
        v = torch.where(outwards, v + sign * 2.0**step, v)
    (a, b), (slope_a, slope_b) = v.split(1, 1), slopes.split(1, 1)
    for step in range(100):
        mode = a + (b - a) * (slope_a / (slope_a - slope_b))
        mode = torch.where((mode >= a) & (mode <= b) & (step % 3 < 2), mode, 0.5 * (a + b))
        here = slope(mode)
        if ((here.abs() * (b - a) < 1.0) | (b - a < 1e-12 * (1.0 + mode.abs()))).all():
            break
        left = here > 0.0
        slope_a, slope_b = torch.where(left, here, 0.5 * slope_a), torch.where(left, 0.5 * slope_b, here)
        a, b = torch.where(left, mode, a), torch.where(left, b, mode)
    peak = maximum.log_integrand(mode, s, maximum.log_below(mode))
    distance = torch.full_like(mode, 6.0).expand(-1, 2)
    inner, outer = torch.zeros_like(distance), torch.full_like(distance, math.inf)
    for _ in range(100):
        v = mode + sign * distance
        drop = peak - maximum.log_integrand(v, s, maximum.log_below(v))
        short, far = drop < DROP, drop > 1.5 * DROP
        if not (short | far).any():
            break
        inner, outer = torch.where(short, distance, inner), torch.where(far, distance, outer)
        newton = distance + (drop - DROP) / (sign * slope(v))
        halfway = torch.where(outer.isinf(), 2.0 * distance, 0.5 * (inner + outer))
        moved = torch.where(far & (newton > inner) & (newton < distance), newton, halfway)
        distance = torch.where(short | far, moved, distance)
    return mode - distance[:, :1], mode + distance[:, 1:]


def _panels(maximum: MaxUtility, s: Tensor) -> Nodes:
    """Any noise: panels of 15 Gauss-Legendre nodes, halved until each is good to PANEL_TOLERANCE of the whole.

    Convergence is tested for the sum over the scores s. The first panels end at the 12 largest scores, where kinks are,
    and 2 next to them, where a second mode may be; and 0.5, 16, ... 2e13 on both sides of the winner and the largest s.
    """
    ladder = 0.5 * 32.0 ** torch.arange(10, dtype=s.dtype, device=s.device)
    steps = torch.stack([s.amax(1), maximum.top], 1)[:, :, None] + torch.cat([-ladder, ladder])
    kinks = maximum.psi.topk(min(12, maximum.psi.shape[1]), dim=1).values
    edges = torch.cat([steps.flatten(1), kinks - 2.0, kinks, kinks + 2.0], 1).sort(1).values
    ends = torch.stack([edges[:, :-1], edges[:, 1:]], 2)
    rows, panel = (ends[:, :, 1] > ends[:, :, 0]).nonzero(as_tuple=True)
    kept = _measure(maximum, s, rows, ends[rows, panel])
    while True:
        rows, ends, v, log_weight, log_sum, log_error = kept
        peak = s.new_full((len(s),), -1e300).scatter_reduce_(0, rows, log_sum, "amax")
        whole = torch.zeros_like(peak).index_add_(0, rows, torch.exp(log_sum - peak[rows]))
        bad = log_error > (torch.log(whole) + peak + math.log(PANEL_TOLERANCE))[rows]
        if not bad.any():
            return _padded(maximum, rows, v, log_weight)
        a, b = ends[bad].unbind(1)
        halves = torch.stack([torch.cat([a, 0.5 * (a + b)]), torch.cat([0.5 * (a + b), b])], 1)
        new = _measure(maximum, s, rows[bad].repeat(2), halves)
        kept = [torch.cat([old[~bad], more]) for old, more in zip(kept, new, strict=True)]


def _measure(maximum: MaxUtility, s: Tensor, rows: Tensor, ends: Tensor) -> list[Tensor]:
    """n panels: their rows (n,), ends (n, 2), nodes v and log_weight (n, 15), log integral (n,) and its log error (n,).

    Two error estimates: the difference to the 8-node rule on every other node; and, if the log integrand jumps by more
    than 10 next to its largest node, the jump, since a peak may be missed there. (If log-concave, it is at most that
    high.)
    """
    x, rule, coarse_rule = s.new_tensor(X), s.new_tensor(RULE), s.new_tensor(COARSE_RULE)
    half = 0.5 * (ends[:, 1:] - ends[:, :1])
    v = ends[:, :1] + half * (1.0 + x)
    log_weight, log_f = torch.empty_like(v), torch.empty_like(v)
    for part in chunks(len(rows), len(x) * max(maximum.at.shape[1], s.shape[1]), s.device):
        log_weight[part] = maximum.log_below(v[part], rows[part]) + torch.log(half[part])
        each = maximum.log_integrand(v[part, :, None], s[rows[part], None, :], log_weight[part, :, None])
        log_f[part] = each.logsumexp(-1)
    peak, best = log_f.max(1, keepdim=True)
    f = torch.exp(log_f - peak.clamp(min=-1e300))
    jumps = torch.nn.functional.pad(log_f.diff(dim=1).abs().nan_to_num(0.0, posinf=math.inf), (1, 1))
    jump = torch.maximum(jumps.gather(1, best), jumps.gather(1, best + 1))[:, 0]
    log_error = peak[:, 0] + torch.where(jump > 10.0, jump, torch.log((f @ (rule - coarse_rule)).abs()))
    log_error[half[:, 0] < 1e-14 * (1.0 + v.abs().amax(1))] = -math.inf  # as narrow as float64 resolves
    return [rows, ends, v, log_weight + torch.log(rule), torch.log(f @ rule) + peak[:, 0], log_error]


def _padded(maximum: MaxUtility, rows: Tensor, v: Tensor, log_weight: Tensor) -> Nodes:
    """All panels of a row concatenated, padded with nodes of weight zero."""
    order = rows.argsort(stable=True)
    rows, counts = rows[order], rows.bincount(minlength=len(maximum.psi))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    all_v = maximum.top[:, None, None].repeat(1, int(counts.max()), v.shape[1])
    all_log_weight = torch.full_like(all_v, -math.inf)
    all_v[rows, place], all_log_weight[rows, place] = v[order], log_weight[order]
    return Nodes(torch.arange(len(all_v), device=rows.device), all_v.flatten(1), all_log_weight.flatten(1))


def _check(psi: Tensor, classes: Tensor) -> None:
    finite, inside = psi.isfinite().all(1), ((classes >= 0) & (classes < psi.shape[1])).all(1)
    if not inside.all():
        row = int((~inside).nonzero()[0])
        raise ValueError(
            f"Expected labels in [0, n_classes={psi.shape[1]}), but found {classes[row].tolist()} at row {row}. "
            "Labels are 0-based positions in classes_; encode them first."
        )
    if not finite.all():
        raise ValueError(
            f"Expected finite scores psi, but row {int((~finite).nonzero()[0])} holds NaN or infinity: the features of "
            "that row do, or the weights have diverged. Check the row; lower the learning rate or add a prior."
        )


@torch.no_grad()
def log_proba_of(noise: Noise, psi: Tensor, classes: Tensor, *, closed_form: bool = True) -> Tensor:
    """log p(k | psi), eq. (5), of some classes k of each row: psi (B, K), classes (B, C) -> (B, C), in one grid a row.

    Softmax has eq. (1) instead of an integral, unless `closed_form=False`. Accuracy as `log_proba` says.
    """
    _check(psi, classes)
    if closed_form and noise.conjugate:
        return psi.double().gather(1, classes) - psi.double().logsumexp(1, keepdim=True)
    out = torch.empty(classes.shape, dtype=torch.float64, device=psi.device)
    for block, maximum in maxima(noise, psi):
        out[block] = log_proba_on(maximum, maximum.psi.gather(1, classes[block]))
    return out


@torch.no_grad()
def log_proba_on(maximum: MaxUtility, s: Tensor) -> Tensor:
    """log P(s), (B, C), of classes with scores `s`, given G of all classes."""
    out = torch.empty_like(s)
    for rows, v, log_weight in grid_for(maximum, s):
        out[rows] = _log_sum(maximum, v, log_weight, s[rows])
    return out


def log_likelihood(noise: Noise, psi: Tensor, labels: Tensor, *, closed_form: bool = True) -> Tensor:
    """log p(y | psi), eq. (5), (B,): error below 1e-10 + 1e-15 |log p|, without a floor; `closed_form` as above."""
    return log_proba_of(noise, psi, labels[:, None], closed_form=closed_form)[:, 0]


@torch.no_grad()
def log_likelihood_and_grad(noise: Noise, psi: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y | psi) (B,) and its gradient in all scores (B, K), on the same nodes.

    d log p / d psi_k = -E[r(v - psi_k)] for k != y, with E over v's density r(v - psi_y) e^{G(v)} / p; the label's
    gradient is minus the sum of the others', since only differences of scores matter. Softmax: [k = y] - softmax_k.
    """
    label = labels[:, None]
    _check(psi, label)
    if noise.conjugate:
        log_p = psi.double().log_softmax(1)
        return log_p.gather(1, label)[:, 0], (-log_p.exp()).scatter_add_(1, label, torch.ones_like(log_p[:, :1]))
    value = torch.empty(len(psi), dtype=torch.float64, device=psi.device)
    grad = torch.empty(psi.shape, dtype=torch.float64, device=psi.device)
    for block, maximum in maxima(noise, psi):
        s, hazard = maximum.psi.gather(1, label[block]), torch.zeros_like(maximum.at)
        for rows, v, log_weight in grid_for(maximum, s):
            log_f = maximum.log_integrand(v, s[rows], log_weight)
            value[block][rows] = log_p = log_f.logsumexp(1)
            density = torch.exp(log_f - log_p[:, None])
            v = torch.where(density > 0.0, v, v.gather(1, density.argmax(1, keepdim=True)))  # no 0 * inf below
            for part in chunks(v.shape[1], len(rows) * maximum.at.shape[1], v.device):
                ratio = noise.dlog_cdf(v[:, part, None] - maximum.at[rows, None, :])
                hazard[rows] += (density[:, None, part] @ ratio)[:, 0]
        others = maximum.spread(hazard).scatter(1, label[block], 0.0)
        grad[block] = (-others).scatter_(1, label[block], others.sum(1, keepdim=True))
    return value, grad


@torch.no_grad()
def grid_of_gaps(noise: Noise, gap: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Nodes for the labels' integrals, from gap (B, K) = psi_k - psi_y, -inf where k is the label.

    Yields (rows, eps (b, Q), log of the quadrature weights (b, Q), sum_{k != y} log Phi(eps - gap_k) (b, Q)), each row
    once: log p = log sum_q exp(log phi(eps_q) + log weight_q + sum_q).
    """
    psi = gap.masked_fill(gap == -math.inf, 0.0)
    for block, maximum in maxima(noise, psi):
        s = -psi[block].double().amax(1, keepdim=True)
        for rows, v, log_weight in grid_for(maximum, s):
            eps, below = v - s[rows], maximum.log_below(v, rows)
            others = torch.where(below > -math.inf, below - noise.log_cdf(eps), -math.inf)
            log_step = torch.where(below > -math.inf, log_weight - below, -math.inf)
            yield rows + block.start, eps, log_step, others


@torch.no_grad()
def log_proba(noise: Noise, psi: Tensor) -> Tensor:
    """log p(k | psi) of all classes, not renormalised: (B, K) -> (B, K). One grid a row: O(K J), never O(K^2).

    A row's probabilities sum to 1 within 1e-8 without renormalisation. Smooth log-concave noise: the error of log p_k
    is below 1e-9 + 1e-15 |log p_k|; for scores thousands below the best it is too low. Other noises: the error of p_k
    is below 1e-10, so that the log of a smaller one is inaccurate: use `log_likelihood` for a label.
    """
    _check(psi, psi.new_zeros(len(psi), 1))
    if noise.conjugate:
        return psi.double().log_softmax(1)
    out = torch.empty(psi.shape, dtype=torch.float64, device=psi.device)
    for block, maximum in maxima(noise, psi):
        log_p = torch.empty_like(maximum.at)
        for rows, v, log_weight in grid_for(maximum, maximum.at):
            log_p[rows] = _log_sum(maximum, v, log_weight, maximum.at[rows])
        out[block] = maximum.spread(log_p)
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
    """The paper's estimate of eq. (5) (sec. 4), (B,): the log of the mean, over draws eps of N(mean, std^2), of
    phi(eps) prod_{k != y} Phi(eps - gap_k) / N(eps; mean, std^2). No clipping. Its exponential is unbiased."""
    _check(psi, labels[:, None])
    out = torch.empty(len(psi), dtype=torch.float64, device=psi.device)
    for block, maximum in maxima(noise, psi):
        s = maximum.psi.gather(1, labels[block, None])
        u = torch.randn(len(s), n_samples, generator=generator, dtype=s.dtype, device=generator.device).to(s.device)
        v = s + mean + std * u
        log_f = maximum.log_integrand(v, s, maximum.log_below(v))
        log_proposal = -0.5 * u * u - math.log(std * math.sqrt(2.0 * math.pi))
        out[block] = (log_f - log_proposal).logsumexp(1) - math.log(n_samples)
    return out
