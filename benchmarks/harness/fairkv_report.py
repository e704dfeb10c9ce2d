"""What the FairKV benchmarks found: gains over contiguous heads, against what the kept tokens let one expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .charts import COLOURS, Chart, bars, lines
from .options import BY_TOKENS, CHOSEN, CONTIGUOUS, UNIFORM
from .publish import leaves, show
from .statistics import Interval, median, paired_ratio

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


def by_regime(rows: Rows) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """A regime's name, and its rows by method."""
    for name in dict.fromkeys(_name(row) for row in rows):
        yield name, {row["method"]: row for row in rows if _name(row) == name}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['batch']} x {row['kept']}"


def summarise_regimes(rows: Rows) -> dict[str, Any]:
    """Gains over contiguous heads, measured and predicted, and how far the one is from the other."""
    measured: dict[str, dict[str, Any]] = {}
    predicted: dict[str, dict[str, float]] = {}
    steps: list[float] = []
    errors: list[float] = []
    for name, methods in by_regime(rows):
        base = methods[CONTIGUOUS]
        others = {method: row for method, row in methods.items() if method != CONTIGUOUS}
        gains = {method: paired_ratio(base["seconds"], row["seconds"]) for method, row in others.items()}
        measured[name] = {method: gain.to_json() for method, gain in gains.items()}
        predicted[name] = {method: base["predicted_s"] / row["predicted_s"] for method, row in others.items()}
        errors += [gain.value / predicted[name][method] - 1 for method, gain in gains.items()]
        steps += [row["predicted_s"] / median(row["seconds"]).value - 1 for row in methods.values()]
    sizes = sorted(map(abs, errors))
    return {
        "prediction_median_error": median(sizes).value,
        "prediction_largest_error": sizes[-1],
        "predictions_within_10_percent": sum(size <= 0.1 for size in sizes),
        "predictions": len(sizes),
        "step_median_error": median([abs(step) for step in steps]).value,
        "measured_gain": measured,
        "predicted_gain": predicted,
        "left_alone": [_name(row) for row in rows if row["left_alone"]],
    }


def show_regimes(rows: Rows, summary: Mapping[str, Any]) -> None:
    """The table."""
    said = []
    for row in rows:
        gains = {kind: summary[kind][_name(row)].get(row["method"]) for kind in ("measured_gain", "predicted_gain")}
        said.append({**row, **gains})
    columns = "batch kept method copies utilisation:% seconds:ms predicted_s:ms measured_gain predicted_gain"
    show(said, columns, "Steps at true widths, by regime: gain over contiguous heads")


def regimes_chart(rows: Rows, summary: Mapping[str, Any], subtitle: str) -> Chart:
    """The chosen mapping's gain and that of the best by tokens alone, a line for each batch; dashed: predicted."""
    points = []
    for row in rows:
        if row["method"] not in (CHOSEN, BY_TOKENS[0]):
            continue
        for kind, mark in (("measured_gain", ""), ("predicted_gain", "_")):
            words = f"{mark}{row['method']}, batch {row['batch']}"
            gain = Interval.of(summary[kind][_name(row)][row["method"]])
            points.append({"x": row["kept"], "y": gain, "line": words, "of": words.removeprefix("_")})
    order = list(dict.fromkeys(point["of"] for point in points))

    def looks(row: Mapping[str, Any]) -> dict[str, str]:
        form = {"linestyle": "--", "marker": ""} if row["line"].startswith("_") else {}
        return {**form, "color": COLOURS[order.index(row["of"]) % len(COLOURS)]}

    words = {"x_label": "tokens that each KV head keeps", "y_label": "gain over contiguous heads", "subtitle": subtitle}
    title = "Decode steps at true widths: what a mapping of heads gains"
    return lines("regimes", points, "x", "y", "line", looks=looks, level=1.0, title=title, **words)
