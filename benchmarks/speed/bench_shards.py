"""A sharded head: peak memory, time of a step by K, and bytes sent by a step, with gloo.

    python -m benchmarks.speed.bench_shards --save                  # --only capacity | steps | bytes
    python -m benchmarks.speed.bench_shards --tiny                  # does it run?

    capacity    K 2e7, D 16, "rowwise-adagrad", two ranks, three steps: peak resident memory of a rank (VmHWM), and
                its share: the bytes of its own weights, biases and optimiser state. Target: .75 share + 1 GB
    steps       K 1e5, 1e6, 1e7 at D 32 on two ranks, interleaved in one run. Target: 1.2 times K 1e5
    bytes       of both exchanges, by ring collectives, on two and four ranks; D 128, |S| 512, 512 rows a rank

Ranks are started by torchrun. The state of a step at K 1e7 does not fit the caches, that at K 1e5 does: labels and
sampled classes are drawn either uniformly, the worst case, or from 1 / k, as frequencies of words and labels are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from augment_reduce.nn import AugmentReduceHead, save_sharded
from benchmarks.common import ROOT, Row, markdown, report, row

LIMIT = 1800  # seconds, of one set of ranks
ASKED_SHARE, ASKED_BYTES = 0.75, 1e9


def on_ranks(n_ranks: int, sections: list[str], tiny: bool) -> list[dict[str, Any]]:
    """What `SECTIONS[name](tiny)` returned, by name, on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        command += ["-m", "benchmarks.speed.bench_shards", "--child", folder, "--only", *sections, *["--tiny"] * tiny]
        subprocess.run(command, check=True, cwd=ROOT, timeout=LIMIT)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(n_ranks)]


