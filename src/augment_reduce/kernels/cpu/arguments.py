"""What a call is given, as kernels take it: tensors as arrays, parameters, the optimiser's step, scratch buffers."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import torch
from torch import Tensor

from ..constants import PRIOR_NONE, PRIOR_UNBIASED
from ..protocol import Parameters, Prior, RowOptimizer
from .door import check_shapes, check_states_fit
from .rules import RuleKernels, kernels_of
from .types import Array, Arrays, Buffers, Rule
from .work import WORK

TURNS = 64  # iterations whose rates are computed at once


def contiguous(name: str, t: Tensor) -> Array:
    """The tensor's own memory."""
    if not (t.is_cpu and t.is_contiguous()):
        raise ValueError(
            f"Expected {name} contiguous and on the CPU, found strides {t.stride()} on {t.device}; use .contiguous()."
        )
    return t.detach().numpy() if t.requires_grad else t.numpy()


def values_of(t: Tensor, dtype: torch.dtype) -> Array:
    if t.requires_grad:
        t = t.detach()
    if t.dtype != dtype:
        t = t.to(dtype)
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def rules_of(optimizer: RowOptimizer, prior: Prior | None, dtype: np.dtype, first: int, n: int) -> list[tuple]:
    """The optimiser's steps at iterations first, ..., first + n - 1: the fields of `Rule`."""
    turns = np.arange(first, first + n)
    rate, a, c, eps = (np.broadcast_to(each, n).astype(float) for each in optimizer.scalars_of(turns))
    of_biases = np.broadcast_to(optimizer.for_biases().scalars_of(turns)[0], n)
    variance = np.full(n, 1.0 if prior is None else prior.variance)
    columns = (rate, a, 1.0 - a, c, 1.0 - c, eps, variance, of_biases)
    return [tuple(numbers) for numbers in np.stack(columns, axis=1).astype(dtype)]


class RulesInTurn:
    """Those of one fit, many iterations at a time: a step of a small minibatch takes no longer than one of them.

    Unless the optimiser can be changed: only a frozen dataclass will say the same again.
    """

    def __init__(self, optimizer: RowOptimizer, prior: Prior | None, dtype: np.dtype) -> None:
        self.settings, self.first = (optimizer, prior, dtype), 0
        self.rules: list[tuple] = []
        frozen = dataclasses.is_dataclass(optimizer) and type(optimizer).__dataclass_params__.frozen
        self.turns = TURNS if frozen else 1

    def serves(self, optimizer: RowOptimizer, prior: Prior | None, dtype: np.dtype) -> bool:
        return self.settings[0] is optimizer and self.settings[1] is prior and self.settings[2] == dtype

    def at(self, t: int) -> tuple:
        """The step at iteration t, the fields of a `Rule`."""
        if not 0 <= t - self.first < len(self.rules) or self.turns == 1:
            self.first, self.rules = t, rules_of(*self.settings, t, self.turns)
        return self.rules[t - self.first]


def rule_of(optimizer: RowOptimizer, t: int, prior: Prior | None, dtype: np.dtype) -> Rule:
    """The optimiser's step at iteration t."""
    found: RulesInTurn | None = WORK.rules
    if found is None or not found.serves(optimizer, prior, dtype):
        found = WORK.rules = RulesInTurn(optimizer, prior, dtype)
    return Rule(*found.at(t))


def in_shares(prior: Prior | None) -> bool:
    return prior is not None and prior.mode == PRIOR_UNBIASED


def rule_kernels(optimizer: RowOptimizer, prior: Prior | None, shares: bool) -> RuleKernels:
    """The kernels of this rule. A prior that is felt by shares is not felt without them."""
    mode = PRIOR_NONE if prior is None else prior.mode
    mode = PRIOR_NONE if mode == PRIOR_UNBIASED and not shares else mode
    return kernels_of(optimizer.kind, mode, optimizer.entry, optimizer.n_states)


def arrays_of(parameters: Parameters, optimizer: RowOptimizer, prior: Prior | None) -> Arrays:
    """The parameters as arrays, found again as long as their memory is the same; gone when the parameters are."""
    tensors = (parameters.weight, parameters.bias, *parameters.weight_state, *parameters.bias_state)
    key = (optimizer.rowwise, optimizer.n_states, parameters.weight.shape, *[t.data_ptr() for t in tensors])
    found = WORK.views
    if found is not None and found[0]() is parameters and found[1] is prior and found[2] == key:
        return found[3][0]
    views = [_views(parameters, optimizer, prior)]
    WORK.views = (weakref.ref(parameters, lambda _: views.clear()), prior, key, views)
    return views[0]


def _views(parameters: Parameters, optimizer: RowOptimizer, prior: Prior | None) -> Arrays:
    weight, bias = contiguous("weight", parameters.weight), contiguous("bias", parameters.bias)
    states = [contiguous("weight_state", s) for s in parameters.weight_state]
    bias_states = [contiguous("bias_state", s) for s in parameters.bias_state]
    rowwise, n_states = optimizer.rowwise, optimizer.n_states
    check_states_fit(weight, bias, states, bias_states, n_states, rowwise=rowwise)
    check_shapes(weight.shape[1:], inverse_counts=None if prior is None else prior.inverse_counts)
    if rowwise:
        states = [states[0][:, None]]
    none = WORK.array("none", 0, weight.dtype)
    state2, bias_state2 = (states[1], bias_states[1]) if n_states == 2 else (none.reshape(1, 0), none)
    inverse = none if prior is None else values_of(prior.inverse_counts, parameters.weight.dtype)
    inverse_rows = weight.dtype.type(0.0 if prior is None else prior.inverse_rows)
    return Arrays(weight, states[0], state2, bias, bias_states[0], bias_state2, inverse, inverse_rows)


def buffers(n: int, U: int, G: int, dtype: np.dtype) -> list[Buffers]:
    """Scratch for n threads, found again as long as powers of two above U and G stay the same."""
    U, G = 1 << U.bit_length(), 1 << G.bit_length()
    key = (n, U, G, dtype)
    if key not in WORK.buffers:
        sizes = {"g": U, "c": U, "seen": U}
        kinds = {"seen": np.dtype(np.uint8), "at": np.dtype(np.uint32)}
        WORK.buffers[key] = [
            Buffers(*(
                WORK.array(f"{name} {i}", sizes.get(name, max(U, G)), kinds.get(name, dtype))
                for name in Buffers._fields
            ))
            for i in range(n)
        ]  # fmt: skip
    return WORK.buffers[key]


def bias_sums(G: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Gradients and prior shares of G biases; the shares stay zero where nobody writes them."""
    return WORK.array("bias_g", G, dtype), WORK.array("bias_c", G, dtype)
