"""A cost model of a step of a head over ranks, for more ranks than are available.

    python -m benchmarks.studies.shard_costs --output benchmarks/results/shard_costs.csv

    T(exchange, R) = sum over its collectives of [ latency(R) + bytes(R) / bandwidth ]  +  operations(R)

`collectives` lists what a step of a softmax with a row optimiser sends (tests compare it with the counters of `Ranks`).
Measured with gloo on this machine: each collective at several sizes, steps of one process, and, to validate the model,
steps of two ranks. `GPUS` has published figures of GPUs with NVLink and InfiniBand instead. `table` and `published`
generate the tables of docs/distributed.md.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from augment_reduce.nn import AugmentReduceHead
from augment_reduce.sharding import Ranks
from benchmarks.common import ROOT, SCHEMAS, Row, kept, markdown

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
SHAPES = ((128, 128, 32), (512, 512, 128), (1024, 512, 128), (512, 2048, 128), (512, 512, 512))  # B, |S|, D
CHECKED = ((512, 512, 128), (1024, 512, 128))  # also on two ranks
TINY_SIZES, TINY_SHAPES = (64, 4 << 10), ((8, 16, 4),)
LIMIT = 900


# ---- the model ----


class Sent(NamedTuple):
    """A collective, and the bytes that a rank puts on the wire."""

    kind: str
    size: float


def collectives(exchange: str, R: int, B: int, S: int, D: int) -> list[Sent]:
    """Of one step of a softmax head with a row optimiser, float32, no labels joining; B rows a rank."""
    gathered, reduced = R - 1, (R - 1) / R
    if exchange == "hidden":
        return [
            Sent("all-gather", 16 * gathered),  # numbers of rows, errors
            Sent("all-gather", 8 * B * gathered),  # targets
            Sent("all-gather", 4 * B * D * gathered),  # hidden rows
            Sent("all-reduce", 2 * 4 * R * B * reduced),  # label scores
            Sent("all-reduce", 2 * 8 * R * B * reduced),  # sums over classes, for the next step
            Sent("all-gather", 4 * B * gathered),  # gradients by the loss
            Sent("reduce-scatter", 4 * R * B * D * reduced),  # gradients by hidden rows
        ]
    counts, labels, rows = 8 * (R - 1), 8 * B * reduced, 4 * B * (D + 1) * reduced
    return [
        Sent("all-gather", 16 * gathered),
        *(Sent("all-to-all", n) for n in (counts, labels, rows)),  # rows of labels
        Sent("all-gather", 4 * S / R * (D + 1) * gathered),  # sampled rows
        *(Sent("all-reduce", 2 * n * reduced) for n in (56, 8 * (2 * D + 6), 16)),  # sums over rows
        Sent("reduce-scatter", 4 * S * (D + 1) * reduced),  # gradients by sampled rows
        *(Sent("all-to-all", n) for n in (counts, labels, rows)),  # gradients by label rows
    ]


def work(exchange: str, R: int, B: int, S: int, D: int) -> tuple[float, float, float]:
    """What a rank computes: once, B |S| D scores, and numbers of the rows that it touches. Both exchanges score as
    many pairs: R B rows by |S| / R classes, or B rows by |S|."""
    rows = R * B + S / R if exchange == "hidden" else B + S
    return 1.0, float(B * S * D), rows * D


def gigabytes(K: int, R: int, D: int) -> float:
    """A rank's weights, biases and row-wise Adagrad state, and the tables of class counts."""
    return (K / R * (4 * D + 4 + 8) + 12 * K) / 1e9


class Machine(NamedTuple):
    """Microseconds: of a collective of R ranks that sends so many bytes, and of the three kinds of work."""

    collective: Callable[[str, int, float], float]
    operations: tuple[float, float, float]

    def step(self, exchange: str, R: int, B: int, S: int, D: int) -> float:
        sent = sum(self.collective(kind, R, size) for kind, size in collectives(exchange, R, B, S, D))
        return sent + sum(a * b for a, b in zip(self.operations, work(exchange, R, B, S, D), strict=True))


