"""Tables and charts of `offload.py`: the forms of KVPR's Tables 2 to 5, and Figures 6 to 10, 12 and 13."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .charts import Chart, Line, groups, lines
from .offload_plan import PARTS, variant
from .offload_summary import predicted, settings, step_s
from .publish import columns, show_table
from .statistics import Interval, median, point

Row = Mapping[str, Any]
TASKS = ("load weights", "load cache", "load activations", "compute", "store cache", "store activations")
COLOURS = {
    "in_memory": "#9aa7b5", "transformers": "#22282f", "stream": "#c8553d", "kvpr": "#b58a2a", "chunked": "#3f8f5f",
    "cpu_rank": "#8a6bb8", "auto": "#2f6db3", "stream_4bit": "#e3a18f", "kvpr_4bit": "#dcc68d",
    "kvpr_coarse": "#8a929b", "row_stream": "#22282f",
}  # fmt: skip
LABELS = {method: variant(method).title for method in COLOURS}
LABELLED = {LABELS[method]: colour for method, colour in COLOURS.items()}
FIGURE_8, FIGURE_9 = ("stream", "kvpr", "auto"), ("kvpr", "kvpr_4bit", "stream", "stream_4bit")
FIGURE_12 = ("kvpr", "chunked", "auto")
Table = tuple[str, list[list[str]]]
"""A title, and lines of which the first has the heads."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each setting: what every method of its cases took."""
    return [_table(part, own) for part, own in settings(rows)]


def _table(part: str, rows: Sequence[Row]) -> Table:
    def number(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str | None]:
        return lambda row: format(factor * row[key], form) if row.get(key) is not None else None

    disk = any("disk_io" in row for row in rows)
    shown: dict[str, Callable[[Row], object]] = {
        "model, link, method": lambda row: f"{row['shape']} {row['link_gb_s']:.3g} GB/s {LABELS[row['method']]}",
        "batch": lambda row: row["batch"],
        "prompt/new": size_words,
        "ms/step": lambda row: f"{1e3 * step_s(row):.1f}",
        "predicted": number("predicted_s", ".1f", 1e3),
        "tokens/s": number("tokens_per_s", ".1f"),
        "decode s": lambda row: f"{statistics.median(row['decode_s']):.3f}",
        "MB in": number("bytes_in", ".2f", 1e-6),
        "of it weights": number("weight_bytes", ".2f", 1e-6),
        "MB out": number("bytes_out", ".3f", 1e-6),
        "link": number("link_utilisation", ".0%"),
        "compute": number("compute_utilisation", ".0%"),
        "MB disk": number("disk_bytes", ".2f", 1e-6),
        "disk": number("disk_utilisation", ".0%"),
        "MB device": number("device_bytes", ".1f", 1e-6),
        "l": lambda row: row["split_points"][-1][1] if "split_points" in row else None,
        "on host": number("on_host", ".0f"),
        "of s'": lambda row: row["split_points"][-1][0] if "split_points" in row else None,
    }
    left_out = {"of it weights"} if not rows[0]["weights_offloaded"] else set()
    left_out |= set() if disk else {"MB disk", "disk"}
    where = f", keys and values {place_words(rows)}" if disk else ""
    title = f"{PARTS[part]}{where}; l: tokens recomputed in the last step. {link_words(rows)}"
    return title, columns(rows, {head: show for head, show in shown.items() if head not in left_out})


def link_words(rows: Sequence[Row], *, short: bool = False) -> str:
    """How the link of some rows is to be called."""
    speeds = ", ".join(f"{rate:.3g}" for rate in sorted({row["link_gb_s"] for row in rows}))
    if rows[0]["link"] == "emulated":
        return f"EMULATED link of {speeds} GB/s" + ("" if short else ": real copies in a thread, paced")
    return f"link measured at {speeds} GB/s"


