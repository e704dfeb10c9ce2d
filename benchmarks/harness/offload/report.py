"""Verdicts, tables and charts of `offload.py`: the forms of KVPR's Tables 2 to 5, and Figures 6, 7, 9, 12 and 13."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..charts import Chart, groups
from ..publish import show
from ..statistics import Interval, paired_ratio
from .plan import CHOICES, LARGE, OTHERS, PARTS, SMALL, variant

Row = Mapping[str, Any]
CLOSE = 0.1  # What predictions are to be within
APART = 0.05  # Schedules whose steps differ by no more than that are not told apart
QUARTERED, CHOSEN = "stream_quarter", "stream_chosen"
COLUMNS = (
    "shape link_gb_s:GB/s label batch context new_tokens step_s:ms predicted_s:ms tokens_per_s decode_s:s bytes_in:MB "
    "weight_bytes:MB bytes_out:MB link_utilisation:% compute_utilisation:% disk_bytes:MB disk_utilisation:% "
    "device_bytes:MB recomputed_last cached_last on_host"
)
VARIED = ("{link_gb_s:.3g} GB/s", "{context}/{new_tokens}", "{batch} sequences")
"""Settings by which the rows of a chart may differ, beside the method."""


def case_of(row: Row) -> str:
    """Setting of a row in words, without its method; without dots, so that documents can quote by it."""
    link = f"{1e3 * row['link_gb_s']:.0f} MB/s {row['link']}"
    size = f"{row['batch']} x {row['context']}+{row['new_tokens']}"
    size += f" x {row['beams']} beams" if row["beams"] > 1 else ""
    return f"{row['part']}: {row['shape']}, {size}, {link}"


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
    """Verdicts over the rows; `exact_type`: recomputed keys and values equal the stored ones, as in float32."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(case_of(row), {})[row["method"]] = row
    exact, lossy = ([row for row in rows if row["lossy"] == lossy] for lossy in (False, True))
    auto = {name: found for name, found in cases.items() if "auto" in found and set(found) & set(CHOICES)}
    regrets = {name: _regret(found) for name, found in auto.items()}
    twice = {name: _same_twice(found) for name, found in cases.items()}
    return {
        "link": ", ".join(sorted({row["link"] for row in rows})),
        "tokens_equal": all(row["tokens_equal"] for row in exact) if exact_type else None,
        "token_agreement": min((row["token_agreement"] for row in exact), default=None),
        "lossy_token_agreement": min((row["token_agreement"] for row in lossy), default=None),
        "auto_over_best": max((found.value for found in regrets.values()), default=None),
        "auto_over_best_by_case": {name: found.to_json() for name, found in regrets.items()},
        "same_twice_by_case": {name: found.to_json() for name, found in twice.items() if found is not None},
        "prediction_median_error": _median(error for row in rows for error in row.get("prediction_errors", ())),
        "predictions": _predictions(rows),
        "speedup_over_stream": _speedups(cases, "stream"),
        "speedup_over_row_stream": _speedups(cases, "row_stream"),
        "speedup_over_kvpr_coarse": _speedups(cases, "kvpr_coarse"),
        "speedup_over_transformers": _speedups(cases, OTHERS),
        "objective": {name: _chosen(found) for name, found in cases.items() if CHOSEN in found},
        "time_over_bytes": {name: _time_over_bytes(found) for name, found in cases.items() if QUARTERED in found},
    }


def _regret(found: Mapping[str, Row]) -> Interval:
    """The time of `auto` over that of the best of what it chooses from: the median of the ratios within rounds."""
    best = min((found[method] for method in CHOICES if method in found), key=step_s)
    # Where the best had fewer rounds than `auto`, those.
    rounds = min(len(found["auto"]["seconds"]), len(best["seconds"]))
    return paired_ratio(found["auto"]["seconds"][:rounds], best["seconds"][:rounds])