def steps_of(kind: str, R: int) -> int:
    """Messages that follow one another around a ring."""
    return 2 * (R - 1) if kind == "all-reduce" else R - 1


def gloo(rows: list[Row]) -> Machine:
    """Latency of a message and bandwidth of each collective, by least squares of relative errors on two ranks."""
    found = {}
    for kind in KINDS:
        measured = [row for row in rows if row["what"] == kind and int(row["ranks"]) == 2]
        t = np.array([float(row["p50"]) for row in measured])
        A = np.array([[steps_of(kind, 2), float(row["bytes"])] for row in measured])
        found[kind], _ = nnls(A / t[:, None], np.ones(len(t)))
    alone = [row for row in rows if row["what"] == "step of one process"]
    t = np.array([float(row["p50"]) for row in alone])
    A = np.array([work("rows", 1, *(int(row[name]) for name in ("B", "S", "D"))) for row in alone])
    operations, _ = nnls(A / t[:, None], np.ones(len(t)))

    def collective(kind: str, R: int, size: float) -> float:
        latency, per_byte = found[kind]
        return float(latency * steps_of(kind, R) + per_byte * size)

    return Machine(collective, tuple(operations))


# ---- GPUs, by published figures ----

# Microseconds of latency by NCCL's own model of itself (src/graph/tuning.cc, baseLat and hwLat of rings and trees):
# once, each hop by NVLink, each hop by network. "LL" carries a quarter of the bandwidth, "Simple" all of it.
NCCL = {
    ("ring", "LL"): (6.6, 0.6, 2.7), ("ring", "Simple"): (8.4, 3.4, 14.0),
    ("tree", "LL"): (6.8, 0.6, 5.0), ("tree", "Simple"): (8.4, 4.0, 14.0),
}  # fmt: skip
LAUNCH = 5.0  # microseconds that the host needs for an operation: assumed
REACHED = 0.5  # of peak arithmetic and bandwidth: assumed
PASSES = 10  # times that a number of a row is read or written in a step: assumed


class Gpu(NamedTuple):
    """Bytes and operations a second of one GPU; eight in a node."""

    nvlink: float  # in each direction
    network: float
    memory: float
    arithmetic: float  # float32


H100 = Gpu(450e9, 50e9, 3.35e12, 67e12)  # NVIDIA's data sheets of H100 SXM; DGX H100: 400 Gb/s of InfiniBand a GPU
V100 = Gpu(150e9, 12.5e9, 0.9e12, 15.7e12)  # of V100 SXM2; DGX-1: four ports of 100 Gb/s for eight GPUs


