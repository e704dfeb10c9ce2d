"""Lines with intervals."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megakv.tracking.files import write_whole

from .chart import FAINT, INK
from .statistics import Interval

COLOURS = ("#2f6db3", "#c8553d", "#3f8f5f", "#8a6bb8", "#b58a2a", "#4fa3a5", "#9aa7b5")
WIDTH_IN, HEIGHT_IN = 8.0, 4.6


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[Interval]
    hollow: Sequence[bool] | None = None  # Which points are drawn as rings
    dashed: bool = False
    joined: bool = True  # Whether there is a line between the points, and a dot at each
    marked: bool = True
    colour: str | None = None  # The next one in turn if None


def draw_lines(
    path: str | Path,
    lines: Sequence[Line],
    *,
    title: str,
    subtitle: str,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
    level: float | None = None,
    legend_above: bool = False,
) -> None:
    """Draw lines as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.13, 0.88, 0.63 if legend_above else 0.71))
    if level is not None:
        axes.axhline(level, color=FAINT, linewidth=1, zorder=1)
    for index, line in enumerate(lines):
        colour = line.colour or COLOURS[index % len(COLOURS)]
        values = [point.value for point in line.y]
        errors = [[point.value - point.low for point in line.y], [point.high - point.value for point in line.y]]
        style = "--" if line.dashed else "-"
        axes.errorbar(
            line.x, values, yerr=errors, color=colour, label=line.label, capsize=3, linewidth=1.6, elinewidth=1,
            linestyle=style if line.joined else "none", zorder=2,
        )  # fmt: skip
        hollow = line.hollow or [False] * len(values)
        for x, y, ring in zip(line.x, values, hollow, strict=True) if line.marked else ():
            axes.plot(x, y, "o", color=colour, markerfacecolor="white" if ring else colour, markersize=6, zorder=3)
    if log_x:
        axes.set_xscale("log")
        ticks = sorted({x for line in lines for x in line.x})
        axes.set_xticks(ticks, [f"{round(tick, 1):,g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if log_y:
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.tick_params(axis="y", which="minor", labelsize=7, colors=FAINT)
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(color="#dde1e6", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    if legend_above:
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    else:
        axes.legend(fontsize=8.5, frameon=False)
    figure.text(0.02, 0.975, title, fontsize=12.5, weight="bold", color=INK, va="top")
    figure.text(0.02, 0.915, subtitle, fontsize=8.5, color=FAINT, va="top")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
