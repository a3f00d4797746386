"""A step of a sharded head: exchange of rows, `_step.py`, exchange of gradients.

With reduction "mean" or "sum" the loss is that of the rows of all ranks, the same number on every rank, and `hidden`
gets the gradient of that loss. The gradients of a network before the head therefore have to be summed over ranks.
Wrappers that average them (DDP, FSDP2) divide by the number of ranks: `trunk_gradients="mean"` multiplies by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..sharding import RankError
from . import _late, _step
from ._columns import MOST_LABELS
from ._exact import ExactLoss, Exactly
from ._input import Rows
from ._plain import RowGradient
from ._shards import GatheredRows, OwnClasses, Shards
from ._step import Saved, Step

if TYPE_CHECKING:
    from .head import AugmentReduceHead

FLAGS = (
    "train()",
    "gradients",
    "sample_weight",
    "index",
    "group",
)  # equal on all ranks in a step


@dataclass
class Shared:
    """`rows`: this rank's rows, set by the checks; `sizes`: the numbers of rows of all ranks."""

    rows: Rows | None = None
    sizes: list[int] | None = None


@contextlib.contextmanager
def sharing_errors(head: AugmentReduceHead) -> Iterator[Shared]:
    """Context of the checks of a rank's rows: if they fail, all ranks raise. Afterwards `sizes` is set."""
    shared, error = Shared(), None
    if head.shards is None:
        yield shared
        return
    try:
        yield shared
    except Exception as found:
        error = found
    told = head.shards.ranks.raise_together(error, "this step of a head", _number_of(head, shared.rows))
    ways = [number % (1 << len(FLAGS)) for number in told]
    for bit, name in enumerate(FLAGS):
        have = [r for r, way in enumerate(ways) if way >> bit & 1]
        if 0 < len(have) < len(told):
            raise RankError(f"Expected {name} on all ranks of this step or on none, found it on ranks {have} only.")
    shared.sizes = [number >> len(FLAGS) for number in told]


def _number_of(head: AugmentReduceHead, rows: Rows | None) -> int:
    """The number of rows and the flags of a rank in one number."""
    if rows is None:
        return 0
    given = (rows.sample_weight, rows.index, rows.group)
    flags = [head.training, torch.is_grad_enabled(), *(x is not None for x in given)]
    return len(rows.target) << len(FLAGS) | sum(int(flag) << bit for bit, flag in enumerate(flags))


