"""Pictures beside the results: bars, groups of bars, lines, and predicted over measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakv.tracking.files import FAINT, INK, picture

from .statistics import Interval

PEER, OWN = "#9aa7b5", "#2f6db3"
COLOURS = (OWN, "#c8553d", "#3f8f5f", "#8a6bb8", "#b58a2a", "#4fa3a5", PEER)
FILLED = 0.8  # Of the room of a group
Row = Mapping[str, Any]
Say = str | Callable[[Row], Any]


@dataclass(frozen=True)
class Chart:
    """A picture ``FILE.NAME.png``, or ``FILE.png`` without a name, and what draws on its axes."""

    name: str
    draw: Callable[[Any], None]
    title: str = ""
    subtitle: str = ""
    x_label: str = ""
    y_label: str = ""
    size: tuple[float, float] = (8.0, 4.6)


def draw_charts(results: Path, charts: Sequence[Chart]) -> list[Path]:
    """Draw beside the results; a second chart of a name gets a number."""
    drawn: list[Path] = []
    for chart in charts:
        names = [f".{chart.name}" if chart.name else "", *(f".{chart.name}.{number}" for number in range(2, 99))]
        path = next(path for name in names if (path := results.with_suffix(f"{name}.png")) not in drawn)
        drawn.append(path)
        with picture(path, figsize=chart.size, dpi=150, layout="constrained") as figure:
            figure.suptitle(chart.title, x=0.01, ha="left", fontsize=12.5, weight="bold")
            axes = figure.subplots()
            axes.grid(visible=True)
            axes.set_title(chart.subtitle, fontsize=8.5, color=FAINT, loc="left")
            axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
            chart.draw(axes)
    return drawn


def say(how: Say, row: Row) -> Any:
    """Say something of a row: by a key, by a text with keys in braces, or by a function."""
    if callable(how):
        return how(row)
    return how.format_map(row) if "{" in how else row[how]


def by_series(rows: Sequence[Row], series: Say) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(say(series, row), []).append(row)
    return found


def bars(
    name: str, rows: Sequence[Row], label: Say, y: Say = "seconds", *, own: Say, scale: float = 1.0, **words: Any
) -> Chart:
    """Horizontal bars, a row each, from top to bottom; `own` ones stand out."""

    def draw(axes: Any) -> None:
        values, places = [Interval.of(say(y, row)).scaled(scale) for row in rows], range(len(rows))
        lengths = [value.value for value in values]
        axes.barh(places, lengths, height=0.62, color=[OWN if say(own, row) else PEER for row in rows])
        axes.errorbar(lengths, places, xerr=_errors(values), fmt="none", ecolor=INK, elinewidth=1.2, capsize=3.5)
        for place, value in enumerate(values):
            axes.annotate(f"{value.value:.3g}", (value.high, place), (7, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [say(label, row) for row in rows], fontsize=9.5)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")

    return Chart(name, draw, size=(8.0, 0.45 * len(rows) + 1.35), **words)


def groups(
    name: str, rows: Sequence[Row], place: Say, series: Say, y: Say = "value", *, scale: float = 1.0, **words: Any
) -> Chart:
    """Vertical bars, a row each: those of a place side by side in a group."""

    def draw(axes: Any) -> None:
        places, several = list(by_series(rows, place)), by_series(rows, series)
        width = FILLED / max(1, len(several))
        for index, (label, own) in enumerate(several.items()):
            x = [places.index(say(place, row)) + (index + 0.5) * width - FILLED / 2 for row in own]
            values = [Interval.of(say(y, row)).scaled(scale) for row in own]
            heights = [each.value for each in values]
            axes.bar(x, heights, 0.92 * width, label=label, color=COLOURS[index % len(COLOURS)])
            axes.errorbar(x, heights, yerr=_errors(values), fmt="none", ecolor=INK, capsize=2)
        axes.set_xticks(range(len(places)), places)
        axes.grid(visible=False, axis="x")
        axes.figure.legend(ncols=4, loc="outside lower left")

    return Chart(name, draw, **words)


def lines(
    name: str,
    rows: Sequence[Row],
    x: Say,
    y: Say,
    series: Say,
    *,
    scale: float = 1.0,
    looks: Callable[[Row], Mapping[str, Any]] = lambda row: {},
    hollow: Say = lambda row: False,
    log_x: bool = True,
    log_y: bool = False,
    level: float | None = None,
    **words: Any,
) -> Chart:
    """Lines, a row for each point; `looks` of a line's first row are matplotlib's words, `hollow` points rings.

    Every x gets a tick where the axis is logarithmic; at `level` there is a horizontal line.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FormatStrFormatter, NullLocator

        if level is not None:
            axes.axhline(level, color=FAINT, linewidth=1)
        for index, (label, own) in enumerate(by_series(rows, series).items()):
            look = {"color": COLOURS[index % len(COLOURS)], "linestyle": "-", "marker": "o", **looks(own[0])}
            at, values = [say(x, row) for row in own], [Interval.of(say(y, row)).scaled(scale) for row in own]
            middles = [value.value for value in values]
            axes.errorbar(at, middles, yerr=_errors(values), label=label, capsize=3, elinewidth=1, **look)
            if rings := [place for place, row in enumerate(own) if say(hollow, row)]:
                places = [at[each] for each in rings], [middles[each] for each in rings]
                axes.plot(*places, "o", color=look["color"], markerfacecolor="white", zorder=3)
        if log_x:
            axes.set_xscale("log")
            ticks = sorted({say(x, row) for row in rows})
            axes.set_xticks(ticks, [f"{round(tick, 1):,g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
        axes.figure.legend(ncols=4, loc="outside lower left")

    return Chart(name, draw, **words)


def predicted_over(rows: Sequence[Row], x: str, series: Say, **words: Any) -> Chart:
    """Predicted values over true ones (`x`), a row for each point, with a band of 10%."""

    def draw(axes: Any) -> None:
        for label, own in by_series(rows, series).items():
            axes.scatter([row[x] for row in own], [row["predicted"] for row in own], s=22, label=label)
        if every := [row[x] for row in rows]:
            ends = [min(every) / 1.3, max(every) * 1.3]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="black", alpha=0.1)
            axes.set(xscale="log", yscale="log")
            axes.legend()

    labels = {"x_label": x, "y_label": "predicted", **words}
    return Chart("", draw, subtitle="the band is 10%", size=(7, 7), **labels)


def _errors(values: Sequence[Interval]) -> list[list[float]]:
    return [[each.value - each.low for each in values], [each.high - each.value for each in values]]
