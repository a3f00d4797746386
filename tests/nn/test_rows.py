"""How a head's weights move, what it keeps, and what it says to bad input."""

import copy
import math

import pytest
import torch

from augment_reduce import Adagrad, Adam, RowwiseAdagrad, SectionFour
from augment_reduce.nn import AugmentReduceHead, _hash
from augment_reduce.nn._plain import RowGradient
from augment_reduce.nn._rows import RowUpdate, rounded
from augment_reduce.nn._targets import BAD_TARGET, BAD_TARGETS, BAD_WEIGHTS
from augment_reduce.nn.functional import linear_augment_reduce
from tests.helpers import rng

B, K, D, S = 24, 40, 5, 12


@pytest.fixture(autouse=True)
def _no_sparse_warning():
    """torch's sparse optimisers build tensors without saying whether to check them, and torch 2.13 warns of that."""
    torch.sparse.check_sparse_tensor_invariants.disable()


def batch(t=0):
    """Labels repeat within the minibatch and meet the sampled classes: K is small."""
    g = rng(t)
    return torch.randn(B, D, generator=g), torch.randint(K, (B,), generator=g)


def make(seed=1, **options):
    return AugmentReduceHead(D, K, n_sampled_classes=S, generator=rng(seed), **options)


def dense_gradients(head, t):
    """Gradients of the next step's loss, dense, without moving anything."""
    twin = copy.deepcopy(head)
    twin.optimizer, twin.sparse_grad = None, False
    twin.requires_grad_(True)
    twin(*batch(t)).backward()
    return twin.weight.grad, twin.bias.grad


@pytest.mark.parametrize(
    ("fused", "theirs"),
    [
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
        (Adam(learning_rate=0.1, eps=1e-12), lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-12)),
    ],
    ids=["adagrad", "sparse-adam"],
)
def test_the_fused_optimiser_is_torchs_own(fused, theirs):
    """Row-sparse gradients into a torch optimiser, or the same rule inside backward: the same weights, step by step."""
    ours, other = make(optimizer=fused, learning_rate=0.1), make(sparse_grad=True)
    optimiser = theirs([other.weight, other.bias])
    for t in range(6):
        hidden, target = batch(t)
        h = [hidden.clone().requires_grad_() for _ in range(2)]
        ours(h[0], target).backward()
        optimiser.zero_grad()
        other(h[1], target).backward()
        assert other.weight.grad.is_sparse
        optimiser.step()
        torch.testing.assert_close(h[0].grad, h[1].grad)
        torch.testing.assert_close(ours.weight, other.weight.detach())
        torch.testing.assert_close(ours.bias, other.bias.detach())
    assert ours.weight.grad is None


@pytest.mark.parametrize("rule", [Adagrad(bias_scale=2.0), Adagrad(half_after=10.0)])
def test_a_rule_that_the_head_cannot_follow_is_refused(rule):
    with pytest.raises(ValueError, match="constant rate, the same for weights and biases"):
        AugmentReduceHead(4, 10, optimizer=rule)


@pytest.mark.parametrize("rule", [Adagrad(), RowwiseAdagrad(), Adam()], ids=lambda r: r.name)
def test_the_fused_optimiser_is_the_estimators(rule):
    """One step of `optim`, which goes up, on the merged gradient of the touched rows; the others do not move."""
    head = make(optimizer=rule, learning_rate=0.1)
    states = {"w": rule.init_state(head.weight.detach()), "b": rule.init_state(head.bias.detach())}
    values = {"w": head.weight.detach().clone(), "b": head.bias.detach().clone()}
    rule = type(rule)(learning_rate=0.1)
    for t in range(1, 5):
        touched = None
        for name, grad in zip("wb", dense_gradients(head, t), strict=True):
            touched = grad.abs().reshape(K, -1).sum(1) > 0 if touched is None else touched
            state = [s[touched] for s in states[name]]
            h, follow = rule.direction(-grad[touched], state, t)
            values[name][touched] += h * follow
            for s, new in zip(states[name], state, strict=True):
                s[touched] = new
        before = head.weight.detach().clone()
        head(*batch(t)).backward()
        torch.testing.assert_close(head.weight.detach(), values["w"])
        torch.testing.assert_close(head.bias.detach(), values["b"])
        assert torch.equal(head.weight[~touched], before[~touched])
        assert not torch.equal(head.weight[touched], before[touched])