def minibatch(K: int, D: int, B: int, by_frequency: bool, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    u = torch.rand(B, generator=generator, dtype=torch.float64)
    target = (K**u - 1.0).long() if by_frequency else (K * u).long()
    return torch.randn(B, D, generator=generator).requires_grad_(), target.clamp_max_(K - 1)


def take_step(head: AugmentReduceHead, B: int, step: int) -> float:
    """Seconds of one step, from all ranks being ready to all having moved their rows."""
    hidden, target = minibatch(head.n_classes, head.in_features, B, head.sampler.knows_shares, step)
    dist.barrier()
    start = time.perf_counter()
    head(hidden, target).backward()
    dist.barrier()
    return time.perf_counter() - start


# ---- capacity ----


def memory(name: str) -> float:
    """GB, of this process: VmHWM is the peak of what was resident, VmRSS what is."""
    with open("/proc/self/status") as lines:
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e9


def capacity(tiny: bool) -> dict[str, float]:
    K, D, B, S = (2_000, 4, 8, 16) if tiny else (20_000_000, 16, 512, 1024)
    begin = memory("VmRSS")
    head = AugmentReduceHead(
        D, K, n_sampled_classes=S, optimizer="rowwise-adagrad", process_group=dist.group.WORLD,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert head.optimizer is not None
    share = sum(x.nbytes for x in (head.weight, head.bias, *head.optimizer.buffers())) / 1e9
    constructed = memory("VmHWM")
    for step in range(3):
        take_step(head, B, step)
    head.settle()
    stepped = memory("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        save_sharded(head, names[0], 3)
        dist.barrier()
    return {
        "before the head": begin, "share": share, "peak of constructing": constructed, "peak of three steps": stepped,
        "asked for": ASKED_SHARE * share + ASKED_BYTES / 1e9, "peak of saving": memory("VmHWM"),
    }  # fmt: skip


# ---- time ----


def steps(tiny: bool) -> dict[str, dict[str, list[float]]]:
    sizes, D, B, S, n_steps = ((100, 1_000), 4, 8, 16, 3) if tiny else ((10**5, 10**6, 10**7), 32, 512, 1024, 60)
    found = {}
    for by_frequency in (False, True):
        heads = {K: timed_head(K, D, S, by_frequency) for K in sizes}
        times: dict[int, list[float]] = {K: [] for K in sizes}
        for step in range(n_steps):
            for K, head in heads.items():
                times[K].append(take_step(head, B, step))
        for head in heads.values():
            head.settle()
        of = "by frequency" if by_frequency else "uniform"
        for K in sizes:
            kept = slice(min(5, n_steps - 1), None)  # the first steps touch memory for the first time
            ratio = [a / b for a, b in zip(times[K][kept], times[sizes[0]][kept], strict=True)]
            found[f"{of}, K {K:,}"] = {"ms a step": [1e3 * t for t in times[K][kept]], f"of K {sizes[0]:,}": ratio}
    return found


def timed_head(K: int, D: int, S: int, by_frequency: bool) -> AugmentReduceHead:
    counts = 1.0 / torch.arange(1, K + 1, dtype=torch.float64) if by_frequency else None
    return AugmentReduceHead(
        D, K, n_sampled_classes=S, class_counts=counts, optimizer="adagrad", process_group=dist.group.WORLD,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


# ---- bytes ----


def sent(tiny: bool) -> dict[str, dict[str, float]]:
    """Of the second step of each exchange."""
    K, D, B, S = (100, 4, 8, 16) if tiny else (20_000, 128, 512, 512)
    found = {}
    for exchange in ("hidden", "rows"):
        head = AugmentReduceHead(
            D, K, n_sampled_classes=S, optimizer="adagrad", process_group=dist.group.WORLD, exchange=exchange,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert head.shards is not None
        take_step(head, B, 0)
        ranks = head.shards.ranks
        before = ranks.bytes_sent, ranks.rounds
        take_step(head, B, 1)
        head.settle()
        R = ranks.size
        rows = 2 * (R - 1) * B * D if exchange == "hidden" else 2 * (B + S) * D * (R - 1) / R
        found[exchange] = {
            "MB": (ranks.bytes_sent - before[0]) / 1e6, "rounds": ranks.rounds - before[1], "MB of rows": 4 * rows / 1e6
        }  # fmt: skip
    return found


SECTIONS = {"capacity": capacity, "steps": steps, "bytes": sent}


def child(sections: list[str], folder: str, tiny: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: SECTIONS[name](tiny) for name in sections}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rows_of(section: str, ranks: list[Any]) -> list[Row]:
    """From what the ranks returned."""
    if section == "capacity":
        return [row("shards", "capacity", f"{name}, GB", [one[name] for one in ranks]) for name in ranks[0]]
    if section == "steps":
        return [row("shards", case, name, x) for case, times in ranks[0].items() for name, x in times.items()]
    return [
        row("shards", f"{exchange}, {len(ranks)} ranks", name, [x])
        for exchange, sizes in ranks[0].items()
        for name, x in sizes.items()
    ]


# ---- tables ----

Cases = dict[str, dict[str, Row]]  # case -> quantity -> its row


def table_of_steps(cases: Cases) -> str:
    lines = []
    for case, rows in cases.items():
        if "ms a step" in rows:
            ratio = next(row for name, row in rows.items() if name.startswith("of K"))
            time = rows["ms a step"]
            spread = f"{float(time['p50']):.1f} ({float(time['p20']):.1f} to {float(time['p80']):.1f})"
            lines.append(((case, spread, f"{float(ratio['p50']):.2f}"), rows.values()))
    return markdown(("classes", "ms a step: median (20 % to 80 %)", "median ratio to K 100,000"), lines)


def table_of_capacity(cases: Cases) -> str:
    rows = cases["capacity"]
    lines = [((name.removesuffix(", GB"), f"{float(row['p50']):.2f}"), [row]) for name, row in rows.items()]
    return markdown(("", "GB a rank"), lines)


def table_of_bytes(cases: Cases) -> str:
    names = ("MB", "MB of rows", "rounds")
    cases = {case: rows for case, rows in cases.items() if "rounds" in rows}
    lines = [((case, *(f"{float(rows[n]['p50']):.3g}" for n in names)), rows.values()) for case, rows in cases.items()]
    return markdown(("exchange", "MB a rank and step", "of them rows", "rounds"), lines)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--save", action="store_true", help="append to results/speed.csv")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.only, options.child, options.tiny)
        return []
    plans = [(2, options.only)] if options.tiny else [(2, [section]) for section in options.only]
    if "bytes" in options.only and not options.tiny:
        plans.append((4, ["bytes"]))
    found = []
    for n_ranks, sections in plans:
        ranks = on_ranks(n_ranks, sections, options.tiny)
        found += [one for section in sections for one in rows_of(section, [told[section] for told in ranks])]
    report(found, save=options.save)
    return found


if __name__ == "__main__":
    main()
