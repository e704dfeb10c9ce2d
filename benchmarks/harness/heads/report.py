"""Findings of the FairKV benchmarks: gains over contiguous heads, against what was to be expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..charts import COLOURS, Chart, bars, lines
from ..publish import leaves, show
from ..statistics import Interval, paired_ratio
from .division import BY_TOKENS, CHOSEN, CONTIGUOUS, UNIFORM

Row = Mapping[str, Any]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise one part: gains, against what the kept tokens let one expect."""
    by_name = {row["method"]: row for row in rows}
    base = by_name.get(CONTIGUOUS)
    kinds = ("speedup", "predicted", "busy")
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, row in by_name.items():
        if base is not None and name not in (CONTIGUOUS, UNIFORM):
            found["speedup"][name] = paired_ratio(base["seconds"], row["seconds"]).to_json()
            found["predicted"][name] = base["slowest_tokens"] / row["slowest_tokens"]
        found["busy"][name] = sum(row["busy_rates"]) / len(row["busy_rates"])
    return found


def show_part(title: str, rows: Sequence[Row], summary: Row) -> None:
    said = {row["method"]: dict(row) for row in rows}
    for entry in leaves(summary, "kind", "method"):
        said[entry["method"]][entry["kind"]] = entry["value"]
    columns = "method seconds:ms predicted_s:ms busy:% utilisation:% speedup predicted"
    show(list(said.values()), columns, title)


def chart(name: str, title: str, subtitle: str, rows: Sequence[Row]) -> Chart:
    words = {"title": title, "subtitle": subtitle, "x_label": "milliseconds per step, less is better"}
    return bars(name, rows, "method", scale=1e3, own=lambda row: row["method"] not in (CONTIGUOUS, UNIFORM), **words)


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
        others = {method: row for method, row in methods.items() if method != CONTIGUOUS}
        measured[name] = {method: ratio(base, row).to_json() for method, row in others.items()}
        if predicted in base:
            expected[name] = {method: base[predicted] / row[predicted] for method, row in others.items()}
            errors += [abs(measured[name][method]["value"] / gain - 1) for method, gain in expected[name].items()]
            steps += [abs(row[predicted] / step_s(row) - 1) for row in methods.values()]
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
    kinds = [kind for kind in ("measured_gain", "predicted_gain", "attention_gain") if kind in summary]
    said = [
        {**row, **{kind: summary[kind][name].get(method) for kind in kinds}}
        for name, methods in regimes.items()
        for method, row in methods.items()
    ]
    show(said, f"{columns} measured_gain predicted_gain", title)


def gains_chart(regimes: Mapping[str, Mapping[str, Row]], summary: Row, subtitle: str) -> Chart:
    """The chosen mapping's gain and that of the best by tokens alone, a line for each batch; dashed: predicted."""
    points = [
        # Matplotlib leaves out of the legend what begins with a line.
        {"x": row["kept"], "y": summary[kind][name][row["method"]], "batch": row["batch"], "dashed": bool(mark),
         "line": f"{mark}{row['method']}, batch {row['batch']}", "of": (row["method"], row["batch"])}
        for name, methods in regimes.items() for row in methods.values() if row["method"] in (CHOSEN, BY_TOKENS[0])
        for kind, mark in (("measured_gain", ""), ("predicted_gain", "_"))
    ]  # fmt: skip
    order = list(dict.fromkeys(point["of"] for point in points))

    def looks(row: Row) -> dict[str, str]:
        form = {"linestyle": "--", "marker": ""} if row["dashed"] else {}
        return {**form, "color": COLOURS[order.index(row["of"]) % len(COLOURS)]}

    words = {"x_label": "tokens that each KV head keeps", "y_label": "gain over contiguous heads", "subtitle": subtitle}
    title = "Decode steps at true widths: what a mapping of heads gains"
    return lines("regimes", points, "x", "y", "line", looks=looks, level=1.0, title=title, **words)