def _chosen(found: Mapping[str, Row]) -> dict[str, Any]:
    """Time of columns over that of rows, within rounds that begin with each in turn; whether the faster was chosen.

    None where they are not told apart: where their interval is not wholly beyond `APART`. `same_twice` is how far two
    engines of one schedule differ.
    """
    ratio = paired_ratio(found["stream_columns"]["seconds"], found["stream_one"]["seconds"])
    groups, apart = found[CHOSEN]["groups"], ratio.low > 1 + APART or ratio.high < 1 - APART
    taken = found["stream_columns" if groups > 1 else "stream_one"]
    return {
        "columns_over_rows": ratio.to_json(),
        "chosen_groups": groups,
        "chosen_is_faster": (groups > 1) == (ratio.value < 1) if apart else None,
        "same_twice": paired_ratio(found[CHOSEN]["seconds"], taken["seconds"]).to_json(),
    }


def _time_over_bytes(found: Mapping[str, Row]) -> float:
    """The time of a step over a compressed cache, as a part of one over all of it, over the same of what they bring."""
    less, all_of_it = found[QUARTERED], found["stream"]
    return paired_ratio(less["seconds"], all_of_it["seconds"]).value / (less["bytes_in"] / all_of_it["bytes_in"])


def _same_twice(found: Mapping[str, Row]) -> Interval | None:
    """The time of a second engine of the same method over that of the first, within rounds; None without one."""
    for row in found.values():
        again = row.get("again_seconds", ())
        # What `auto` has left behind has no further rounds of its own.
        if first := row["seconds"][row.get("again_from", 0) :][: len(again)]:
            return paired_ratio(again[: len(first)], first)
    return None


def _predictions(rows: Sequence[Row]) -> dict[str, Any]:
    """How near a case's median step was to what was predicted, over all cases and methods."""
    known = [row for row in rows if "predicted_s" in row]
    errors = [abs(row["predicted_s"] / step_s(row) - 1) for row in known]
    # From what was measured before the first step, and a step in memory.
    forecasts = [abs(row["forecast_s"] / step_s(row) - 1) for row in known if "forecast_s" in row]
    return {
        "cases": len(known),
        "within_10_percent": sum(error <= CLOSE for error in errors),
        "median_error": _median(errors),
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


def show_tables(rows: Sequence[Row]) -> None:
    """Print a table for each setting: what every method of its cases took."""
    for part, own in settings(rows):
        shown = []
        for row in own:
            cached, recomputed = row["split_points"][-1] if "split_points" in row else (None, None)
            last = {"cached_last": cached, "recomputed_last": recomputed, "on_host": row.get("on_host")}
            shown.append({**row, "label": variant(row["method"]).title, "step_s": step_s(row), **last})
        show(shown, COLUMNS, f"{PARTS[part]}, {place_words(own)}\n")


def place_words(rows: Sequence[Row]) -> str:
    """Where the keys and values of some rows lie, and over which link they come."""
    where = "keys and values in host memory"
    if row := next((row for row in rows if "disk_io" in row), None):
        where += f" ({row['in_memory_share']:.0%} have room) and on disk (real {row['disk_io']}, "
        where += f"reads paced to an EMULATED {row['disk_gb_s']:.3g} GB/s)"
    speeds = ", ".join(f"{rate:.3g}" for rate in sorted({row["link_gb_s"] for row in rows}))
    return f"{where}. {'EMULATED link' if rows[0]['link'] == 'emulated' else 'link measured'} of {speeds} GB/s"


def charts(machine: str, rows: Sequence[Row]) -> list[Chart]:
    """Steps of every method, side by side for all that varies: a picture for each setting, of one machine."""
    made = []
    for part, own in settings(rows):
        varied = [form for form in VARIED if len({form.format_map(row) for row in own}) > 1] or VARIED[:1]
        words = {"title": f"Decoding by every method: {own[0]['shape']}", "y_label": "milliseconds per step"}
        words["subtitle"] = f"{own[0]['layers']} layers, {machine}; {place_words(own)}"
        titles = [{**row, "label": variant(row["method"]).title} for row in own]
        name = f"{part}.{own[0]['shape']}"
        made.append(groups(name, titles, ", ".join(varied), "label", "seconds", scale=1e3, **words))
    return made
