"""Pictures beside the results: bars, groups of bars, shares, lines, and predicted over measured."""

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
WIDTH_IN, HEIGHT_IN = 8.0, 4.6
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, BAR_IN = 1.2, 0.25, 0.75, 0.6, 0.45
LEAST_LABELLED = 0.04
"""Narrower shares have no room for their number."""
FILLED = 0.8
"""Of the room of a group."""


@dataclass(frozen=True)
class Chart:
    """A picture ``FILE.NAME.png``, or ``FILE.png`` without a name, and what draws on its figure, or the whole file."""

    name: str
    draw: Callable[[Any], None]
    size: tuple[float, float] | None = (WIDTH_IN, HEIGHT_IN)  # None where `draw` gets the file's path


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[Interval]
    hollow: Sequence[bool] | None = None  # Which points are drawn as rings
    dashed: bool = False
    joined: bool = True  # Whether there is a line between the points
    marked: bool = True  # Whether there is a dot at each
    colour: str | None = None  # The next one in turn if None


def draw_charts(results: Path, charts: Sequence[Chart]) -> list[Path]:
    """Draw beside the results; a second chart of a name gets a number."""
    # Only who reports draws; importing matplotlib on every rank costs each of them half a second.
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
        figure = Figure(figsize=chart.size, dpi=150, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        chart.draw(figure)
        buffer = io.BytesIO()
        canvas.print_png(buffer)
        write_whole(path, buffer.getvalue())
    return drawn


def bars(name: str, bars: Sequence[tuple[str, Interval, bool]], *, title: str, subtitle: str = "", unit: str) -> Chart:
    """Horizontal bars (label, value, own), from top to bottom; `own` ones stand out."""

    def draw(figure: Any) -> None:
        axes = _rows(figure, [label for label, _, _ in bars], title, subtitle, unit)
        values = [value for _, value, _ in bars]
        rows, lengths = range(len(bars)), [value.value for value in values]
        axes.barh(rows, lengths, height=0.62, color=[OWN if own else PEER for _, _, own in bars], zorder=2)
        axes.errorbar(lengths, rows, xerr=_errors(values), fmt="none", ecolor=INK, elinewidth=1.2, capsize=3.5)
        for row, value in enumerate(values):
            shift = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{value.value:.3g}", (value.high, row), fontsize=9, color=INK, **shift)
        lowest, highest = min(value.low for value in values), max(value.high for value in values)
        axes.set_xlim(min(0, 1.12 * lowest), max(0, 1.12 * highest) or 1)
        axes.grid(axis="x", color=GRID, linewidth=0.5, zorder=0)

    return Chart(name, draw, _row_size(len(bars)))


def shares(name: str, bars: Sequence[tuple[str, Sequence[int]]], *, title: str, subtitle: str, unit: str) -> Chart:
    """Parts of a whole (label, parts) as stacked bars: who has how much of a prompt."""

    def draw(figure: Any) -> None:
        axes = _rows(figure, [label for label, _ in bars], title, subtitle, unit)
        for row, (_, parts) in enumerate(bars):
            left = 0.0
            for index, part in enumerate(parts):
                share, colour = part / sum(parts), COLOURS[index % len(COLOURS)]
                axes.barh(row, share, left=left, height=0.62, color=colour, edgecolor="white")
                if share >= LEAST_LABELLED:
                    place = {"ha": "center", "va": "center", "color": "white"}
                    axes.text(left + share / 2, row, f"{part:,}", fontsize=8, **place)
                left += share
        axes.set_xlim(0, 1)

    return Chart(name, draw, _row_size(len(bars)))


def groups(
    name: str,
    places: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    *,
    title: str,
    subtitle: str,
    y_label: str,
    x_label: str = "",
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
) -> Chart:
    """Vertical bars side by side in groups, or one on top of the other; None for no bar."""

    def draw(figure: Any) -> None:
        axes = _axes(figure, title, subtitle, x_label, y_label, 0.66)
        width = FILLED / (1 if stacked else len(series))
        bottoms = [0.0] * len(places)
        for index, (label, found) in enumerate(series.items()):
            colour = (colours or {}).get(label, COLOURS[index % len(COLOURS)])
            shift = 0.0 if stacked else (index + 0.5) * width - FILLED / 2
            known = {place: bar for place, bar in enumerate(found) if bar is not None}
            x, values = [place + shift for place in known], [bar.value for bar in known.values()]
            below = [bottoms[place] for place in known] if stacked else 0.0
            axes.bar(x, values, width=0.92 * width, label=label, color=colour, zorder=2, bottom=below)
            if not stacked:
                axes.errorbar(x, values, yerr=_errors([*known.values()]), fmt="none", ecolor=INK, capsize=2, zorder=3)
            for place, bar in known.items():
                bottoms[place] += bar.value
        axes.set_xticks(range(len(places)), places, fontsize=8.5, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.5)
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))

    return Chart(name, draw)


