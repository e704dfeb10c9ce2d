"""A picture of offloaded decoding: split points, bytes, the link's utilisation and times, pass by pass."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.tracking.files import BLUE, FAINT, GREEN, INK, ORANGE, PALE, RED, picture
from megakv.tracking.measurements import OffloadStep
from megakv.tracking.report import RunReport
from megakv.tracking.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS = {"resident": FAINT, "recomputed": ORANGE, "on_host": GREEN, "streamed": BLUE, "out_of_window": PALE}
_CURVES = {
    "bytes of a pass": {"bytes_in": ("to the accelerator", BLUE, ".-"), "bytes_out": ("from it", RED, ".-")},
    "share of the link": {"link_utilisation": ("to the accelerator", BLUE, ".-")},
    "time of a pass": {
        "measured_s": ("measured", BLUE, ".-"),
        "predicted_s": ("predicted", ORANGE, "-"),
        "waited_s": ("waiting", RED, "-"),
    },
}
"""By panel, the fields of a pass that are drawn: their names, colours and lines."""


def draw_offload(report: RunReport, path: str | Path | io.BytesIO) -> None:
    """Draw the first rank that offloads, pass by pass, as a PNG.

    From top to bottom: what became of the cached tokens (the split point is the height of ``recomputed``) and by which
    method, bytes to the accelerator and from it, the link's utilisation, and predicted beside measured times.
    """
    rank = next((rank for rank in report.ranks if rank.offload), None)
    if rank is None:
        raise ValueError("this run has no passes over offloaded keys and values")
    with picture(path, figsize=(11, 9), dpi=120) as figure:
        panels = figure.subplots(1 + len(_CURVES), 1, sharex=True)
        _tokens(panels[0], rank.offload)
        for axes, label in zip(panels[1:], _CURVES, strict=True):
            _curves(axes, rank.offload, label)
        for axes, label in zip(panels, ("cached tokens, a layer", *_CURVES), strict=True):
            axes.set_ylabel(label, fontsize=8)
            axes.set_ylim(bottom=0)
            axes.grid()
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        panels[-1].set_xlabel("pass over cached tokens")
        title = f"{Path(report.model).name[:48]}, rank {rank.rank}: keys and values off the accelerator"
        figure.suptitle(title, fontsize=11, x=0.06, ha="left")
        figure.subplots_adjust(left=0.08, right=0.84, top=0.93, bottom=0.06, hspace=0.12)


def _tokens(axes: Axes, steps: Sequence[OffloadStep]) -> None:
    numbers = range(1, len(steps) + 1)
    # A bar each, so that a run of a single pass shows too.
    below = [0] * len(steps)
    for kind, color in _TOKENS.items():
        values = [getattr(step, kind) for step in steps]
        if any(values):
            axes.bar(numbers, values, width=1.0, bottom=below, color=color, label=kind.replace("_", " "))
        below = [sum(pair) for pair in zip(below, values, strict=True)]
    first = 0
    for plan, run in groupby(steps, key=lambda step: step.plan):
        count = len(list(run))
        if count * 24 >= len(steps):
            place = (first + (count + 1) / 2, 1)
            axes.annotate(plan[:16], place, (0, 2), ("data", "axes fraction"), "offset points", color=INK, ha="center")
        if first:
            axes.axvline(first + 0.5, color=FAINT, linewidth=0.7, linestyle=(0, (3, 3)))
        first += count


def _curves(axes: Axes, steps: Sequence[OffloadStep], label: str) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

    shown = list(enumerate(steps, 1))
    if label == "share of the link":
        axes.axhline(1.0, color=FAINT, linewidth=0.7)
    elif label == "time of a pass":
        axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    else:
        most = max(max(step.bytes_in, step.bytes_out, 4) for step in steps)
        axes.yaxis.set_major_locator(MultipleLocator(2 ** (most.bit_length() - 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    if label == "time of a pass" and len(steps) > 1:
        # Measuring a machine's speeds takes as long as many passes, which would lie flat beside it.
        shown = [(number, step) for number, step in shown if not step.profiled]
        for number, step in enumerate(steps, 1):
            if step.profiled:
                note = f"{step.measured_s:.2g} s, speeds profiled"
                axes.annotate(note, (number, 0), (2, 4), textcoords="offset points", color=FAINT, rotation=90)
    for name, (meaning, color, line) in _CURVES[label].items():
        values = [getattr(step, name) for _, step in shown]
        axes.plot([number for number, _ in shown], values, line, color=color, label=meaning)
