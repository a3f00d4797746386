"""One training step of a head, from the hidden rows to the loss and back: START HERE for `augment_reduce.nn`.

    draw classes ─► psi of labels and classes ─► q(v) of each row ─► bound ─► loss       `forward`
                                  weight rows ◄─ gradient by psi ◄─ d loss               `backward`
    _draw.py          _plain.py                   _local.py          _plain.py            _rows.py

`Step` has the arguments of a step. `forward` and `backward` run it in plain torch, `nn/triton/step.py` on a GPU;
`_autograd.BoundLoss` wraps either as an autograd function. If the (B, C) scores are large, rows are processed in
chunks, and the backward pass computes the scores again instead of storing them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model.noise import Noise
from . import _hash
from ._columns import UNUSED
from ._draw import Drawn, SharedSampler
from ._local import Local, Report
from ._pass import Pass, Rescored, Scored
from ._place import EveryClass
from ._plain import (
    LARGEST,
    LabelPart,
    RowGradient,
    gradient_of_classes,
    gradient_of_hidden,
)
from ._rows import RowUpdate
from ._smoothing import ClassMean
from ._targets import FLOORED, ROWS, ROWS_BEFORE, SKIPPED

GAP_RATE = 0.01  # of the running mean of the gap


@dataclass
class Step:
    """All inputs of a step except the hidden rows and the weights.

    `drawn`, `second` and `parts`, if given, replace the sampler's classes and q(v) of each row. `tally` counts: rows
    trained on, rows clipped by the floor, targets out of range and one such target, rows skipped because they were not
    finite, rows at the last update of the local step, and sample weights below 0. `gauge` (4,) has the last minibatch's
    mean gap and its running mean.
    """

    noise: Noise
    target: Tensor  # (B,) int64, as passed by the user
    sampler: SharedSampler | None
    local: Local
    key: int
    counter: Tensor  # (1,) int64
    tally: Tensor
    gauge: Tensor | None = None
    sample_weight: Tensor | None = None
    index: Tensor | None = None
    group: Tensor | None = None
    in_batch: bool = False
    class_mean: ClassMean | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    drawn: Drawn | None = None
    second: Drawn | None = None
    parts: Tensor | None = None
    floor: float | None = 1.0
    ignore_index: int = -100
    reduction: str = "mean"
    learn: bool = False
    sparse: bool = True
    update: RowUpdate | None = None
    gives_weight_gradients: bool = True
    skipped: Callable[[], None] | None = None  # called after a step on the CPU: warns of skipped rows
    used: Tensor | None = None  # (Q, B) parts of q(v), set by the forward pass
    rescored: Rescored | None = None  # inputs of the backward pass for chunks of rows
    saved: Any = None  # set by the forward pass for the backward pass
    transformed: bool = False  # whether inside a transform of torch.func
    whole: bool = False  # keep all scores for the backward pass, regardless of their number
    moved: bool = False  # whether a backward pass of this step has updated the weights
    place: Callable[[Tensor, Tensor | None], EveryClass] = EveryClass  # placement of the classes, given weight and bias
    placed: EveryClass | None = None  # the placement of the forward pass

    def draw(self, stream: int) -> Drawn:
        given = self.drawn if stream == _hash.MAIN else self.second
        if given is not None:
            return given
        assert self.sampler is not None
        return self.sampler.draw(self.key, self.counter[0], stream)

    def claim_move(self) -> None:
        """RuntimeError if this step has updated the weights already."""
        if self.moved:
            raise RuntimeError(
                "This backward pass goes a second time through a loss whose head moves its own weights, and they moved "
                "in the first one. Add losses up before one backward(); for the gradient by hidden alone use "
                "torch.autograd.grad(loss, hidden, retain_graph=True), which moves nothing; or use optimizer=None."
            )
        self.moved = True


class Saved(NamedTuple):
    """Tensors for the backward pass: the loss is sum_b weight_b loss_b / denominator.

    `grad_class` (B, C), `grad_label` (B,) and `label_rows` (B, D) are empty with chunks; they are then recomputed from
    `used` (Q, B).
    """

    hidden: Tensor
    rows: Tensor
    label_rows: Tensor
    classes: Tensor
    target: Tensor
    grad_class: Tensor
    grad_label: Tensor
    row_weight: Tensor
    denominator: Tensor


@torch.no_grad()
def forward(step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    """The loss, and tensors for the backward pass. Also updates the local parameters and the counter."""
    run = Pass(step, hidden, weight, bias)
    step.placed = run.place
    losses, used, seen, gaps = [], [], [], []
    report: Report | None = None
    n_usable = n_floored = run.row_weight.new_zeros((), dtype=torch.int64)
    for part in run.parts():
        one = run.scored(part)
        ok = _is_seen(one)
        losses.append(_losses(one, ok, run.row_weight[part]))
        used.append(one.used)
        seen.append(ok)
        gaps.append(torch.where(ok, one.found.gap, 0.0).sum())
        if step.learn:
            found = _report(step, one, ok, part)
            report = found if report is None else report.plus(found)
        n_usable = n_usable + one.usable.sum()
        n_floored = n_floored + (one.found.floored & ok).sum()
    all_seen, counts = torch.cat(seen), run.row_weight != 0
    n_usable, n_floored, n_skipped, n_seen, gap, denominator, loss = run.place.totals(
        n_usable, n_floored, (counts & ~all_seen).sum(), all_seen.sum(), torch.stack(gaps).sum(),
        run.row_weight.sum(), torch.cat(losses).sum(),
    )  # fmt: skip
    step.tally[ROWS] += n_usable
    step.tally[FLOORED] += n_floored
    step.tally[SKIPPED] += n_skipped
    if report is not None:
        step.local.move(run.place.report(report), step.tally[ROWS] > step.tally[ROWS_BEFORE])
        if step.class_mean is not None:
            n = len(run.drawn.classes)
            row_bias = None if run.row_bias is None else run.row_bias[:n]
            step.class_mean.learn(run.rows[:n], row_bias, run.drawn.log_weight)
    step.tally[ROWS_BEFORE] = step.tally[ROWS]
    step.counter += 1
    step.used = torch.cat(used, dim=1)
    _record_gap(step, gap, n_seen)
    denominator = _denominator(step, denominator)
    loss = torch.cat(losses) if step.reduction == "none" else loss / denominator
    return loss, _saved(step, run, one, all_seen, denominator)


def _is_seen(one: Scored) -> Tensor:
    found = one.found
    return one.usable & found.bound.isfinite() & found.slope.isfinite() & found.bend.isfinite()


def _losses(one: Scored, seen: Tensor, row_weight: Tensor) -> Tensor:
    return torch.where(seen, -one.found.bound, torch.where(row_weight != 0, torch.nan, 0.0)) * row_weight


def _report(step: Step, one: Scored, seen: Tensor, part: slice) -> Report:
    found, local = one.found, step.local
    report = local.report(one.hidden, one.psi_y, one.predicted, one.used, found.slope, found.bend, seen, step.floor)
    if local.mode == "persistent" and step.index is not None:
        local.remember(step.index[part], one.used, found.slope, found.bend, seen)
    return report


def _record_gap(step: Step, total: Tensor, n: Tensor) -> None:
    """gauge = (mean gap of this minibatch, its running mean, number of minibatches)."""
    if step.gauge is None:
        return
    gap = (total / n.clamp_min(1)).to(step.gauge.dtype)
    step.gauge[2] += 1.0
    step.gauge[0] = gap
    step.gauge[1] += (gap - step.gauge[1]) * torch.clamp(1.0 / step.gauge[2], min=GAP_RATE)


def _denominator(step: Step, total_weight: Tensor) -> Tensor:
    if step.reduction != "mean":
        return torch.ones_like(total_weight)
    return total_weight.clamp_min(torch.finfo(total_weight.dtype).tiny)


def _saved(step: Step, run: Pass, last: Scored, seen: Tensor, denominator: Tensor) -> Saved:
    row_weight = torch.where(seen, run.row_weight, 0.0)
    h, label_rows, grad_class, grad_label = last.hidden, last.label_rows, last.found.grad_class, last.found.grad_label
    if len(h) != len(run.hidden):
        step.rescored = Rescored(run, seen)
        h, grad_class, grad_label, label_rows = run.hidden, grad_class[:0], grad_label[:0], label_rows[:0]
    elif h.device.type != "cpu" or not bool(seen.all()):
        grad_class, grad_label = torch.where(seen[:, None], grad_class, 0.0), torch.where(seen, grad_label, 0.0)
    columns = run.columns
    classes, nobody = run.place.rows(columns.classes), run.place.nobody
    if columns.kind is not None:
        classes = torch.where(columns.kind == UNUSED, nobody, classes)  # without gradient
    if step.class_mean is not None:
        classes = torch.cat([classes, classes.new_full((1,), nobody)])
    return Saved(
        h, run.rows, label_rows, classes, run.place.rows(run.label), grad_class, grad_label, row_weight, denominator
    )


@torch.no_grad()
def backward(step: Step, saved: Saved, grad: Tensor, with_rows: bool = True) -> tuple[Tensor, RowGradient | None]:
    """Gradients of the loss times `grad` by the hidden rows and, if `with_rows`, by the touched weight rows."""
    scale = row_scale(saved, grad)
    return gradients(step, saved, scale, scale if with_rows else None)


@torch.no_grad()
def backward_and_update(step: Step, saved: Saved, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`backward`, with one step of the row optimiser on the touched rows; returns the gradient by the hidden rows.

    A row whose upstream gradient is not finite (a GradScaler that overflowed) passes it to `hidden`, and is skipped in
    the update of the weights. `weight` or `bias` None is not updated.
    """
    assert step.update is not None
    return move(step.update, step, saved, grad, step.tally, (weight, bias), step.key, step.counter[0])


