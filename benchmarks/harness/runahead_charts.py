"""Charts of `runahead.py`: the forms of KV-Runahead's Figures 6, 8, 10 and 11, and runahead beside ring pass-KV."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megakv.runahead.figure import draw_searches
from megakv.runahead.search import SearchResult, Trial

from .charts import Chart, Line, bars, groups, lines
from .models import words_of
from .noise import ELSEWHERE, LINK
from .statistics import Interval, point

Row = Mapping[str, Any]
BOUNDS = {
    "causal": ("TTFT(1) / p", "#22282f"),
    "masked": ("TTFT*(p)", "#8a929b"),
    "silent": ("KVR-S without communication", "#d9a441"),
}
NAMES = {
    "tsp": "TSP", "tsp_causal": "TSP, causal", "tp_gloo": "TP, gloo", "kvr_e": "KVR-E", "kvr_s": "KVR-S",
    "kvr_p": "KVR-P", "pass_kv": "pass-KV",
}  # fmt: skip


def charts(arguments: argparse.Namespace, summary: Mapping[str, Any], searches: Mapping[str, Row]) -> list[Chart]:
    """What there are cases for; `searches` holds what each search measured, by case."""
    model = f"{words_of(arguments)}; median, 95% interval"
    ordered: dict[str, list[Row]] = {}
    for name, case in summary["cells"].items():
        ordered.setdefault(name.rpartition("-")[0], []).append(case)
    made = []
    for group, cases in ordered.items():
        words = f"{cases[0]['ranks']} ranks, {cases[0]['kv_heads']} KV heads, links: {cases[0]['rate']}"
        made.append(_times(f"ttft.{group}", cases, "context", model, f"Time to first token by context, {words}"))
        if found := {f"{c['context']:,}": c["partition"]["kvr_s"] for c in cases if "kvr_s" in c["partition"]}:
            shares = {
                f"rank {rank}": [point(parts[rank] / sum(parts)) for parts in found.values()]
                for rank in range(cases[0]["ranks"])
            }
            labels = {"title": f"Searched partitions, {words}", "x_label": "tokens", "y_label": "share of the prompt"}
            made.append(groups(f"partitions.{group}", list(found), shares, stacked=True, **labels))
        if noise := summary["noise_loss"].get(group):
            values = [
                (f"{NAMES[method]}, {text}", Interval(**kinds[kind]).scaled(100), method.startswith("kvr"))
                for method, kinds in noise.items()
                for kind, text in ((LINK, "on a link"), ("link_alone", "link alone"), (ELSEWHERE, "elsewhere"))
                if kind in kinds
            ]
            labels = {"title": f"A competing flow at half rate: time lost, {group}"}
            labels["unit"] = "percent of the time to first token, mean over the contexts"
            made.append(bars(f"noise.{group}", values, **labels))
        if own := [_result(found) for name, found in searches.items() if name.rpartition("-")[0] == group]:
            draw = partial(draw_searches, results=own, title=f"Search for partitions, {group}")
            made.append(Chart(f"search.{group}", draw, size=None))
    return made + _by_ranks(list(summary["cells"].values()), model) + _beside_the_ring(ordered, model)


def _by_ranks(cases: Sequence[Row], model: str) -> list[Chart]:
    """Figure 8 (d): TTFT by number of ranks, at the longest context that several numbers have."""
    made = []
    for kv_heads, rate in dict.fromkeys((case["kv_heads"], case["rate"]) for case in cases):
        own = [case for case in cases if (case["kv_heads"], case["rate"]) == (kv_heads, rate)]
        contexts = [case["context"] for case in own]
        if repeated := [context for context in contexts if contexts.count(context) > 1]:
            same = [case for case in own if case["context"] == max(repeated)]
            title = f"Time to first token of {max(repeated):,} tokens by ranks, {kv_heads} KV heads, links: {rate}"
            made.append(_times(f"ranks.kv{kv_heads}-{rate}-{max(repeated)}", same, "ranks", model, title))
    return made


def _beside_the_ring(ordered: Mapping[str, Sequence[Row]], model: str) -> list[Chart]:
    """What is not published: the speed of runahead over ring pass-KV."""
    found = [_by(cases, "context", "speedup", "kvr_s/pass_kv", group) for group, cases in ordered.items()]
    known = [line for line in found if line.x]
    labels = {"title": "KVR-S against ring pass-KV by context", "x_label": "tokens"}
    labels |= {"subtitle": f"r: ranks, kv: KV heads, then links. {model}", "y_label": "speed of KVR-S over pass-KV"}
    return [lines("pass_kv", known, level=1.0, **labels)] if known else []


def _times(name: str, cases: Sequence[Row], axis: str, model: str, title: str) -> Chart:
    found = [_by(cases, axis, "ttft_s", method, label) for method, label in NAMES.items()]
    for bound, (label, colour) in BOUNDS.items():
        found.append(replace(_by(cases, axis, "bounds_s", bound, label), style="--", colour=colour))
    labels = {"title": title, "subtitle": model, "x_label": axis, "y_label": "seconds"}
    return lines(name, [line for line in found if line.x], log_y=True, **labels)


def _by(cases: Sequence[Row], axis: str, table: str, name: str, label: str) -> Line:
    known = sorted((case for case in cases if name in case[table]), key=lambda case: case[axis])
    return Line(label, [case[axis] for case in known], [Interval(**case[table][name]) for case in known])


def _result(found: Row) -> SearchResult:
    """A search as it was kept."""
    trials = tuple(Trial.model_validate(trial) for trial in found["trials"])
    return SearchResult(**{**found, "partition": tuple(found["partition"]), "trials": trials})
