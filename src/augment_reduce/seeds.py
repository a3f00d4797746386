"""Where randomness comes from: every step has a seed of its own, made of the fit's seed and the iteration.

So training that stops at any iteration and goes on later, from a file say, is bit for bit training that never stopped,
and no generator state needs keeping.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


@functools.cache
def kernels() -> ModuleType:
    """Compiled ones, which take a while to import. Asked for once: even an import that was made before shows in short
    steps."""
    from .kernels import _cpu_seeds

    return _cpu_seeds


def mix(seed: int, stream: int, count: int) -> int:
    """A well-mixed 63-bit seed from three integers (the finaliser of splitmix64, applied thrice)."""
    return int(mix_all(seed, stream, range(count, count + 1))[0])


def mix_all(seed: int, stream: int, counts: range) -> np.ndarray:
    """`mix` of each count, all at once."""
    out = np.empty(len(counts), np.int64)
    kernels().mix_counts(np.uint64(seed & (2**64 - 1)), np.uint64(stream), np.uint64(counts.start), out)
    return out


def draw_seed(generator: torch.Generator | None) -> int:
    """One number of the generator, from which many follow."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def many_uniforms(B: int, S: int, generator: torch.Generator | None) -> Tensor:
    """(B, S) in float64, from one number of the generator: five times as fast as torch.rand."""
    from .kernels.cpu import uniforms

    return uniforms(draw_seed(generator), B, S)


class StepGenerators:
    """The generators of steps, each handed out when its turn comes: one that is seeded anew each time."""

    def __init__(self, generator: torch.Generator, seeds: np.ndarray) -> None:
        self.generator, self.seeds = generator, seeds

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self.generator.manual_seed(seed) for seed in self.seeds.tolist())

    def draw_seeds(self, n: int) -> np.ndarray:
        """(steps, n): what each would answer to `draw_seed`, n times. Faster than asking: a step may be a tenth of a
        millisecond, and asking takes three hundredths of that."""
        if not _known_generator():
            return np.array([[draw_seed(generator) for _ in range(n)] for generator in self], np.int64).reshape(-1, n)
        out = np.empty((len(self.seeds), n), np.int64)
        kernels().first_numbers(self.seeds, out)
        return out


@functools.cache
def _known_generator() -> bool:
    """Whether torch's generator is what `first_numbers` takes it for, a Mersenne twister, as it has been for years."""
    generator, seeds = torch.Generator(), np.array([0, 1, 2**32 - 1, 2**62 + 12345], np.int64)
    out = np.empty((len(seeds), 2), np.int64)
    kernels().first_numbers(seeds, out)
    said = [[draw_seed(generator) for _ in range(2)] for generator in StepGenerators(generator, seeds)]
    return bool((out == said).all())
