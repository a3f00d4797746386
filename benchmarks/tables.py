"""Writes the tables of the documentation from the result files.

    python -m benchmarks.tables            # every page of docs/ that has markers
    python -m benchmarks.tables --check    # exit code 1 where a page is not what the result files say

A table is generated between `<!-- table: NAME -->` and `<!-- end -->`; `TABLES` has the names. Measurements are
appended to a result file; a table has the last measurement of each case, with its date, machine and version.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, Row, markdown, read
from benchmarks.speed import bench_epoch, bench_quality, bench_shards, bench_shared
from benchmarks.studies import calibration, killed_ranks, shard_costs, zoo

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)
DATASETS = {
    "mnist": "MNIST", "bibtex": "Bibtex", "omniglot": "Omniglot", "eurlex-4k": "EURLex shape, random rows",
    "synthetic": "synthetic, no features", "amazoncat-13k": "AmazonCat shape, random rows",
}  # fmt: skip


def short(value: float) -> str:
    """Three digits, and no exponent for what is larger."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


# ---- speed.csv ----


def speed(benchmark: str) -> dict[str, dict[str, Row]]:
    """case -> quantity -> its last measurement."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in read(RESULTS / "speed.csv"):
        if row["benchmark"] == benchmark:
            found[row["case"]][row["quantity"]] = row
    return found


def turns() -> Iterator[dict[str, Row]]:
    """The rows of bench_epoch that one run appended for one case, by quantity."""
    run: dict[str, Row] = {}
    for row in read(RESULTS / "speed.csv"):
        if row["benchmark"] != "epoch":
            continue
        if run and (row["quantity"] in run or row["case"] != next(iter(run.values()))["case"]):
            yield run
            run = {}
        run[row["quantity"]] = row
    if run:
        yield run


def authors() -> str:
    """Seconds an epoch beside the authors' code, and the median ratio: the last run of each case that has all three."""
    ours, theirs, ratio = "s per epoch, 1 thread", "s per epoch, beside", "beside / ours, 1st column"
    last = {run[ours]["case"]: run for run in turns() if {ours, theirs, ratio} <= run.keys()}
    lines = []
    for dataset, title in DATASETS.items():
        for method in bench_epoch.METHODS:
            for case, run in last.items():
                if case.split()[:2] == [dataset, method] and not case.endswith("-shared"):
                    values = (f"{float(run[name]['p50']):.3g}" for name in (theirs, ours, ratio))
                    B, S, _ = bench_epoch.SHAPES[dataset]
                    lines.append(((title, method, f"{B:,}", str(S), *values), run.values()))
    return markdown(("data", "model", "B", r"\|S\|", "theirs, s", "ours, s", "ratio"), lines)


def classes() -> str:
    """Milliseconds a step, K across."""
    found: dict[str, dict[int, Row]] = defaultdict(dict)
    for case, rows in speed("classes").items():
        sampling, K = case.split()[:2]
        found[sampling][int(K.removeprefix("K=").replace(",", ""))] = rows["ms per step"]
    names = {"uniform": "for each row", "uniform-shared": "shared"}
    every = sorted({K for rows in found.values() for K in rows})
    lines = [
        ((names[sampling], *(f"{float(rows[K]['p50']):.2f}" if K in rows else "-" for K in every)), rows.values())
        for sampling, rows in found.items()
    ]
    return markdown(("classes drawn", *(f"K {K:,}" for K in every)), lines)


def memory() -> str:
    columns = {
        "data": "data", "expected": "said before training", "weights, states, q": "weights, states, local",
        "peak above the data": "peak above the data", "peak of the process": "peak",
    }  # fmt: skip
    lines = [
        ((case, *(f"{float(rows[f'{name}, GB']['p50']):.3g}" for name in columns.values())), rows.values())
        for case, rows in speed("memory").items()
    ]
    return markdown(("GB", *columns), lines)


def quality(dataset: str) -> str:
    """Every learner on one set, in the order in which `bench_quality.OURS` and its peers come."""
    lines = []
    for case, rows in speed("quality").items():
        name, learner = case.split(" ", 1)
        if name == dataset:
            lines.append(((learner.replace(" 1 epochs", " 1 epoch"), *quality_cells(rows)), rows.values()))
    lines.sort(key=lambda line: order_of(line[0][0]))
    return markdown(("learner", "seconds", "log likelihood", "P@1", "P@5"), lines)


def quality_cells(rows: dict[str, Row]) -> list[str]:
    """Normalised scores in brackets; the rows that a learner gave no probability are counted behind it."""
    value = {name: float(row["p50"]) for name, row in rows.items()}
    likelihood = f"{value['log lik']:.3f}" if "log lik" in value else f"({value['log lik, normalised scores']:.3f})"
    if value.get("rows floored"):
        likelihood += f", {value['rows floored']:.0f} rows floored"
    seconds = short(value["seconds"])
    if value.get("tuning seconds"):
        seconds += f" (and {short(value['tuning seconds'])} to tune)"
    return [seconds, likelihood, f"{value['P@1']:.3f}", f"{value['P@5']:.3f}"]


def order_of(learner: str) -> tuple[int, str, float]:
    """Ours first, then what uses our code, then the others; by epochs."""
    method, _, rest = learner.partition(",")
    first = ("ours", "ours probit", "ours logistic", "sampled-softmax", "exact", "torch exact")
    place = first.index(method) if method in first else len(first)
    return place, "" if place < len(first) else method, float(rest.split()[0]) if rest else 0.0


# ---- head.csv, head_quality.csv ----


