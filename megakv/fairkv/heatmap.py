"""A picture of a mapping: every rank's load in every layer, contiguous and mapped."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megakv.fairkv.mapping import Balance, HeadMapping
from megakv.tracking.files import write_whole

_INK, _FAINT = "#22282f", "#8a929b"
_WIDEST = 24


def _relative(balance: Balance) -> NDArray[np.float64]:
    """[layers, ranks]: load over the mean of the layer's ranks; 1 where there is nothing to do."""
    loads = np.array(balance.loads)
    mean = loads.mean(axis=1, keepdims=True)
    return np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0)


def draw_mapping(mapping: HeadMapping, path: str | Path) -> None:
    """Draw the loads of the contiguous and of the found mapping as a PNG, in one scale.

    A layer takes as long as its darkest cell, which is marked: with a perfect mapping all cells look alike.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    panels = (
        [("mapped", mapping)]
        if mapping.contiguous is None
        else [
            ("contiguous", mapping.contiguous),
            (f"copies {mapping.copies}, {mapping.split} split" if mapping.copies else "best assignment", mapping),
        ]
    )
    tables = [_relative(balance) for _, balance in panels]
    highest = max(1.0, *(float(table.max()) for table in tables))
    layers, ranks = tables[0].shape
    width = min(_WIDEST, max(2.4, 0.42 * ranks))
    figure = Figure(
        figsize=(2.2 + len(panels) * (width + 0.6), 1.9 + 0.2 * layers),
        dpi=130,
        facecolor="white",
        layout="constrained",
    )
    canvas = FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, balance), table in zip(all_axes, panels, tables, strict=True):
        image = axes.imshow(table, cmap="Blues", vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
        slowest = table.argmax(axis=1)
        waiting = table.max(axis=1) > 1 + 1e-6
        axes.scatter(
            slowest[waiting], np.nonzero(waiting)[0], marker="s", s=26, facecolors="none", edgecolors="#b3261e"
        )
        axes.set_title(
            f"{name}\nutilisation {balance.barrier_utilisation:.3f}, Eq. 5 {balance.efficiency:.3f}",
            fontsize=9,
            color=_INK,
        )
        axes.set_xlabel("rank", fontsize=9, color=_INK)
        axes.set_xticks(range(0, ranks, max(1, ranks // 16)))
        axes.tick_params(labelsize=8, colors=_FAINT, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    all_axes[0].set_ylabel("layer", fontsize=9, color=_INK)
    all_axes[0].set_yticks(range(0, layers, max(1, layers // 16)))
    bar = figure.colorbar(image, ax=all_axes.tolist(), fraction=0.05, pad=0.03)
    bar.set_label("load over the layer's mean\n(slowest rank marked)", fontsize=8, color=_INK)
    bar.ax.tick_params(labelsize=8, colors=_FAINT, length=0)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_whole(path, buffer.getvalue())
