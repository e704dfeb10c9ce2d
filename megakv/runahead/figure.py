"""Picture of a search: what was measured, in which order and where (Figure 6 of KV-Runahead in form)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.runahead.search import SearchResult, Trial
from megakv.tracking.files import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, BEST = "#22282f", "#8a929b", "#b3261e"
STRIDES = ("#9aa7b5", "#c98a2d", "#2f6db3", "#3f8f5f", "#7b52a3", "#b05a7a", "#4aa3a3", "#8a6d3b", "#55606b")
WIDTH_IN, ROW_IN = 11.0, 3.6


def draw_searches(path: str | Path, results: Sequence[SearchResult], *, title: str) -> None:
    """Draw searches as a PNG, a row for each.

    On the left all measured partitions in their order with the best so far; on the right where they lie: by the tokens
    of rank 0, and for more than two ranks by those of ranks 0 and 1 together. Colours are strides, a red dot the best.
    """
    # Only rank 0 draws; importing matplotlib on every rank costs each of them half a second.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, ROW_IN * len(results) + 0.5), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(title, fontsize=10.5, color=INK)
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (course, place), result in zip(rows, results, strict=True):
        trials = [trial for trial in result.trials if trial.round == 0]
        strides = sorted({trial.stride for trial in trials}, key=lambda stride: (stride != 0, -stride))
        colors = {stride: STRIDES[index % len(STRIDES)] for index, stride in enumerate(strides)}
        _draw_course(course, result, trials, colors)
        _draw_place(place, result, trials, colors)
    write_picture(path, figure)


def _draw_course(axes: Axes, result: SearchResult, trials: Sequence[Trial], colors: dict[int, str]) -> None:
    tokens = sum(result.partition)
    for stride, color in colors.items():
        points = [(index, trial.seconds) for index, trial in enumerate(trials, start=1) if trial.stride == stride]
        label = f"stride {stride}" if stride else "to begin with"
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, s=16, color=color, label=label, zorder=3)
    best = list(accumulate((trial.seconds for trial in trials), min))
    axes.step(range(1, len(best) + 1), best, where="post", color=BEST, linewidth=1, label="best so far", zorder=2)
    axes.axhline(result.even_seconds, color=FAINT, linewidth=0.9, linestyle=":", label="even", zorder=1)
    axes.set_title(f"{tokens:,} tokens, {len(result.partition)} ranks", fontsize=9.5, color=INK)
    axes.set_xlabel("partition measured", fontsize=9, color=INK)
    axes.set_ylabel("time to first token, s", fontsize=9, color=INK)
    axes.legend(fontsize=7.5, frameon=False, ncols=2)
    _tidy(axes)


def _draw_place(axes: Axes, result: SearchResult, trials: Sequence[Trial], colors: dict[int, str]) -> None:
    flat = len(result.partition) == 2
    for stride, color in colors.items():
        points = [_place(trial.partition, trial.seconds) for trial in trials if trial.stride == stride]
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, s=16, color=color, zorder=2)
    x, y = _place(result.partition, result.seconds)
    axes.scatter([x], [y], s=48, color=BEST, zorder=4)
    axes.set_title(f"best: {' / '.join(map(str, result.partition))}", fontsize=9.5, color=INK)
    axes.set_xlabel("tokens of rank 0", fontsize=9, color=INK)
    axes.set_ylabel("time to first token, s" if flat else "tokens of ranks 0 and 1", fontsize=9, color=INK)
    _tidy(axes)


def _place(partition: Sequence[int], seconds: float) -> tuple[float, float]:
    return partition[0], seconds if len(partition) == 2 else partition[0] + partition[1]


def _tidy(axes: Axes) -> None:
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
