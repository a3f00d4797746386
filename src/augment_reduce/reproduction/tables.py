"""Paper | ours | difference: every table as rows of plain values, from finished cells.

Datasets with missing files have rows, too, with advice in `note`. Means are over seeds;
`_sd` is the standard deviation between seeds, empty for one seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .settings import METHODS, REAL, STUDIES, SYNTHETIC, TABLE2, TABLE3, Study
from .store import Store

Row = dict[str, Any]
Records = Sequence[Mapping[str, Any]]
BRING = "bring the files: "
SHAPE_NOTE = "random data, same shape"


def build(store: Store, asked: int | None = None, methods: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """All tables from the finished cells of that many iterations (None: the paper's)."""
    records = [record for record in store.all_finished() if record["asked_iterations"] == asked]
    shown = [name for name in METHODS if methods is None or name in methods]
    found = store.statistics()
    return {
        "table1": table1(found),
        "table2": table2(records, found, shown),
        "table3": table3(records, found, shown),
        "bounds": bounds_table(records),
        "synthetic": synthetic_table(records),
        "cells": [flat(record) for record in records],
    }


# ---- helpers ----


def cells_of(records: Records, dataset: str, method: str, kind: str) -> list[Mapping[str, Any]]:
    return [r for r in records if (r["dataset"], r["method"], r["kind"]) == (dataset, method, kind)]


def mean_sd(cells: Records, metric: str | Callable[[Mapping[str, Any]], Any]) -> tuple[float | None, float | None]:
    """Mean over seeds and standard deviation between them; None if not defined."""
    read = (lambda metrics: metrics.get(metric)) if isinstance(metric, str) else metric
    values = [read(cell["metrics"]) for cell in cells]
    if not values or any(value is None for value in values):
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def where(cell: Mapping[str, Any]) -> str:
    """Processor, cores and threads; times are comparable only if these are equal."""
    machine, threads = cell["machine"], cell["settings"]["n_jobs"]
    return f"{machine['processor']}, {machine['cores']} cores, {threads} thread{'s' if threads != 1 else ''}"


def where_most_ran(records: Records, dataset: str) -> str | None:
    """The place with most methods of a dataset, then most cells; ties by name."""
    cells = [cell for cell in records if cell["dataset"] == dataset]
    places = sorted({where(cell) for cell in cells})
    counts = {
        p: (len({c["method"] for c in cells if where(c) == p}), sum(where(c) == p for c in cells)) for p in places
    }
    return max(places, key=counts.__getitem__, default=None)


def minus(ours: float | None, paper: float | None) -> float | None:
    return None if ours is None or paper is None else ours - paper


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def hint(found: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Advice on missing files; empty if none are missing or the data were not searched yet."""
    return BRING + found[name]["missing"] if "missing" in found.get(name, {}) else ""


# ---- the tables ----


def table1(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Statistics of the data, and the paper's minibatch sizes and iterations."""
    return [_table1_row(STUDIES[name], found.get(name, {}), hint(found, name)) for name in (*REAL, "synthetic")]


def _table1_row(study: Study, ours: Mapping[str, Any], note: str) -> Row:
    row: Row = {"dataset": study.name}
    for column in ("n_train", "n_test", "n_features", "n_classes"):
        paper = getattr(study, column)
        row |= {
            f"paper_{column}": paper,
            column: ours.get(column),
            f"difference_{column}": minus(ours.get(column), paper),
        }
    row |= {"batch_size": study.batch_size, "n_sampled_classes": study.n_sampled_classes}
    return {**row, "iterations": study.iterations, "note": note or "; ".join(ours.get("notes", ()))}


def table2(records: Records, found: Mapping[str, Mapping[str, Any]], methods: Sequence[str]) -> list[Row]:
    """Seconds per epoch, one core: from the full cells, else from those run for the time alone."""
    rows = []
    for name in (*REAL, "synthetic"):
        for method in (m for m in STUDIES[name].methods if m in methods):
            options = (
                (cells_of(records, name, method, "full"), "the data"),
                (cells_of(records, name, method, "timing"), "the data"),
                (cells_of(records, f"{name}-shape", method, "timing"), SHAPE_NOTE),
            )
            cells, data = next((option for option in options if option[0]), ([], None))
            place = where_most_ran(records, cells[0]["dataset"]) if cells else None
            cells = [cell for cell in cells if where(cell) == place]  # times of two machines are not comparable
            paper = TABLE2[name].get(method)
            if paper is None and not cells:
                continue
            mean, sd = mean_sd(cells, "seconds_per_epoch")
            rows.append({
                "dataset": name, "method": method, "paper_seconds": paper, "seconds": mean, "seconds_sd": sd,
                "seconds_median": mean_sd(cells, "seconds_per_epoch_median")[0],
                "difference_seconds": minus(mean, paper), "paper_over_ours": over(paper, mean),
                "n_seeds": len(cells), "cells_at_once": max((c["cells_at_once"] for c in cells), default=None),
                "data": data, "machine": place, "note": hint(found, name),
            })  # fmt: skip
    return rows


def as_in_paper(metrics: Mapping[str, Any]) -> float | None:
    """Test log likelihood as the authors compute it: importance sampling and clipping, for eq. (5)."""
    return metrics.get("test_log_likelihood_importance_floored", metrics.get("test_log_likelihood"))


def table3(records: Records, found: Mapping[str, Mapping[str, Any]], methods: Sequence[str]) -> list[Row]:
    """Test log likelihood and accuracy. `log_likelihood` is exact; `as_in_paper` is computed as the paper's was."""
    rows = []
    for name in REAL:
        for method in (m for m in STUDIES[name].methods if m in methods):
            cells = cells_of(records, name, method, "full")
            paper, paper_accuracy = TABLE3[name].get(method, (None, None))
            if paper is None and not cells:
                continue
            row: Row = {"dataset": name, "method": method, "paper_log_likelihood": paper}
            row["as_in_paper"], row["as_in_paper_sd"] = mean_sd(cells, as_in_paper)
            row["difference_log_likelihood"] = minus(row["as_in_paper"], paper)
            row["log_likelihood"], row["log_likelihood_sd"] = mean_sd(cells, "test_log_likelihood")
            row["log_likelihood_floored"] = mean_sd(cells, "test_log_likelihood_floored")[0]
            row["importance"] = mean_sd(cells, "test_log_likelihood_importance")[0]
            row["importance_floored"] = mean_sd(cells, "test_log_likelihood_importance_floored")[0]
            row["paper_accuracy"] = paper_accuracy
            row["accuracy"], row["accuracy_sd"] = mean_sd(cells, "test_accuracy")
            row["difference_accuracy"] = minus(row["accuracy"], paper_accuracy)
            row["best_log_likelihood"] = mean_sd(cells, "best_test_log_likelihood")[0]
            row["best_iteration"] = mean_sd(cells, "best_iteration")[0]
            row |= {"n_seeds": len(cells), "note": "" if cells else hint(found, name)}
            rows.append(row)
    return rows


def bounds_table(records: Records) -> list[Row]:
    """The bounds at the end, nats a training row: as the paper plots them (sampled classes), and over all classes."""
    rows = []
    for name in (name for name in REAL if any(r["dataset"] == name and r["kind"] == "full" for r in records)):
        cells = {method: cells_of(records, name, method, "full") for method in ("softmax", "one-vs-each", "exact")}
        row: Row = {"dataset": name}
        for method, column in (("softmax", "ar"), ("one-vs-each", "ove")):
            row[f"{column}_bound"] = mean_sd(cells[method], "bound")[0]
            row[f"{column}_full_bound"] = mean_sd(cells[method], "full_bound")[0]
            row[f"{column}_train_log_likelihood"] = mean_sd(cells[method], "train_log_likelihood")[0]
        row["exact_train_log_likelihood"] = mean_sd(cells["exact"], "train_log_likelihood")[0]
        ahead = minus(row["ar_bound"], row["ove_bound"])
        ahead_full = minus(row["ar_full_bound"], row["ove_full_bound"])
        rows.append({**row, "ar_minus_ove": ahead, "ar_minus_ove_full": ahead_full})
    return rows


def synthetic_table(records: Records) -> list[Row]:
    """Section 4.1: bound over all rows, errors of the probabilities, seconds per epoch."""
    rows = []
    for method, (paper_bound, paper_error) in SYNTHETIC.items():
        cells = cells_of(records, "synthetic", method, "full")
        bound, bound_sd = mean_sd(cells, "bound_total")
        error, error_sd = mean_sd(cells, "error_to_frequencies")
        rows.append({
            "method": method, "paper_bound": paper_bound, "bound": bound, "bound_sd": bound_sd,
            "bound_ratio": over(bound, paper_bound),
            "log_likelihood_total": mean_sd(cells, "log_likelihood_total")[0],
            "paper_error": paper_error, "error_to_frequencies": error, "error_to_frequencies_sd": error_sd,
            "error_ratio": over(error, paper_error), "error_to_truth": mean_sd(cells, "error_to_truth")[0],
            "frequencies_to_truth": mean_sd(cells, "frequencies_to_truth")[0], "n_seeds": len(cells),
        })  # fmt: skip
    return rows


def flat(record: Mapping[str, Any]) -> Row:
    """A cell as one row: when and where it was trained, what it is, then every number."""
    names = ("key", "dataset", "method", "seed", "kind", "iterations", "cells_at_once", "finished", "weights_sha256")
    origin = origin_of(record["finished"], record["machine"], record["versions"])
    return {**origin, **{n: record[n] for n in names}, **record["metrics"]}


def origin_of(when: str, machine: Mapping[str, Any], versions: Mapping[str, str]) -> Row:
    """The columns that every csv file of results begins with."""
    return {
        "date": when[:10],
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "version": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
