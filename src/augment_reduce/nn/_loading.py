"""Saving and loading of a head's state, and the parameters that its fused optimiser updates.

A state of an nn.Linear loads: weight and bias. So does one of a head with another optimizer, or with none: the state of
the row optimiser is dropped or initialised, with a warning. A state of another model or sampler is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..model.noise import Noise
from ._diagnostics import Diagnostics
from ._late import settle
from ._recompute import Calls
from ._rows import RowUpdate
from ._shards import Shards


class Loading(Diagnostics):
    """Mixin of the head."""

    noise: Noise
    weight: Tensor
    in_features: int
    optimizer: RowUpdate | None
    shards: Shards | None
    _calls: Calls
    _key: int | None

    def settle(self) -> None:
        """Wait for pending sums of the last step over ranks, and apply them; called by state_dict(), train() and
        eval()."""
        if self.shards is not None:
            settle(self.shards)

    def get_extra_state(self) -> Tensor:
        """The model's name as bytes, to refuse weights trained under another model."""
        return torch.tensor(list(self.noise.name.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        found = bytes(state.tolist()).decode()
        if found != self.noise.name:
            raise ValueError(
                f"Expected the state of a head with model {self.noise.name!r}, found one of {found!r}: the scores of "
                f"one model mean nothing to another. Construct the head with model={found!r}."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module. Targets out of range on a GPU are a warning here, so that a checkpoint does not fail."""
        self.settle()
        problem = None if self.clock.is_meta else self._bad_input()
        if problem is not None:
            warnings.warn(f"{problem} Such rows were left out; train() and check_targets() raise.", stacklevel=2)
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape != self.weight.shape:
            raise ValueError(
                f"Expected a state with {self.n_classes} classes and {self.in_features} features, weight "
                f"{tuple(self.weight.shape)}, found {tuple(weight.shape)}. Construct the head with "
                f"in_features={weight.shape[1]}, n_classes={weight.shape[0]}."
            )
        self._complete(state_dict, prefix)
        self.settle()
        self._key = None  # the seed is in the state, and may be another
        self._calls, self._skipped_told = Calls(), 0
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _complete(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Complete a state without an optimiser, or of an nn.Linear; drop the state of an optimiser that the head
        lacks."""
        found = {name[len(prefix) :] for name in state_dict if name.startswith(prefix)}
        if found and found <= {"weight", "bias"} and not self.clock.is_meta:
            own = self.state_dict()
            state_dict.update({prefix + name: own[name] for name in own.keys() - {"weight", "bias"}})
            return
        of_optimizer = [name for name in found if name.startswith("optimizer.")]
        if self.optimizer is None and of_optimizer:
            warnings.warn(
                "This state has a row optimiser, and this head has none: what it remembers of the rows is left out, "
                "all else is loaded.",
                stacklevel=2,
            )
            for name in of_optimizer:
                del state_dict[prefix + name]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """The fused optimiser updates the registered parameters, also those registered later (a tied weight)."""
        super().register_parameter(name, param)
        self._follow()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        followed = self._is_followed()
        result = super()._apply(fn, recurse)
        if followed:
            self._follow()  # `to_empty` on another device type makes new parameters
        return result

    def _follow(self) -> None:
        optimizer = self._modules.get("optimizer")
        if isinstance(optimizer, RowUpdate):
            # The former weight_norm and the like delete a parameter before they register theirs.
            optimizer.follows = {name: self._parameters.get(name) for name in ("weight", "bias")}

    def _is_followed(self) -> bool:
        return self.optimizer is not None and all(
            self._parameters.get(name) is parameter for name, parameter in self.optimizer.follows.items()
        )
