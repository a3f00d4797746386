"""`head.fused_optimizer` as torch.optim has them, and dense gradients for torch's own."""

import copy

import pytest
import torch
from torch import nn

from augment_reduce import Adam
from augment_reduce.nn import AugmentReduceHead
from tests.helpers import head_faults as faults
from tests.helpers import rng
from tests.helpers.head_faults import D, K, S, batch

RULES = ["adagrad", "rowwise-adagrad", "adam"]


def make(optimizer="adagrad", **options):
    return AugmentReduceHead(D, K, n_sampled_classes=S, optimizer=optimizer, generator=rng(1), **options)


def every(optimizer="adagrad", **options):
    """A head whose draw is all classes, so that halves of a minibatch add up to it."""
    options = {"class_sampling": "all", "reduction": "sum", "local": "fresh", **options}
    return AugmentReduceHead(D, K, n_sampled_classes=K, optimizer=optimizer, generator=rng(1), **options)


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_gradients_are_dense_by_default_and_clip(make_optimizer):
    head = make(None)
    optimizer = make_optimizer(head.parameters(), lr=0.1, weight_decay=0.1)
    before = head.eval()(*batch())
    for t in range(30):
        head.train()(*batch(t % 3)).backward()
        assert not head.weight.grad.is_sparse
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert head.eval()(*batch()) < before


def test_sparse_gradients_are_the_dense_ones():
    dense, sparse = make(None), make(None, sparse_grad=True)
    for head in (dense, sparse):
        head(*batch()).backward()
    for ours, theirs in zip(dense.parameters(), sparse.parameters(), strict=True):
        assert theirs.grad.is_sparse
        torch.testing.assert_close(ours.grad, theirs.grad.to_dense())


@pytest.mark.parametrize("rule", RULES)
def test_stepping_is_moving_in_the_backward_pass(rule):
    inside, stepped = make(rule), make(rule)
    optimizer = stepped.fused_optimizer
    for t in range(4):
        inside(*batch(t)).backward()
        optimizer.zero_grad()
        stepped(*batch(t)).backward()
        before = stepped.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, stepped.weight)
    torch.testing.assert_close(inside.weight, stepped.weight)
    torch.testing.assert_close(inside.bias, stepped.bias)


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_are_summed_and_moved_once(rule):
    whole, parts = every(rule), every(rule)
    optimizer = parts.fused_optimizer
    for t in range(3):
        hidden, target = batch(t)
        whole(hidden, target).backward()
        optimizer.zero_grad()
        for some in (slice(0, 10), slice(10, 24)):
            parts(hidden[some], target[some]).backward()
        optimizer.step()
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-4, atol=1e-5)
    assert int(parts.optimizer.steps) == 3


def test_a_step_without_gradients_moves_nothing():
    head = make()
    head(*batch()).backward()  # nobody has called step(): moves
    before = faults.state(head)
    head.fused_optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in faults.state(head).items())


def test_a_scheduler_sets_the_rate():
    head, by_hand = make(learning_rate=0.2), make(learning_rate=0.2)
    optimizer = head.fused_optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for t in range(3):
        by_hand.set_learning_rate(0.2 * 0.5**t)
        by_hand(*batch(t)).backward()
        optimizer.zero_grad()
        head(*batch(t)).backward()
        optimizer.step()
        scheduler.step()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert float(head.optimizer.rate) == pytest.approx(0.025)
    assert torch.equal(head.weight, by_hand.weight)
    optimizer.param_groups[0]["lr"] = 0.0
    before = head.weight.detach().clone()
    head(*batch()).backward()
    optimizer.step()
    assert torch.equal(head.weight, before)


def test_max_norm_clips_every_row():
    """Plain sums of gradients show it: Adagrad whose sums start huge is SGD."""
    options = {"initial_accumulator_value": 1e12, "learning_rate": 1e6}
    free, clipped = make(**options), make(**options, max_norm=0.01)
    first = free.weight.detach().clone()
    moves = []
    for head in (free, clipped):
        head(*batch()).backward()
        moves.append(torch.cat([(head.weight - first).detach(), head.bias.detach()[:, None]], 1))
    length = moves[0].norm(dim=1)
    assert (length > 0.01).any()
    expected = moves[0] * (0.01 / length.clamp_min(0.01))[:, None]
    torch.testing.assert_close(moves[1], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rule", [*RULES, Adam()])
def test_weight_decay_makes_up_for_steps_without_a_touch(rule):
    """A row touched at steps 1 and 4 only has decayed four times by then; its gradients are apart from that."""
    head = every(rule, weight_decay=0.1, learning_rate=0.05, bias=False)
    plain = every(rule, learning_rate=0.05, bias=False)
    for one in (head, plain):
        one.optimizer.steps += 3  # as if the row had waited
        if rule == "adam":
            one.optimizer.last.fill_(3)
    if rule != "adam":
        head.optimizer.last.fill_(0)
    first = head.weight.detach().clone()
    hidden, target = batch()
    for one in (head, plain):
        one(hidden, target).backward()
    due = 1 if rule == "adam" else 4
    move = plain.weight.detach() - first
    torch.testing.assert_close(head.weight.detach(), first * (1.0 - 0.05 * 0.1) ** due + move, rtol=1e-4, atol=1e-6)


def test_initial_accumulator_value_is_torchs():
    ours, theirs = make(initial_accumulator_value=0.3), make(None, sparse_grad=False)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1, initial_accumulator_value=0.3, eps=1e-10)
    for t in range(3):
        ours(*batch(t)).backward()
        optimizer.zero_grad()
        theirs(*batch(t)).backward()
        optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.filterwarnings("ignore:.*rows were skipped:RuntimeWarning")
