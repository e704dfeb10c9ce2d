"""Pictures beside the results: bars, groups of bars, lines, and predicted over measured."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakv.tracking.files import write_whole

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


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[Interval]
    hollow: Sequence[bool] | None = None  # Which points are drawn as rings
    style: str = "-"  # Of matplotlib; "none": points alone
    marked: bool = True  # Whether there is a dot at each point
    colour: str | None = None  # The next one in turn if None


def draw_charts(results: Path, charts: Sequence[Chart]) -> list[Path]:
    """Draw beside the results; a second chart of a name gets a number."""
    # Only who reports draws; importing matplotlib on every rank costs each of them half a second.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
            canvas = FigureCanvasAgg(figure)
            figure.suptitle(chart.title, x=0.01, ha="left", fontsize=12.5, weight="bold", color=INK)
            axes = figure.subplots()
            axes.set_title(chart.subtitle, fontsize=8.5, color=FAINT, loc="left")
            axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
            chart.draw(axes)
            buffer = io.BytesIO()
            canvas.print_png(buffer)
        write_whole(path, buffer.getvalue())
    return drawn


def bars(name: str, bars: Sequence[tuple[str, Interval, bool]], *, unit: str, **words: Any) -> Chart:
    """Horizontal bars (label, value, own), from top to bottom; `own` ones stand out."""

    def draw(axes: Any) -> None:
        labels, values, own = zip(*bars, strict=True)
        rows, lengths = range(len(bars)), [value.value for value in values]
        axes.barh(rows, lengths, height=0.62, color=[OWN if each else PEER for each in own])
        axes.errorbar(lengths, rows, xerr=_errors(values), fmt="none", ecolor=INK, elinewidth=1.2, capsize=3.5)
        for row, value in enumerate(values):
            axes.annotate(f"{value.value:.3g}", (value.high, row), (7, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, labels, fontsize=9.5)
        axes.set_ylim(len(bars) - 0.45, -0.55)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")

    return Chart(name, draw, x_label=unit, size=(WIDTH_IN, BAR_IN * len(bars) + REST_IN), **words)


def groups(
    name: str,
    places: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    *,
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
    **words: Any,
) -> Chart:
    """Vertical bars side by side in groups, or one on top of the other; None for no bar."""

    def draw(axes: Any) -> None:
        width = FILLED / (1 if stacked else len(series))
        bottoms = [0.0] * len(places)
        for index, (label, found) in enumerate(series.items()):
            colour = (colours or {}).get(label, COLOURS[index % len(COLOURS)])
            shift = 0.0 if stacked else (index + 0.5) * width - FILLED / 2
            known = {place: bar for place, bar in enumerate(found) if bar is not None}
            x, values = [place + shift for place in known], [bar.value for bar in known.values()]
            below = [bottoms[place] for place in known] if stacked else 0.0
            axes.bar(x, values, width=0.92 * width, label=label, color=colour, bottom=below)
            if not stacked:
                axes.errorbar(x, values, yerr=_errors([*known.values()]), fmt="none", ecolor=INK, capsize=2)
            for place, bar in known.items():
                bottoms[place] += bar.value
        axes.set_xticks(range(len(places)), places)
        axes.grid(visible=False, axis="x")
        axes.figure.legend(ncols=4, loc="outside lower left")

    return Chart(name, draw, **words)


def lines(
    name: str,
    lines: Sequence[Line],
    *,
    log_x: bool = True,
    log_y: bool = False,
    level: float | None = None,
    **words: Any,
) -> Chart:
    """Lines; every x of theirs gets a tick where the axis is logarithmic; a horizontal one at `level`."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        if level is not None:
            axes.axhline(level, color=FAINT, linewidth=1)
        for index, line in enumerate(lines):
            colour = line.colour or COLOURS[index % len(COLOURS)]
            y = [point.value for point in line.y]
            looks = {"color": colour, "linestyle": line.style, "linewidth": 1.6, "elinewidth": 1}
            axes.errorbar(line.x, y, yerr=_errors(line.y), label=line.label, capsize=3, **looks)
            for at, value, ring in zip(line.x, y, line.hollow or [False] * len(y), strict=True) if line.marked else ():
                axes.plot(at, value, "o", color=colour, markerfacecolor="white" if ring else colour, zorder=3)
        if log_x:
            axes.set_xscale("log")
            ticks = sorted({x for line in lines for x in line.x})
            axes.set_xticks(ticks, [f"{round(tick, 1):,g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log")
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.figure.legend(ncols=4, loc="outside lower left")

    return Chart(name, draw, **words)


def predicted_over(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    **words: Any,
) -> Chart:
    """Pairs (true, predicted) by label, with a band of 10%."""

    def draw(axes: Any) -> None:
        for label, (true, predicted) in points.items():
            axes.scatter(true, predicted, s=22, label=label, **(looks or {}).get(label, {}))
        if every := [value for true, _ in points.values() for value in true]:
            ends = [min(every) / 1.3, max(every) * 1.3]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="black", alpha=0.1)
            axes.set(xscale="log", yscale="log")
            axes.legend()

    return Chart("", draw, subtitle="the band is 10%", size=(7, 7), **words)


def _errors(values: Sequence[Interval]) -> list[list[float]]:
    return [[each.value - each.low for each in values], [each.high - each.value for each in values]]
