"""Table, chart and summary of `multiturn.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Chart, Line, lines
from .choices import Case, crossover, judge
from .models import words_of
from .publish import columns, show_intervals, show_table
from .statistics import Interval, median, paired_ratio

Row = Mapping[str, Any]


def cells_of(rows: Sequence[Row], policy: str | None = None) -> dict[str, list[Case]]:
    """The rows as cells, by the rate of the links, with the choice of `auto` or of one policy."""
    grouped: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["rate"], row["miss_rate"]), []).append(row)
    cells: dict[str, list[Case]] = {}
    for (rate, miss_rate), pair in grouped.items():
        chosen = pair[0]["auto"] if policy is None else pair[0]["policies"][policy]
        cells.setdefault(rate, []).append(Case(miss_rate, {row["method"]: row["seconds"] for row in pair}, chosen))
    return cells


def summarise(rows: Sequence[Row], threshold: float, skipped: Mapping[str, str]) -> dict[str, Any]:
    """The verdict on `auto` over all rates of links and by rate, and where the methods cross."""
    rates: dict[str, Any] = {}
    for rate, group in cells_of(rows).items():
        ratios = []
        for cell in group:
            ratio = paired_ratio(cell.seconds["pass_q"], cell.seconds["pass_kv"])
            ratios.append({"miss_rate": cell.miss_rate, "auto": cell.chosen, **ratio.to_json()})
        rates[rate] = {**judge(group), "crossover_miss_rate": crossover(group), "speed_ratio": ratios}

    def judged(policy: str | None = None) -> dict[str, Any]:
        return judge([cell for group in cells_of(rows, policy).values() for cell in group])

    return {
        **judged(),
        "policies": {policy: judged(policy) for policy in rows[0]["policies"]},
        "equation_1_miss_rate": threshold,
        "rates": rates,
        "not_measured": dict(skipped),
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def show(rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    def microseconds(part: str) -> Any:
        return lambda row: f"{row['attention_us'][part]:.0f}"

    shown = {
        "links, method": lambda row: f"{row['rate']} {row['method']}",
        "miss": lambda row: f"{row['miss_rate']:.2%}",
        "T": lambda row: f"{row['new_tokens']:,}",
        "P": lambda row: f"{row['cached_tokens']:,}",
        "seconds": lambda row: f"{median(row['seconds']).value:.4f}",
        "auto": lambda row: row["auto"],
        "rounds": lambda row: len(row["seconds"]),
        **{f"{part} us": microseconds(part) for part in ("attention", "send_recv", "send_recv_exposed", "collective")},
    }
    show_table("", columns(rows, shown))
    speeds = {
        rate: {
            f"{point['miss_rate']:.2%}": {name: point[name] for name in ("value", "low", "high")} for point in points
        }
        for rate, points in ((rate, found["speed_ratio"]) for rate, found in summary["rates"].items())
    }
    show_intervals("Speed of pass-KV over pass-Q", speeds)
    print(f"\nqueries are as large as keys and values at a miss rate of {summary['equation_1_miss_rate']:.1%}")
    for rate, found in summary["rates"].items():
        point = found["crossover_miss_rate"]
        where = f"none, {point.get('always')} is the faster all along"
        if point["value"] is not None:
            where = f"{point['value']:.2%} [{point['low']:.2%}, {point['high']:.2%}]"
        print(f"{rate}: crossover {where}; {_verdict(found)}")
    print(f"all: {_verdict(summary)}")
    for policy, found in summary["policies"].items():
        print(f"policy {policy}: {_verdict(found, subject='its choice')}")


def _verdict(found: Mapping[str, Any], subject: str = "auto") -> str:
    share, regret = found["auto_right_share"], Interval(**found["intervals"]["auto_mean_regret"])
    right = "no cell differs by more than 2%"
    if share is not None:
        differing = f"the {found['differing_cells']} cells of {found['cells']} that differ by more than 2%"
        right = f"{subject} is the faster in {share:.0%} of {differing}"
    return f"{right}, mean regret {regret.value:.2%} [{regret.low:.2%}, {regret.high:.2%}]"


def chart(arguments: argparse.Namespace, summary: Mapping[str, Any]) -> Chart:
    """The speed ratio by miss rate, a line per rate of links."""
    drawn = []
    for rate, found in summary["rates"].items():
        points = found["speed_ratio"]
        values = [Interval(point["value"], point["low"], point["high"]) for point in points]
        hollow = [point["auto"] == "pass_q" for point in points]
        drawn.append(Line(f"links: {rate}", [100 * point["miss_rate"] for point in points], values, hollow))
    subtitle = f"{words_of(arguments)}; median, 95% interval; rings: auto chose pass-Q"
    title = f"pass-KV / pass-Q speed ratio, T + P = {arguments.context:,}, CP{arguments.ranks}"
    labels = {"x_label": "cache miss rate T / (T + P), percent", "y_label": "speed of pass-KV over pass-Q"}
    return lines("", drawn, title=title, subtitle=subtitle, level=1.0, **labels)
