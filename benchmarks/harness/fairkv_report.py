"""What the FairKV benchmarks found: gains over contiguous heads, against what the kept tokens let one expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .chart import draw_bars
from .expectation import Costs, expected_seconds, page_count
from .head_division import CONTIGUOUS, UNIFORM, Division
from .report import align
from .statistics import Interval, median, paired_ratio

Rows = Sequence[Mapping[str, Any]]


def load_facts(division: Division) -> dict[str, Any]:
    """What a row says about who attends to how much."""
    loads = division.loads()
    counts = [[[piece.stop - piece.start for piece in rank] for rank in layer] for layer in division.pieces]
    return {
        "utilisation": division.utilisation,
        "slowest_tokens": division.slowest,
        "loads": loads,
        "pages": [[sum(map(page_count, rank)) for rank in layer] for layer in counts],
        "rank_tokens": [sum(column) for column in zip(*loads, strict=True)],
    }


def summarise(rows: Rows) -> dict[str, Any]:
    """Gains of one setting's methods."""
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
    if base is not None and uniform is not None and all("layer_seconds" in row for row in rows):
        costs = Costs.fit(rows)
        seconds = expected_seconds(rows, uniform, costs)
        found["costs"] = asdict(costs)
        found["expected"] = {name: seconds[CONTIGUOUS] / seconds[name] for name in found["speedup"]}
        found["off_expected"] = {
            name: found["speedup"][name]["value"] / value - 1 for name, value in found["expected"].items()
        }
    return found


def show(title: str, rows: Rows, summary: Mapping[str, Any]) -> None:
    """Print a setting's table."""
    heads = ["method", "ms per step", "busy", "tokens say", "gain [95%]", "by tokens", "off"]
    timed, profiled = "expected" in summary, summary["profile"]
    more = [*(["expected", "off"] if timed else []), *(["profile ms", "off"] if profiled else [])]
    lines = [[*heads, *more, "over uniform"]]
    for row in rows:
        name = row["method"]
        gain = summary["speedup"].get(name)
        over = summary["over_uniform"].get(name)
        beside = [_value(summary["expected"], name), _percent(summary["off_expected"], name)] if timed else []
        if profiled:
            beside += [f"{1e3 * profiled[name]:.2f}", _percent(summary["off_profile"], name)]
        lines.append(
            [
                name,
                f"{1e3 * median(row['seconds']).value:.2f}",
                f"{summary['busy'][name]:.3f}" if name in summary["busy"] else "-",
                f"{row['utilisation']:.3f}",
                "-" if gain is None else str(Interval(**gain)),
                _value(summary["predicted"], name),
                _percent(summary["off"], name),
                *beside,
                "-" if over is None else f"{over['value']:.3f}",
            ]
        )
    print(f"\n{title}\n{align(lines)}")
    if timed:
        costs = summary["costs"]
        print(
            f"latency model: {1e9 * costs['token']:.1f} ns a token, {1e9 * costs['crowding']:.1f} ns more for every "
            f"other rank at work, {1e6 * costs['page']:.2f} us a page"
        )


def _value(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3f}" if name in figures else "-"


def _percent(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:+.1%}" if name in figures else "-"


def draw(path: Path, title: str, subtitle: str, rows: Rows) -> Path:
    """Draw the times as bars."""
    bars = [
        (row["method"], median(row["seconds"]).scaled(1e3), row["method"] not in (CONTIGUOUS, UNIFORM)) for row in rows
    ]
    draw_bars(path, bars, title=title, subtitle=subtitle, unit="milliseconds per step, less is better")
    return path
