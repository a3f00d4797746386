"""The columns of the tables, described once for the terminal, the page, csv and json."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from .._version import __version__
from .cells import machine, versions
from .settings import METHODS, STUDIES
from .store import FORMAT, FORMAT_VERSION, Store, plain
from .tables import Row, origin_of

MINUS = "\N{MINUS SIGN}"
Format = Callable[[float], str]


def decimals(n: int, sign: str = "-") -> Format:
    """Fixed decimals; an exponent for very large numbers (a diverged cell)."""
    return lambda value: f"{value:{sign}.{n}{'f' if abs(value) < 1e5 else 'e'}}".replace("-", MINUS)


def signed(n: int) -> Format:
    return decimals(n, "+")


def count(value: float) -> str:
    return f"{value:,.0f}"


def signed_count(value: float) -> str:
    return "0" if value == 0 else f"{value:+,.0f}".replace("-", MINUS)


def scientific(n: int) -> Format:
    return lambda value: f"{value:.{n}e}".replace("-", MINUS)


def duration(value: float) -> str:
    """Seconds, or hours if the paper has hours."""
    return f"{value / 3600:.2f} h" if value >= 3600 else f"{value:.3g} s"


def times(value: float) -> str:
    return f"{value:.3g}×"


def percent_off(value: float) -> str:
    return f"{100 * (value - 1):+.1f} %".replace("-", MINUS)


@dataclass(frozen=True)
class Column:
    """`sd`: the key of the spread between seeds, shown behind the mean. `group` columns share a heading."""

    key: str
    title: str
    format: Format | None = None
    group: str = ""
    sd: str | None = None
    difference: bool = False

    def text(self, row: Row) -> str:
        value = row.get(self.key)
        if self.key == "dataset":
            return STUDIES[str(value)].title
        if self.key == "method":
            return METHODS[str(value)].title
        if value is None or self.format is None:
            return "–" if value is None else str(value)
        spread = row.get(self.sd) if self.sd else None
        return self.format(value) + (f" ± {self.format(spread)}" if spread is not None else "")


@dataclass(frozen=True)
class Merged(Column):
    """Ours, with the difference in brackets if there is one; the paper's in brackets if ours is missing."""

    def text(self, row: Row) -> str:
        assert self.format is not None
        ours, difference = row.get(self.key), row.get(f"difference_{self.key}")
        if ours is None:
            return f"({self.format(row[f'paper_{self.key}'])})"
        return self.format(ours) + (f" ({signed_count(difference)})" if difference else "")


def _three(key: str, group: str, paper: Format, difference: Format) -> tuple[Column, ...]:
    return (
        Column(f"paper_{key}", "paper", paper, group),
        Column(key, "ours", paper, group),
        Column(f"difference_{key}", "diff.", difference, group, difference=True),
    )


