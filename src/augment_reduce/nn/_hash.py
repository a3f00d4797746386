"""Counter-based random numbers, a function of (seed, step, place): the same on every device, without synchronisation.

A head has one int64 step counter on its device. The random numbers of a step are hashes of the seed, that counter and
a place (an index), so a step can be captured in a CUDA graph, repeated, and resumed from a state dict.
`nn/triton/draw.py` has the same arithmetic in Triton; the two agree bit by bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: multiples of it are spread evenly over the 32-bit numbers
ROUNDS = 12  # of the permutation; 8 already pass the tests of tests/nn/test_draw.py
MAIN, SECOND, NODE, ROUNDING = 0, 1, 2, 3  # independent streams, by the use of the random numbers


def mix(x: Tensor) -> Tensor:
    """A bijection of the 32-bit numbers (held in int64) in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def seed_key(seed: int) -> int:
    """The 64-bit seed as a 32-bit key: done once, on the host."""
    low, high = (torch.tensor(part & MASK, device="cpu") for part in (seed, seed >> 32))
    return int(mix(mix(low) ^ high))


def step_key(key: int, counter: Tensor, stream: int) -> Tensor:
    """The key of a step and a stream, as a 0-dim tensor on the counter's device."""
    step = mix(mix(key ^ (counter & MASK)) ^ ((counter >> 32) & MASK))
    return mix((step + stream * GOLDEN) & MASK)


def bits(key: Tensor, place: Tensor, lane: int) -> Tensor:
    """32 random bits for each place; lanes are independent of each other."""
    return mix((mix(place ^ key) + (lane + 1) * GOLDEN) & MASK)


def uniform(key: Tensor, place: Tensor) -> Tensor:
    """float64 in [0, 1), in steps of 2^-52: accurate also for a class of probability 1e-9."""
    high, low = bits(key, place, 0) >> 6, bits(key, place, 1) >> 6
    return (high.double() * 2.0**26 + low.double()) * 2.0**-52


def in_stratum(key: Tensor, place: Tensor) -> Tensor:
    """place + u, float64, u in [0, 1) in steps of 2^-32: exact, so that it is less than the end of the last stratum."""
    return place.double() + bits(key, place, 0).double() * 2.0**-32


def normal(key: Tensor, place: Tensor) -> Tensor:
    """Standard normal float32 (Box and Muller 1958); at most 6.7 in size, from a 32-bit uniform."""
    radius = torch.sqrt(-2.0 * torch.log((bits(key, place, 0).double() + 0.5) * 2.0**-32))
    angle = (2.0 * math.pi * 2.0**-32) * bits(key, place, 1).double()
    return (radius * torch.cos(angle)).float()


def grid_of(n: int) -> tuple[int, int]:
    """Sides (a, b) of the grid that `permuted` permutes: a b >= n, and fewer than a of its points are outside
    0..n-1."""
    a = math.isqrt(n - 1) + 1
    return a, -(-n // a)


def longest_walk(n: int) -> int:
    """The maximum number of rounds of `permuted` for a place below n.

    The cycle of a permutation through a place below n returns to it, so cycle walking from there visits at most the
    a b - n points outside before one inside.
    """
    a, b = grid_of(n)
    return a * b - n + 1


def permuted(key: Tensor, place: Tensor, n: int) -> Tensor:
    """The images of `place` (each in 0..n-1) under the permutation of 0..n-1 of this key: O(1) each.

    Places are pairs (L, R) of an a x b grid with a b >= n. Rounds of L <- L + F(R) mod a and R <- R + F(L) mod b
    permute the grid (a Feistel network); a point outside 0..n-1 is permuted again until it is inside (cycle walking),
    which concerns one in sqrt(n). Different places have different images: sampling without replacement in O(1) memory.
    The number of rounds is bounded by `longest_walk`. A place outside 0..n-1, which a caller must not pass, may be on
    a cycle without a point inside: that raises ValueError.
    """
    a, b = grid_of(n)
    x = place
    outside = torch.ones_like(x, dtype=torch.bool)
    for _ in range(longest_walk(n)):
        left, right = x // b, x % b
        for r in range(0, ROUNDS, 2):
            left = (left + bits(key, right, r) % a) % a
            right = (right + bits(key, left, r + 1) % b) % b
        x = torch.where(outside, left * b + right, x)
        outside = x >= n
        if not bool(outside.any()):  # synchronises here; the kernel does this in registers
            return x
    raise ValueError(f"Expected places in [0, n={n}), found {int(place.min())} to {int(place.max())}.")
