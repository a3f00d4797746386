"""Results on the terminal: tables, csv, JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

    Blocks = Iterator[tuple[int, np.ndarray, np.ndarray]]

Prediction = tuple[int, list[Any], list[float]]


def error(message: str) -> None:
    """One paragraph on standard error."""
    Console(stderr=True).print(f"[bold red]Error:[/] {escaped(message)}", highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """One line on standard error, for information."""
    Console(stderr=True).print(f"[bold]Note:[/] {escaped(message)}", highlight=False, soft_wrap=True)


def escaped(text: str) -> str:
    """Text escaped for rich."""
    return text.replace("\\", "\\\\").replace("[", r"\[")


def as_json(result: dict[str, Any]) -> None:
    """One JSON object on standard output; infinities become null."""
    finite = {name: None if value in (float("inf"), float("-inf")) else value for name, value in result.items()}
    sys.stdout.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")


def table(rows: Sequence[tuple[str, str, str]]) -> None:
    """A table of names, numbers and explanations."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    for name, number, meaning in rows:
        grid.add_row(name, number, escaped(meaning))
    Console(highlight=False).print(grid)


def fit_summary(summary: dict[str, Any]) -> None:
    rare, validation = summary["dropped_rare"], summary["validation_log_likelihood"]
    epochs = f"{summary['iterations']:,} steps, {summary['epochs'] or 0:.1f} epochs"
    rows = [
        ("examples", f"{summary['examples']:,}", f"{rare:,} with rare labels left out" if rare else ""),
        ("features", f"{summary['features']:,}", ""),
        ("classes", f"{summary['classes']:,}", ""),
        ("seconds", f"{summary['seconds']:.1f}", epochs),
    ]
    if summary["bound"] is not None:
        rows.append(("bound", f"{summary['bound']:.4f}", "lower bound on the log likelihood of a training example"))
    if summary["bound_gap"] is not None:
        rows.append(("gap", f"{summary['bound_gap']:.4f}", "how far the bound is below the exact log likelihood"))
    if validation is not None:
        ended = "stopped early" if summary["stopped_early"] else "ran to the end"
        rows.append(("validation", f"{validation:.4f}", f"log likelihood of held-out examples; {ended}"))
    table([*rows, ("written", f"{summary['bytes'] / 1e6:,.1f} MB", summary["model"])])


def conversion(summary: dict[str, Any]) -> None:
    table(
        [
            ("rows", f"{summary['rows']:,}", ""),
            ("features", f"{summary['features']:,}", ""),
            ("classes", f"{summary['classes']:,}", "" if summary["classes"] else "rows to predict for: no labels"),
            ("entries", f"{summary['entries']:,}", f"{summary['seconds']:.1f} s"),
            ("written", f"{summary['bytes'] / 1e6:,.1f} MB", summary["folder"]),
        ]
    )


def evaluation(result: dict[str, Any]) -> None:
    skipped = result["skipped_unseen"]
    table(
        [
            ("rows", f"{result['rows']:,}", ""),
            ("examples", f"{result['examples']:,}", f"{skipped:,} with unseen labels left out" if skipped else ""),
            ("log likelihood", f"{result['log_likelihood']:.4f}", "mean log probability of the right label, exact"),
            ("perplexity", f"{result['perplexity']:,.2f}", f"a uniform guess: {result['classes']:,}"),
            ("accuracy", f"{result['accuracy']:.4f}", "the most probable class is the right one"),
            ("confidence", f"{result['confidence']:.4f}", "mean probability of that class"),
            ("calibration", f"{result['calibration_error']:.4f}", "expected error of that probability, in 15 bins"),
            *(
                (f"precision at {k}", f"{p:.4f}", "over rows, against all their labels")
                for k, p in result["precision_at"].items()
            ),
        ]
    )


# ---- predictions, streamed row by row ----


def predictions(stream: IO[str], blocks: Blocks, layout: str) -> None:
    LAYOUTS[layout](stream, _rows(blocks))


def _rows(blocks: Blocks) -> Iterator[Prediction]:
    for start, classes, probabilities in blocks:
        pairs = zip(classes.tolist(), probabilities.tolist(), strict=True)
        for row, (names, values) in enumerate(pairs, start):
            yield row, names, values


def _text(stream: IO[str], rows: Iterator[Prediction]) -> None:
    for row, names, values in rows:
        stream.write(f"{row}\t" + "  ".join(f"{name} ({p:.1%})" for name, p in zip(names, values, strict=True)) + "\n")


def _csv(stream: IO[str], rows: Iterator[Prediction]) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "rank", "class", "probability"])
    for row, names, values in rows:
        ranked = enumerate(zip(names, values, strict=True), start=1)
        writer.writerows([row, rank, name, f"{p:.6g}"] for rank, (name, p) in ranked)


def _jsonl(stream: IO[str], rows: Iterator[Prediction]) -> None:
    for prediction in rows:
        stream.write(_object(prediction) + "\n")


def _json(stream: IO[str], rows: Iterator[Prediction]) -> None:
    stream.write('{"predictions": [')
    for prediction in rows:
        stream.write(("" if prediction[0] == 0 else ",") + "\n" + _object(prediction))
    stream.write("\n]}\n")


def _object(prediction: Prediction) -> str:
    row, names, values = prediction
    shown = [float(f"{p:.6g}") for p in values]
    return json.dumps({"row": row, "classes": names, "probabilities": shown}, ensure_ascii=False)


LAYOUTS: dict[str, Callable[[IO[str], Iterator[Prediction]], None]] = {
    "text": _text, "csv": _csv, "jsonl": _jsonl, "json": _json,
}  # fmt: skip
