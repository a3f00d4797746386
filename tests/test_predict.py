"""Prediction in blocks: the same numbers as all rows at once, and never more rows at a time than the budget allows."""

import oracles
import pytest
import torch
from conftest import rng
from torch import Tensor
from user_noises import Laplace, StudentT3

from augment_reduce import predict, quadrature
from augment_reduce.noise import Gumbel, Logistic, Normal

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
