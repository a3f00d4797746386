"""The head's loss: a bound, its gradients, their means over every possible draw, and the local step behind it."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import augment_reduce.nn.head as head_module
from augment_reduce.model.bounds import Nodes, noise_bound, softmax_bound
from augment_reduce.model.gaussian import fit_gaussian
from augment_reduce.model.noise import resolve_noise
from augment_reduce.nn import AugmentReduceHead, SharedSampler, _predict, _step
from augment_reduce.nn._autograd import BoundLoss
from augment_reduce.nn._draw import Drawn
from augment_reduce.nn._local import Local, hermite
from augment_reduce.nn._place import EveryClass
from augment_reduce.nn._step import Step
from augment_reduce.nn.functional import linear_augment_reduce, linear_sampled_softmax, log_normalizer, log_prob, topk
from tests.helpers import rng
from tests.helpers.user_noises import Laplace

MODELS = ["softmax", "probit", "logistic", Laplace()]
B, K, D = 4, 5, 3


def problem(dtype=torch.float64, b=B, k=K, d=D, seed=0):
    """hidden (b, d), weight (k, d), bias (k,), target (b,)"""
    g = rng(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((b, d), (k, d), (k,)))
    return hidden, weight, bias, torch.randint(k, (b,), generator=g)


def make_step(model, target, drawn, parts=None, *, second=None, n_nodes=1, mode="amortised", **options) -> Step:
    """A step on classes that the test chooses."""
    noise = resolve_noise(model)
    counter, tally = torch.zeros(1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    local = Local(noise, D, K, mode, n_nodes=n_nodes)
    return Step(
        noise, target, None, local, 7, counter, tally, drawn=drawn, second=second, parts=parts, floor=None,
        reduction="none", sparse=False, **options,
    )  # fmt: skip


def some_parts(model, seed=5):
    """Local parameters near sensible ones: c, or (m, log precision)."""
    c = 1.5 + torch.randn(1, B, generator=rng(seed), dtype=torch.float64)
    if resolve_noise(model).name == "softmax":
        return c
    return torch.cat([c, 0.3 * torch.randn(1, B, generator=rng(seed + 1), dtype=torch.float64)])


def every_class() -> Drawn:
    return Drawn(torch.arange(K), torch.zeros(K))


def loss_of(step, hidden, weight, bias):
    return BoundLoss.apply(hidden, weight, bias, step, _step)


def uniform_subsets(size=2):
    log_weight = torch.full((size,), math.log(K / size))
    return [Drawn(torch.tensor(s), log_weight) for s in itertools.combinations(range(K), size)]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("n_nodes", [1, 3])
def test_gradcheck(model, n_nodes):
    """Closed-form gradients by hidden, weight and bias against differences; labels repeat and collide with samples."""
    hidden, weight, bias, _ = problem()
    target = torch.tensor([1, 1, 3, 0])
    drawn = Drawn(torch.tensor([0, 3, 3]), torch.tensor([0.4, 1.1, -0.2]))

    def function(h, w, b):
        return loss_of(make_step(model, target, drawn, some_parts(model), n_nodes=n_nodes), h, w, b)

    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_loss_is_the_bound_of_the_equations(model):
    """Against `bounds`, which writes eq. (7) and (8) in gaps and in eps = v - psi_y."""
    hidden, weight, bias, target = problem()
    parts = some_parts(model)
    psi = hidden @ weight.T + bias
    own = F.one_hot(target, K).bool()
    psi_y = psi[own]
    gap = (psi - psi_y[:, None]).masked_fill(own, -torch.inf)
    step = make_step(model, target, every_class(), parts, n_nodes=3)
    if parts.shape[0] == 1:
        expected = softmax_bound(gap, gap.new_zeros(()), parts[0] - psi_y)
    else:
        v, weights, entropy = step.local.nodes(parts, 7, torch.tensor(0))
        expected = noise_bound(step.noise, gap, gap.new_zeros(()), Nodes(v - psi_y[:, None], weights, entropy))
    torch.testing.assert_close(loss_of(step, hidden, weight, bias), -expected)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_loss_and_gradients_are_unbiased_over_every_draw(model):
    """The mean over all subsets of classes is the full sum: value, gradient by hidden, by weight and by bias."""
    hidden, weight, bias, target = (x.requires_grad_() if x.is_floating_point() else x for x in problem())

    def value_and_gradients(drawn):
        loss = loss_of(make_step(model, target, drawn, some_parts(model)), hidden, weight, bias)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), [hidden, weight, bias])]

    sampled = [value_and_gradients(drawn) for drawn in uniform_subsets()]
    for parts, full in zip(zip(*sampled, strict=True), value_and_gradients(every_class()), strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), full, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_a_fresh_second_sample_leaves_the_gradient_unbiased(model):
    """For each second sample, the mean over every first sample is the gradient at the q that the second one gives."""
    hidden, weight, bias, target = (x.requires_grad_() if x.is_floating_point() else x for x in problem())
    for second in uniform_subsets()[:4]:

        def gradients(drawn, parts=None, second=second):
            step = make_step(model, target, drawn, parts, second=second, mode="fresh")
            loss = loss_of(step, hidden, weight, bias)
            return torch.autograd.grad(loss.sum(), [hidden, weight])

        with torch.no_grad():
            step = make_step(model, target, every_class(), second=second, mode="fresh")
            parts = _step.Pass(step, hidden, weight, bias).scored(slice(0, B)).used
        full = gradients(every_class(), parts)
        sampled = [gradients(drawn) for drawn in uniform_subsets()]
        for each, expected in zip(zip(*sampled, strict=True), full, strict=True):
            torch.testing.assert_close(torch.stack(each).mean(0), expected, rtol=1e-6, atol=1e-7)


def test_with_all_classes_it_is_cross_entropy():
    hidden, weight, bias, target = problem(torch.float32, b=16, k=40, d=6)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_augment_reduce(
        *leaves[:2], target, leaves[2], n_sampled_classes=40, class_sampling="all", sparse_grad=False
    )
    loss.backward()
    exact = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    expected = F.cross_entropy(exact[0] @ exact[1].T + exact[2], target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(leaves, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_bound_is_below_log_prob(model):
    hidden, weight, bias, target = problem(torch.float32, b=20, k=30, d=6)
    head = AugmentReduceHead(6, 30, model, n_sampled_classes=5, n_rows=20, local="amortised")
    with torch.no_grad():
        head.weight.copy_(weight), head.bias.copy_(bias)
    head.local.offset += torch.randn(head.local.n_parts, generator=rng(3))
    gap = head.log_prob(hidden, target) - head.log_prob_bound(hidden, target)
    assert (gap > -1e-5).all()
    assert (gap > 1e-3).any()


def drawn_labels(model, psi, seed):
    """Labels of the model itself: the largest of score plus noise."""
    u = torch.rand(psi.shape, generator=rng(seed), dtype=torch.float64).clamp(1e-12, 1.0 - 1e-12)
    noise = {"softmax": -torch.log(-torch.log(u)), "logistic": torch.logit(u), "probit": torch.special.ndtri(u)}[model]
    return (psi + noise).argmax(1)


def head_with(model, weight, bias, **options) -> AugmentReduceHead:
    """Weights held, so that only the local step learns."""
    head = AugmentReduceHead(weight.shape[1], len(weight), model, generator=rng(1), **options)
    head.requires_grad_(False)
    head.weight.copy_(weight), head.bias.copy_(bias)
    return head


def gap_of_the_best(model, hidden, target, head):
    """log p minus the bound at each row's best q, with every class: what no local step can gain on."""
    psi = (hidden @ head.weight.T + head.bias).double()
    if model == "softmax":
        return torch.zeros(len(target))
    psi_y = psi.gather(1, target[:, None])
    gap = (psi - psi_y).scatter(1, target[:, None], -torch.inf)
    m, precision = fit_gaussian(head.noise, gap, gap.new_zeros(()), n_moves=40)
    parts = torch.stack([m + psi_y[:, 0], precision.log()])
    nodes = head.local.nodes(parts, 0, torch.tensor(0), 20)
    place = EveryClass(head.weight.detach().double(), head.bias.detach().double())
    psi_y, _ = place.label_scores(hidden.double(), target, slice(None))
    best = _predict.bound(head.noise, hidden.double(), place, target, psi_y, nodes)
    return (head.log_prob(hidden, target) - best).float()


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_the_prediction_learns_to_be_tight(model):
    """From sampled classes alone, the bound on new rows comes within 0.12 of the best there is; at first it is not."""
    _, weight, bias, _ = problem(torch.float32, k=400, d=6)
    head = head_with(model, 0.25 * weight, bias, n_sampled_classes=100, local="amortised")
    new = torch.randn(64, 6, generator=rng(2))
    y = drawn_labels(model, new @ head.weight.T + head.bias, 3)

    def excess():
        gap = head.log_prob(new, y) - head.log_prob_bound(new, y)
        return float((gap - gap_of_the_best(model, new, y, head)).mean())

    before = excess()
    for t in range(300):
        h = torch.randn(256, 6, generator=rng(100 + t))
        head(h, drawn_labels(model, h @ head.weight.T + head.bias, t))
    assert excess() < 0.12
    assert excess() < 0.5 * before


