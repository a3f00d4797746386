"""A step over ranks with late sums over classes: no collective between scores and gradients.

With c (or q) fixed, the gradient by a rank's own scores does not depend on other ranks: grad_class_k = omega_k e^{psi_k
- c}. The sums are needed to update c, for the value of the loss, and for the floor. They are reduced asynchronously
  during
the backward pass, and the next step begins by waiting for them:

    c           is updated from a step before the next one, as with sync=True
    the loss    has the gradient of this step, and the value of the previous one (the first: its own)
    the floor   is applied to each rank's part of a row's sum, so that no part counts more than e^floor

Label scores, which c and q depend on, are reduced while a rank scores its own classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..sharding.group import PendingSum
from . import _step
from ._pass import WHOLE, Pass, Scored
from ._plain import (
    LARGEST,
    Objective,
    Reduced,
    finish_noise,
    finish_softmax,
    label_scores,
    reduce_noise,
    reduce_softmax,
    scores_of,
)
from ._shards import MOST_REF, OwnClasses, Shards, in_units
from ._step import Saved, Step
from ._targets import FLOORED, ROWS, ROWS_BEFORE, SKIPPED


@dataclass
class Unsettled:
    """A step with pending sums: `sums` returns (1, B) grad_class of a softmax, (3, B) sums of other noises."""

    step: Step
    run: Pass
    one: Scored
    seen: Tensor
    denominator: Tensor
    sums: PendingSum
    ref: Tensor


def forward(shards: Shards, step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    """`_step.forward` of the rows of all ranks, with the loss value of the previous step."""
    settle(shards)
    run = Pass(step, hidden, weight, bias)
    step.placed = run.place
    one, sent, ref = _scored(shards, step, run)
    seen = one.usable & one.found.grad_class.isfinite().all(dim=1) & one.found.grad_label.isfinite()
    step.counter += 1
    step.used = one.used
    denominator = _step._denominator(step, run.row_weight.sum())
    saved = _step._saved(step, run, one, seen, denominator)
    found = one.found._replace(grad_class=one.found.grad_class[:, :0])  # the gradient may change it in place
    shards.unsettled = Unsettled(
        step, run, one._replace(found=found), seen, denominator, shards.ranks.start_sum(sent, "sums over classes"), ref
    )
    if shards.last_loss is None:  # the first step waits
        settle(shards)
    assert shards.last_loss is not None
    return shards.last_loss, saved


def _scored(shards: Shards, step: Step, run: Pass) -> tuple[Scored, Tensor, Tensor]:
    """The rows scored against this rank's classes, the sums to send, and their ref."""
    place = run.place
    assert isinstance(place, OwnClasses)
    h, y, every = run.hidden.to(run.dtype), run.label, slice(0, len(run.hidden))
    usable = (h.abs() < LARGEST).all(dim=1) & (run.row_weight != 0)
    h = torch.where(usable[:, None], h, 0.0)
    own = shards.layout.is_own(y)
    psi_y, label_rows = label_scores(h, place.weight, place.bias, torch.where(own, shards.layout.row(y), 0))
    label_rows = torch.where(own[:, None], label_rows, 0.0)
    of_labels = shards.ranks.start_sum(torch.where(own, psi_y, 0.0), "the sum of label scores")
    psi = scores_of(h, run.rows, run.row_bias)
    psi_y = of_labels.wait()
    usable &= psi_y.abs() < LARGEST  # False for NaN, too
    psi_y = torch.where(usable, psi_y, 0.0)
    predicted = step.local.predict(h, psi_y)
    used = step.local.recall(predicted, step.index)
    nodes = step.local.nodes(used, step.key, run.counter)
    log_weight, hidden_from = run.columns.of_rows(every, y)
    if shards.softmax:
        c = nodes[0][:, 0]
        grad_class, sums = reduce_softmax(psi, psi_y, hidden_from, log_weight, c)
        found = finish_softmax(grad_class, sums.ref, sums, psi_y, c, step.floor)
        sent = (sums.grad_class * torch.exp(sums.ref.double().clamp(-MOST_REF, MOST_REF)))[None]
    else:
        grad_class, sums = reduce_noise(step.noise, psi, hidden_from, log_weight, nodes)
        found = finish_noise(step.noise, grad_class, sums, psi_y, nodes, step.floor)
        sent = torch.stack([sums.grad_class, sums.value, sums.bend])
    return Scored(h, label_rows, psi_y, predicted, used, usable, found), sent, sums.ref


def settle(shards: Shards) -> None:
    """Wait for pending sums of the last step, then update its loss, local parameters and counts."""
    last, shards.unsettled = shards.unsettled, None
    if last is not None:
        with torch.no_grad():
            shards.last_loss = _settled(shards, last)


def _settled(shards: Shards, last: Unsettled) -> Tensor:
    step, run, one = last.step, last.run, last.one
    one = _whole(shards, step, run, one, last.sums.wait(), last.ref)
    seen = last.seen & _step._is_seen(one)
    counts = run.row_weight != 0
    step.tally[ROWS] += one.usable.sum()
    step.tally[FLOORED] += (last.one.found.floored & seen).sum()
    step.tally[SKIPPED] += (counts & ~seen).sum()
    report = _step._report(step, one, seen, slice(0, len(run.hidden)))
    step.local.move(report, step.tally[ROWS] > step.tally[ROWS_BEFORE])
    step.tally[ROWS_BEFORE] = step.tally[ROWS]
    _step._record_gap(step, torch.where(seen, one.found.gap, 0.0).sum(), seen.sum())
    return _step._losses(one, seen, run.row_weight).sum() / last.denominator


def _whole(shards: Shards, step: Step, run: Pass, one: Scored, sums: Tensor, ref: Tensor) -> Scored:
    """The step's bound and derivatives by its local parameters, from the sums of all ranks."""
    nodes = step.local.nodes(one.used, step.key, run.counter)
    nothing = one.found.grad_class
    if shards.softmax:
        zero = torch.zeros_like(sums[0])
        reduced = in_units(sums[0], Reduced(sums[0], zero, zero, ref))
        found: Objective = finish_softmax(nothing, ref, reduced, one.psi_y, nodes[0][:, 0], step.floor)
        return one._replace(found=found)
    grad_class, value, bend = sums
    found = finish_noise(step.noise, nothing, Reduced(grad_class, value, bend, ref), one.psi_y, nodes, step.floor)
    return one._replace(found=found)


def is_late(shards: Shards, step: Step, n_scores: int) -> bool:
    """Whether a step by exchange "hidden" may use late sums."""
    return (
        not shards.sync
        and step.learn
        and step.local.mode != "fresh"  # its q is computed from the step's own sums
        and step.reduction != "none"  # its losses are those of this step's rows
        and not step.z_loss
        and step.parts is None
        and n_scores <= WHOLE
    )
