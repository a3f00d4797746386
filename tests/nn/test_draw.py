"""How a head draws its classes: every class as often as its weight says, from numbers that depend on nothing but
(seed, step, place). Where only sampling will do, the seed is fixed, and a right sampler fails once in a million."""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch

from augment_reduce.nn import SharedSampler, _hash
from augment_reduce.sampling import AllClasses, FrequencyShared, UniformPerRow, UniformShared

FAILURE_RATE = 1e-6
KEY = _hash.seed_key(20180710)
COUNTS = torch.tensor([8.0, 5.0, 3.0, 2.0, 1.0, 1.0])


def step(t: int) -> torch.Tensor:
    return torch.tensor(t)


def many_draws(n: int, size: int, stream: int, steps: int) -> torch.Tensor:
    """What SharedSampler(n, size, "uniform-shared") draws in steps 0, 1, ...: (steps, size), all at once."""
    keys = _hash.step_key(KEY, torch.arange(steps)[:, None], stream)
    drawn = _hash.permuted(keys, torch.arange(size).expand(steps, size), n)
    one = SharedSampler(n, size, "uniform-shared").draw(KEY, step(steps - 1), _hash.MAIN).classes
    assert stream != _hash.MAIN or torch.equal(drawn[-1], one)
    return drawn


@pytest.mark.parametrize(("n", "size"), [(5, 2), (7, 3), (4, 1), (6, 5), (9, 2)])
def test_every_subset_is_equally_likely(n, size):
    drawn = many_draws(n, size, _hash.MAIN, 20_000)
    counts = Counter(tuple(row) for row in drawn.sort(dim=1).values.tolist())
    subsets = list(itertools.combinations(range(n), size))
    assert set(counts) <= set(subsets)
    assert scipy.stats.chisquare([counts[s] for s in subsets]).pvalue > FAILURE_RATE


@pytest.mark.parametrize("n", [2, 3, 10, 1_000, 10_007, 10**7, 2**31 - 1])
def test_a_permutation_never_repeats_and_stays_inside(n):
    size = min(n, 4_096)
    drawn = SharedSampler(n, size, "uniform-shared").draw(KEY, step(3), _hash.MAIN)
    assert len(drawn.classes.unique()) == size
    assert int(drawn.classes.min()) >= 0
    assert int(drawn.classes.max()) < n
    torch.testing.assert_close(drawn.log_weight.exp(), torch.full((size,), n / size), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [*range(2, 81), 203, 500, 1_000, 10_007])
def test_a_walk_ends_within_the_proven_bound(n):
    """From every place below n, under 20 keys: the cycle through it meets at most all points outside before it."""
    a, b = _hash.grid_of(n)
    assert n <= a * b < n + a
    for t in range(20):
        drawn = _hash.permuted(_hash.step_key(KEY, step(t), _hash.MAIN), torch.arange(n), n)
        assert torch.equal(drawn.sort().values, torch.arange(n))


def test_a_place_outside_cannot_make_the_walk_endless():
    """Such a place may be on a cycle with no point below n, where the walk went on for ever."""
    keys = _hash.step_key(KEY, torch.arange(200), _hash.MAIN)  # under some of them, the grid's points 10 and 11 do
    with pytest.raises(ValueError, match=r"places in \[0, n=10\), found 11 to 11"):
        _hash.permuted(keys, torch.full((200,), 11), 10)


def test_the_two_samples_of_a_step_are_independent():
    """From halves of one draw without replacement the pair (k, k) could never come up."""
    first, second = (many_draws(4, 1, stream, 20_000)[:, 0].tolist() for stream in (_hash.MAIN, _hash.SECOND))
    pairs = Counter(zip(first, second, strict=True))
    assert scipy.stats.chisquare([pairs[p] for p in itertools.product(range(4), repeat=2)]).pvalue > FAILURE_RATE


def test_the_same_step_draws_the_same_classes_and_another_draws_others():
    sampler = SharedSampler(1_000, 50, class_counts=torch.arange(1, 1_001))
    a, b, c = (sampler.draw(KEY, step(t), _hash.MAIN).classes for t in (7, 7, 8))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    other_seed = sampler.draw(_hash.seed_key(1), step(7), _hash.MAIN).classes
    assert not torch.equal(a, other_seed)


