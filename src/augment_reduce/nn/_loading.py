"""How a head's state is saved and loaded, and which parameters its own optimiser follows.

A state of an nn.Linear loads: weight and bias. So does one of a head with another optimizer, or with none: what the
row optimiser remembers is left out or begins anew, and a warning says so. A state of another model or sampler does not.
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
    """Mixed into the head."""

    noise: Noise
    weight: Tensor
    in_features: int
    optimizer: RowUpdate | None
    shards: Shards | None
    _calls: Calls
    _key: int | None

    def settle(self) -> None:
        """Take in the sums of the last step, where ranks have them under way; state_dict(), train() and eval() do."""
        if self.shards is not None:
            settle(self.shards)

    def get_extra_state(self) -> Tensor:
        """The model's name as bytes, so that weights trained under one model are not used under another."""
        return torch.tensor(list(self.noise.name.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        found = bytes(state.tolist()).decode()
        if found != self.noise.name:
            raise ValueError(
                f"Expected the state of a head with model {self.noise.name!r}, found one of {found!r}: the scores of "
                f"one model mean nothing to another. Construct the head with model={found!r}."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module. Bad targets of a GPU are a warning here: a checkpoint must not fail because of them."""
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
        """Make a state whole that has no optimiser, or is that of an nn.Linear; leave an optimiser out that we lack."""
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
        """The head's optimizer moves the parameters that are registered, also those given later (a tied weight)."""
        super().register_parameter(name, param)
        self._follow()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        followed = self._is_followed()
        result = super()._apply(fn, recurse)
        if followed:
            self._follow()  # `to_empty` on another kind of device makes new parameters
        return result

    def _follow(self) -> None:
        optimizer = self._modules.get("optimizer")
        if isinstance(optimizer, RowUpdate):
            # Old weight_norm and the like delete a parameter before they register their own: then there is none.
            optimizer.follows = {name: self._parameters.get(name) for name in ("weight", "bias")}

    def _is_followed(self) -> bool:
        return self.optimizer is not None and all(
            self._parameters.get(name) is parameter for name, parameter in self.optimizer.follows.items()
        )
