"""All that `runahead.py` has measured so far, as tables, charts and one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from megakv.costmodel.context_parallel import causal_bound, dense_bound
from megakv.runahead.figure import draw_searches
from megakv.runahead.search import SearchResult, Trial

from .charts import Chart, bars, groups, lines
from .choices import Case, judge
from .models import words_of
from .noise import ELSEWHERE, LINK, QUIET
from .predictions import CANDIDATES, with_predictions
from .publish import Parts, leaves, publish, show, show_summary
from .runahead_plan import SEARCH, Group, profile_path
from .statistics import Interval, median, paired_ratio, ratio

Row = Mapping[str, Any]
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
BOUNDS = {
    "causal": ("TTFT(1) / p", "#22282f"),
    "masked": ("TTFT*(p)", "#8a929b"),
    "silent": ("KVR-S without communication", "#d9a441"),
}
NAMES = {
    "tsp": "TSP", "tsp_causal": "TSP, causal", "tp_gloo": "TP, gloo", "kvr_e": "KVR-E", "kvr_s": "KVR-S",
    "kvr_p": "KVR-P", "pass_kv": "pass-KV",
}  # fmt: skip
NOISES = {LINK: "on a link", "link_alone": "link alone", ELSEWHERE: "elsewhere"}


def report(arguments: argparse.Namespace, parts: Parts, skipped: Mapping[str, str]) -> int:
    """Print and publish all cases that were kept; the exit status is 1 if there is none."""
    cases = list(parts.all("r").values())
    if not cases:
        print("nothing was measured", file=sys.stderr)
        return 1
    searches = {name.removeprefix(SEARCH): found for name, found in parts.all(SEARCH).items()}
    rows = [row for case in cases for row in case["rows"]]
    groups = {Group(row["ranks"], row["kv_heads"], row["rate"], ()) for row in rows}
    paths = {group.name: profile_path(group, arguments.profile, parts.folder) for group in groups}
    kept = {name: path for name, path in paths.items() if path.exists()}
    rows = with_predictions("runahead", arguments, rows, kept.get)
    summary = {**summarise(rows), "searches": searches, "not_measured": dict(skipped)}
    show_cases(rows, summary)
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
        for found in leaves(case["noise_loss"], "method", "kind"):
            key = name.rpartition("-")[0], found["method"], found["kind"]
            drawn.setdefault(key, []).append(Interval.of(found["value"]))
    summary["noise_loss"] = {}
    for (group, method, kind), values in drawn.items():
        summary["noise_loss"].setdefault(group, {}).setdefault(method, {})[kind] = _mean(values)
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


def show_cases(rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    cases = list(summary["cells"].values())
    place, bounds = "rate kv_heads ranks context", "bounds_s.causal bounds_s.masked"
    methods = " ".join(f"ttft_s.{name}.value" for name in dict.fromkeys(row["method"] for row in rows))
    show(cases, f"{place} {methods} {bounds}", "Time to first token, seconds (Tables 1 to 3)")
    parts = ("speedup", "time_ratio", "over_bound")
    show_summary({name: {part: case[part] for part in parts} for name, case in summary["cells"].items()})
    show_summary(summary, "noise_loss", "auto_regret", "max_logit_difference")
    predicted = " ".join(f"auto.predicted_over_measured.{name}" for name in CANDIDATES)
    chosen = [case for case in cases if "auto" in case]
    show(chosen, f"auto.chose {place} auto.regret {predicted}", "What auto chose")


def charts(arguments: argparse.Namespace, summary: Mapping[str, Any], searches: Mapping[str, Row]) -> list[Chart]:
    """KV-Runahead's Figures 6, 8, 10 and 11 in form, and runahead beside ring pass-KV, as far as there are cases.

    `searches` holds what each search measured, by case.
    """
    cases = [{**case, "group": name.rpartition("-")[0]} for name, case in summary["cells"].items()]
    cases.sort(key=lambda case: (case["context"], case["ranks"]))
    model = f"{words_of(arguments)}; median, 95% interval"
    made = []
    for group in dict.fromkeys(name.rpartition("-")[0] for name in summary["cells"]):
        own = [case for case in cases if case["group"] == group]
        words = f"{own[0]['ranks']} ranks, {own[0]['kv_heads']} KV heads, links: {own[0]['rate']}"
        made.append(_times(f"ttft.{group}", own, "context", model, f"Time to first token by context, {words}"))
        shares = [
            {"context": f"{case['context']:,}", "rank": f"rank {rank}", "value": tokens / case["context"]}
            for case in own
            for rank, tokens in enumerate(case["partition"].get("kvr_s", ()))
        ]
        if shares:
            labels = {"title": f"Searched partitions, {words}", "x_label": "tokens", "y_label": "share of the prompt"}
            made.append(groups(f"partitions.{group}", shares, "context", "rank", stacked=True, **labels))
        if noise := list(leaves(summary["noise_loss"].get(group, {}), "method", "kind")):
            label = {"label": lambda row: f"{NAMES[row['method']]}, {NOISES[row['kind']]}", "y": "value", "scale": 100}
            labels = {"title": f"A competing flow at half rate: time lost, {group}"}
            labels["unit"] = "percent of the time to first token, mean over the contexts"
            noise.sort(key=lambda row: list(NOISES).index(row["kind"]))
            own_too = {"own": lambda row: row["method"].startswith("kvr")}
            made.append(bars(f"noise.{group}", noise, **label, **own_too, **labels))
        if done := [_result(found) for name, found in searches.items() if name.rpartition("-")[0] == group]:
            draw = partial(draw_searches, results=done, title=f"Search for partitions, {group}")
            made.append(Chart(f"search.{group}", draw, size=None))
    # Figure 8 (d): by number of ranks, at the longest context that several numbers have.
    for kv_heads, rate in dict.fromkeys((case["kv_heads"], case["rate"]) for case in cases):
        own = [case for case in cases if (case["kv_heads"], case["rate"]) == (kv_heads, rate)]
        contexts = [case["context"] for case in own]
        if most := max((context for context in contexts if contexts.count(context) > 1), default=None):
            same = [case for case in own if case["context"] == most]
            title = f"Time to first token of {most:,} tokens by ranks, {kv_heads} KV heads, links: {rate}"
            made.append(_times(f"ranks.kv{kv_heads}-{rate}-{most}", same, "ranks", model, title))
    # What is not published: the speed of runahead over ring pass-KV.
    beside = [{**case, "y": case["speedup"]["kvr_s/pass_kv"]} for case in cases if "kvr_s/pass_kv" in case["speedup"]]
    if beside:
        labels = {"title": "KVR-S against ring pass-KV by context", "x_label": "tokens"}
        labels |= {"subtitle": f"r: ranks, kv: KV heads, then links. {model}", "y_label": "speed of KVR-S over pass-KV"}
        made.append(lines("pass_kv", beside, "context", "y", "group", level=1.0, **labels))
    return made


def _times(name: str, cases: Sequence[Row], axis: str, model: str, title: str) -> Chart:
    def points() -> Iterator[dict[str, Any]]:
        for method, label in NAMES.items():
            yield from ({"x": c[axis], "line": label, "y": c["ttft_s"][method]} for c in cases if method in c["ttft_s"])
        for bound, (label, colour) in BOUNDS.items():
            look = {"line": label, "look": {"linestyle": "--", "color": colour}}
            yield from ({"x": c[axis], "y": c["bounds_s"][bound], **look} for c in cases if bound in c["bounds_s"])

    labels = {"title": title, "subtitle": model, "x_label": axis, "y_label": "seconds"}
    return lines(name, list(points()), "x", "y", "line", looks=lambda row: row.get("look", {}), log_y=True, **labels)


def _result(found: Row) -> SearchResult:
    """A search as it was kept."""
    trials = tuple(Trial.model_validate(trial) for trial in found["trials"])
    return SearchResult(**{**found, "partition": tuple(found["partition"]), "trials": trials})
