"""The report page: every table, figure 2, learning curves, settings and versions, in one self-contained file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from typing import Any

from .._version import __version__
from . import figure, sizes
from .page import PAGE, STYLE
from .settings import METHODS, STUDIES
from .show import COLUMNS, TITLES, Column
from .store import Store
from .tables import BRING, Row

WORDS = {
    "table3": "Nats a test row; higher is better. For probit and logistic the paper's numbers come from 1,000 draws of "
    "importance sampling with every row counted as at least −26; <em>ours</em> and the difference are computed that "
    "way too, and beside them stand the integral itself (quadrature, no floor) and the draws without the floor. "
    "<em>Best on the way</em> is the highest value during training: the paper trains for a fixed number "
    "of iterations without a prior, and overfits.",
    "bounds": "What the paper plots is the bound estimated from the sampled classes; A&amp;R's estimate shares its "
    "sample with η. Beside it the bound itself, summed over all classes with the stored η.",
    "table1": "Rows, covariates and classes after preprocessing, with the paper's minibatch sizes.",
    "table2": "Training alone, without evaluation, one thread a cell. Where a dataset's files are missing, random data "
    "of its shape are timed instead, and the row says so.",
    "synthetic": "K = 9,035 classes, N = 300,000 rows, no covariates. The error that the paper prints is taken as the "
    "mean absolute difference from the frequencies in the data: these are themselves further than that from the "
    "probabilities they were drawn with.",
}
ORDER = ("table3", "figure2", "bounds", "curves", "table2", "synthetic", "sizes", "table1", "settings")
NAMES = {
    "table3": "Predictions", "figure2": "Figure 2", "bounds": "Bounds", "curves": "Learning curves",
    "table2": "Time per epoch", "synthetic": "Synthetic data", "sizes": "Sampled classes", "table1": "Data",
    "settings": "Settings and versions",
}  # fmt: skip


def page(store: Store, tables: Mapping[str, Sequence[Row]], asked: int | None) -> str:
    """The whole page as text."""
    records = [r for r in store.all_finished() if r["asked_iterations"] == asked]
    missing = [name for name, found in store.statistics().items() if "missing" in found]
    sections = {name: _table_section(name, tables[name]) for name in COLUMNS}
    sections["figure2"] = _figure2_section(figure.bound_panels(store, records, missing))
    sections["curves"] = _curves_section(figure.learning_panels(records))
    sections["sizes"] = _sizes_section(sizes.panels(sizes.read(store.folder / "sizes.csv")))
    sections["settings"] = _settings_section(records, asked)
    order = [name for name in ORDER if sections[name]]
    links = "".join(f'<a href="#{name}">{NAMES[name]}</a>' for name in order)
    return PAGE.substitute(
        version=escape(__version__),
        style=STYLE,
        summary=_summary(records, missing, asked),
        links=links,
        sections="\n".join(sections[name] for name in order),
        written=datetime.now(UTC).strftime("%d %B %Y"),
    )


def _summary(records: Sequence[Mapping[str, Any]], missing: Sequence[str], asked: int | None) -> str:
    full = [r for r in records if r["kind"] == "full"]
    seeds = sorted({r["seed"] for r in full})
    text = f"{len(full)} cells finished" + (f", seeds {', '.join(map(str, seeds))}. " if seeds else ". ")
    if asked is not None:
        text += f"A short trial: {asked:,} iterations a cell instead of the paper's. "
    if missing:
        text += f"Files missing: {', '.join(STUDIES[name].title for name in missing)}. "
    return escape(text)


# ---- tables ----


def _table_section(name: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    below = "".join(f'<p class="note">{text}</p>' for text in _notes(name, rows))
    return (
        f'<section id="{name}"><h2>{escape(TITLES[name])}</h2><p>{WORDS[name]}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(TITLES[name])}">'
        f"<table>{_head(_columns(name))}{_body(name, rows)}</table></div>{below}</section>"
    )


def _columns(name: str) -> Sequence[Column]:
    """Without the dataset if it heads a group of rows: narrow screens have no space for two names."""
    columns = COLUMNS[name]
    return columns[1:] if columns[1].key == "method" else columns


def _notes(name: str, rows: Sequence[Row]) -> list[str]:
    """Notes on the rows; how to get missing files is said once, below the table of the data."""
    notes = {STUDIES[row["dataset"]].title: str(row["note"]) for row in rows if row.get("note")}
    waiting = [title for title, note in notes.items() if note.startswith(BRING)]
    if name == "table1" or not waiting:
        return [f"{escape(title)}: {escape(note)}" for title, note in notes.items()]
    return [f'{escape(" and ".join(waiting))}: files missing; <a href="#table1">how to bring them</a>.']


def _head(columns: Sequence[Column]) -> str:
    groups = "".join(
        f'<th colspan="{n}" scope="colgroup">{escape(group)}</th>' if group else "<td></td>" * n
        for group, n in ((group, len(list(same))) for group, same in groupby(columns, key=lambda c: c.group))
    )
    cells = "".join(f'<th scope="col"{_class(columns, i)}>{escape(c.title)}</th>' for i, c in enumerate(columns))
    return f'<thead><tr class="groups">{groups}</tr><tr>{cells}</tr></thead>'


def _class(columns: Sequence[Column], i: int, *, body: bool = False) -> str:
    column = columns[i]
    names = []
    if column.key in ("dataset", "method", "data"):
        names.append("name" + (" pin" if i == 0 else ""))
    if column.group and (i == 0 or columns[i - 1].group != column.group):
        names.append("start")
    if body and column.title == "ours":
        names.append("ours")
    if body and column.difference:
        names.append("difference")
    return f' class="{" ".join(names)}"' if names else ""


def _body(name: str, rows: Sequence[Row]) -> str:
    """Rows, in a group under its name for each dataset where there are several rows of one."""
    columns = _columns(name)
    if columns is COLUMNS[name]:
        return f"<tbody>{''.join(_row(columns, row) for row in rows)}</tbody>"
    groups = []
    for dataset, same in groupby(rows, key=lambda row: row["dataset"]):
        title = f"<span>{escape(STUDIES[dataset].title)}</span>"
        heading = f'<tr class="heading"><th colspan="{len(columns)}" scope="rowgroup">{title}</th></tr>'
        groups.append(f"<tbody>{heading}{''.join(_row(columns, row) for row in same)}</tbody>")
    return "".join(groups)


def _row(columns: Sequence[Column], row: Row) -> str:
    name, *values = (escape(column.text(row)) for column in columns)
    cells = "".join(f"<td{_class(columns, i, body=True)}>{text}</td>" for i, text in enumerate(values, 1))
    return f'<tr><th scope="row"{_class(columns, 0)}>{name}</th>{cells}</tr>'


# ---- figures ----


def _panels(panels: Sequence[figure.Panel], what: str) -> str:
    drawn = (f"<figure>{figure.svg(panel, escape(f'{panel.title}: {what}'))}</figure>" for panel in panels)
    return f'<div class="panels">{"".join(drawn)}</div>'


def _legend(methods: Sequence[str], *extra: tuple[str, str]) -> str:
    entries = [
        f'<li><span style="color:var(--{color})"><i></i></span>{escape(title)}</li>'
        for color, title in figure.legend_entries(methods)
    ]
    entries += [f'<li><i class="{kind}"></i>{escape(title)}</li>' for kind, title in extra]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _figure2_section(panels: Sequence[figure.Panel]) -> str:
    legend = _legend(("softmax", "one-vs-each"), ("dashed", "log likelihood of the exact softmax"))
    return (
        '<section id="figure2"><h2>Figure 2: the bound against wall-clock time</h2><p>Moving average over 100 '
        "iterations of the bound estimated from the sampled classes, mean over the minibatch, first seed. The steep "
        f"start is cut off.</p>{legend}{_panels(panels, 'bound against wall-clock time')}</section>"
    )


def _curves_section(panels: Sequence[figure.Panel]) -> str:
    if not panels:
        return ""
    methods = [line.method for panel in panels for line in panel.lines]
    legend = _legend(methods, ("ring", "the paper's final value"))
    return (
        '<section id="curves"><h2>Learning curves: test log likelihood while training</h2><p>A line for each seed; '
        f"exact integrals, no floor.</p>{legend}{_panels(panels, 'test log likelihood while training')}</section>"
    )


def _sizes_section(panels: Sequence[figure.Panel]) -> str:
    if not panels:
        return ""
    with_candidates = any("debian" in panel.title for panel in panels)
    other = " On debian-deps they are shared by the minibatch, and each row has 32 more." if with_candidates else ""
    methods = [line.method for panel in panels for line in panel.lines]
    legend = _legend(methods, ("dashed", "exact softmax, at its end"))
    return (
        '<section id="sizes"><h2>Beyond the paper: against the number of sampled classes, and against time</h2><p>'
        "Softmax with the default optimiser and prior, the same for all; one seed. By sampled classes: where a fit "
        "ends. By seconds, of one thread: the way there, with the largest number of classes. Classes are drawn "
        f"uniformly for each row.{other}</p>{legend}{_panels(panels, 'test log likelihood')}</section>"
    )


# ---- settings ----


def _settings_section(records: Sequence[Mapping[str, Any]], asked: int | None) -> str:
    by_method = {r["method"]: r["settings"] for r in records}
    items = [
        (METHODS[m].title, f"{by_method[m]['optimizer']}; local step: {by_method[m]['local_step']}")
        for m in METHODS
        if m in by_method
    ]
    if records:
        newest = max(records, key=lambda r: r["finished"])
        versions = ", ".join(f"{name} {value}" for name, value in newest["versions"].items())
        machines = dict.fromkeys(
            f"{r['machine']['processor']}, {r['machine']['cores']} cores, {r['machine'].get('memory_gb', '?')} GB"
            for r in records
        )
        at_once = max(r["cells_at_once"] for r in records)
        same = newest["settings"]
        items += [
            ("preset", f"{same['preset']}; first weights and biases: N(0, {same['initial_scale'][0]:g}²) and "
             f"N(0, {same['initial_scale'][1]:g}²); {same['dtype']}"),
            ("versions", versions),
            ("machine", "; ".join(machines)),
            ("cells at once", f"up to {at_once}, one thread each"),
        ]  # fmt: skip
    blocks = [f"<dl><dt>{escape(name)}</dt><dd>{escape(text)}</dd></dl>" for name, text in items]
    seeds = ",".join(str(seed) for seed in sorted({r["seed"] for r in records})) or "0"
    command = f"augment-reduce reproduce all --seeds {seeds}" + (f" --iterations {asked}" if asked else "")
    return (
        '<section id="settings"><h2>Settings and versions</h2><p>Minibatch sizes and iterations are in the table '
        f"of the data. To run it all again:</p><pre><code>{escape(command)}</code></pre>"
        f'<div class="settings">{"".join(blocks)}</div></section>'
    )