def gpus(gpu: Gpu, n_operations: float) -> Machine:
    def collective(kind: str, R: int, size: float) -> float:
        nodes = max(1, R // 8)
        bandwidth = REACHED * (gpu.nvlink if nodes == 1 else gpu.network)
        times = []
        for (shape, protocol), (once, near, far) in NCCL.items():
            if shape == "tree" and kind != "all-reduce":
                continue
            if shape == "tree":
                latency = once + 2 * ((R / nodes - 1) * near + math.log2(nodes) * far)
            else:
                hops = 2 if kind == "all-reduce" else 1
                latency = once + hops * ((R - nodes) * near + (nodes - 1) * far)
            times.append(latency + 1e6 * size / (bandwidth * (0.25 if protocol == "LL" else 1.0)))
        return min(times)

    pairs, numbers = 6 / (REACHED * gpu.arithmetic), 4 * PASSES / (REACHED * gpu.memory)
    return Machine(collective, (LAUNCH * n_operations, 1e6 * pairs, 1e6 * numbers))


# ---- tables ----

SHAPE = (512, 4096, 256)  # B rows a rank, |S|, D
PARTIAL_FC = (  # K, rows a rank, network, samples a second with fp16 and a tenth of the classes, on eight V100
    (2_000_000, 128, "R100", 3247), (4_000_000, 128, "R50", 4385), (8_000_000, 64, "R50", 3001),
)  # fmt: skip


def n_operations(rows: list[Row]) -> float:
    return float(next(row["p50"] for row in reversed(rows) if row["what"] == "operations of a step"))


def table(rows: list[Row]) -> str:
    """Milliseconds a step by R, which do not depend on K; the memory of a rank does."""
    machines = (gloo(rows), gpus(H100, n_operations(rows)))
    lines = []
    for R in (8, 64, 256, 1024):
        sizes = (f"{gigabytes(K, R, SHAPE[2]):.3g}" for K in (10**6, 10**7, 10**8, 10**9))
        times = (short(m.step(x, R, *SHAPE) / 1e3) for m in machines for x in ("hidden", "rows"))
        lines.append(((f"{R:,}", *sizes, *times), rows))
    head = ("gloo, hidden", "gloo, rows", "H100, hidden", "H100, rows")
    return markdown(("ranks", *(f"GB, K {K}" for K in ("1e6", "1e7", "1e8", "1e9")), *head), lines)


def short(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def published(rows: list[Row]) -> str:
    """Published steps of Partial FC, the whole network, beside the head's step on the same GPUs by this model."""
    machine, lines = gpus(V100, n_operations(rows)), []
    for K, B, network, rate in PARTIAL_FC:
        ours = (machine.step(exchange, 8, B, 4096, 512) / 1e3 for exchange in ("hidden", "rows"))
        cells = (f"{K:,}", network, str(B), f"{8 * B / rate * 1e3:.0f}", *(f"{t:.3g}" for t in ours))
        lines.append((cells, rows))
    return markdown(
        ("K", "network", "rows a GPU", "Partial FC, all of it, ms", "the head, hidden, ms", "rows, ms"), lines
    )


def checked(rows: list[Row]) -> str:
    """Measured against what the formula says: steps of two ranks, collectives of four."""
    machine, lines = gloo(rows), []
    for row in rows:
        if row["what"].startswith("step, "):
            shape = [int(row[name]) for name in ("B", "S", "D")]
            said = machine.step(row["what"].removeprefix("step, "), 2, *shape)
            case = f"{row['what']}: B {shape[0]}, |S| {shape[1]}, D {shape[2]}".replace("|", r"\|")
        elif row["what"] in KINDS and int(row["ranks"]) == 4 and int(row["bytes"]) >= 1 << 20:
            said = machine.collective(row["what"], 4, float(row["bytes"]))
            case = f"{row['what']}, {float(row['bytes']) / 1e6:.3g} MB"
        else:
            continue
        cells = (case, str(row["ranks"]), f"{float(row['p50']) / 1e3:.3g}", f"{said / 1e3:.3g}")
        lines.append((cells, [row]))
    return markdown(("", "ranks", "measured, ms", "formula, ms"), lines)


# ---- measurements ----


def timed(action: Callable[[], Any], runs: int) -> list[float]:
    """Microseconds, of a rank, from all being ready; the first is to warm up."""
    times = []
    for _ in range(runs + 1):
        dist.barrier()
        start = time.perf_counter()
        action()
        times.append(1e6 * (time.perf_counter() - start))
    return times[1:]


def measured_collectives(runs: int, sizes: Iterable[int]) -> Iterator[Row]:
    ranks = Ranks.of(dist.group.WORLD)
    R = ranks.size
    for kind in KINDS:
        for size in sizes:
            x = torch.zeros(size // 4 // R * R)
            even = [len(x) // R] * R
            action = {
                "all-reduce": lambda x=x: ranks.sum_(x), "all-gather": lambda x=x: ranks.gather(x),
                "reduce-scatter": lambda x=x, even=even: ranks.scatter_sum(x[:, None], even),
                "all-to-all": lambda x=x, even=even: ranks.swap(x, even, even),
            }[kind]  # fmt: skip
            before = ranks.bytes_sent
            action()
            yield result(kind, ranks=R, bytes=ranks.bytes_sent - before, values=timed(action, runs))


def measured_steps(runs: int, shapes: Iterable[tuple[int, int, int]], checked: Iterable[Any]) -> Iterator[Row]:
    """Steps that each rank takes alone, at the same time as the others, and steps that they take together, in turns."""
    cases = [("step of one process", *shape, head_of(*shape[1:], None)) for shape in shapes]
    for exchange in ("hidden", "rows"):
        cases += [(f"step, {exchange}", *shape, head_of(*shape[1:], exchange)) for shape in checked]
    times: list[list[float]] = [[] for _ in cases]
    with mock.patch("augment_reduce.nn.head.check_may_move"):  # it is not a copy of what the other rank has
        for _ in range(runs):
            for (*_, B, _S, _D, head), found in zip(cases, times, strict=True):
                found += timed(lambda h=head, B=B: take_step(h, B), 1)
    for (what, B, S, D, head), found in zip(cases, times, strict=True):
        head.settle()
        yield result(what, ranks=1 if head.shards is None else head.shards.ranks.size, B=B, S=S, D=D, values=found)


def head_of(S: int, D: int, exchange: str | None) -> AugmentReduceHead:
    more = {} if exchange is None else {"process_group": dist.group.WORLD, "exchange": exchange}
    generator = torch.Generator().manual_seed(0)
    return AugmentReduceHead(D, 100_000, n_sampled_classes=S, optimizer="adagrad", generator=generator, **more)


def take_step(head: AugmentReduceHead, B: int) -> None:
    hidden = torch.randn(B, head.in_features).requires_grad_()
    head(hidden, torch.randint(head.n_classes, (B,))).backward()


def counted_operations() -> Row:
    """Operations of a step that compute something: on a GPU each is at least one kernel."""
    head = head_of(64, 16, None)
    take_step(head, 8)
    with torch.profiler.profile() as profile:
        take_step(head, 8)
    views = ("view", "reshape", "as_strided", "slice", "select", "expand", "transpose", "aten::t", "detach", "empty")
    leaves = [e for e in profile.events() if e.name.startswith("aten::") and not e.cpu_children]
    n = sum(not any(word in e.name for word in views) for e in leaves)
    return result("operations of a step", ranks=1, values=[float(n)])


def result(what: str, *, values: list[float], **facts: Any) -> Row:
    p20, p50, p80 = (f"{x:.5g}" for x in np.percentile(values, [20, 50, 80]))
    blank = dict.fromkeys(("ranks", "B", "S", "D", "bytes"), "")
    return {"what": what} | blank | facts | {"p50": p50, "p20": p20, "p80": p80, "runs": len(values)}


def on_ranks(n_ranks: int, runs: int, tiny: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        command += ["-m", "benchmarks.studies.shard_costs", "--child", folder, "--runs", str(runs)]
        subprocess.run(command + ["--tiny"] * tiny, check=True, cwd=ROOT, timeout=LIMIT)
        return json.loads((Path(folder) / "0.json").read_text())


def child(folder: str, runs: int, tiny: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = list(measured_collectives(runs, TINY_SIZES if tiny else SIZES))
    if dist.get_world_size() == 2:
        found += measured_steps(runs, *((TINY_SHAPES, TINY_SHAPES) if tiny else (SHAPES, CHECKED)))
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(runs: int, tiny: bool) -> Iterator[Row]:
    yield counted_operations()
    for n_ranks in (2,) if tiny else (2, 4):
        yield from on_ranks(n_ranks, runs, tiny)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--output", type=Path, help="append to this result file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.runs, options.tiny)
        return []
    return kept(measured(options.runs, options.tiny), SCHEMAS["shard_costs"], options.output)


if __name__ == "__main__":
    main()
