"""A run's events as a picture and as a trace: what ranks computed, what was in flight, and where they stood still."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megakv.tracking.files import BLUE, FAINT, INK, ORANGE, RED, picture, write_whole
from megakv.tracking.measurements import Event
from megakv.tracking.report import RankReport, RunReport
from megakv.tracking.units import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_COLORS = {"compute": BLUE, "communication": ORANGE, "wait": RED}
_LANES = {"compute": (0.10, 0.52), "communication": (0.56, 0.88), "wait": (0.56, 0.88)}
_LABELS = {"compute": "compute", "communication": "communication in flight", "wait": "waiting for communication"}
_DPI = 150
MOST_LANES, LEAST_LANES = 64, 4
"""Ranks of a picture, and of each run in it: pictures cannot have any height."""
_THREADS = {"compute": 0, "wait": 1}
_WIDTH_IN, _LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 13.0, 1.25, 1.75, 0.95, 0.62
_COLUMNS = round((_WIDTH_IN - _LEFT_IN - _RIGHT_IN) * _DPI)


def draw_timelines(
    reports: Sequence[RunReport], path: str | Path | io.BytesIO, *, window: tuple[float, float] | None = None
) -> None:
    """Draw compute and communication of every rank as a PNG; several runs above each other on one axis of time.

    Every rank has two lanes: compute above, communication below, in which the light part was in flight behind
    compute and the dark part made the rank wait. Columns are as dark as they were busy, so a lane that worked half of
    the time looks half full at every zoom. The numbers at the right are shares of the window, by default of each run's
    own time in it. Of many ranks the first are drawn.

    window: First and last second to show; by default the prefill and, if there was one, the first decoded tokens.
    """
    begin, end = window or (0.0, max(map(default_end, reports)))
    if not begin < end:
        raise ValueError(f"window is ({begin}, {end}); it must start before it ends, in seconds")
    most = max(LEAST_LANES, MOST_LANES // len(reports))
    counts = [min(most, len(report.ranks)) for report in reports]
    lanes_in = [count * (0.62 if count <= 8 else 0.46) for count in counts]
    heights_px = [round((lanes + _TOP_IN + _BOTTOM_IN) * _DPI) for lanes in lanes_in]
    heights_in = [height / _DPI for height in heights_px]
    # Half a pixel more, since parts of one are cut off.
    size = (_WIDTH_IN, (sum(heights_px) + 0.5) / _DPI)
    width = (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) / _WIDTH_IN
    with picture(path, figsize=size, dpi=_DPI) as figure:
        parts = figure.subfigures(len(reports), 1, height_ratios=heights_in, hspace=0, squeeze=False)[:, 0]
        for part, report, lanes, height in zip(parts, reports, lanes_in, heights_in, strict=True):
            axes = part.add_axes((_LEFT_IN / _WIDTH_IN, _BOTTOM_IN / height, width, lanes / height))
            axes.set_xlim(begin * 1e3, end * 1e3)
            ranks = report.ranks[:most]
            axes.set_ylim(len(ranks), 0)
            until = end if window else min(end, default_end(report))
            for lane, rank in enumerate(ranks):
                _draw_rank(axes, rank, lane, begin, end, until)
            _draw_phases(axes, report, begin, end)
            _draw_frame(part, axes, report, ranks, height, "" if window else drawn_part(report, end))


def has_events(report: RunReport) -> bool:
    """Whether there is anything to draw: events are recorded where a timeline is asked for."""
    return any(rank.events for rank in report.ranks)


def _last_end(report: RunReport) -> float:
    return max((event.end for rank in report.ranks for event in rank.events), default=0.0)


def drawn_part(report: RunReport, end: float) -> str:
    """Words for the part of a run that a picture up to `end` shows; empty where it shows all."""
    last = _last_end(report)
    if end >= last:
        return ""
    if report.ttft_s is None or not report.step_s:
        return f"the first {duration(end)} of {duration(last)}"
    # Sums of the same times may be rounded differently.
    known = np.cumsum([report.ttft_s, *report.step_s]) <= end * (1 + 1e-9)
    return f"the prompt and the first {max(0, known.sum() - 1)} of {len(report.step_s)} decoded tokens"


def default_end(report: RunReport) -> float:
    """Seconds of the prefill and about eight decoded tokens; the whole run if it is no longer than that."""
    last = _last_end(report)
    if report.ttft_s is None:
        return last if last > 0 else 1e-3
    shown = report.ttft_s + max(8 * (report.ttit_s or 0.0), 0.1 * report.ttft_s)
    return (min(last, shown) if last > 0 else shown) or 1e-3


def busy_share(events: list[Event], begin: float, end: float, columns: int) -> NDArray[np.float64]:
    """Share of every column's time in which at least one event ran: [columns], from 0 to 1."""
    edges = np.linspace(begin, end, columns + 1)
    times, busy = [begin], [0.0]
    for event in sorted(events, key=lambda event: event.start):
        start, stop = max(event.start, times[-1]), min(event.end, end)
        if stop > start:
            times += [start, stop]
            busy += [busy[-1], busy[-1] + stop - start]
    share = np.diff(np.interp(edges, times, busy)) * columns / (end - begin)
    return np.clip(share, 0.0, 1.0)


