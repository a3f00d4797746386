"""Every draw a class sampler can make, with its probability: unbiasedness proved by summing, not by sampling."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from augment_reduce.kernels import reference
from augment_reduce.kernels.reference import Parameters, step_over
from augment_reduce.kernels.rows import SparseRows
from augment_reduce.sampling import (
    ClassSampler,
    Conditional,
    FeatureCandidates,
    FrequencyPerRow,
    FrequencyShared,
    HardNegativeCache,
    HeadAndTail,
    Minibatch,
    Sampled,
    TrainingData,
    UniformPerRow,
    UniformShared,
    conditional,
)

K, SIZE = 5, 2
COUNTS = torch.tensor([1.0, 4.0, 2.0, 7.0, 3.0], dtype=torch.float64)


class Script:
    """Stands in for a sampler's randomness: hands it the given picks (without replacement) or uniforms (with)."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch

    def without_replacement(self, sampler, labels: Tensor, picks: Tensor) -> Sampled:
        sampler = sampler.bind(
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
    if name in LOOKING:
        if (name, label, size) not in _LOOKED:  # many tests ask for the same draws
            _LOOKED[name, label, size] = list(every_outcome(looking(name), one_row(label), size, script))
        yield from _LOOKED[name, label, size]
        return
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
        sampler = sampler.bind(COUNTS.numpy(), lambda uniforms, n: uniforms)
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


# The samplers below are not asked for their probabilities: these are measured, as lengths of the stretches of [0, 1)
# on which the draw as a function of its uniforms does not change.

_LOOKED: dict[tuple[str, int, int], list[tuple[float, Sampled]]] = {}
LOOKING = ("head-tail-shared", "cache-shared", "candidates-shared", "conditional")
FREQUENT = {"frequency": FrequencyPerRow, "frequency-shared": FrequencyShared}
HALVING = ("uniform", "uniform-shared", *FREQUENT, *LOOKING)


def one_row(label: int, n_classes: int = K, steps_taken: int = 0) -> Minibatch:
    """Row 1 of three, with scores that are neither alike nor extreme."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((n_classes, 3), n_classes)
    )
    values = torch.randn(9, dtype=torch.float64, generator=generator).numpy()
    X = SparseRows(np.arange(0, 10, 3), np.tile(np.arange(3), 3), values, 3)
    return Minibatch(X, np.array([1]), torch.tensor([label]), Parameters(weight, bias, [], []), reference, steps_taken)


def looking(name: str, counts: np.ndarray | None = None) -> ClassSampler:
    """A sampler in the middle of its life: it remembers a class, or has clusters that were made for other weights."""
    settings = {"power": 0.8, "uniform_share": 0.25}
    counts = COUNTS.numpy() if counts is None else counts
    if name == "conditional":
        return Conditional(n_clusters=2, share=0.3, **settings).bind(counts, reference.draw_without_replacement)
    if (
        name == "candidates-shared"
    ):  # whichever row it is, its features have been seen with the last classes and the first
        sampler = FeatureCandidates(n_own=2, per_feature=3, **settings)
        sampler = sampler.bind(counts, reference.draw_without_replacement)
        labels = np.array([len(counts) - 1, len(counts) - 2, 0])
        sampler.prepare(TrainingData(one_row(0, len(counts)).X, np.arange(3), labels), 1)
        # and one of these, and one that no label has pointed at, have come to weigh something
        sampler.heavy = np.array([[0, len(counts) // 2, -1]] * 3, np.int32)
        sampler.heavy_weight, sampler._some_heavy = np.array([[0.5, 0.8, 0.0]] * 3, np.float32), True
        return sampler
    if name == "cache-shared":
        sampler = HardNegativeCache(memory=2, **settings).bind(counts, reference.draw_without_replacement)
        last = len(counts) - 1
        remembered = torch.tensor([[0, 0], [min(2, last), 0], [last, 0]], dtype=torch.int32)
        heat = torch.tensor([[0.9, 0.0], [0.3, 0.1], [0.5, 0.5]])
        kept = {"remembered": remembered, "heat": heat, "total": torch.tensor([0.3], dtype=torch.float64)}
        sampler.load_state_dict(kept, same_rows=True)
        return sampler
    return HeadAndTail(**settings).bind(counts, reference.draw_without_replacement)


def every_outcome(
    sampler: ClassSampler, minibatch: Minibatch, size: int, script: Script, *, halves: bool = False
) -> Iterator[tuple[float, Sampled]]:
    """(probability, what was drawn) for every outcome, by every combination of a stretch for each uniform."""
    draw = functools.partial(drawn_with, sampler.draw_halves if halves else sampler.draw_for, minibatch, size, script)
    n = draw(None)[1]
    stretches = [list(stretches_of(lambda u, place=i: draw(at(u, place, n))[0].classes.tolist())) for i in range(n)]
    for chosen in itertools.product(*stretches):
        middles = torch.tensor([(low + high) / 2 for low, high in chosen], dtype=torch.float64)
        yield math.prod(high - low for low, high in chosen), draw(middles)[0]


def at(u: float, place: int, n: int) -> Tensor:
    uniforms = torch.full((n,), 0.5, dtype=torch.float64)
    uniforms[place] = u
    return uniforms


def drawn_with(
    draw: Callable[..., Sampled], minibatch: Minibatch, size: int, script: Script, uniforms: Tensor | None
) -> tuple[Sampled, int]:
    """What the sampler draws when these are its uniforms, one call after the other, and how many it asked for."""
    asked = 0

    def scripted(*shape: int, **_: object) -> Tensor:
        nonlocal asked
        begin, asked = asked, asked + math.prod(shape)
        some = torch.full((asked,), 0.5, dtype=torch.float64) if uniforms is None else uniforms
        return some[begin:asked].reshape(shape)

    with script.monkeypatch.context() as patch:
        patch.setattr(torch, "rand", scripted)
        patch.setattr(conditional, "many_uniforms", lambda B, S, generator: scripted(B, S))
        return draw(minibatch, size, generator=torch.Generator()), asked


def every_halving(name: str, label: int, script: Script, size: int) -> Iterator[tuple[float, Sampled]]:
    """(probability, what the sampler returns) for every outcome of `draw_halves`, for one row with this label."""
    row = one_row(label)
    if name == "uniform" or (name == "uniform-shared" and size > 3):
        kind, n = (UniformPerRow, K - 1) if name == "uniform" else (UniformShared, K)
        subsets = list(itertools.combinations(range(n), size))
        places = list(itertools.permutations(range(size)))
        for picks, place in itertools.product(subsets, places):
            with script.monkeypatch.context() as patch:
                patch.setattr(torch, "randperm", lambda n, place=place, **_: torch.tensor(place))
                sampled = scripted_picks(kind(), [picks]).draw_halves(row, size, generator=torch.Generator())
            yield 1 / len(subsets) / len(places), sampled
    elif name == "uniform-shared":
        subsets = [list(itertools.combinations(range(K), n)) for n in (size - size // 2, size // 2)]
        for picks in itertools.product(*subsets):
            sampled = scripted_picks(UniformShared(), list(picks)).draw_halves(row, size, generator=torch.Generator())
            yield 1 / math.prod(len(s) for s in subsets), sampled
    else:
        sampler = looking(name) if name in LOOKING else FREQUENT[name](power=0.8, uniform_share=0.25)
        sampler = sampler if name in LOOKING else sampler.bind(COUNTS.numpy(), reference.draw_without_replacement)
        yield from every_outcome(sampler, row, size, script, halves=True)


def scripted_picks(sampler: ClassSampler, picks: list[tuple[int, ...]]) -> ClassSampler:
    """A sampler without replacement that draws these, one call after the other."""
    left = iter(picks)

    def draw(uniforms: Tensor, n: int, labels: Tensor | None = None) -> Tensor:
        found = torch.tensor([next(left)])
        return found if labels is None else step_over(found, labels)

    return sampler.bind(COUNTS.numpy(), draw)


def stretches_of(f: Callable[[float], object], n_looks: int = 48) -> Iterator[tuple[float, float]]:
    """The intervals of [0, 1) on which f is constant, their ends by halving; none below 1 / n_looks."""
    begin, looks = 0.0, [min(i / n_looks, 1.0 - 2.0**-53) for i in range(n_looks + 1)]
    for low, high in itertools.pairwise(looks):
        left = f(low)
        if f(high) == left:
            continue
        while high - low > 1e-15:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if f(middle) == left else (low, middle)
        yield begin, high
        begin = high
    yield begin, 1.0
