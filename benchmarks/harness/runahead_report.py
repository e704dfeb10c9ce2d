"""All that `runahead.py` has measured so far, as tables, charts and one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megakv.costmodel.context_parallel import causal_bound, dense_bound

from .choices import Case, judge
from .noise import ELSEWHERE, LINK, QUIET
from .predictions import CANDIDATES, with_predictions
from .publish import Parts, columns, publish, show_difference, show_intervals, show_table
from .runahead_charts import charts
from .runahead_plan import Group, profile_path
from .statistics import Interval, median, paired_ratio, ratio

Row = Mapping[str, Any]
SEARCH = "search-"
PEERS = ("tsp", "tsp_causal", "tp", "tp_gloo", "pass_kv")
SPEEDUPS = (
    *((own, peer) for own in ("kvr_s", "kvr_p", "kvr_e") for peer in PEERS),
    ("kvr_s", "kvr_e"),
    ("pass_kv", "tsp"),
)
"""Method and peer: the peer's time over the method's."""
TIME_RATIOS = (("kvr_p", "kvr_s"), ("kvr_s", "kvr_silent"))
"""Time of the one over that of the other."""
CHOICES = ("one_rank", "kvr_e", "kvr_s", "pass_kv", "pass_q")
"""What `auto` may choose from, with any partition."""
PLACE = ("ranks", "kv_heads", "rate", "context")


def report(arguments: argparse.Namespace, parts: Parts, skipped: Mapping[str, str]) -> int:
    """Print and publish all cells that were kept; the exit status is 1 if there is none."""
    cells = [part for name in parts.names("r") if (part := parts.read(name)) is not None]
    if not cells:
        print("nothing was measured", file=sys.stderr)
        return 1
    searches = {name.removeprefix(SEARCH): found for name in parts.names(SEARCH) if (found := parts.read(name))}
    rows = [row for cell in cells for row in cell["rows"]]
    groups = {Group(row["ranks"], row["kv_heads"], row["rate"], ()) for row in rows}
    paths = {group.name: profile_path(group, arguments.profile, parts.folder) for group in groups}
    kept = {name: path for name, path in paths.items() if path.exists()}
    rows = with_predictions("runahead", arguments, rows, kept.get)
    summary = {**summarise(rows), "searches": searches, "not_measured": dict(skipped)}
    show(summary)
    publish(arguments, "runahead", cells[0]["machine"], rows, summary, charts(arguments, summary, searches))
    return 0


def cells_of(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By cell such as ``r4-kv16-free-8192`` its rows by method; beside a neighbour ``METHOD, link`` and so on."""
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        suffix = "" if row["noise"] == QUIET else f", {row['noise']}"
        places.setdefault(tuple(row[name] for name in PLACE), {})[row["method"] + suffix] = row
    order = sorted(places, key=lambda place: (place[2] != "free", place[2], -place[1], place[0], place[3]))
    return {f"r{place[0]}-kv{place[1]}-{place[2]}-{place[3]}": places[place] for place in order}


def group_of(cell: str) -> str:
    return cell.rpartition("-")[0]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdicts over all rows: speed-ups, bounds, regret of `auto`, losses to a noisy neighbour."""
    cells = cells_of(rows)
    summary: dict[str, Any] = {"cells": {name: summarise_cell(found) for name, found in cells.items()}}
    if judged := {name: cell for name, found in cells.items() if (cell := _choice(found)) is not None}:
        regrets = {name: summary["cells"][name]["auto"]["regret"] for name in judged}
        worst = max(regrets, key=lambda name: regrets[name]["value"])
        mean = judge(list(judged.values()))["intervals"]["auto_mean_regret"]
        summary["auto_regret"] = {"mean": mean, "largest": {"cell": worst, **regrets[worst]}}
    # Means over the contexts, as in Figure 11: rounds of each context are drawn apart.
    drawn: dict[str, dict[str, dict[str, list[Interval]]]] = {}
    for name, cell in summary["cells"].items():
        for method, kinds in cell["noise_loss"].items():
            own = drawn.setdefault(group_of(name), {}).setdefault(method, {})
            for kind, value in kinds.items():
                own.setdefault(kind, []).append(Interval(**value))
    summary["noise_loss"] = {
        group: {name: {kind: _mean(found) for kind, found in kinds.items()} for name, kinds in methods.items()}
        for group, methods in drawn.items()
    }
    differences = [row["max_logit_difference"] for row in rows if row["max_logit_difference"] is not None]
    summary["max_logit_difference"] = max(differences)
    return summary


def summarise_cell(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The verdicts over one cell; times, ratios, regrets and losses have intervals."""
    seconds = {name: row["seconds"] for name, row in rows.items()}
    place = {name: next(iter(rows.values()))[name] for name in PLACE}
    bounds, over = _bounds(seconds, place["ranks"])
    found: dict[str, Any] = {
        **place,
        "ttft_s": {name: median(times).to_json() for name, times in seconds.items()},
        "speedup": _ratios(seconds, {f"{own}/{peer}": (peer, own) for own, peer in SPEEDUPS}),
        "time_ratio": _ratios(seconds, {f"{own}/{other}": (own, other) for own, other in TIME_RATIOS}),
        "bounds_s": bounds,
        "over_bound": over,
        "partition": {name: row["partition"] for name, row in rows.items() if row["partition"] is not None},
        "noise_loss": losses(seconds),
    }
    if (cell := _choice(rows)) is not None:
        said = rows["auto"]["candidates_s"]
        known = {name: own for name, own in CANDIDATES.items() if name in said and own in rows}
        found["auto"] = {
            "chose": rows["auto"]["auto"],
            "regret": judge([cell])["intervals"]["auto_mean_regret"],
            "predicted_over_measured": {name: said[name] / median(seconds[own]).value for name, own in known.items()},
        }
    return found


