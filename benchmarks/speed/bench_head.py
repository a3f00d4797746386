"""The torch head on one GPU: checked against plain torch, then timed beside what one would use instead.

    python -m benchmarks.speed.bench_head                    # everything, a few minutes; appends to results/head.csv
    python -m benchmarks.speed.bench_head --only parity steps kernels
    python -m benchmarks.speed.bench_head --only tune        # other tiles for the matrix products
    python -m benchmarks.speed.bench_head --tiny             # small shapes on the CPU, plain torch: does it run?

A step is the whole training step of the head: draw, scores, local step, gradient to `hidden`, optimiser step on the
touched rows. B = 4,096 rows, |S| = 4,096 classes shared by them, hidden in bfloat16, weights and Adagrad state in
float32. Several steps with different inputs are captured in one CUDA graph; times are medians over replays, per step.

    section    what it does
    ceilings   device-to-device copy, bfloat16 matrix product: what the chip gives here
    parity     every model, local step, sampler and optimiser: kernels against plain torch in float32
    graph      the captured step against the eager one, bit by bit
    steps      milliseconds a step by K and D, memory beyond weights and state
    kernels    where a step's time goes, and each product's share of its floor
    peers      exact losses (forward and backward only) and sampled softmax in torch operations
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from augment_reduce.nn import AugmentReduceHead, _step
from augment_reduce.nn import head as head_module
from benchmarks.common import RESULTS, machine, versions
from benchmarks.peers.output_layers import peers
from benchmarks.speed.head_tools import (
    Report,
    all_steps,
    captured,
    extra_memory,
    guarded,
    inputs,
    make_head,
    table,
    times,
)

SECTIONS = ("ceilings", "parity", "graph", "steps", "kernels", "peers", "tune")
DEFAULT = SECTIONS[:-1]
STEPS_IN_GRAPH = 8  # different rows and labels each, so that the cache does not hold them
SHAPES_K, SHAPES_D = (10**4, 10**5, 10**6, 10**7), (128, 512)


def ceilings(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    if device.type != "cuda":
        return
    x = torch.randint(256, (2**31,), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    found = times(lambda: y.copy_(x), 20, 1, device)
    report.add("ceilings", "copy", **found, note=f"{2 * x.numel() / found['ms_p50'] / 1e9:.2f} TB/s")
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    found = times(lambda: a @ b, 20, 1, device)
    report.add("ceilings", "bfloat16 product", **found, note=f"{2 * 8192**3 / found['ms_p50'] / 1e9:.0f} TFLOP/s")


PARITY: list[dict[str, Any]] = [
    {"local": "amortised", "class_sampling": "uniform-shared"},
    {"local": "fresh", "class_sampling": "stratified-shared", "optimizer": "rowwise-adagrad"},
    {"local": "persistent", "class_sampling": "frequency-shared", "optimizer": "adam"},
    {"model": "probit", "local": "amortised", "class_sampling": "frequency-shared"},
    {"model": "logistic", "local": "fresh", "class_sampling": "stratified-shared", "optimizer": "adam"},
    {"model": "probit", "local": "persistent", "class_sampling": "uniform-shared"},
    {"model": "logistic", "local": "amortised", "n_nodes": 3, "reduction": "sum"},
    {"local": "fresh", "reduction": "none", "bias": False},
    {"local": "fresh", "optimizer": None},
]


@contextlib.contextmanager
def backend(module: Any) -> Iterator[None]:
    kept = head_module.backend_for
    head_module.backend_for = lambda *_: module  # type: ignore[assignment]
    try:
        yield
    finally:
        head_module.backend_for = kept


def outcome(
    module: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, n: int, **options: Any
) -> dict:
    """Everything that n steps leave behind."""
    B, S, K, D = shape
    model = options.pop("model", "softmax")
    head = AugmentReduceHead(
        D, K, model, n_sampled_classes=S, class_counts=1.0 / torch.arange(1, K + 1), n_rows=2 * B, device=device,
        generator=torch.Generator().manual_seed(3), **{"optimizer": "adagrad", **options},
    )  # fmt: skip
    found = {}
    for t, (hidden, target) in enumerate(inputs(K, D, B, n, dtype, device)):
        target[5] = -100
        with backend(module):
            loss = head(hidden, target, index=torch.arange(B, device=device) + t)
            loss.backward(torch.linspace(0.5, 1.5, B, device=device) if loss.ndim else None)
        assert hidden.grad is not None
        found[f"loss {t}"], found[f"hidden {t}"] = loss.detach().double(), hidden.grad.double()
    found.update({name: x.double() for name, x in head.state_dict().items()})
    found.update(
        {f"grad {i}": p.grad.to_dense().double() for i, p in enumerate(head.parameters()) if p.grad is not None}
    )
    return found


def parity(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    if device.type != "cuda":
        return
    odd, even = (300, 257, 5_003, 97), (512, 512, 4_096, 128)
    cases = [(odd, options, torch.float32, "highest", 5e-5) for options in PARITY]
    cases += [(even, options, torch.bfloat16, "highest", 2e-2) for options in PARITY]
    cases += [(even, PARITY[0], torch.float32, "high", 3e-3)]
    for case in cases:
        with guarded(report, "parity", " ".join(str(part) for part in case[1:3])):
            one_parity(report, device, *case)


def one_parity(
    report: Report,
    device: torch.device,
    shape: tuple[int, int, int, int],
    options: dict[str, Any],
    dtype: torch.dtype,
    precision: str,
    limit: float,
) -> None:
    from augment_reduce.nn.triton import step as triton_step

    kept = torch.get_float32_matmul_precision()
    n = 2 if limit < 1e-3 else 1  # Adagrad's first step looks at signs: in low precision the second starts elsewhere
    try:
        torch.set_float32_matmul_precision(precision)
        ours = outcome(triton_step, shape, dtype, device, n, **options)
        torch.set_float32_matmul_precision("highest")
        theirs = outcome(_step, shape, dtype, device, n, **options)
    finally:
        torch.set_float32_matmul_precision(kept)
    names = [name for name in ours if n == 2 or "weight" not in name]
    least = {"local.label_mean": 1.0}  # a mean of scores of both signs, of size 1 each
    errors = {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(least.get(name, 1e-6)))
        for name in names
    }
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    verdict = "ok" if errors[worst] < limit else "FAILED"
    kind = {"highest": "float32", "high": "tf32"}[precision] if dtype == torch.float32 else "bfloat16"
    name = "-".join(str(v) for v in options.values()) + " " + kind
    note = f"{verdict}: worst {worst} {errors[worst]:.1e} (limit {limit:.0e})"
    report.add("parity", name, K=shape[2], D=shape[3], B=shape[0], S=shape[1], note=note)


def graph(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    if device.type != "cuda":
        return
    B, S, K, D = 1024, 1024, 100_000, 128
    for options in ({"local": "amortised"}, {"local": "fresh", "optimizer": "adam"}, {"model": "logistic"}):
        batches = inputs(K, D, B, STEPS_IN_GRAPH, torch.bfloat16, device)
        head = make_head(K, D, S, device, **options)
        held: list[list[Tensor]] = []
        replay = captured(lambda head=head, batches=batches, held=held: held.append(all_steps(head, batches)))
        start = copy.deepcopy(head.state_dict())
        for _ in range(2):
            replay.replay()
        torch.cuda.synchronize()
        by_graph, grads = copy.deepcopy(head.state_dict()), [g.clone() for g in held[-1]]
        head.load_state_dict(start)
        all_steps(head, batches)
        eager = all_steps(head, batches)
        off = max(float((a.double() - b.double()).abs().max()) for a, b in zip(grads, eager, strict=True))
        moved = max(
            float((by_graph[name].double() - x.double()).abs().max())
            for name, x in head.state_dict().items()
            if x.numel()
        )
        verdict = "ok" if off == 0.0 and moved == 0.0 else "DIFFERS"
        note = f"{verdict}: gradients {off:.1e}, state {moved:.1e}"
        report.add("graph", "captured against eager " + "-".join(options.values()), K=K, D=D, B=B, S=S, note=note)


def steps(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    for D in sizes.D:
        for K in sizes.K:
            variants: dict[str, dict[str, Any]] = {"softmax": {}}
            if sizes.K[-2:][0] == K:  # the second largest: K = 1e6
                counts = 1.0 / torch.arange(1, K + 1, dtype=torch.float64)
                variants |= {
                    "softmax, stratified classes": {"class_counts": counts},
                    "softmax, fresh": {"local": "fresh"},
                    "logistic": {"model": "logistic"},
                    "probit": {"model": "probit"},
                    "softmax, row-wise Adagrad": {"optimizer": "rowwise-adagrad"},
                    "softmax, Adam": {"optimizer": "adam"},
                    "softmax, bfloat16 weights": {"dtype": torch.bfloat16},
                    "softmax, float32 hidden, tf32": {"precision": "high"},
                    "softmax, float32 hidden": {"precision": "highest"},
                }
            for name, options in variants.items():
                with guarded(report, "steps", f"{name} K={K} D={D}"):
                    one_shape(report, device, sizes, name, K, D, **options)


def one_shape(
    report: Report, device: torch.device, sizes: argparse.Namespace, name: str, K: int, D: int,
    precision: str | None = None, **options: Any,
) -> None:  # fmt: skip
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or kept)
    try:
        head = make_head(K, D, min(sizes.S, K), device, **options)
        dtype = torch.bfloat16 if device.type == "cuda" and precision is None else torch.float32
        batches = inputs(K, D, sizes.B, STEPS_IN_GRAPH, dtype, device)
        shape = {"K": K, "D": D, "B": sizes.B, "S": min(sizes.S, K)}
        if device.type != "cuda":
            report.add("steps", name, **shape, **times(lambda: all_steps(head, batches[:2]), 3, 2, device))
            return
        extra = extra_memory(lambda: all_steps(head, batches[:1])) + head.sampler.cumulative.numel() * 8e-9
        eager = times(lambda: all_steps(head, batches), 5, STEPS_IN_GRAPH, device)["ms_p50"]
        found = times(captured(lambda: all_steps(head, batches)).replay, sizes.repeats, STEPS_IN_GRAPH, device)
        note = f"without a graph {eager:.2f} ms; floored {head.floored_share:.4f}"
        report.add("steps", name, **shape, **found, gb=extra, note=note)
    finally:
        torch.set_float32_matmul_precision(kept)


def profiled(
    K: int, D: int, sizes: argparse.Namespace, device: torch.device, options: dict[str, Any]
) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds a step, launches a step), longest first."""
    from torch.profiler import ProfilerActivity, profile

    head = make_head(K, D, min(sizes.S, K), device, **options)
    batches = inputs(K, D, sizes.B, STEPS_IN_GRAPH, torch.bfloat16, device)
    all_steps(head, batches)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            all_steps(head, batches)
        torch.cuda.synchronize()
    n = 3 * STEPS_IN_GRAPH
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    return [(e.key, e.device_time_total / 1e3 / n, round(e.count / n)) for e in events if e.device_time_total / n > 0.2]