@pytest.mark.parametrize("n_classes", [2, 400, 10**7])
@pytest.mark.parametrize("model", ["probit", "logistic"])
def test_the_first_q_is_the_best_for_equal_scores(model, n_classes):
    """E_q[f'] = 0 and precision = -E_q[f''] with f = log phi + (K - 1) log Phi, to a tenth of a deviation."""
    noise = resolve_noise(model)
    m, log_precision = Local(noise, D, n_classes, "amortised").offset.double()
    z, weight = hermite(20, torch.float64, torch.device("cpu"))
    v = m + z * torch.exp(-0.5 * log_precision)
    slope = (noise.dlog_prob(v) + (n_classes - 1) * noise.dlog_cdf(v)) @ weight
    bend = (noise.d2log_prob(v) + (n_classes - 1) * noise.d2log_cdf(v)) @ weight
    assert abs(float(slope * torch.exp(-0.5 * log_precision))) < 0.1
    assert abs(float(torch.log(-bend) - log_precision)) < 0.1


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_persistent_rows_find_their_own_optimum(model):
    hidden, weight, bias, target = problem(torch.float32, b=32, k=100, d=6)
    head = head_with(model, 0.5 * weight, bias, n_sampled_classes=60, local="persistent", n_rows=64)
    index = torch.arange(10, 42)
    for _ in range(200):
        head(hidden, target, index=index)
    gap = head.log_prob(hidden, target) - head.log_prob_bound(hidden, target, index)
    assert float((gap - gap_of_the_best(model, hidden, target, head)).mean()) < 0.04
    assert (head.local.visits[index] == 200).all()
    assert int(head.local.visits.sum()) == 200 * 32