DATASET, METHOD, SEEDS = Column("dataset", "dataset"), Column("method", "method"), Column("n_seeds", "seeds", count)
LL, ACC = "test log likelihood", "accuracy"
COLUMNS: dict[str, tuple[Column, ...]] = {
    "table1": (
        DATASET,
        *_three("n_train", "training rows", count, signed_count),
        *_three("n_test", "test rows", count, signed_count),
        *_three("n_features", "covariates", count, signed_count),
        *_three("n_classes", "classes", count, signed_count),
        Column("batch_size", "|B|", count, "minibatch"), Column("n_sampled_classes", "|S|", count, "minibatch"),
        Column("iterations", "iterations", count),
    ),
    "table2": (
        DATASET, METHOD,
        Column("paper_seconds", "paper", duration, "an epoch takes"),
        Column("seconds", "ours", duration, "an epoch takes", sd="seconds_sd"),
        Column("paper_over_ours", "paper / ours", times, "an epoch takes", difference=True),
        SEEDS,
        Column("data", "timed on"),
    ),
    "table3": (
        DATASET, METHOD,
        Column("paper_log_likelihood", "paper", decimals(3), LL),
        Column("as_in_paper", "ours", decimals(3), LL, sd="as_in_paper_sd"),
        Column("difference_log_likelihood", "diff.", signed(3), LL, difference=True),
        Column("log_likelihood", "exact integral", decimals(3), LL, sd="log_likelihood_sd"),
        Column("importance", "1,000 draws, no floor", decimals(3), LL),
        Column("best_log_likelihood", "best on the way", decimals(3), LL),
        Column("paper_accuracy", "paper", decimals(3), ACC),
        Column("accuracy", "ours", decimals(3), ACC, sd="accuracy_sd"),
        Column("difference_accuracy", "diff.", signed(3), ACC, difference=True),
        SEEDS,
    ),
    "bounds": (
        DATASET,
        Column("ar_bound", "A&R", decimals(3), "sampled, as plotted"),
        Column("ove_bound", "one-vs-each", decimals(3), "sampled, as plotted"),
        Column("ar_minus_ove", "A&R ahead by", signed(3), "sampled, as plotted", difference=True),
        Column("ar_full_bound", "A&R", decimals(3), "over all classes"),
        Column("ove_full_bound", "one-vs-each", decimals(3), "over all classes"),
        Column("ar_minus_ove_full", "A&R ahead by", signed(3), "over all classes", difference=True),
        Column("ar_train_log_likelihood", "A&R", decimals(3), "training log likelihood"),
        Column("ove_train_log_likelihood", "one-vs-each", decimals(3), "training log likelihood"),
        Column("exact_train_log_likelihood", "exact", decimals(3), "training log likelihood"),
    ),
    "synthetic": (
        METHOD,
        Column("paper_bound", "paper", scientific(2), "bound, all rows"),
        Column("bound", "ours", scientific(3), "bound, all rows", sd="bound_sd"),
        Column("bound_ratio", "diff.", percent_off, "bound, all rows", difference=True),
        Column("paper_error", "paper", scientific(2), "error to the frequencies"),
        Column("error_to_frequencies", "ours", scientific(2), "error to the frequencies", "error_to_frequencies_sd"),
        Column("error_ratio", "diff.", percent_off, "error to the frequencies", difference=True),
        Column("error_to_truth", "to the true p", scientific(2), "error"),
        Column("frequencies_to_truth", "of the frequencies", scientific(2), "error"),
        SEEDS,
    ),
}  # fmt: skip
WIDE = (
    "log_likelihood", "importance", "best_log_likelihood", "n_seeds", "frequencies_to_truth", "ar_train_log_likelihood",
    "ove_train_log_likelihood",
)  # fmt: skip
TERMINAL: dict[str, tuple[Column, ...]] = {
    **{name: tuple(c for c in columns if c.key not in WIDE) for name, columns in COLUMNS.items()},
    "table1": (
        DATASET,
        Merged("n_train", "training", count), Merged("n_test", "test", count), Merged("n_features", "covar.", count),
        Merged("n_classes", "classes", count), Column("batch_size", "|B|", count),
        Column("n_sampled_classes", "|S|", count), Column("iterations", "iterations", count),
    ),
}  # fmt: skip
SHORT = {
    "test log likelihood": "log lik.", "error to the frequencies": "error", "bound, all rows": "bound",
    "sampled, as plotted": "sampled", "over all classes": "all classes", "training log likelihood": "log lik.",
    "an epoch takes": "an epoch",
}  # fmt: skip
TITLES = {
    "table1": "Table 1: the data",
    "table2": "Table 2: time per epoch, one core",
    "table3": "Table 3: test log likelihood and accuracy",
    "bounds": "The bounds at the end, nats a training row",
    "synthetic": "Section 4.1: synthetic data",
}


def to_terminal(name: str, rows: Sequence[Row], console: Console) -> list[str]:
    """A table for the terminal. Returns the notes on its rows, to be shown once beneath all tables."""
    table = Table(title=TITLES[name], title_justify="left", title_style="bold", box=None, pad_edge=False)
    columns, before = TERMINAL[name], ""
    for column in columns:
        group = "" if column.group == before else SHORT.get(column.group, column.group)
        before = column.group
        left = column.key in ("dataset", "method", "data")
        table.add_column(f"{group}\n{column.title}", justify="left" if left else "right", no_wrap=True)
    before = ""
    for row in rows:
        dataset = row.get("dataset", "")
        table.add_row(*("" if c.key == "dataset" and dataset == before else c.text(row) for c in columns))
        before = dataset
    console.print(table)
    console.print()
    return [f"{STUDIES[row['dataset']].title}: {row['note']}" for row in rows if row.get("note")]


def to_csv(rows: Sequence[Row]) -> str:
    """All keys of all rows, in order of first occurrence; empty if a row has no value."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write(store: Store, tables: Mapping[str, Sequence[Row]], asked: int | None) -> None:
    """results.json, and a csv file of every table: date, machine and version first (of a cell, its own)."""
    written = datetime.now(UTC).isoformat(timespec="seconds")
    origin = origin_of(written, machine(), versions())
    tables = {name: [{**origin, **row} for row in rows] for name, rows in tables.items()}
    results: dict[str, Any] = {
        "format": FORMAT, "version": FORMAT_VERSION, "written_by": __version__, "asked_iterations": asked,
        "written": written, "versions": versions(), "machine": machine(),
    }  # fmt: skip
    store.write_json(store.folder / "results.json", plain({**results, **tables}))
    for name, rows in tables.items():
        store.write_text(store.folder / f"{name}.csv", to_csv(rows))