def test_lazy_adam_makes_up_for_the_decay_it_missed():
    """Its moments are those of dense Adam with zero gradients in between; only the moves in between are left out."""
    weight = torch.randn(4, D, generator=rng(0))
    lazy, rate, b1, b2, eps = weight.clone(), 0.05, 0.9, 0.999, 1e-8
    rule = RowUpdate("adam", rate, lazy, None)
    m, v, expected = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
    for t in range(1, 9):
        touched = torch.tensor([0, 2]) if t % 3 else torch.tensor([1])
        g = torch.randn(len(touched), D, generator=rng(t))
        dense = torch.zeros_like(weight).index_copy_(0, touched, g)
        m, v = b1 * m + (1 - b1) * dense, b2 * v + (1 - b2) * dense**2
        step = rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        expected[touched] -= step[touched]
        rule.apply_(lazy, None, RowGradient(touched, g, g[:, 0]), 1, torch.tensor(t))
    torch.testing.assert_close(lazy, expected)
    assert rule.last.tolist() == [8, 6, 8, 0]


def test_repeats_of_a_class_make_one_step():
    """Three gradients of a class are added up first: Adagrad on the sum is not Adagrad three times."""
    weight = torch.zeros(3, 2)
    rule = RowUpdate("adagrad", 1.0, weight, None)
    values = torch.tensor([[1.0, 2.0], [1.0, -1.0], [1.0, 0.0], [4.0, 4.0]])
    rule.apply_(weight, None, RowGradient(torch.tensor([2, 2, 2, 0]), values, values[:, 0]), 1, torch.tensor(0))
    torch.testing.assert_close(weight, torch.tensor([[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0]]))
    torch.testing.assert_close(rule.first[2], torch.tensor([9.0, 1.0]))


