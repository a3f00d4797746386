"""Figure 2 (the bound against wall-clock time) and the learning curves: png and pdf for papers, svg for the page.

A panel says what is drawn; `draw` draws it on any matplotlib axes, with no global state and no display.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..reports.figures import BLUE, FAINT, GREEN, GRID, INK, ORANGE, PURPLE, RED
from .evaluate import moving_average
from .settings import METHODS, REAL, STUDIES, TABLE3
from .store import Store

COLORS = {
    "softmax": BLUE, "one-vs-each": ORANGE, "exact": INK, "sampled-softmax": GREEN, "probit": PURPLE, "logistic": RED,
}  # fmt: skip
STYLES = {"one-vs-each": (0, (6, 2)), "sampled-softmax": (0, (2, 1.5)), "probit": (0, (8, 2, 2, 2))}
MOST_POINTS = 400  # enough points for a line of a small panel
SVG_NAMES = {INK: "ink", FAINT: "faint", GRID: "grid", **{COLORS[m]: f"c-{m}" for m in COLORS if m != "exact"}}


@dataclass(frozen=True)
class Line:
    method: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One dataset. `level`: a horizontal line; `targets`: the paper's values, at the right; `message`: if empty."""

    title: str
    lines: tuple[Line, ...] = ()
    x_label: str = ""
    y_label: str = ""
    level: float | None = None
    targets: tuple[tuple[str, float], ...] = ()
    message: str = ""
    log_x: bool = False  # up to so many points are drawn as markers


def bound_panels(store: Store, records: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> list[Panel]:
    """Figure 2: moving average of the sampled bound of A&R and one-vs-each, and the exact training log likelihood."""
    panels = []
    for name in REAL:
        title, cells = STUDIES[name].title, _first_seed(records, name)
        shown = [method for method in ("one-vs-each", "softmax") if method in cells]
        if not shown:
            panels.append(Panel(title, message=_why_empty(name, missing)))
            continue
        curves = {method: store.curves(str(cells[method]["key"])) for method in shown}
        longest = max(float(c["seconds"][-1]) for c in curves.values())
        unit, size = ("hours", 3600.0) if longest > 5400 else ("minutes", 60.0) if longest > 180 else ("seconds", 1.0)
        lines = tuple(
            _thinned(Line(method, c["seconds"] / size, moving_average(c["iteration"], c["bound"])))
            for method, c in curves.items()
        )
        exact = cells.get("exact") if name in ("mnist", "bibtex") else None
        level = None if exact is None else exact["metrics"].get("train_log_likelihood")
        panels.append(Panel(title, lines, f"{unit} of training", "bound, nats a row", level))
    return panels


def learning_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Test log likelihood while training, a line for each seed, and the paper's final values."""
    panels = []
    for name in REAL:
        cells = [r for r in records if r["dataset"] == name and r["kind"] == "full"]
        lines = tuple(
            Line(r["method"], *np.array([(p["iteration"], p["test_log_likelihood"]) for p in r["looks"]]).T)
            for r in cells
        )
        if lines:
            targets = tuple(
                (m, TABLE3[name][m][0]) for m in dict.fromkeys(r["method"] for r in cells) if m in TABLE3[name]
            )
            panels.append(Panel(STUDIES[name].title, lines, "iteration", "test log likelihood", targets=targets))
    return panels


def _first_seed(records: Sequence[Mapping[str, Any]], dataset: str) -> dict[str, Mapping[str, Any]]:
    """By method, the full cell with the lowest seed."""
    cells = [r for r in records if r["dataset"] == dataset and r["kind"] == "full"]
    return {r["method"]: r for r in sorted(cells, key=lambda r: -r["seed"])}


def _why_empty(name: str, missing: Sequence[str]) -> str:
    if name in missing:
        return f"Bring the files:\n--data FOLDER with {name}/,\nthen run this again."
    return f"Not run yet:\naugment-reduce reproduce figure2\n--dataset {name}"


def _thinned(line: Line) -> Line:
    if len(line.x) <= MOST_POINTS:
        return line
    keep = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).round().astype(int))
    return Line(line.method, line.x[keep], line.y[keep])


# ---- drawing ----


