"""Bars side by side in groups, or one on top of the other."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from megakv.tracking.files import write_whole

from .chart import FAINT, INK
from .lines import COLOURS, HEIGHT_IN, WIDTH_IN
from .statistics import Interval

FILLED = 0.8
"""Of the room of a group."""


def draw_groups(
    path: str | Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    *,
    title: str,
    subtitle: str,
    y_label: str,
    x_label: str = "",
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Draw vertical bars as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.13, 0.88, 0.66))
    width = FILLED / (1 if stacked else len(series))
    bottoms = [0.0] * len(groups)
    palette = colours or {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(series)}
    for index, (label, bars) in enumerate(series.items()):
        shift = 0.0 if stacked else (index + 0.5) * width - FILLED / 2
        known = [(place, bar) for place, bar in enumerate(bars) if bar is not None]
        places, values = [place + shift for place, _ in known], [bar.value for _, bar in known]
        axes.bar(
            places, values, width=0.92 * width, label=label, color=palette[label], zorder=2,
            bottom=[bottoms[place] for place, _ in known] if stacked else 0.0,
        )  # fmt: skip
        if stacked:
            for place, bar in known:
                bottoms[place] += bar.value
            continue
        errors = [[bar.value - bar.low for _, bar in known], [bar.high - bar.value for _, bar in known]]
        axes.errorbar(places, values, yerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2, zorder=3)
    axes.set_xticks(range(len(groups)), groups, fontsize=8.5, color=INK)
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="y", color="#dde1e6", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    figure.text(0.02, 0.975, title, fontsize=12.5, weight="bold", color=INK, va="top")
    figure.text(0.02, 0.915, subtitle, fontsize=8.5, color=FAINT, va="top")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
