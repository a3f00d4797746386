"""What the benchmarks share: who measured (machine, versions), medians with spread, and the committed results.csv."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np

import augment_reduce

RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = ("date", "benchmark", "case", "quantity", "p50", "p20", "p80", "runs", "machine", "versions")


def machine() -> str:
    """Processor and number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def versions() -> str:
    packages = ("torch", "numba", "numpy", "scikit-learn")
    ours = f"augment-reduce {augment_reduce.__version__}"  # runs from a source tree too
    return " ".join([f"python {platform.python_version()}", ours, *(f"{name} {version(name)}" for name in packages)])


def row(benchmark: str, case: str, quantity: str, values: list[float]) -> dict[str, object]:
    """One line of the results: median, 20th and 80th percentile of repeated measurements."""
    p20, p50, p80 = np.percentile(values, [20, 50, 80])
    return {
        "date": datetime.date.today().isoformat(), "benchmark": benchmark, "case": case, "quantity": quantity,
        "p50": f"{p50:.6g}", "p20": f"{p20:.6g}", "p80": f"{p80:.6g}", "runs": len(values),
        "machine": machine(), "versions": versions(),
    }  # fmt: skip


def append(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    """Add rows to a csv file, with its head if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def kept(rows: Iterable[dict], columns: tuple[str, ...], output: Path | None) -> list[dict]:
    """The rows, each printed, and added to a csv file if there is one, as soon as it is made."""
    found = []
    for each in rows:
        found.append(each)
        print(", ".join(str(value) for value in each.values()), flush=True)
        if output:
            append(output, columns, [each])
    return found


def report(rows: list[dict[str, object]], *, save: bool) -> None:
    """Print the rows as csv; with `save` append them to results.csv too."""
    writer = csv.DictWriter(sys.stdout, COLUMNS[1:8], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    if save:
        append(RESULTS, COLUMNS, rows)
