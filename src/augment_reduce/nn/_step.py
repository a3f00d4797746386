"""One training step of a head, from the hidden rows to the loss and back: START HERE for `augment_reduce.nn`.

    draw classes ─► psi of labels and classes ─► q(v) of each row ─► bound ─► loss       `forward`
                                  weight rows ◄─ gradient by psi ◄─ d loss               `backward`
    _draw.py          _plain.py                   _local.py          _plain.py            _rows.py

`Step` says what a step is to do. `forward` and `backward` do it in plain torch; `kernels/cuda.py` offers the same two
on a GPU; `BoundLoss` hangs either into autograd.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..noise import Noise
from . import _hash
from ._draw import Drawn, SharedSampler
from ._local import REFINE_NODES, Local
from ._plain import RowGradient, gradients, label_scores, objective, shared_scores
from ._rows import RowUpdate


@dataclass
class Step:
    """Everything but the hidden rows and the weights.

    `drawn`, `second` and `parts`, where given, stand in for the sampler's classes and the local prediction.
    `tally` (4,) int64 on the device counts: rows seen, rows floored, targets out of range, and one such target.
    """

    noise: Noise
    target: Tensor  # (B,) int64, as the user gave it
    sampler: SharedSampler | None
    local: Local
    key: int
    counter: Tensor  # (1,) int64
    tally: Tensor
    sample_weight: Tensor | None = None
    index: Tensor | None = None
    drawn: Drawn | None = None
    second: Drawn | None = None
    parts: Tensor | None = None
    floor: float | None = 1.0
    ignore_index: int = -100
    reduction: str = "mean"
    learn: bool = False
    sparse: bool = True
    update: RowUpdate | None = None

    def draw(self, stream: int) -> Drawn:
        given = self.drawn if stream == _hash.MAIN else self.second
        if given is not None:
            return given
        assert self.sampler is not None
        return self.sampler.draw(self.key, self.counter[0], stream)


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass: the loss is sum_b weight_b loss_b / denominator."""

    hidden: Tensor
    rows: Tensor
    label_rows: Tensor
    classes: Tensor
    target: Tensor
    pull: Tensor
    lift: Tensor
    row_weight: Tensor
    denominator: Tensor


@torch.no_grad()
def forward(step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
    """The loss, and what the backward pass needs. Also the local step, and one tick of the counter."""
    h = hidden.to(torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32))
    y, row_weight = _labels_and_weights(step, len(weight), h.dtype)
    psi_y, label_rows = label_scores(h, weight, bias, y)
    predicted = step.local.predict(h, psi_y) if step.parts is None else step.parts.to(h.dtype)
    used = step.local.recall(predicted, step.index)
    if step.parts is None and step.local.mode == "fresh":
        used = _refined(step, h, weight, bias, y, psi_y, used)
    nodes = step.local.nodes(used, step.key, step.counter[0])
    drawn = step.draw(_hash.MAIN)
    psi, rows = shared_scores(h, weight, bias, drawn.classes)
    found = objective(step.noise, psi, psi_y, y[:, None] == drawn.classes, drawn.log_weight, nodes, step.floor)
    seen = (row_weight != 0).to(h.dtype)
    if step.learn:
        step.local.learn(h, psi_y, predicted, used, found.slope, found.bend, seen, step.index, step.floor)
    step.tally[0] += seen.sum().to(torch.int64)
    step.tally[1] += (found.floored & (seen > 0)).sum()
    step.counter += 1
    loss = torch.where(seen > 0, -found.bound, 0.0) * row_weight
    denominator = row_weight.sum().clamp_min(torch.finfo(h.dtype).tiny) if step.reduction == "mean" else h.new_ones(())
    if step.reduction != "none":
        loss = loss.sum() / denominator
    pull = torch.where(seen[:, None] > 0, found.pull, 0.0) if step.target is not y else found.pull
    return loss, Saved(h, rows, label_rows, drawn.classes, y, pull, found.lift, row_weight, denominator)


@torch.no_grad()
def backward(step: Step, saved: Saved, grad: Tensor) -> tuple[Tensor, RowGradient]:
    """Gradients of the loss times `grad` by the hidden rows, and by the touched weight rows."""
    scale = saved.row_weight * (grad / saved.denominator).to(saved.row_weight.dtype)
    lift = torch.where(saved.row_weight != 0, saved.lift, 0.0)
    grad_hidden, by_row = gradients(
        saved.hidden, saved.rows, saved.label_rows, saved.classes, saved.target, saved.pull, lift, scale
    )
    if step.target is not saved.target:  # rows that do not count touch nothing
        kept = torch.cat([torch.ones_like(saved.classes, dtype=torch.bool), saved.row_weight != 0])
        by_row = RowGradient(*(x[kept] for x in by_row))
    return grad_hidden, by_row


