"""A picture of offloaded decoding: split points, bytes, the link's utilisation and times, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.tracking.files import write_picture
from megakv.tracking.measurements import OffloadStep
from megakv.tracking.report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT = "#22282f", "#8a929b"
_TOKENS = {
    "resident": "#8a929b",
    "recomputed": "#f2b872",
    "on_host": "#3b8f5f",
    "streamed": "#2f6db3",
    "out_of_window": "#dde1e6",
}
_PANELS = ("cached tokens, a layer", "bytes of a pass", "share of the link", "time of a pass")
_UNITS = {"bytes of a pass": "B", "time of a pass": "s"}


def draw_offload(report: RunReport, path: str | Path) -> None:
    """Draw the first rank that offloads, pass by pass, as a PNG.

    From top to bottom: what became of the cached tokens (the split point is the height of ``recomputed``) and by which
    method, bytes to the accelerator and from it, the link's utilisation, and predicted beside measured times.
    """
    # Only rank 0 draws, once; importing matplotlib on every rank costs each of them half a second.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rank = next((rank for rank in report.ranks if rank.offload), None)
    if rank is None:
        raise ValueError("this run has no passes over offloaded keys and values")
    figure = Figure(figsize=(11, 9), dpi=120, facecolor="white")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for draw, axes, label in zip((_tokens, _bytes, _utilisation, _times), panels, _PANELS, strict=True):
        draw(axes, rank.offload)
        axes.set_ylabel(label, color=_INK, fontsize=8)
        axes.set_ylim(bottom=0)
        if label in _UNITS:
            axes.yaxis.set_major_formatter(EngFormatter(unit=_UNITS[label]))
        axes.tick_params(labelsize=8, colors=_INK)
        axes.grid(color="#dde1e6", linewidth=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, labelcolor=_INK)
    panels[-1].set_xlabel("pass over cached tokens", color=_INK, fontsize=9)
    title = f"{Path(report.model).name[:48]}, rank {rank.rank}: keys and values off the accelerator"
    figure.suptitle(title, fontsize=11, color=_INK, x=0.06, ha="left", parse_math=False)
    figure.subplots_adjust(left=0.08, right=0.84, top=0.93, bottom=0.06, hspace=0.12)
    write_picture(path, figure)


def _tokens(axes: Axes, steps: Sequence[OffloadStep]) -> None:
    numbers = range(1, len(steps) + 1)
    counts = [[getattr(step, kind) for step in steps] for kind in _TOKENS]
    # A step each, so that a run of a single pass shows too.
    below = [0] * len(steps)
    for (kind, color), values in zip(_TOKENS.items(), counts, strict=True):
        if any(values):
            axes.bar(numbers, values, width=1.0, bottom=below, color=color, label=kind.replace("_", " "))
        below = [sum(pair) for pair in zip(below, values, strict=True)]
    first = 0
    for plan, run in groupby(steps, key=lambda step: step.plan):
        count = len(list(run))
        if count * 24 >= len(steps):
            axes.annotate(
                plan[:16], (first + (count + 1) / 2, 1), (0, 2), ("data", "axes fraction"), "offset points",
                color=_INK, fontsize=8, ha="center", parse_math=False,
            )  # fmt: skip
        if first:
            axes.axvline(first + 0.5, color=_FAINT, linewidth=0.7, linestyle=(0, (3, 3)))
        first += count


def _bytes(axes: Axes, steps: Sequence[OffloadStep]) -> None:
    numbers = range(1, len(steps) + 1)
    axes.plot(numbers, [step.bytes_in for step in steps], ".-", color="#2f6db3", label="to the accelerator")
    axes.plot(numbers, [step.bytes_out for step in steps], ".-", color="#b3261e", label="from it")


def _utilisation(axes: Axes, steps: Sequence[OffloadStep]) -> None:
    numbers = range(1, len(steps) + 1)
    axes.plot(numbers, [step.link_utilisation for step in steps], ".-", color="#2f6db3", label="to the accelerator")
    axes.axhline(1.0, color=_FAINT, linewidth=0.7)


def _times(axes: Axes, steps: Sequence[OffloadStep]) -> None:
    # Measuring a machine's speeds takes as long as many passes, which would lie flat beside it.
    usual = [(number, step) for number, step in enumerate(steps, 1) if not step.profiled or len(steps) == 1]
    numbers = [number for number, _ in usual]
    axes.plot(numbers, [step.measured_s for _, step in usual], ".-", color="#2f6db3", label="measured")
    axes.plot(numbers, [step.predicted_s for _, step in usual], color="#f2b872", label="predicted")
    axes.plot(numbers, [step.waited_s for _, step in usual], color="#b3261e", label="waiting")
    for number, step in enumerate(steps, 1):
        if number not in numbers:
            label = f"{step.measured_s:.2g} s, speeds profiled"
            axes.annotate(label, (number, 0), (2, 4), textcoords="offset points", color=_FAINT, fontsize=7, rotation=90)
