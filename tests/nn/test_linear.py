"""A head in place of an nn.Linear, and back; logits of all classes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from augment_reduce.nn import AugmentReduceHead
from tests.helpers import rng

D, K = 6, 40


def linear(bias=True, **where):
    layer = nn.Linear(D, K, bias=bias, **where)
    if not layer.weight.is_meta:
        with torch.no_grad():
            layer.weight.copy_(torch.randn(K, D, generator=rng(1)))
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("model", ["softmax", "probit"])
def test_the_weights_are_the_layers_own_there_and_back(model, bias):
    layer = linear(bias)
    head = AugmentReduceHead.from_linear(layer, model, n_sampled_classes=8, class_counts=torch.arange(1, K + 1))
    back = head.to_linear()
    assert head.noise.name == model
    for name, parameter in layer.named_parameters():
        assert getattr(head, name) is getattr(back, name) is parameter
    assert (head.bias is None) == (back.bias is None) == (not bias)
    hidden = torch.randn(3, 2, D, generator=rng(2))
    torch.testing.assert_close(head(hidden), layer(hidden), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("optimizer", [None, "adagrad", "rowwise-adagrad", "adam"])
def test_it_trains_as_a_head_that_was_given_the_weights(optimizer):
    """Every draw, table and state is that of a head from the constructor."""
    settings = {"n_sampled_classes": 8, "class_counts": torch.arange(1, K + 1), "optimizer": optimizer}
    layer = linear()
    one = AugmentReduceHead.from_linear(layer, generator=rng(3), **settings)
    other = AugmentReduceHead(D, K, generator=rng(3), **settings)
    other.load_state_dict(
        layer.state_dict() | {k: v for k, v in one.state_dict().items() if k not in ("weight", "bias")}
    )
    hidden, target = torch.randn(20, D, generator=rng(4)), torch.randint(K, (20,), generator=rng(5))
    for _ in range(3):
        losses = [head(hidden, target) for head in (one, other)]
        assert losses[0].item() == losses[1].item()
        for loss, head in zip(losses, (one, other), strict=True):
            head.zero_grad()
            loss.backward()
    torch.testing.assert_close(one.weight, other.weight, rtol=0.0, atol=0.0)
    if optimizer is None:
        torch.testing.assert_close(one.weight.grad.to_dense(), other.weight.grad.to_dense(), rtol=0.0, atol=0.0)
    else:
        assert not torch.equal(one.weight, linear().weight)  # the layer's weights moved
        assert one.weight is layer.weight


def test_a_layer_without_memory_gives_a_head_without_memory():
    head = AugmentReduceHead.from_linear(linear(device="meta"), n_sampled_classes=8)
    assert head.weight.is_meta
    head.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(head(torch.randn(4, D, generator=rng(0)), torch.arange(4))).item()


def test_logits_have_gradients_as_of_a_linear_layer():
    layer = linear()
    head = AugmentReduceHead.from_linear(layer)
    hidden = [torch.randn(5, D, generator=rng(1)).requires_grad_() for _ in range(2)]
    target = torch.arange(5)
    grads = []
    for f, h in zip((layer, head), hidden, strict=True):
        layer.zero_grad()
        F.cross_entropy(f(h), target).backward()
        grads.append((h.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)


def test_logits_that_would_train_nothing_are_refused():
    head = AugmentReduceHead(D, K, optimizer="adagrad")
    hidden = torch.randn(5, D)
    with pytest.raises(ValueError, match="carry no gradient to its weights"):
        head(hidden)
    with torch.no_grad():
        assert head(hidden).shape == (5, K)
    assert head.eval()(hidden).shape == (5, K)
    head.train().requires_grad_(False)
    assert head(hidden.requires_grad_()).requires_grad  # frozen: the gradient to hidden is all there is


def test_half_precision_beside_float32():
    head = AugmentReduceHead(D, K)
    hidden = torch.randn(5, D)
    torch.testing.assert_close(head(hidden.bfloat16()), head(hidden), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("names", [{"bias": False}, {"device": "cpu"}, {"dtype": torch.float64}])
def test_what_the_layer_says_is_not_said_again(names):
    with pytest.raises(ValueError, match=f"Expected no {next(iter(names))}"):
        AugmentReduceHead.from_linear(linear(), **names)


def test_other_calls_are_refused():
    with pytest.raises(TypeError, match=r"Expected an nn\.Linear, found Embedding"):
        AugmentReduceHead.from_linear(nn.Embedding(K, D))
    with pytest.raises(ValueError, match="need"):
        AugmentReduceHead(D, K)(torch.zeros(2, D), sample_weight=torch.ones(2))
