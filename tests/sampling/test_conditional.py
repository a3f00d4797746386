"""The samplers that look further than labels: unbiased over every draw, exact where they must be, and resumable."""

import itertools

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import DenseRows, as_rows
from augment_reduce.nn._draw import SharedSampler
from augment_reduce.sampling import (
    Conditional,
    FeatureCandidates,
    HardNegativeCache,
    HeadAndTail,
    Minibatch,
    certain_classes,
)
from augment_reduce.sampling.conditional import bisect
from tests.helpers import rng
from tests.helpers.enumerate_draws import COUNTS, LOOKING, Script, every_outcome, looking, one_row

SKEWED = np.array([60.0, 1.0, 0.0, 7.0, 3.0, 0.0])  # one class that is certain, two never seen


def mean_weights(outcomes, n_classes, label):
    """E[sum of omega over the times that class k counts], which has to be 1 for every k but the label."""
    mean, total = torch.zeros(n_classes, dtype=torch.float64), 0.0
    for probability, sampled in outcomes:
        classes = sampled.columns(1)[0]
        omega = sampled.log_weight.expand(1, len(classes))[0].exp()
        omega = omega if sampled.mask is None else omega.masked_fill(sampled.mask[0], 0.0)
        mean.index_add_(0, classes, probability * omega)
        counting = classes[omega > 0]
        assert not sampled.distinct or len(counting.unique()) == len(counting)
        total += probability
    assert total == pytest.approx(1.0, abs=1e-12)
    expected = torch.ones(n_classes, dtype=torch.float64)
    expected[label] = 0.0
    return mean, expected


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("counts", [COUNTS.numpy(), SKEWED, np.array([3.0, 1.0]), np.ones(3)], ids=len)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("where", ["first", "last"])
def test_unbiased_over_every_draw(name, counts, size, where, monkeypatch):
    K = len(counts)
    label = 0 if where == "first" else K - 1
    sampler = looking(name, counts)
    outcomes = every_outcome(sampler, one_row(label, K), sampler.size(size), Script(monkeypatch))
    mean, expected = mean_weights(outcomes, K, label)
    torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-11)


def test_clusters_made_for_other_weights_cost_no_bias(monkeypatch):
    """Ten steps on, with other weights and another row: q(k | x) is old, its omegas are right."""
    sampler, row = looking("conditional"), one_row(2)
    sampler.draw_for(row, 1, generator=rng(0))
    other = Parameters(5.0 - 3.0 * row.parameters.weight, row.parameters.bias.flip(0), [], [])
    later = row._replace(parameters=other, rows=np.array([2]), steps_taken=10)
    mean, expected = mean_weights(every_outcome(sampler, later, 2, Script(monkeypatch)), 5, 2)
    assert sampler.refreshed_after == 0
    torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-11)


def gradient(row, sampled):
    """Of the softmax bound by the gaps at eta = 2, and 0 where a row meets its label."""
    psi = row.X.dense(row.rows, torch.float64) @ row.parameters.weight.T + row.parameters.bias
    gap = (psi - psi[:, row.labels])[:, sampled.columns(1)[0]].masked_fill(sampled.mask, -torch.inf)
    return -torch.exp(gap + sampled.log_weight) / 2.0


def test_what_is_learned_from_a_draw_serves_the_next_one_without_bias(monkeypatch):
    """After each of all first draws, the mean over all second draws is right; and the cache did learn."""
    row, script = one_row(1), Script(monkeypatch)
    heads = set()
    for _, first in every_outcome(looking("cache-shared"), row, 2, script):
        sampler = looking("cache-shared")
        sampler.observe(row, first, gradient(row, first))
        mean, expected = mean_weights(every_outcome(sampler, row, 2, script), 5, 1)
        torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-11)
        heads.add(int(sampler.remembered[1, 0]))
    assert len(heads) > 1


def test_a_cache_of_the_draw_itself_would_be_biased(monkeypatch):
    """Why `observe` comes after the step: weight 1 for what this very draw found to be hard is no longer its inverse
    chance of being there."""
    row = one_row(1)
    cheated = []
    for probability, sampled in every_outcome(looking("head-tail-shared"), row, 2, Script(monkeypatch)):
        log_weight = sampled.log_weight.clone()
        log_weight[gradient(row, sampled)[0].argmin()] = 0.0
        cheated.append((probability, sampled._replace(log_weight=log_weight)))
    mean, expected = mean_weights(cheated, 5, 1)
    assert (mean - expected).abs().max() > 0.1


