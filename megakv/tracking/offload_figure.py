"""A picture of offloaded decoding: split points, bytes, the link's utilisation and times, pass by pass."""

from __future__ import annotations

import io
from pathlib import Path

from megakv.tracking.files import BLUE, FAINT, GREEN, ORANGE, PALE, RED, picture
from megakv.tracking.report import RunReport
from megakv.tracking.units import duration, size

_TOKENS = {"resident": FAINT, "recomputed": ORANGE, "on_host": GREEN, "streamed": BLUE, "out_of_window": PALE}
_CURVES = {
    "bytes of a pass": {"bytes_in": ("to the accelerator", BLUE), "bytes_out": ("from it", RED)},
    "share of the link": {"link_utilisation": ("to the accelerator", BLUE)},
    "time of a pass": {
        "measured_s": ("measured", BLUE),
        "predicted_s": ("predicted", ORANGE),
        "waited_s": ("waiting", RED),
    },
}
"""By panel, the fields of a pass that are drawn: their names and colours."""
_SHOWN = {"bytes of a pass": size, "share of the link": "{:.0%}".format, "time of a pass": duration}


def draw_offload(report: RunReport, path: str | Path | io.BytesIO) -> None:
    """Draw the first rank that offloads, pass by pass, as a PNG.

    From top to bottom: what became of the cached tokens (the split point is the height of ``recomputed``), bytes to the
    accelerator and from it, the link's utilisation, and predicted beside measured times. Measuring a machine's speeds
    takes as long as many passes: such a pass has no point.
    """
    from matplotlib.ticker import FuncFormatter

    rank = next((rank for rank in report.ranks if rank.offload), None)
    if rank is None:
        raise ValueError("this run has no passes over offloaded keys and values")
    steps, numbers = rank.offload, range(1, len(rank.offload) + 1)
    with picture(path, figsize=(11, 9), dpi=120) as figure:
        panels = figure.subplots(1 + len(_CURVES), 1, sharex=True)
        below = [0] * len(steps)
        for kind, color in _TOKENS.items():
            values = [getattr(step, kind) for step in steps]
            # A bar each, so that a run of a single pass shows too.
            if any(values):
                panels[0].bar(numbers, values, width=1.0, bottom=below, color=color, label=kind.replace("_", " "))
            below = [sum(pair) for pair in zip(below, values, strict=True)]
        usual = [(number, step) for number, step in zip(numbers, steps, strict=True) if not step.profiled]
        usual = usual or list(zip(numbers, steps, strict=True))
        for axes, (label, curves) in zip(panels[1:], _CURVES.items(), strict=True):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, shown=_SHOWN[label]: shown(value)))
            for name, (meaning, color) in curves.items():
                values = [getattr(step, name) for _, step in usual]
                axes.plot([number for number, _ in usual], values, ".-", color=color, label=meaning)
        for axes, label in zip(panels, ("cached tokens, a layer", *_CURVES), strict=True):
            axes.set_ylabel(label, fontsize=8)
            axes.set_ylim(bottom=0)
            axes.grid()
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        panels[-1].set_xlabel("pass over cached tokens")
        title = f"{Path(report.model).name[:48]}, rank {rank.rank}: keys and values off the accelerator"
        figure.suptitle(title, fontsize=11, x=0.06, ha="left")
        figure.subplots_adjust(left=0.08, right=0.84, top=0.93, bottom=0.06, hspace=0.12)
