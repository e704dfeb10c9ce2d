"""Pictures: every rank's load in every layer of a mapping, and what every KV head of a profile keeps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megakv.fairkv.mapping import Balance, HeadMapping, StepTime
from megakv.fairkv.profile import BudgetProfile, last_part
from megakv.tracking.files import FAINT, RED, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

LOOK: Any = {"dpi": 130, "layout": "constrained"}
GAINS_SIZE = 4.6, 3.4
"""Inches of the gains by regime."""


def draw_mapping(mapping: HeadMapping, path: str | Path | io.BytesIO) -> None:
    """Draw the loads of the contiguous and of the found mapping as a PNG, in one scale; beside them, gains by regime.

    A layer takes as long as its darkest cell, which is marked: with a perfect mapping all cells look alike. Gains are
    predicted, so they are there where the mapping knows its machine.
    """
    found = f"copies {mapping.copies}, {mapping.split} split" if mapping.copies else "best assignment"
    panels: list[tuple[str, Balance]] = [(found, mapping)]
    if mapping.contiguous is not None:
        panels.insert(0, ("contiguous", mapping.contiguous))
    loads = np.array([balance.loads for _, balance in panels])
    # Over the mean of the layer's ranks; 1 where there is nothing to do.
    mean = loads.mean(axis=2, keepdims=True)
    tables = np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0)
    _, layers, ranks = tables.shape
    width = len(panels) * (min(24, max(2.4, 0.42 * ranks)) + 0.6)
    titles = [
        f"{name}\nutilisation {balance.barrier_utilisation:.3f}, Eq. 5 {balance.efficiency:.3f}"
        for name, balance in panels
    ]
    label, size = "load over the layer's mean\n(slowest rank marked)", (2.2 + width, 1.9 + 0.2 * layers)
    whole = size if mapping.time is None else (size[0] + GAINS_SIZE[0], max(size[1], GAINS_SIZE[1]))
    with picture(path, figsize=whole, **LOOK) as figure:
        place: Figure | SubFigure = figure
        if mapping.time is not None:
            halves: Any = figure.subfigures(1, 2, width_ratios=(size[0], GAINS_SIZE[0]))
            place, beside = halves
            _draw_gains(beside, mapping.time)
        for axes, table in zip(_heat_maps(place, tables, titles, "rank", label), tables, strict=True):
            waiting = table.max(axis=1) > 1 + 1e-6
            marks = {"marker": "s", "s": 26, "facecolors": "none", "edgecolors": RED}
            axes.scatter(table.argmax(axis=1)[waiting], np.nonzero(waiting)[0], **marks)


def draw_profile(profile: BudgetProfile, path: str | Path | io.BytesIO) -> None:
    """Draw the mean budgets as a heat map, layers by KV heads, as a PNG."""
    table = np.array(profile.budgets)
    layers, heads = table.shape
    name = last_part(profile.model)
    prompts = f"{len(profile.prompts)} prompts" if profile.prompts else None
    detail = ", ".join(word for word in (profile.method, prompts) if word)
    size = (min(16.0, max(3.2, 0.34 * heads)) + 1.9, min(24.0, 0.22 * layers) + 1.6)
    title, label = f"{name}\n{detail}" if detail else name, "kept tokens, mean over prompts"
    with picture(path, figsize=size, **LOOK) as figure:
        _heat_maps(figure, table[None], [title], "KV head", label)


def _draw_gains(place: SubFigure, time: StepTime) -> None:
    """What a mapping gains, or loses, by batch and kept tokens."""
    batches, kept = (sorted({getattr(regime, name) for regime in time.regimes}) for name in ("batch", "kept"))
    gains = {(regime.batch, regime.kept): regime.gain for regime in time.regimes}
    table = np.array([[gains[batch, tokens] for tokens in kept] for batch in batches])
    axes = place.subplots()
    # Doublings, the same to both sides of no gain; twice as many, so that numbers can be read.
    widest = max(0.5, 2 * float(np.abs(np.log2(table)).max()))
    axes.imshow(np.log2(table), cmap="RdBu", vmin=-widest, vmax=widest, aspect="auto")
    for row, column in np.ndindex(table.shape):
        axes.text(column, row, f"{table[row, column]:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(kept)), [f"{tokens:g}" for tokens in kept])
    axes.set_yticks(range(len(batches)), [f"{batch}" for batch in batches])
    axes.set_xlabel("kept tokens a head, the mean")
    axes.set_ylabel("batch")
    axes.tick_params(labelsize=8, colors=FAINT, length=0)
    own = f"{time.gain:.3f} at batch {time.batch} and {time.kept:.0f} tokens, {time.hardware}"
    axes.set_title(f"predicted gain of a step over contiguous heads\n{own}", fontsize=9)
    axes.invert_yaxis()


def _heat_maps(
    figure: Figure | SubFigure, tables: NDArray[np.float64], titles: list[str], across: str, label: str
) -> list[Any]:
    """Tables of layers by something side by side, in one scale."""
    all_axes: list[Any] = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0].tolist()
    highest = max(1.0, float(tables.max()))
    for axes, table, title in zip(all_axes, tables, titles, strict=True):
        axes.imshow(table, cmap="Blues", vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(across)
        axes.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // 16)))
        axes.tick_params(labelsize=8, colors=FAINT, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    layers = tables.shape[1]
    all_axes[0].set_ylabel("layer")
    all_axes[0].set_yticks(range(0, layers, max(1, layers // 16)))
    bar = figure.colorbar(all_axes[-1].images[0], ax=all_axes, fraction=0.05, pad=0.03)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8, colors=FAINT, length=0)
    return all_axes
