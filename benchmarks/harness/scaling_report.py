"""Tables, charts and summary of `scaling.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .charts import Chart, Line
from .charts import lines as draw_lines
from .publish import MEGABYTE, show_table
from .statistics import Interval, median, unpaired_ratio

Row = Mapping[str, Any]


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of a rank as a straight line over the context's tokens."""

    fixed_bytes: float  # Weights, and what the line has at no token
    token_bytes: float  # Per token of the context
    error: (
        float | None
    )  # By how much the line through all lengths but the longest misses that one; None of fewer than 3

    def longest(self, cap_bytes: float) -> int:
        """Tokens that fit under a cap; extrapolated where that is beyond what was measured."""
        return max(0, int((cap_bytes - self.fixed_bytes) / self.token_bytes))


def memory_line(contexts: Sequence[int], working_bytes: Sequence[int], weight_bytes: int) -> MemoryLine:
    """Fit it to the largest rank's memory, without its weights, at several lengths."""
    if len(set(contexts)) < 2:
        raise ValueError(f"{len(set(contexts))} length(s) give no line; two are needed")
    slope, start = np.polyfit(contexts, working_bytes, 1)
    if slope <= 0:
        raise ValueError(f"memory does not grow with the context: {list(working_bytes)} bytes at {list(contexts)}")
    error = None
    if len(contexts) > 2:
        x, y = (np.asarray(values)[np.argsort(contexts)] for values in (contexts, working_bytes))
        error = float(np.polyval(np.polyfit(x[:-1], y[:-1], 1), x[-1]) / y[-1] - 1)
    return MemoryLine(float(weight_bytes + max(start, 0.0)), float(slope), error)