def _draw_rank(axes: Axes, rank: RankReport, lane: int, begin: float, end: float, until: float) -> None:
    events = {kind: [event for event in rank.events if event.kind == kind] for kind in _LANES}
    for kind, (top, bottom) in _LANES.items():
        _draw_lane(axes, events[kind], kind, lane + top, lane + bottom, begin, end)
    if lane % 2:
        axes.axhspan(lane, lane + 1, color="#f3f5f7", linewidth=0, zorder=0)
    notes = [
        (f"{busy_share(events[kind], begin, until, 1)[0]:.0%}", y, 36, "right", _COLORS[kind])
        for kind, y in (("compute", 0.31), ("wait", 0.72))
    ]
    for text, y, x, side, color in (*notes, (f"{rank.tokens:,} tokens", 0.5, 50, "left", INK)):
        axes.annotate(
            text, (1, lane + y), (x, 0), ("axes fraction", "data"), "offset points",
            color=color, va="center", ha=side,
        )  # fmt: skip


def _draw_lane(axes: Axes, events: list[Event], kind: str, top: float, bottom: float, begin: float, end: float) -> None:
    """A row of pixels, each as dark as the lane was busy in its time."""
    from matplotlib.colors import to_rgb

    pixels = np.empty((1, _COLUMNS, 4))
    pixels[0, :, :3] = to_rgb(_COLORS[kind])
    pixels[0, :, 3] = busy_share(events, begin, end, _COLUMNS)
    extent = (begin * 1e3, end * 1e3, bottom, top)
    axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=3)


def _draw_phases(axes: Axes, report: RunReport, begin: float, end: float) -> None:
    if report.ttft_s is None or not begin < report.ttft_s < end:
        return
    first = report.ttft_s * 1e3
    axes.axvspan(begin * 1e3, first, color="#e8f0fa", linewidth=0, zorder=0.5, alpha=0.7)
    axes.axvline(first, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=5)
    for text, offset, side in (("prefill", -6, "right"), ("decode", 6, "left")):
        axes.annotate(
            text, (first, 1), (offset, 4), ("data", "axes fraction"), "offset points",
            color=INK, fontsize=8.5, ha=side, va="bottom", annotation_clip=False,
        )  # fmt: skip


def _draw_frame(
    figure: SubFigure, axes: Axes, report: RunReport, ranks: Sequence[RankReport], height_in: float, shown: str
) -> None:
    from matplotlib.patches import Patch

    axes.set_xlabel("milliseconds since the start" + (f"; drawn: {shown}" if shown else ""))
    axes.grid(axis="x", zorder=0.6)
    several = len({rank.host for rank in report.ranks}) > 1
    labels = [
        f"rank {rank.rank}" + (f" · {rank.host[:12]}" if several else "") + f"\ncp {rank.cp_rank} · tp {rank.tp_rank}"
        for rank in ranks
    ]
    axes.set_yticks([lane + 0.5 for lane in range(len(labels))], labels, fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    options: Any = {"color": FAINT, "fontsize": 7.5, "annotation_clip": False}
    axes.annotate("share of time", (1, 1), (10, 4), "axes fraction", "offset points", **options)
    latencies = [f"TTFT {duration(report.ttft_s)}", f"TTIT {duration(report.ttit_s)}"]
    title = [Path(report.model).name[:48], f"CP{report.mesh['cp']} x TP{report.mesh['tp']}", *latencies]
    left, top = _LEFT_IN / _WIDTH_IN, 1 - 0.14 / height_in
    figure.text(left, top, "   ·   ".join(title), fontsize=12.5, va="top", weight="bold")
    cached = f" behind {report.cached_tokens:,} cached" if report.cached_tokens else ""
    subtitle = f"{report.prompt_tokens:,} prompt tokens{cached}, {report.new_tokens:,} new tokens"
    if "simulated" in report.machine:
        subtitle += f", simulated on {report.machine['simulated']}"
    if len(ranks) < len(report.ranks):
        subtitle += f", the first {len(ranks)} of {len(report.ranks)} ranks"
    figure.text(left, 1 - 0.42 / height_in, subtitle, fontsize=9, color=FAINT, va="top")
    figure.legend(
        handles=[Patch(facecolor=_COLORS[kind], label=label) for kind, label in _LABELS.items()],
        loc="upper right", bbox_to_anchor=(1 - 0.1 / _WIDTH_IN, 1 - 0.34 / height_in), ncols=3,
        fontsize=8.5, handlelength=1.4, columnspacing=1.4, borderaxespad=0,
    )  # fmt: skip


def write_trace(report: RunReport, path: str | Path) -> None:
    """Write the run as a trace: one process per rank, times in microseconds since the run's zero.

    Compute and waiting are threads of complete events. Transfers in flight overlap each other, which a thread
    cannot show, and so are asynchronous events.
    """
    events = [event for rank in report.ranks for event in _rank_events(rank)]
    metadata = {"model": report.model, "mesh": report.mesh, "ttft_s": report.ttft_s, "ttit_s": report.ttit_s}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}
    write_whole(path, json.dumps(trace, separators=(",", ":")).encode())


def _rank_events(report: RankReport) -> Iterator[dict[str, Any]]:
    label = f"rank {report.rank} (cp {report.cp_rank}, tp {report.tp_rank}) on {report.host}"
    names: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": label}),
        ("process_sort_index", 0, {"sort_index": report.rank}),
        *(("thread_name", thread, {"name": kind}) for kind, thread in _THREADS.items()),
    ]
    for name, thread, args in names:
        yield {"ph": "M", "name": name, "args": args, "pid": report.rank, "tid": thread}
    for number, event in enumerate(report.events):
        args = {} if event.layer is None else {"layer": event.layer}
        base = {"name": event.name, "cat": event.kind, "pid": report.rank, "args": args}
        start, end = event.start * 1e6, event.end * 1e6
        if event.kind in _THREADS:
            yield {**base, "ph": "X", "tid": _THREADS[event.kind], "ts": start, "dur": end - start}
        else:
            for phase, time in (("b", start), ("e", end)):
                yield {**base, "tid": 0, "id": f"{report.rank}.{number}", "ph": phase, "ts": time}