class ShardedStep:
    """The backend of one step (`_backend.py`); `sizes` are the numbers of rows of all ranks."""

    def __init__(self, shards: Shards, sizes: list[int]) -> None:
        self.shards, self.ranks, self.sizes = shards, shards.ranks, sizes
        self.trunk_factor = shards.trunk_factor()
        self.own = slice(sum(sizes[: self.ranks.rank]), sum(sizes[: self.ranks.rank + 1]))

    def forward(self, step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
        assert step.sampler is not None
        if self._exchange(step) == "rows":
            step.place = partial(GatheredRows, self.shards, self.sizes)
            return _step.forward(step, hidden, weight, bias)
        step.place = partial(OwnClasses, self.shards)
        self._gather(step)
        every = self.ranks.gather_rows(hidden, self.sizes, "hidden rows")
        if _late.is_late(self.shards, step, len(every) * self._n_columns(step)):
            return _late.forward(self.shards, step, every, weight, bias)
        loss, saved = _step.forward(step, every, weight, bias)
        return loss[self.own] if step.reduction == "none" else loss, saved

    def _exchange(self, step: Step) -> str:
        """Persistent q needs "hidden" (a row may be on another rank at its next visit), label smoothing needs
        "rows"."""
        if step.local.mode == "persistent":
            return "hidden"
        if step.label_smoothing:
            return "rows"
        return self.shards.exchange_for(self.sizes, self._n_columns(step))

    def _n_columns(self, step: Step) -> int:
        assert step.sampler is not None
        return step.sampler.n_sampled + (min(sum(self.sizes), MOST_LABELS) if step.in_batch else 0)

    def _gather(self, step: Step) -> None:
        """Gather targets, weights and the other arguments of the rows of all ranks."""
        given = [x for x in (step.target, step.index, step.group) if x is not None]
        every = iter(self.ranks.gather_rows(torch.stack(given, dim=1), self.sizes, "targets").T.contiguous())
        step.target = next(every)
        step.index = None if step.index is None else next(every)
        step.group = None if step.group is None else next(every)
        if step.sample_weight is not None:
            step.sample_weight = self.ranks.gather_rows(step.sample_weight, self.sizes, "sample weights")

    def backward(
        self, step: Step, saved: Saved, grad: Tensor, with_rows: bool = True
    ) -> tuple[Tensor, RowGradient | None]:
        of_hidden, rows = _step.backward(step, saved, self._upstream(step, grad), with_rows)
        return self._of_own_hidden(step, of_hidden), rows

    def backward_and_update(
        self, step: Step, saved: Saved, grad: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        of_hidden = _step.backward_and_update(step, saved, self._upstream(step, grad), weight, bias)
        return self._of_own_hidden(step, of_hidden)

    def _upstream(self, step: Step, grad: Tensor) -> Tensor:
        """The gradient by each row's loss, for the rows of all ranks."""
        if isinstance(step.placed, GatheredRows):
            return grad
        own = grad.expand(self.sizes[self.ranks.rank])
        return self.ranks.gather_rows(own, self.sizes, "gradients by the loss")

    def _of_own_hidden(self, step: Step, of_hidden: Tensor) -> Tensor:
        if not isinstance(step.placed, GatheredRows):
            of_hidden = self.ranks.scatter_sum(of_hidden, self.sizes, "gradients by hidden rows")
        return of_hidden * self.trunk_factor


def of_all_ranks(shards: Shards, answer: Callable[..., Any], *rows: Tensor) -> Any:
    """The own rows' part of `answer` for the rows of all ranks; a tensor, or a tuple of them."""
    ranks, n_rows = shards.ranks, len(rows[0])
    sizes = ranks.raise_together(None, "an answer of a head", n_rows)
    found = answer(*(ranks.gather_rows(x, sizes, "rows to answer for") for x in rows))
    first = sum(sizes[: ranks.rank])
    if isinstance(found, Tensor):
        return found[first : first + n_rows]
    return tuple(x[first : first + n_rows] for x in found)


def sharded_exact_loss(
    shards: Shards, sizes: list[int], hidden: Tensor, weight: Tensor, bias: Tensor | None, what: Exactly
) -> Tensor:
    """The exact loss of the rows of all ranks; with reduction "none" of the own rows."""
    refuse_compilers(shards)
    ranks = shards.ranks
    what = what._replace(
        label=ranks.gather_rows(what.label, sizes, "targets"),
        row_weight=ranks.gather_rows(what.row_weight, sizes, "sample weights"),
        place=partial(OwnClasses, shards),
    )
    loss = ExactLoss.apply(_GatheredRows.apply(hidden, shards, sizes), weight, bias, what)
    if what.reduction != "none":
        return loss
    first = sum(sizes[: ranks.rank])
    return _OwnRows.apply(loss, shards, sizes, first)


class _GatheredRows(torch.autograd.Function):
    """Gathers the hidden rows of all ranks; the backward pass sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: Shards, sizes: list[int]) -> Tensor:
        ctx.shards, ctx.sizes, ctx.trunk_factor = shards, sizes, shards.trunk_factor()
        return shards.ranks.gather_rows(hidden.detach(), sizes, "hidden rows")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        own = ctx.shards.ranks.scatter_sum(grad, ctx.sizes, "gradients by hidden rows")
        return own * ctx.trunk_factor, None, None


class _OwnRows(torch.autograd.Function):
    """Selects the own rows' losses; the backward pass gathers the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shards: Shards, sizes: list[int], first: int) -> Tensor:
        ctx.shards, ctx.sizes = shards, sizes
        return loss[first : first + sizes[shards.ranks.rank]].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.shards.ranks.gather_rows(grad, ctx.sizes, "gradients by the loss"), None, None, None


def refuse_compilers(shards: Shards | None) -> None:
    if shards is not None and torch.compiler.is_compiling():
        raise RuntimeError(
            "A head whose classes are on several ranks cannot be compiled: its exchanges are not in the graph. Compile "
            "the network before it, and call the head outside."
        )