def kernels(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    if device.type != "cuda":
        return
    K = sizes.K[-2:][0]
    for D in sizes.D:
        for options in ({"local": "amortised"}, {"local": "fresh"}, {"model": "probit"}, {"model": "logistic"}):
            product = 2.0 * sizes.B * min(sizes.S, K) * D / 790e9  # milliseconds at 790 TFLOP/s
            for key, ms, launches in profiled(K, D, sizes, device, options):
                note = f"{launches} a step"
                if key in ("scores", "grad_hidden", "grad_rows"):
                    twice = key == "scores" and options.get("local") == "fresh"
                    note += f", {product * (1.5 if twice else 1.0) / ms:.0%} of the tensor cores' floor"
                label = f"{key[:30]} ({'-'.join(options.values())})"
                report.add("kernels", label, K=K, D=D, B=sizes.B, S=min(sizes.S, K), ms_p50=ms, note=note)


CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "scores": [
        (128, 128, 64, 4, 3), (128, 128, 64, 4, 2), (128, 128, 32, 4, 4), (64, 128, 64, 4, 2), (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
    ],
    "noise": [
        (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 32, 64, 4, 3), (64, 64, 64, 4, 2), (32, 64, 64, 4, 3),
        (64, 128, 64, 4, 2),
    ],
    "grad_hidden": [
        (128, 128, 64, 8, 3, 4), (128, 128, 64, 8, 4, 1), (128, 128, 64, 8, 4, 4), (128, 256, 64, 8, 3, 1),
        (128, 256, 64, 8, 3, 2), (64, 128, 64, 4, 4, 2),
    ],
    "grad_rows": [
        (128, 128, 64, 4, 4, 4), (128, 128, 64, 4, 4, 1), (64, 128, 64, 4, 4, 2), (128, 128, 64, 4, 3, 4),
        (128, 256, 64, 8, 3, 2), (128, 256, 64, 8, 3, 1),
    ],
    "update": [(128, 2, 2), (128, 1, 2), (128, 1, 1), (256, 1, 2), (512, 1, 4), (512, 2, 4)],
}  # fmt: skip


def tune(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    """Each kernel's time with other tiles: one candidate of every kernel at a time, all in one profile."""
    if device.type != "cuda":
        return
    from augment_reduce.nn.triton import step as triton_step

    kept = dict(triton_step.TILES), (triton_step.UPDATE_BLOCK, triton_step.UPDATE_FEW, triton_step.UPDATE_WARPS)
    K = sizes.K[-2:][0]
    for D in sizes.D:
        for choice in zip(*CANDIDATES.values(), strict=True):
            chosen = dict(zip(CANDIDATES, choice, strict=True))
            update = triton_step.UPDATE_BLOCK, triton_step.UPDATE_FEW, triton_step.UPDATE_WARPS = chosen.pop("update")
            triton_step.TILES.update({(kernel, D > 256): triton_step.Tile(*shape) for kernel, shape in chosen.items()})
            shapes = {**chosen, "update": (*update, "splits", *chosen["grad_rows"][5:])}
            for model in ("softmax", "probit"):
                with guarded(report, "tune", f"{model} {choice}"):
                    for name, ms, _ in profiled(K, D, sizes, device, {"model": model, "local": "amortised"}):
                        if model == "softmax" or name == "scores":
                            shape = shapes["noise" if model == "probit" else name] if name in shapes else ""
                            report.add("tune", f"{name} {shape} {model}", K=K, D=D, ms_p50=ms)
    triton_step.TILES.update(kept[0])
    triton_step.UPDATE_BLOCK, triton_step.UPDATE_FEW, triton_step.UPDATE_WARPS = kept[1]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(DEFAULT))
    parser.add_argument("--out", default=str(RESULTS / "head.csv"), help="csv to append to; '' for none")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--peers", nargs="*", default=[], help="only these exact losses, by name")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--classes", nargs="+", type=int, default=list(SHAPES_K), help="K, ascending")
    parser.add_argument("--features", nargs="+", type=int, default=list(SHAPES_D), help="D")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    sizes = argparse.Namespace(K=tuple(args.classes), D=tuple(args.features), B=4096, S=4096, repeats=args.repeats)
    if device.type == "cpu":
        sizes = argparse.Namespace(K=(300, 1_000, 3_000), D=(16,), B=32, S=32, repeats=3)
    sizes.peers = args.peers
    report = Report(Path(args.out) if args.out else None, device)
    print(f"{machine(device)}, {versions()}", flush=True)
    run = {"ceilings": ceilings, "parity": parity, "graph": graph, "steps": steps, "kernels": kernels, "peers": peers}
    run["tune"] = tune
    began = time.perf_counter()
    for section in args.only:
        with guarded(report, section, "whole section"):
            run[section](report, device, sizes)
        print(f"-- {section}: {time.perf_counter() - began:.0f} s so far", flush=True)
    report.write()
    failed = [row for row in report.rows if "FAILED" in str(row["note"]) or "DIFFERS" in str(row["note"])]
    print(f"{len(failed)} failures" + "".join(f"\n  {row['section']} {row['name']}: {row['note']}" for row in failed))
    table(report.rows)
    return report.rows


if __name__ == "__main__":
    sys.exit(1 if any("FAILED" in str(row["note"]) for row in main()) else 0)
