"""Prediction in blocks: the same numbers as all rows at once, and never more rows at a time than the budget allows."""

import pytest
import torch
from torch import Tensor

from augment_reduce.model import predict, quadrature
from augment_reduce.model.noise import Gumbel, Logistic, Normal, resolve_noise
from augment_reduce.nn import _predict, functional
from tests.helpers import oracles, rng
from tests.helpers.user_noises import Laplace, StudentT3

N, K = 23, 40
SMALL = 7 * 8 * K * predict.ARRAYS  # bytes for seven rows: four blocks, the last one short
NOISES = [Gumbel(), Normal(), Logistic(), Laplace(), StudentT3()]
each_noise = pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)


class Scores:
    """A table of scores that hands out blocks of rows, and remembers the largest block asked for."""

    def __init__(self, psi: Tensor) -> None:
        self.psi, self.largest, self.seen = psi, 0, torch.zeros(len(psi), dtype=torch.int64)

    def __call__(self, start: int, stop: int) -> Tensor:
        self.largest = max(self.largest, stop - start)
        self.seen[start:stop] += 1
        return self.psi[start:stop]


@pytest.fixture
def table() -> Scores:
    return Scores(2.0 * torch.randn(N, K, dtype=torch.float64, generator=rng(0)))


def test_block_rows_fit_the_budget():
    assert predict.block_rows(1000, 4, 64 << 20) == (64 << 20) // (8 * 1000 * 4)
    assert predict.block_rows(10**9) == 1
    assert list(predict.row_blocks(23, K, SMALL)) == [(0, 7), (7, 14), (14, 21), (21, 23)]
    assert list(predict.row_blocks(0, K)) == []


@each_noise
def test_log_likelihood_in_blocks(noise, table):
    labels = torch.randint(K, (N,), generator=rng(1))
    found = predict.log_likelihood(noise, table, labels, K, budget_bytes=SMALL)
    torch.testing.assert_close(found, quadrature.log_likelihood(noise, table.psi, labels), rtol=0.0, atol=1e-11)
    assert table.largest == 7
    assert table.seen.tolist() == [1] * N
    torch.testing.assert_close(predict.log_likelihood(noise, table, labels), found, rtol=0.0, atol=1e-11)  # K unsaid


@each_noise
def test_log_proba_in_blocks(noise, table):
    found = predict.log_proba(noise, table, N, K, budget_bytes=SMALL)
    assert table.largest == 7
    torch.testing.assert_close(found, quadrature.log_proba(noise, table.psi), rtol=0.0, atol=1e-10)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(N).double(), rtol=0.0, atol=1e-8)
    rounded = predict.log_proba(noise, table, N, K, torch.float32)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), found, rtol=1e-7, atol=1e-7)


def test_softmax_probabilities_are_eq_1(table):
    found = predict.log_proba(Gumbel(), table, N, K)
    assert found[0].tolist() == pytest.approx(oracles.softmax_log_p(table.psi[0].tolist()), rel=1e-14, abs=1e-14)


def test_scores_and_argmax_in_blocks(table):
    assert torch.equal(predict.scores(table, N, K, budget_bytes=SMALL), table.psi)
    assert predict.scores(Scores(table.psi.float()), N, K, budget_bytes=SMALL).dtype == torch.float32
    assert torch.equal(predict.argmax(table, N, K, budget_bytes=SMALL), table.psi.argmax(1))
    assert table.largest == 7


@each_noise
@pytest.mark.parametrize("k", [1, 5, K])
def test_top_k_is_the_head_of_all_probabilities(noise, k, table):
    classes, probabilities = predict.top_k(noise, table, N, K, k, budget_bytes=SMALL)
    everything = quadrature.log_proba(noise, table.psi).exp()
    best = everything.sort(1, descending=True)  # by probability: that the order of scores is the same is the claim
    assert torch.equal(classes, best.indices[:, :k])
    torch.testing.assert_close(probabilities, best.values[:, :k], rtol=0.0, atol=1e-10)
    assert table.largest == 7


def test_ties_go_to_the_lowest_class():
    psi = torch.randint(4, (300, 9), generator=rng(0)).double()
    for k in range(1, 10):
        assert predict.highest(psi, k).tolist() == [oracles.top_classes(row, k) for row in psi.tolist()]
    assert predict.argmax(Scores(psi), 300, 9).tolist() == [oracles.top_classes(row, 1)[0] for row in psi.tolist()]


