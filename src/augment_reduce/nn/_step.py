"""One training step of a head, from the hidden rows to the loss and back: START HERE for `augment_reduce.nn`.

    draw classes ─► psi of labels and classes ─► q(v) of each row ─► bound ─► loss       `forward`
                                  weight rows ◄─ gradient by psi ◄─ d loss               `backward`
    _draw.py          _plain.py                   _local.py          _plain.py            _rows.py

`Step` says what a step is to do. `forward` and `backward` do it in plain torch; `kernels/cuda.py` offers the same two
on a GPU; `BoundLoss` hangs either into autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..noise import Noise
from . import _hash
from ._draw import Drawn, SharedSampler
from ._local import REFINE_NODES, Local
from ._plain import (
    LARGEST,
    RowGradient,
    gradient_of_hidden,
    gradient_of_rows,
    label_scores,
    objective,
    shared_scores,
)
from ._rows import RowUpdate

# Places of `Step.tally`, (8,) int64 on the device
ROWS, FLOORED, BAD_TARGETS, BAD_TARGET, SKIPPED, ROWS_BEFORE, BAD_WEIGHTS = range(7)


@dataclass
class Step:
    """Everything but the hidden rows and the weights.

    `drawn`, `second` and `parts`, where given, stand in for the sampler's classes and for q(v) of each row.
    `tally` counts: rows seen, rows floored, targets out of range and one such target, rows that were skipped because
    they were not finite, rows seen when the local step last learned, and sample weights below 0.
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
    gives_weight_gradients: bool = True
    skipped: Callable[[], None] | None = None  # called after a step on the CPU: says how many rows were skipped
    used: Tensor | None = None  # (Q, B) parts of q(v) that the forward pass used, written by it
    moved: bool = False  # whether a backward pass through this step has moved the weights

    def draw(self, stream: int) -> Drawn:
        given = self.drawn if stream == _hash.MAIN else self.second
        if given is not None:
            return given
        assert self.sampler is not None
        return self.sampler.draw(self.key, self.counter[0], stream)

    def claim_move(self) -> None:
        """The weights move once a step: RuntimeError if they have."""
        if self.moved:
            raise RuntimeError(
                "This backward pass goes a second time through a loss whose head moves its own weights, and they moved "
                "in the first one. Add losses up before one backward(); for the gradient by hidden alone use "
                "torch.autograd.grad(loss, hidden, retain_graph=True), which moves nothing; or use optimizer=None."
            )
        self.moved = True


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
    usable = (h.abs() < LARGEST).all(dim=1) & (psi_y.abs() < LARGEST)  # False for NaN, too
    if h.device.type != "cpu" or not bool(usable.all()):
        h, psi_y = torch.where(usable[:, None], h, 0.0), torch.where(usable, psi_y, 0.0)
        label_rows = torch.where(usable[:, None], label_rows, 0.0)
    predicted = step.local.predict(h, psi_y)
    if step.parts is not None:
        used = step.parts.to(h.dtype)
    else:
        used = step.local.recall(predicted, step.index)
        if step.local.mode == "fresh":
            used = _refined(step, h, weight, bias, y, psi_y, used)
    step.used = used
    nodes = step.local.nodes(used, step.key, step.counter[0])
    drawn = step.draw(_hash.MAIN)
    psi, rows = shared_scores(h, weight, bias, drawn.classes)
    found = objective(step.noise, psi, psi_y, y[:, None] == drawn.classes, drawn.log_weight, nodes, step.floor)
    counts = row_weight != 0
    seen = counts & usable & found.bound.isfinite() & found.slope.isfinite() & found.bend.isfinite()
    if step.learn:
        seen_weight = seen.to(h.dtype)
        step.local.learn(
            h, psi_y, predicted, used, found.slope, found.bend, seen_weight, step.index, step.floor, counts & usable
        )
    step.tally[ROWS] += (counts & usable).sum()
    step.tally[ROWS_BEFORE] = step.tally[ROWS]
    step.tally[FLOORED] += (found.floored & seen).sum()
    step.tally[SKIPPED] += (counts & ~seen).sum()
    step.counter += 1
    loss = torch.where(seen, -found.bound, torch.where(counts, torch.nan, 0.0)) * row_weight
    denominator = row_weight.sum().clamp_min(torch.finfo(h.dtype).tiny) if step.reduction == "mean" else h.new_ones(())
    if step.reduction != "none":
        loss = loss.sum() / denominator
    pull, lift = found.pull, found.lift
    if h.device.type != "cpu" or not bool(seen.all()):
        pull, lift = torch.where(seen[:, None], pull, 0.0), torch.where(seen, lift, 0.0)
        row_weight = torch.where(seen, row_weight, 0.0)
    return loss, Saved(h, rows, label_rows, drawn.classes, y, pull, lift, row_weight, denominator)


