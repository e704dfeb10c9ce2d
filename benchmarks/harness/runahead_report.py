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
    """Print and publish all cases that were kept; the exit status is 1 if there is none."""
    cases = [part for name in parts.names("r") if (part := parts.read(name)) is not None]
    if not cases:
        print("nothing was measured", file=sys.stderr)
        return 1
    searches = {name.removeprefix(SEARCH): found for name in parts.names(SEARCH) if (found := parts.read(name))}
    rows = [row for case in cases for row in case["rows"]]
    groups = {Group(row["ranks"], row["kv_heads"], row["rate"], ()) for row in rows}
    paths = {group.name: profile_path(group, arguments.profile, parts.folder) for group in groups}
    kept = {name: path for name, path in paths.items() if path.exists()}
    rows = with_predictions("runahead", arguments, rows, kept.get)
    summary = {**summarise(rows), "searches": searches, "not_measured": dict(skipped)}
    show(summary)
    publish(arguments, "runahead", cases[0]["machine"], rows, summary, charts(arguments, summary, searches))
    return 0


def cases_of(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By case such as ``r4-kv16-free-8192`` its rows by method; beside a neighbour ``METHOD, link`` and so on."""
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        suffix = "" if row["noise"] == QUIET else f", {row['noise']}"
        places.setdefault(tuple(row[name] for name in PLACE), {})[row["method"] + suffix] = row
    order = sorted(places, key=lambda place: (place[2] != "free", place[2], -place[1], place[0], place[3]))
    return {f"r{place[0]}-kv{place[1]}-{place[2]}-{place[3]}": places[place] for place in order}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdicts over all rows: speed-ups, bounds, regret of `auto`, losses to a noisy neighbour."""
    cases = cases_of(rows)
    summary: dict[str, Any] = {"cells": {name: summarise_case(found) for name, found in cases.items()}}
    if judged := {name: case for name, found in cases.items() if (case := _choice(found)) is not None}:
        regrets = {name: summary["cells"][name]["auto"]["regret"] for name in judged}
        worst = max(regrets, key=lambda name: regrets[name]["value"])
        mean = judge(list(judged.values()))["intervals"]["auto_mean_regret"]
        summary["auto_regret"] = {"mean": mean, "largest": {"cell": worst, **regrets[worst]}}
    # Means over the contexts, as in Figure 11: rounds of each context are drawn apart.
    drawn: dict[tuple[str, str, str], list[Interval]] = {}
    for name, case in summary["cells"].items():
        for method, kinds in case["noise_loss"].items():
            for kind, value in kinds.items():
                drawn.setdefault((name.rpartition("-")[0], method, kind), []).append(Interval(**value))
    means: dict[str, Any] = {}
    for (group, method, kind), found in drawn.items():
        means.setdefault(group, {}).setdefault(method, {})[kind] = _mean(found)
    summary["noise_loss"] = means
    differences = [row["max_logit_difference"] for row in rows if row["max_logit_difference"] is not None]
    summary["max_logit_difference"] = max(differences)
    return summary


def summarise_case(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The verdicts over one case; times, ratios, regrets and losses have intervals."""
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
    if (case := _choice(rows)) is not None:
        said = rows["auto"]["candidates_s"]
        known = {name: own for name, own in CANDIDATES.items() if name in said and own in rows}
        found["auto"] = {
            "chose": rows["auto"]["auto"],
            "regret": judge([case])["intervals"]["auto_mean_regret"],
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
    for name in seconds:
        elsewhere, link = f"{name}, {ELSEWHERE}", f"{name}, {LINK}"
        pairs = {ELSEWHERE: (elsewhere, name), LINK: (link, name), "link_alone": (link, elsewhere)}
        if ratios := _ratios(seconds, pairs):
            found[name] = {kind: {key: value - 1 for key, value in ratio.items()} for kind, ratio in ratios.items()}
    return found


def _mean(values: Sequence[Interval]) -> dict[str, float]:
    """The mean of independent estimates; their half-widths add up in squares."""
    value = float(np.mean([each.value for each in values]))
    below = float(np.linalg.norm([each.value - each.low for each in values])) / len(values)
    above = float(np.linalg.norm([each.high - each.value for each in values])) / len(values)
    return Interval(value, value - below, value + above).to_json()


def _choice(rows: Mapping[str, Row]) -> Case | None:
    """The case as one that `auto` chose in, against every single choice that was measured beside it."""
    seconds = {name: rows[name]["seconds"] for name in CHOICES if name in rows}
    if "auto" not in rows or not seconds:
        return None
    return Case(1.0, {**seconds, "auto": rows["auto"]["seconds"]}, "auto")


def show(summary: Mapping[str, Any]) -> None:
    cases = list(summary["cells"].values())
    methods = list(dict.fromkeys(name for case in cases for name in case["ttft_s"] if ", " not in name))
    shown = WHERE | {name: _value("ttft_s", name) for name in methods}
    shown |= {f"bound: {name}": _value("bounds_s", name) for name in ("causal", "masked")}
    show_table("Time to first token, seconds (Tables 1 to 3)", columns(cases, shown))
    ratios = {
        name: {
            **{f"speed-up of {pair}": value for pair, value in case["speedup"].items() if pair.startswith("kvr_s")},
            **{f"time of {pair}": value for pair, value in case["time_ratio"].items()},
            **{f"time of kvr_s/bound: {bound}": value for bound, value in case["over_bound"].items()},
        }
        for name, case in summary["cells"].items()
    }
    show_intervals("Ratios of times", ratios)
    title = "What a competing flow at half rate costs, mean over the contexts (Figure 11)"
    show_intervals(title, summary["noise_loss"], "part of the time [95%]")
    chosen = [case for case in cases if "auto" in case]
    shown = {
        "chose": lambda case: case["auto"]["chose"],
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
    "links": lambda case: case["rate"],
    "KV heads": lambda case: case["kv_heads"],
    "ranks": lambda case: case["ranks"],
    "tokens": lambda case: f"{case['context']:,}",
}


def _value(*keys: str) -> Callable[[Row], str | None]:
    """A column of what lies under some keys of a case."""

    def show(case: Row) -> str | None:
        found: Any = case
        for key in keys:
            found = found.get(key)
            if found is None:
                return None
        return f"{found['value'] if isinstance(found, Mapping) else found:.3f}"

    return show


def _percent(value: Mapping[str, Any]) -> str:
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
