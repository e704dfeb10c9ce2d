"""What the FairKV benchmarks found: gains over contiguous heads, against what the kept tokens let one expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Chart, bars
from .options import CONTIGUOUS, UNIFORM
from .publish import leaves, show
from .statistics import median, paired_ratio

Rows = Sequence[Mapping[str, Any]]


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


def show_part(title: str, rows: Rows, summary: Mapping[str, Any]) -> None:
    said = {row["method"]: dict(row) for row in rows}
    for entry in leaves(summary, "kind", "method"):
        said[entry["method"]][entry["kind"]] = entry["value"]
    columns = "method seconds:ms busy:% utilisation:% speedup predicted off:% profile:ms off_profile:% over_uniform"
    show(list(said.values()), columns, title)


def chart(name: str, title: str, subtitle: str, rows: Rows) -> Chart:
    words = {"title": title, "subtitle": subtitle, "unit": "milliseconds per step, less is better"}
    return bars(name, rows, "method", scale=1e3, own=lambda row: row["method"] not in (CONTIGUOUS, UNIFORM), **words)
