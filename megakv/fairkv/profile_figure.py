"""A picture of a budget profile: what every KV head of every layer keeps."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megakv.fairkv.profile import BudgetProfile
from megakv.tracking.files import write_whole

_INK, _FAINT = "#22282f", "#8a929b"
_NARROWEST, _WIDEST, _TALLEST = 3.2, 16.0, 24.0
_CELL = 0.34


def draw_profile(profile: BudgetProfile, path: str | Path) -> None:
    """Draw the mean budgets as a heat map, layers by KV heads, as a PNG.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    table = np.array(profile.budgets)
    layers, heads = table.shape
    size = (min(_WIDEST, max(_NARROWEST, _CELL * heads)) + 1.9, min(_TALLEST, 0.22 * layers) + 1.6)
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(table, cmap="Blues", vmin=0.0, aspect="auto", interpolation="nearest")
    count = len(profile.prompts or ())
    name = profile.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    detail = ", ".join([*([profile.method] if profile.method else []), *([f"{count} prompts"] if count else [])])
    axes.set_title(f"{name}\n{detail}" if detail else name, fontsize=9, color=_INK)
    axes.set_xlabel("KV head", fontsize=9, color=_INK)
    axes.set_ylabel("layer", fontsize=9, color=_INK)
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.tick_params(labelsize=8, colors=_FAINT, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.08, pad=0.03)
    bar.set_label("kept tokens, mean over prompts", fontsize=8, color=_INK)
    bar.ax.tick_params(labelsize=8, colors=_FAINT, length=0)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
