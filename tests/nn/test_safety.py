"""A head never loses training in silence, and nothing poisons what it has learned."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from augment_reduce.nn import AugmentReduceHead, functional
from augment_reduce.nn import _recompute as recompute
from augment_reduce.nn._targets import BAD_TARGETS, BAD_WEIGHTS
from augment_reduce.nn.functional import linear_augment_reduce, log_prob
from tests.helpers import head_faults as faults
from tests.helpers import rng
from tests.helpers.head_faults import B, D, K, S, batch

MODELS = ["softmax", "probit", "logistic"]
SKIPPED = pytest.mark.filterwarnings("ignore:.*rows were skipped:RuntimeWarning")


def making(**options):
    """A function that makes such heads, all alike."""
    options = {"optimizer": "adagrad", "n_sampled_classes": S, "n_rows": B, **options}
    return lambda: AugmentReduceHead(D, K, generator=rng(1), **options)


def make(**options):
    return making(**options)()


def assert_finite(state):
    for name, x in state.items():
        assert x.isfinite().all(), name


def assert_equal(ours, theirs, but=()):
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not any(part in name for part in but):
            assert torch.equal(ours[name], theirs[name]), name


# ---- what is not finite ----


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"optimizer": "adam", "local": "fresh"}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("model", MODELS)
def test_a_row_that_is_not_finite_moves_nothing(model, value, options):
    """Loss NaN for that row; everything else as if it had been ignored; counted; the state stays finite."""
    make_head = making(model=model, **options)
    found = faults.a_bad_hidden_row(make_head, value)
    assert found["loss"].reshape(-1)[3 if found["loss"].ndim else 0].isnan()
    assert found["gradient"].isfinite().all()
    assert (found["of the row"] == 0).all()
    assert found["skipped"] == 1
    expected = faults.the_same_without_the_row(make_head)["after"]
    for name, x in found["after"].items():
        if "clock" not in name:
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert_finite(found["later"])
    assert found["next loss"].isfinite().all()


@pytest.mark.parametrize("local", ["amortised", "fresh", "persistent"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("model", MODELS)
def test_a_class_whose_weights_are_not_finite_poisons_no_other(model, value, local):
    found = faults.a_bad_weight_row(making(model=model, local=local), value)
    assert found["skipped"] > 0
    assert all(found[f"gradient {t}"].isfinite().all() for t in range(4))
    for name, after in found["after"].items():
        others = torch.arange(len(after)) != 4 if name == "weight" else slice(None)
        assert after[others].isfinite().all(), name


@pytest.mark.parametrize("local", ["amortised", "fresh", "persistent"])
@pytest.mark.parametrize("model", MODELS)
def test_without_an_optimizer_such_a_row_does_not_poison_c(model, local):
    found = faults.a_bad_hidden_row(making(model=model, local=local, optimizer=None, sparse_grad=False))
    assert_finite(found["later"])
    assert found["gradient"].isfinite().all()


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_an_upstream_gradient_that_is_not_finite_moves_nothing(value):
    """What GradScaler sends after an overflow: `hidden` must see it, the weights must not."""
    found = faults.a_bad_upstream_gradient(making(), value)
    assert not found["finite"].any()
    assert_equal(found["after"], found["before"], but=("tally",))
    assert found["skipped"] == B
    assert_finite(found["later"])


def test_of_upstream_gradients_row_by_row_only_the_bad_one_is_skipped():
    found = faults.a_bad_upstream_gradient(making(reduction="none"))
    assert found["finite"].tolist() == [b != 3 for b in range(B)]
    assert found["skipped"] == 1
    assert not torch.equal(found["after"]["weight"], found["before"]["weight"])
    assert_finite(found["after"])


def test_what_was_skipped_is_said():
    head = make()
    hidden, target = batch()
    hidden[3, 1] = math.nan
    with pytest.warns(RuntimeWarning, match="^1 rows were skipped"):
        loss = head(hidden.requires_grad_(), target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
        head.eval()  # said already
    loss = head.train()(batch()[0].requires_grad_(), target)
    with pytest.warns(RuntimeWarning, match=f"^{B} rows were skipped"):
        (loss * math.inf).backward()
    head.clock.tally[4] += 2  # as a GPU counts them, where nothing is said at once
    with pytest.warns(RuntimeWarning, match="^2 rows were skipped"):
        head.eval()


def test_a_gradscaler_goes_on_after_an_overflow():
    """Its first scale overflows; it skips the trunk's step, lowers the scale, and both go on."""
    head, trunk = make(), nn.Linear(D, D)
    optimiser = torch.optim.SGD(trunk.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    before = trunk.weight.detach().clone()

    def train():
        for t in range(40):
            hidden, target = batch(t)
            scaler.scale(100.0 * head(trunk(hidden), target)).backward()
            scaler.step(optimiser)
            scaler.update()
            optimiser.zero_grad()

    with pytest.warns(RuntimeWarning, match="rows were skipped"):
        train()
    assert scaler.get_scale() < 2.0**127
    assert not torch.equal(trunk.weight, before)
    assert_finite(head.state_dict())


@pytest.mark.parametrize("how", ["empty", "ignored"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", None])
@pytest.mark.parametrize("model", MODELS)
def test_a_first_minibatch_of_nothing_teaches_nothing(model, optimizer, how):
    found = faults.nothing_to_learn_at_first(making(model=model, optimizer=optimizer), how)
    assert_equal(found["after"], found["before"], but=("clock.counter",))
    assert float(found["loss"]) == 0.0
    assert_finite(found["later"])
    assert found["next loss"].isfinite()


# ---- once a step ----


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"local": "fresh"}, {"local": "persistent"}, {"model": "probit"}], ids=str)
def test_activation_checkpointing_draws_once_a_step(options, use_reentrant):
    """The pass that is repeated in the backward pass has the same classes and the same q, and learns nothing again."""
    make_head = making(**options)
    ours, plain = faults.recomputed(make_head, use_reentrant, chunks=1), faults.not_recomputed(make_head, chunks=1)
    assert torch.equal(ours["losses"], plain["losses"])
    assert torch.equal(ours["gradients"], plain["gradients"])
    assert_equal(ours["after"], plain["after"])
    assert int(ours["after"]["clock.counter"]) == 1
    assert int(ours["after"]["local.learned"]) == 1


