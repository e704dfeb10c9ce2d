"""What the FairKV benchmarks found: gains over contiguous heads, against what the kept tokens let one expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Chart, bars
from .head_division import CONTIGUOUS, UNIFORM, Division
from .publish import columns, show_table
from .statistics import Interval, median, paired_ratio

Rows = Sequence[Mapping[str, Any]]


def load_facts(division: Division) -> dict[str, Any]:
    """What a row says about who attends to how much."""
    loads = division.loads()
    return {
        "utilisation": division.utilisation,
        "slowest_tokens": division.slowest,
        "loads": loads,
        "rank_tokens": [sum(column) for column in zip(*loads, strict=True)],
    }


def summarise(rows: Rows) -> dict[str, Any]:
    by_name = {row["method"]: row for row in rows}
    base, uniform = by_name.get(CONTIGUOUS), by_name.get(UNIFORM)
    kinds = ("speedup", "predicted", "off", "over_uniform", "busy", "profile", "off_profile")
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, row in by_name.items():
        if base is not None and name not in (CONTIGUOUS, UNIFORM):
            gain = paired_ratio(base["seconds"], row["seconds"])
            predicted = base["slowest_tokens"] / row["slowest_tokens"]
            found["speedup"][name] = gain.to_json()
            found["predicted"][name] = predicted
            found["off"][name] = gain.value / predicted - 1
        if uniform is not None and name != UNIFORM:
            found["over_uniform"][name] = paired_ratio(row["seconds"], uniform["seconds"]).to_json()
        if row.get("predicted_s") is not None:
            found["profile"][name] = row["predicted_s"]
            found["off_profile"][name] = median(row["seconds"]).value / row["predicted_s"] - 1
        if "busy" in row:
            found["busy"][name] = sum(row["busy_rates"]) / len(row["busy_rates"])
    return found


def show(title: str, rows: Rows, summary: Mapping[str, Any]) -> None:
    def said(kind: str, form: str, factor: float = 1.0) -> Any:
        return lambda row: (
            format(factor * summary[kind][row["method"]], form) if row["method"] in summary[kind] else None
        )

    def gain(row: Mapping[str, Any]) -> Interval | None:
        return Interval(**summary["speedup"][row["method"]]) if row["method"] in summary["speedup"] else None

    def over(row: Mapping[str, Any]) -> str | None:
        found = summary["over_uniform"].get(row["method"])
        return None if found is None else f"{found['value']:.3f}"

    shown = {
        "method": lambda row: row["method"],
        "ms per step": lambda row: f"{1e3 * median(row['seconds']).value:.2f}",
        "busy": said("busy", ".3f"),
        "tokens say": lambda row: f"{row['utilisation']:.3f}",
        "gain [95%]": gain,
        "by tokens": said("predicted", ".3f"),
        "off": said("off", "+.1%"),
        "profile ms": said("profile", ".2f", 1e3),
        "off profile": said("off_profile", "+.1%"),
        "over uniform": over,
    }
    show_table(title, columns(rows, shown))


def chart(name: str, title: str, subtitle: str, rows: Rows) -> Chart:
    values = [
        (row["method"], median(row["seconds"]).scaled(1e3), row["method"] not in (CONTIGUOUS, UNIFORM)) for row in rows
    ]
    return bars(name, values, title=title, subtitle=subtitle, unit="milliseconds per step, less is better")