@pytest.mark.parametrize("name", ["frequency-shared", "stratified-shared"])
@pytest.mark.parametrize("stream", [_hash.MAIN, _hash.SECOND])
def test_weights_make_up_for_how_often_a_class_is_drawn(name, stream, monkeypatch):
    """Over an even grid of its random numbers each class gets total weight 1. Masses here are multiples of 1 / 20 of
    the total (1 / 12 of the rest), so that with 3, 2 or 1 strata every class ends at a step of the grid of 600."""
    sampler = SharedSampler(6, 3, name, COUNTS, uniform_share=0.0)
    assert sampler.n_certain == (1 if name == "stratified-shared" else 0)
    grid = (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    received = torch.zeros(6, dtype=torch.float64)
    for u in grid.tolist():
        monkeypatch.setattr(_hash, "uniform", lambda key, place, u=u: torch.full_like(place, u, dtype=torch.float64))
        monkeypatch.setattr(_hash, "in_stratum", lambda key, place, u=u: place.double() + u)
        drawn = sampler.draw(KEY, step(0), stream)
        received.index_add_(0, drawn.classes, drawn.log_weight.double().exp())
    expected = torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(received / len(grid), expected, rtol=1e-6, atol=0)


def test_strata_vary_less_than_independent_draws():
    """The estimate of a sum over classes, over 1,000 steps: here the variance must fall by more than half."""
    counts = 1.0 / torch.arange(1, 201, dtype=torch.float64)
    f = counts * (1.0 + torch.rand(200, generator=torch.Generator().manual_seed(0)))
    spread = {}
    for name in ("frequency-shared", "stratified-shared"):
        sampler = SharedSampler(200, 30, name, counts)
        draws = (sampler.draw(KEY, step(t), _hash.MAIN) for t in range(1_000))
        sums = torch.stack([(f[d.classes] * d.log_weight.exp()).sum() for d in draws])
        assert abs(float(sums.mean() - f.sum())) < 5.0 * float(sums.std()) / 1_000**0.5
        spread[name] = float(sums.var())
    assert spread["stratified-shared"] < 0.5 * spread["frequency-shared"]


def test_with_room_for_all_classes_every_one_is_certain():
    sampler = SharedSampler(6, 6, "stratified-shared", COUNTS)
    drawn = sampler.draw(KEY, step(0), _hash.SECOND)
    assert drawn.classes.tolist() == list(range(6))
    assert drawn.log_weight.tolist() == [0.0] * 6


def test_normal_numbers_are_normal():
    z = _hash.normal(_hash.step_key(KEY, step(1), _hash.NODE), torch.arange(20_000))
    assert scipy.stats.kstest(z.numpy(), "norm").pvalue > FAILURE_RATE


def test_bits_of_neighbouring_places_are_unrelated():
    """Each of the 32 bits, and the agreement of a place's bits with the next place's, is a fair coin."""
    b = _hash.bits(_hash.step_key(KEY, step(1), _hash.MAIN), torch.arange(20_001), 0)
    for x in (b[1:], b[1:] ^ b[:-1]):
        ones = ((x[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert float((ones - 0.5).abs().max()) < 5.5 * 0.5 / 20_000**0.5  # 32 coins, 5.5 deviations: 1e-6


def test_samplers_of_the_estimator_are_understood():
    assert SharedSampler(6, 2, UniformShared()).name == "uniform-shared"
    assert SharedSampler(6, 2, AllClasses()).n_sampled == 6
    by_object = SharedSampler(6, 2, FrequencyShared(power=0.5, uniform_share=0.3), COUNTS)
    q = torch.diff(by_object.cumulative, prepend=torch.zeros(1, dtype=torch.float64))
    expected = 0.7 * COUNTS.double().sqrt() / COUNTS.double().sqrt().sum() + 0.3 / 6
    torch.testing.assert_close(q, expected)
    assert SharedSampler(6, 2).name == "uniform-shared"
    assert SharedSampler(6, 2, class_counts=COUNTS).name == "stratified-shared"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 7), "between 1 and n_classes=6, found 7"),
        ((6, 0), "between 1 and n_classes=6, found 0"),
        ((1, 1), "at least 2, found 1"),
        ((2**31, 1), r"below 2\^31"),
        ((6, 2, "uniform"), "found 'uniform'"),
        ((6, 2, UniformPerRow()), "UniformPerRow"),
        ((6, 2, "frequency-shared"), "needs class_counts"),
        ((6, 2, None, torch.ones(5)), r"shape \(6,\)"),
        ((6, 2, None, np.array([1.0, 1, 1, 1, 1, -1])), "not negative"),
        ((6, 2, None, torch.zeros(6)), "not all zero"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SharedSampler(*arguments)


def test_unseen_classes_need_a_share_of_the_draws():
    with pytest.raises(ValueError, match="2 of 6 classes have no training row"):
        SharedSampler(6, 2, None, torch.tensor([1.0, 2, 3, 4, 0, 0]), uniform_share=0.0)
    assert SharedSampler(6, 2, None, torch.tensor([1.0, 2, 3, 4, 0, 0])).n_sampled == 2


def test_tables_keep_their_precision():
    sampler = SharedSampler(6, 2, class_counts=COUNTS).to(torch.bfloat16)
    assert sampler.cumulative.dtype == torch.float64