@pytest.mark.parametrize("local", ["amortised", "fresh", "persistent"])
@pytest.mark.parametrize("n_calls", [2, 5])
def test_of_several_checkpointed_calls_each_repeats_its_own_draw(local, n_calls):
    """Without moves in between, which would make the repeated pass one of other weights."""
    make_head = making(local=local, optimizer=None, sparse_grad=False)
    ours, plain = (way(make_head, chunks=n_calls) for way in (faults.recomputed, faults.not_recomputed))
    assert torch.equal(ours["losses"], plain["losses"])
    assert torch.equal(ours["gradients"], plain["gradients"])
    assert_equal(ours["after"], plain["after"])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("made_inside", [False, True])
def test_backward_passes_may_come_in_any_order(order, made_inside):
    """With targets made inside the function, any order but the last one gave each call the draw of another."""
    found = []
    for wrap in (False, True):
        head = make(optimizer=None, sparse_grad=False)

        def call(hidden, labels, head=head):
            return head(2.0 * hidden, labels + 0 if made_inside else labels)

        inputs = [(hidden.requires_grad_(), labels) for hidden, labels in map(batch, range(4))]
        run = torch.utils.checkpoint.checkpoint if wrap else (lambda f, *a, use_reentrant: f(*a))
        losses = [run(call, *one, use_reentrant=False) for one in inputs]
        for i in order:
            losses[i].backward()
        found.append(torch.stack([hidden.grad for hidden, _ in inputs]))
    assert torch.equal(*found)


def test_a_checkpoint_with_an_evaluation_in_between():
    """Calls in eval mode draw too; they must not shift what the repeated call uses."""
    head, twin = make(), make()
    hidden, target = batch()
    h = [hidden.clone().requires_grad_() for _ in range(2)]
    losses = []
    for one, x, wrap in ((head, h[0], True), (twin, h[1], False)):
        call = torch.utils.checkpoint.checkpoint if wrap else (lambda f, *a, use_reentrant: f(*a))
        loss = call(one, x, target, use_reentrant=False)
        one.eval()(*batch(1))
        one.train()
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    torch.testing.assert_close(h[0].grad, h[1].grad)
    assert_equal(head.state_dict(), twin.state_dict())


def test_a_checkpoint_in_eval_mode_draws_nothing():
    """The gradient by the hidden rows was that of another sample than the loss."""
    head, twin = make().eval(), make().eval()
    hidden, target = batch()
    ours, plain = (hidden.clone().requires_grad_() for _ in range(2))
    loss = torch.utils.checkpoint.checkpoint(head, ours, target, use_reentrant=False)
    loss.backward()
    expected = twin(plain, target)
    expected.backward()
    assert loss == expected
    assert torch.equal(ours.grad, plain.grad)
    assert int(head.clock.counter) == 0


