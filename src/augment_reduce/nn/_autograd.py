"""A head's step as a node of autograd's graph, for both backends."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ._plain import RowGradient
from ._step import Step


class BoundLoss(torch.autograd.Function):
    """The loss as an autograd function. With `step.update` its backward pass updates the weights, which get no
    gradient."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, step: Step, backend: Any) -> Tensor:
        with _own_precision(hidden):
            loss, step.saved = backend.forward(
                step, hidden.detach(), weight.detach(), None if bias is None else bias.detach()
            )
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        hidden, ctx.weight, ctx.bias, ctx.step, ctx.backend = inputs
        saved = ctx.step.saved
        if not ctx.step.transformed:  # torch.func calls this once a level
            ctx.step.saved = None
        ctx.dtype, ctx.fields = hidden.dtype, type(saved)
        ctx.save_for_backward(hidden, *saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients by hidden, weight and bias, or None for those that the head updates.

        Weight and bias are updated if this pass needs their gradients: in `loss.backward()`, not in
        `torch.autograd.grad`, and not if they are frozen.
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
                if with_rows:
                    of_weight, of_bias = as_gradients(rows, weight, bias, wanted, step.sparse)
            grad_hidden = grad_hidden.to(ctx.dtype)
        if step.skipped is not None:
            step.skipped()
        if torch.is_grad_enabled():  # create_graph=True
            sources = (grad, inputs, weight, *(() if bias is None else (bias,)))
            grad_hidden = OnceDifferentiable.apply(grad_hidden, *sources)
            of_weight, of_bias = (
                None if x is None else OnceDifferentiable.apply(x, *sources) for x in (of_weight, of_bias)
            )
        return grad_hidden, of_weight, of_bias, None, None


class OnceDifferentiable(torch.autograd.Function):
    """Identity on a gradient, with its sources as inputs, so that a second derivative raises instead of being 0."""

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone() if gradient.is_sparse else gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "The gradient of this loss has no derivative of its own: its sampled classes and local parameters are "
            "held. For second derivatives (a gradient penalty, Hessian products) use an exact loss: "
            "torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, head.weight, head.bias), target)."
        )


def _is_wanted(ctx: Any, i: int) -> bool:
    """Whether the current backward pass computes the gradient of input i."""
    if not ctx.needs_input_grad[i]:
        return False
    node = ctx.next_functions[i][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad(loss, [leaf]), which must not update anything
        return bool(ctx.step.update is None)


def _own_precision(tensor: Tensor) -> Any:
    """Disable autocast: a step chooses its dtypes, and the scores that it sums in float32 must not be rounded.

    Entered only if autocast is on: entering takes the host longer than a kernel takes the GPU.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def as_gradients(
    rows: RowGradient, weight: Tensor, bias: Tensor | None, wanted: list[bool], sparse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Row gradients as tensors of the parameters' shapes, sparse by rows or dense; None if not `wanted`."""
    if sparse:
        classes, values, of_bias = rows.whole(len(weight))
        parts = ((weight, values), (bias, of_bias))
        found = [_sparse(classes, x, p) if want else None for want, (p, x) in zip(wanted, parts, strict=True)]
        return found[0], found[1]
    dense = [torch.zeros_like(p) if w and p is not None else None for w, p in zip(wanted, (weight, bias), strict=True)]
    for classes, values, of_bias in rows.merged(len(weight)):
        for out, x in zip(dense, (values, of_bias), strict=True):
            if out is not None:
                out[classes] = x.to(out.dtype)
    return dense[0], dense[1]


def _sparse(classes: Tensor, values: Tensor, parameter: Any) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):  # explicit, or torch warns
        return torch.sparse_coo_tensor(classes[None], values.to(parameter.dtype), parameter.shape)