def _select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def summarise(rows: Sequence[Row], cap_bytes: float) -> dict[str, Any]:
    """What the paper's figures and tables say, of these rows."""
    scaling: dict[str, Any] = {str(context): {} for context in sorted({row["context"] for row in rows})}
    latencies: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    for row in rows:
        method, context, ranks = row["method"], str(row["context"]), str(row["ranks"])
        # tau_1 is `cp` on one rank, and for the others plain transformers in one process.
        base = _select(rows, method="cp" if method == "cp" else "tp", context=row["context"], ranks=1)
        if base:
            scaling[context].setdefault(method, {})[ranks] = unpaired_ratio(
                base[0]["seconds"], row["seconds"]
            ).to_json()
        if "prefill_us" in row:
            attention.setdefault(context, {})[ranks] = {"prefill": row["prefill_us"], "decode": row["decode_us"]}
    for row in sorted(rows, key=lambda row: (row["ranks"], row["method"])):
        kind, _, way = row["method"].partition("_")
        name = f"{kind.upper()}{row['ranks']}{f' {way}' if way else ''}"
        times = {"ttft_s": median(row["seconds"]).to_json(), "ttit_s": median(row["ttit_seconds"]).to_json()}
        latencies.setdefault(str(row["context"]), {})[name] = times
    longest: dict[str, Any] = {}
    for method, ranks in dict.fromkeys((row["method"], row["ranks"]) for row in rows):
        longest.setdefault(method, {})[str(ranks)] = _longest(_select(rows, method=method, ranks=ranks), cap_bytes)
    return {
        "scaling_ratio": {
            context: {name: each for name, each in found.items() if each} for context, found in scaling.items()
        },
        "memory_cap_bytes": cap_bytes,
        "longest_context": longest,
        "ttft_ttit": latencies,
        "attention_us": attention,
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def _longest(rows: Sequence[Row], cap_bytes: float) -> dict[str, Any]:
    contexts = [row["context"] for row in rows]
    try:
        line = memory_line(contexts, [max(row["working_bytes"]) for row in rows], max(rows[0]["weight_bytes"]))
    except ValueError as error:
        return {"tokens": None, "label": str(error)}
    tokens = line.longest(cap_bytes)
    return {
        "tokens": tokens,
        "label": "within the measured lengths" if tokens <= max(contexts) else "extrapolated linearly",
        "fixed_bytes": line.fixed_bytes,
        "token_bytes": line.token_bytes,
        "longest_measured": max(contexts),
        "error_at_longest_measured": line.error,
    }


def show(summary: Mapping[str, Any]) -> None:
    """Print the tables."""
    lines = [["tokens", "", "TTFT s", "TTIT ms"]]
    for context, names in summary["ttft_ttit"].items():
        for name, value in names.items():
            lines.append([context, name, f"{value['ttft_s']['value']:.3f}", f"{1e3 * value['ttit_s']['value']:.2f}"])
    show_table("Time to first and to incremental token", lines)
    lines = [["tokens", "", "ranks", "tau_1 / tau_N [95%]"]]
    for context, methods in summary["scaling_ratio"].items():
        for method, sizes in methods.items():
            lines += [[context, method, size, str(Interval(**value))] for size, value in sizes.items()]
    show_table("Scaling ratio", lines)
    lines = [["", "ranks", "tokens", "bytes per token", "fixed MB", ""]]
    for method, sizes in summary["longest_context"].items():
        for size, entry in sizes.items():
            shown = ["-", "-", "-"]
            if entry["tokens"] is not None:
                fixed = f"{entry['fixed_bytes'] / MEGABYTE:.0f}"
                shown = [f"{entry['tokens']:,}", f"{entry['token_bytes']:.0f}", fixed]
            lines.append([method, size, *shown, entry["label"]])
    show_table(f"Longest context under {summary['memory_cap_bytes'] / MEGABYTE:.0f} MB per rank", lines)
    lines = [["tokens", "CP", "phase", "attention", "hop", "hop exposed", "collective", "whole layer"]]
    for context, sizes in summary["attention_us"].items():
        for size, phases in sizes.items():
            for phase, parts in phases.items():
                lines.append([context, size, phase, *(f"{value:.0f}" for value in parts.values())])
    show_table("Attention, microseconds per ring step, hop, collective and layer", lines)


def charts(arguments: argparse.Namespace, rows: Sequence[Row], summary: Mapping[str, Any]) -> list[Chart]:
    """Time to first token by context, the scaling ratio by ranks, and the longest context by ranks."""
    subtitle = (
        f"Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.kv_heads} KV heads, {arguments.dtype}, "
        f"{arguments.threads} thread(s) per rank; median, 95% interval"
    )
    ttft = []
    for size in sorted({row["ranks"] for row in _select(rows, method="cp")}):
        cells = _select(rows, method="cp", ranks=size)
        ttft.append(Line(f"CP{size}", [row["context"] for row in cells], [median(row["seconds"]) for row in cells]))
    context = max(summary["scaling_ratio"], key=int)
    scaling = []
    for method, sizes in summary["scaling_ratio"][context].items():
        found = {int(size): Interval(**value) for size, value in sizes.items()}
        if method != "cp":
            found = {1: Interval(1.0, 1.0, 1.0), **found}
        scaling.append(Line(method, list(found), list(found.values())))
    every = sorted({size for line in scaling for size in line.x})
    scaling.append(Line("ideal", every, [Interval(size, size, size) for size in every], dashed=True))
    capacity = []
    for method, sizes in summary["longest_context"].items():
        known = {int(size): entry["tokens"] for size, entry in sizes.items() if entry["tokens"] is not None}
        if known:
            capacity.append(Line(method, list(known), [Interval(value, value, value) for value in known.values()]))
    made = [
        draw_lines(
            "ttft", ttft, title="Time to first token by context", subtitle=subtitle, x_label="tokens",
            y_label="seconds", log_y=True,
        ),
        draw_lines(
            "scaling", scaling, title=f"Scaling ratio at {int(context):,} tokens", subtitle=subtitle, x_label="ranks",
            y_label="tau_1 / tau_N",
        ),
    ]  # fmt: skip
    if capacity:
        title = f"Longest context under {arguments.memory_cap_mb:g} MB per rank"
        subtitle = "Straight line through the measured lengths; beyond the longest of them it is extrapolated"
        labels = {"title": title, "subtitle": subtitle, "x_label": "ranks", "y_label": "tokens"}
        made.append(draw_lines("context", capacity, **labels))
    return made