def place_words(rows: Sequence[Row]) -> str:
    """Where the keys and values of some rows lie."""
    row = next((row for row in rows if "disk_io" in row), None)
    if row is None:
        return "in host memory"
    return (
        f"in host memory ({row['in_memory_share']:.0%} have room) and on disk (real {row['disk_io']}, "
        f"reads paced to an EMULATED {row['disk_gb_s']:.3g} GB/s)"
    )


def size_words(row: Row) -> str:
    return f"{row['context']}/{row['new_tokens']}"


def show(found: Sequence[Table], summary: Mapping[str, Any]) -> None:
    def percent(share: float | None, digits: int = 0) -> str:
        return "-" if share is None else f"{share:.{digits}%}"

    for title, cells in found:
        show_table(f"{title}\n", cells)
    auto, near = summary["auto_over_best"], summary["predictions"]
    print(
        f"\ntokens equal: {summary['tokens_equal']} (with 4 bits, which are lossy, "
        f"{percent(summary['lossy_token_agreement'])} of them); auto over the best of its choices, at worst: "
        f"{'-' if auto is None else f'{auto:.3f}'}\n"
        f"predictions: median error of a step {percent(summary['prediction_median_error'], 1)}, "
        f"{percent(near['forecast_median_error'])} forecast before the first, "
        f"{near['within_10_percent']} of {near['cases']} cases within 10%"
    )


def _throughput(row: Row) -> Interval:
    times = median(row["seconds"])
    return Interval(row["batch"] / times.value, row["batch"] / times.high, row["batch"] / times.low)


TITLES = {
    "latency": "Decode latency, weights resident (form of Figure 7)",
    "llama": "Decoding throughput, weights resident (form of Figure 13)",
    "throughput": "Decoding throughput, column-by-column (form of Figure 6)",
    "compression": "Four-bit keys and values, lossy (form of Figure 9)",
    "batches": "Decoding throughput by batch (form of Figure 6, second row)",
    "hiding": "A small cache, weights offloaded, row-by-row (form of Table 2)",
}
RATES = ("llama", "throughput", "compression", "batches")
"""Charts of tokens per second; the others are of milliseconds per step."""
VARIED: dict[str, Callable[[Row], str]] = {
    "link": lambda row: f"{row['link_gb_s']:.3g} GB/s",
    "prompt/new": size_words,
    "batch": lambda row: f"{row['batch']} sequences",
}


