"""The paper's Figures 3, 4 and 5 in form: gains, busy rates, and busy rates by copied heads."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.tracking.files import write_whole

INK, FAINT = "#22282f", "#8a929b"
COLORS = ("#9aa7b5", "#2f6db3", "#c7772e", "#4f8f4f", "#8d5fa8")


def draw_figures(path: Path, cells: Mapping[str, Mapping[str, Mapping[str, Any]]], kinds: Sequence[str]) -> Path:
    """Draw what was measured as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * 3, 3.2 * len(cells)), dpi=130, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(len(cells), 3, squeeze=False)
    for row, (degree, budgets) in zip(grid, cells.items(), strict=True):
        places = range(len(budgets))
        lines = {name: [cell["speedup"].get(name, {}).get("value") for cell in budgets.values()] for name in kinds}
        _lines(row[0], places, lines, f"TP {degree}: gain over contiguous heads (Fig. 3)")
        names = ["contiguous", "nodp", *kinds[-1:]]
        busy = {name: [cell["busy"].get(name) for cell in budgets.values()] for name in names}
        _lines(row[1], places, busy, f"TP {degree}: busy rate (Fig. 4)")
        copied = [f"dp{number}" for number in range(1, 5)]
        by_copies = {f"{kept}": [cell["busy"].get(name) for name in copied] for kept, cell in budgets.items()}
        _lines(row[2], range(len(copied)), by_copies, f"TP {degree}: busy rate by CH (Fig. 5)")
        for axes in row[:2]:
            axes.set_xticks(places, list(budgets), fontsize=8)
            axes.set_xlabel("kept tokens per head", fontsize=8, color=INK)
        row[2].set_xticks(range(len(copied)), [name[2:] for name in copied], fontsize=8)
        row[2].set_xlabel("copied heads; a line per budget", fontsize=8, color=INK)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
    return path


def _lines(axes: Any, places: range, lines: Mapping[str, Sequence[float | None]], title: str) -> None:
    for (name, values), color in zip(lines.items(), COLORS, strict=False):
        known = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", ms=4, lw=1.4, color=color, label=name)
    axes.set_title(title, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.grid(axis="y", color="#dde1e6", linewidth=0.5)
    axes.legend(fontsize=7, frameon=False)
