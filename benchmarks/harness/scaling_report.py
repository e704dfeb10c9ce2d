"""Tables, charts and summary of `scaling.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .charts import Chart, Line, lines
from .models import words_of
from .publish import MEGABYTE, columns, show_intervals, show_table
from .statistics import Interval, median, point, ratio

Row = Mapping[str, Any]


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
            gain = ratio(base[0]["seconds"], row["seconds"], paired=False)
            scaling[context].setdefault(method, {})[ranks] = gain.to_json()
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
    """Tokens under a cap by a straight line through the largest rank's memory, beside its weights, at all lengths."""
    contexts = [row["context"] for row in rows]
    if len(set(contexts)) < 2:
        return {"tokens": None, "label": "one length gives no line"}
    slope, start = np.polyfit(contexts, [max(row["working_bytes"]) for row in rows], 1)
    if slope <= 0:
        return {"tokens": None, "label": "memory does not grow with the context"}
    fixed = max(rows[0]["weight_bytes"]) + max(start, 0.0)
    tokens = max(0, int((cap_bytes - fixed) / slope))
    label = "within the measured lengths" if tokens <= max(contexts) else "extrapolated linearly"
    return {"tokens": tokens, "label": label, "fixed_bytes": float(fixed), "token_bytes": float(slope)}


def show(summary: Mapping[str, Any]) -> None:
    for key, title in (("ttft_s", "Time to first token, seconds"), ("ttit_s", "Time to incremental token, seconds")):
        times = {
            f"{context} tokens": {name: value[key] for name, value in names.items()}
            for context, names in summary["ttft_ttit"].items()
        }
        show_intervals(title, times, "median [95%]")
    show_intervals("Scaling ratio by tokens, method and ranks", summary["scaling_ratio"], "tau_1 / tau_N [95%]")
    found = [
        {"method": method, "ranks": size, **entry}
        for method, sizes in summary["longest_context"].items()
        for size, entry in sizes.items()
    ]
    shown = {name: lambda entry, name=name: entry.get(name) for name in ("method", "ranks", "tokens", "label")}
    show_table(f"Longest context under {summary['memory_cap_bytes'] / MEGABYTE:.0f} MB per rank", columns(found, shown))
    lines = [["tokens", "CP", "phase", "attention", "hop", "hop exposed", "collective", "whole layer"]]
    for context, sizes in summary["attention_us"].items():
        for size, phases in sizes.items():
            for phase, parts in phases.items():
                lines.append([context, size, phase, *(f"{value:.0f}" for value in parts.values())])
    show_table("Attention, microseconds per ring step, hop, collective and layer", lines)


def charts(arguments: argparse.Namespace, rows: Sequence[Row], summary: Mapping[str, Any]) -> list[Chart]:
    """Time to first token by context, and the scaling ratio and the longest context by ranks."""
    labels = {"subtitle": f"{words_of(arguments)}; median, 95% interval"}
    ttft = []
    for size in sorted({row["ranks"] for row in _select(rows, method="cp")}):
        own = _select(rows, method="cp", ranks=size)
        ttft.append(Line(f"CP{size}", [row["context"] for row in own], [median(row["seconds"]) for row in own]))
    context = max(summary["scaling_ratio"], key=int)
    scaling, capacity = [], []
    for method, sizes in summary["scaling_ratio"][context].items():
        found = {1: point(1.0)} | {int(size): Interval(**value) for size, value in sizes.items()}
        scaling.append(Line(method, list(found), list(found.values())))
    every = sorted({size for line in scaling for size in line.x})
    scaling.append(Line("ideal", every, [point(size) for size in every], style="--"))
    for method, sizes in summary["longest_context"].items():
        if known := {int(size): point(entry["tokens"]) for size, entry in sizes.items() if entry["tokens"] is not None}:
            capacity.append(Line(method, list(known), list(known.values())))
    title = "Time to first token by context"
    made = [lines("ttft", ttft, title=title, x_label="tokens", y_label="seconds", log_y=True, **labels)]
    labels["x_label"] = "ranks"
    title = f"Scaling ratio at {int(context):,} tokens"
    made.append(lines("scaling", scaling, title=title, y_label="tau_1 / tau_N", **labels))
    title = f"Longest context under {arguments.memory_cap_mb:g} MB per rank, by a straight line"
    return made + [lines("context", capacity, title=title, y_label="tokens", **labels)] * bool(capacity)