def test_persistent_follows_the_authors_e_step():
    """eta <- (1 - alpha) eta + alpha eta~, in logs, with alpha = (2 + visits)^-0.9."""
    local = Local(resolve_noise("softmax"), D, K, "persistent", n_rows=3)
    used, log_ratio = torch.tensor([[0.3, -0.2]]), torch.tensor([0.5, -1.0])
    local.visits[:] = torch.tensor([4, 0, 9], dtype=torch.int32)
    local.remember(torch.tensor([2, 0]), used, log_ratio, torch.zeros(2), torch.tensor([1.0, 1.0]))
    alpha = torch.tensor([2.0 + 9.0, 2.0 + 4.0]) ** -0.9
    expected = torch.log((1 - alpha) * used[0].exp() + alpha * (used[0] + log_ratio).exp())
    torch.testing.assert_close(local.memory[0, [2, 0]], expected)
    assert local.visits.tolist() == [5, 0, 10]


def test_under_a_floor_pulls_and_lifts_still_balance(monkeypatch):
    """4 of 400 classes are a wild guess of the rest, and the floor acts often. Yet the gradients by the scores must sum
    to nothing on average, as those of a softmax do; else all scores would rise or sink together, without end."""
    _, weight, bias, _ = problem(torch.float32, k=400, d=6)
    head = head_with("softmax", 0.6 * weight, bias, n_sampled_classes=4, local="amortised")
    sums = []

    class Spy:
        @staticmethod
        def forward(*arguments):
            loss, saved = _step.forward(*arguments)
            sums.append(float((saved.grad_class.sum(1) - saved.grad_label).mean()))
            return loss, saved

    monkeypatch.setattr(head_module, "backend_for", lambda *_: Spy)
    for t in range(400):
        h = torch.randn(256, 6, generator=rng(100 + t))
        head(h, drawn_labels("softmax", h @ head.weight.T + head.bias, t))
    assert head.floored_share > 0.05
    assert abs(sum(sums[100:]) / 300) < 0.05


