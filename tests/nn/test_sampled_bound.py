"""The bound as a function of scores: value, gradients, unbiasedness, and what people build on it."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from augment_reduce.model.noise import resolve_noise
from augment_reduce.nn import AugmentReduceHead, LocalParameters, SharedSampler, sampled_bound
from tests.helpers import rng
from tests.helpers.user_noises import Laplace

MODELS = ["softmax", "probit", "logistic", Laplace()]
B, K = 4, 6


def scores(seed=0):
    psi = torch.randn(B, K, generator=rng(seed), dtype=torch.float64)
    label = torch.tensor([2, 0, 5, 2])
    return psi, label


def parts_of(model):
    c = 1.2 + 0.5 * torch.randn(B, generator=rng(3), dtype=torch.float64)
    return c if resolve_noise(model).name == "softmax" else torch.stack([c, 0.3 * torch.ones_like(c)])


def bound_of(psi, label, classes, log_weight, model, **options):
    own = label[:, None] == classes
    psi_y = psi.gather(1, label[:, None])[:, 0]
    return sampled_bound(psi_y, psi[:, classes], log_weight, own, parts_of(model), model=model, floor=None, **options)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_gradcheck_by_both_scores(model):
    psi, label = scores()
    classes = torch.tensor([0, 3, 5])
    own = label[:, None] == classes
    psi_y = psi.gather(1, label[:, None])[:, 0].clone().requires_grad_()
    drawn = psi[:, classes].clone().requires_grad_()
    log_weight = torch.randn(B, 3, generator=rng(1), dtype=torch.float64)

    def function(y, s):
        return sampled_bound(y, s, log_weight, own, parts_of(model), model=model, floor=None)

    assert torch.autograd.gradcheck(function, (psi_y, drawn))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_unbiased_over_every_draw(model):
    psi, label = scores()
    psi.requires_grad_()

    def value_and_gradient(classes, log_weight):
        bound = bound_of(psi, label, torch.tensor(classes), log_weight, model)
        return [bound.detach(), torch.autograd.grad(bound.sum(), psi)[0]]

    draws = list(itertools.combinations(range(K), 2))
    sampled = [value_and_gradient(draw, math.log(K / 2)) for draw in draws]
    for each, full in zip(zip(*sampled, strict=True), value_and_gradient(range(K), 0.0), strict=True):
        torch.testing.assert_close(torch.stack(each).mean(0), full, rtol=1e-6, atol=1e-7)


def test_it_is_a_bound_and_tight_at_log_z():
    psi, label = scores()
    own = F.one_hot(label, K).bool()
    log_p = psi.log_softmax(1)[own]
    assert (bound_of(psi, label, torch.arange(K), 0.0, "softmax") <= log_p).all()
    tight = sampled_bound(psi[own], psi, 0.0, own, torch.logsumexp(psi, 1))
    torch.testing.assert_close(tight, log_p)


@pytest.mark.parametrize("model", ["probit", "logistic"])
def test_other_models_are_bounded_too(model):
    psi, label = scores()
    own = F.one_hot(label, K).bool()
    head = AugmentReduceHead(K, K, model, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.eye(K))
    log_p = head.log_prob(psi, label)
    found = sampled_bound(psi[own], psi, 0.0, own, model=model, n_nodes=20)
    assert (found <= log_p + 1e-6).all()
    assert (found > log_p - 0.05).all()  # what a Gaussian q loses


def test_without_local_it_is_sampled_softmax():
    psi, label = scores()
    classes, log_weight = torch.tensor([0, 3, 5]), torch.tensor([0.3, 0.9, 0.1], dtype=torch.float64)
    own = label[:, None] == classes
    found = []
    for way in range(2):
        y = psi.gather(1, label[:, None])[:, 0].clone().requires_grad_()
        s = psi[:, classes].clone().requires_grad_()
        if way:
            z = torch.logsumexp(torch.cat([(s + log_weight).masked_fill(own, -torch.inf), y[:, None]], 1), 1)
            value = y - z
        else:
            value = sampled_bound(y, s, log_weight, own)
        value.sum().backward()
        found.append((value.detach(), y.grad, s.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("mode", ["amortised", "log-sum-exp", "persistent"])
def test_local_parameters_learn(model, mode):
    """On rows that stay, each bound comes near that of a q fitted to its row."""
    g = rng(0)
    hidden = torch.randn(64, 4, generator=g)
    weight = torch.randn(30, 4, generator=g) * 0.5
    psi, label = hidden @ weight.T, torch.randint(30, (64,), generator=g)
    own, psi_y = F.one_hot(label, 30).bool(), psi.gather(1, label[:, None])[:, 0]
    best = sampled_bound(psi_y, psi, 0.0, own, model=model)
    local = LocalParameters(4, 30, model, mode=mode, n_rows=64 if mode == "persistent" else None)
    index = torch.arange(64) if mode == "persistent" else None
    lost = [float((best - sampled_bound(psi_y, psi, 0.0, own, local.at(hidden, index))).mean()) for _ in range(150)]
    assert lost[-1] < (0.15 if index is not None else 0.25)
    assert lost[-1] < lost[0] + 1e-3
    before = {name: x.clone() for name, x in local.state_dict().items()}
    local.eval()
    sampled_bound(psi_y, psi, 0.0, own, local.at(hidden, index))
    assert all(torch.equal(x, before[name]) for name, x in local.state_dict().items())


def test_the_head_is_the_same_bound():
    """With c kept for each row: the head's loss is minus the mean of `sampled_bound` of its scores."""
    head = AugmentReduceHead(5, 40, local="persistent", n_rows=8, n_sampled_classes=9, generator=rng(1))
    hidden, target = torch.randn(8, 5, generator=rng(2)), torch.randint(40, (8,), generator=rng(3))
    head.local.memory.normal_(3.5, 0.3, generator=rng(4)), head.local.visits.fill_(1)
    c = head.local.memory[0].clone()
    drawn = head.sampler.draw(head.key, head.clock.counter[0])
    psi = head(hidden)
    psi_y = psi.gather(1, target[:, None])[:, 0]
    bound = sampled_bound(psi_y, psi[:, drawn.classes], drawn.log_weight, target[:, None] == drawn.classes, c)
    torch.testing.assert_close(head(hidden, target, index=torch.arange(8)), -bound.mean())


