"""Pictures beside the results: bars, groups of bars, lines, and predicted over measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakv.tracking.files import write_picture

from .statistics import Interval

INK, FAINT, GRID = "#22282f", "#8a929b", "#dde1e6"
PEER, OWN = "#9aa7b5", "#2f6db3"
COLOURS = ("#2f6db3", "#c8553d", "#3f8f5f", "#8a6bb8", "#b58a2a", "#4fa3a5", "#9aa7b5")
STYLE = {
    "axes.axisbelow": True, "axes.edgecolor": FAINT, "axes.grid": True, "axes.labelcolor": INK, "axes.labelsize": 9,
    "axes.spines.right": False, "axes.spines.top": False, "font.size": 8.5, "grid.color": GRID, "grid.linewidth": 0.5,
    "legend.frameon": False, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
WIDTH_IN, HEIGHT_IN, BAR_IN, REST_IN = 8.0, 4.6, 0.45, 1.35
FILLED = 0.8
"""Of the room of a group."""
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
    size: tuple[float, float] | None = (WIDTH_IN, HEIGHT_IN)  # None where `draw` gets the file's path


def draw_charts(results: Path, charts: Sequence[Chart]) -> list[Path]:
    """Draw beside the results; a second chart of a name gets a number."""
    # Only who reports draws; importing matplotlib on every rank costs each of them half a second.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn: list[Path] = []
    for chart in charts:
        names = [f".{chart.name}" if chart.name else "", *(f".{chart.name}.{number}" for number in range(2, 99))]
        path = next(path for name in names if (path := results.with_suffix(f"{name}.png")) not in drawn)
        drawn.append(path)
        if chart.size is None:
            chart.draw(path)
            continue
        with rc_context(STYLE):
            figure = Figure(figsize=chart.size, dpi=150, facecolor="white", layout="constrained")
            figure.suptitle(chart.title, x=0.01, ha="left", fontsize=12.5, weight="bold", color=INK)
            axes = figure.subplots()
            axes.set_title(chart.subtitle, fontsize=8.5, color=FAINT, loc="left")
            axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
            chart.draw(axes)
            write_picture(path, figure)
    return drawn


def say(how: Say, row: Row) -> Any:
    """What a row says: by a key, by a text with keys in braces, or by a function."""
    if callable(how):
        return how(row)
    return how.format_map(row) if "{" in how else row[how]


def bars(
    name: str,
    rows: Sequence[Row],
    label: Say,
    y: Say = "seconds",
    *,
    scale: float = 1.0,
    own: Say,
    unit: str,
    **words: Any,
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

    return Chart(name, draw, x_label=unit, size=(WIDTH_IN, BAR_IN * len(rows) + REST_IN), **words)


def groups(
    name: str,
    rows: Sequence[Row],
    place: Say,
    series: Say,
    y: Say = "value",
    *,
    scale: float = 1.0,
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
    **words: Any,
) -> Chart:
    """Vertical bars, a row each: those of a place in a group, side by side or one on top of the other."""

    def draw(axes: Any) -> None:
        places = list(dict.fromkeys(say(place, row) for row in rows))
        labels = list(dict.fromkeys(say(series, row) for row in rows))
        width = FILLED / (1 if stacked else max(1, len(labels)))
        bottoms = [0.0] * len(places)
        for index, label in enumerate(labels):
            colour = (colours or {}).get(label, COLOURS[index % len(COLOURS)])
            shift = 0.0 if stacked else (index + 0.5) * width - FILLED / 2
            own = [row for row in rows if say(series, row) == label]
            at = [places.index(say(place, row)) for row in own]
            bars = [Interval.of(say(y, row)).scaled(scale) for row in own]
            x, values = [each + shift for each in at], [bar.value for bar in bars]
            axes.bar(x, values, 0.92 * width, [bottoms[each] for each in at], label=label, color=colour)
            if not stacked:
                axes.errorbar(x, values, yerr=_errors(bars), fmt="none", ecolor=INK, capsize=2)
            for each, value in zip(at, values if stacked else (), strict=stacked):
                bottoms[each] += value
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
        from matplotlib.ticker import FuncFormatter, NullLocator

        if level is not None:
            axes.axhline(level, color=FAINT, linewidth=1)
        for index, label in enumerate(dict.fromkeys(say(series, row) for row in rows)):
            own = [row for row in rows if say(series, row) == label]
            look = {"color": COLOURS[index % len(COLOURS)], "linestyle": "-", "marker": "o", **looks(own[0])}
            at, values = [say(x, row) for row in own], [Interval.of(say(y, row)).scaled(scale) for row in own]
            middles = [value.value for value in values]
            axes.errorbar(
                at, middles, yerr=_errors(values), label=label, capsize=3, linewidth=1.6, elinewidth=1, **look
            )
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
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.figure.legend(ncols=4, loc="outside lower left")

    return Chart(name, draw, **words)


def predicted_over(
    rows: Sequence[Row], x: str, series: Say, looks: Callable[[Row], Mapping[str, Any]] = lambda row: {}, **words: Any
) -> Chart:
    """What was predicted over what is true (`x`), a row for each point, with a band of 10%."""

    def draw(axes: Any) -> None:
        for label in dict.fromkeys(say(series, row) for row in rows):
            own = [row for row in rows if say(series, row) == label]
            look = looks(own[0])
            axes.scatter([row[x] for row in own], [row["predicted"] for row in own], s=22, label=label, **look)
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
