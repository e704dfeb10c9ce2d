"""Tables, charts and summary of `scaling.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .capacity import memory_line
from .lines import Line, draw_lines
from .report import align, publish
from .statistics import Interval, median, unpaired_ratio

MEGABYTE = 1 << 20
Row = Mapping[str, Any]


def _select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _sizes(rows: Sequence[Row], method: str) -> list[int]:
    return sorted({row["ranks"] for row in rows if row["method"] == method})


def summarise(rows: Sequence[Row], cap_bytes: float) -> dict[str, Any]:
    """What the paper's figures and tables say, of these rows."""
    return {
        "scaling_ratio": _scaling(rows),
        "memory_cap_bytes": cap_bytes,
        "longest_context": _longest(rows, cap_bytes),
        "ttft_ttit": _latencies(rows),
        "attention_us": _attention(rows),
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def _scaling(rows: Sequence[Row]) -> dict[str, Any]:
    ratios: dict[str, Any] = {}
    for context in sorted({row["context"] for row in rows}):
        found: dict[str, Any] = {}
        for method in _methods(rows):
            base = _select(rows, method="cp" if method == "cp" else "tp", context=context, ranks=1)
            for row in _select(rows, method=method, context=context):
                if base:
                    value = unpaired_ratio(base[0]["seconds"], row["seconds"]).to_json()
                    found.setdefault(method, {})[str(row["ranks"])] = value
        ratios[str(context)] = found
    return ratios


def _longest(rows: Sequence[Row], cap_bytes: float) -> dict[str, Any]:
    longest: dict[str, Any] = {}
    for method in _methods(rows):
        for size in _sizes(rows, method):
            cells = _select(rows, method=method, ranks=size)
            contexts = [row["context"] for row in cells]
            try:
                line = memory_line(
                    contexts, [max(row["working_bytes"]) for row in cells], max(cells[0]["weight_bytes"])
                )
            except ValueError as error:
                entry: dict[str, Any] = {"tokens": None, "label": str(error)}
            else:
                tokens = line.longest(cap_bytes)
                label = "within the measured lengths" if tokens <= max(contexts) else "extrapolated linearly"
                entry = {
                    "tokens": tokens,
                    "label": label,
                    "fixed_bytes": line.fixed_bytes,
                    "token_bytes": line.token_bytes,
                    "longest_measured": max(contexts),
                    "error_at_longest_measured": line.error,
                }
            longest.setdefault(method, {})[str(size)] = entry
    return longest


def _latencies(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: (row["ranks"], row["method"])):
        kind, _, way = row["method"].partition("_")
        name = f"{kind.upper()}{row['ranks']}{f' {way}' if way else ''}"
        found.setdefault(str(row["context"]), {})[name] = {
            "ttft_s": median(row["seconds"]).to_json(),
            "ttit_s": median(row["ttit_seconds"]).to_json(),
        }
    return found


def _attention(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        if "prefill_us" in row:
            parts = {"prefill": row["prefill_us"], "decode": row["decode_us"]}
            found.setdefault(str(row["context"]), {})[str(row["ranks"])] = parts
    return found


def show(summary: Mapping[str, Any]) -> None:
    """Print the tables."""
    lines = [["tokens", "", "TTFT s", "TTIT ms"]]
    for context, names in summary["ttft_ttit"].items():
        for name, value in names.items():
            ttft, ttit = value["ttft_s"]["value"], 1e3 * value["ttit_s"]["value"]
            lines.append([context, name, f"{ttft:.3f}", f"{ttit:.2f}"])
    print(f"\nTime to first and to incremental token\n{align(lines)}")
    lines = [["tokens", "", "ranks", "tau_1 / tau_N [95%]"]]
    for context, methods in summary["scaling_ratio"].items():
        for method, sizes in methods.items():
            lines += [[context, method, size, str(Interval(**value))] for size, value in sizes.items()]
    print(f"\nScaling ratio\n{align(lines)}")
    lines = [["", "ranks", "tokens", "bytes per token", "fixed MB", ""]]
    for method, sizes in summary["longest_context"].items():
        for size, entry in sizes.items():
            if entry["tokens"] is None:
                lines.append([method, size, "-", "-", "-", entry["label"]])
            else:
                fixed = f"{entry['fixed_bytes'] / MEGABYTE:.0f}"
                lines.append(
                    [method, size, f"{entry['tokens']:,}", f"{entry['token_bytes']:.0f}", fixed, entry["label"]]
                )
    print(f"\nLongest context under {summary['memory_cap_bytes'] / MEGABYTE:.0f} MB per rank\n{align(lines)}")
    lines = [["tokens", "CP", "phase", "attention", "hop", "hop exposed", "collective", "whole layer"]]
    for context, sizes in summary["attention_us"].items():
        for size, phases in sizes.items():
            for phase, parts in phases.items():
                lines.append([context, size, phase, *(f"{value:.0f}" for value in parts.values())])
    print(f"\nAttention, microseconds per ring step, hop, collective and layer\n{align(lines)}\n")


def draw(stem: Path, arguments: argparse.Namespace, rows: Sequence[Row], summary: Mapping[str, Any]) -> list[Path]:
    """Draw time to first token by context, the scaling ratio by ranks, and the longest context by ranks."""
    subtitle = (
        f"Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.kv_heads} KV heads, {arguments.dtype}, "
        f"{arguments.threads} thread(s) per rank; median, 95% interval"
    )
    ttft, scaling, capacity = (stem.with_suffix(f".{name}.png") for name in ("ttft", "scaling", "context"))
    lines = []
    for size in _sizes(rows, "cp"):
        cells = _select(rows, method="cp", ranks=size)
        lines.append(Line(f"CP{size}", [row["context"] for row in cells], [median(row["seconds"]) for row in cells]))
    draw_lines(
        ttft, lines, title="Time to first token by context", subtitle=subtitle, x_label="tokens", y_label="seconds",
        log_y=True,
    )  # fmt: skip
    context = max(summary["scaling_ratio"], key=int)
    lines = []
    for method, sizes in summary["scaling_ratio"][context].items():
        x = [int(size) for size in sizes]
        if method != "cp" and 1 not in x:
            x, sizes = [1, *x], {"1": {"value": 1.0, "low": 1.0, "high": 1.0}, **sizes}
        lines.append(Line(method, x, [Interval(**value) for value in sizes.values()]))
    every = sorted({size for line in lines for size in line.x})
    lines.append(Line("ideal", every, [Interval(size, size, size) for size in every], dashed=True))
    draw_lines(
        scaling, lines, title=f"Scaling ratio at {int(context):,} tokens", subtitle=subtitle, x_label="ranks",
        y_label="tau_1 / tau_N",
    )  # fmt: skip
    lines = []
    for method, sizes in summary["longest_context"].items():
        known = {int(size): entry["tokens"] for size, entry in sizes.items() if entry["tokens"] is not None}
        if known:
            lines.append(Line(method, list(known), [Interval(value, value, value) for value in known.values()]))
    drawn = [ttft, scaling]
    if lines:
        draw_lines(
            capacity, lines, title=f"Longest context under {arguments.memory_cap_mb:g} MB per rank",
            subtitle="Straight line through the measured lengths; beyond the longest of them it is extrapolated",
            x_label="ranks", y_label="tokens",
        )  # fmt: skip
        drawn.append(capacity)
    return drawn


def report(arguments: argparse.Namespace, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Print the tables; write the JSON and the charts where they are asked for."""
    summary = summarise(rows, arguments.memory_cap_mb * MEGABYTE)
    show(summary)
    publish(
        arguments,
        benchmark="scaling",
        machine=machine,
        rows=rows,
        summary=summary,
        draw=lambda path: draw(path, arguments, rows, summary),
    )
