"""Labels of other rows among the sampled classes: unbiased over draws and over the labels of the minibatch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from augment_reduce.nn import AugmentReduceHead, SharedSampler
from augment_reduce.nn import _columns as columns_module
from augment_reduce.nn._columns import with_labels
from augment_reduce.nn._plain import objective
from tests.helpers import rng
from tests.helpers.user_noises import Laplace

K, D, B = 4, 3, 3
COUNTS = torch.tensor([5.0, 3.0, 1.0, 1.0])


def nodes_of(noise_name, head, psi_y):
    parts = head.local.predict(torch.zeros(1, D, dtype=torch.float64), psi_y)
    return head.local.nodes(parts + 0.3, 7, torch.tensor(0))


def value_of_first_row(head, psi, labels, drawn, expected, group=None, ignored=()):
    """(bound, grad_class (K,), grad_label) of row 0, whose scores psi (K,) and label are fixed."""
    usable = torch.tensor([b not in ignored for b in range(len(labels))])
    every = torch.cat([drawn, labels])
    columns = with_labels(drawn, labels, usable, group, expected[every], (COUNTS / COUNTS.sum()).double()[every], None)
    log_weight, own = columns.of_rows(slice(0, 1), labels)
    psi_y = psi[labels[:1]]
    found = objective(
        head.noise, psi[None, columns.classes].clone(), psi_y, own, log_weight, nodes_of(None, head, psi_y), None
    )
    by_class = torch.zeros(K, dtype=torch.float64).index_add_(0, columns.classes, found.grad_class[0])
    return torch.cat([found.bound, by_class, found.grad_label])


def full(head, psi, label):
    psi_y = psi[label][None]
    own = F.one_hot(label[None], K).bool()
    found = objective(head.noise, psi[None].clone(), psi_y, own, torch.zeros(K), nodes_of(None, head, psi_y), None)
    return torch.cat([found.bound, found.grad_class[0], found.grad_label])


@pytest.mark.parametrize("group", [None, [0, 0, 1], [0, 1, 1], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic", Laplace()], ids=str)
def test_unbiased_over_draws_and_labels(model, group):
    """The mean over every pair of classes and every labels of rows 1 and 2, by frequency, is the sum over all."""
    head = AugmentReduceHead(D, K, model, n_sampled_classes=2)
    psi = torch.randn(K, generator=rng(0), dtype=torch.float64)
    f = (COUNTS / COUNTS.sum()).double()
    groups = None if group is None else torch.tensor(group)
    expected = torch.full((K,), 2 / K, dtype=torch.float64)
    draws = list(itertools.combinations(range(K), 2))
    for label in range(K):
        mean = torch.zeros(K + 2, dtype=torch.float64)
        for others in itertools.product(range(K), repeat=B - 1):
            for drawn in draws:
                labels = torch.tensor([label, *others])
                probability = f[list(others)].prod() / len(draws)
                value = value_of_first_row(head, psi, labels, torch.tensor(drawn), expected, groups)
                mean += probability * value
        torch.testing.assert_close(mean, full(head, psi, torch.tensor(label)), rtol=1e-6, atol=1e-7)


def test_ignored_rows_bring_no_labels():
    """Whatever stands in an ignored row, the others' loss is the same; and unbiased over the labels that count."""
    head = AugmentReduceHead(D, K, n_sampled_classes=2)
    psi, f = torch.randn(K, generator=rng(0), dtype=torch.float64), (COUNTS / COUNTS.sum()).double()
    expected, drawn = torch.full((K,), 2 / K, dtype=torch.float64), list(itertools.combinations(range(K), 2))
    mean = sum(
        f[other] / len(drawn)
        * value_of_first_row(head, psi, torch.tensor([1, other, 3]), torch.tensor(d), expected, ignored=(2,))
        for other in range(K) for d in drawn
    )  # fmt: skip
    torch.testing.assert_close(mean, full(head, psi, torch.tensor(1)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sampling", ["uniform-shared", "frequency-shared", "stratified-shared", "all"])
def test_expected_is_how_often_a_class_is_drawn(sampling):
    """Failure rate about 1e-6 a class; the seeds are fixed."""
    K = 30
    sampler = SharedSampler(K, K if sampling == "all" else 9, sampling, 1.0 / torch.arange(1, K + 1))
    n, counts = 2_000, torch.zeros(K)
    for t in range(n):
        counts += torch.bincount(sampler.draw(5, torch.tensor(t)).classes, minlength=K)
    expected = sampler.expected(torch.arange(K))
    assert ((counts / n - expected).abs() < 5.0 * (expected.clamp(max=4.0) / n).sqrt() + 1e-6).all()
    assert float(expected.sum()) == pytest.approx(sampler.n_sampled, rel=1e-5)


def head_and_batch(n=12, **options):
    counts = torch.arange(1, 41)
    head = AugmentReduceHead(5, 40, n_sampled_classes=6, class_counts=counts, generator=rng(1), **options)
    return head, torch.randn(n, 5, generator=rng(2)), torch.randint(40, (n,), generator=rng(3))


def test_on_by_default_with_counts_and_off_without():
    head, hidden, target = head_and_batch()
    assert head.in_batch
    assert not head_and_batch(in_batch=False)[0].in_batch
    assert not AugmentReduceHead(5, 40).in_batch
    assert not AugmentReduceHead(
        5, 40, class_counts=torch.ones(40), class_sampling="all", n_sampled_classes=40
    ).in_batch
    assert head(hidden, target) != head_and_batch(in_batch=False)[0](hidden, target)


def test_sequences_are_groups_by_themselves():
    """(B, T, D) is B groups; a single sequence has no others and falls back on the drawn classes."""
    head, hidden, target = head_and_batch()
    by_shape = head(hidden.reshape(3, 4, 5), target.reshape(3, 4))
    twin = head_and_batch()[0]
    assert by_shape == twin(hidden, target, group=torch.arange(12) // 4)
    alone, plain = (head_and_batch(in_batch=way, local="amortised")[0] for way in (True, False))
    torch.testing.assert_close(alone(hidden[None], target[None]), plain(hidden, target))
    with pytest.raises(ValueError, match=r"group with one number for each row of hidden, shape \(12,\), found \(11,\)"):
        head(hidden, target, group=torch.arange(11))


def test_beyond_a_number_of_labels_every_so_many_rows_give_theirs(monkeypatch):
    """A row that gives its label sees one label less than the others; both counts are right."""
    monkeypatch.setattr(columns_module, "MOST_LABELS", 5)
    source = columns_module.label_rows_of(12, torch.device("cpu"))
    assert source.tolist() == [0, 2, 4, 7, 9]
    labels = torch.arange(12)
    every = torch.cat([torch.tensor([20, 21]), labels[source]])
    found = with_labels(
        torch.tensor([20, 21]), labels, torch.ones(12, dtype=torch.bool), None, torch.ones(len(every)),
        torch.ones(len(every)), source,
    )  # fmt: skip
    assert found.n.tolist() == [4.0 if b in (0, 2, 4, 7, 9) else 5.0 for b in range(12)]
    head, hidden, target = head_and_batch(reduction="none")
    assert head(hidden, target).isfinite().all()


@pytest.mark.parametrize("model", ["softmax", "probit"])
def test_gradients_are_those_of_the_value(model):
    """With every piece held but hidden and weights: differences of the loss itself, floor off."""
    counts = torch.arange(1, 41)
    head = AugmentReduceHead(
        5, 40, model, n_sampled_classes=6, class_counts=counts, generator=rng(1), dtype=torch.float64, floor=None,
        reduction="sum", local="persistent", n_rows=6,
    )  # fmt: skip
    target = torch.tensor([3, 3, 39, 38, -100, 37])
    head.local.visits.fill_(1), head.local.memory.normal_(2.0, 0.3, generator=rng(4))
    keys = ("weight", "bias")

    def loss(h, *parameters):
        head.clock.counter.zero_(), head.local.memory.copy_(memory), head.local.visits.fill_(1)
        state = dict(zip(keys, parameters, strict=True))
        return torch.func.functional_call(head, state, (h, target), {"index": torch.arange(6)})

    memory = head.local.memory.clone()
    hidden = torch.randn(6, 5, generator=rng(2), dtype=torch.float64)
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("local", ["amortised", "log-sum-exp", "persistent", "fresh"])
@pytest.mark.parametrize("model", ["softmax", "logistic"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_in_chunks_are_the_rows_at_once(model, local, reduction, monkeypatch):
    """Loss, gradients and everything that a step leaves behind."""
    from augment_reduce.nn import _pass

    found = []
    for chunked in (False, True):
        if chunked:
            monkeypatch.setattr(_pass, "WHOLE", 1), monkeypatch.setattr(_pass, "CHUNK", 100)
        head, hidden, target = head_and_batch(
            model=model, local=local, n_rows=12, reduction=reduction, optimizer="adagrad"
        )
        target[4] = -100
        hidden.requires_grad_()
        losses = [head(hidden, target, index=torch.arange(12)) for _ in range(2)]
        upstream = None if reduction == "mean" else torch.linspace(0.5, 1.5, 12)
        losses[1].backward(upstream)
        state = [x.double() for x in head.state_dict().values()]
        found.append([losses[0].detach(), losses[1].detach(), hidden.grad, head.last_gap, *state])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-5)


def test_the_head_learns_with_few_classes_and_the_batchs_own():
    """64 clusters, two sampled classes: the labels of the batch are what makes it learn at all."""
    losses = {}
    for in_batch in (False, True):
        g = rng(0)
        centres = torch.randn(64, 8, generator=g) * 2.0
        head = AugmentReduceHead(
            8, 64, n_sampled_classes=2, class_counts=torch.ones(64), in_batch=in_batch, optimizer="adagrad",
            learning_rate=0.3, generator=rng(1),
        )  # fmt: skip
        for _ in range(80):
            y = torch.randint(64, (64,), generator=g)
            head(centres[y] + 0.3 * torch.randn(64, 8, generator=g), y).backward()
        y = torch.arange(64)
        losses[in_batch] = float(head.eval()(centres, y).detach())
    assert losses[True] < losses[False] - 0.3


def test_log_sum_exp_comes_nearer_than_a_linear_c():
    """log Z of scores that bend: after the same steps the error of c is less than half."""
    errors = {}
    for local in ("amortised", "log-sum-exp"):
        g = rng(0)
        head = AugmentReduceHead(6, 300, local=local, n_sampled_classes=150, generator=rng(1))
        head.requires_grad_(False)
        head.weight.copy_(0.8 * torch.randn(300, 6, generator=g)), head.bias.zero_()
        for _ in range(600):
            h = torch.randn(128, 6, generator=g)
            psi = h @ head.weight.T
            head(h, psi.argmax(1))
        h = torch.randn(500, 6, generator=rng(9))
        c = head.local.predict(h, torch.full((500,), -100.0))[0]
        errors[local] = float((c - head.log_normalizer(h)).square().mean().sqrt())
    assert errors["log-sum-exp"] < 0.5 * errors["amortised"]
