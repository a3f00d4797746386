"""`head.fused_optimizer`: the head's row optimiser as a `torch.optim.Optimizer`.

Rows are updated in the backward pass until `zero_grad()` or `step()` is called for the first time; from then on the
backward pass accumulates row gradients, and `step()` updates each touched row once, by their sum. A training loop that
calls `step()` accumulates over micro-batches as usual, and one that does not use this optimiser still trains.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._plain import LabelPart, RowGradient

if TYPE_CHECKING:
    from ._rows import RowUpdate, Settings

FORGOTTEN = 1000  # backward passes without step() after which it warns


class Group(dict[str, Any]):
    """The optimiser's param group. Setting "lr" writes the rate on the device; "weight_decay" and "max_norm" are read
    at every step."""

    def __init__(self, rule: RowUpdate, learning_rate: float, settings: Settings) -> None:
        super().__init__(lr=learning_rate, weight_decay=settings.weight_decay, max_norm=settings.max_norm)
        self._rule = rule

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr":
            value = float(value)
            self._rule.rate.fill_(value)
        elif name == "weight_decay" and value and not len(self._rule.last):
            raise ValueError(
                "Expected weight_decay of 0, since the head was made without: decay needs to know when each row was "
                "last touched. Construct the head with weight_decay=... of the first value."
            )
        super().__setitem__(name, value)

    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _group, (), {"rule": self._rule, "items": dict(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rule = state["rule"]
        dict.update(self, state["items"])


def _group() -> Group:
    return Group.__new__(Group)


class Pending:
    """Accumulated row gradients until step(). Not part of the state: copies start empty."""

    def __init__(self) -> None:
        self.waits = False  # whether step() or zero_grad() has been called
        self.stepped = False
        self.rows: list[RowGradient] = []
        self._when: tuple[Any, ...] = ()
        self._passes = 0  # since the last step

    def add(self, moves_weight: bool, moves_bias: bool, grad: RowGradient, key: int, counter: Tensor) -> None:
        self.rows.append(grad)
        self._when = (moves_weight, moves_bias, key, counter.clone())
        self._passes += 1
        if self._passes == FORGOTTEN:
            warnings.warn(
                f"{FORGOTTEN} backward passes since the last head.fused_optimizer.step(): the head's weights wait for "
                "it, since zero_grad() or step() of that optimiser was called before. Call step() after each backward "
                "pass, or never touch that optimiser: then the weights move in the backward pass.",
                RuntimeWarning,
                stacklevel=2,
            )

    def summed(self) -> tuple[bool, bool, RowGradient, int, Tensor]:
        """Which of weight and bias is updated, the sum, and the key and counter of the last addition."""
        moves_weight, moves_bias, key, counter = self._when
        rows = self.rows
        labels = [grad.labels for grad in rows if grad.labels is not None]
        classes, values, of_bias = (torch.cat(x) for x in zip(*(grad[:3] for grad in rows), strict=True))
        part = LabelPart(*(torch.cat(x) for x in zip(*labels, strict=True))) if labels else None
        return moves_weight, moves_bias, RowGradient(classes, values, of_bias, part), key, counter

    def clear(self) -> None:
        self.rows, self._when = [], ()
        self._passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _pending, (self.waits,)


def _pending(waits: bool) -> Pending:
    pending = Pending()
    pending.waits = waits
    return pending


class FusedOptimizer(torch.optim.Optimizer):
    """The optimiser of a head's touched rows, for schedulers, trainers and accumulation over micro-batches.

    `param_groups[0]["lr"]` is the rate, also of a captured CUDA graph. The state is shared with the head's state dict;
    in one file it is stored once.
    """

    _step_supports_amp_scaling = True  # a GradScaler finds no .grad here; overflowed rows are skipped

    def __init__(self, rule: RowUpdate) -> None:
        self.rule = rule
        group = rule.group
        dict.__setitem__(group, "params", [p for p in rule.follows.values() if p is not None])
        super().__init__([group], {"lr": group["lr"], "weight_decay": 0.0, "max_norm": None})
        self.param_groups = [group]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated since the last step()."""
        pending = self.rule.pending
        if pending.rows and not pending.stepped:
            warnings.warn(
                "zero_grad() forgets row gradients that no step() has used: call head.fused_optimizer.step() after the "
                "backward pass, or neither of the two.",
                RuntimeWarning,
                stacklevel=2,
            )
        pending.clear()
        pending.waits = True
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the touched rows by the accumulated sum; nothing if the backward pass has updated them."""
        self.rule.pending.waits = self.rule.pending.stepped = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler during this call
        self.rule.step(None if scale is None else 1.0 / scale)
        return loss

    def state_dict(self) -> dict[str, Any]:
        found = {name: value for name, value in self.rule.named_buffers(recurse=False) if name != "rate"}
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return {"state": {0: found}, "param_groups": [{**group, "params": [0]}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = state_dict["state"].get(0, {})
        for name, value in self.rule.named_buffers(recurse=False):
            if name in found:
                if found[name].shape != value.shape:
                    raise ValueError(
                        f"Expected {name} of shape {tuple(value.shape)}, found {tuple(found[name].shape)}: the state "
                        "is one of another rule or another head."
                    )
                value.copy_(found[name])
        for name, value in state_dict["param_groups"][0].items():
            if name != "params":
                self.param_groups[0][name] = value
