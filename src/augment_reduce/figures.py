"""Pictures of training: the bound next to the exact log likelihood, over time.

Lines carry their names at their right ends, in their own colours, instead of a legend. Nothing here touches
matplotlib's global state, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INK, FAINT, GRID = "#222222", "#6f6f6f", "#e6e6e6"
BLUE, ORANGE, GREEN, PURPLE, RED = (
    "#2f6db3",
    "#d9731a",
    "#2e8b57",
    "#7b52ab",
    "#c0392b",
)  # told apart by the colour-blind
FONTS = ["DejaVu Sans"]


@dataclass(frozen=True)
class Curve:
    """One line: what it is called, where it goes, how it looks."""

    name: str
    x: npt.ArrayLike
    y: npt.ArrayLike
    color: str = BLUE
    style: str = "-"
    width: float = 2.0
    marker: str = ""

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """Its points, without those never measured."""
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        finite = np.isfinite(x) & np.isfinite(y)
        return x[finite], y[finite]


def bound_and_exact(history: Mapping[str, npt.ArrayLike], over: str = "seconds") -> list[Curve]:
    """The two lines of a training history: the bound, and bound + gap, which is the exact log likelihood.

    Only where the gap was measured, so that the two can be compared point by point.
    """
    x, bound, gap = (np.asarray(history[name], float) for name in (over, "bound", "bound_gap"))
    both = np.isfinite(bound) & np.isfinite(gap)
    return [
        Curve("exact log likelihood, training", x[both], (bound + gap)[both], INK, width=1.6),
        Curve("bound, training", x[both], bound[both], BLUE),
    ]


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

    - `shade`: the names of two curves on the same x; the room between them is tinted (what the bound gives away);
    - `y_quantile`: leave this share of the lowest points out of view, so that a steep start does not flatten the rest.
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
    places = spread(ends, apart=0.15 * (high - low), low=low, high=high)
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
            arrowprops={"arrowstyle": "-", "color": curve.color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def spread(values: Sequence[float], *, apart: float, low: float, high: float) -> list[float]:
    """Places for labels at least `apart` from each other, near their values and inside [low, high] if there is room.

    Neighbours that are too close are joined into a group, which sits evenly around the mean of its values.
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
