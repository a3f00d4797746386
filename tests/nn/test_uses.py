"""Forty ordinary uses of a head, each a row of a table: what people do to an nn.Linear and its loss without a thought.

A use returns nothing and asserts what a user would check. Those that other tests look at more closely are here, too, so
that the list is one list; tests/nn/test_safety.py has what must be refused.
"""

import contextlib
import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from augment_reduce.nn import AugmentReduceHead, LocalParameters, SharedSampler, sampled_bound
from tests.helpers import rng

B, K, D = 32, 60, 8
USES = {}


def use(function):
    USES[function.__name__] = function
    return function


def make(optimizer=None, **options):
    return AugmentReduceHead(D, K, n_sampled_classes=16, optimizer=optimizer, generator=rng(1), **options)


def batch(t=0):
    """Rows of a dozen classes that can be told apart."""
    centres, y = torch.randn(K, D, generator=rng(9)), torch.randint(12, (B,), generator=rng(t))
    return centres[y] + 0.1 * torch.randn(B, D, generator=rng(t + 1)), y


class Net(nn.Module):
    def __init__(self, head=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(D, D), head or make(**options)

    def forward(self, x, y=None):
        return self.head(self.trunk(x), y)


def learns(net, optimizer, steps=30, **how):
    """The exact loss falls by more than a tenth of a nat."""
    before = float(net.eval()(*batch()).detach())
    net.train()
    for t in range(steps):
        step(net, optimizer, t, **how)
    assert float(net.eval()(*batch()).detach()) < before - 0.1


def step(net, optimizer, t, clip=False, scheduler=None, closure=False):
    def loss():
        optimizer.zero_grad()
        value = net(*batch(t))
        value.backward()
        return value

    if closure:
        optimizer.step(loss)
        return
    loss()
    if clip:
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.5).isfinite()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def trained_by(optimizer_class, **options):
    def f():
        net = Net()
        learns(net, optimizer_class(net.parameters(), **{"lr": 0.02, **options}))

    return f


USES.update(
    {
        "adamw": trained_by(torch.optim.AdamW, weight_decay=0.01),
        "sgd_with_momentum": trained_by(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "torch_adagrad_with_weight_decay": trained_by(torch.optim.Adagrad, lr=0.1, weight_decay=1e-4),
        "rmsprop": trained_by(torch.optim.RMSprop),
    }
)


@use
def sparse_gradients_for_sparse_adam():
    head = make(sparse_grad=True)
    torch.sparse.check_sparse_tensor_invariants.disable()
    optimizer = torch.optim.SparseAdam(head.parameters(), lr=0.05)
    learns(head, optimizer)


@use
def lbfgs_with_a_closure():
    net = Net(class_sampling="all", local="fresh")
    learns(net, torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=4), steps=5, closure=True)


@use
def clip_grad_norm():
    net = Net()
    learns(net, torch.optim.AdamW(net.parameters(), lr=0.02), clip=True)


@use
def clip_grad_value():
    net = Net()
    net(*batch()).backward()
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)
    assert max(float(p.grad.abs().max()) for p in net.parameters()) <= 1.001e-3


@use
def a_scheduler_of_the_networks_optimiser():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    learns(net, optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30))


@use
def a_scheduler_of_the_fused_optimiser():
    net = Net(optimizer="adagrad")
    optimizer = net.head.fused_optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + t))
    learns(net, optimizer, scheduler=scheduler)
    assert float(net.head.optimizer.rate) == pytest.approx(0.1 / 31)


@use
def reduce_on_plateau():
    head = make("adagrad")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(head.fused_optimizer, patience=0, factor=0.5)
    for _ in range(4):
        scheduler.step(1.0)
    assert head.fused_optimizer.param_groups[0]["lr"] < 0.1


@use
def gradient_accumulation():
    parts, whole = (Net(class_sampling="all", local="fresh", reduction="sum") for _ in range(2))
    x, y = batch()
    whole(x, y).backward()
    parts(x[:10], y[:10]).backward(), parts(x[10:], y[10:]).backward()
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@use
def gradient_accumulation_of_the_fused_optimiser():
    net = Net(optimizer="rowwise-adagrad")
    optimizer = net.head.fused_optimizer
    optimizer.zero_grad()
    before = net.head.weight.detach().clone()
    net(*batch(0)).backward(), net(*batch(1)).backward()
    assert torch.equal(net.head.weight, before)
    optimizer.step()
    assert int(net.head.optimizer.steps) == 1


