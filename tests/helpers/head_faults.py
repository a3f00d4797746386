"""What users do to a head that must not lose training or poison it: each a function of a way to make heads.

Each returns what it leaves behind, by name, so that both backends can be compared on it: tests/nn/test_safety.py
says what is wanted in plain torch, tests/parity/test_triton_safety.py that the kernels do the same.
"""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from augment_reduce.nn import AugmentReduceHead
from tests.helpers import rng

B, K, D, S = 24, 40, 5, 12
Make = Callable[..., AugmentReduceHead]
Found = dict[str, Any]


def batch(t: int = 0) -> tuple[Tensor, Tensor]:
    """Labels repeat within the minibatch and meet the sampled classes: K is small."""
    g = rng(t)
    return torch.randn(B, D, generator=g), torch.randint(K, (B,), generator=g)


def steps(head: AugmentReduceHead, *ts: int) -> Tensor:
    """Good steps; the last one's loss."""
    for t in ts:
        hidden, target = (x.to(head.weight.device) for x in batch(t))
        loss = head(hidden, target, **index_of(head))
        loss.sum().backward()
    return loss.detach()


def index_of(head: AugmentReduceHead) -> dict[str, Tensor]:
    return {"index": torch.arange(B, device=head.weight.device)} if head.local.mode == "persistent" else {}


def state(head: AugmentReduceHead) -> Found:
    return {name: x.detach().clone() for name, x in head.state_dict().items() if "extra_state" not in name}


def a_bad_hidden_row(make: Make, value: float = math.nan) -> Found:
    """One entry of one row that is not finite, then good steps."""
    head = make()
    before = state(head)
    hidden, target = (x.to(head.weight.device) for x in batch())
    hidden[3, 1] = value
    hidden.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        loss = head(hidden, target, **index_of(head))
        loss.sum().backward()
    others = torch.arange(B, device=hidden.device) != 3
    return {
        "before": before, "loss": loss.detach(), "gradient": hidden.grad[others], "of the row": hidden.grad[3],
        "after": state(head), "skipped": head.skipped_rows, "next loss": steps(head, 1, 2), "later": state(head),
    }  # fmt: skip


def the_same_without_the_row(make: Make) -> Found:
    """What `a_bad_hidden_row` should leave: the row ignored."""
    head = make()
    hidden, target = (x.to(head.weight.device) for x in batch())
    weight = torch.ones(B, device=hidden.device)
    weight[3] = 0.0
    loss = head(hidden, target, sample_weight=weight, **index_of(head))
    # The mean over the rows that count: the bad row's loss is NaN, but it counts
    (loss.sum() * (1.0 if head.reduction != "mean" else (B - 1) / B)).backward()
    return {"after": state(head)}


def a_bad_weight_row(make: Make, value: float = math.nan, which: int = 4) -> Found:
    """Weights of one class that are not finite, as of a checkpoint that was poisoned earlier; then more steps."""
    head = make()
    with torch.no_grad():
        head.weight[which] = value
    before, found = state(head), Found()
    for t in range(4):
        hidden, target = (x.to(head.weight.device) for x in batch(t))
        hidden.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            loss = head(hidden, target, **index_of(head))
            loss.sum().backward()
        found[f"loss {t}"], found[f"gradient {t}"] = loss.detach(), hidden.grad
    return {**found, "before": before, "after": state(head), "skipped": head.skipped_rows}


def a_bad_upstream_gradient(make: Make, value: float = math.inf) -> Found:
    """What a GradScaler sends when it has overflowed, for all rows or (reduction "none") for one of them."""
    head = make()
    hidden, target = (x.to(head.weight.device) for x in batch())
    hidden.requires_grad_()
    loss = head(hidden, target, **index_of(head))
    before = state(head)
    upstream = torch.ones_like(loss)
    upstream[(3,) if loss.ndim else ()] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        loss.backward(upstream)
    return {
        "before": before, "finite": hidden.grad.isfinite().all(dim=1), "after": state(head),
        "skipped": head.skipped_rows, "next loss": steps(head, 1, 2), "later": state(head),
    }  # fmt: skip