def move(
    rule: RowUpdate, step: Step | None, saved: Saved, grad: Tensor, tally: Tensor,
    parameters: tuple[Tensor | None, Tensor | None], key: int, counter: Tensor,
) -> Tensor:  # fmt: skip
    """See `backward_and_update`."""
    scale = row_scale(saved, grad)
    usable = scale.abs() < LARGEST
    place = None if step is None else step.placed
    counts = (~usable).sum(), (usable & (saved.row_weight != 0)).sum()
    n_skipped, n_moving = counts if place is None else place.totals(*counts)
    tally[SKIPPED] += n_skipped
    of_hidden, rows = gradients(step, saved, scale, torch.where(usable, scale, 0.0) if bool(n_moving > 0) else None)
    if rows is not None:
        rule.take(*parameters, rows, key, counter)
    return of_hidden


def row_scale(saved: Saved, grad: Tensor) -> Tensor:
    """(B,) the factor of each row's loss; 0 for rows that do not count, for any upstream gradient."""
    scale = saved.row_weight * (grad / saved.denominator).to(saved.row_weight.dtype)
    return torch.where(saved.row_weight != 0, scale, 0.0)


def gradients(
    step: Step | None, saved: Saved, scale: Tensor, of_rows: Tensor | None
) -> tuple[Tensor, RowGradient | None]:
    """Gradients by the hidden rows, each loss times `scale`, and by the weight rows, times `of_rows` unless None."""
    of_hidden, rows = _gradients_here(step, saved, scale, of_rows)
    if rows is not None and step is not None and step.placed is not None:
        rows = step.placed.home(rows)
    return of_hidden, rows