def _refined(
    step: Step, h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, psi_y: Tensor, used: Tensor
) -> Tensor:
    """The second sample's say on q(v): it never meets the first, so the bound's estimate stays unbiased."""
    second = step.draw(_hash.SECOND)
    psi, _ = shared_scores(h, weight, bias, second.classes)
    nodes = step.local.nodes(used, step.key, step.counter[0], max(REFINE_NODES, step.local.n_nodes))
    found = objective(step.noise, psi, psi_y, y[:, None] == second.classes, second.log_weight, nodes, None)
    return step.local.refine(used, found.slope, found.bend)


def _labels_and_weights(step: Step, n_classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(labels, weights) (B,): a row that does not count has weight 0, and label 0 instead of one out of range."""
    target = step.target
    counts = target != step.ignore_index
    bad = counts & ((target < 0) | (target >= n_classes))
    if target.device.type == "cpu":  # nothing to wait for
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(out_of_range(n_classes, int(bad.sum()), int(target[row]), step.ignore_index, row))
        if bool(counts.all()) and step.sample_weight is None:
            return target, torch.ones(len(target), dtype=dtype)
    else:
        step.tally[2] += bad.sum()
        step.tally[3] = torch.where(
            bad.any(), torch.where(bad, target, torch.iinfo(torch.int64).min).amax(), step.tally[3]
        )
    counts = counts & ~bad
    row_weight = counts.to(dtype) if step.sample_weight is None else step.sample_weight.to(dtype) * counts
    return torch.where(counts, target, 0), row_weight


def out_of_range(n_classes: int, count: int, example: int, ignore_index: int, row: int | None = None) -> str:
    where = "" if row is None else f"; first at row {row}"
    return (
        f"Expected targets in [0, n_classes={n_classes}) or ignore_index={ignore_index}, but {count} are outside{where}"
        f": target={example}. Targets are 0-based class numbers."
    )


class BoundLoss(torch.autograd.Function):
    """The loss as a node of the graph. With `step.update` the weights move in its backward pass and get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor | None, step: Step, backend: Any
    ) -> Tensor:
        with _own_precision(hidden):
            loss, saved = backend.forward(
                step, hidden.detach(), weight.detach(), None if bias is None else bias.detach()
            )
        ctx.step, ctx.backend, ctx.weight, ctx.bias, ctx.dtype = step, backend, weight, bias, hidden.dtype
        ctx.fields = type(saved)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, weight, bias = ctx.step, ctx.weight, ctx.bias
        saved = ctx.fields(*ctx.saved_tensors)
        with _own_precision(grad):
            if step.update is not None:
                grad_hidden = ctx.backend.backward_and_update(step, saved, grad, weight, bias)
                return grad_hidden.to(ctx.dtype), None, None, None, None, None
            grad_hidden, rows = ctx.backend.backward(step, saved, grad)
        of_weight = _as_gradient(rows.classes, rows.values, weight, step.sparse) if ctx.needs_input_grad[1] else None
        of_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = _as_gradient(rows.classes, rows.bias, bias, step.sparse)
        return grad_hidden.to(ctx.dtype), of_weight, of_bias, None, None, None


def _own_precision(tensor: Tensor) -> Any:
    """A step decides on its own dtypes: autocast around it must not round the scores it sums in float32.

    Asked for only where it is on: entering it takes the host longer than a kernel takes the GPU.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def backward_and_update(step: Step, saved: Saved, grad: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`backward`, with one step of the row optimiser on the touched rows; returns the gradient by the hidden rows."""
    assert step.update is not None
    grad_hidden, rows = backward(step, saved, grad)
    step.update.apply_(weight, bias, rows, step.key, step.counter[0])
    return grad_hidden


def _as_gradient(classes: Tensor, values: Tensor, parameter: Tensor, sparse: bool) -> Tensor:
    """Row gradients as a tensor of the parameter's shape: sparse by rows, or dense."""
    values = values.to(parameter.dtype)
    if sparse:
        with torch.sparse.check_sparse_tensor_invariants(False):  # said aloud, or torch warns
            return torch.sparse_coo_tensor(classes[None], values, parameter.shape)
    return torch.zeros_like(parameter).index_add_(0, classes, values)