def nothing_to_learn_at_first(make: Make, how: str = "ignored") -> Found:
    """The first minibatch is empty, or all of its rows are ignored; then good steps."""
    head = make()
    before = state(head)
    hidden, target = (x.to(head.weight.device) for x in batch())
    n = 0 if how == "empty" else B
    index = {name: x[:n] for name, x in index_of(head).items()}
    loss = head(hidden[:n].requires_grad_(), torch.full_like(target[:n], -100), **index)
    loss.sum().backward()
    return {"before": before, "loss": loss.detach(), "after": state(head), "next loss": steps(head, 1, 2),
            "later": state(head)}  # fmt: skip


def frozen(make: Make, which: str = "both") -> Found:
    """`requires_grad_(False)` on the head, its weight or its bias."""
    head = make()
    {"both": head, "weight": head.weight, "bias": head.bias}[which].requires_grad_(False)
    hidden, target = (x.to(head.weight.device) for x in batch())
    before = state(head)
    hidden.requires_grad_()
    head(hidden, target, **index_of(head)).sum().backward()
    return {"before": before, "gradient": hidden.grad, "after": state(head)}


def recomputed(make: Make, use_reentrant: bool = False, chunks: int = 2) -> Found:
    """Activation checkpointing around two calls of the head, whose backward passes come in the other order."""
    head = make()
    return _two_calls(head, lambda *inputs: checkpoint(_call, head, *inputs, use_reentrant=use_reentrant), chunks)


def not_recomputed(make: Make, chunks: int = 2) -> Found:
    """The same two calls without checkpointing."""
    head = make()
    return _two_calls(head, lambda *inputs: _call(head, *inputs), chunks)


def _call(head: AugmentReduceHead, hidden: Tensor, labels: Tensor) -> Tensor:
    return head(2.0 * hidden, labels + 0, **index_of(head))  # targets made inside: new tensors in the second pass


def _two_calls(head: AugmentReduceHead, call: Callable[..., Tensor], chunks: int) -> Found:
    hiddens = [batch(t)[0].to(head.weight.device).requires_grad_() for t in range(chunks)]
    losses = [call(hidden, batch(t)[1].to(hidden.device)).sum() for t, hidden in enumerate(hiddens)]
    sum(losses).backward()
    return {"losses": torch.stack(losses).detach(), "gradients": torch.stack([h.grad for h in hiddens]),
            "after": state(head)}  # fmt: skip


def gradient_asked_for_alone(make: Make) -> Found:
    """`autograd.grad(loss, hidden)` twice, then one backward pass."""
    head = make()
    hidden, target = (x.to(head.weight.device) for x in batch())
    hidden.requires_grad_()
    loss = head(hidden, target, **index_of(head)).sum()
    before = state(head)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    second = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    between = state(head)
    loss.backward()
    return {"before": before, "between": between, "gradients": torch.stack([first, second, hidden.grad]),
            "after": state(head)}  # fmt: skip


def one_step(make: Make) -> Found:
    head = make()
    return {"loss": steps(head, 0), "after": state(head)}


def far_logits(make: Make, scale: float = 70.0) -> Found:
    """Scores hundreds apart, where e^(psi - c) overflows: loss, gradients and c beside exact cross entropy."""
    head = make()
    with torch.no_grad():
        head.weight.mul_(scale)
    hidden, target = (x.to(head.weight.device) for x in batch())
    exact_hidden = hidden.clone().requires_grad_()
    weight = head.weight.detach().clone().requires_grad_()
    psi = torch.nn.functional.linear(exact_hidden, weight, head.bias.detach())
    exact = torch.nn.functional.cross_entropy(psi, target)
    exact.backward()
    hidden.requires_grad_()
    twin = copy.deepcopy(head)
    loss = twin(hidden, target, **index_of(twin))
    loss.sum().backward()
    found = {"exact": exact.detach(), "exact gradient": exact_hidden.grad, "loss": loss.detach(),
             "gradient": hidden.grad, "after": state(twin)}  # fmt: skip
    return found if twin.weight.grad is None else {**found, "of weights": twin.weight.grad, "exactly": weight.grad}
