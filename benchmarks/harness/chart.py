"""A bar per method, with its interval."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from megakv.tracking.files import write_whole

from .statistics import Interval

INK, FAINT = "#22282f", "#8a929b"
PEER, OWN = "#9aa7b5", "#2f6db3"
WIDTH_IN, LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, BAR_IN = 8.0, 1.2, 0.25, 0.75, 0.6, 0.45


def draw_bars(
    path: str | Path, bars: Sequence[tuple[str, Interval, bool]], *, title: str, subtitle: str, unit: str
) -> None:
    """Draw horizontal bars as a PNG."""
    # Only rank 0 draws; importing matplotlib on every rank costs each of them half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height_in = BAR_IN * len(bars) + TOP_IN + BOTTOM_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (LEFT_IN / WIDTH_IN, BOTTOM_IN / height_in, 1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN, BAR_IN * len(bars) / height_in)
    )
    rows = range(len(bars))
    values = [value.value for _, value, _ in bars]
    errors = [[value.value - value.low for _, value, _ in bars], [value.high - value.value for _, value, _ in bars]]
    axes.barh(rows, values, height=0.62, color=[OWN if own else PEER for _, _, own in bars], zorder=2)
    axes.errorbar(values, rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3.5, zorder=3)
    for row, (_, value, _) in enumerate(bars):
        axes.annotate(
            f"{value.value:.3g}", (value.high, row), (7, 0), textcoords="offset points", va="center", fontsize=9,
            color=INK,
        )  # fmt: skip
    axes.set_yticks(rows, [label for label, _, _ in bars], fontsize=9.5, color=INK)
    axes.set_ylim(len(bars) - 0.45, -0.55)
    lowest, highest = min(value.low for _, value, _ in bars), max(value.high for _, value, _ in bars)
    axes.set_xlim(min(0, 1.12 * lowest), max(0, 1.12 * highest) or 1)
    axes.set_xlabel(unit, fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    axes.grid(axis="x", color="#dde1e6", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    left = 0.15 / WIDTH_IN
    figure.text(left, 1 - 0.14 / height_in, title, fontsize=12.5, weight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.43 / height_in, subtitle, fontsize=8.5, color=FAINT, va="top")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
