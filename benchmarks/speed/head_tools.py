"""What the benchmark of the head is made of: results as rows, timing, inputs, CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from augment_reduce.nn import AugmentReduceHead
from benchmarks.common import SCHEMAS, append

FIELDS = SCHEMAS["head"]


class Report:
    """Rows of results: printed as they come, kept for the table and the file."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.rows: list[dict[str, Any]] = []
        self.path = path
        self.device = device

    def add(self, section: str, name: str, **values: Any) -> None:
        row = {**dict.fromkeys(FIELDS, ""), "section": section, "name": name, **values}
        self.rows.append(row)
        shown = "  ".join(f"{key}={_short(value)}" for key, value in values.items() if value != "")
        print(f"  {section:8s} {name:38s} {shown}", flush=True)

    def write(self) -> None:
        if self.path is None:
            return
        append(self.path, self.rows, FIELDS, self.device)
        print(f"{len(self.rows)} rows appended to {self.path}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def times(function: Callable[[], object], repeats: int, per: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of one of the `per` steps that a call makes: median and spread over `repeats` calls."""
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            function()
            found.append((time.perf_counter() - began) * 1e3 / per)
    else:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in events:
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        found = [start.elapsed_time(end) / per for start, end in events]
    cuts = statistics.quantiles(found, n=10) if len(found) > 1 else found * 9
    return {"ms_p50": cuts[4], "ms_p20": cuts[1], "ms_p80": cuts[7]}


def zipf_labels(K: int, shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Labels with frequencies about 1 / rank, by inverting the continuous distribution."""
    u = torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=torch.float64)
    return (torch.tensor(float(K + 1), device=device, dtype=torch.float64) ** u - 1.0).long().clamp_(0, K - 1)


def inputs(K: int, D: int, B: int, n: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(D)
    hidden = [torch.randn(B, D, generator=generator, device=device).to(dtype).requires_grad_() for _ in range(n)]
    return list(zip(hidden, zipf_labels(K, (n, B), device, 1).unbind(), strict=True))


def all_steps(head: AugmentReduceHead, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """One step for each batch; the gradients by hidden."""
    found = []
    for hidden, target in batches:
        hidden.grad = None
        head(hidden, target).backward()
        found.append(hidden.grad)
    return found


def captured(function: Callable[[], object], warm_up: int = 2) -> torch.cuda.CUDAGraph:
    """`function` as a CUDA graph, after a few calls that compile what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


# What docs/head.md has timings of: neither labels of other rows nor a log-sum-exp.
AS_MEASURED = {"optimizer": "adagrad", "in_batch": False, "local": "amortised"}


def make_head(K: int, D: int, S: int, device: torch.device, **options: Any) -> AugmentReduceHead:
    return AugmentReduceHead(D, K, n_sampled_classes=S, device=device, **{**AS_MEASURED, **options})


@contextlib.contextmanager
def guarded(report: Report, section: str, name: str) -> Iterator[None]:
    """A failure costs one row, not the rest of the run."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.add(section, name, note=f"FAILED: {type(error).__name__}: {str(error)[:150]}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def table(rows: list[dict[str, Any]]) -> None:
    """Milliseconds a step: names down, (K, D) across."""
    kept = [row for row in rows if row["section"] in ("steps", "peers") and row["ms_p50"] != ""]
    shapes = sorted({(row["D"], row["K"]) for row in kept})
    print("\n" + f"{'ms, median':38s}" + "".join(f"  K={K:.0e} D={D}".rjust(16) for D, K in shapes))
    for name in dict.fromkeys(row["name"] for row in kept):
        found = {(row["D"], row["K"]): row["ms_p50"] for row in kept if row["name"] == name}
        print(f"{name:38s}" + "".join(f"{found[s]:16.3f}" if s in found else f"{'':16s}" for s in shapes))


def extra_memory(call: Callable[[], object]) -> float:
    """Gigabytes that a second call takes at its peak, beyond what was there."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9
