"""Figures of the run report: each takes plain rows of numbers and returns a drawn figure, or None when nothing was recorded.

Text and axes are drawn in placeholder colours which `to_svg` turns into the page's own (`currentColor`), so that one drawing
reads on light and dark ground; the PNG files have a white ground.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, FAINT = "#1b1f24", "#b9c0c8"
COLOURS = ("#3b7dd8", "#d9772b", "#2e9d6a", "#b5539c", "#8a7a2f", "#4aa3b5", "#c2483f", "#7a6fd0")
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.45,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "svg.fonttype": "none",
    "lines.linewidth": 1.6,
    "text.parse_math": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished figure: inline SVG for the page, PNG for reuse."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure: metric key, label, and the key of its standard deviation if there is a band."""

    key: str
    label: str
    std_key: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: what is drawn and how its y axis is to be read."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    log: bool = False
    level: float | None = None
    level_label: str = ""
    zero: bool = False


def number(value: Any) -> float | None:
    """A finite number, else None (truth values count as none)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Steps and values at which a metric was measured; missing and non-finite values are gaps, not zeros.

    Example:
        >>> series([{"step": 1, "a": 2.0}, {"step": 2, "a": None}], "a")
        ([1.0], [2.0])
    """
    pairs = [(number(row.get("step")), number(row.get(key))) for row in rows]
    kept = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours in a centred window, cut at the ends.

    Example:
        >>> moving_mean([0.0, 3.0, 6.0], 3)
        [1.5, 3.0, 4.5]
    """
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw(
    name: str, title: str, caption: str, plot: Callable[[Figure], None], *, height: float, width: float = 9.6
) -> Drawing:
    """Draw on a fresh figure (no global pyplot state) and render it twice.

    Args:
        name: File stem.
        title: Heading in the page.
        caption: What is shown and how to read it.
        plot: Fills the figure.
        height: Inches.
        width: Inches.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        figure.savefig(png, format="png", dpi=130, facecolor="white")
    return Drawing(name, title, caption, to_svg(svg.getvalue(), title), png.getvalue())


