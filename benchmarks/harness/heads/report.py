"""Findings of the FairKV benchmarks: gains over contiguous heads, against what was to be expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..charts import COLOURS, Chart, bars, lines
from ..publish import show
from ..statistics import Interval, median, paired_ratio
from .division import CHOSEN, CONTIGUOUS, UNIFORM

Row = Mapping[str, Any]
EXPECTED = (CONTIGUOUS, UNIFORM)  # Methods that are no mapping
KINDS = ("measured_gain", "predicted_gain", "tokens_gain", "attention_gain", "busy")


def summarise(regimes: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Gains of one part, beside what the kept tokens let one expect, and how busy ranks are."""
    found = gains(
        regimes,
        "predicted_s",
        lambda base, row: paired_ratio(base["seconds"], row["seconds"]),
        lambda row: median(row["seconds"]).value,
    )
    found |= {"tokens_gain": {}, "busy": {}}
    for name, methods in regimes.items():
        base = methods[CONTIGUOUS]["slowest_tokens"]
        expected = {method: base / row["slowest_tokens"] for method, row in methods.items() if method not in EXPECTED}
        found["tokens_gain"][name] = expected
        busy = {method: row["busy_rates"] for method, row in methods.items() if "busy_rates" in row}
        found["busy"][name] = {method: float(np.mean(rates)) for method, rates in busy.items()}
    return found


def chart(part: str, title: str, subtitle: str, regimes: Mapping[str, Mapping[str, Row]], summary: Row) -> Chart:
    """Steps of a single regime; of several the gains of every batch by kept tokens."""
    if len(regimes) > 1:
        return gains_chart(part, title, subtitle, regimes, summary)
    (rows,) = regimes.values()
    words = {"title": title, "subtitle": subtitle, "x_label": "milliseconds per step, less is better"}
    return bars(part, [*rows.values()], "method", scale=1e3, own=lambda row: row["method"] not in EXPECTED, **words)


def by_regime(rows: Sequence[Row], name: str) -> dict[str, dict[str, Row]]:
    """Rows of each regime by method; the name is one such as ``{batch} x {kept}``."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(name.format_map(row), {})[row["method"]] = row
    return found


def gains(
    regimes: Mapping[str, Mapping[str, Row]],
    predicted: str,
    ratio: Callable[[Row, Row], Interval],
    step_s: Callable[[Row], float],
) -> dict[str, Any]:
    """Gains over contiguous heads, measured and, with a profile, predicted, and how far the one is from the other."""
    measured: dict[str, dict[str, Any]] = {}
    expected: dict[str, dict[str, float]] = {}
    errors, steps = [], []
    for name, methods in regimes.items():
        base = methods[CONTIGUOUS]
        others = {method: row for method, row in methods.items() if method not in EXPECTED}
        measured[name] = {method: ratio(base, row).to_json() for method, row in others.items()}
        if base.get(predicted) is not None:
            expected[name] = {method: base[predicted] / row[predicted] for method, row in others.items()}
            errors += [abs(measured[name][method]["value"] / gain - 1) for method, gain in expected[name].items()]
            steps += [abs(row[predicted] / step_s(row) - 1) for row in (base, *others.values())]
    if not errors:
        return {"measured_gain": measured}
    return {
        "prediction_median_error": float(np.median(errors)),
        "prediction_largest_error": max(errors),
        "predictions_within_10_percent": sum(error <= 0.1 for error in errors),
        "predictions": len(errors),
        "step_median_error": float(np.median(steps)),
        "measured_gain": measured,
        "predicted_gain": expected,
    }


def show_gains(regimes: Mapping[str, Mapping[str, Row]], summary: Row, columns: str, title: str) -> None:
    kinds = [kind for kind in KINDS if kind in summary]
    said = [
        {**row, **{kind: summary[kind][name].get(method) for kind in kinds}}
        for name, methods in regimes.items()
        for method, row in methods.items()
    ]
    show(said, f"{columns} {' '.join(kinds)}", title)


def gains_chart(part: str, title: str, subtitle: str, regimes: Mapping[str, Mapping[str, Row]], summary: Row) -> Chart:
    """The chosen mapping's gain and that of the best by tokens alone, a line for each batch; dashed: predicted."""
    points = [
        # Matplotlib leaves out of the legend what begins with a line.
        {"x": row["kept"], "y": summary[kind][name][row["method"]], "batch": row["batch"], "dashed": bool(mark),
         "line": f"{mark}{row['method']}, batch {row['batch']}", "of": (row["method"], row["batch"])}
        for name, methods in regimes.items() for row in methods.values() if row["method"] in (CHOSEN, "nodp")
        for kind, mark in (("measured_gain", ""), ("predicted_gain", "_")) if kind in summary
    ]  # fmt: skip
    order = list(dict.fromkeys(point["of"] for point in points))

    def looks(row: Row) -> dict[str, str]:
        form = {"linestyle": "--", "marker": ""} if row["dashed"] else {}
        return {**form, "color": COLOURS[order.index(row["of"]) % len(COLOURS)]}

    words = {"x_label": "tokens that each KV head keeps", "y_label": "gain over contiguous heads"}
    return lines(part, points, "x", "y", "line", looks=looks, level=1.0, title=title, subtitle=subtitle, **words)
