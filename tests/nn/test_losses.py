"""Class weights, label smoothing, a z-loss, soft targets: the value and the gradient of each, on average exact."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from augment_reduce.model.noise import Gumbel
from augment_reduce.nn import AugmentReduceHead, _step
from augment_reduce.nn._autograd import BoundLoss
from augment_reduce.nn._draw import Drawn
from augment_reduce.nn._local import Local
from augment_reduce.nn._smoothing import ClassMean
from tests.helpers import rng

B, K, D = 3, 5, 4


def problem():
    g = rng(0)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((B, D), (K, D), (K,)))
    return [x.requires_grad_() for x in (hidden, weight, bias)], torch.tensor([1, 4, 1])


def step_of(target, drawn, c, **options):
    mean = ClassMean(D, K, torch.device("cpu")).double() if options.get("label_smoothing") else None
    if mean is not None:
        mean.row.normal_(generator=rng(7)), mean.bias.fill_(0.3)
    counter, tally = torch.zeros(1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    return _step.Step(
        Gumbel(), target, None, Local(Gumbel(), D, K, "amortised"), 7, counter, tally, drawn=drawn, parts=c,
        class_mean=mean, floor=None, reduction="mean", sparse=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.3}, {"z_loss": 0.2}, {"label_smoothing": 0.1, "z_loss": 0.1}]
)
def test_unbiased_over_every_draw(options):
    """Value and all gradients, whatever the running mean of the rows; with c right, those of the exact loss."""
    inputs, target = problem()
    psi = inputs[0] @ inputs[1].T + inputs[2]
    c = torch.logsumexp(psi, 1).detach()[None]

    def of(drawn):
        loss = BoundLoss.apply(*inputs, step_of(target, drawn, c, **options), _step)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    log_z = torch.logsumexp(psi, 1)
    exact = F.cross_entropy(psi, target, label_smoothing=options.get("label_smoothing", 0.0))
    exact = exact + options.get("z_loss", 0.0) * log_z.square().mean()
    expected = [exact.detach(), *torch.autograd.grad(exact, inputs)]
    draws = [
        Drawn(torch.tensor(pair), torch.full((2,), math.log(K / 2), dtype=torch.float64))
        for pair in itertools.combinations(range(K), 2)
    ]
    found = [of(drawn) for drawn in draws]
    for each, full in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(each).mean(0), full, rtol=1e-6, atol=1e-7)


def test_the_running_mean_takes_noise_away():
    """Rows with much in common: the smoothed loss of one draw varies less once their mean is known."""
    spread = {}
    for learned in (False, True):
        head = AugmentReduceHead(D, 200, n_sampled_classes=10, label_smoothing=0.5, generator=rng(1))
        head.requires_grad_(False)
        head.weight.copy_(5.0 + 0.1 * torch.randn(200, D, generator=rng(2)))
        hidden, target = torch.randn(16, D, generator=rng(3)), torch.randint(200, (16,), generator=rng(4))
        if learned:
            for _ in range(50):
                head(hidden, target)
            assert (head.class_mean.row - head.weight.mean(0)).abs().max() < 0.05
        with torch.no_grad():  # the draws differ, nothing learns
            losses = [head(hidden, target) for _ in range(40)]
        spread[learned] = float(torch.stack(losses).std())
    assert spread[True] < spread[False]


def test_class_weights_are_sample_weights_of_their_labels():
    weight = torch.rand(K, generator=rng(5)) + 0.1
    heads = [AugmentReduceHead(D, K, n_sampled_classes=2, generator=rng(1), class_weight=w) for w in (weight, None)]
    (hidden, *_), target = problem()
    hidden = hidden.detach().float()
    losses = [heads[0](hidden, target), heads[1](hidden, target, sample_weight=weight[target])]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("reduction", ["mean", "none", "sum"])
@pytest.mark.parametrize("training", [False, True])
def test_soft_targets(training, reduction):
    """Over all classes both ways are cross entropy with probabilities; a class of probability 0 counts for nothing."""
    head = AugmentReduceHead(
        D, K, n_sampled_classes=K, class_sampling="all", local="fresh", reduction=reduction, floor=None,
        generator=rng(1), dtype=torch.float64,
    ).train(training)  # fmt: skip
    (hidden, *_), _ = problem()
    target = torch.tensor([[0, 1, 2], [3, 4, 0], [2, 0, 1]])
    prob = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    dense = torch.zeros(B, K, dtype=torch.float64).scatter_add_(1, target, prob)
    expected = F.cross_entropy(head.eval()(hidden), dense, reduction=reduction)
    head.train(training)
    torch.testing.assert_close(head(hidden, target, target_prob=prob), expected)
    with pytest.raises(ValueError, match=r"soft targets of shape \(3, 'M'\)"):
        head(hidden, target[:2], target_prob=prob[:2])


def test_bfloat16_weights_and_everything_at_once():
    head = AugmentReduceHead(
        D, 50, n_sampled_classes=8, class_counts=torch.arange(1, 51), label_smoothing=0.1, z_loss=1e-3,
        dtype=torch.bfloat16, optimizer="adagrad", generator=rng(1),
    )  # fmt: skip
    hidden = torch.randn(20, D, generator=rng(2), dtype=torch.bfloat16)
    target = torch.randint(50, (20,), generator=rng(3))
    target[3] = -100
    before = head.eval()(hidden, target).detach()
    for _ in range(40):
        head.train()(hidden, target).backward()
    assert head.eval()(hidden, target) < before - 0.5