def _ratios(seconds: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        name: paired_ratio(seconds[above], seconds[below]).to_json()
        for name, (above, below) in pairs.items()
        if above in seconds and below in seconds
    }


def _bounds(seconds: Mapping[str, Sequence[float]], ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lower bounds of the TTFT on so many ranks (KV-Runahead, Section 3), and KVR-S's time over them."""
    shares = {"single": ("causal", causal_bound(1.0, ranks)), "single_masked": ("masked", dense_bound(1.0, ranks))}
    bounds, over = {}, {}
    for method, (name, share) in shares.items():
        if method in seconds:
            bounds[name] = median(seconds[method]).scaled(share).to_json()
            if "kvr_s" in seconds:
                over[name] = ratio(seconds["kvr_s"], seconds[method], paired=False).scaled(1 / share).to_json()
    if "kvr_silent" in seconds:
        bounds["silent"] = median(seconds["kvr_silent"]).to_json()
    return bounds, over


def losses(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """What a competing flow costs each method (KV-Runahead, Figure 11), as a part of its time."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, quiet in seconds.items():
        noisy = {where: seconds[f"{name}, {where}"] for where in (ELSEWHERE, LINK) if f"{name}, {where}" in seconds}
        pairs = {where: (times, quiet) for where, times in noisy.items()}
        if len(noisy) == 2:
            pairs["link_alone"] = noisy[LINK], noisy[ELSEWHERE]
        if pairs:
            ratios = {kind: paired_ratio(*pair) for kind, pair in pairs.items()}
            found[name] = {k: Interval(r.value - 1, r.low - 1, r.high - 1).to_json() for k, r in ratios.items()}
    return found


def _mean(values: Sequence[Interval]) -> dict[str, float]:
    """The mean of independent estimates; their half-widths add up in squares."""
    value = float(np.mean([each.value for each in values]))
    below = float(np.linalg.norm([each.value - each.low for each in values])) / len(values)
    above = float(np.linalg.norm([each.high - each.value for each in values])) / len(values)
    return Interval(value, value - below, value + above).to_json()


def _choice(rows: Mapping[str, Row]) -> Case | None:
    """The cell as one that `auto` chose in, against every single choice that was measured beside it."""
    seconds = {name: rows[name]["seconds"] for name in CHOICES if name in rows}
    if "auto" not in rows or not seconds:
        return None
    return Case(1.0, {**seconds, "auto": rows["auto"]["seconds"]}, "auto")


def show(summary: Mapping[str, Any]) -> None:
    cells = list(summary["cells"].values())
    methods = list(dict.fromkeys(name for cell in cells for name in cell["ttft_s"] if ", " not in name))
    shown = WHERE | {name: _value("ttft_s", name) for name in methods}
    shown |= {f"bound: {name}": _value("bounds_s", name) for name in ("causal", "masked")}
    show_table("Time to first token, seconds (Tables 1 to 3)", columns(cells, shown))
    ratios = {
        name: {
            **{f"speed-up of {pair}": value for pair, value in cell["speedup"].items() if pair.startswith("kvr_s")},
            **{f"time of {pair}": value for pair, value in cell["time_ratio"].items()},
            **{f"time of kvr_s/bound: {bound}": value for bound, value in cell["over_bound"].items()},
        }
        for name, cell in summary["cells"].items()
    }
    show_intervals("Ratios of times", ratios)
    title = "What a competing flow at half rate costs, mean over the contexts (Figure 11)"
    show_intervals(title, summary["noise_loss"], "part of the time [95%]")
    chosen = [cell for cell in cells if "auto" in cell]
    shown = {
        "chose": lambda cell: cell["auto"]["chose"],
        **WHERE,
        "regret [95%]": lambda c: _percent(c["auto"]["regret"]),
    }
    shown |= {f"{name}: predicted": _value("auto", "predicted_over_measured", name) for name in CANDIDATES}
    show_table("What auto chose", columns(chosen, shown))
    if regret := summary.get("auto_regret"):
        mean, worst = regret["mean"], regret["largest"]
        print(f"\nregret of auto: mean {_percent(mean)}, largest {_percent(worst)} at {worst['cell']}")
    show_difference(summary)


WHERE: dict[str, Callable[[Row], object]] = {
    "links": lambda cell: cell["rate"],
    "KV heads": lambda cell: cell["kv_heads"],
    "ranks": lambda cell: cell["ranks"],
    "tokens": lambda cell: f"{cell['context']:,}",
}


def _value(*keys: str) -> Callable[[Row], str | None]:
    """A column of what lies under some keys of a case."""

    def show(cell: Row) -> str | None:
        found: Any = cell
        for key in keys:
            found = found.get(key)
            if found is None:
                return None
        return f"{found['value'] if isinstance(found, Mapping) else found:.3f}"

    return show


def _percent(value: Mapping[str, Any]) -> str:
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
