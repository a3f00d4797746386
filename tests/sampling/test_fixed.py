"""Samplers never draw the label, draw with the probabilities they say, and need no memory that grows with K."""

import itertools
import tracemalloc

import numpy as np
import pytest
import scipy.stats
import torch

import augment_reduce
from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.sampling import (
    SAMPLERS,
    AllClasses,
    FeatureCandidates,
    FrequencyPerRow,
    FrequencyShared,
    UniformPerRow,
    UniformShared,
    resolve_sampler,
)
from tests.helpers import rng

FAILURE_RATE = 1e-6  # chance that a correct sampler fails; with a fixed seed it is always or never
COUNTS = np.array([5.0, 1.0, 9.0, 0.0, 3.0, 2.0, 7.0, 1.0, 1.0, 4.0, 6.0])
K = len(COUNTS)


def bound_sampler(cls, *args, counts=COUNTS):
    return cls(*args).bind(counts, cpu.draw_without_replacement)


def draw(sampler, labels, size, seed=0):
    return sampler.draw(labels, size, generator=rng(seed), dtype=torch.float64)


@pytest.mark.parametrize("cls", [UniformPerRow, FrequencyPerRow])
@pytest.mark.parametrize("label", [0, 4, K - 1])
def test_per_row_samplers_never_draw_the_label(cls, label):
    sampled = draw(bound_sampler(cls), torch.full((2000,), label), 5)
    assert sampled.classes.shape == (2000, 5)
    assert ((sampled.classes >= 0) & (sampled.classes < K)).all()
    assert not (sampled.classes == label).any()


@pytest.mark.parametrize("cls", [UniformShared, FrequencyShared, AllClasses])
def test_shared_samplers_mask_exactly_the_label(cls):
    labels = torch.arange(K)
    sampled = draw(bound_sampler(cls), labels, K)
    assert torch.equal(sampled.mask, labels[:, None] == sampled.classes)


def test_uniform_draws_each_subset_equally_often():
    """All C(6, 3) = 20 subsets of the others, by chi-square."""
    label, n = 2, 40_000
    sampler = bound_sampler(UniformPerRow, counts=np.ones(7))
    drawn = draw(sampler, torch.full((n,), label), 3).classes.sort(dim=1).values
    others = [k for k in range(7) if k != label]
    index = {subset: i for i, subset in enumerate(itertools.combinations(others, 3))}
    counts = np.bincount([index[tuple(row)] for row in drawn.tolist()], minlength=20)
    assert scipy.stats.chisquare(counts).pvalue > FAILURE_RATE


def test_uniform_shared_includes_each_class_equally_often():
    sampler = bound_sampler(UniformShared)
    counts = np.zeros(K)
    for seed in range(8000):
        counts[draw(sampler, torch.tensor([0]), 1, seed).classes.numpy()] += 1
    assert scipy.stats.chisquare(counts).pvalue > FAILURE_RATE


@pytest.mark.parametrize("cls", [FrequencyPerRow, FrequencyShared])
def test_frequency_draws_follow_the_table(cls):
    power, share, label, n = 0.75, 0.2, 6, 100_000
    sampler = bound_sampler(cls, power, share)
    mass = COUNTS**power
    q = (1 - share) * mass / mass.sum() + share / K
    if cls is FrequencyPerRow:
        drawn = draw(sampler, torch.full((n,), label), 1).classes.flatten()
        q = np.delete(q, label) / (1 - q[label])
        counts = np.delete(np.bincount(drawn.numpy(), minlength=K), label)
    else:
        counts = np.bincount(draw(sampler, torch.tensor([label]), n).classes.numpy(), minlength=K)
    assert scipy.stats.chisquare(counts, q * n).pvalue > FAILURE_RATE


def test_uniform_weights_are_the_ones_of_the_paper():
    sampled = draw(bound_sampler(UniformPerRow), torch.tensor([3, 4]), 4)
    assert float(sampled.log_weight.exp()) == pytest.approx((K - 1) / 4)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("all", "conditional", "candidates-shared")])
def test_more_classes_than_there_are_are_all_others(name):
    sampler = SAMPLERS[name]().bind(np.ones(3), cpu.draw_without_replacement)
    size = sampler.size(1000)
    sampled = draw(sampler, torch.tensor([1]), size)
    if not name.startswith("frequency"):
        assert size <= 3
        kept = set(sampled.classes.flatten().tolist()) - {1}
        assert kept == {0, 2}
        assert torch.allclose(sampled.log_weight.exp(), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("cls", [UniformPerRow, UniformShared])
def test_a_hundred_million_classes_in_bounded_memory(cls):
    sampler = cls()
    sampler.n_classes = 10**8
    sampler._draw_without_replacement = cpu.draw_without_replacement
    labels = torch.tensor([0, 12_345_678, 10**8 - 1])
    draw(sampler, labels, 50)  # compile outside the measurement
    tracemalloc.start()
    sampled = draw(sampler, labels, 50, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert sampled.classes.max() > 5 * 10**7
    assert len(set(sampled.classes.flatten().tolist())) == sampled.classes.numel()


def test_frequency_has_no_limit_at_two_to_the_24():
    """20 million classes, nearly all mass on the last: torch.multinomial refuses this many."""
    counts = np.ones(20_000_000)
    counts[-1] = 1e9
    sampler = bound_sampler(FrequencyShared, 1.0, 0.01, counts=counts)
    classes = draw(sampler, torch.tensor([0]), 1000).classes
    assert (classes == 19_999_999).float().mean() > 0.9
    assert len(classes.unique()) > 5


@pytest.mark.parametrize("n", [1, 2, 5, 1000, 10**8])
def test_floyd_reference_draws_distinct_numbers(n):
    size = min(n, 6)
    uniforms = torch.rand(50, size, dtype=torch.float64, generator=rng(1))
    drawn = reference.draw_without_replacement(uniforms, n)
    assert ((drawn >= 0) & (drawn < n)).all()
    assert all(len(set(row)) == size for row in drawn.tolist())


def test_same_seed_same_draw_and_two_seeds_differ():
    sampler, labels = bound_sampler(UniformPerRow, counts=np.ones(1000)), torch.arange(20)
    assert torch.equal(draw(sampler, labels, 5, 1).classes, draw(sampler, labels, 5, 1).classes)
    assert not torch.equal(draw(sampler, labels, 5, 1).classes, draw(sampler, labels, 5, 2).classes)


def test_former_names_are_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="'pointed-shared' is now 'candidates-shared'"):
        assert isinstance(resolve_sampler("pointed-shared"), FeatureCandidates)
    for module in (augment_reduce, augment_reduce.sampling):
        with pytest.warns(FutureWarning, match="'FeaturePointed' is now 'FeatureCandidates'"):
            assert module.FeaturePointed is FeatureCandidates
    with pytest.raises(AttributeError, match="no attribute 'FeaturesPointed'"):
        _ = augment_reduce.sampling.FeaturesPointed


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="'uniform', 'uniform-shared'"):
        resolve_sampler("unifrom")
    with pytest.raises(ValueError, match="uniform_share > 0"):
        bound_sampler(FrequencyPerRow, 1.0, 0.0)
    with pytest.raises(ValueError, match="uniform_share in"):
        FrequencyPerRow(uniform_share=1.5)
