"""Tables of `offload.py`, in the form of KVPR's Tables 2 to 5 and of what its figures show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .offload_plan import Shape, variant
from .offload_summary import settings, step_s
from .report import align

Row = Mapping[str, Any]
TASKS = ("load weights", "load cache", "load activations", "compute", "store cache", "store activations")


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str
    lines: Sequence[Sequence[str]]  # The heads first

    def __str__(self) -> str:
        return f"{self.title}\n\n{align(self.lines)}\n"


def tables(rows: Sequence[Row], shapes: Mapping[str, Shape], element_bytes: int) -> list[Table]:
    """All tables that there are rows for."""
    found = []
    for part, own in settings(rows):
        match part:
            case "links" | "long" | "disk" | "windows":
                found.append(_methods(own))
            case "hiding":
                found.append(_hiding(own, shapes[own[0]["shape"]], element_bytes))
            case "latency":
                found.append(_latency(own, "Tables 3 and 4"))
            case "llama":
                found.append(_latency(own, "Figure 13"))
            case "throughput":
                found += [_throughput(own), _breakdown(own)]
            case "batches":
                found.append(_grid(own, "batch", "Tokens per second by batch size (form of Figure 6, second row)"))
            case "processes":
                found.append(_processes(own))
    return found


def link_words(rows: Sequence[Row], *, short: bool = False) -> str:
    """How the link of some rows is to be called."""
    rates = sorted({row["link_gb_s"] for row in rows})
    speeds = ", ".join(f"{rate:.3g}" for rate in rates)
    if rows[0]["link"] == "emulated":
        return f"EMULATED link of {speeds} GB/s" + ("" if short else ": real copies in a thread, paced")
    return f"link measured at {speeds} GB/s"


def place_words(rows: Sequence[Row]) -> str:
    """Where the keys and values of some rows lie."""
    row = next((row for row in rows if "disk_io" in row), None)
    if row is None:
        return "in host memory"
    return (
        f"in host memory ({row['in_memory_share']:.0%} have room) and on disk (real {row['disk_io']}, "
        f"reads paced to an EMULATED {row['disk_gb_s']:.3g} GB/s)"
    )


def size_words(row: Row) -> str:
    """Prompt and new tokens."""
    return f"{row['context']}/{row['new_tokens']}"


def _title(text: str, rows: Sequence[Row]) -> str:
    return f"{text}. {link_words(rows)}"


def _methods(rows: Sequence[Row]) -> Table:
    head = ["model, link, method", "ms/step", "predicted", "tokens/s", "MB in", "MB out", "link", "compute"]
    disk = ["MB disk", "disk"] if any("disk_io" in row for row in rows) else []
    lines = [[*head, *disk, "MB device", "l", "on host", "of s'"]]
    for row in rows:
        known = "predicted_s" in row
        last = row["split_points"][-1] if known else None
        lines.append(
            [
                f"{row['shape']} {row['link_gb_s']:.3g} GB/s {variant(row['method']).title}",
                f"{1e3 * step_s(row):.1f}",
                f"{1e3 * row['predicted_s']:.1f}" if known else "-",
                f"{row['tokens_per_s']:.1f}",
                f"{row['bytes_in'] / 1e6:.2f}",
                f"{row['bytes_out'] / 1e6:.3f}",
                f"{row['link_utilisation']:.0%}",
                _percent(row.get("compute_utilisation")),
                *([f"{row.get('disk_bytes', 0.0) / 1e6:.2f}", _percent(row.get("disk_utilisation"))] if disk else []),
                f"{row['device_bytes'] / 1e6:.1f}",
                str(last[1]) if last else "-",
                f"{row['on_host']:.0f}" if known else "-",
                str(last[0]) if last else "-",
            ]
        )
    where = f", keys and values {place_words(rows)}" if disk else ""
    text = f"Every method side by side, weights resident{where}; l: tokens recomputed in the last step"
    return Table(_title(text, rows), lines)


def _hiding(rows: Sequence[Row], shape: Shape, element_bytes: int) -> Table:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    lines = [["batch size", *map(str, batches)]]
    caches = {row["batch"]: row["cache_bytes"] / row["layers"] for row in rows}
    lines.append(["keys and values of a layer, MB", *(f"{caches[batch] / 1e6:.2f}" for batch in batches)])
    for method in dict.fromkeys(row["method"] for row in rows):
        times = {row["batch"]: statistics.median(row["decode_s"]) for row in rows if row["method"] == method}
        lines.append([variant(method).title, *(f"{times[batch]:.3f}" for batch in batches)])
    weights = shape.attention_elements * element_bytes / 1e6
    text = (
        f"Decode latency in seconds, weights offloaded, row-by-row, {size_words(rows[0])} tokens; an attention's "
        f"weights are {weights:.1f} MB (form of Table 2)"
    )
    return Table(_title(text, rows), lines)


def _latency(rows: Sequence[Row], form: str) -> Table:
    lines = [["model, method", "batch", "prompt", "new", "cache MB", "device MB", "decode s", "tokens/s"]]
    order = [row["method"] for row in rows]
    for row in sorted(rows, key=lambda row: order.index(row["method"])):
        lines.append(
            [
                f"{row['shape']} {variant(row['method']).title}",
                str(row["batch"]),
                str(row["context"]),
                str(row["new_tokens"]),
                f"{row['cache_bytes'] / 1e6:.1f}",
                f"{row['device_bytes'] / 1e6:.1f}",
                f"{statistics.median(row['decode_s']):.3f}",
                f"{row['tokens_per_s']:.1f}",
            ]
        )
    return Table(_title(f"Decode latency, weights resident (form of {form})", rows), lines)


def _throughput(rows: Sequence[Row]) -> Table:
    sizes = list(dict.fromkeys(map(size_words, rows)))
    lines = [["method", *sizes, "MB in", "of it weights", "link", "compute", "MB device"]]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {size_words(row): row for row in rows if row["method"] == method}
        last = own[sizes[-1]]
        lines.append(
            [
                variant(method).title,
                *(f"{own[size]['tokens_per_s']:.2f}" for size in sizes),
                f"{last['bytes_in'] / 1e6:.1f}",
                f"{last['weight_bytes'] / 1e6:.1f}",
                f"{last['link_utilisation']:.0%}",
                _percent(last.get("compute_utilisation")),
                f"{last['device_bytes'] / 1e6:.1f}",
            ]
        )
    groups = max(row["groups"] for row in rows)
    text = (
        f"Tokens per second by prompt/new tokens, weights offloaded, {rows[0]['batch']} sequences in {groups} groups "
        "(form of Table 5 and Figure 6); bytes and shares of the last size"
    )
    return Table(_title(text, rows), lines)


def _breakdown(rows: Sequence[Row]) -> Table:
    lines = [["method", *TASKS]]
    for row in longest(rows):
        total = sum(row["breakdown_s"].values())
        lines.append([variant(row["method"]).title, *(f"{row['breakdown_s'][task] / total:.1%}" for task in TASKS)])
    text = f"Shares of a step's tasks, {size_words(longest(rows)[0])} tokens; they overlap (form of Figure 10)"
    return Table(_title(text, rows), lines)


def _grid(rows: Sequence[Row], axis: str, text: str) -> Table:
    places = list(dict.fromkeys(row[axis] for row in rows))
    lines = [[axis, *map(str, places)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row[axis]: row for row in rows if row["method"] == method}
        lines.append([variant(method).title, *(f"{own[place]['tokens_per_s']:.2f}" for place in places)])
    return Table(_title(text, rows), lines)


def _processes(rows: Sequence[Row]) -> Table:
    table = _grid(rows, "processes", "Tokens per second of each process by number of processes (form of Figure 14)")
    lines = list(table.lines)
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        if any(row["on_host"] for row in own):
            lines.append([f"{variant(method).title}: tokens on the host", *(f"{row['on_host']:.0f}" for row in own)])
    return Table(table.title, lines)


def longest(rows: Sequence[Row]) -> list[Row]:
    """Those of the longest prompt."""
    most = max(row["context"] for row in rows)
    return [row for row in rows if row["context"] == most]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def show(found: Sequence[Table], summary: Mapping[str, Any]) -> None:
    """Print the tables and the verdicts."""
    for table in found:
        print(f"\n{table}")
    auto, error = summary["auto_over_best"], summary["prediction_median_error"]
    near, order = summary["predictions"], summary["ordering"]
    print(
        f"tokens equal: {summary['tokens_equal']} (with 4 bits, which are lossy, "
        f"{_percent(summary['lossy_token_agreement'])} of them); auto over the best of its choices, at worst: "
        f"{'-' if auto is None else f'{auto:.3f}'}\n"
        f"predictions: median error of a step {'-' if error is None else f'{error:.1%}'}, "
        f"{_percent(near['forecast_median_error'])} forecast before the first, "
        f"{near['within_10_percent']} of {near['cases']} cases within 10%; order right for {order['right']} of "
        f"{order['pairs']} pairs of methods"
    )