def chunks(n, checkpointed):
    """Gradients by the rows of n calls, whose backward passes come after all of them."""
    head = make(optimizer=None, sparse_grad=False)
    hidden = torch.randn(n, 3, D, generator=rng(4), requires_grad=True)
    target = torch.randint(K, (n, 3), generator=rng(5))
    run = torch.utils.checkpoint.checkpoint if checkpointed else (lambda f, *a, use_reentrant: f(*a))
    sum(run(head, h, y, use_reentrant=False) for h, y in zip(hidden, target, strict=True)).backward()
    return hidden.grad


def test_many_checkpointed_calls_repeat_their_own_draws(monkeypatch):
    """Beyond 64 calls the first ones got the draws of others; what is not remembered is refused."""
    assert torch.equal(chunks(90, True), chunks(90, False))
    monkeypatch.setattr(recompute, "REMEMBERED_NUMBERS", 0)
    assert torch.equal(chunks(64, True), chunks(64, False))
    with pytest.raises(RuntimeError, match="before the last 64 calls"):
        chunks(65, True)


@pytest.mark.parametrize("model", MODELS)
def test_asking_for_the_gradient_by_hidden_moves_nothing(model):
    found = faults.gradient_asked_for_alone(making(model=model))
    assert_equal(found["between"], found["before"])
    assert torch.equal(found["gradients"][0], found["gradients"][1])
    assert_equal(found["after"], faults.one_step(making(model=model))["after"])


def test_asking_for_the_gradients_of_weights_moves_nothing():
    """Code that logs gradient norms asks for all of them; the head's are None, as their `.grad` is."""
    head = make()
    hidden, target = batch()
    loss = head(hidden.requires_grad_(), target)
    before = faults.state(head)
    found = torch.autograd.grad(loss, [hidden, *head.parameters()], retain_graph=True, allow_unused=True)
    assert found[1:] == (None, None)
    assert_equal(faults.state(head), before)
    loss.backward()
    assert torch.equal(hidden.grad, found[0])
    assert_equal(faults.state(head), faults.one_step(making())["after"])


def test_a_second_backward_pass_is_refused():
    head = make()
    loss = head(batch()[0].requires_grad_(), batch()[1])
    loss.backward(retain_graph=True)
    after = faults.state(head)
    with pytest.raises(RuntimeError, match="a second time through a loss whose head moves its own weights"):
        loss.backward()
    assert_equal(faults.state(head), after)


def test_a_loss_that_is_used_twice_moves_once():
    head, twin = make(), make()
    hidden, target = batch()
    loss = head(hidden, target)
    (loss + 2.0 * loss).backward()
    (3.0 * twin(hidden, target)).backward()
    assert_equal(faults.state(head), faults.state(twin))


@pytest.mark.parametrize("which", ["both", "weight", "bias"])
def test_what_is_frozen_stands_still(which):
    found = faults.frozen(making(), which)
    assert torch.equal(found["after"]["weight"], found["before"]["weight"]) == (which != "bias")
    assert torch.equal(found["after"]["bias"], found["before"]["bias"]) == (which != "weight")
    assert found["gradient"].abs().sum() > 0


def test_what_is_frozen_before_the_backward_pass_stands_still():
    """As a torch parameter, which gets no gradient then."""
    head = make()
    loss = head(batch()[0].requires_grad_(), batch()[1])
    before = faults.state(head)
    head.requires_grad_(False)
    loss.backward()
    assert_equal(faults.state(head), before)


def test_a_frozen_network_freezes_its_head():
    """`requires_grad_` of a parent does not call that of its children, only of their parameters."""
    model = nn.Sequential(nn.Linear(D, D), make())
    model.requires_grad_(False)
    before = faults.state(model[1])
    hidden = batch()[0].requires_grad_()
    model[1](model[0](hidden), batch()[1]).backward()
    assert torch.equal(model[1].weight, before["weight"])
    model.requires_grad_(True)
    model[1](model[0](hidden), batch()[1]).backward()
    assert not torch.equal(model[1].weight, before["weight"])


def test_a_torch_optimiser_leaves_the_heads_weights_alone():
    head, twin = make(), make()
    optimiser = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.5)
    for one in (head, twin):
        one(*batch()).backward()
    optimiser.step()
    assert all(p.grad is None for p in head.parameters())
    assert_equal(faults.state(head), faults.state(twin))


