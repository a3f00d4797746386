"""A head's step as custom operators, one node each for torch.compile and torch.export: no graph breaks.

    head_forward     (loss, tensors for the backward pass, the new state)     functional: nothing is mutated
    head_backward    gradients by hidden, weight and bias
    head_move        gradient by hidden; the fused optimiser updates weight and bias, which are mutated

Used in compiled code only. Operators take tensors and numbers, so a head is passed by its number in a registry; its
model, sampler and settings are constant between calls.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _step
from ._autograd import as_gradients
from ._columns import MOST_LABELS
from ._input import Rows

if TYPE_CHECKING:
    from ._state import Kept
    from .head import AugmentReduceHead

_HEADS: weakref.WeakValueDictionary[int, AugmentReduceHead] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(head: AugmentReduceHead) -> int:
    """The number of this head in the registry of the operators."""
    number = next(_NUMBERS)
    _HEADS[number] = head
    return number


def state_of(head: AugmentReduceHead) -> list[Tensor]:
    """The tensors of a head that a step changes, except its weights."""
    return [value for part in _parts(head) for value in part.buffers(recurse=False)]


def memory_of(head: AugmentReduceHead) -> list[Tensor]:
    """The state of the fused optimiser."""
    return [] if head.optimizer is None else list(head.optimizer.buffers(recurse=False))


def _parts(head: AugmentReduceHead) -> list[Kept]:
    return [head.local, head.clock, *([] if head.class_mean is None else [head.class_mean])]


class _Swapped:
    """Context: parts of a head with these tensors as buffers."""

    def __init__(self, parts: list[Kept], state: list[Tensor]) -> None:
        self.places = [(part, name) for part in parts for name in part._buffers]
        self.state = state

    def __enter__(self) -> None:
        self.kept = [part._buffers[name] for part, name in self.places]
        for (part, name), value in zip(self.places, self.state, strict=True):
            part._buffers[name] = value

    def __exit__(self, *_: Any) -> None:
        for (part, name), value in zip(self.places, self.kept, strict=True):
            part._buffers[name] = value


@torch.library.custom_op("augment_reduce::head_forward", mutates_args=())
def head_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sample_weight: Tensor | None,
    index: Tensor | None, group: Tensor | None, state: list[Tensor], memory: list[Tensor], number: int, reduction: str,
    one_label: bool, learn: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """(loss; rows, label_rows, classes, target, grad_class, grad_label, row_weight, denominator; the state after the
    step).

    `memory`, the state of the row optimiser, is used in the backward pass only.
    """
    head = _HEADS[number]
    after = [value.clone() for value in state]
    rows = Rows(hidden, target, sample_weight, index, group, reduction, one_label, target.shape)
    with _Swapped(_parts(head), after):
        step = head._step(rows, learn=learn)
        step.whole, step.skipped = True, None
        loss, saved = _step.forward(step, hidden, weight, bias)
    found = list(saved)[1:]
    found[3] = found[3].clone()  # an operator's outputs must not be views of its inputs
    return loss.clone(), [x.contiguous() for x in found], after


@head_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sample_weight: Tensor | None,
    index: Tensor | None, group: Tensor | None, state: list[Tensor], memory: list[Tensor], number: int, reduction: str,
    one_label: bool, learn: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    head = _HEADS[number]
    B, D = hidden.shape
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    S = head.sampler.n_sampled
    labels = min(B, MOST_LABELS) if head.in_batch and one_label else 0
    C = S + labels + (head.class_mean is not None)
    new = hidden.new_empty
    loss = new(B if reduction == "none" else (), dtype=dtype)
    shapes: list[tuple[Any, torch.dtype]] = [
        ((C, D), dtype), ((B, D), dtype), ((C,), torch.int64), ((B,), torch.int64), ((B, C), dtype), ((B,), dtype),
        ((B,), dtype), ((), dtype),
    ]  # fmt: skip
    return loss, [new(shape, dtype=kind) for shape, kind in shapes], [torch.empty_like(value) for value in state]


@torch.library.custom_op("augment_reduce::head_backward", mutates_args=())
def head_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, saved: list[Tensor], number: int,
    wants_weight: bool, wants_bias: bool,
) -> list[Tensor]:  # fmt: skip
    """Dense gradients by hidden and, if wanted, by weight and bias."""
    whole = _whole(hidden, saved)
    scale = _step.row_scale(whole, grad)
    of_hidden, rows = _step.gradients(None, whole, scale, scale if wants_weight or wants_bias else None)
    found = [of_hidden.to(hidden.dtype)]
    if rows is not None:
        dense = as_gradients(rows, weight, bias, [wants_weight, wants_bias], False)
        found += [x for x in dense if x is not None]
    return found


@head_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, saved: list[Tensor], number: int,
    wants_weight: bool, wants_bias: bool,
) -> list[Tensor]:  # fmt: skip
    found = [torch.empty_like(hidden)]
    if wants_weight:
        found.append(torch.empty_like(weight))
    if wants_bias and bias is not None:
        found.append(torch.empty_like(bias))
    return found


@torch.library.custom_op("augment_reduce::head_move", mutates_args=("moved", "memory", "tally"))
def head_move(
    grad: Tensor, hidden: Tensor, moved: list[Tensor], saved: list[Tensor], memory: list[Tensor], tally: Tensor,
    counter: Tensor, number: int, wants_weight: bool, wants_bias: bool,
) -> Tensor:  # fmt: skip
    """Gradient by hidden, and one step of the row optimiser on `moved`, those of weight and bias to update."""
    rule = _HEADS[number].optimizer
    assert rule is not None
    whole = _whole(hidden, saved)
    given = iter(moved)
    weight, bias = next(given) if wants_weight else None, next(given) if wants_bias else None
    with _Swapped([rule], memory):
        of_hidden = _step.move(rule, None, whole, grad, tally, (weight, bias), _HEADS[number].key, counter[0])
    return of_hidden.to(hidden.dtype)


@head_move.register_fake
def _(
    grad: Tensor, hidden: Tensor, moved: list[Tensor], saved: list[Tensor], memory: list[Tensor], tally: Tensor,
    counter: Tensor, number: int, wants_weight: bool, wants_bias: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(hidden)


def _whole(hidden: Tensor, saved: list[Tensor]) -> _step.Saved:
    whole = _step.Saved(hidden.to(saved[0].dtype), *saved)
    usable = whole.row_weight != 0
    return whole._replace(hidden=torch.where(usable[:, None], whole.hidden, 0.0))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor], list[Tensor]]) -> None:
    hidden, weight, bias, *_ = inputs
    state, ctx.memory, ctx.number = inputs[7], inputs[8], inputs[9]
    ctx.n_state = len(state)
    head = _HEADS[ctx.number]
    ctx.moves = head.optimizer is not None
    places = [name for part in _parts(head) for name in part._buffers]
    counter = output[2][places.index("counter")]
    ctx.has_bias, ctx.tally = (
        bias is not None,
        state[places.index("tally")],
    )  # not saved: both change before they are used
    ctx.save_for_backward(hidden, weight, *([] if bias is None else [bias]), counter, *output[1])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    hidden, weight, *rest = ctx.saved_tensors
    bias = rest.pop(0) if ctx.has_bias else None
    counter, *saved = rest
    wants = ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]
    if ctx.moves:
        moved = [p.detach() for p, want in zip((weight, bias), wants, strict=True) if want]
        of_hidden = head_move(grad, hidden, moved, saved, ctx.memory, ctx.tally, counter, ctx.number, *wants)
        found: list[Tensor | None] = [None, None]
    else:
        of_hidden, *given = head_backward(grad, hidden, weight, bias, saved, ctx.number, *wants)
        found = [given.pop(0) if want else None for want in wants]
    return of_hidden, *found, *[None] * 4, [None] * ctx.n_state, [None] * len(ctx.memory), *[None] * 4


head_forward.register_autograd(_backward, setup_context=_setup)