@torch.no_grad()
def backward(step: Step, saved: Saved, grad: Tensor, with_rows: bool = True) -> tuple[Tensor, RowGradient | None]:
    """Gradients of the loss times `grad` by the hidden rows, and by the touched weight rows where they are wanted."""
    scale = _row_scale(saved, grad)
    return _of_hidden(saved, scale), _of_rows(saved, scale) if with_rows else None


@torch.no_grad()
def backward_and_update(step: Step, saved: Saved, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`backward`, with one step of the row optimiser on the touched rows; returns the gradient by the hidden rows.

    A row whose upstream gradient is not finite (a GradScaler that overflowed) hands it on to `hidden`, and is skipped
    where weights move. `weight` or `bias` None is not moved.
    """
    assert step.update is not None
    scale = _row_scale(saved, grad)
    usable = scale.abs() < LARGEST
    step.tally[SKIPPED] += (~usable).sum()
    if bool((usable & (saved.row_weight != 0)).any()):
        rows = _of_rows(saved, torch.where(usable, scale, 0.0))
        step.update.apply_(weight, bias, rows, step.key, step.counter[0])
    return _of_hidden(saved, scale)


def _row_scale(saved: Saved, grad: Tensor) -> Tensor:
    """(B,) what each row's loss is multiplied by; 0 for rows that do not count, whatever the upstream gradient."""
    scale = saved.row_weight * (grad / saved.denominator).to(saved.row_weight.dtype)
    return torch.where(saved.row_weight != 0, scale, 0.0)


def _of_hidden(saved: Saved, scale: Tensor) -> Tensor:
    return gradient_of_hidden(saved.pull, saved.lift, saved.rows, saved.label_rows, scale)


def _of_rows(saved: Saved, scale: Tensor) -> RowGradient:
    found = gradient_of_rows(saved.hidden, saved.classes, saved.target, saved.pull, saved.lift, scale)
    counts = saved.row_weight != 0
    if saved.hidden.device.type == "cpu" and bool(counts.all()):
        return found
    kept = torch.cat([torch.ones_like(saved.classes, dtype=torch.bool), counts])  # the others touch nothing
    return RowGradient(*(x[kept] for x in found))


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
        step.tally[BAD_TARGETS] += bad.sum()
        lowest = torch.iinfo(torch.int64).min
        largest_bad = torch.cat([torch.where(bad, target, lowest), target.new_full((1,), lowest)]).amax()
        step.tally[BAD_TARGET] = torch.where(bad.any(), largest_bad, step.tally[BAD_TARGET])
    counts = counts & ~bad
    if step.sample_weight is None:
        return torch.where(counts, target, 0), counts.to(dtype)
    valid = is_weight(step.sample_weight)
    step.tally[BAD_WEIGHTS] += (counts & ~valid).sum()
    row_weight = torch.where(counts & valid, step.sample_weight.to(dtype), 0.0)
    return torch.where(counts, target, 0), row_weight


def is_weight(sample_weight: Tensor) -> Tensor:
    """Where a sample weight is one: not negative, and of a size that can be summed."""
    return (sample_weight >= 0.0) & (sample_weight < LARGEST)


def out_of_range(n_classes: int, count: int, example: int, ignore_index: int, row: int | None = None) -> str:
    where = "" if row is None else f"; first at row {row}"
    return (
        f"Expected targets in [0, n_classes={n_classes}) or ignore_index={ignore_index}, but {count} are outside{where}"
        f": target={example}. Targets are 0-based class numbers."
    )


class BoundLoss(torch.autograd.Function):
    """The loss as a node of the graph. With `step.update` the weights move in its backward pass and get no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, step: Step, backend: Any) -> Tensor:
        with _own_precision(hidden):
            loss, saved = backend.forward(
                step, hidden.detach(), weight.detach(), None if bias is None else bias.detach()
            )
        ctx.step, ctx.backend, ctx.weight, ctx.bias, ctx.dtype = step, backend, weight, bias, hidden.dtype
        ctx.fields = type(saved)
        ctx.save_for_backward(hidden, *saved)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients by hidden, weight and bias, or None where the head moves these itself.

        Weight and bias move if this pass asks for their gradients: `loss.backward()` does, `torch.autograd.grad` does
        not, whatever it asks for, and neither does any pass once they are frozen.
        """
        step, weight, bias = ctx.step, ctx.weight, ctx.bias
        inputs, *rest = ctx.saved_tensors  # read once: activation checkpointing frees them then
        saved = ctx.fields(*rest)
        wanted = [p is not None and p.requires_grad and _is_wanted(ctx, i) for i, p in ((1, weight), (2, bias))]
        of_weight = of_bias = None
        with torch.no_grad(), _own_precision(grad):
            if step.update is not None and any(wanted):
                step.claim_move()
                moved = [p.detach() if want else None for p, want in zip((weight, bias), wanted, strict=True)]
                grad_hidden = ctx.backend.backward_and_update(step, saved, grad, *moved)
            else:
                with_rows = step.gives_weight_gradients and any(wanted)
                grad_hidden, rows = ctx.backend.backward(step, saved, grad, with_rows)
                if with_rows and wanted[0]:
                    of_weight = _as_gradient(rows.classes, rows.values, weight, step.sparse)
                if with_rows and wanted[1]:
                    of_bias = _as_gradient(rows.classes, rows.bias, bias, step.sparse)
            grad_hidden = grad_hidden.to(ctx.dtype)
        if step.skipped is not None:
            step.skipped()
        if torch.is_grad_enabled():  # create_graph=True
            sources = (grad, inputs, weight, *(() if bias is None else (bias,)))
            grad_hidden = _OnceDifferentiable.apply(grad_hidden, *sources)
            of_weight, of_bias = (
                None if x is None else _OnceDifferentiable.apply(x, *sources) for x in (of_weight, of_bias)
            )
        return grad_hidden, of_weight, of_bias, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient as it is, made to depend on its sources; asked for the derivative, it raises in place of giving 0."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone() if gradient.is_sparse else gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "The gradient of this loss has no derivative of its own: its sampled classes and local parameters are "
            "held. For second derivatives (a gradient penalty, Hessian products) use an exact loss: "
            "torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, head.weight, head.bias), target)."
        )


def _is_wanted(ctx: Any, i: int) -> bool:
    """Whether the backward pass under way computes the gradient of input i."""
    if not ctx.needs_input_grad[i]:
        return False
    node = ctx.next_functions[i][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad(loss, [leaf]), which asks for a gradient and may not move anything
        return bool(ctx.step.update is None)


def _own_precision(tensor: Tensor) -> Any:
    """A step decides on its own dtypes: autocast around it must not round the scores it sums in float32.

    Asked for only where it is on: entering it takes the host longer than a kernel takes the GPU.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _as_gradient(classes: Tensor, values: Tensor, parameter: Tensor, sparse: bool) -> Tensor:
    """Row gradients as a tensor of the parameter's shape: sparse by rows, or dense."""
    values = values.to(parameter.dtype)
    if sparse:
        with torch.sparse.check_sparse_tensor_invariants(False):  # said aloud, or torch warns
            return torch.sparse_coo_tensor(classes[None], values, parameter.shape)
    return torch.zeros_like(parameter).index_add_(0, classes, values)