class OffloadCharts:
    """Charts of one machine's rows."""

    def __init__(self, machine: str):
        self._machine = machine

    def all(self, rows: Sequence[Row]) -> list[Chart]:
        """What there are rows for."""
        made: list[Chart] = []
        for part, own in settings(rows):
            several = part in ("links", "long", "disk", "windows")
            made.append(self._bars(f"{part}.{own[0]['shape']}" if several else part, own))
            if part in ("links", "long"):
                made += self._split_points(own)
            if part == "throughput":
                made.append(self._bars("compression", [row for row in own if row["method"] in FIGURE_9]))
                most = max(row["context"] for row in own)
                longest = [row for row in own if row["context"] == most]
                made += [self._timelines([row for row in longest if row["method"] in FIGURE_8]), self._tasks(longest)]
        known = predicted(rows)
        over = []
        for method, own in _by_method(known).items():
            values = [point(row["predicted_s"] / step_s(row)) for row in own]
            over.append(
                Line(LABELS[method], [1e3 * step_s(row) for row in own], values, None, "none", True, COLOURS[method])
            )
        if over:
            labels = {"x_label": "measured, milliseconds", "y_label": "predicted over measured"}
            labels |= {"subtitle": f"{self._machine}, {link_words(known, short=True)}"}
            title = "Predicted over measured time of a step, all cases"
            made.append(lines("predictions", over, title=title, log_x=False, level=1.0, **labels))
        return made

    def _words(self, rows: Sequence[Row], *, size: bool = False) -> str:
        row = rows[0]
        words = [f"{row['shape']}, {row['layers']} layers"]
        if len({row["batch"] for row in rows}) == 1:
            words.append(f"batch {row['batch']}" + (f" of {size_words(row)}" if size else ""))
        if row["weights_offloaded"]:
            most = max(row["groups"] for row in rows)
            words.append("weights offloaded" + (f", up to {most} groups" if most > 1 else ""))
        return ", ".join([*words, self._machine, link_words(rows, short=True)])

    def _bars(self, name: str, rows: Sequence[Row]) -> Chart:
        """Every method, side by side for all that varies in the rows."""
        varied = [say for say in VARIED.values() if len(set(map(say, rows))) > 1] or [VARIED["link"]]
        series: dict[str, dict[str, Interval]] = {}
        for row in rows:
            value = _throughput(row) if name in RATES else median(row["seconds"]).scaled(1e3)
            series.setdefault(LABELS[row["method"]], {})[", ".join(say(row) for say in varied)] = value
        places = list(dict.fromkeys(place for found in series.values() for place in found))
        heights = {label: [found.get(place) for place in places] for label, found in series.items()}
        title = TITLES.get(name, f"Decoding by every method, keys and values {place_words(rows)}: {rows[0]['shape']}")
        y_label = "tokens per second" if name in RATES else "milliseconds per step"
        return groups(name, places, heights, colours=LABELLED, title=title, subtitle=self._words(rows), y_label=y_label)

    def _split_points(self, rows: Sequence[Row]) -> list[Chart]:
        """Figure 12, over the slowest link; nothing where recomputing never pays."""
        slowest = min(row["link_gb_s"] for row in rows)
        own = [row for row in rows if row["method"] in FIGURE_12 and row["link_gb_s"] == slowest and row["recomputed"]]
        drawn = []
        for row in own:
            cached, splits = zip(*row["split_points"], strict=True)
            drawn.append(Line(LABELS[row["method"]], cached, [*map(point, splits)], colour=COLOURS[row["method"]]))
        labels = {"x_label": "cached tokens s' of all sequences", "y_label": "tokens recomputed from activations"}
        labels["title"] = "Split point l, step by step (form of Figure 12)"
        return [lines("split", drawn, subtitle=self._words(own, size=True), log_x=False, **labels)] if own else []

    def _timelines(self, rows: Sequence[Row]) -> Chart:
        """Figure 8: computing, and memory as a share of the most that any of them holds."""
        most = max(max(row["timeline"]["device_bytes"]) for row in rows)
        drawn = []
        for row in rows:
            found, method = row["timeline"], row["method"]
            for letter, style, shares in (
                ("C", "-", found["compute_utilisation"]),
                ("M", "--", [nbytes / most for nbytes in found["device_bytes"]]),
            ):
                values = [point(100 * share) for share in shares]
                if values:
                    label = f"{LABELS[method]} ({letter})"
                    drawn.append(Line(label, found["seconds"], values, style=style, colour=COLOURS[method]))
        labels = {"x_label": "seconds", "y_label": "percent; memory: of the most that one holds"}
        labels["title"] = "Computing (C) and device memory (M) while decoding (form of Figure 8)"
        return lines("utilisation", drawn, subtitle=self._words(rows, size=True), log_x=False, **labels)

    def _tasks(self, rows: Sequence[Row]) -> Chart:
        """Figure 10: transfers as their bytes over the bandwidth."""
        totals = [sum(row["breakdown_s"].values()) for row in rows]
        shares = {
            task: [point(100 * row["breakdown_s"][task] / total) for row, total in zip(rows, totals, strict=True)]
            for task in TASKS
        }
        names = [LABELS[row["method"]].replace("row-by-row ", "row-by-row\n").replace(", ", "\n") for row in rows]
        labels = {"title": "What a step does (form of Figure 10)", "subtitle": self._words(rows, size=True)}
        y_label = "percent of the tasks' time; they overlap"
        return groups("breakdown", names, shares, y_label=y_label, stacked=True, **labels)


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found