def test_bfloat16_weights_are_rounded_without_bias():
    """A step of 1 / 10 of the spacing is made, on average; rounding to nearest would lose it every time."""
    x = torch.full((20_000, 1), 1.0 + 0.1 / 128)
    y = rounded(x, torch.bfloat16, torch.tensor(_hash.seed_key(3)), torch.arange(20_000)).float()
    assert set(y.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    share = float((y > 1.0).float().mean())
    assert abs(share - 0.1) < 5 * math.sqrt(0.1 * 0.9 / 20_000)
    exact = torch.tensor([[1.5], [-2.0], [math.inf], [0.0]])
    assert torch.equal(rounded(exact, torch.bfloat16, torch.tensor(9), torch.arange(4)).float(), exact)


def test_bfloat16_head_trains():
    head = make(optimizer="adagrad", learning_rate=0.2, dtype=torch.bfloat16)
    hidden, target = batch()
    before = head.log_prob(hidden, target).mean()
    for _ in range(60):
        head(hidden, target).backward()
    assert head.weight.dtype == torch.bfloat16
    assert head.optimizer.first.dtype == torch.float32
    assert head.log_prob(hidden, target).mean() > before + 1.0


def test_eval_neither_learns_nor_moves():
    head = make(optimizer="adagrad").eval()
    before = copy.deepcopy(head.state_dict())
    head(batch()[0].requires_grad_(), batch()[1]).backward()
    after = head.state_dict()
    assert not {name for name in before if not torch.equal(before[name], after[name])}


def test_learning_rate_can_be_set():
    head = make(optimizer="adagrad")
    head.set_learning_rate(0.0)
    before = head.weight.detach().clone()
    head(*batch()).backward()
    assert torch.equal(head.weight, before)
    with pytest.raises(ValueError, match="no optimizer of its own"):
        make().set_learning_rate(0.1)


def test_a_saved_head_goes_on_as_if_nothing_had_happened(tmp_path):
    head = make(optimizer="adam", class_counts=torch.arange(1, K + 1))
    for t in range(3):
        head(*batch(t)).backward()
    torch.save(head.state_dict(), tmp_path / "head.pt")
    other = make(seed=99, optimizer="adam", class_counts=torch.arange(1, K + 1))
    other.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    for t in range(3, 6):
        a, b = head(*batch(t)), other(*batch(t))
        assert a == b
        a.backward(), b.backward()
    assert torch.equal(head.weight, other.weight)
    assert all(isinstance(x, torch.Tensor) for x in head.state_dict().values())


def test_a_state_of_another_head_is_refused():
    state = make().state_dict()
    with pytest.raises(ValueError, match=r"41 classes and 5 features.*found \(40, 5\)"):
        AugmentReduceHead(D, K + 1, n_sampled_classes=S).load_state_dict(state)
    with pytest.raises(ValueError, match="model 'probit', found one of 'softmax'"):
        AugmentReduceHead(D, K, "probit", n_sampled_classes=S, local="fresh").load_state_dict(state)


def test_targets_out_of_range():
    head, (hidden, target) = make(), batch()
    target[3] = K
    with pytest.raises(ValueError, match=r"in \[0, n_classes=40\).*but 1 are outside; first at row 3: target=40"):
        head(hidden, target)
    target[3] = -1
    with pytest.raises(ValueError, match="target=-1"):
        head(hidden, target)
    with pytest.raises(ValueError, match="target=-1"):
        head.log_prob(hidden, target)


@pytest.mark.parametrize("moment", ["eval", "train", "check_targets"])
def test_a_gpus_bad_targets_are_reported_later(moment):
    """The kernels leave such rows out and count them; tests/parity/test_triton_kernels.py shows that they do."""
    head = make()
    head.clock.tally[BAD_TARGETS], head.clock.tally[BAD_TARGET] = 2, 77
    with pytest.warns(UserWarning, match=r"but 2 are outside: target=77.*left out; train\(\) and check_targets"):
        assert "weight" in head.state_dict()  # the checkpoint of a long job must not fail
    with pytest.raises(ValueError, match="but 2 are outside: target=77"):
        getattr(head, moment)()
    getattr(head, moment)()  # said once
    head.clock.tally[BAD_WEIGHTS] = 3
    with pytest.raises(ValueError, match="below 1e15 and not negative, but 3 were not"):
        getattr(head, moment)()


@pytest.mark.parametrize(
    ("make_input", "error", "message"),
    [
        (lambda h, y: (h[:, :3], y), ValueError, r"\(\.\.\., in_features=5\), found \(24, 3\)"),
        (lambda h, y: (h.double(), y), TypeError, "found hidden in torch.float64"),
        (lambda h, y: (h.long(), y), TypeError, "found hidden in torch.int64"),
        (lambda h, y: (h.to("meta"), y), ValueError, "device of the weights, cpu, found meta"),
        (lambda h, y: (h, y[:-1]), ValueError, r"shape \(24,\), found \(23,\)"),
        (lambda h, y: (h, y.float()), TypeError, "target to be integers, found torch.float32"),
        (lambda h, y: (h, y.to("meta")), ValueError, "target on the device"),
    ],
)
def test_inputs_that_do_not_fit(make_input, error, message):
    with pytest.raises(error, match=message):
        make()(*make_input(*batch()))


@pytest.mark.parametrize(
    ("sample_weight", "error", "message"),
    [
        (torch.ones(3), ValueError, "sample_weight with one number for each row"),
        (torch.ones(B, dtype=torch.int64), TypeError, "sample_weight to be floating"),
        (torch.linspace(1.0, -1.0, B), ValueError, r"not negative, but 12 of 24 are not; first at row 12: -0\.0"),
        (torch.full((B,), torch.nan), ValueError, "not negative, but 24 of 24"),
        (torch.full((B,), torch.inf), ValueError, "not negative, but 24 of 24"),
        (torch.full((B,), 3e38), ValueError, r"below 1e\+15 and not negative, but 24 of 24"),
        (torch.full((B,), 1e300, dtype=torch.float64), ValueError, r"below 1e\+15 and not negative, but 24 of 24"),
        (torch.full((B,), 1e-40), ValueError, "the largest is 1e-40. Divide the weights by their mean"),
        (torch.full((B,), 1e-300, dtype=torch.float64), ValueError, "the largest is 1e-300"),
    ],
)
def test_sample_weights_that_do_not_fit(sample_weight, error, message):
    head, (hidden, target) = make(), batch()
    for call in (
        head,
        lambda h, y, **options: linear_augment_reduce(h, head.weight, y, n_sampled_classes=S, **options),
    ):
        with pytest.raises(error, match=message):
            call(hidden, target, sample_weight=sample_weight)


def test_what_is_not_a_target_has_a_name():
    """The third by place was `index`, which most heads ignore: weights given there were lost in silence."""
    with pytest.raises(TypeError, match="positional"):
        make()(*batch(), torch.ones(B))


def test_half_precision_hidden_beside_float32_weights():
    hidden, target = batch()
    h = hidden.to(torch.bfloat16).requires_grad_()
    make()(h, target).backward()
    assert h.grad.dtype == torch.bfloat16


def test_autocast_leaves_the_step_its_precision():
    hidden, target = batch()
    plain = make(optimizer="adagrad")
    plain(hidden, target).backward()
    inside = make(optimizer="adagrad")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside(hidden, target).backward()
    assert torch.equal(plain.weight, inside.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_sampled_classes": K + 1}, "between 1 and n_classes=40, found 41"),
        ({"local": "guessed"}, "'amortised', 'log-sum-exp', 'persistent', 'fresh', found 'guessed'"),
        ({"local": "persistent"}, "needs n_rows, found None"),
        ({"optimizer": "sgd"}, "found 'sgd'"),
        ({"optimizer": SectionFour()}, "found SectionFour"),
        ({"learning_rate": 0.1}, "optimizer is None"),
        ({"max_norm": 1.0}, "optimizer is None"),
        ({"optimizer": "adagrad", "max_norm": 0.0}, "max_norm to be None or above 0, found 0.0"),
        ({"optimizer": "adagrad", "weight_decay": -1.0}, "weight_decay"),
        ({"optimizer": "adam", "initial_accumulator_value": 0.1}, "Adam has none"),
        ({"in_batch": True}, "in_batch=True needs class_counts"),
        ({"label_smoothing": 1.0}, r"in \[0, 1\), found 1.0"),
        ({"label_smoothing": 0.1, "model": "probit"}, "have no log Z"),
        ({"z_loss": -1.0}, "found -1.0"),
        ({"label_smoothing": 0.1, "class_weight": torch.ones(K)}, "found both"),
        ({"class_weight": torch.ones(K - 1)}, r"class_weight of shape \(40,\)"),
        ({"reduction": "median"}, "found 'median'"),
        ({"floor": -1.0}, "found -1.0"),
        ({"n_nodes": 0}, "at least 1, found 0"),
        ({"model": "cauchy"}, "found 'cauchy'"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        AugmentReduceHead(D, K, **options)


def test_persistent_needs_to_know_the_rows():
    head, (hidden, target) = make(local="persistent", n_rows=B), batch()
    with pytest.raises(ValueError, match=r"needs index.*head\(hidden, target, index=rows\)"):
        head(hidden, target)
    with pytest.raises(ValueError, match=r"in \[0, n_rows=24\), found 1 to 24"):
        head(hidden, target, index=torch.arange(1, B + 1))


def test_other_models_have_no_normalizer():
    with pytest.raises(ValueError, match="are integrals"):
        AugmentReduceHead(D, K, "probit", n_sampled_classes=S).log_normalizer(batch()[0])


def test_state_keeps_its_precision_when_the_head_changes_dtype():
    head = make(optimizer="adagrad", class_counts=torch.arange(1, K + 1)).to(torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16
    assert head.sampler.cumulative.dtype == torch.float64
    assert {head.local.slope.dtype, head.optimizer.first.dtype, head.optimizer.rate.dtype} == {torch.float32}


def test_all_rows_ignored_is_a_step_of_nothing():
    head = make(optimizer="adagrad")
    before = head.weight.detach().clone()
    loss = head(batch()[0], torch.full((B,), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(head.weight, before)
    assert head.floored_share == 0.0
