"""One step of a head in plain torch: used without a GPU or with a user-defined noise, and as the kernels' oracle.

With v the winner's utility, fixed, at nodes v_j with weights (softmax: one node v = c), a row's bound is

    L = sum_j weight_j [ log phi(v_j - psi_y) + sum_{k in S} omega_k log Phi(v_j - psi_k) ] + constant

and a step needs

    grad_class_k = omega_k sum_j weight_j (phi / Phi)(v_j - psi_k) = -dL/dpsi_k >= 0      softmax: omega_k e^{psi_k - c}
    grad_label   = -sum_j weight_j (log phi)'(v_j - psi_y)         =  dL/dpsi_y           softmax: 1 - e^{psi_y - c}
    slope, bend  = sum_k grad_class_k - grad_label, its derivative: the first and second derivative by v
                                                                                softmax: slope = log Z~ - c, see below

`value`, `slope` and `bend` are sums over classes, and additive over shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.noise import Gumbel, Noise

LARGEST_LOG = 60.0  # limit of x in a term e^x without a floor (floor=None): e^60 is far from overflow
FAR = 40.0  # e^40 times the number of classes is far from overflow
BLOCK = 1 << 18  # numbers of merged row gradients at a time
LEAST_BEND = 1e-2  # least curvature in a denominator
LARGEST = 1e15  # limit of scores, features and gradients in a step: their squares are far from overflow


class Objective(NamedTuple):
    """`bound`, `grad_label`, `slope`, `bend`, `floored`, `gap` are (B,); `grad_class` is (B, S).

    `bound` is the unbiased estimate; `floor` applies to `grad_class` and `grad_label`, the gradient, only. For softmax
    `slope` is log Z~ - c instead of the derivative Z~ e^{-c} - 1: the distance of c to its optimum, accurate also if it
    is large; `bend` is unused and zero. `gap` estimates the bound gap due to c or q: e^s - 1 - s with s = log Z~ - c,
    and to second order slope^2 / (2 |bend|) for other noises.
    """

    bound: Tensor
    grad_class: Tensor
    grad_label: Tensor
    slope: Tensor
    bend: Tensor
    floored: Tensor
    gap: Tensor


class Reduced(NamedTuple):
    """The sums over classes of each row (B,), the only coupling between classes; additive over shards.

    `grad_class` = sum_k grad_class_k, `value` = sum_k omega_k log Phi, `bend` = sum_k omega_k (phi / Phi)'. A softmax
    has `grad_class` only, in units of e^ref: ref is 0 unless e^{psi - c} would overflow or underflow. Sums are float64:
    rounded to the dtype of the scores, they do not depend on how the classes are split.
    """

    grad_class: Tensor
    value: Tensor
    bend: Tensor
    ref: Tensor


class LabelPart(NamedTuple):
    """Rows scale_b hidden_b of class target_b: each row's gradient by its label's weights."""

    target: Tensor
    scale: Tensor
    hidden: Tensor


class RowGradient(NamedTuple):
    """Gradient of the loss by weight rows: `values[i]` and `bias[i]` belong to class `classes[i]`, and each row of
    `labels` to its label. Repeated classes are summed. Classes of n_classes and more are discarded."""

    classes: Tensor
    values: Tensor
    bias: Tensor
    labels: LabelPart | None = None

    def times(self, scale: Tensor) -> RowGradient:
        scale = scale.to(self.values.dtype)
        labels = None if self.labels is None else self.labels._replace(scale=self.labels.scale * scale)
        return RowGradient(self.classes, self.values * scale, self.bias * scale, labels)

    def whole(self, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
        """(classes, values, bias) including the labels' rows, of existing classes."""
        classes, values, bias = self.classes, self.values, self.bias
        if self.labels is not None:
            target, scale, hidden = self.labels
            classes = torch.cat([classes, target])
            values = torch.cat([values, scale[:, None] * hidden.to(values.dtype)])
            bias = torch.cat([bias, scale])
        kept = classes < n_classes
        if classes.device.type == "cpu" and bool(kept.all()):
            return classes, values, bias
        return classes[kept], values[kept], bias[kept]

    def merged(self, n_classes: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(classes, values, bias) with repeated classes summed, in blocks of classes that are smaller than `whole`."""
        n, D = len(self.classes), self.values.shape[1]
        every = self.classes if self.labels is None else torch.cat([self.classes, self.labels.target])
        ordered, order = torch.sort(every, stable=True)
        touched, slot = torch.unique_consecutive(ordered, return_inverse=True)
        touched = touched[touched < n_classes]
        size = max(1, BLOCK // D)
        starts = torch.arange(0, len(touched) + size, size, device=slot.device).clamp_max_(len(touched))
        edges = torch.searchsorted(slot, starts).tolist()  # slots are in order
        for i, start in enumerate(range(0, len(touched), size)):
            inside, part = slice(edges[i], edges[i + 1]), touched[start : start + size]
            yield part, *self._sum_of(order[inside], slot[inside] - start, len(part), n)

    def _sum_of(self, place: Tensor, to: Tensor, size: int, n: int) -> tuple[Tensor, Tensor]:
        drawn = place < n
        values = self.values.new_zeros(size, self.values.shape[1])
        bias = self.bias.new_zeros(size)
        values.index_add_(0, to[drawn], self.values[place[drawn]])
        bias.index_add_(0, to[drawn], self.bias[place[drawn]])
        if self.labels is not None:
            rows, to = place[~drawn] - n, to[~drawn]
            scale = self.labels.scale[rows]
            step = max(1, BLOCK // self.values.shape[1])
            for at in range(0, len(rows), step):
                some = slice(at, at + step)
                own = scale[some, None] * self.labels.hidden[rows[some]].to(values.dtype)
                values.index_add_(0, to[some], own)
            bias.index_add_(0, to, scale)
        return values, bias


def label_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor]:
    """psi_y (B,), and the labels' weight rows (B, D) in the dtype of `hidden`."""
    rows = weight[target].to(hidden.dtype)
    psi = torch.linalg.vecdot(hidden, rows)
    return (psi if bias is None else psi.add_(bias[target].to(hidden.dtype))), rows


def class_rows(
    weight: Tensor, bias: Tensor | None, classes: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Weight rows (S, D) and biases (S,) of some classes in `dtype`.

    The bias of a class whose weights are not finite is NaN, so that rows with such a class are skipped; a bias may be
    -inf, which excludes its class.
    """
    rows = weight[classes].to(dtype)
    row_bias = None if bias is None else bias[classes].to(dtype)
    finite = rows.isfinite().all(dim=1)
    if rows.device.type != "cpu" or not bool(finite.all()):
        rows = torch.where(finite[:, None], rows, 0.0)
        row_bias = torch.where(finite, 0.0 if row_bias is None else row_bias, torch.nan).to(dtype)
    return rows, row_bias


def scores_of(hidden: Tensor, rows: Tensor, row_bias: Tensor | None) -> Tensor:
    """psi (B, S)"""
    psi = hidden @ rows.T
    return psi if row_bias is None else psi.add_(row_bias)


def objective(
    noise: Noise,
    psi: Tensor,
    psi_y: Tensor,
    own: Tensor,
    log_weight: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor],
    floor: float | None,
    over_shards: Callable[[Reduced], Reduced] = lambda sums: sums,
) -> Objective:
    """`own` (B, S) is True where a class is masked for a row (its label); `log_weight` is (S,) or (B, S). Overwrites
    `psi`. `over_shards` reduces the sums over the classes of all shards."""
    if type(noise) is Gumbel:
        grad_class, sums = reduce_softmax(psi, psi_y, own, log_weight, nodes[0][:, 0])
        return finish_softmax(grad_class, sums.ref, over_shards(sums), psi_y, nodes[0][:, 0], floor)
    grad_class, sums = reduce_noise(noise, psi, own, log_weight, nodes)
    return finish_noise(noise, grad_class, over_shards(sums), psi_y, nodes, floor)


def reduce_softmax(psi: Tensor, psi_y: Tensor, own: Tensor, log_weight: Tensor, c: Tensor) -> tuple[Tensor, Reduced]:
    """omega_k e^{psi_k - c}, and its sum."""
    terms = psi.add_(log_weight.to(psi.dtype)).masked_fill_(own, -torch.inf).sub_(c[:, None])
    top = torch.maximum(terms.amax(dim=1), psi_y - c) if terms.shape[1] else psi_y - c
    ref = torch.where(top.abs() > FAR, top, 0.0)
    grad_class = terms.sub_(ref[:, None]).exp_()
    total = _total(grad_class)
    return grad_class, Reduced(total, torch.zeros_like(total), torch.zeros_like(total), ref)


def finish_softmax(
    grad_class: Tensor, ref: Tensor, sums: Reduced, psi_y: Tensor, c: Tensor, floor: float | None
) -> Objective:
    """L = 1 - c + psi_y - e^{psi_y - c} - sum omega_k e^{psi_k - c} = 1 - c + psi_y - e^slope. `grad_class` is in units
    of e^ref.

    `floor`: the gradient is that at c clipped below at log Z~ - floor, Z~ = e^{psi_y} + sum omega_k e^{psi_k} from this
    sample, so that no row counts more than e^floor times its gradient at c = log Z~. Clipped rows are biased.
    """
    top = torch.maximum(sums.ref, psi_y - c)
    total = sums.grad_class.to(c.dtype)
    slope = top + torch.log(total * torch.exp(sums.ref - top) + torch.exp(psi_y - c - top))
    bound = 1.0 - c + psi_y - torch.exp(slope.clamp(max=LARGEST_LOG))
    raised = torch.zeros_like(c) if floor is None else (slope - floor).clamp_min(0.0)
    grad_class.mul_(torch.exp((ref - raised).clamp(max=LARGEST_LOG))[:, None])
    grad_label = 1.0 - torch.exp((psi_y - c - raised).clamp(max=LARGEST_LOG))
    gap = torch.expm1(slope.clamp(max=LARGEST_LOG)) - slope
    return Objective(bound, grad_class, grad_label, slope, torch.zeros_like(slope), raised > 0.0, gap)


def reduce_noise(
    noise: Noise, psi: Tensor, own: Tensor, log_weight: Tensor, nodes: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Reduced]:
    """omega_k sum_j weight_j (phi / Phi)(v_j - psi_k), and the three sums."""
    v, node_weight, _ = nodes
    omega = torch.exp(log_weight).to(psi.dtype)
    grad_class, value = torch.zeros_like(psi), _total(torch.zeros_like(v[:, :0]))
    bend = torch.zeros_like(value)
    for j, w in enumerate(node_weight.unbind()):
        t = v[:, j, None] - psi
        first, second = noise.dlog_cdf_and_derivative(t)
        grad_class.add_(first * w)
        value += w * _total(noise.log_cdf(t).mul_(omega).masked_fill_(own, 0.0))
        bend += w * _total(second.mul_(omega).masked_fill_(own, 0.0))
    grad_class.mul_(omega).masked_fill_(own, 0.0)
    return grad_class, Reduced(_total(grad_class), value, bend, torch.zeros_like(v[:, 0]))


def _total(terms: Tensor) -> Tensor:
    """(B,) sums over classes, in float64 where the device has it."""
    return terms.sum(dim=1, dtype=None if terms.device.type == "mps" else torch.float64)


def finish_noise(
    noise: Noise,
    grad_class: Tensor,
    sums: Reduced,
    psi_y: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor],
    floor: float | None,
) -> Objective:
    """`floor`: a row whose grad_class sums to more than e^floor (1 + |grad_label|) is scaled down."""
    v, node_weight, constant = nodes
    at_label = v - psi_y[:, None]
    grad_label = -(noise.dlog_prob(at_label) @ node_weight)
    total, value, of_classes = (x.to(grad_label.dtype) for x in (sums.grad_class, sums.value, sums.bend))
    bend = of_classes + noise.d2log_prob(at_label) @ node_weight
    bound = noise.log_prob(at_label) @ node_weight + value + constant
    floored = torch.zeros_like(grad_label, dtype=torch.bool)
    if floor is not None:
        most = torch.exp(grad_label.new_tensor(floor)) * (1.0 + grad_label.abs())
        floored = total > most
        shrink = torch.where(floored, most / total, 1.0)
        grad_class, total = grad_class.mul_(shrink[:, None]), total * shrink
    slope = total - grad_label  # with the floor, as in the weights' gradient, to which the local step is matched
    return Objective(
        bound, grad_class, grad_label, slope, bend, floored, 0.5 * slope * slope / bend.abs().clamp_min(LEAST_BEND)
    )


def gradient_of_hidden(
    grad_class: Tensor, grad_label: Tensor, rows: Tensor, label_rows: Tensor, scale: Tensor
) -> Tensor:
    """Gradient of sum_b scale_b (-L_b) by `hidden` (B, D); 0 for rows of scale 0, also if they are not finite."""
    found = (grad_class @ rows).sub_(grad_label[:, None] * label_rows).mul_(scale[:, None])
    return found.masked_fill_((scale == 0.0)[:, None], 0.0)


def gradient_of_classes(hidden: Tensor, grad_class: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of sum_b scale_b (-L_b) by the rows (S, D) and biases (S,) of the sampled classes."""
    return grad_class.T @ (hidden * scale[:, None]), grad_class.T @ scale
