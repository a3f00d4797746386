"""Figures: the bound and the exact log likelihood over time; reliability diagrams.

Lines are labelled in their own colours, at their right ends or above, instead of a legend. No display is needed and
matplotlib's global state is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .metrics import Reliability

INK, FAINT, GRID = "#222222", "#6f6f6f", "#e6e6e6"
# Distinguishable by the colour-blind.
BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6db3", "#d9731a", "#2e8b57", "#7b52ab", "#c0392b"
FONTS = ["DejaVu Sans"]
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Curve:
    """One line: name, data, style."""

    name: str
    x: npt.ArrayLike
    y: npt.ArrayLike
    color: str = BLUE
    style: str = "-"
    width: float = 2.0
    marker: str = ""

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """Its finite points."""
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        finite = np.isfinite(x) & np.isfinite(y)
        return x[finite], y[finite]


def draw_curves(
    path: Path,
    curves: Sequence[Curve],
    *,
    title: str,
    subtitle: str = "",
    x_label: str = "seconds of training",
    y_label: str = "log likelihood of an example (nats)",
    shade: tuple[str, str] | None = None,
    y_quantile: float = 0.0,
) -> None:
    """Draw the curves into a file (png, svg or pdf by its suffix).

    - `shade`: the names of two curves on the same x; the area between them is tinted (the bound gap);
    - `y_quantile`: crop this share of the lowest points, so that a steep start does not flatten the rest.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.8), dpi=160, facecolor="white")
    axes = figure.add_axes((0.085, 0.125, 0.615, 0.70))
    measured = {curve.name: curve.measured() for curve in curves}
    if shade is not None:
        (x, upper), (_, lower) = measured[shade[0]], measured[shade[1]]
        axes.fill_between(x, lower, upper, color=BLUE, alpha=0.13, linewidth=0)
    for curve in curves:
        x, y = measured[curve.name]
        axes.plot(
            x, y, curve.style, color=curve.color, linewidth=curve.width, marker=curve.marker, markersize=4.5,
            solid_capstyle="round", markeredgewidth=0, clip_on=True,
        )  # fmt: skip
    _set_limits(axes, list(measured.values()), y_quantile)
    _name_lines(axes, curves, measured)
    _plain(axes, x_label, y_label)
    figure.text(0.085, 0.935, title, fontsize=13, fontweight="bold", color=INK, family=FONTS)
    figure.text(0.085, 0.878, subtitle, fontsize=9.5, color=FAINT, family=FONTS)
    figure.savefig(path)


def _set_limits(axes: Any, points: Sequence[tuple[np.ndarray, np.ndarray]], y_quantile: float) -> None:
    filled = [(x, y) for x, y in points if len(x)]
    if not filled:
        return
    right = max(x.max() for x, _ in filled)
    low = min(float(np.quantile(y, y_quantile)) for _, y in filled)
    high = max(y.max() for _, y in filled)
    room = 0.06 * (high - low) or 1.0
    axes.set_xlim(0.0, right or 1.0)
    axes.set_ylim(low - room, high + room)


