"""Picture of a search: what was measured, in which order and where (Figure 6 of KV-Runahead in form)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.runahead.search import SearchResult, Trial
from megakv.tracking.files import FAINT, RED, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRIDES = ("#9aa7b5", "#c98a2d", "#2f6db3", "#3f8f5f", "#7b52a3", "#b05a7a", "#4aa3a3", "#8a6d3b", "#55606b")
WIDTH_IN, ROW_IN = 11.0, 3.6


def draw_searches(path: str | Path, results: Sequence[SearchResult], *, title: str) -> None:
    """Draw searches as a PNG, a row for each.

    On the left all measured partitions in their order with the best so far; on the right where they lie: by the tokens
    of rank 0, and for more than two ranks by those of ranks 0 and 1 together. Colours are strides, a red dot the best.
    """
    size = (WIDTH_IN, ROW_IN * len(results) + 0.5)
    with picture(path, figsize=size, dpi=130, layout="constrained") as figure:
        figure.suptitle(title, fontsize=10.5)
        rows = figure.subplots(len(results), 2, squeeze=False)
        for (course, place), result in zip(rows, results, strict=True):
            _draw_search(course, place, result, [trial for trial in result.trials if trial.round == 0])


def _draw_search(course: Axes, place: Axes, result: SearchResult, trials: Sequence[Trial]) -> None:
    strides = sorted({trial.stride for trial in trials}, key=lambda stride: (stride != 0, -stride))
    for index, stride in enumerate(strides):
        points = [
            (number, trial.seconds, *_place(trial.partition, trial.seconds))
            for number, trial in enumerate(trials, start=1)
            if trial.stride == stride
        ]
        numbers, seconds, xs, ys = zip(*points, strict=True)
        label = f"stride {stride}" if stride else "to begin with"
        color = STRIDES[index % len(STRIDES)]
        course.scatter(numbers, seconds, s=16, color=color, label=label, zorder=3)
        place.scatter(xs, ys, s=16, color=color, zorder=2)
    best = list(accumulate((trial.seconds for trial in trials), min))
    course.step(range(1, len(best) + 1), best, where="post", color=RED, linewidth=1, label="best so far", zorder=2)
    course.axhline(result.even_seconds, color=FAINT, linewidth=0.9, linestyle=":", label="even", zorder=1)
    course.set_title(f"{sum(result.partition):,} tokens, {len(result.partition)} ranks")
    course.set_xlabel("partition measured")
    course.set_ylabel("time to first token, s")
    course.legend(ncols=2)
    x, y = _place(result.partition, result.seconds)
    place.scatter([x], [y], s=48, color=RED, zorder=4)
    place.set_title(f"best: {' / '.join(map(str, result.partition))}")
    place.set_xlabel("tokens of rank 0")
    place.set_ylabel("time to first token, s" if len(result.partition) == 2 else "tokens of ranks 0 and 1")


def _place(partition: Sequence[int], seconds: float) -> tuple[float, float]:
    return partition[0], seconds if len(partition) == 2 else partition[0] + partition[1]
