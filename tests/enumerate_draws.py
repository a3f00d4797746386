"""Every draw a class sampler can make, with its probability: unbiasedness proved by summing, not by sampling."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from augment_reduce.kernels.reference import step_over
from augment_reduce.sampler import FrequencyPerRow, FrequencyShared, Sampled, UniformPerRow, UniformShared

K, SIZE = 5, 2
COUNTS = torch.tensor([1.0, 4.0, 2.0, 7.0, 3.0], dtype=torch.float64)


class Script:
    """Stands in for a sampler's randomness: hands it the given picks (without replacement) or uniforms (with)."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch

    def without_replacement(self, sampler, labels: Tensor, picks: Tensor) -> Sampled:
        sampler.bind(
            COUNTS.numpy(), lambda uniforms, n, labels=None: picks if labels is None else step_over(picks, labels)
        )
        return sampler.draw(labels, picks.shape[1], generator=torch.Generator(), dtype=torch.float64)

    def with_replacement(self, sampler, labels: Tensor, uniforms: Tensor) -> Sampled:
        with self.monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, **_: uniforms.reshape(shape))
            return sampler.draw(labels, uniforms.shape[-1], generator=torch.Generator(), dtype=torch.float64)


def every_draw(name: str, label: int, script: Script, size: int = SIZE) -> Iterator[tuple[float, Sampled]]:
    """(probability, what the sampler returns) for every outcome of its draw, for one row with this label."""
    labels = torch.tensor([label])
    if name == "uniform":
        subsets = list(itertools.combinations(range(K - 1), size))
        for picks in subsets:
            yield 1 / len(subsets), script.without_replacement(UniformPerRow(), labels, torch.tensor([picks]))
    elif name == "uniform-shared":
        subsets = list(itertools.combinations(range(K), size))
        for picks in subsets:
            yield 1 / len(subsets), script.without_replacement(UniformShared(), labels, torch.tensor([picks]))
    else:
        sampler = (FrequencyPerRow if name == "frequency" else FrequencyShared)(power=0.8, uniform_share=0.25)
        sampler.bind(COUNTS.numpy(), lambda uniforms, n: uniforms)
        q = sampler.log_q.exp().clone()
        if name == "frequency":
            q[label] = 0.0
        q /= q.sum()
        ends = torch.cumsum(q, 0)
        middle = ends - q / 2  # a uniform that must fall on class k: the middle of its stretch
        drawable = [k for k in range(K) if q[k] > 0]
        for picks in itertools.product(drawable, repeat=size):
            uniforms = torch.stack([middle[k] for k in picks])[None]
            sampled = script.with_replacement(sampler, labels, uniforms)
            assert sampled.classes.reshape(-1).tolist() == list(picks)
            yield math.prod(float(q[k]) for k in picks), sampled