def _gradients_here(
    step: Step | None, saved: Saved, scale: Tensor, of_rows: Tensor | None
) -> tuple[Tensor, RowGradient | None]:
    if step is None or step.rescored is None:
        of_hidden = gradient_of_hidden(saved.grad_class, saved.grad_label, saved.rows, saved.label_rows, scale)
        if of_rows is None:
            return of_hidden, None
        by_class, of_bias = gradient_of_classes(saved.hidden, saved.grad_class, of_rows)
        return of_hidden, _row_gradient(saved, by_class, of_bias, saved.grad_label * of_rows)
    return _gradients_again(step, saved, scale, of_rows)


def _gradients_again(
    step: Step, saved: Saved, scale: Tensor, of_rows: Tensor | None
) -> tuple[Tensor, RowGradient | None]:
    """The same for chunks of rows, each scored again with the q of the forward pass."""
    assert step.rescored is not None
    assert step.used is not None
    run, seen = step.rescored
    of_hidden = torch.empty(saved.hidden.shape, dtype=run.dtype, device=saved.hidden.device)
    by_class, of_bias = torch.zeros_like(saved.rows), saved.rows.new_zeros(len(saved.rows))
    at_label = torch.zeros_like(scale)
    for part in run.parts():
        one = run.scored(part, step.used[:, part])
        grad_class = torch.where(seen[part, None], one.found.grad_class, 0.0)
        grad_label = torch.where(seen[part], one.found.grad_label, 0.0)
        of_hidden[part] = gradient_of_hidden(grad_class, grad_label, run.rows, one.label_rows, scale[part])
        if of_rows is not None:
            by_class.addmm_(grad_class.T, one.hidden * of_rows[part, None])
            of_bias.addmv_(grad_class.T, of_rows[part])
            at_label[part] = grad_label * of_rows[part]
    return of_hidden, None if of_rows is None else _row_gradient(saved, by_class, of_bias, at_label)


def _row_gradient(saved: Saved, by_class: Tensor, of_bias: Tensor, at_label: Tensor) -> RowGradient:
    """Rows that do not count have no gradient, also if they are not finite."""
    counts = saved.row_weight != 0
    hidden, target = saved.hidden, saved.target
    if hidden.device.type != "cpu" or not bool(counts.all()):
        target, at_label, hidden = target[counts], at_label[counts], hidden[counts]
    return RowGradient(saved.classes, by_class, of_bias, LabelPart(target, -at_label, hidden))
