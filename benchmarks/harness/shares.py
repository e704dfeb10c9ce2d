"""Parts of a whole as stacked bars: who has how much of a prompt."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from megakv.tracking.files import write_whole

from .chart import BAR_IN, BOTTOM_IN, FAINT, INK, LEFT_IN, RIGHT_IN, TOP_IN, WIDTH_IN
from .lines import COLOURS

LEAST_LABELLED = 0.04
"""Narrower parts have no room for their number."""


def draw_shares(
    path: str | Path, bars: Sequence[tuple[str, Sequence[int]]], *, title: str, subtitle: str, unit: str
) -> None:
    """Draw the shares of each bar's whole as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height_in = BAR_IN * len(bars) + TOP_IN + BOTTOM_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (LEFT_IN / WIDTH_IN, BOTTOM_IN / height_in, 1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN, BAR_IN * len(bars) / height_in)
    )
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for index, part in enumerate(parts):
            share = part / sum(parts)
            axes.barh(row, share, left=left, height=0.62, color=COLOURS[index % len(COLOURS)], edgecolor="white")
            if share >= LEAST_LABELLED:
                axes.text(left + share / 2, row, f"{part:,}", ha="center", va="center", fontsize=8, color="white")
            left += share
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=9.5, color=INK)
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_xlim(0, 1)
    axes.set_xlabel(unit, fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    left_edge = 0.15 / WIDTH_IN
    figure.text(left_edge, 1 - 0.14 / height_in, title, fontsize=12.5, weight="bold", color=INK, va="top")
    figure.text(left_edge, 1 - 0.43 / height_in, subtitle, fontsize=8.5, color=FAINT, va="top")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