@use
def two_optimisers_one_for_the_head():
    net = Net(optimizer="adagrad")
    learns(net, torch.optim.SGD(net.trunk.parameters(), lr=0.05))


@use
def an_optimiser_that_is_given_everything_leaves_a_fused_head_alone():
    net = Net(optimizer="adagrad")
    learns(net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5))


@use
def gradscaler_and_autocast():
    net = Net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for t in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(*batch(t))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert loss.dtype == torch.float32


@use
def bfloat16_everywhere():
    net = Net(dtype=torch.bfloat16)
    net.trunk.bfloat16()
    loss = net(batch()[0].bfloat16(), batch()[1])
    loss.backward()
    assert net.head.weight.grad.dtype == torch.bfloat16


@use
def double_everywhere():
    net = Net().double()
    net(batch()[0].double(), batch()[1]).backward()
    assert net.head.weight.grad.dtype == torch.float64


@use
def activation_checkpointing():
    net, plain = Net(), Net()
    loss = torch.utils.checkpoint.checkpoint(net, *batch(), use_reentrant=False)
    loss.backward(), plain(*batch()).backward()
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)


@use
def compile_fullgraph():
    net, plain = Net(), Net()
    torch._dynamo.reset()
    loss = torch.compile(net, fullgraph=True, backend="aot_eager")(*batch())
    torch.testing.assert_close(loss.detach(), plain(*batch()).detach())
    loss.backward()
    torch._dynamo.reset()


@use
def export_of_logits():
    net = Net().eval()
    torch.testing.assert_close(torch.export.export(net, (batch()[0],)).module()(batch()[0]), net(batch()[0]))


@use
def functional_call_with_other_weights():
    net = Net().eval()
    zero = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert torch.func.functional_call(net, zero, (batch()[0],)).abs().max() == 0


@use
def an_exponential_moving_average_of_the_weights():
    net = Net()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for t in range(5):
        step(net, optimizer, t)
        average.update_parameters(net)
    assert average.module.eval()(*batch()).isfinite()


@use
def a_deep_copy():
    net = Net(optimizer="adagrad")
    net(*batch()).backward()
    twin = copy.deepcopy(net)
    assert twin(*batch(1)) == net(*batch(1))
    twin(*batch(2)).backward()
    assert not torch.equal(twin.head.weight, net.head.weight)


@use
def save_and_load_the_module():
    file = io.BytesIO()
    net = Net(optimizer="adam")
    torch.save(net, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(*batch()) == net(*batch())


@use
def save_and_load_a_checkpoint():
    file, net = io.BytesIO(), Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 0)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    found, other = torch.load(file), Net()
    second = torch.optim.AdamW(other.parameters())
    other.load_state_dict(found["net"]), second.load_state_dict(found["optimizer"])
    for one, opt in ((net, optimizer), (other, second)):
        step(one, opt, 1)
    assert torch.equal(net.head.weight, other.head.weight)


@use
def the_state_of_a_linear_layer():
    layer, head = nn.Linear(D, K), make()
    head.load_state_dict(layer.state_dict())
    layer.load_state_dict(head.to_linear().state_dict())
    torch.testing.assert_close(head(batch()[0]), layer(batch()[0]))


@use
def in_the_place_of_a_linear_layer_and_back():
    net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, K))
    net[1] = AugmentReduceHead.from_linear(net[1], n_sampled_classes=8)
    logits = net(batch()[0])
    net[1] = net[1].to_linear()
    assert torch.equal(net(batch()[0]), logits)


@use
def a_training_loop_that_knows_logits_only():
    """cross_entropy(net(x), y) goes on working, at its own cost."""
    net = Net()
    F.cross_entropy(net(batch()[0]), batch()[1]).backward()
    assert net.head.weight.grad.abs().sum() > 0