def lines(
    name: str,
    lines: Sequence[Line],
    *,
    title: str,
    subtitle: str,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
    level: float | None = None,
    legend_above: bool = False,
) -> Chart:
    """Lines; every x of theirs gets a tick where the axis is logarithmic; a horizontal one at `level`."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        axes = _axes(figure, title, subtitle, x_label, y_label, 0.63 if legend_above else 0.71)
        if level is not None:
            axes.axhline(level, color=FAINT, linewidth=1, zorder=1)
        for index, line in enumerate(lines):
            colour, style = line.colour or COLOURS[index % len(COLOURS)], "--" if line.dashed else "-"
            y = [point.value for point in line.y]
            looks = {"color": colour, "linestyle": style if line.joined else "none", "linewidth": 1.6, "elinewidth": 1}
            axes.errorbar(line.x, y, yerr=_errors(line.y), label=line.label, capsize=3, zorder=2, **looks)
            hollow = line.hollow or [False] * len(y)
            for at, value, ring in zip(line.x, y, hollow, strict=True) if line.marked else ():
                fill = "white" if ring else colour
                axes.plot(at, value, "o", color=colour, markerfacecolor=fill, markersize=6, zorder=3)
        if log_x:
            axes.set_xscale("log")
            ticks = sorted({x for line in lines for x in line.x})
            axes.set_xticks(ticks, [f"{round(tick, 1):,g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log")
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.tick_params(axis="y", which="minor", labelsize=7, colors=FAINT)
        axes.grid(color=GRID, linewidth=0.5)
        place = {"ncols": 4, "loc": "lower left", "bbox_to_anchor": (0, 1.0)} if legend_above else {}
        axes.legend(fontsize=8 if legend_above else 8.5, frameon=False, **place)

    return Chart(name, draw)


def predicted_over(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Chart:
    """Pairs (true, predicted) by label, with a band of 10%."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for label, (true, predicted) in points.items():
            axes.scatter(true, predicted, s=22, label=label, **(looks or {}).get(label, {}))
        every = [value for true, _ in points.values() for value in true]
        if every:
            ends = [min(every) / 1.3, max(every) * 1.3]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="black", alpha=0.1)
            axes.set(xscale="log", yscale="log")
            axes.legend(fontsize=8)
        axes.set(xlabel=x_label, ylabel=y_label, title=f"{title}; the band is 10%")

    return Chart("", draw, (7, 7))


def _errors(values: Sequence[Interval]) -> list[list[float]]:
    return [[each.value - each.low for each in values], [each.high - each.value for each in values]]


def _row_size(count: int) -> tuple[float, float]:
    return WIDTH_IN, BAR_IN * count + TOP_IN + BOTTOM_IN


def _rows(figure: Any, labels: Sequence[str], title: str, subtitle: str, unit: str) -> Any:
    """Axes for horizontal bars."""
    height = figure.get_figheight()
    place = LEFT_IN / WIDTH_IN, BOTTOM_IN / height, 1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN, BAR_IN * len(labels) / height
    axes = figure.add_axes(place)
    axes.set_yticks(range(len(labels)), labels, fontsize=9.5, color=INK)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    axes.spines["left"].set_visible(False)
    _dress(figure, axes, title, subtitle, unit, 1 - 0.14 / height, 1 - 0.43 / height)
    return axes


def _axes(figure: Any, title: str, subtitle: str, x_label: str, y_label: str, height: float) -> Any:
    """Axes for lines and vertical bars."""
    axes = figure.add_axes((0.09, 0.13, 0.88, height))
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines["left"].set_color(FAINT)
    _dress(figure, axes, title, subtitle, x_label, 0.975, 0.915)
    return axes


def _dress(figure: Any, axes: Any, title: str, subtitle: str, x_label: str, top: float, below: float) -> None:
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    figure.text(0.02, top, title, fontsize=12.5, weight="bold", color=INK, va="top")
    figure.text(0.02, below, subtitle, fontsize=8.5, color=FAINT, va="top")