def test_eval_gives_the_weights_no_gradient():
    head = make().eval()
    head(batch()[0].requires_grad_(), batch()[1]).backward()
    assert head.weight.grad is None


def test_second_derivatives_are_refused_where_they_were_zero():
    for head in (make(), make(optimizer=None, sparse_grad=False), make(optimizer=None)):
        hidden = batch()[0].requires_grad_()
        gradient = torch.autograd.grad(head(hidden, batch()[1]), hidden, create_graph=True)[0]
        assert gradient.requires_grad
        with pytest.raises(RuntimeError, match="no derivative of its own"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_second_derivatives_by_weights_are_refused_too(which, sparse_grad):
    head = make(optimizer=None, sparse_grad=sparse_grad)
    gradient = torch.autograd.grad(head(*batch()), getattr(head, which), create_graph=True)[0]
    assert gradient.is_sparse == sparse_grad
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        gradient.to_dense().square().sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_for_something_else_is_fine():
    head = make(optimizer=None, sparse_grad=False)
    hidden = batch()[0].requires_grad_()
    (head(hidden, batch()[1]) + hidden.square().sum()).backward(create_graph=True)
    assert hidden.grad is not None
    hidden.grad = head.weight.grad = head.bias.grad = None  # or the graph keeps itself alive


# ---- weights that are not the ones that are kept ----


class Doubled(nn.Module):
    def forward(self, x):
        return 2.0 * x


def refused(head):
    return pytest.raises(RuntimeError, match=r"optimizer=None with sparse_grad=False")


def test_a_parametrized_weight_is_refused():
    head = make()
    parametrize.register_parametrization(head, "weight", Doubled())
    with refused(head):
        head(*batch())
    with torch.no_grad():
        assert head(*batch()).isfinite()  # nothing is to move here
    other = make(optimizer=None, sparse_grad=False)
    parametrize.register_parametrization(other, "weight", Doubled())
    other(*batch()).backward()
    assert other.parametrizations.weight.original.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_computed_by_a_hook_is_refused(wrap):
    head = wrap(make(), "weight")  # raised KeyError
    with refused(head):
        head(*batch())
    other = wrap(make(optimizer=None, sparse_grad=False), "weight")
    other(*batch()).backward()
    assert all(p.grad is not None for p in other.parameters())


def test_a_replica_of_data_parallel_is_refused():
    """Its weights are copies, results of a broadcast; replicas lose what is written to them."""
    head = make()
    replica = head._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name in ("weight", "bias"):
        setattr(replica, name, getattr(head, name) * 1.0)
    with refused(replica):
        replica(*batch())


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sharded_weights_are_refused(one_process):
    """FSDP2 hands a gathered copy to the forward pass; DTensor keeps the weight elsewhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    assert make()(*batch()).isfinite()  # a process group of one is nothing to fear
    model = nn.Sequential(nn.Linear(D, D), make())
    fully_shard(model, mesh=mesh)
    hidden, target = batch()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(D, D), make()

        def forward(self, hidden, target):
            return self.head(self.trunk(hidden), target)

    net = Net()
    fully_shard(net, mesh=mesh)
    with refused(net):
        net(hidden, target)
    head = make()
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    with refused(head):
        head(hidden, target)


def test_several_processes_are_refused(monkeypatch):
    """Each would move a copy of its own."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    head = make()
    with pytest.raises(
        RuntimeError,
        match="shared by all 2 processes of the initialized process group, found a head without process_group",
    ):
        head(*batch())
    head.eval()(*batch())
    make(optimizer=None)(*batch()).backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))], ids=["deepcopy", "pickle"])
def test_copies_and_tied_weights_are_not_refused(copied):
    head = make()
    faults.steps(head, 0)
    twin = copied(head)
    assert faults.steps(head, 1, 2) == faults.steps(twin, 1, 2)
    assert_equal(faults.state(head), faults.state(twin))
    embedding = nn.Embedding(K, D)
    tied = make()
    tied.weight = embedding.weight
    before = embedding.weight.detach().clone()
    tied(*batch()).backward()
    assert not torch.equal(embedding.weight, before)
    head.to(torch.float64)(batch()[0].double(), batch()[1]).backward()
    loaded = make()
    loaded.load_state_dict(twin.state_dict(), assign=True)
    loaded(*batch()).backward()