def head(section: str) -> dict[tuple[str, str], dict[int, Row]]:
    """(name, D) -> K -> the last measurement."""
    found: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in read(RESULTS / "head.csv"):
        if row["section"] == section and row["ms_p50"] and row["K"]:
            found[row["name"], row["D"]][int(row["K"])] = row
    return found


def head_times(section: str) -> str:
    """Milliseconds a step by K, and memory beyond weights and state at K 1e6."""
    found = head(section)
    every = sorted({K for rows in found.values() for K in rows})
    lines = []
    for (name, D), rows in found.items():
        gb = rows.get(10**6, {}).get("gb")
        cells = (short(float(rows[K]["ms_p50"])) if K in rows else "-" for K in every)
        lines.append(((name, D, *cells, short(float(gb)) if gb else "-"), rows.values()))
    return markdown(("ms a step", "D", *(f"K {K:,}" for K in every), "GB"), lines)


def head_kernels() -> str:
    """Microseconds a step of softmax with the default local step, longest first."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for (name, D), rows in head("kernels").items():
        kernel, _, variant = name.partition(" (")
        if variant == "amortised)" and not kernel.startswith("void"):
            found[kernel][D] = rows[max(rows)]
    sizes = sorted({D for rows in found.values() for D in rows}, key=int)
    names = sorted(found, key=lambda name: -max(float(row["ms_p50"]) for row in found[name].values()))
    lines = []
    for name in names:
        cells = [name]
        for D in sizes:
            row = found[name].get(D)
            share = re.search(r"(\d+%) of the tensor cores' floor", row["note"]) if row else None
            cells += [f"{1e3 * float(row['ms_p50']):.1f}" if row else "-", share[1] if share else "-"]
        lines.append((cells, found[name].values()))
    return markdown(("kernel", *(text for D in sizes for text in (f"µs, D {D}", "of the floor"))), lines)


LOOKS = (0.25, 0.5, 1.0, 1.5, 4.0, 10.0, 60.0)


def head_quality() -> str:
    """Test log likelihood after given seconds of training, and the best of all evaluations."""
    found: dict[tuple[str, ...], dict[float, Row]] = defaultdict(dict)
    for row in read(RESULTS / "head_quality.csv"):
        found[tuple(row[name] for name in ("problem", "method", "S", "rate"))][float(row["seconds"])] = row
    lines = []
    for key, rows in sorted(found.items(), key=lambda item: list(PROBLEMS).index(item[0][0])):
        at = {look: nearest(rows, look) for look in LOOKS}
        best = max(rows.values(), key=lambda row: float(row["log_likelihood"]))
        cells = [f"{float(row['log_likelihood']):.3f}" if row else "-" for row in at.values()]
        shown = f"{float(best['log_likelihood']):.3f} ({float(best['seconds']):.3g} s)"
        lines.append(((PROBLEMS[key[0]], key[1], key[2] or "-", key[3], *cells, shown), rows.values()))
    return markdown(("problem", "method", r"\|S\|", "rate", *(f"{look:g} s" for look in LOOKS), "best"), lines)


PROBLEMS = {"zipf": "Zipf, K 1,000,000", "debian": "debian-deps, K 31,298", "words": "next words, K 53,776"}


def nearest(rows: dict[float, Row], seconds: float) -> Row | None:
    """The evaluation at that time: the first within a tenth after it."""
    return next((rows[at] for at in sorted(rows) if seconds <= at <= 1.1 * seconds + 0.05), None)


# ---- all of them ----

TABLES: dict[str, Callable[[], str]] = {
    "authors": authors,
    "classes": classes,
    "memory": memory,
    **{f"quality-{name}": partial(quality, name) for name in bench_quality.DATASETS},
    "shared": lambda: bench_shared.table(read(RESULTS / "shared.csv")),
    "calibration": lambda: calibration.table(read(RESULTS / "calibration.csv"), slack=False),
    "calibration-slack": lambda: calibration.table(read(RESULTS / "calibration.csv"), slack=True),
    "zoo": lambda: zoo.summary(RESULTS / "zoo.csv"),
    "head-steps": partial(head_times, "steps"),
    "head-peers": partial(head_times, "peers"),
    "head-kernels": head_kernels,
    "head-quality": head_quality,
    "shards-steps": lambda: bench_shards.table_of_steps(speed("shards")),
    "shards-capacity": lambda: bench_shards.table_of_capacity(speed("shards")),
    "shards-bytes": lambda: bench_shards.table_of_bytes(speed("shards")),
    "killed-ranks": lambda: killed_ranks.table(read(RESULTS / "killed_ranks.csv")),
    "shard-costs": lambda: shard_costs.table(read(RESULTS / "shard_costs.csv")),
    "shard-checked": lambda: shard_costs.checked(read(RESULTS / "shard_costs.csv")),
    "shard-published": lambda: shard_costs.published(read(RESULTS / "shard_costs.csv")),
}  # fmt: skip


def filled(text: str) -> str:
    """A page with the tables between its markers."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise KeyError(f"No table is called {match[2]!r}; expected one of {', '.join(TABLES)}.")
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return [page for page in sorted((ROOT / "docs").glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def main(arguments: list[str] | None = None) -> list[Path]:
    """Writes the pages, or only checks them; returns those that were not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(page)
            if not options.check:
                page.write_text(after, encoding="utf-8")
    print("\n".join(f"{'out of date' if options.check else 'written'}: {page}" for page in stale) or "all up to date")
    return stale


if __name__ == "__main__":
    found = main()
    sys.exit(1 if found and "--check" in sys.argv else 0)
