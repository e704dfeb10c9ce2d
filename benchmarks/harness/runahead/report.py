"""What `runahead.py` has measured, as tables, charts and a summary."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..charts import Chart, lines
from ..launch import Found, Rows
from ..models import words_of
from ..noise import ELSEWHERE, LINK, QUIET
from ..publish import leaves, show, show_summary
from ..statistics import Case, Interval, judge, median, paired_ratio
from .plan import CANDIDATES

Row = Mapping[str, Any]
PEERS = ("tsp", "tsp_causal", "tp", "tp_gloo", "pass_kv")
SPEEDUPS = (
    *((own, peer) for own in ("kvr_s", "kvr_p", "kvr_e") for peer in PEERS), ("kvr_s", "kvr_e"), ("pass_kv", "tsp"),
)  # fmt: skip
"""Method and peer: the peer's time over the method's."""
TIME_RATIOS = (("kvr_p", "kvr_s"),)  # Time of the one over that of the other
CHOICES = ("one_rank", "kvr_e", "kvr_s", "pass_kv", "pass_q")  # What `auto` may choose from, with any partition
PLACE = ("ranks", "kv_heads", "rate", "context")
NAMES = {
    "tsp": "TSP", "tsp_causal": "TSP, causal", "tp_gloo": "TP, gloo", "kvr_e": "KVR-E", "kvr_s": "KVR-S",
    "kvr_p": "KVR-P", "pass_kv": "pass-KV",
}  # fmt: skip


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> Found:
    summary = {**summarise(rows), "not_measured": dict(skipped)} if rows else {}
    if rows:
        show_cases(rows, summary)
    return rows, summary, charts(arguments, summary) if rows else []


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
    found: dict[str, Any] = {
        **place,
        "ttft_s": {name: median(times).to_json() for name, times in seconds.items()},
        "speedup": _ratios(seconds, {f"{own}/{peer}": (peer, own) for own, peer in SPEEDUPS}),
        "time_ratio": _ratios(seconds, {f"{own}/{other}": (own, other) for own, other in TIME_RATIOS}),
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
    known = {name: pair for name, pair in pairs.items() if set(pair) <= set(seconds)}
    return {name: paired_ratio(seconds[one], seconds[other]).to_json() for name, (one, other) in known.items()}


def losses(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Costs of a competing flow for each method (KV-Runahead, Figure 11), as a part of its time."""
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
    below, above = (
        float(np.linalg.norm(ends)) / len(values)
        for ends in ([each.value - each.low for each in values], [each.high - each.value for each in values])
    )
    return Interval(value, value - below, value + above).to_json()


def _choice(rows: Mapping[str, Row]) -> Case | None:
    """The case as one that `auto` chose in, against every single choice that was measured beside it."""
    seconds = {name: rows[name]["seconds"] for name in CHOICES if name in rows}
    if "auto" not in rows or not seconds:
        return None
    return Case(1.0, {**seconds, "auto": rows["auto"]["seconds"]}, "auto")


def show_cases(rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    cases = list(summary["cells"].values())
    place = "rate kv_heads ranks context"
    methods = " ".join(f"ttft_s.{name}.value" for name in dict.fromkeys(row["method"] for row in rows))
    show(cases, f"{place} {methods}", "Time to first token, seconds (Tables 1 to 3)")
    parts = ("speedup", "time_ratio")
    show_summary({name: {part: case[part] for part in parts} for name, case in summary["cells"].items()})
    show_summary(summary, "noise_loss", "auto_regret", "max_logit_difference")
    predicted = " ".join(f"auto.predicted_over_measured.{name}" for name in CANDIDATES)
    chosen = [case for case in cases if "auto" in case]
    show(chosen, f"auto.chose {place} auto.regret {predicted}", "What auto chose")


def charts(arguments: argparse.Namespace, summary: Mapping[str, Any]) -> list[Chart]:
    """KV-Runahead's Figure 8 in form, for each group of cases, and the chain beside ring pass-KV."""
    cases = [{**case, "group": name.rpartition("-")[0]} for name, case in summary["cells"].items()]
    words = {"subtitle": words_of(arguments), "x_label": "tokens"}
    made = []
    for group in dict.fromkeys(case["group"] for case in cases):
        points = [
            {"x": case["context"], "y": case["ttft_s"][name], "line": label}
            for case in cases if case["group"] == group
            for name, label in NAMES.items() if name in case["ttft_s"]
        ]  # fmt: skip
        labels = {"title": f"Time to first token by context, {group}", "y_label": "seconds", **words}
        made.append(lines(f"ttft.{group}", points, "x", "y", "line", log_y=True, **labels))
    # What is not published: the speed of runahead over ring pass-KV.
    beside = [{**case, "y": case["speedup"]["kvr_s/pass_kv"]} for case in cases if "kvr_s/pass_kv" in case["speedup"]]
    if beside:
        labels = {"title": "KVR-S against ring pass-KV by context", "y_label": "speed of KVR-S over pass-KV", **words}
        made.append(lines("pass_kv", beside, "context", "y", "group", level=1.0, **labels))
    return made
