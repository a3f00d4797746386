"""Loops over rows and classes, generated from the scalar functions of a noise.

    sums     sum_k omega_k f(eps_j - gap_k), f = log Phi or one of its derivatives
    slopes   sum_k omega_k (log Phi)'(eps_j - gap_k), and the same of (log Phi)''
    hazards  omega_k sum_j weight_j (phi / Phi)(eps_j - gap_k)

gap (B, S), eps (B, J), weight (B, J). `model.noise.Noise` says the same in torch operations, the oracle; those
hold one number for each row, class and node several times over, and these none. All cores.

A block of short rows is gone through at once: of ten classes the compiler would make no vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..cache import cached_njit
from .math import row_sum
from .scalars import BUILT_IN, Scalars
from .types import OPTIONS, Array
from .work import WORK, run, split

AT_ONCE = 512  # numbers in a block of rows, or one row
BLOCK = 4096  # numbers that go to one thread
A_NUMBER = 2  # multiply-adds that take as long as one of a noise's functions, or so


@njit(**OPTIONS)
def _block_end(begin: int, hi: int, S: int, size: int) -> int:
    """Rows begin..end of S numbers fit into a line of scratch."""
    return min(hi, begin + max(1, size // max(1, S)))


@njit(**OPTIONS)
def _spread(omega: Array, lo: int, hi: int, S: int, to: Array) -> None:
    """The weights of rows lo..hi, of which there may be one for all rows, and one for all classes."""
    for row in range(lo, hi):
        of_row = omega[min(row, omega.shape[0] - 1)]
        for k in range(S):
            to[(row - lo) * S + k] = of_row[k if omega.shape[1] > 1 else 0]


@njit(**OPTIONS)
def _from_gaps(gap: Array, eps: Array, lo: int, hi: int, to: Array) -> None:
    """eps - gap of rows lo..hi."""
    S = gap.shape[1]
    for row in range(lo, hi):
        for k in range(S):
            to[(row - lo) * S + k] = eps[row] - gap[row, k]


@njit(**OPTIONS)
def _add_sums(terms: Array, lo: int, hi: int, S: int, out: Array) -> None:
    """out[row] = sum of the row's terms."""
    for row in range(lo, hi):
        out[row] = row_sum(terms[(row - lo) * S : (row - lo + 1) * S])


def _sums(noise: Scalars, name: str) -> Callable[..., None]:
    function = getattr(noise, name)

    def sums(lo: int, hi: int, gap: Array, omega: Array, eps: Array, out: Array, scratch: Array) -> None:
        """out[b, j] = sum_k omega f(eps[b, j] - gap[b, k])."""
        S, begin = gap.shape[1], lo
        while begin < hi:
            end = _block_end(begin, hi, S, scratch.shape[1])
            n = (end - begin) * S
            weight, x, terms = scratch[0, :n], scratch[1, :n], scratch[2, :n]
            _spread(omega, begin, end, S, weight)
            for j in range(eps.shape[1]):
                _from_gaps(gap, eps[:, j], begin, end, x)
                for k in range(n):
                    terms[k] = weight[k] * function(x[k])
                _add_sums(terms, begin, end, S, out[:, j])
            begin = end

    return sums


def _slopes(noise: Scalars) -> Callable[..., None]:
    dlog_cdf, d2log_cdf = noise.dlog_cdf, noise.d2log_cdf

    def slopes(
        lo: int, hi: int, gap: Array, omega: Array, eps: Array, node_weight: Array, first: Array, second: Array,
        hazard: Array, scratch: Array,
    ) -> None:  # fmt: skip
        """first, second (B, J): sums of (log Phi)' and (log Phi)''; hazard (B, S): as in `hazards`."""
        S, begin = gap.shape[1], lo
        while begin < hi:
            end = _block_end(begin, hi, S, scratch.shape[1])
            n, to = (end - begin) * S, hazard[begin:end].reshape(-1)
            weight, x, slope, bend = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n]
            _spread(omega, begin, end, S, weight)
            to[:] = 0
            for j in range(eps.shape[1]):
                _from_gaps(gap, eps[:, j], begin, end, x)
                for k in range(n):
                    slope[k] = weight[k] * dlog_cdf(x[k])
                    bend[k] = weight[k] * d2log_cdf(x[k])
                _add_sums(slope, begin, end, S, first[:, j])
                _add_sums(bend, begin, end, S, second[:, j])
                for row in range(begin, end):
                    share = node_weight[min(row, node_weight.shape[0] - 1), j]
                    for k in range((row - begin) * S, (row - begin + 1) * S):
                        to[k] += share * slope[k]
            begin = end

    return slopes


def _hazards(noise: Scalars) -> Callable[..., None]:
    dlog_cdf = noise.dlog_cdf

    def hazards(
        lo: int, hi: int, gap: Array, omega: Array, eps: Array, node_weight: Array, out: Array, scratch: Array
    ) -> None:
        """out[b, k] = omega sum_j weight[b, j] (log Phi)'(eps[b, j] - gap[b, k])."""
        S, begin = gap.shape[1], lo
        while begin < hi:
            end = _block_end(begin, hi, S, scratch.shape[1])
            n, to = (end - begin) * S, out[begin:end].reshape(-1)
            weight, x, share = scratch[0, :n], scratch[1, :n], scratch[2, :n]
            _spread(omega, begin, end, S, weight)
            to[:] = 0
            for j in range(eps.shape[1]):
                _from_gaps(gap, eps[:, j], begin, end, x)
                _spread(node_weight[:, j : j + 1], begin, end, S, share)
                for k in range(n):
                    to[k] += share[k] * dlog_cdf(x[k])
            for k in range(n):
                to[k] *= weight[k]
            begin = end

    return hazards