@pytest.mark.parametrize("size", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("k", [1, 3, 8, 40])
def test_ties_go_to_the_lowest_class_however_classes_fall_into_blocks(size, k):
    """Three levels among 40 classes, -inf and NaN among them, which count as the same and come last."""
    psi = torch.randint(3, (60, 40), generator=rng(1)).double()
    psi[::3, ::4], psi[::5, 1::4], psi[7], psi[8] = torch.nan, -torch.inf, torch.nan, torch.inf
    best = None
    for first in range(0, 40, size):
        best = predict.merge_highest(best, psi[:, first : first + size], first, k)
    ranked = torch.where(psi.isnan(), -torch.inf, psi).tolist()
    assert best[1].tolist() == [oracles.top_classes(row, k) for row in ranked]
    torch.testing.assert_close(best[0], psi.gather(1, best[1]), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 70, 300, 10**6])
def test_head_and_estimator_name_the_same_classes_where_many_tie(block, dtype, monkeypatch):
    """Small whole numbers, whose products are exact: each score is that of some twenty of 120 classes."""
    hidden, weight = (torch.randint(-1, 2, shape, generator=rng(2)).to(dtype) for shape in ((30, 4), (120, 4)))
    bias = torch.randint(2, (120,), generator=rng(3)).to(dtype)
    psi = hidden @ weight.T + bias
    expected = [oracles.top_classes(row, 25) for row in psi.tolist()]
    monkeypatch.setattr(_predict.class_blocks, "__defaults__", (block,))
    for model in ("softmax", "probit"):
        log_p, of_head = functional.topk(hidden, weight, 25, bias, model=model)
        classes, probabilities = predict.top_k(resolve_noise(model), Scores(psi), 30, 120, 25, budget_bytes=block)
        assert of_head.tolist() == classes.tolist() == expected
        torch.testing.assert_close(log_p.exp().double(), probabilities, rtol=1e-4, atol=1e-12)


def test_a_head_whose_scores_are_nan_says_so():
    weight = torch.eye(6)
    weight[2] = torch.nan
    log_p, classes = functional.topk(torch.tensor([[1.0, 3.0, 0.0, 2.0, 2.0, -1.0]]), weight, 6)
    assert classes.tolist() == [[1, 3, 4, 0, 5, 2]]
    assert log_p.isnan().all()


def test_equal_scores_have_equal_probabilities():
    classes, probabilities = predict.top_k(Normal(), Scores(torch.zeros(2, 5)), 2, 5, 3)
    assert classes.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(probabilities, torch.full((2, 3), 0.2, dtype=torch.float64), rtol=0.0, atol=1e-12)


@each_noise
def test_nothing_exceeds_probability_one(noise):
    psi = torch.tensor([[0.0, 900.0, -50.0]]).double()
    assert float(predict.log_likelihood(noise, Scores(psi), torch.tensor([1]))) <= 0.0
    assert predict.log_proba(noise, Scores(psi), 1, 3).max() <= 0.0
    assert predict.top_k(noise, Scores(psi), 1, 3, 2)[1].max() <= 1.0


def test_importance_sampling_in_blocks(table):
    """Standard errors are 0.045 for the least certain row and 0.008 for the mean: six of each, failure rate 1e-7."""
    labels = table.psi.argmax(1)
    found = predict.log_likelihood_importance(
        Normal(), table, labels, K, n_samples=4000, generator=rng(0), budget_bytes=SMALL
    )
    assert table.largest == 7
    exact = quadrature.log_likelihood(Normal(), table.psi, labels)
    assert (found - exact).abs().max() < 0.27
    assert float((found - exact).mean().abs()) < 0.05


def test_no_rows_give_no_answers():
    nothing = Scores(torch.empty(0, K))
    assert predict.log_likelihood(Normal(), nothing, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert predict.log_proba(Normal(), nothing, 0, K).shape == (0, K)
    assert predict.scores(nothing, 0, K).shape == (0, K)
    assert predict.argmax(nothing, 0, K).shape == (0,)
    assert [answer.shape for answer in predict.top_k(Normal(), nothing, 0, K, 3)] == [(0, 3), (0, 3)]


def test_what_does_not_fit_is_named(table):
    labels = torch.zeros(N, dtype=torch.int64)
    labels[[17, 20]] = torch.tensor([K, -1])
    with pytest.raises(ValueError, match=r"2 of 23 rows are outside; first at row 17: y=40"):
        predict.log_likelihood(Normal(), table, labels, K)
    with pytest.raises(ValueError, match=r"between 1 and the number of classes, 40, but found 41"):
        predict.top_k(Normal(), table, N, K, K + 1)
    with pytest.raises(ValueError, match=r"shape \(23, 39\).*found \(23, 40\)"):
        predict.argmax(table, N, K - 1)
    table.psi[18, 3] = float("nan")
    with pytest.raises(ValueError, match="row 18 hold NaN or infinity"):
        predict.argmax(table, N, K, budget_bytes=SMALL)