def test_the_head_are_the_classes_that_would_be_drawn_anyway():
    """pi = min(1, lambda q) with sum |S|, found here by halving lambda; the torch head draws from the same."""
    counts = 1.0 / np.arange(1, 41)
    sampler = HeadAndTail(uniform_share=0.05).bind(counts, cpu.draw_without_replacement)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if np.minimum(1.0, middle * sampler.q).sum() < 12 else (low, middle)
    assert sampler.head(12).tolist() == np.flatnonzero(low * sampler.q >= 1.0 - 1e-9).tolist()
    assert 0 < len(sampler.head(12)) < 12
    head = SharedSampler(40, 12, HeadAndTail(uniform_share=0.05), counts)
    assert head.certain.tolist() == certain_classes(sampler.q, 12).tolist()


def minibatch(B=16, K=50, D=4, N=40, kernels=cpu, dtype=torch.float64, scale=1.0):
    weight = scale * torch.randn(K, D, generator=rng(0), dtype=dtype)
    X = DenseRows(torch.randn(N, D, generator=rng(1), dtype=dtype).numpy())
    labels = torch.randint(K, (B,), generator=rng(2))
    parameters = Parameters(weight, torch.randn(K, generator=rng(3), dtype=dtype), [], [])
    return Minibatch(X, np.arange(B), labels, parameters, kernels, 0)


def test_a_cluster_for_each_class_is_the_softmax_itself():
    """Then every draw estimates the sum of e^gap without any error: q(k | x) is proportional to it."""
    batch = minibatch(K=8)
    sampler = Conditional(n_clusters=8, share=1e-12).bind(np.arange(8.0), cpu.draw_without_replacement)
    sampled = sampler.draw_for(batch, 1, generator=rng(4))
    psi = torch.from_numpy(batch.X.values[batch.rows]) @ batch.parameters.weight.T + batch.parameters.bias
    full = torch.logsumexp(psi.scatter(1, batch.labels[:, None], -torch.inf), 1)
    torch.testing.assert_close(psi.gather(1, sampled.classes)[:, 0] + sampled.log_weight[:, 0], full)


def test_conditional_draws_vary_less_than_frequent_ones():
    """With scores that differ from row to row, sums estimated from clusters err less at the same |S|."""
    batch, counts = minibatch(B=40, K=256, scale=1.5), np.ones(256)
    psi = torch.from_numpy(batch.X.values[batch.rows]) @ batch.parameters.weight.T + batch.parameters.bias
    full = torch.exp(psi).sum(1) - torch.exp(psi.gather(1, batch.labels[:, None]))[:, 0]
    error = {}
    for share in (0.1, 1.0):  # 1: by frequency, whatever the row
        sampler = Conditional(share=share).bind(counts, cpu.draw_without_replacement)
        sampled = sampler.draw_for(batch, 400, generator=rng(5))
        estimate = torch.exp(psi.gather(1, sampled.classes) + sampled.log_weight).sum(1)
        error[share] = float(((estimate / full - 1) ** 2).mean())
    assert error[0.1] < 0.2 * error[1.0]


@pytest.mark.parametrize(("n", "parts"), [(1, 1), (7, 4), (64, 8), (1000, 32)])
def test_clusters_are_balanced_and_keep_neighbours_together(n, parts):
    points = np.random.default_rng(0).permutation(n)[:, None] * np.ones((1, 3))
    part = bisect(points, parts)
    sizes = np.bincount(part)
    assert len(sizes) == parts
    assert sizes.max() - sizes.min() <= 1
    for i in range(parts):
        assert np.ptp(points[part == i, 0]) == sizes[i] - 1