def test_weights_with_a_gradient_from_elsewhere_are_refused():
    """The network's optimiser would move them a second time."""
    embedding = nn.Embedding(K, D)
    head = make(bias=False)
    head.weight = embedding.weight
    loss = head(embedding(batch()[1]), batch()[1])
    with pytest.raises(RuntimeError, match=r"head\.weight is moved by the head's own optimizer, and another part"):
        loss.backward()
    head = make()
    with pytest.raises(RuntimeError, match="For a penalty use weight_decay"):
        (head(*batch()) + head.bias.square().sum()).backward()
    dense = make(optimizer=None, bias=False)
    dense.weight = nn.Embedding(K, D).weight
    (dense(*batch()) + dense.weight.square().sum()).backward()


# ---- states ----


def test_a_state_with_other_tables_brings_its_own():
    """The draws of a resumed training are those that it would have gone on with, whatever the constructor was told."""
    ours = make(class_counts=torch.arange(1, K + 1))
    theirs = make(class_counts=2.0 ** torch.arange(K, 0, -1))
    assert ours.sampler.n_certain != theirs.sampler.n_certain
    faults.steps(ours, 0)
    theirs.load_state_dict(ours.state_dict())
    assert faults.steps(ours, 1, 2) == faults.steps(theirs, 1, 2)
    assert_equal(faults.state(ours), faults.state(theirs))


@pytest.mark.parametrize(
    "options",
    [{"n_sampled_classes": S + 1}, {"class_sampling": "frequency-shared"}, {"class_sampling": "all"}],
    ids=str,
)
def test_a_state_of_another_sampler_is_refused(options):
    counts = torch.arange(1, K + 1)
    with pytest.raises(ValueError, match=r"class_sampling=.*draws would be others.*settings of the state"):
        make(class_counts=counts, **options).load_state_dict(make(class_counts=counts).state_dict())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("certain", [K], "classes below 40"),
        ("certain", [-1], "classes below 40"),
        ("cumulative", [float(K - k) for k in range(K)], "growing, finite"),
        ("cumulative", [math.nan] * K, "growing, finite"),
        ("cumulative", [1.0, 2.0], "40 growing"),
    ],
)
def test_tables_that_would_draw_outside_are_refused(name, value, message):
    state = make(class_counts=torch.arange(1, K + 1)).state_dict()
    key = f"sampler.{name}"
    state[key] = torch.tensor(value, dtype=state[key].dtype)
    with pytest.raises(ValueError, match=message):
        make(class_counts=torch.arange(1, K + 1)).load_state_dict(state)


def test_a_state_without_tables_is_taken_with_a_warning():
    """As they were saved before the tables were part of them."""
    counts = torch.arange(1, K + 1)
    head = make(class_counts=counts)
    state = {k: v for k, v in head.state_dict().items() if not k.startswith("sampler.")}
    state["clock.tally"] = state["clock.tally"][:4]
    twin = make(class_counts=counts)
    with pytest.warns(UserWarning, match="without the tables of its class sampler"):
        twin.load_state_dict(state)
    assert head(*batch()) == twin(*batch())


@pytest.mark.parametrize("inside", [False, True], ids=["device=meta", "with device"])
def test_a_head_without_memory_gets_its_first_values_with_it(inside):
    """`to_empty` gave memory that nobody had written to: the sampler drew from it."""
    options = {"class_counts": torch.arange(1, K + 1), "local": "amortised", "model": "logistic"}
    if inside:
        with torch.device("meta"):
            head = make(**options)
    else:
        head = make(device="meta", **options)
    assert head.weight.is_meta
    head.train(), head.eval(), head.state_dict()  # nothing to read yet
    head.to_empty(device="cpu").train()
    head.reset_parameters()
    expected = make(**options)
    assert_equal(faults.state(head), faults.state(expected))
    for t in range(2):
        a, b = head(*batch(t)), expected(*batch(t))
        assert a == b
        a.backward(), b.backward()
    assert_equal(faults.state(head), faults.state(expected))


