"""Charts of `runahead.py`: the forms of KV-Runahead's Figures 6, 8, 10 and 11, and runahead beside ring pass-KV."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megakv.runahead.figure import draw_searches
from megakv.runahead.search import SearchResult, Trial

from .charts import Chart, Line, bars, shares
from .charts import lines as draw_lines
from .noise import ELSEWHERE, LINK
from .statistics import Interval

Row = Mapping[str, Any]
BY_CONTEXT = ("tsp", "tsp_causal", "tp_gloo", "kvr_e", "kvr_s", "pass_kv")
BY_RANKS = ("tsp", "kvr_e", "kvr_s")
BOUNDS = {
    "causal": ("TTFT(1) / p", "#22282f"),
    "masked": ("TTFT*(p)", "#8a929b"),
    "silent": ("KVR-S without communication", "#d9a441"),
}
NAMES = {
    "tsp": "TSP", "tsp_causal": "TSP, causal", "tp": "TP", "tp_gloo": "TP, gloo", "kvr_e": "KVR-E", "kvr_s": "KVR-S",
    "kvr_p": "KVR-P", "pass_kv": "pass-KV", "pass_q": "pass-Q", "one_rank": "one rank",
}  # fmt: skip


def charts(arguments: argparse.Namespace, summary: Mapping[str, Any], searches: Mapping[str, Row]) -> list[Chart]:
    """What there are cells for; `searches` holds what each search measured, by cell."""
    model = (
        f"{arguments.family.capitalize()}, {arguments.layers} layers of {arguments.hidden}, {arguments.heads} "
        f"query heads, {arguments.dtype}, {arguments.threads} thread(s) a rank; median, 95% interval"
    )
    groups: dict[str, list[Row]] = {}
    for name, cell in summary["cells"].items():
        groups.setdefault(name.rpartition("-")[0], []).append(cell)
    made = []
    for group, cells in groups.items():
        words = f"{cells[0]['ranks']} ranks, {cells[0]['kv_heads']} KV heads, links: {cells[0]['rate']}"
        by_context = _lines(cells, "context", BY_CONTEXT)
        labels = {"subtitle": model, "x_label": "tokens", "y_label": "seconds"}
        title = f"Time to first token by context, {words}"
        made.append(draw_lines(f"ttft.{group}", by_context, title=title, log_y=True, **labels))
        found = [(f"{cell['context']:,}", cell["partition"]["kvr_s"]) for cell in cells if "kvr_s" in cell["partition"]]
        if found:
            subtitle = "tokens of each rank, rank 0 on the left, by context"
            labels = {"title": f"Searched partitions, {words}", "subtitle": subtitle, "unit": "share of the prompt"}
            made.append(shares(f"partitions.{group}", found, **labels))
        predicted = [
            (f"{NAMES[method]}, {cell['context']:,}", Interval(**cell["ttft_s"][method]), method != "tsp")
            for cell in cells
            if "kvr_p" in cell["ttft_s"]
            for method in ("tsp", "kvr_s", "kvr_p")
            if method in cell["ttft_s"]
        ]
        if predicted:
            labels = {"title": f"Interpolated partitions, {words}", "subtitle": model}
            unit = "time to first token in seconds, less is better"
            made.append(bars(f"predicted.{group}", predicted, unit=unit, **labels))
        if noise := summary["noise_loss"].get(group):
            values = [
                (f"{NAMES[method]}, {text}", Interval(**kinds[kind]).scaled(100), method.startswith("kvr"))
                for method, kinds in noise.items()
                for kind, text in ((LINK, "on a link"), ("link_alone", "link alone"), (ELSEWHERE, "elsewhere"))
                if kind in kinds
            ]
            subtitle = "on a link between neighbours; beyond what the same flow costs elsewhere; elsewhere"
            labels = {"title": f"A competing flow at half rate: time lost, {group}", "subtitle": subtitle}
            unit = "percent of the time to first token, mean over the contexts"
            made.append(bars(f"noise.{group}", values, unit=unit, **labels))
        if own := [_result(found) for name, found in searches.items() if name.rpartition("-")[0] == group]:
            draw = partial(draw_searches, results=own, title=f"Search for partitions, {group}")
            made.append(Chart(f"search.{group}", draw, None))
    return made + _scaling(list(summary["cells"].values()), model) + _beside_the_ring(groups, model)


def _scaling(cells: Sequence[Row], model: str) -> list[Chart]:
    """Figure 8 (d): TTFT by number of ranks, at the longest context that several numbers have."""
    made = []
    for kv_heads, rate in dict.fromkeys((cell["kv_heads"], cell["rate"]) for cell in cells):
        own = [cell for cell in cells if (cell["kv_heads"], cell["rate"]) == (kv_heads, rate)]
        contexts = [cell["context"] for cell in own]
        context = max((each for each in contexts if contexts.count(each) > 1), default=None)
        if context is not None:
            same = [cell for cell in own if cell["context"] == context]
            title = f"Time to first token of {context:,} tokens by ranks, {kv_heads} KV heads, links: {rate}"
            labels = {"title": title, "subtitle": model, "x_label": "ranks", "y_label": "seconds"}
            made.append(draw_lines(f"ranks.kv{kv_heads}-{rate}-{context}", _lines(same, "ranks", BY_RANKS), **labels))
    return made


def _beside_the_ring(groups: Mapping[str, Sequence[Row]], model: str) -> list[Chart]:
    """What is not published: the speed of runahead over ring pass-KV."""
    found = [_by(cells, "context", "speedup", "kvr_s/pass_kv", group) for group, cells in groups.items()]
    known = [line for line in found if line.x]
    labels = {"title": "KVR-S against ring pass-KV by context", "x_label": "tokens"}
    labels |= {"subtitle": f"r: ranks, kv: KV heads, then links. {model}", "y_label": "speed of KVR-S over pass-KV"}
    return [draw_lines("pass_kv", known, level=1.0, **labels)] if known else []


def _lines(cells: Sequence[Row], axis: str, methods: Sequence[str]) -> list[Line]:
    """Times of some methods, and bounds."""
    found = [_by(cells, axis, "ttft_s", method, NAMES[method]) for method in methods]
    for name, (label, colour) in BOUNDS.items():
        found.append(replace(_by(cells, axis, "bounds_s", name, label), dashed=True, colour=colour))
    return [line for line in found if line.x]


def _by(cells: Sequence[Row], axis: str, table: str, name: str, label: str) -> Line:
    known = sorted((cell for cell in cells if name in cell[table]), key=lambda cell: cell[axis])
    return Line(label, [cell[axis] for cell in known], [Interval(**cell[table][name]) for cell in known])


def _result(found: Row) -> SearchResult:
    """A search as it was kept."""
    names = ("seconds", "even_seconds", "evaluations")
    trials = tuple(Trial.model_validate(trial) for trial in found["trials"])
    return SearchResult(partition=tuple(found["partition"]), trials=trials, **{name: found[name] for name in names})
