"""What the benchmarks share: result files and their schema, the machine and the versions, medians with their spread.

A result file is a csv file in `benchmarks/results/`. Its columns are

    date       of the measurement, as 2026-11-19; empty: not recorded
    machine    processor and number of cores, or the GPU; empty: not recorded
    version    this library and what it ran on, "name version" separated by commas; empty: not recorded

and then the study's own, which `SCHEMAS` lists by the file's name. `read` checks a file, `append` and `write` add the
first three columns where a row has none. `results/paper/` is what `augment-reduce reproduce` wrote: the same first
columns, then those of each table.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import augment_reduce

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
COMMON = ("date", "machine", "version")
SCHEMAS: dict[str, tuple[str, ...]] = {
    "ablations": (
        "dataset", "model", "change", "log_likelihood", "sd", "against_the_code", "accuracy", "floored", "seeds",
    ),
    "calibration": (
        "dataset", "model", "variant", "seed", "ECE", "ECE_equal_mass", "confidence", "accuracy", "log_likelihood",
        "bound_gap", "log_eta_ratio", "seconds",
    ),
    "crossed": ("dataset", "method", "seed", "rows", "epochs", "log_likelihood", "accuracy"),  # made by hand
    "defaults": ("dataset", "model", "step", "seed", "log_likelihood", "accuracy", "bound_gap", "seconds"),
    "exact_adagrad": (
        "dataset", "model", "v", "epochs", "rows", "log_likelihood", "accuracy", "seconds", "device", "bias_scale",
    ),
    "exact_bar": ("dataset", "v", "iterations", "rows", "log_likelihood", "accuracy", "seconds", "device"),
    "exact_map": (
        "model", "v", "rows", "evaluations", "log_likelihood", "accuracy", "best_moment", "seconds", "device",
    ),
    "head": ("section", "name", "K", "D", "B", "S", "ms_p50", "ms_p20", "ms_p80", "gb", "note"),
    "head_quality": ("problem", "method", "K", "D", "B", "S", "rate", "seconds", "steps", "log_likelihood"),
    "head_words": ("method", "n_sampled", "seed", "step", "nats", "ms_per_step", "gap", "floored"),
    "hold_out": (
        "dataset", "model", "rate", "eps", "half", "v", "epochs", "sampler", "sampled", "local", "seed", "biases",
        "log_likelihood", "accuracy", "bound_gap", "seconds",
    ),
    "killed_ranks": (
        "run", "rank", "step", "collective", "delay", "every", "lost", "named", "log_likelihood", "undisturbed",
    ),
    "late_ranks": (
        "dataset", "way", "ranks", "epochs", "v", "seed", "log_likelihood", "bound_gap", "seconds", "train_seconds",
    ),
    "mnist_held_out": (  # made by hand
        "model", "biases", "half", "rate_factor", "v", "epochs", "weights", "split", "log_likelihood", "accuracy",
    ),
    "omniglot_splits": ("split", "method", "seed", "iterations", "log_likelihood", "accuracy"),
    "reliability": (
        "dataset", "model", "variant", "seed", "bin", "low", "high", "confidence", "accuracy", "count",
    ),
    "shard_costs": ("what", "ranks", "B", "S", "D", "bytes", "p50", "p20", "p80", "runs"),
    "shared": ("dataset", "law", "kind", "sampled", "epochs", "seconds", "log_likelihood", "precision_at_1"),
    "sizes": ("dataset", "method", "sampled", "epochs", "seconds", "log_likelihood", "precision_at_1"),
    "speed": ("benchmark", "case", "quantity", "p50", "p20", "p80", "runs"),
    "variance": (
        "dataset", "stage", "sampler", "evaluations", "S", "scores", "weights", "normaliser", "ms", "draws",
    ),
    "zoo": (
        "problem", "half", "N", "D", "K", "seed", "learner", "log_likelihood", "precision_at_1", "precision_at_5",
        "seconds", "note",
    ),
}  # fmt: skip
Row = dict[str, Any]


# ---- who measured ----


def machine(device: torch.device | None = None) -> str:
    """The GPU's name, or the processor and the number of cores that this process may use."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def versions() -> str:
    """Of this library (which also runs from a source tree) and of what it runs on."""
    found = [f"augment-reduce {augment_reduce.__version__}", f"python {platform.python_version()}"]
    for name in ("torch", "numba", "numpy", "scikit-learn", "triton"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def stamp(device: torch.device | None = None) -> dict[str, str]:
    """The columns that every result file begins with, of a measurement made now."""
    return {"date": datetime.date.today().isoformat(), "machine": machine(device), "version": versions()}


# ---- files ----


def columns_of(path: Path) -> tuple[str, ...]:
    """All columns of a result file, by its name."""
    return (*COMMON, *SCHEMAS[path.stem])


def read(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a result file; none where there is no file. `columns` in place of those of its name."""
    if not path.exists():
        return []
    expected = tuple(columns or columns_of(path))
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        check_header(path, tuple(reader.fieldnames or ()), expected)
        rows = list(reader)
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}, line {number}: expected {len(expected)} values.")
        if not re.fullmatch(r"(\d{4}-\d\d-\d\d)?", row["date"]):
            raise ValueError(f"{path}, line {number}: expected a date such as 2026-11-19 or none, found {row['date']}.")
    return rows


def check_header(path: Path, found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if found != expected:
        raise ValueError(
            f"{path}: expected the columns {', '.join(expected)}, found {', '.join(found)}. Write to another file, or "
            "bring this one to the schema of benchmarks/common.py."
        )


def write(path: Path, rows: Iterable[Row], columns: Sequence[str] | None = None) -> None:
    """A whole result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or columns_of(path), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append(path: Path, rows: Iterable[Row], columns: Sequence[str], device: torch.device | None = None) -> None:
    """Add rows of the study's own columns, measured now, to a result file; make it where it is missing."""
    columns, now = (*COMMON, *columns), stamp(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with open(path, newline="", encoding="utf-8") as file:
            check_header(path, tuple(next(csv.reader(file), ())), columns)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(now | row for row in rows)


def kept(rows: Iterable[Row], columns: Sequence[str], output: Path | None) -> list[Row]:
    """The rows, each printed, and added to a result file if there is one, as soon as it is made."""
    found = []
    for each in rows:
        found.append(each)
        print(", ".join(str(value) for value in each.values()), flush=True)
        if output:
            append(output, [each], columns)
    return found


# ---- speed.csv ----


def row(benchmark: str, case: str, quantity: str, values: list[float]) -> Row:
    """Median, 20th and 80th percentile of repeated measurements."""
    p20, p50, p80 = np.percentile(values, [20, 50, 80])
    return {
        "benchmark": benchmark, "case": case, "quantity": quantity, "p50": f"{p50:.6g}", "p20": f"{p20:.6g}",
        "p80": f"{p80:.6g}", "runs": len(values),
    }  # fmt: skip


def report(rows: list[Row], *, save: bool) -> None:
    """Print the rows as csv; with `save` append them to speed.csv too."""
    writer = csv.DictWriter(sys.stdout, SCHEMAS["speed"])
    writer.writeheader()
    writer.writerows(rows)
    if save:
        append(RESULTS / "speed.csv", rows, SCHEMAS["speed"])


# ---- tables ----


def markdown(head: Sequence[str], lines: Iterable[tuple[Sequence[str], Iterable[Row]]]) -> str:
    """A table whose last columns are `COMMON`. A line: its cells, and the rows of result files that they come from."""
    table = [[*head, *COMMON], ["---"] * (len(head) + len(COMMON))]
    table += [[*cells, *origin(rows)] for cells, rows in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def origin(rows: Iterable[Row]) -> tuple[str, str, str]:
    """When, where and with what rows were measured: first and last day, machines, this library and torch."""
    rows = list(rows)
    dates = sorted({row["date"] for row in rows if row["date"]})
    machines = dict.fromkeys(row["machine"] for row in rows if row["machine"])
    found = dict.fromkeys(short_version(row["version"]) for row in rows if row["version"])
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "-"
    return when, "; ".join(machines) or "-", "; ".join(found) or "-"


def short_version(version: str) -> str:
    """Of all that is on record, this library and torch."""
    return ", ".join(part for part in version.split(", ") if part.split()[0] in ("augment-reduce", "torch"))