def test_draw_is_new_at_every_call_and_repeatable():
    sampler = SharedSampler(1000, 10)
    first, second = sampler.draw(), sampler.draw()
    assert not torch.equal(first.classes, second.classes)
    assert first.log_weight.exp().tolist() == pytest.approx([100.0] * 10)
    torch.manual_seed(3)
    a = sampler.draw()
    torch.manual_seed(3)
    assert torch.equal(a.classes, sampler.draw().classes)
    assert torch.equal(sampler.draw(generator=rng(1)).classes, sampler.draw(generator=rng(1)).classes)


@pytest.mark.parametrize("near", [None, [4, 1, 1, -1], [0]], ids=str)
def test_draw_for_is_unbiased_with_certain_classes(near):
    """E[sum of omega_k g_k over what a row sees] = sum_{k != y} g_k, over every draw and label of the other row."""
    counts = torch.tensor([4.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    f, g = (counts / counts.sum()).double(), torch.randn(K, generator=rng(0), dtype=torch.float64)
    sampler = SharedSampler(K, 2, "uniform-shared", counts)
    hard = None if near is None else torch.tensor(near)
    for label in range(K):
        total = 0.0
        pairs = list(itertools.permutations(range(K), 2))
        for pair in pairs:
            drawn = sampler.draw()._replace(classes=torch.tensor(pair))
            sampler.draw = lambda drawn=drawn, **_: drawn
            for other in range(K):
                found = sampler.draw_for(torch.tensor([label, other]), near=hard)
                omega = torch.exp(found.log_weight[0].double()).masked_fill(found.mask[0], 0.0)
                total = total + f[other] / len(pairs) * (omega * g[found.classes]).sum()
            del sampler.draw
        torch.testing.assert_close(total, g.sum() - g[label], rtol=1e-6, atol=1e-6)


def test_rows_that_are_not_finite_have_no_gradient():
    psi, label = scores()
    psi = psi.clone()
    psi[1, 3] = torch.nan
    psi.requires_grad_()
    own = F.one_hot(label, K).bool()
    local = LocalParameters(2, K)
    before = local.local.offset.clone()
    bound = sampled_bound(psi.gather(1, label[:, None])[:, 0], psi, 0.0, own, local.at(torch.ones(B, 2)))
    assert bound.isnan().tolist() == [False, True, False, False]
    bound.nansum().backward()
    assert psi.grad.isfinite().all()
    assert local.local.offset.isfinite().all()
    assert not torch.equal(local.local.offset, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"psi_label": torch.zeros(B, 1)}, r"psi_label of shape \(4,\).*found \(4, 1\)\. A margin"),
        ({"psi": torch.zeros(B)}, r"psi of shape \(B, S\)"),
        ({"log_weight": torch.zeros(3)}, r"log_weight of shape \(6,\) or \(4, 6\), found \(3,\)"),
        ({"own_label_mask": torch.zeros(B, K)}, "dtype bool, found"),
        ({"local": torch.zeros(2, B)}, r"local of shape \(4,\), c of each row"),
        ({"local": torch.zeros(B), "model": "probit"}, r"local of shape \(2, 4\), m and log precision"),
        ({"n_nodes": 1, "model": "probit"}, "at least 2, found 1"),
    ],
)
def test_wrong_shapes(change, message):
    arguments = {"psi_label": torch.zeros(B), "psi": torch.zeros(B, K), **change}
    with pytest.raises(ValueError, match=message):
        sampled_bound(**arguments)


def test_wrong_local_parameters():
    with pytest.raises(ValueError, match="needs the head"):
        LocalParameters(3, 10, mode="fresh")
    with pytest.raises(ValueError, match="at least 2"):
        LocalParameters(3, 10, n_nodes=1)
    with pytest.raises(ValueError, match=r"\(B, in_features=3\), found \(4, 2\)"):
        LocalParameters(3, 10).at(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="only there"):
        LocalParameters(3, 10).at(torch.zeros(4, 3), torch.arange(4))