def test_floor_bounds_what_a_row_can_do():
    """c far too low: without the floor the gradient explodes, with it the gradients by class of a row sum to at most
    e^floor."""
    hidden, weight, bias, target = problem(torch.float32)
    parts = torch.full((1, B), -20.0)
    for floor, most in ((None, math.inf), (1.0, math.e), (0.0, 1.0)):
        step = make_step("softmax", target, every_class(), parts)
        step.floor = floor
        _, saved = _step.forward(step, hidden, weight, bias)
        total = saved.grad_class.sum(1)
        assert (total <= most).all()
        assert (total > 1e4).all() if floor is None else step.tally[1] == B


def test_floor_zero_is_sampled_softmax():
    """c can then be no lower than the sample's own estimate; started from below, it is that estimate."""
    hidden, weight, bias, target = problem()
    drawn = uniform_subsets()[3]
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    step = make_step("softmax", target, drawn, torch.full((1, B), -50.0, dtype=torch.float64))
    step.floor, step.reduction = 0.0, "mean"
    loss_of(step, h, w, bias).backward()
    psi = (hidden @ weight.T + bias).requires_grad_()
    own = target[:, None] == drawn.classes
    z = (psi[:, drawn.classes] + drawn.log_weight).masked_fill(own, -torch.inf)
    label = psi.gather(1, target[:, None])
    (torch.logsumexp(torch.cat([z, label], 1), 1) - label[:, 0]).mean().backward()
    torch.testing.assert_close(h.grad, psi.grad @ weight)
    torch.testing.assert_close(w.grad, psi.grad.T @ hidden)


def test_ignored_rows_and_weights():
    hidden, weight, bias, target = problem(torch.float32, b=6)
    drawn, sample_weight = uniform_subsets()[1], torch.rand(6, generator=rng(8))
    target[[1, 4]] = -100
    kept = torch.tensor([0, 2, 3, 5])

    def run(rows, weights, reduction):
        h = hidden[rows].clone().requires_grad_()
        parts = torch.linspace(0.5, 2.0, 6)[None, rows]
        step = make_step("softmax", target[rows], drawn, parts, sample_weight=weights)
        step.reduction = reduction
        loss = loss_of(step, h, weight, bias)
        loss.sum().backward()
        return loss.detach(), h.grad

    every = torch.arange(6)
    each, _ = run(kept, None, "none")
    loss, grad = run(every, sample_weight, "mean")
    w = sample_weight[kept]
    torch.testing.assert_close(loss, (w * each).sum() / w.sum())
    assert (grad[[1, 4]] == 0).all()
    torch.testing.assert_close(grad[kept], run(kept, w, "mean")[1])
    torch.testing.assert_close(run(every, sample_weight, "sum")[0], (w * each).sum())
    assert run(every, None, "none")[0][[1, 4]].tolist() == [0.0, 0.0]