@use
def evaluation_is_exact():
    net = Net().eval()
    torch.testing.assert_close(net(*batch()), F.cross_entropy(net(batch()[0]), batch()[1]))


@use
def no_grad_and_inference_mode():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert Net()(*batch()).isfinite()
            assert Net().eval()(*batch()).isfinite()


@use
def tied_weights():
    embedding = nn.Embedding(K, D)
    head = make(bias=False)
    head.weight = embedding.weight
    head(embedding(batch()[1]), batch()[1]).backward()
    assert embedding.weight.grad is head.weight.grad


@use
def frozen_weights():
    net = Net()
    net.head.requires_grad_(False)
    net(*batch()).backward()
    assert net.head.weight.grad is None
    assert net.trunk.weight.grad.abs().sum() > 0


@use
def sequences_with_padding():
    x, y = batch()
    y = y.clone()
    y[::4] = -100
    head = make(class_counts=torch.ones(K))
    loss = head(x.reshape(4, 8, D), y.reshape(4, 8))
    loss.backward()
    assert loss.isfinite()


@use
def a_margin():
    head, (x, y) = make(), batch()
    sampler, local = SharedSampler(K, 16, class_counts=torch.ones(K)), LocalParameters(D, K)
    classes, log_weight, mask = sampler.draw_for(y)
    h, w = F.normalize(x), F.normalize(head.weight)
    bound = sampled_bound(10 * ((h * w[y]).sum(1) - 0.2), 10 * h @ w[classes].T, log_weight, mask, local.at(x))
    (-bound).mean().backward()
    assert head.weight.grad.abs().sum() > 0


@use
def an_item_tower():
    tower, features, (x, y) = nn.Linear(3, D), torch.randn(K, 3, generator=rng(5)), batch()
    classes, log_weight = SharedSampler(K, 16).draw()
    bound = sampled_bound(
        (x * tower(features[y])).sum(1), x @ tower(features[classes]).T, log_weight, y[:, None] == classes
    )
    (-bound).mean().backward()
    assert tower.weight.grad.abs().sum() > 0


@use
def weights_of_rows_and_classes():
    x, y = batch()
    weight = torch.rand(K, generator=rng(4))
    head = make(class_weight=weight).eval()
    torch.testing.assert_close(head(x, y), F.cross_entropy(head(x), y, weight=weight))


@use
def label_smoothing():
    head = make(label_smoothing=0.1).eval()
    torch.testing.assert_close(head(*batch()), F.cross_entropy(head(batch()[0]), batch()[1], label_smoothing=0.1))


@use
def parametrized_weights():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.head, "weight")
    learns(net, torch.optim.AdamW(net.parameters(), lr=0.02))


@use
def the_meta_device():
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    net.head.reset_parameters(), net.trunk.reset_parameters()
    assert net(*batch()).isfinite()


@use
def initialisation_by_apply():
    """Module.apply reaches every child; none of them may have another method of that name."""
    seen = []
    Net(class_counts=torch.ones(K), label_smoothing=0.1, optimizer="adam").apply(
        lambda m: seen.append(type(m).__name__)
    )
    assert {"Linear", "AugmentReduceHead", "Local", "SharedSampler", "RowUpdate"} <= set(seen)


@use
def an_empty_minibatch():
    net = Net()
    loss = net(torch.zeros(0, D), torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == 0.0


@use
def hooks_and_anomaly_detection():
    net, seen = Net(), []
    net.head.register_forward_hook(lambda *_: seen.append("forward"))
    net.head.register_full_backward_hook(lambda *_: seen.append("backward"))
    with torch.autograd.detect_anomaly(check_nan=True):
        net(*batch()).backward()
    assert seen == ["forward", "backward"]


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel_over_processes(one_process):
    """DDP: dense gradients like those of any layer."""
    net, plain = Net(), Net()
    wrapped = nn.parallel.DistributedDataParallel(net)
    wrapped(*batch()).backward(), plain(*batch()).backward()
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:.*non-leaf:UserWarning")
@pytest.mark.parametrize("name", USES)
def test_use(name):
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        USES[name]()


def test_there_are_forty():
    assert len(USES) >= 40
