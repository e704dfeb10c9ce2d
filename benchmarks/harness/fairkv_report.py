"""What the FairKV benchmarks found: gains over contiguous heads, against what the kept tokens let one expect.

Kept tokens alone, as in FairKV's Section 3.2, promise too much. A token costs more while other ranks are at work, with
which it shares memory and caches, a page costs something whatever it holds, every layer ends in a sum, and ranks with
equal work are not done at the same moment. The last is measured on equal budgets, where nothing else makes a rank wait,
and put on every method's work: equal loads wait for the slowest of all ranks, contiguous heads mostly for the one that
has most to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakv.fairkv.pages import PAGE_SIZES

from .charts import Chart, bars
from .head_division import CONTIGUOUS, UNIFORM, Division
from .publish import show_table
from .statistics import Interval, median, paired_ratio

Rows = Sequence[Mapping[str, Any]]
Table = npt.NDArray[np.float64]


def page_count(tokens: int) -> int:
    """Pages of all sizes that hold so many tokens of one head."""
    pages = 0
    for size in PAGE_SIZES:
        pages, tokens = pages + tokens // size, tokens % size
    return pages


def crowded_tokens(loads: Table) -> Table:
    """``[layers, ranks]`` the sum over a rank's tokens of the number of other ranks that are still at work meanwhile.

    All begin together, and go on alike.
    """
    order = np.argsort(loads, axis=1)
    ascending = np.take_along_axis(loads, order, axis=1)
    others = np.arange(loads.shape[1] - 1, -1, -1)
    crowded = np.cumsum(np.diff(ascending, axis=1, prepend=0) * others, axis=1)
    found = np.empty_like(crowded)
    np.put_along_axis(found, order, crowded, axis=1)
    return found


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's attention at one layer, by least squares through every rank, layer and method."""

    token: float  # Of a kept token while no other rank is at work, in seconds
    crowding: float  # What it costs more for each other rank at work, in seconds
    page: float  # Of a page of whatever size, in seconds

    def seconds(self, row: Mapping[str, Any]) -> Table:
        """``[layers, ranks]`` of a row's work."""
        costs: Table = _work(row) @ np.array([self.token, self.crowding, self.page])
        return costs

    @classmethod
    def fit(cls, rows: Rows) -> Costs:
        """Through the medians of the measured repetitions; nothing costs less than nothing."""
        work = np.concatenate([_work(row).reshape(-1, 3) for row in rows])
        measured = np.concatenate([np.median(_measured(row), axis=0).ravel() for row in rows])
        costs, columns = np.zeros(3), [0, 1, 2]
        while columns:
            found = np.linalg.lstsq(work[:, columns], measured, rcond=None)[0]
            if found.min() >= 0:
                costs[columns] = found
                break
            del columns[int(found.argmin())]
        return cls(*costs.tolist())


def _work(row: Mapping[str, Any]) -> Table:
    """``[layers, ranks, 3]`` tokens, the others' presence meanwhile, and pages."""
    loads, pages = (np.asarray(row[name], dtype=np.float64) for name in ("loads", "pages"))
    return np.stack([loads, crowded_tokens(loads), pages], axis=-1)


def _measured(row: Mapping[str, Any]) -> Table:
    """``[repetitions, layers, ranks]`` seconds that a rank computed."""
    return np.moveaxis(np.asarray(row["layer_seconds"], dtype=np.float64), 0, -1)


def expected_seconds(rows: Rows, even: Mapping[str, Any], costs: Costs) -> dict[str, float]:
    """Seconds of a step of every method."""
    measured = _measured(even)
    jitter = measured / costs.seconds(even)
    rest = np.asarray(even["seconds"]) - measured.max(axis=2).sum(axis=1)
    return {
        row["method"]: float(np.median((costs.seconds(row) * jitter).max(axis=2).sum(axis=1) + rest)) for row in rows
    }


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
    show_table(title, lines)
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


def chart(name: str, title: str, subtitle: str, rows: Rows) -> Chart:
    """The times as bars."""
    values = [
        (row["method"], median(row["seconds"]).scaled(1e3), row["method"] not in (CONTIGUOUS, UNIFORM)) for row in rows
    ]
    return bars(name, values, title=title, subtitle=subtitle, unit="milliseconds per step, less is better")