def test_exact_answers_in_blocks(monkeypatch):
    hidden, weight, bias, target = problem(torch.float32, b=7, k=50, d=6)
    monkeypatch.setattr(_predict, "BLOCK", 64)  # a few classes, a row or two at a time
    monkeypatch.setattr(_predict.class_blocks, "__defaults__", (64,))
    monkeypatch.setattr(_predict.row_blocks, "__defaults__", (64,))
    psi = hidden @ weight.T + bias
    torch.testing.assert_close(log_normalizer(hidden, weight, bias), torch.logsumexp(psi, 1))
    torch.testing.assert_close(log_prob(hidden, weight, target, bias), -F.cross_entropy(psi, target, reduction="none"))
    value, classes = topk(hidden, weight, 5, bias)
    expected = torch.log_softmax(psi, 1).topk(5)
    torch.testing.assert_close(value, expected.values)
    assert torch.equal(classes, expected.indices)
    for model in ("probit", "logistic"):
        log_p, best = topk(hidden, weight, 50, bias, model=model)
        torch.testing.assert_close(log_p.exp().sum(1), torch.ones(7), rtol=1e-5, atol=1e-5)
        at_label = log_p.gather(1, (best == target[:, None]).int().argmax(1, keepdim=True))[:, 0]
        torch.testing.assert_close(log_prob(hidden, weight, target, bias, model=model), at_label, rtol=1e-5, atol=1e-5)


def test_hidden_of_any_shape():
    head = AugmentReduceHead(D, 30, n_sampled_classes=5, reduction="none")
    hidden, target = torch.randn(2, 3, D, generator=rng(0)), torch.randint(30, (2, 3), generator=rng(1))
    assert head(hidden, target).shape == (2, 3)
    assert head.log_prob(hidden, target).shape == (2, 3)
    assert head.log_prob_bound(hidden, target).shape == (2, 3)
    assert head.log_normalizer(hidden).shape == (2, 3)
    assert [x.shape for x in head.topk(hidden, 4)] == [(2, 3, 4)] * 2


def test_functional_is_reproducible_and_takes_a_normalizer():
    hidden, weight, bias, target = problem(torch.float32, b=16, k=300, d=6)
    sampler = SharedSampler(300, 50, class_counts=torch.arange(1, 301))
    a, b, c = (
        linear_augment_reduce(hidden, weight, target, bias, class_sampling=sampler, generator=rng(s)) for s in (1, 1, 2)
    )
    assert a == b
    assert a != c
    exact = log_normalizer(hidden, weight, bias)
    losses = torch.stack(
        [
            linear_augment_reduce(
                hidden, weight, target, bias, class_sampling=sampler, log_normalizer=exact, floor=None, generator=rng(s)
            )
            for s in range(300)
        ]
    )
    truth = -log_prob(hidden, weight, target, bias).mean()
    assert abs(float(losses.mean() - truth)) < 5 * float(losses.std()) / 300**0.5  # unbiased where the bound is tight
    sampled = [
        linear_sampled_softmax(hidden, weight, target, bias, sampler=sampler, generator=rng(s)) for s in range(300)
    ]
    assert float(torch.stack(sampled).mean()) < float(truth) - 0.05  # biased: it promises more than there is
    with pytest.raises(ValueError, match="no such number"):
        linear_augment_reduce(hidden, weight, target, bias, model="probit", log_normalizer=exact, n_sampled_classes=9)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_training_recovers_the_classes(model):
    """Rows scattered about one of 60 centres: 12 classes a step are enough to tell nearly all of them apart."""
    centres = 2.0 * torch.randn(60, 8, generator=rng(0))
    head = AugmentReduceHead(
        8, 60, model, n_sampled_classes=12, optimizer="adagrad", learning_rate=0.3, generator=rng(1)
    )
    for t in range(150):
        y = torch.randint(60, (128,), generator=rng(t))
        head(centres[y] + 0.3 * torch.randn(128, 8, generator=rng(1000 + t)), y).backward()
    y = torch.arange(60)
    assert float((head.topk(centres, 1)[1][:, 0] == y).float().mean()) > 0.95
    assert head.log_prob(centres, y).mean() > -1.5  # by chance: -4.1