def test_clusters_are_refreshed_ever_more_rarely():
    sampler, batch, when = Conditional().bind(np.ones(50), cpu.draw_without_replacement), minibatch(), []
    for t in range(300):
        sampler.draw_for(batch._replace(steps_taken=t), 2, generator=rng(t))
        if sampler.refreshed_after == t:
            when.append(t)
    assert when == [0, 16, 40, 76, 130, 211]


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_draws_follow_from_the_generator_in_the_dtype_of_the_weights(name, kernels):
    batch = minibatch(D=3, kernels=kernels, dtype=torch.float32)
    if name == "candidates-shared":
        batch = batch._replace(X=as_rows(csr_matrix(batch.X.values)))
    first, again, other = (
        looking(name, np.arange(50.0)).draw_for(batch, 12, generator=rng(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.classes, again.classes)
    assert torch.equal(first.log_weight, again.log_weight)
    assert not torch.equal(first.classes, other.classes)
    assert first.log_weight.dtype == torch.float32
    assert first.shared == name.endswith("shared")
    assert first.mask is not None or not (first.classes == batch.labels[:, None]).any()


@pytest.mark.parametrize("others", [1e-3, 0.9], ids=["two stand out", "all alike"])
def test_a_row_brings_the_classes_that_stood_out_for_it(others):
    """In the head at its next visit if draws by size of gradient would meet them; left to the tail if not."""
    batch = minibatch()
    row = batch._replace(rows=np.array([3]), labels=batch.labels[3:4])
    sampler = HardNegativeCache(memory=2).bind(np.ones(50), cpu.draw_without_replacement)
    sampled = sampler.draw_for(row, 12, generator=rng(0))
    mass = torch.full((1, 12), others, dtype=torch.float64)
    mass[0, [4, 7]] = 1.0
    sampler.observe(row, sampled, -mass * sampled.log_weight.exp())
    drawn = sampler.draw_for(row, 12, generator=rng(2))
    certain = set(drawn.classes[drawn.log_weight == 0.0].tolist())
    assert certain == (set(sampled.classes[[4, 7]].tolist()) if others < 0.5 else set())
    unknown = sampler.draw_for(batch._replace(rows=np.array([20])), 12, generator=rng(2))
    assert not (unknown.log_weight == 0.0).any()


def test_labels_of_the_minibatch_may_fill_the_cache():
    batch = minibatch()
    sampler = HardNegativeCache(memory=0, batch_labels=True, cache_share=1.0).bind(
        np.ones(50), cpu.draw_without_replacement
    )
    sampled = sampler.draw_for(batch, 30, generator=rng(0))
    sampler.observe(batch, sampled, torch.zeros(16, 30))
    assert set(sampled.classes[sampled.log_weight == 0.0].tolist()) == set(batch.labels.tolist())


@pytest.mark.parametrize("name", LOOKING)
def test_resumed_training_is_training_that_never_stopped(name, tmp_path):
    """Bit for bit, through a file, with a refresh of the clusters (iteration 41) on the other side of it."""
    X = torch.randn(90, 6, generator=rng(0)).numpy()
    y = (X[:, 0] * 3).astype(int) + 5 * (X[:, 1] > 0)
    X = csr_matrix(X) if name == "candidates-shared" else X
    settings = {"class_sampling": name, "n_sampled_classes": 4, "batch_size": 20, "random_state": 0}
    whole = AugmentReduceClassifier(max_iter=50, **settings).fit(X, y)
    half = AugmentReduceClassifier(max_iter=25, warm_start=True, **settings).fit(X, y)
    half.save(tmp_path / "half.safetensors")
    resumed = AugmentReduceClassifier.load(tmp_path / "half.safetensors").fit(X, y)
    assert np.array_equal(resumed.coef_, whole.coef_)
    for key, value in whole._fitted.sampler.items():
        assert torch.equal(resumed._fitted.sampler[key], value)


def test_the_parameters_of_a_sampler_are_saved(tmp_path):
    X, y = csr_matrix(np.eye(6)), np.arange(6) % 3
    for sampler in (
        Conditional(2, 0.4, 0.5, 0.2), HardNegativeCache(3, 0.25, True, 0.5, 0.2), FeatureCandidates(5, 7, 0.5, 0.2)
    ):  # fmt: skip
        AugmentReduceClassifier(class_sampling=sampler, max_iter=3).fit(X, y).save(tmp_path / "model.safetensors")
        back = AugmentReduceClassifier.load(tmp_path / "model.safetensors").class_sampling
        of_each = ("n_clusters", "share"), ("memory", "cache_share", "batch_labels"), ("n_own", "per_feature")
        for field in itertools.chain(*of_each, ("power", "uniform_share")):
            assert getattr(back, field, None) == getattr(sampler, field, None)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="power of two"):
        Conditional(n_clusters=3)
    with pytest.raises(ValueError, match="bound the weights"):
        Conditional(share=0.0)
    with pytest.raises(ValueError, match="memory of 0"):
        HardNegativeCache(memory=-1)
    with pytest.raises(ValueError, match="cache_share in"):
        HardNegativeCache(cache_share=2.0)
    with pytest.raises(TypeError, match="draw_for"):
        Conditional().draw(torch.tensor([0]), 1, generator=rng(0), dtype=torch.float32)


def test_weights_that_have_diverged_are_reported_by_the_sampler_that_scores_them():
    X = torch.randn(60, 3, generator=rng(0)).numpy()
    y = np.arange(60) % 6
    clf = AugmentReduceClassifier(
        class_sampling="conditional", n_sampled_classes=2, batch_size=20, max_iter=3, random_state=0, warm_start=True
    ).fit(X, y)
    clf._fitted.parameters.weight[2] = torch.inf
    with pytest.raises(FloatingPointError, match="After iteration 3: The scores stopped being finite"):
        clf.fit(X, y)