def _name_lines(axes: Any, curves: Sequence[Curve], measured: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Name and last value beside the right end of every line, moved apart where they would overlap."""
    shown = [curve for curve in curves if len(measured[curve.name][0])]
    ends = [float(measured[curve.name][1][-1]) for curve in shown]
    low, high = axes.get_ylim()
    half = 0.07 * (high - low)  # of a label's height: none above the axes, where the title is
    places = spread(ends, apart=0.15 * (high - low), low=low + half, high=high - half)
    right = axes.get_xlim()[1]
    for curve, end, place in zip(shown, ends, places, strict=True):
        axes.annotate(
            f"{curve.name}\n{_minus(end)}",
            xy=(measured[curve.name][0][-1], end),
            xytext=(right * 1.035, place),
            color=curve.color,
            fontsize=9,
            va="center",
            family=FONTS,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": curve.color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3,
                "relpos": (0.0, 0.5),  # from the left edge: from the middle it would cross a label above
            },
        )  # fmt: skip


def spread(values: Sequence[float], *, apart: float, low: float, high: float) -> list[float]:
    """Positions for labels, at least `apart` from each other, near their values and inside [low, high] if possible.

    Neighbours that are too close form a group, evenly spaced around the mean of its values.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups = [[i] for i in order]
    while True:
        spans = [_span(group, values, apart, low, high) for group in groups]
        clash = next((i for i in range(len(groups) - 1) if spans[i][-1] + apart > spans[i + 1][0] + 1e-12), None)
        if clash is None:
            break
        groups[clash : clash + 2] = [groups[clash] + groups[clash + 1]]
    placed = dict(zip([i for group in groups for i in group], [p for span in spans for p in span], strict=True))
    return [placed[i] for i in range(len(values))]


def _span(group: Sequence[int], values: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    extent = apart * (len(group) - 1)
    middle = sum(values[i] for i in group) / len(group)
    first = min(max(middle - extent / 2, low), max(low, high - extent))
    return [first + apart * i for i in range(len(group))]


# ---- reliability ----


@dataclass(frozen=True)
class Reliable:
    """One model of a reliability diagram: name, bins, style."""

    name: str
    bins: Reliability
    color: str = BLUE
    style: str = "-"


def draw_reliability(
    path: Path, panels: Mapping[str, Sequence[Reliable]], *, title: str, subtitle: str = "", format: str | None = None
) -> None:
    """Accuracy against confidence, bin by bin, and how many rows each bin has below; a panel for each set of data.

    On the dashed diagonal a model is calibrated; below it is overconfident, above underconfident. The area of a dot is
    its bin's share of the rows. The numbers beside the names are expected calibration errors.
    """
    from matplotlib.figure import Figure

    n_names = max((len(models) for models in panels.values()), default=0)
    wide, header = 0.55 + 3.5 * len(panels), 1.05 + 0.17 * n_names  # inches
    tall = header + 2.9 + 1.55
    figure = Figure(figsize=(wide, tall), dpi=160, facecolor="white")
    for i, (name, models) in enumerate(panels.items()):
        left = 0.6 + 3.5 * i
        main = figure.add_axes((left / wide, 1.55 / tall, 2.8 / wide, 2.8 / tall))
        below = figure.add_axes((left / wide, 0.5 / tall, 2.8 / wide, 0.85 / tall))
        _draw_bins(main, below, models)
        _plain(main, "", "share that is right" if i == 0 else "")
        _plain(below, "confidence of the first guess", "rows" if i == 0 else "")
        main.tick_params(labelbottom=False)
        figure.text(left / wide, 1 - 0.86 / tall, name, fontsize=10, fontweight="bold", color=INK, family=FONTS)
        for j, model in enumerate(models):
            place = 1 - (1.05 + 0.17 * j) / tall
            look: dict[str, Any] = {"fontsize": 8.5, "color": model.color, "family": FONTS}
            figure.text((left + 0.36) / wide, place, model.name, **look)
            figure.add_artist(_sample(model, (left / wide, (left + 0.26) / wide), place + 0.045 / tall))
            figure.text((left + 2.8) / wide, place, f"{model.bins.error:.3f}", ha="right", **look)
    figure.text(0.6 / wide, 1 - 0.32 / tall, title, fontsize=13, fontweight="bold", color=INK, family=FONTS)
    figure.text(0.6 / wide, 1 - 0.55 / tall, subtitle, fontsize=9, color=FAINT, family=FONTS)
    figure.savefig(path, format=format)


def _draw_bins(main: Any, below: Any, models: Sequence[Reliable]) -> None:
    main.plot([0, 1], [0, 1], "--", color=FAINT, linewidth=0.9)
    for model in models:
        bins = model.bins
        filled, look = bins.count > 0, {"color": model.color, "linestyle": model.style}
        sure, right = bins.confidence[filled], bins.accuracy[filled]
        main.plot(sure, right, linewidth=1.1, **look)
        area = 4.0 + 160.0 * bins.weight[filled] / bins.weight.sum()
        main.scatter(sure, right, s=area, color=model.color, alpha=0.55, linewidths=0)
        below.stairs(bins.count, bins.edges, linewidth=1.2, **look)
    main.set_xlim(0.0, 1.0)
    main.set_ylim(0.0, 1.0)
    below.set_xlim(0.0, 1.0)
    below.set_ylim(bottom=0.0)
    below.yaxis.set_major_locator(_few_whole_numbers())


def _sample(model: Reliable, x: tuple[float, float], y: float) -> Any:
    """A short piece of the model's line, before its name."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"color": model.color, "linestyle": model.style, "linewidth": 1.6}
    return Line2D(x, (y, y), **look)


def _few_whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=3, integer=True)


# ---- what the pictures share ----


def _plain(axes: Any, x_label: str, y_label: str) -> None:
    """Two thin axes, faint horizontal lines, nothing else."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    axes.set_xlabel(x_label, fontsize=9.5, color=FAINT, family=FONTS)
    axes.set_ylabel(y_label, fontsize=9.5, color=FAINT, family=FONTS)


def _minus(value: float) -> str:
    """Two decimals, with a real minus sign."""
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
