"""Charts of `runahead.py`: the forms of KV-Runahead's Figures 6, 8, 10 and 11, and runahead beside ring pass-KV."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megakv.runahead.figure import draw_searches
from megakv.runahead.search import SearchResult, Trial

from .chart import draw_bars
from .lines import Line, draw_lines
from .noise import ELSEWHERE, LINK
from .shares import draw_shares
from .statistics import Interval

Cell = Mapping[str, Any]
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


def draw_all(
    results: Path, arguments: argparse.Namespace, summary: Mapping[str, Any], searches: Mapping[str, Cell]
) -> list[Path]:
    """Draw what there are cells for, beside the results."""
    charts = Charts(results, arguments)
    groups: dict[str, list[Cell]] = {}
    for name, cell in summary["cells"].items():
        groups.setdefault(name.rpartition("-")[0], []).append(cell)
    for group, cells in groups.items():
        charts.ttft(group, cells)
        charts.partitions(group, cells)
        charts.predicted(group, cells)
        if group in summary["noise_loss"]:
            charts.noise(group, summary["noise_loss"][group])
        charts.search(group, {name: found for name, found in searches.items() if name.rpartition("-")[0] == group})
    charts.scaling(list(summary["cells"].values()))
    charts.side_by_side(groups)
    return charts.drawn


class Charts:
    """Charts beside a file of results."""

    def __init__(self, results: Path, arguments: argparse.Namespace):
        self.drawn: list[Path] = []
        self._results = results
        self._model = (
            f"{arguments.family.capitalize()}, {arguments.layers} layers of {arguments.hidden}, {arguments.heads} "
            f"query heads, {arguments.dtype}, {arguments.threads} thread(s) a rank; median, 95% interval"
        )

    def _path(self, *names: str) -> Path:
        path = self._results.with_suffix(f".{'.'.join(names)}.png")
        self.drawn.append(path)
        return path

    def ttft(self, group: str, cells: Sequence[Cell]) -> None:
        """Figure 8 (a-c, e-f): TTFT by context."""
        lines = [_by(cells, "context", "ttft_s", method, NAMES[method]) for method in BY_CONTEXT]
        lines += [_bound(cells, "context", name) for name in BOUNDS]
        draw_lines(
            self._path("ttft", group),
            [line for line in lines if line.x],
            title=f"Time to first token by context, {_describe(cells[0])}",
            subtitle=self._model,
            x_label="tokens",
            y_label="seconds",
            log_y=True,
        )

    def scaling(self, cells: Sequence[Cell]) -> None:
        """Figure 8 (d): TTFT by number of ranks, at the longest context that several numbers have."""
        kinds: dict[tuple[int, str, int], list[Cell]] = {}
        for cell in cells:
            kinds.setdefault((cell["kv_heads"], cell["rate"], cell["context"]), []).append(cell)
        longest: dict[tuple[int, str], int] = {}
        for (kv_heads, rate, context), found in kinds.items():
            if len(found) > 1:
                longest[kv_heads, rate] = max(context, longest.get((kv_heads, rate), 0))
        for (kv_heads, rate), context in longest.items():
            found = kinds[kv_heads, rate, context]
            lines = [_by(found, "ranks", "ttft_s", method, NAMES[method]) for method in BY_RANKS]
            lines += [_bound(found, "ranks", name) for name in BOUNDS]
            draw_lines(
                self._path("ranks", f"kv{kv_heads}-{rate}-{context}"),
                [line for line in lines if line.x],
                title=f"Time to first token of {context:,} tokens by ranks, {kv_heads} KV heads, links: {rate}",
                subtitle=self._model,
                x_label="ranks",
                y_label="seconds",
            )

    def partitions(self, group: str, cells: Sequence[Cell]) -> None:
        """Figure 10 (a): the searched partitions."""
        bars = [(f"{cell['context']:,}", cell["partition"]["kvr_s"]) for cell in cells if "kvr_s" in cell["partition"]]
        if bars:
            draw_shares(
                self._path("partitions", group),
                bars,
                title=f"Searched partitions, {_describe(cells[0])}",
                subtitle="tokens of each rank, rank 0 on the left, by context",
                unit="share of the prompt",
            )

    def predicted(self, group: str, cells: Sequence[Cell]) -> None:
        """Figure 10 (b, c): predicted against searched partitions on lengths that the table does not have."""
        bars = []
        for cell in cells:
            if "kvr_p" in cell["ttft_s"]:
                for method in ("tsp", "kvr_s", "kvr_p"):
                    if method in cell["ttft_s"]:
                        value = Interval(**cell["ttft_s"][method])
                        bars.append((f"{NAMES[method]}, {cell['context']:,}", value, method != "tsp"))
        if bars:
            draw_bars(
                self._path("predicted", group),
                bars,
                title=f"Interpolated partitions, {_describe(cells[0])}",
                subtitle=self._model,
                unit="time to first token in seconds, less is better",
            )

    def noise(self, group: str, methods: Mapping[str, Any]) -> None:
        """Figure 11: what a competing flow costs."""
        bars = []
        for method, kinds in methods.items():
            for kind, text in ((LINK, "on a link"), ("link_alone", "link alone"), (ELSEWHERE, "elsewhere")):
                if kind in kinds:
                    value = Interval(**kinds[kind]).scaled(100)
                    bars.append((f"{NAMES[method]}, {text}", value, method.startswith("kvr")))
        draw_bars(
            self._path("noise", group),
            bars,
            title=f"A competing flow at half rate: time lost, {group}",
            subtitle="on a link between neighbours; beyond what the same flow costs elsewhere; elsewhere",
            unit="percent of the time to first token, mean over the contexts",
        )

    def search(self, group: str, searches: Mapping[str, Cell]) -> None:
        """Figure 6: what the searches measured."""
        if searches:
            results = [result_of(found) for found in searches.values()]
            draw_searches(self._path("search", group), results, title=f"Search for partitions, {group}")

    def side_by_side(self, groups: Mapping[str, Sequence[Cell]]) -> None:
        """What is not published: the speed of runahead over ring pass-KV."""
        lines = [_by(cells, "context", "speedup", "kvr_s/pass_kv", group) for group, cells in groups.items()]
        if any(line.x for line in lines):
            draw_lines(
                self._path("pass_kv"),
                [line for line in lines if line.x],
                title="KVR-S against ring pass-KV by context",
                subtitle=f"r: ranks, kv: KV heads, then links. {self._model}",
                x_label="tokens",
                y_label="speed of KVR-S over pass-KV",
                level=1.0,
            )


def result_of(found: Cell) -> SearchResult:
    """A search as it was kept."""
    return SearchResult(
        partition=tuple(found["partition"]),
        seconds=found["seconds"],
        even_seconds=found["even_seconds"],
        evaluations=found["evaluations"],
        trials=tuple(Trial.model_validate(trial) for trial in found["trials"]),
    )


def _by(cells: Sequence[Cell], axis: str, table: str, name: str, label: str) -> Line:
    known = sorted((cell for cell in cells if name in cell[table]), key=lambda cell: cell[axis])
    return Line(label, [cell[axis] for cell in known], [Interval(**cell[table][name]) for cell in known])


def _bound(cells: Sequence[Cell], axis: str, name: str) -> Line:
    label, colour = BOUNDS[name]
    return replace(_by(cells, axis, "bounds_s", name, label), dashed=True, colour=colour)


def _describe(cell: Cell) -> str:
    return f"{cell['ranks']} ranks, {cell['kv_heads']} KV heads, links: {cell['rate']}"
