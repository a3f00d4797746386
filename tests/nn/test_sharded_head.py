"""A head whose classes are on several ranks: the numbers of one process, whatever ranks, rows and exchange are."""

import copy
import itertools
import os
import re
import time
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from augment_reduce.nn import AugmentReduceHead, exclude_from_ddp
from tests.helpers.rank_processes import run_on_ranks, try_on_ranks

D, N_ROWS = 8, 90  # N_ROWS: of a persistent q


class Case(NamedTuple):
    """A head and how its ranks are fed."""

    model: str = "softmax"
    exchange: str | None = "hidden"
    K: int = 203
    S: int = 24
    counts: bool = True
    dtype: torch.dtype = torch.float64
    rows: str = "uneven"  # | "even" | "none on the last" | "labels of one rank"
    weights: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    steps: int = 8


def settings(**values: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(values.items())


ADAGRAD = settings(optimizer="adagrad")
CASES = {
    **{
        f"{model}-{exchange}": Case(model, exchange, settings=ADAGRAD, steps=200 if exchange == "hidden" else 40)
        for model, exchange in itertools.product(("softmax", "probit", "logistic"), ("hidden", "rows"))
    },
    "softmax-float32": Case(dtype=torch.float32, settings=ADAGRAD, steps=200),
    "probit-float32": Case("probit", dtype=torch.float32, settings=ADAGRAD, steps=200),
    "logistic-float32": Case("logistic", dtype=torch.float32, settings=ADAGRAD, steps=200),
    "K divides": Case(K=48, S=12, settings=ADAGRAD),
    "fewer classes than columns": Case(K=5, S=5, settings=ADAGRAD),
    "no counts": Case(counts=False, settings=ADAGRAD),
    "all classes": Case(K=40, S=40, settings=settings(class_sampling="all", local="fresh", optimizer="adagrad")),
    "adam": Case(exchange="rows", settings=settings(optimizer="adam", weight_decay=0.01, max_norm=0.1)),
    "rowwise": Case(settings=settings(optimizer="rowwise-adagrad", initial_accumulator_value=0.1)),
    "bfloat16": Case(dtype=torch.bfloat16, settings=ADAGRAD),
    "dense gradients": Case(settings=settings(optimizer=None)),
    "sparse gradients": Case(exchange="rows", settings=settings(optimizer=None, sparse_grad=True)),
    "fresh": Case(exchange="rows", settings=settings(local="fresh", optimizer="adagrad")),
    "fresh probit": Case("probit", settings=settings(local="fresh", n_nodes=3, optimizer="adagrad")),
    "persistent": Case(settings=settings(local="persistent", n_rows=N_ROWS, optimizer="adagrad")),
    "smoothing": Case(settings=settings(label_smoothing=0.1, optimizer="adagrad")),
    "z-loss": Case(settings=settings(z_loss=1e-3, floor=None, optimizer="adagrad")),
    "no row": Case(rows="none on the last", settings=ADAGRAD),
    "no row, rows": Case(exchange="rows", rows="none on the last", settings=ADAGRAD),
    "labels of one rank": Case(rows="labels of one rank", settings=ADAGRAD),
    "labels of one rank, rows": Case(exchange="rows", rows="labels of one rank", settings=ADAGRAD),
    "weights": Case(weights=True, settings=ADAGRAD),
    "weights, rows": Case(exchange="rows", weights=True, settings=settings(reduction="sum", optimizer="adagrad")),
    "each row": Case(weights=True, settings=settings(reduction="none", optimizer="adagrad")),
    "each row, rows": Case(exchange="rows", settings=settings(reduction="none", optimizer="adagrad")),
}  # fmt: skip
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(case: Case, group: Any = None) -> AugmentReduceHead:
    counts = 1.0 / torch.arange(1, case.K + 1) if case.counts else None
    exchange = {} if group is None else {"process_group": group, "exchange": case.exchange, "sync": True}
    return AugmentReduceHead(
        D, case.K, case.model, n_sampled_classes=case.S, class_counts=counts, dtype=case.dtype, generator=rng(3),
        **dict(case.settings), **exchange,
    )  # fmt: skip


def sizes_of(case: Case, n_ranks: int) -> list[int]:
    if case.rows == "none on the last":
        return [9] * (n_ranks - 1) + [0]
    return [9 if case.rows == "even" else 7 + 4 * r for r in range(n_ranks)]


def minibatch(case: Case, n_ranks: int, t: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rows of all ranks: repeated labels, one row that is ignored."""
    g, B = rng(t), sum(sizes_of(case, n_ranks))
    hidden = torch.randn(B, D, dtype=case.dtype, generator=g)
    target = torch.randint(case.K, (B,), generator=g)
    target[1] = target[0]
    if case.rows == "labels of one rank":
        target = target // n_ranks * n_ranks  # all on rank 0
    target[2] = -100
    more = {}
    if case.weights:
        more["sample_weight"] = torch.rand(B, dtype=torch.float32, generator=g)
    if dict(case.settings).get("local") == "persistent":
        more["index"] = torch.randperm(N_ROWS, generator=g)[:B]
    return hidden, target, more


def train(case: Case, group: Any, heads: tuple[AugmentReduceHead, AugmentReduceHead]) -> dict[str, float]:
    """The largest relative difference of loss, gradients, weights and local parameters of the two heads."""
    n_ranks, rank = group.size(), group.rank()
    sizes = sizes_of(case, n_ranks)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    alone, shared = heads
    optimizers = [torch.optim.Adagrad(h.parameters(), 0.1) if h.optimizer is None else None for h in heads]
    layout = shared.shards.layout
    worst: dict[str, float] = {}

    def compare(name: str, found: Tensor, wanted: Tensor) -> None:
        found, wanted = found.detach().double(), wanted.detach().double()
        assert found.shape == wanted.shape, name
        if found.numel():
            difference = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            worst[name] = max(worst.get(name, 0.0), difference)

    for t in range(case.steps):
        hidden, target, more = minibatch(case, n_ranks, t)
        upstream = 1.0 if alone.reduction != "none" else torch.rand(len(hidden), generator=rng(t))
        one, part = hidden.clone().requires_grad_(), hidden[own].clone().requires_grad_()
        with mock.patch("augment_reduce.nn.head.check_may_move"):  # it is alone, on every rank
            whole = alone(one, target, **more)
            (whole * upstream).sum().backward()
        loss = shared(part, target[own], **{name: x[own] for name, x in more.items()})
        (loss * (upstream if isinstance(upstream, float) else upstream[own])).sum().backward()
        compare("loss", loss, whole[own] if alone.reduction == "none" else whole)
        compare("gradient by hidden", part.grad, one.grad[own])
        for head, optimizer in zip(heads, optimizers, strict=True):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
                del head
        compare("weight", shared.weight, layout.of(alone.weight))
        compare("bias", shared.bias, layout.of(alone.bias))
    for (name, a), b in zip(alone.local.named_buffers(), shared.local.buffers(), strict=True):
        compare(f"local.{name}", b, a)
    compare("tally", shared.clock.tally, alone.clock.tally)
    return worst


def compare_with_one_process(group: Any, names: list[str]) -> dict[str, dict[str, float]]:
    """200 steps on two ranks; on more, which take turns on few cores, 40."""
    most = 200 if group.size() == 2 else 40
    cases = {name: CASES[name]._replace(steps=min(CASES[name].steps, most)) for name in names}
    return {name: train(case, group, (make(case), make(case, group))) for name, case in cases.items()}


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_ranks_take_the_steps_of_one_process(n_ranks, tmp_path):
    names = list(CASES) if n_ranks == 2 else ["softmax-hidden", "logistic-rows", "probit-float32", "no row", "adam"]
    for found in run_on_ranks(compare_with_one_process, n_ranks, tmp_path, names, limit=400.0):
        for name, worst in found.items():
            limit = EXACT[CASES[name].dtype]
            assert not {what: x for what, x in worst.items() if x > limit}, name


def answers_of(group: Any, model: str, exchange: str) -> None:
    """Exact losses and answers of ranks, beside those of a head that has all classes."""
    case = Case(model, exchange, K=37, settings=settings(optimizer=None))
    alone, shared = make(case), make(case, group)
    g, rank = rng(7), group.rank()
    with torch.no_grad():
        for head, weight in ((alone, alone.weight), (shared, shared.weight)):
            weight.copy_(3.0 * weight)
            if model == "softmax" and (rank == 0 or head is alone):
                head.bias[0] = -torch.inf
    sizes = [3, 0, 5, 4][: group.size()]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    hidden = torch.randn(sum(sizes), D, dtype=torch.float64, generator=g)
    target = torch.randint(1, 37, (sum(sizes),), generator=g)
    close = torch.testing.assert_close
    close(shared.log_prob(hidden[own], target[own]), alone.log_prob(hidden, target)[own])
    close(shared.log_prob_bound(hidden[own], target[own]), alone.log_prob_bound(hidden, target)[own])
    for k in (1, 5, 30, 37):
        for found, wanted in zip(shared.topk(hidden[own], k), alone.topk(hidden, k), strict=True):
            close(found, wanted[own])
    with torch.no_grad():
        close(shared(hidden[own]), alone(hidden)[own])
    if model == "softmax":
        close(shared.log_normalizer(hidden[own]), alone.log_normalizer(hidden)[own])
    for reduction in ("mean", "sum", "none"):
        one, part = hidden.clone().requires_grad_(), hidden[own].clone().requires_grad_()
        for head in (alone, shared):
            head.reduction = reduction
            head.zero_grad()
        upstream = torch.rand(len(hidden), dtype=torch.float64, generator=rng(1)) if reduction == "none" else 2.0
        whole, loss = alone.eval()(one, target), shared.eval()(part, target[own])
        close(loss, whole[own] if reduction == "none" else whole)
        (whole * upstream).sum().backward()
        (loss * (upstream[own] if reduction == "none" else upstream)).sum().backward()
        close(part.grad, one.grad[own])
        close(shared.weight.grad, shared.shards.layout.of(alone.weight.grad))
        close(shared.bias.grad, shared.shards.layout.of(alone.bias.grad))
    linear = shared.to_linear()
    close(linear.weight, alone.weight)
    again = AugmentReduceHead.from_linear(linear, model, n_sampled_classes=5, process_group=group)
    close(again.weight, shared.weight)


def all_answers(group: Any) -> None:
    for model, exchange in (("softmax", "hidden"), ("probit", "rows"), ("logistic", "hidden")):
        answers_of(group, model, exchange)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_exact_answers_are_those_of_one_process(n_ranks, tmp_path):
    run_on_ranks(all_answers, n_ranks, tmp_path, limit=120.0)


def trunk_under_ddp(group: Any) -> None:
    """A network under DDP, head inside it or outside, beside one process."""
    case = Case(K=30, S=8, settings=ADAGRAD)
    for inside in (True, False):
        torch.manual_seed(0)
        trunk = nn.Linear(D, D, dtype=torch.float64)
        alone = copy.deepcopy(trunk)
        head, single = make(case, group), make(case)
        if not inside:
            head.shards.trunk_gradients = "mean"
        net = WithHead(trunk, head)
        with pytest.raises(RuntimeError, match="exclude_from_ddp"):
            DistributedDataParallel(WithHead(copy.deepcopy(trunk), make(case, group)))(
                torch.zeros(2, D, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
            )
        wrapped = DistributedDataParallel(exclude_from_ddp(net) if inside else trunk)
        optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (trunk, alone)]
        for t in range(5):
            hidden, target, _ = minibatch(case, group.size(), t)
            sizes = sizes_of(case, group.size())
            own = slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))
            with mock.patch("augment_reduce.nn.head.check_may_move"):
                single(alone(hidden), target).backward()
            loss = wrapped(hidden[own], target[own]) if inside else head(wrapped(hidden[own]), target[own])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(trunk.weight, alone.weight)
        torch.testing.assert_close(head.weight, head.shards.layout.of(single.weight))


class WithHead(nn.Module):
    def __init__(self, trunk: nn.Module, head: AugmentReduceHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.head(self.trunk(hidden), target)


def test_a_trunk_under_ddp_trains_as_in_one_process(tmp_path):
    run_on_ranks(trunk_under_ddp, 2, tmp_path)


def sent_by_steps(group: Any, model: str, exchange: str, K: int, B: int, dim: int) -> list[int]:
    """Payload of one step's collectives."""
    head = AugmentReduceHead(
        dim,
        K,
        model,
        n_sampled_classes=16,
        optimizer="adagrad",
        process_group=group,
        exchange=exchange,
        generator=rng(0),
    )
    hidden = torch.randn(B, dim, generator=rng(1)).requires_grad_()
    before = head.shards.ranks.payload
    head(hidden, torch.zeros(B, dtype=torch.long)).backward()
    return head.shards.ranks.payload - before


def bytes_of_steps(group: Any) -> dict[tuple[str, int, int, int], int]:
    shapes = [(exchange, K, B, dim) for exchange in ("hidden", "rows") for K, B, dim in SHAPES]
    return {shape: sent_by_steps(group, "softmax", *shape) for shape in shapes}


SHAPES = [(50, 12, 8), (5000, 12, 8), (50, 24, 8), (50, 12, 16)]


def test_bytes_sent_do_not_depend_on_the_number_of_classes(tmp_path):
    """Exchange "hidden": rows there and gradients back, 4 D bytes a row each on the way out and for R ranks back; and
    few numbers a row. Nothing grows with K."""
    for found in run_on_ranks(bytes_of_steps, 2, tmp_path):
        for exchange in ("hidden", "rows"):
            assert found[exchange, 50, 12, 8] == pytest.approx(found[exchange, 5000, 12, 8], abs=1500), exchange
        small, more_rows, wider = (found["hidden", *shape] for shape in (SHAPES[0], SHAPES[2], SHAPES[3]))
        control = 2 * small - more_rows  # what does not depend on the rows
        assert control <= 64
        a_row = (more_rows - small) // 12
        assert wider - small == 12 * 8 * 4 * 3  # D more numbers: gathered once, scattered from two ranks' parts
        assert a_row - 8 * 4 * 3 <= 64  # the few numbers


def wrong_on_one_rank(group: Any, fault: str) -> None:
    rank = group.rank()
    case = Case(K=30, S=8, settings=ADAGRAD)
    if fault == "K":
        make(case._replace(K=30 + rank), group)
    elif fault == "seed":
        AugmentReduceHead(D, 30, process_group=group, generator=rng(rank))
    elif fault == "settings":
        make(case._replace(settings=settings(optimizer="adagrad", floor=1.0 + rank)), group)
    elif fault == "classes":
        AugmentReduceHead(D, 2, process_group=group) if group.size() > 2 else make(case._replace(K=1, S=1), group)
    head = make(case, group)
    hidden, target = torch.zeros(4, D, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    if fault == "target":
        head(hidden, target + 99 * rank)
    elif fault == "shape":
        head(hidden[:, : D - rank], target)
    elif fault == "mode":
        head.train(rank == 0)(hidden, target)
    elif fault == "weights":
        head(hidden, target, sample_weight=torch.ones(4) if rank else None)
    elif fault == "dies":
        head(hidden, target)
        if rank == 1:
            os._exit(3)
        head(hidden, target)
    elif fault == "hangs":
        copy.deepcopy(head)(hidden, target)  # copies share the ranks
        if rank == 1:
            time.sleep(60.0)
        head(hidden, target)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("K", r"n_classes: 30 on rank 0, 31 on rank 1"),
        ("seed", r"generator: .* on rank 0, .* on rank 1"),
        ("settings", r"floor: 1.0 on rank 0, 2.0 on rank 1"),
        ("classes", r"at least (one class a rank|2)"),
        ("target", r"Expected targets in|99"),
        ("shape", r"Expected hidden of shape"),
        ("mode", r"Expected train\(\) on all ranks .* ranks \[0\]"),
        ("weights", r"Expected sample_weight on all ranks .* ranks \[1\]"),
        ("dies", r"rank 1 did not answer"),
        ("hangs", r"rank 1 did not answer"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(fault, message, tmp_path):
    timeout = 8.0 if fault == "hangs" else 30.0
    outcomes = try_on_ranks(wrong_on_one_rank, 2, tmp_path, fault, limit=60.0, timeout=timeout)
    assert outcomes[0].code == 1
    for one in outcomes if fault not in ("dies", "hangs") else outcomes[:1]:
        assert re.search(message, one.error), one


def late_and_in_time(group: Any, model: str, local: str) -> dict[str, list[float]]:
    """Held-out loss of two heads on one kind of data, with and without waiting for sums; the losses of late steps."""
    K, B = 60, 16
    more = {"n_rows": 64} if local == "persistent" else {}
    centres = torch.randn(K, D, generator=rng(1))
    found: dict[str, list[float]] = {}
    for sync in (True, False):
        head = AugmentReduceHead(
            D, K, model, n_sampled_classes=12, local=local, optimizer="adagrad", generator=rng(2), process_group=group,
            exchange="hidden", sync=sync, **more,
        )  # fmt: skip
        losses, rank = [], group.rank()
        for t in range(150):
            index = torch.randperm(64, generator=rng(t))[: 2 * B]
            target = index * 7 % K
            hidden = centres[target] + 0.3 * torch.randn(2 * B, D, generator=rng(1000 + t))
            own = slice(B * rank, B * rank + B)
            more_rows = {"index": index[own]} if local == "persistent" else {}
            loss = head(hidden[own].requires_grad_(), target[own], **more_rows)
            loss.backward()
            losses.append(float(loss))
        target = torch.arange(B) * 7 % K
        exact = float(-head.eval().log_prob(centres[target], target).mean())
        found["in time" if sync else "late"] = [exact, *losses]
    return found


def without_a_floor(group: Any) -> None:
    """Then late steps are those in time, and return the losses of the steps before."""
    ways = [("softmax", "amortised"), ("softmax", "log-sum-exp"), ("softmax", "persistent"), ("probit", "amortised")]
    for model, local in ways:
        more = {"n_rows": N_ROWS} if local == "persistent" else {}
        case = Case(model, settings=settings(local=local, floor=None, optimizer="adagrad", **more))
        in_time, late = make(case, group), make(case, group)
        late.shards.sync = False
        losses: dict[AugmentReduceHead, list[float]] = {in_time: [], late: []}
        sizes = sizes_of(case, group.size())
        own = slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))
        for t in range(25):
            hidden, target, rows = minibatch(case, group.size(), t)
            for head, said in losses.items():
                part = hidden[own].clone().requires_grad_()
                loss = head(part, target[own], **{name: x[own] for name, x in rows.items()})
                loss.backward()
                said.append(float(loss))
        late.settle()
        assert losses[late][1:] == pytest.approx(losses[in_time][:-1], rel=1e-12), (model, local)
        for (name, a), b in zip(in_time.state_dict().items(), late.state_dict().values(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=f"{model} {local} {name}")


def test_late_steps_without_a_floor_are_those_in_time(tmp_path):
    run_on_ranks(without_a_floor, 2, tmp_path, limit=120.0)


def late_of_all(group: Any) -> dict[tuple[str, str], dict[str, list[float]]]:
    ways = [("softmax", "amortised"), ("softmax", "log-sum-exp"), ("softmax", "persistent"), ("probit", "amortised")]
    return {way: late_and_in_time(group, *way) for way in ways}


def test_late_sums_learn_as_well(tmp_path):
    """The loss of a late step is that of the step before. c learns from the same sums; the floor sees less of
    them."""
    for found in run_on_ranks(late_of_all, 2, tmp_path, limit=120.0):
        for way, both in found.items():
            (exact, *in_time), (exact_late, *late) = both["in time"], both["late"]
            assert late[0] == pytest.approx(in_time[0], rel=1e-5), way
            assert late[1] == late[0], way  # the value of the step before
            assert late[2] == pytest.approx(in_time[1], rel=0.2), way
            assert exact < in_time[0] - 1.0, way  # it has learned
            assert exact_late == pytest.approx(exact, abs=0.1), way
