"""Seeds of many steps at once: mixed from a count, and as torch's generator would make them of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._cpu_classes import GOLDEN
from ._cpu_types import OPTIONS, Array
from .cache import cached_njit

FAR, FACTOR = 397, np.uint32(1812433253)  # of the Mersenne twister (Matsumoto and Nishimura 1998), as are those below


@njit(**OPTIONS)
def _finalise(z: Any, part: Any) -> Any:
    z = z + GOLDEN * (part + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cached_njit(**OPTIONS)
def mix_counts(seed: int, stream: int, first: int, out: Array) -> None:
    """out[i] = `seeds.mix` of count first + i."""
    begun = _finalise(seed, stream)
    for i in range(out.shape[0]):
        z = _finalise(_finalise(begun, first + np.uint64(i)), np.uint64(0))
        out[i] = np.int64(z >> np.uint64(1))


@njit(**OPTIONS)
def _temper(y: Any) -> Any:
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return y ^ (y >> np.uint32(18))


@njit(**OPTIONS)
def _number(state: Array, far: Array, j: int, i: int) -> Any:
    """The j-th number of 32 bits that generator i gives, from the states as they were seeded."""
    y = (state[j, i] & np.uint32(0x80000000)) | (state[j + 1, i] & np.uint32(0x7FFFFFFF))
    odd = np.uint32(0x9908B0DF) if y & np.uint32(1) else np.uint32(0)
    return _temper(far[j, i] ^ (y >> np.uint32(1)) ^ odd)


@cached_njit(**OPTIONS)
def first_numbers(seeds: Array, out: Array) -> None:
    """out (M, n) = the first n int64 of a generator of torch that is seeded with seeds[i]: two numbers of the Mersenne
    twister each. These need 397 + 2 n of its 624 words, which are made for all generators side by side."""
    M, n = out.shape
    state, far, word = np.empty((2 * n + 1, M), np.uint32), np.empty((2 * n, M), np.uint32), np.empty(M, np.uint32)
    for i in range(M):
        word[i] = state[0, i] = np.uint32(seeds[i] & 0xFFFFFFFF)
    for j in range(1, FAR + 2 * n):
        for i in range(M):
            word[i] = FACTOR * (word[i] ^ (word[i] >> np.uint32(30))) + np.uint32(j)
        if j < state.shape[0]:
            state[j] = word
        if j >= FAR:
            far[j - FAR] = word
    for i in range(M):
        for j in range(n):
            high, low = _number(state, far, 2 * j, i), _number(state, far, 2 * j + 1, i)
            out[i, j] = np.int64(((np.uint64(high) << np.uint64(32)) | np.uint64(low)) & np.uint64(2**63 - 1))
