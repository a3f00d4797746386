"""A head inside torch.compile(fullgraph=True), torch.export and torch.func: as outside, without a graph break."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from augment_reduce.nn import AugmentReduceHead
from tests.helpers import rng

B, K, D = 12, 40, 5
CASES = [
    {},
    {"sparse_grad": False, "local": "fresh", "class_counts": torch.arange(1, K + 1), "reduction": "sum"},
    {"model": "logistic", "local": "log-sum-exp", "bias": False},
    {"local": "persistent", "n_rows": B, "reduction": "none", "z_loss": 0.01},
    {"label_smoothing": 0.1, "class_counts": torch.arange(1, K + 1)},
    {"optimizer": "adagrad"},
    {"optimizer": "adam", "bias": False, "weight_decay": 0.1, "class_counts": torch.arange(1, K + 1)},
]


def make(**options):
    return AugmentReduceHead(D, K, n_sampled_classes=8, generator=rng(1), **options)


def batch(t):
    g = rng(t)
    return torch.randn(B, D, generator=g), torch.randint(K, (B,), generator=g)


class Net(nn.Module):
    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(D, D), head

    def forward(self, x, y=None, **options):
        return self.head(self.trunk(x), y, **options)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(net, call, index):
    losses = []
    for t in range(3):
        x, y = batch(t)
        y[2] = -100
        net.zero_grad()
        loss = call(x, y, **index)
        loss.sum().backward()
        losses.append(loss.detach())
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return losses, grads, list(net.state_dict().values())


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o)) or "default")
def test_a_compiled_step_is_the_eager_one(options):
    """Loss, gradients, weights moved inside the backward pass, and all state, bit for bit."""
    net = Net(make(**options))
    twin = copy.deepcopy(net)
    index = {"index": torch.arange(B)} if "n_rows" in options else {}
    ours = train(net, torch.compile(net, fullgraph=True, backend="aot_eager"), index)
    theirs = train(twin, twin, index)
    for a, b in zip(ours, theirs, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_the_fused_optimiser_collects_in_compiled_code_too():
    net = Net(make(optimizer="adagrad"))
    twin = copy.deepcopy(net)
    for one, call in ((net, torch.compile(net, fullgraph=True, backend="aot_eager")), (twin, twin)):
        optimizer = one.head.fused_optimizer
        for t in range(2):
            optimizer.zero_grad()
            for part in range(2):
                call(*batch(2 * t + part)).backward()
            optimizer.step()
    torch.testing.assert_close(net.head.weight, twin.head.weight)
    assert int(net.head.optimizer.steps) == 2


def test_eval_and_logits_compile():
    net = Net(make()).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x, y = batch(0)
    torch.testing.assert_close(compiled(x), net(x))
    loss = compiled(x, y)
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y))
    loss.backward()
    assert net.trunk.weight.grad.abs().sum() > 0


def test_export_of_logits_and_topk():
    class TopK(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net.head.topk(self.net.trunk(x), 3)

    net = Net(make(optimizer="adagrad")).eval()
    x = batch(0)[0]

    logits = torch.export.export(net, (x,))
    torch.testing.assert_close(logits.module()(x), net(x))
    top = torch.export.export(TopK(net), (x,))
    for ours, theirs in zip(top.module()(x), net.head.topk(net.trunk(x), 3), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_functional_call_and_func_grad():
    """The weights that are given are used, and the module's own stay; a gradient by them is that of autograd."""
    head = make()
    x, y = batch(0)
    weights = {name: p.detach() + 0.1 for name, p in head.named_parameters()}
    state = {name: b.clone() for name, b in head.named_buffers()}

    def loss(parameters):
        return torch.func.functional_call(head, (parameters, {n: b.clone() for n, b in state.items()}), (x, y))

    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    expected = loss(leaves)
    expected.backward()
    found, value = torch.func.grad_and_value(loss)(weights)
    torch.testing.assert_close(value, expected)
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.grad)


def test_a_copy_compiles_as_itself():
    """Operators find a head by number, and a copy is another head."""
    one = make()
    two = copy.deepcopy(one)
    assert one._number != two._number
    two.sampler = make(class_counts=torch.arange(1, K + 1), in_batch=False).sampler
    x, y = batch(0)
    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    expected = copy.deepcopy(two)(x, y)
    assert compiled(x, y) == expected != one(x, y)


def test_plain_operations_on_a_gpu_are_said_once(monkeypatch):
    """Without Triton, and on ROCm, MPS and the like: once a reason."""
    from types import SimpleNamespace

    from augment_reduce.model.noise import Gumbel
    from augment_reduce.nn import _backend, _step

    _backend.say_plain.cache_clear()
    step = SimpleNamespace(noise=Gumbel(), label_smoothing=0.0)

    def tensor(kind, dtype=torch.float32):
        return SimpleNamespace(device=SimpleNamespace(type=kind), dtype=dtype)

    monkeypatch.setattr(_backend, "kernels", lambda: None)
    with pytest.warns(RuntimeWarning, match=r"plain torch operations.*this device \(mps\)"):
        assert _backend.backend_for(step, tensor("mps"), tensor("mps")) is _step
    assert _backend.backend_for(step, tensor("mps"), tensor("mps")) is _step  # nothing is said again
    with pytest.warns(RuntimeWarning, match="cuda"):
        _backend.backend_for(step, tensor("cuda"), tensor("cuda"))
    monkeypatch.setattr(_backend, "kernels", lambda: "kernels")
    assert _backend.backend_for(step, tensor("cuda"), tensor("cuda")) == "kernels"
    with pytest.warns(RuntimeWarning, match="float16"):
        _backend.backend_for(step, tensor("cuda", torch.float16), tensor("cuda"))
