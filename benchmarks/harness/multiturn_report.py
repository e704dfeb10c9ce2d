"""Table, chart and summary of `multiturn.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .choices import Cell, crossover, judge
from .lines import Line, draw_lines
from .report import align, publish
from .statistics import Interval, median, paired_ratio

Row = Mapping[str, Any]


def cells_of(rows: Sequence[Row], policy: str | None = None) -> dict[str, list[Cell]]:
    """The rows as cells, by the rate of the links, with the choice of `auto` or of one policy."""
    grouped: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["rate"], row["miss_rate"]), []).append(row)
    cells: dict[str, list[Cell]] = {}
    for (rate, miss_rate), pair in grouped.items():
        seconds = {row["method"]: row["seconds"] for row in pair}
        chosen = pair[0]["auto"] if policy is None else pair[0]["policies"][policy]
        cells.setdefault(rate, []).append(Cell(miss_rate, seconds, chosen))
    return cells


def summarise(rows: Sequence[Row], threshold: float, skipped: Mapping[str, str]) -> dict[str, Any]:
    """The verdict on `auto` over all rates of links and by rate, and where the methods cross."""
    cells = cells_of(rows)
    rates: dict[str, Any] = {}
    for rate, group in cells.items():
        ratios = [
            {
                "miss_rate": cell.miss_rate,
                "auto": cell.chosen,
                **paired_ratio(cell.seconds["pass_q"], cell.seconds["pass_kv"]).to_json(),
            }
            for cell in group
        ]
        rates[rate] = {**judge(group), "crossover_miss_rate": crossover(group), "speed_ratio": ratios}
    return {
        **judge([cell for group in cells.values() for cell in group]),
        "policies": {
            policy: judge([cell for group in cells_of(rows, policy).values() for cell in group])
            for policy in rows[0]["policies"]
        },
        "equation_1_miss_rate": threshold,
        "rates": rates,
        "not_measured": dict(skipped),
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def show(rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Print the tables."""
    lines = [
        ["links", "miss", "T", "P", "pass-KV s", "pass-Q s", "speed KV/Q [95%]", "auto", "rounds"]
        + ["KV attn us", "hop", "exposed", "Q attn us", "hop", "exposed", "All2All"]
    ]
    by_method = {(row["rate"], row["miss_rate"], row["method"]): row for row in rows}
    for rate, found in summary["rates"].items():
        for point in found["speed_ratio"]:
            kv, q = (by_method[rate, point["miss_rate"], method] for method in ("pass_kv", "pass_q"))
            parts, q_parts = kv["attention_us"], q["attention_us"]
            ring = ("attention", "send_recv", "send_recv_exposed")
            lines.append(
                [
                    rate, f"{point['miss_rate']:.2%}", f"{kv['new_tokens']:,}", f"{kv['cached_tokens']:,}",
                    f"{median(kv['seconds']).value:.4f}", f"{median(q['seconds']).value:.4f}",
                    str(Interval(point["value"], point["low"], point["high"])), point["auto"], str(len(kv["seconds"])),
                    *(f"{parts[name]:.0f}" for name in ring),
                    *(f"{q_parts[name]:.0f}" for name in (*ring, "collective")),
                ]
            )  # fmt: skip
    print(f"\n{align(lines)}\n")
    print(f"queries are as large as keys and values at a miss rate of {summary['equation_1_miss_rate']:.1%}")
    for rate, found in summary["rates"].items():
        point = found["crossover_miss_rate"]
        if point["value"] is None:
            where = f"none, {point['always']} is the faster all along"
        else:
            where = f"{point['value']:.2%} [{point['low']:.2%}, {point['high']:.2%}]"
        print(f"{rate}: crossover {where}; {_verdict(found)}")
    print(f"all: {_verdict(summary)}")
    for policy, found in summary["policies"].items():
        print(f"policy {policy}: {_verdict(found, subject='its choice')}")
    print()


def _verdict(found: Mapping[str, Any], subject: str = "auto") -> str:
    share, regret = found["auto_right_share"], Interval(**found["intervals"]["auto_mean_regret"])
    differing = f"the {found['differing_cells']} cells of {found['cells']} that differ by more than 2%"
    right = (
        "no cell differs by more than 2%" if share is None else f"{subject} is the faster in {share:.0%} of {differing}"
    )
    return f"{right}, mean regret {regret.value:.2%} [{regret.low:.2%}, {regret.high:.2%}]"


def draw(path: Path, arguments: argparse.Namespace, summary: Mapping[str, Any]) -> list[Path]:
    """Draw the speed ratio by miss rate beside the results, a line per rate of links."""
    lines = []
    for rate, found in summary["rates"].items():
        points = found["speed_ratio"]
        values = [Interval(point["value"], point["low"], point["high"]) for point in points]
        hollow = [point["auto"] == "pass_q" for point in points]
        lines.append(Line(f"links: {rate}", [100 * point["miss_rate"] for point in points], values, hollow))
    picture = path.with_suffix(".png")
    draw_lines(
        picture,
        lines,
        title=f"pass-KV / pass-Q speed ratio, T + P = {arguments.context:,}, CP{arguments.ranks}",
        subtitle=f"Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.heads} query and "
        f"{arguments.kv_heads} KV heads, {arguments.dtype}, {arguments.threads} thread(s) per rank; "
        "median, 95% interval; rings: auto chose pass-Q",
        x_label="cache miss rate T / (T + P), percent",
        y_label="speed of pass-KV over pass-Q",
        level=1.0,
    )
    return [picture]


def report(
    arguments: argparse.Namespace, machine: Mapping[str, Any], rows: Sequence[Row], skipped: Mapping[str, str]
) -> None:
    """Print the tables; write the JSON and the chart where they are asked for."""
    summary = summarise(rows, 2 * arguments.kv_heads / arguments.heads, skipped)
    show(rows, summary)
    publish(
        arguments,
        benchmark="multiturn",
        machine=machine,
        rows=rows,
        summary=summary,
        draw=lambda path: draw(path, arguments, summary),
    )