def to_svg(text: str, title: str) -> str:
    """matplotlib's SVG as a piece of HTML: no XML prologue, no outside address, placeholder colours as the page's own."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = body.replace(INK, "currentColor").replace(FAINT, "var(--line)")
    # Viewers without DejaVu Sans fall back to their own sans-serif, which can run wider than what was laid out.
    body = re.sub(r"font: ([^;\"]*)'DejaVu Sans'[^;\"]*", r"font: \1'DejaVu Sans', Verdana, sans-serif", body)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(
        r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{label}" viewBox="\1">', body, count=1
    )


def line_panels(
    name: str, title: str, caption: str, rows: Rows, panels: Sequence[Panel], x_label: str = "update"
) -> Drawing | None:
    """Small multiples of curves over steps, leaving out what was not recorded.

    Args:
        name: File stem.
        title: Heading.
        caption: Explanation.
        rows: Metric lines with ``step``.
        panels: The axes to draw.
        x_label: What a step is.

    Returns:
        The drawing; None when no panel has a value.
    """
    present = [panel for panel in panels if any(series(rows, curve.key)[1] for curve in panel.curves)]
    if not present:
        return None
    columns = 1 if len(present) == 1 else (2 if len(present) % 2 == 0 and len(present) % 3 else 3)
    lines = -(-len(present) // columns)

    def plot(figure: Figure) -> None:
        for index, panel in enumerate(present):
            axes = figure.add_subplot(lines, columns, index + 1)
            _draw_panel(axes, panel, rows)
            if len(present) > 1:  # a lone panel is named by the figure's heading
                axes.set_title(panel.title)
            if index >= len(present) - columns:
                axes.set_xlabel(x_label)

    return draw(name, title, caption, plot, height=(3.2 if columns == 1 else 2.15) * lines + 0.2)


def _draw_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    several = len(panel.curves) > 1
    for colour, curve in zip(COLOURS * 2, panel.curves, strict=False):
        steps, values = series(rows, curve.key)
        if not values:
            continue
        if curve.std_key:
            spread = dict(zip(*series(rows, curve.std_key), strict=True))
            banded = [(x, y, spread[x]) for x, y in zip(steps, values, strict=True) if x in spread]
            if banded:
                axes.fill_between(
                    [x for x, _, _ in banded],
                    [y - s for _, y, s in banded],
                    [y + s for _, y, s in banded],
                    color=colour,
                    alpha=0.16,
                    linewidth=0,
                )
        smooth = len(values) >= 25
        axes.plot(
            steps,
            values,
            color=colour,
            marker="o" if len(values) < 25 else None,
            markersize=3,
            alpha=0.4 if smooth else 1.0,
            linewidth=1.0 if smooth else 1.6,
            label=None if smooth else curve.label,
        )
        if smooth:
            axes.plot(steps, moving_mean(values, max(5, len(values) // 12)), color=colour, label=curve.label)
    if panel.level is not None:
        axes.axhline(panel.level, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=panel.level_label or None)
    if panel.log:
        axes.set_yscale("log")
    elif panel.zero:
        top = axes.dataLim.y1
        axes.set_ylim(0.0, 1.1 * top if top > 0 else 1.0)
    axes.set_ylabel(panel.unit)
    _whole_steps(axes)
    if several or panel.level_label:
        axes.legend(loc="best")


def _whole_steps(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 0.5, high + 0.5)
        axes.set_xticks([round((low + high) / 2)])


def stacked_times(
    name: str, title: str, caption: str, rows: Rows, parts: Sequence[Curve], total_key: str
) -> Drawing | None:
    """Seconds per update by part, stacked; what the parts leave of the total is drawn as "other"."""
    taken = [part for part in parts if series(rows, part.key)[1]]
    if not taken:
        return None
    steps = [x for x in (number(row.get("step")) for row in rows) if x is not None]
    table = [
        [number(row.get(part.key)) or 0.0 for row in rows if number(row.get("step")) is not None] for part in taken
    ]
    totals = [number(row.get(total_key)) for row in rows if number(row.get("step")) is not None]
    other = [
        max(0.0, (total or 0.0) - sum(column)) for total, column in zip(totals, zip(*table, strict=True), strict=True)
    ]

    def plot(figure: Figure) -> None:
        axes = figure.add_subplot()
        bottom = [0.0] * len(steps)
        labelled = [*((part.label, heights) for part, heights in zip(taken, table, strict=True)), ("other", other)]
        for colour, (label, heights) in zip(COLOURS, labelled, strict=False):
            if not any(heights):
                continue
            shade = FAINT if label == "other" else colour
            axes.bar(steps, heights, bottom=bottom, color=shade, label=label, width=0.85, linewidth=0)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.set_ylabel("seconds")
        axes.set_xlabel("update")
        axes.grid(axis="x", visible=False)
        _whole_steps(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(name, title, caption, plot, height=3.2)


Interval = tuple[str, float, float | None, float | None]


def interval_bars(
    name: str, title: str, caption: str, groups: Sequence[tuple[str, Sequence[Interval]]], unit: str
) -> Drawing | None:
    """Horizontal dots with intervals, one colour a group.

    Args:
        name: File stem.
        title: Heading.
        caption: Explanation.
        groups: Per group its label and rows (label, value, low, high); low and high may be None.
        unit: Label of the value axis.
    """
    groups = [(label, rows) for label, rows in groups if rows]
    if not groups:
        return None
    labels = list(dict.fromkeys(row[0] for _, rows in groups for row in rows))

    def plot(figure: Figure) -> None:
        axes = figure.add_subplot()
        offset = 0.62 / max(1, len(groups))
        for index, (colour, (label, rows)) in enumerate(zip(COLOURS * 4, groups, strict=False)):
            shift = (index - (len(groups) - 1) / 2) * offset
            for place, (row_label, value, low, high) in enumerate(rows):
                y = labels.index(row_label) + shift
                if low is not None and high is not None:
                    axes.plot([low, high], [y, y], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="round")
                axes.plot([value], [y], "o", color=colour, markersize=5, label=label if place == 0 else None)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        axes.margins(y=0.12)
        if len(groups) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(name, title, caption, plot, height=0.8 + len(labels) * (0.24 + 0.14 * len(groups)))
