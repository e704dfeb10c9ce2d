"""Verdicts on the rows of `offload.py`: tokens, `auto`, predictions and speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .offload_plan import CHOICES, LARGE, OTHERS, PARTS, SMALL
from .statistics import Interval, paired_ratio

Row = Mapping[str, Any]
CLOSE = 0.1
"""Predictions are to be this close."""


def case_of(row: Row) -> str:
    """What a row was measured with, beside its method, in words; without dots, so that documents can quote by it."""
    link = f"{1e3 * row['link_gb_s']:.0f} MB/s {row['link']}"
    size = f"{row['batch']} x {row['context']}+{row['new_tokens']}"
    return f"{row['part']}: {row['shape']}, {size}, {link}"


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), {})[row["method"]] = row
    return found


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by part and setting; methods of a case stay as they were measured."""
    parts, models = list(PARTS), [*SMALL, *LARGE]
    axes = ("link_gb_s", "batch", "context", "new_tokens")
    return sorted(
        rows, key=lambda row: (parts.index(row["part"]), models.index(row["shape"]), *(row[axis] for axis in axes))
    )


def settings(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Parts with the rows of one model each: a table and a chart."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["part"], row["shape"]), []).append(row)
    return [(part, own) for (part, _), own in found.items()]


def step_s(row: Row) -> float:
    return statistics.median(row["seconds"])


def summarise(rows: Sequence[Row], *, exact_type: bool) -> dict[str, Any]:
    """What the rows show; `exact_type`: recomputed keys and values equal the stored ones, as in float32."""
    cases = by_case(rows)
    exact, apart = ([row for row in rows if row["lossy"] == lossy] for lossy in (False, True))
    auto = {name: found for name, found in cases.items() if "auto" in found and set(found) & set(CHOICES)}
    regrets = {name: _regret(found) for name, found in auto.items()}
    twice = {name: _same_twice(found) for name, found in cases.items()}
    return {
        "link": ", ".join(sorted({row["link"] for row in rows})),
        "tokens_equal": all(row["tokens_equal"] for row in exact) if exact_type else None,
        "token_agreement": min((row["token_agreement"] for row in exact), default=None),
        "lossy_token_agreement": min((row["token_agreement"] for row in apart), default=None),
        "auto_over_best": max((found.value for found in regrets.values()), default=None),
        "auto_over_best_by_case": {name: found.to_json() for name, found in regrets.items()},
        "same_twice_by_case": {name: found.to_json() for name, found in twice.items() if found is not None},
        "prediction_median_error": _median(error for row in rows for error in row.get("prediction_errors", ())),
        "predictions": _predictions(rows),
        "speedup_over_stream": _speedups(cases, "stream"),
        "speedup_over_row_stream": _speedups(cases, "row_stream"),
        "speedup_over_transformers": _speedups(cases, OTHERS),
    }


def _regret(found: Mapping[str, Row]) -> Interval:
    """The time of `auto` over that of the best of what it chooses from: the median of the ratios within rounds."""
    best = min((found[method] for method in CHOICES if method in found), key=step_s)
    # Where the best had fewer rounds than `auto`, those.
    rounds = min(len(found["auto"]["seconds"]), len(best["seconds"]))
    return paired_ratio(found["auto"]["seconds"][:rounds], best["seconds"][:rounds])


def _same_twice(found: Mapping[str, Row]) -> Interval | None:
    """The time of a second engine of the same method over that of the first, within rounds; None without one."""
    for row in found.values():
        again = row.get("again_seconds", ())
        # What `auto` has left behind has no further rounds of its own.
        if first := row["seconds"][row.get("again_from", 0) :][: len(again)]:
            return paired_ratio(again[: len(first)], first)
    return None


def predicted(rows: Iterable[Row]) -> list[Row]:
    """Those that were predicted."""
    return [row for row in rows if "predicted_s" in row]


def _predictions(rows: Sequence[Row]) -> dict[str, Any]:
    """How near a case's median step was to what was predicted, over all cases and methods."""
    known = predicted(rows)
    errors = {f"{case_of(row)}, {row['method']}": row["predicted_s"] / step_s(row) - 1 for row in known}
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    # From what was measured before the first step, and a step in memory.
    forecasts = [abs(row["forecast_s"] / step_s(row) - 1) for row in known if "forecast_s" in row]
    return {
        "cases": len(known),
        "within_10_percent": sum(abs(error) <= CLOSE for error in errors.values()),
        "median_error": _median(map(abs, errors.values())),
        "worst": None if worst is None else {"case": worst, "error": errors[worst]},
        "forecasts": len(forecasts),
        "forecast_median_error": _median(forecasts),
        # Without the scheduler's correction, but with what the plan's own steps showed.
        "cost_model_median_error": _median(error for row in known for error in row["cost_model_errors"]),
    }


def _speedups(cases: Mapping[str, Mapping[str, Row]], base: str) -> dict[str, dict[str, float]]:
    """A method's time over those of all others, by case."""
    return {
        name: {method: step_s(found[base]) / step_s(row) for method, row in found.items() if method != base}
        for name, found in cases.items()
        if base in found
    }


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None
