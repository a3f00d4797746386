"""What the loss says: exact in eval(), unfloored in train(), and what is lost between the two."""

import pytest
import torch
import torch.nn.functional as F

from augment_reduce.model import quadrature
from augment_reduce.nn import AugmentReduceHead
from tests.helpers import rng
from tests.helpers.user_noises import Laplace

B, K, D = 30, 50, 6


def problem(dtype=torch.float32):
    g = rng(0)
    hidden, target = torch.randn(B, D, generator=g, dtype=dtype), torch.randint(K, (B,), generator=g)
    return hidden, target


def make(model="softmax", dtype=torch.float32, **options):
    head = AugmentReduceHead(D, K, model, n_sampled_classes=8, generator=rng(1), dtype=dtype, **options)
    with torch.no_grad():
        head.weight.mul_(4.0), head.bias.copy_(torch.randn(K, generator=rng(2)))
    return head


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_eval_is_cross_entropy(reduction, weighted, optimizer):
    head = make(reduction=reduction, optimizer=optimizer).eval()
    hidden, target = problem()
    target[[3, 7]] = -100
    weight = torch.rand(B, generator=rng(3)) if weighted else None
    each = F.cross_entropy(head(hidden), target, reduction="none")
    counts = (target != -100).float() * (1.0 if weight is None else weight)
    expected = {"none": each * counts, "sum": (each * counts).sum(), "mean": (each * counts).sum() / counts.sum()}
    found = head(hidden, target, sample_weight=weight)
    torch.testing.assert_close(found, expected[reduction], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", ["probit", "logistic", Laplace()], ids=str)
def test_eval_is_the_quadrature_of_other_models(model):
    head = make(model, torch.float64).eval()
    hidden, target = problem(torch.float64)
    psi = (hidden @ head.weight.T + head.bias).detach()
    expected = -quadrature.log_likelihood(head.noise, psi, target).mean()
    torch.testing.assert_close(head(hidden, target), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.3}], ids=str)
@pytest.mark.parametrize("model", ["softmax", "probit"])
def test_eval_has_exact_gradients(model, options):
    if model != "softmax" and options:
        return
    head = make(model, torch.float64, **options).eval()
    hidden, target = (x[:4] for x in problem(torch.float64))
    target[1] = -100
    keys = ("weight", "bias")

    def loss(h, *parameters):
        return torch.func.functional_call(head, dict(zip(keys, parameters, strict=True)), (h, target))

    inputs = [x.detach().clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(loss, inputs)


def test_eval_with_smoothing_and_class_weights_is_torchs():
    hidden, target = problem()
    smooth = make(label_smoothing=0.2).eval()
    expected = F.cross_entropy(smooth(hidden), target, label_smoothing=0.2)
    torch.testing.assert_close(smooth(hidden, target), expected)
    weight = torch.rand(K, generator=rng(5))
    weighted = make(class_weight=weight).eval()
    torch.testing.assert_close(weighted(hidden, target), F.cross_entropy(weighted(hidden), target, weight=weight))


def test_eval_of_a_row_that_is_not_finite():
    head = make(reduction="none").eval()
    hidden, target = problem()
    hidden[4, 1] = torch.nan
    hidden.requires_grad_()
    loss = head(hidden, target)
    loss.sum().backward()
    assert loss.isnan().nonzero().tolist() == [[4]]
    assert hidden.grad.isfinite().all()
    assert (hidden.grad[4] == 0).all()


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_the_floor_is_in_the_gradient_and_not_in_the_value(model):
    """With one sample a row and c, or q, far off, the floored value was a promise of more than there is."""
    hidden, target = problem()
    found = {}
    for floor in (None, 0.1):
        head = make(model, floor=floor, optimizer=None)
        h = hidden.clone().requires_grad_()
        loss = head(h, target)
        loss.backward()
        found[floor] = loss.detach(), h.grad, head.floored_share
    assert found[0.1][2] > 0.0
    torch.testing.assert_close(found[None][0], found[0.1][0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[None][1], found[0.1][1])


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_the_gap_is_what_the_bound_loses(model):
    """With every class in the sample it is log p minus the bound: exactly for softmax, near the best q for others."""
    hidden, target = problem()
    head = AugmentReduceHead(
        D, K, model, class_sampling="all", n_sampled_classes=K, n_nodes=5, generator=rng(1), reduction="mean"
    )
    for _ in range(1 if model == "softmax" else 60):  # q learns; the weights are held
        loss = head(hidden, target)
    lost = float((loss - head.eval()(hidden, target)).detach())
    gap = head.last_gap
    assert isinstance(gap, torch.Tensor)
    assert gap.ndim == 0
    if model == "softmax":
        assert lost > 0.01
        assert abs(float(gap) - lost) < 1e-5
        assert torch.equal(head.running_gap, gap)
    else:
        assert 0.0 < float(gap) < lost + 0.01  # what a Gaussian q costs at its best is in `lost` alone


def test_running_gap_is_a_mean():
    head = make()
    gaps = []
    for t in range(5):
        head(problem()[0] + 0.1 * t, problem()[1])
        gaps.append(float(head.last_gap))
    assert float(head.running_gap) == pytest.approx(sum(gaps) / 5, rel=1e-5)