def test_a_head_without_memory_takes_a_state():
    counts = torch.arange(1, K + 1)
    trained = make(class_counts=counts)
    faults.steps(trained, 0, 1)
    by_copy, by_assignment = (make(class_counts=counts, device="meta") for _ in range(2))
    by_copy.to_empty(device="cpu").load_state_dict(trained.state_dict())
    by_assignment.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True)
    expected = faults.steps(trained, 2)
    for head in (by_copy, by_assignment):
        assert faults.steps(head, 2) == expected
        assert_equal(faults.state(head), faults.state(trained))


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_the_table_of_all_classes_is_not_part_of_the_state_and_is_made_anew(how):
    """`to_empty` left memory that nobody had written to, classes of 15 digits; `assign=True` left a meta tensor."""
    options = {"class_sampling": "all", "n_sampled_classes": K}
    trained = make(**options)
    faults.steps(trained, 0)
    head = make(**options, device="meta" if how == "assign" else None)
    if how == "to_empty":
        head.to_empty(device="cpu").sampler.certain.fill_(10**12)
    head.load_state_dict(copy.deepcopy(trained.state_dict()), assign=how == "assign")
    assert faults.steps(head, 1) == faults.steps(trained, 1)
    assert_equal(faults.state(head), faults.state(trained))


def test_reset_parameters_begins_anew():
    head = make(class_counts=torch.arange(1, K + 1), optimizer="adam", local="persistent")
    before = faults.state(head)
    faults.steps(head, 0, 1, 2)
    head.reset_parameters()
    assert_equal(faults.state(head), before)


# ---- exact where it is said to be ----


@pytest.mark.parametrize("floor", [1.0, 0.0, None])
@pytest.mark.parametrize("at", [0.0, 61.0, 62.0, 70.0, 100.0, 700.0, 5_000.0])
def test_all_classes_are_exact_cross_entropy_at_any_logit(at, floor):
    """Beyond 62 the loss was too high, then far too low, and without a floor 2.5e25."""
    head = AugmentReduceHead(
        1, 5, class_sampling="all", local="fresh", sparse_grad=False, dtype=torch.float64, floor=floor
    )
    with torch.no_grad():
        head.weight[:, 0] = torch.tensor([0.0, 1.0, 0.5, 0.2, -0.3])
        head.bias.zero_()
    hidden, target = torch.tensor([[at], [0.1]], dtype=torch.float64), torch.tensor([0, 3])
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
    expected = F.cross_entropy(F.linear(*leaves), target)
    expected.backward()
    for t in range(3):  # before and after the prediction of c has learned
        hidden.grad = head.weight.grad = head.bias.grad = None
        loss = head(hidden.requires_grad_(), target)
        loss.backward()
        torch.testing.assert_close(loss, expected, msg=f"step {t}")
        for ours, theirs in zip((hidden, head.weight, head.bias), leaves, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("local", ["amortised", "fresh", "persistent"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0, 3_000.0])
def test_the_loss_of_all_classes_is_never_below_exact(scale, local):
    """A negative lower bound, however far c is: without the floor, whose bias goes the other way."""
    found = faults.far_logits(
        making(class_sampling="all", n_sampled_classes=K, local=local, floor=None, dtype=torch.float32), scale
    )
    assert found["loss"] >= found["exact"] * (1.0 - 1e-5)


def test_log_prob_leaves_ignored_targets_out():
    head = make()
    hidden, target = batch()
    target[[2, 5]] = -100
    found = head.log_prob(hidden, target)
    assert found[[2, 5]].tolist() == [0.0, 0.0]
    kept = target != -100
    torch.testing.assert_close(found[kept], head.log_prob(hidden[kept], target[kept]))
    torch.testing.assert_close(log_prob(hidden, head.weight, target, head.bias), found)
    assert head.log_prob_bound(hidden, target)[[2, 5]].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"or ignore_index=-100, but 1 are outside.*target=-7"):
        head.log_prob(hidden, target.clone().index_fill_(0, torch.tensor([1]), -7))


def test_the_function_refuses_what_the_head_refuses():
    hidden, target = batch()
    weight = torch.randn(K, D, generator=rng(3), requires_grad=True)
    hidden[1] = math.nan
    loss = linear_augment_reduce(hidden.requires_grad_(), weight, target, n_sampled_classes=S, sparse_grad=False)
    loss.backward()
    assert loss.isnan()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("place", [BAD_TARGETS, BAD_WEIGHTS])
def test_on_a_gpu_the_function_refuses_by_a_loss_of_nan(place):
    """It has no later call that could tell; such rows were left out without a word."""
    weight = torch.ones(3, requires_grad=True)
    tally = torch.zeros(8, dtype=torch.int64)
    assert functional._nan_where_refused(weight.sum(), tally) == 3.0
    tally[place] = 2
    loss = functional._nan_where_refused(weight.sum(), tally)
    assert loss.isnan()
    loss.backward()
    assert not weight.grad.any()