def test_no_step_on_gradients_that_are_not_finite():
    head = make()
    optimizer = head.fused_optimizer
    optimizer.zero_grad()
    before = faults.state(head)
    (head(*batch()) * torch.inf).backward()
    optimizer.step()
    after = faults.state(head)
    assert all(torch.equal(after[name], before[name]) for name in ("weight", "bias", "optimizer.first"))


@pytest.mark.parametrize("rule", RULES)
def test_the_state_makes_a_round_trip(rule, tmp_path):
    head = make(rule, weight_decay=0.01)
    for t in range(3):
        head(*batch(t)).backward()
    head.fused_optimizer.param_groups[0]["lr"] = 0.03
    torch.save(head.fused_optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = make(rule, weight_decay=0.01)
    own = {name: x for name, x in head.state_dict().items() if not name.startswith("optimizer")}
    with pytest.warns(UserWarning, match="begins anew"):
        other.load_state_dict(own)
    other.fused_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert other.fused_optimizer.param_groups[0]["lr"] == 0.03
    for one in (head, other):
        one(*batch(4)).backward()
    assert torch.equal(head.weight, other.weight)
    with pytest.raises(ValueError, match="another rule or another head"):
        make("adam" if rule != "adam" else "adagrad").fused_optimizer.load_state_dict(
            torch.load(tmp_path / "optimizer.pt")
        )


def test_forgotten_steps_are_told():
    head = make()
    optimizer = head.fused_optimizer
    optimizer.zero_grad()
    head(*batch()).backward()
    with pytest.warns(RuntimeWarning, match="no step"):
        optimizer.zero_grad()


def test_it_works_in_a_loop_with_a_gradscaler_and_a_copy():
    head = make()
    optimizer = head.fused_optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trunk = nn.Linear(D, D)
    other = torch.optim.SGD(trunk.parameters(), lr=0.1)
    for t in range(3):
        optimizer.zero_grad()
        hidden, target = batch(t)
        scaler.scale(head(trunk(hidden), target)).backward()
        scaler.step(other)
        scaler.step(optimizer)
        scaler.update()
    assert int(head.optimizer.steps) == 3
    twin = copy.deepcopy(head)
    assert twin.fused_optimizer.param_groups[0]["params"][0] is twin.weight
    twin.fused_optimizer.param_groups[0]["lr"] = 0.7
    assert float(head.optimizer.rate) == pytest.approx(0.1)
    assert float(twin.optimizer.rate) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="no optimizer of its own"):
        make(None).fused_optimizer  # noqa: B018
    with pytest.raises(ValueError, match="made without: decay"):
        optimizer.param_groups[0]["weight_decay"] = 0.1


# ---- states of other heads ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_the_keys_of_a_linear_layer_load_both_ways(optimizer, bias):
    layer = nn.Linear(D, K, bias=bias)
    head = make(optimizer, bias=bias)
    head(*batch()).backward()
    head.load_state_dict(layer.state_dict())
    assert torch.equal(head.weight, layer.weight)
    assert int(head.clock.counter) == 1
    other = nn.Linear(D, K, bias=bias)
    other.load_state_dict(head.to_linear().state_dict())
    assert torch.equal(other.weight, layer.weight)
    model = nn.Sequential(nn.Linear(D, D), make(optimizer, bias=bias))
    model.load_state_dict(nn.Sequential(nn.Linear(D, D), layer).state_dict())
    assert torch.equal(model[1].weight, layer.weight)
    if bias:
        with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
            head.load_state_dict({"weight": layer.weight})


@pytest.mark.parametrize(("one", "other"), [("adagrad", "adam"), ("adam", "rowwise-adagrad"), (None, "adagrad")])
def test_another_optimizer_loads_what_it_can_and_says_so(one, other):
    saved, head = make(one), make(other)
    saved(*batch()).backward()
    with pytest.warns(UserWarning, match="begins anew, all else is loaded"):
        head.load_state_dict(saved.state_dict())
    assert torch.equal(head.weight, saved.weight)
    assert torch.equal(head.local.slope, saved.local.slope)
    assert int(head.optimizer.steps) == 0
    with pytest.warns(UserWarning, match="left out, all else is loaded"):
        make(None).load_state_dict(head.state_dict())