def _elementwise(noise: Scalars, name: str) -> Callable[..., None]:
    function = getattr(noise, name)

    def each(lo: int, hi: int, x: Array, out: Array) -> None:
        for i in range(lo, hi):
            out[i] = function(x[i])

    return each


class NoiseLoops:
    """The loops of one noise, compiled when they are first asked for. Kept on disk if the noise is one of ours."""

    def __init__(self, scalars: Scalars, name: str | None) -> None:
        self.scalars, self.name = scalars, name
        self._generated: dict[tuple, Callable[..., Any]] = {}

    def compiled(self, function: Callable[..., Any], suffix: str = "") -> Callable[..., Any]:
        if self.name is None:
            return njit(**OPTIONS)(function)
        return cached_njit(self.name + suffix, **OPTIONS)(function)

    def generated(self, make: Callable[..., Callable[..., Any]], *settings: Any) -> Callable[..., Any]:
        """make(scalars, *settings), compiled once for these settings."""
        key = (make.__name__, *settings)
        if key not in self._generated:
            self._generated[key] = self.compiled(
                make(self.scalars, *settings), "".join(f"_{each}" for each in settings)
            )
        return self._generated[key]

    def sums(self, name: str, gap: Tensor, omega: Tensor, eps: Tensor) -> Tensor:
        """(B, J) of one of the scalar functions."""
        out = gap.new_empty(eps.shape)
        over_rows(self.generated(_sums, name), gap, omega, eps, out)
        return out

    def slopes(
        self, gap: Tensor, log_weight: Tensor, eps: Tensor, node_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of (log Phi)' and (log Phi)'' (B, J), and `hazards`."""
        first, second, hazard = gap.new_empty(eps.shape), gap.new_empty(eps.shape), gap.new_empty(gap.shape)
        omega, node_weight = torch.exp(log_weight), torch.atleast_2d(node_weight)
        over_rows(self.generated(_slopes), gap, omega, eps, node_weight, first, second, hazard)
        return first, second, hazard

    def hazards(self, gap: Tensor, log_weight: Tensor, eps: Tensor, node_weight: Tensor) -> Tensor:
        """(B, S)"""
        out = gap.new_empty(gap.shape)
        over_rows(self.generated(_hazards), gap, torch.exp(log_weight), eps, torch.atleast_2d(node_weight), out)
        return out

    def elementwise(self, name: str, eps: Tensor) -> Tensor:
        """One of the scalar functions of every number."""
        out, n_blocks = torch.empty(eps.shape, dtype=eps.dtype), -(-eps.numel() // BLOCK)
        cuts = split(n_blocks, lambda: np.full(n_blocks, A_NUMBER * BLOCK))
        ends = [min(eps.numel(), BLOCK * cut) for cut in cuts]
        arrays = tuple(each.contiguous().view(-1).numpy() for each in (eps, out))
        run(self.generated(_elementwise, name), ends, arrays, [()] * (len(ends) - 1))
        return out


_LOOPS: dict[Any, NoiseLoops] = {}


def loops_of(scalars: Scalars | str) -> NoiseLoops:
    """The loops of a noise of ours, by name, or of a user's scalar functions; made once a process."""
    key = scalars if isinstance(scalars, str) else tuple(scalars)
    if key not in _LOOPS:
        if isinstance(scalars, str):
            _LOOPS[key] = NoiseLoops(BUILT_IN[scalars], scalars)
        else:
            own = (
                njit(**OPTIONS)(getattr(f, "py_func", f)) for f in scalars
            )  # with our options: no checks inside loops
            _LOOPS[key] = NoiseLoops(Scalars(*own), None)
    return _LOOPS[key]


def over_rows(kernel: Callable[..., None], gap: Tensor, omega: Tensor, eps: Tensor, *rest: Tensor) -> None:
    """kernel(lo, hi, gap, omega, eps, *rest, scratch) by all cores; `rest` are numbers of the dtype of gap."""
    (B, S), J = gap.shape, eps.shape[1]
    if np.broadcast_shapes(omega.shape, gap.shape) != gap.shape or len(eps) != B:
        raise ValueError(
            f"Expected weights that broadcast to the gaps {tuple(gap.shape)}, and eps for each of the {B} rows, "
            f"found {tuple(omega.shape)} and {len(eps)}."
        )
    omega = omega.to(gap.dtype)
    omega = omega.reshape((1,) * (2 - omega.ndim) + omega.shape).contiguous()
    cuts = split(B, lambda: np.full(B, A_NUMBER * J * S))
    n = len(cuts) - 1
    size, kind = max(S, AT_ONCE), np.dtype(str(gap.dtype).removeprefix("torch."))
    scratch = WORK.array("rows_of_noise", n * 4 * size, kind).reshape(n, 4, size)
    arrays = (each.contiguous().numpy() for each in (gap, omega, eps, *rest))
    run(kernel, cuts, tuple(arrays), [(each,) for each in scratch])
