"""The cost model on paper: it sends what a step does send; its tables; the measurements on tiny shapes."""

from typing import Any

import pytest
import torch

from augment_reduce.nn import AugmentReduceHead
from benchmarks.common import SCHEMAS
from benchmarks.speed import bench_shards
from benchmarks.studies import shard_costs
from tests.helpers.rank_processes import run_on_ranks

SHAPES = ((40, 30, 8), (96, 30, 8), (40, 90, 8), (40, 30, 24))  # B, |S|, D


def sent_by_a_step(group: Any) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    found = {}
    for exchange in ("hidden", "rows"):
        for B, S, D in SHAPES:
            head = AugmentReduceHead(
                D, 500, n_sampled_classes=S, optimizer="adagrad", process_group=group, exchange=exchange,
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            ranks = head.shards.ranks
            before = ranks.bytes_sent, ranks.rounds
            head(torch.randn(B, D).requires_grad_(), torch.arange(B)).backward()  # labels of every rank
            head.settle()
            found[exchange, B, S, D] = ranks.bytes_sent - before[0], ranks.rounds - before[1]
    return found


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_the_model_sends_what_a_step_sends(n_ranks, tmp_path):
    """Exact for "hidden"; for "rows" up to how a (seeded) draw is spread over ranks: within a fifth."""
    for found in run_on_ranks(sent_by_a_step, n_ranks, tmp_path):
        for (exchange, *shape), (size, rounds) in found.items():
            said = shard_costs.collectives(exchange, n_ranks, *shape)
            assert len(said) == rounds
            total = sum(one.size for one in said)
            assert total == pytest.approx(size, rel=0.2 if exchange == "rows" else 1e-3), (exchange, shape)


def rows_of_a_known_machine() -> list[dict[str, Any]]:
    """10 µs a message and 1 byte a nanosecond; 100 µs a step, 2e-6 a score and 1e-4 a number."""
    rows = [
        shard_costs.result(kind, ranks=R, bytes=size, values=[10.0 * shard_costs.steps_of(kind, R) + 1e-3 * size])
        for kind in shard_costs.KINDS
        for R in (2, 4)
        for size in (64, 1 << 20, 4 << 20)
    ]
    for B, S, D in shard_costs.SHAPES:
        time = 100.0 + 2e-6 * B * S * D + 1e-4 * (B + S) * D
        rows.append(shard_costs.result("step of one process", ranks=1, B=B, S=S, D=D, values=[time]))
    rows += [shard_costs.result("step, hidden", ranks=2, B=512, S=512, D=128, values=[9_000.0])]
    return [*rows, shard_costs.result("operations of a step", ranks=1, values=[600.0])]


def test_constants_are_found_again():
    machine = shard_costs.gloo(rows_of_a_known_machine())
    assert machine.operations == pytest.approx((100.0, 2e-6, 1e-4), rel=1e-3)
    for kind in shard_costs.KINDS:
        assert machine.collective(kind, 8, 1e6) == pytest.approx(10.0 * shard_costs.steps_of(kind, 8) + 1e3, rel=1e-3)


def test_tables():
    origin = {"date": "2026-11-19", "machine": "a", "version": "torch 2"}
    rows = [origin | row for row in rows_of_a_known_machine()]
    assert len(shard_costs.table(rows).splitlines()) == 2 + 4
    assert len(shard_costs.published(rows).splitlines()) == 2 + 3
    lines = shard_costs.checked(rows).splitlines()
    assert len(lines) == 2 + 8 + 1
    assert "| all-reduce, 1.05 MB | 4 | 1.11 | 1.11 |" in lines[2]


def test_larger_groups_of_gpus_cost_more():
    machine = shard_costs.gpus(shard_costs.H100, 600.0)
    for exchange in ("hidden", "rows"):
        times = [machine.step(exchange, R, *shard_costs.SHAPE) for R in (8, 16, 64, 1024)]
        assert times == sorted(times)
    sent = [sum(one.size for one in shard_costs.collectives("rows", R, *shard_costs.SHAPE)) for R in (8, 1024)]
    assert sent[1] < 1.2 * sent[0]  # "rows" sends no more to more ranks


def test_measurements(tmp_path):
    rows = shard_costs.main(["--tiny", "--runs", "1", "--output", str(tmp_path / "shard_costs.csv")])
    assert {row["what"] for row in rows} == {
        *shard_costs.KINDS, "operations of a step", "step of one process", "step, hidden", "step, rows"
    }  # fmt: skip
    assert all(float(row["p50"]) > 0 for row in rows)
    assert set(rows[0]) == set(SCHEMAS["shard_costs"])


def test_speed_of_shards():
    rows = bench_shards.main(["--tiny"])
    found = {(row["case"], row["quantity"]): float(row["p50"]) for row in rows}
    assert found["capacity", "share, GB"] == pytest.approx(1_000 * (4 * 4 + 4 + 8) / 1e9, rel=0.02)
    assert found["capacity", "peak of three steps, GB"] > found["capacity", "before the head, GB"]
    assert found["hidden, 2 ranks", "rounds"] == 7
    assert found["rows, 2 ranks", "rounds"] == 12
    assert found["uniform, K 1,000", "ms a step"] > 0