def draw(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    if panel.message:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, panel.message, ha="center", va="center", fontsize=9, color=FAINT, transform=axes.transAxes)
        return
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=3)
    if not panel.log_x:
        axes.locator_params(nbins=5)
    axes.set_xlabel(panel.x_label, fontsize=9, color=FAINT)
    axes.set_ylabel(panel.y_label, fontsize=9, color=FAINT)
    for line in panel.lines:
        axes.plot(
            line.x, line.y, color=COLORS[line.method], linestyle=STYLES.get(line.method, "-"), linewidth=1.7,
            solid_capstyle="round", marker="o" if panel.log_x else None, markersize=3,
        )  # fmt: skip
    if panel.level is not None:
        axes.axhline(panel.level, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    right = max((float(line.x[-1]) for line in panel.lines), default=1.0)
    for method, value in panel.targets:
        axes.plot([right], [value], "o", color=COLORS[method], fillstyle="none", markersize=6, clip_on=False)
    if panel.log_x:
        _few_ticks(axes)
    else:
        axes.set_xlim(0.0, right * (1.03 if panel.targets else 1.0))
    axes.set_ylim(*_limits(panel))
    if left_out := far_below(panel):
        words = "; ".join(f"{METHODS[x.method].title}: {x.y.min():.3g} to {x.y.max():.3g}, below" for x in left_out)
        axes.text(0.98, 0.03, words, ha="right", fontsize=8, color=FAINT, transform=axes.transAxes)
    if right >= 10_000 and not panel.log_x:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")


def _few_ticks(axes: Any) -> None:
    """Powers of ten, and beside them twice and five times those where there is less than two between."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 200 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _limits(panel: Panel) -> tuple[float, float]:
    """Limits that show each line from its first tenth on (without the steep start); all points if they are few."""
    left_out = far_below(panel)
    lines = [line for line in panel.lines if not any(line is other for other in left_out)]
    shown = [line.y if panel.log_x else line.y[line.x >= 0.1 * line.x[-1]] for line in lines]
    values = np.concatenate(
        [*shown, [value for _, value in panel.targets], [] if panel.level is None else [panel.level]]
    )
    values = values[np.isfinite(values)]
    if not len(values):
        return -1.0, 0.0
    low, high = float(values.min()), float(values.max())
    room = 0.07 * (high - low) or 0.5
    return low - room, high + room


def far_below(panel: Panel) -> list[Line]:
    """Lines of few points that would squeeze the others (three times their spread below); given in words instead."""
    found = []
    for line in panel.lines if panel.log_x else ():
        level = [] if panel.level is None else [panel.level]
        rest = np.concatenate([level, *(other.y for other in panel.lines if other is not line)])
        if len(rest) > 2 and line.y.max() < rest.min() - 3.0 * (rest.max() - rest.min()):
            found.append(line)
    return found


def save_figure2(panels: Sequence[Panel], path: Path, format: str) -> None:
    """All panels on one sheet (format "png" or "pdf"), two rows of three with the legend in the last place."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.8), dpi=200, facecolor="white", layout="constrained")
    places = figure.subplots(2, 3).flatten()
    for axes, panel in zip(places, panels, strict=False):
        draw(axes, panel)
    legend = places[len(panels)]
    legend.set_axis_off()
    drawn = [
        legend.plot([], [], color=COLORS["softmax"], linewidth=1.9, label="A&R softmax, bound")[0],
        legend.plot([], [], color=COLORS["one-vs-each"], linestyle=STYLES["one-vs-each"], label="one-vs-each, bound")[
            0
        ],
        legend.plot([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1.1, label="exact softmax, log likelihood")[0],
    ]
    legend.legend(handles=drawn, loc="center left", frameon=False, fontsize=10, labelcolor=INK)
    figure.savefig(path, format=format)


def svg(panel: Panel, label: str) -> str:
    """One panel as an svg element for a page, with the page's font and its colours by name."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.subplots()
    axes.patch.set_alpha(0.0)
    draw(axes, panel)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1var(--font)", text)
    for color, name in SVG_NAMES.items():
        text = text.replace(color, f"var(--{name})")
    width, height = (float(v) for v in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    head = f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + text[text.index(">") + 1 :]


def legend_entries(methods: Sequence[str]) -> list[tuple[str, str]]:
    """(name of the colour on the page, title) of the methods shown."""
    return [(SVG_NAMES[COLORS[m]], METHODS[m].title) for m in METHODS if m in methods]
