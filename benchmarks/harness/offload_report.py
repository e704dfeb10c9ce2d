"""Tables and charts of `offload.py`: the forms of KVPR's Tables 2 to 5, and Figures 6 to 10 and 12 to 14."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .charts import Chart, Line, groups
from .charts import lines as draw_lines
from .offload_plan import IN_MEMORY, PARTS, variant
from .offload_summary import predicted, settings, step_s
from .publish import align
from .statistics import Interval, median

Row = Mapping[str, Any]
TASKS = ("load weights", "load cache", "load activations", "compute", "store cache", "store activations")
COLOURS = {
    "in_memory": "#9aa7b5", "transformers": "#22282f", "stream": "#c8553d", "kvpr": "#b58a2a", "chunked": "#3f8f5f",
    "cpu_rank": "#8a6bb8", "auto": "#2f6db3", "stream_4bit": "#e3a18f", "kvpr_4bit": "#dcc68d",
    "kvpr_coarse": "#8a929b", "row_stream": "#22282f",
}  # fmt: skip
LABELS = {method: variant(method).title for method in COLOURS}
FIGURE_9 = ("kvpr", "kvpr_4bit", "stream", "stream_4bit")
FIGURE_8 = ("stream", "kvpr", "auto")
FIGURE_12 = ("kvpr", "chunked", "auto")


@dataclass(frozen=True)
class Table:
    """A table, whose heads are its first line."""

    title: str
    lines: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return f"{self.title}\n\n{align(self.lines)}\n"


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each setting: what every method of its cases took."""
    return [_table(part, own) for part, own in settings(rows)]


def _table(part: str, rows: Sequence[Row]) -> Table:
    disk = any("disk_io" in row for row in rows)
    weights = rows[0]["weights_offloaded"]
    head = ["model, link, method", "batch", "prompt/new", "ms/step", "predicted", "tokens/s", "decode s", "MB in"]
    head += ["of it weights"] * weights + ["MB out", "link", "compute", "MB disk", "disk"][: 5 if disk else 3]
    lines = [[*head, "MB device", "l", "on host", "of s'"]]
    for row in rows:
        known = "predicted_s" in row
        last = row["split_points"][-1] if known else None
        processes = f" x {row['processes']} processes" if part == "processes" else ""
        line = [f"{row['shape']} {row['link_gb_s']:.3g} GB/s {variant(row['method']).title}{processes}"]
        line += [str(row["batch"]), size_words(row), f"{1e3 * step_s(row):.1f}"]
        line += [f"{1e3 * row['predicted_s']:.1f}" if known else "-", f"{row['tokens_per_s']:.1f}"]
        line += [f"{statistics.median(row['decode_s']):.3f}", f"{row['bytes_in'] / 1e6:.2f}"]
        line += [f"{row.get('weight_bytes', 0.0) / 1e6:.2f}"] * weights
        line += [f"{row['bytes_out'] / 1e6:.3f}", _percent(row["link_utilisation"])]
        line += [_percent(row.get("compute_utilisation"))]
        if disk:
            line += [f"{row.get('disk_bytes', 0.0) / 1e6:.2f}", _percent(row.get("disk_utilisation"))]
        line += [f"{row['device_bytes'] / 1e6:.1f}", str(last[1]) if last else "-"]
        lines.append([*line, f"{row['on_host']:.0f}" if known else "-", str(last[0]) if last else "-"])
    where = f", keys and values {place_words(rows)}" if disk else ""
    text = f"{PARTS[part]}{where}; l: tokens recomputed in the last step"
    return Table(f"{text}. {link_words(rows)}", lines)


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
    """Prompt and new tokens."""
    return f"{row['context']}/{row['new_tokens']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def show(found: Sequence[Table], summary: Mapping[str, Any]) -> None:
    """Print the tables and the verdicts."""
    for table in found:
        print(f"\n{table}")
    auto, error = summary["auto_over_best"], summary["prediction_median_error"]
    near, order = summary["predictions"], summary["ordering"]
    print(
        f"tokens equal: {summary['tokens_equal']} (with 4 bits, which are lossy, "
        f"{_percent(summary['lossy_token_agreement'])} of them); auto over the best of its choices, at worst: "
        f"{'-' if auto is None else f'{auto:.3f}'}\n"
        f"predictions: median error of a step {'-' if error is None else f'{error:.1%}'}, "
        f"{_percent(near['forecast_median_error'])} forecast before the first, "
        f"{near['within_10_percent']} of {near['cases']} cases within 10%; order right for {order['right']} of "
        f"{order['pairs']} pairs of methods"
    )


def _throughput(row: Row) -> Interval:
    times = median(row["seconds"])
    return Interval(row["batch"] / times.value, row["batch"] / times.high, row["batch"] / times.low)


def _latency(row: Row) -> Interval:
    return median(row["decode_s"])


def _point(value: float) -> Interval:
    return Interval(value, value, value)


def _by_size(row: Row) -> str:
    return size_words(row)


TOKENS, SECONDS = (_throughput, "tokens per second"), (_latency, "seconds for all new tokens")
BARS: dict[str, tuple[str, Callable[[Row], str], str, tuple[Callable[[Row], Interval], str]]] = {
    "latency": ("Decode latency, weights resident (form of Figure 7)", _by_size, "prompt/new tokens", SECONDS),
    "llama": ("Decoding throughput, weights resident (form of Figure 13)", _by_size, "prompt/new tokens", TOKENS),
    "throughput": ("Decoding throughput, column-by-column (form of Figure 6)", _by_size, "prompt/new tokens", TOKENS),
    "compression": ("Four-bit keys and values, lossy (form of Figure 9)", _by_size, "prompt/new tokens", TOKENS),
    "batches": (
        "Throughput by batch (form of Figure 6, second row)", lambda row: str(row["batch"]), "sequences", TOKENS
    ),
    "hiding": (
        "A small cache, weights offloaded, row-by-row (form of Table 2)", lambda row: str(row["batch"]), "batch size",
        SECONDS,
    ),
    "processes": (
        "Throughput of each process by processes (form of Figure 14)", lambda row: str(row["processes"]),
        "processes on this host", TOKENS,
    ),
}  # fmt: skip
"""By chart: its title, what a group of bars is of, the name of that, and the height of a bar."""


def charts(rows: Sequence[Row], *, dtype: str, threads: int) -> list[Chart]:
    """What there are rows for."""
    machine = f"{dtype}, {threads} thread(s)"
    words = partial(_words, machine=machine)
    made: list[Chart] = []
    for part, own in settings(rows):
        if part in ("links", "long", "disk", "windows"):
            made.append(_links(part, own, words))
        if part in ("links", "long"):
            made += _split_points(own, words)
        if part == "throughput":
            made.append(_bars(part, [row for row in own if not row["lossy"]], words))
            made.append(_bars("compression", [row for row in own if row["method"] in FIGURE_9], words))
            most = max(row["context"] for row in own)
            longest = [row for row in own if row["context"] == most]
            made += [_timelines([row for row in longest if row["method"] in FIGURE_8], words), _tasks(longest, words)]
        elif part in BARS:
            made.append(_bars(part, own, words))
    known = predicted(rows)
    lines = []
    for method in dict.fromkeys(row["method"] for row in known):
        own = sorted((row for row in known if row["method"] == method), key=step_s)
        points = [_point(row["predicted_s"] / step_s(row)) for row in own]
        times = [1e3 * step_s(row) for row in own]
        lines.append(Line(LABELS[method], times, points, joined=False, colour=COLOURS[method]))
    if lines:
        labels = {"title": "Predicted over measured time of a step, all cases", "x_label": "measured, milliseconds"}
        labels |= {"subtitle": f"{machine}, {link_words(known, short=True)}", "y_label": "predicted over measured"}
        made.append(draw_lines("predictions", lines, log_x=False, legend_above=True, level=1.0, **labels))
    return made


def _words(rows: Sequence[Row], *, machine: str, size: bool = False) -> str:
    row = rows[0]
    words = [f"{row['shape']}, {row['layers']} layers"]
    if len({row["batch"] for row in rows}) == 1:
        words.append(f"batch {row['batch']}" + (f" of {size_words(row)}" if size else ""))
    if row["weights_offloaded"]:
        most = max(row["groups"] for row in rows)
        words.append("weights offloaded" + (f", up to {most} groups" if most > 1 else ""))
    return ", ".join([*words, machine, link_words(rows, short=True)])


def _links(part: str, rows: Sequence[Row], words: Callable[..., str]) -> Chart:
    model, rates = rows[0]["shape"], sorted({row["link_gb_s"] for row in rows})
    title = f"Decoding by every method, keys and values {place_words(rows)}: {model}"
    labels = {"title": title, "subtitle": words(rows, size=True)}
    if len(rates) == 1:
        times = {LABELS[row["method"]]: [median(row["seconds"]).scaled(1e3)] for row in rows}
        colours = {LABELS[row["method"]]: COLOURS[row["method"]] for row in rows}
        name = f"{part}.{model}"
        return groups(name, [f"{rates[0]:.3g} GB/s"], times, y_label="ms per step", colours=colours, **labels)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        points = [median(row["seconds"]).scaled(1e3) for row in own]
        looks = {"dashed": method == IN_MEMORY, "colour": COLOURS[method]}
        lines.append(Line(LABELS[method], [1e3 * row["link_gb_s"] for row in own], points, **looks))
    labels["x_label"] = f"bandwidth of the {rows[0]['link']} link, MB/s"
    labels["y_label"] = "milliseconds per step"
    return draw_lines(f"{part}.{model}", lines, log_y=True, legend_above=True, **labels)


def _split_points(rows: Sequence[Row], words: Callable[..., str]) -> list[Chart]:
    """Figure 12, over the slowest link; nothing where recomputing never pays."""
    slowest = min(row["link_gb_s"] for row in rows)
    own = [row for row in rows if row["method"] in FIGURE_12 and row["link_gb_s"] == slowest]
    lines = []
    for row in own:
        if row["recomputed"]:
            cached, splits = zip(*row["split_points"], strict=True)
            lines.append(Line(LABELS[row["method"]], cached, [*map(_point, splits)], colour=COLOURS[row["method"]]))
    labels = {"x_label": "cached tokens s' of all sequences", "y_label": "tokens recomputed from activations"}
    labels["title"] = "Split point l, step by step (form of Figure 12)"
    subtitle = words(own, size=True) if lines else ""
    return [draw_lines("split", lines, subtitle=subtitle, log_x=False, legend_above=True, **labels)] if lines else []


def _bars(name: str, rows: Sequence[Row], words: Callable[..., str]) -> Chart:
    title, place, x_label, (value, y_label) = BARS[name]
    places = list(dict.fromkeys(map(place, rows)))
    series: dict[str, list[Interval | None]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {place(row): value(row) for row in rows if row["method"] == method}
        series[LABELS[method]] = [own.get(each) for each in places]
    colours = {LABELS[method]: colour for method, colour in COLOURS.items()}
    labels = {"title": title, "subtitle": words(rows), "x_label": x_label, "y_label": y_label}
    return groups(name, places, series, colours=colours, **labels)


def _timelines(rows: Sequence[Row], words: Callable[..., str]) -> Chart:
    """Figure 8: computing, and memory as a share of the most that any of them holds."""
    most = max(max(row["timeline"]["device_bytes"]) for row in rows)
    lines = []
    for row in rows:
        found, label, colour = row["timeline"], LABELS[row["method"]], COLOURS[row["method"]]
        computing = [_point(100 * share) for share in found["compute_utilisation"]]
        memory = [_point(100 * nbytes / most) for nbytes in found["device_bytes"]]
        if computing:
            lines.append(Line(f"{label} (C)", found["seconds"], computing, colour=colour))
        lines.append(Line(f"{label} (M)", found["seconds"], memory, dashed=True, colour=colour))
    labels = {"x_label": "seconds", "y_label": "percent; memory: of the most that one holds"}
    labels["title"] = "Computing (C) and device memory (M) while decoding (form of Figure 8)"
    subtitle = words(rows, size=True)
    return draw_lines("utilisation", lines, subtitle=subtitle, log_x=False, legend_above=True, **labels)


def _tasks(rows: Sequence[Row], words: Callable[..., str]) -> Chart:
    """Figure 10: transfers as their bytes over the bandwidth."""
    totals = [sum(row["breakdown_s"].values()) for row in rows]
    shares = {
        task: [_point(100 * row["breakdown_s"][task] / total) for row, total in zip(rows, totals, strict=True)]
        for task in TASKS
    }
    names = [LABELS[row["method"]].replace("row-by-row ", "row-by-row\n").replace(", ", "\n") for row in rows]
    labels = {"title": "What a step does (form of Figure 10)", "subtitle": words(rows, size=True)}
    return groups(
        "breakdown", names, shares, y_label="percent of the tasks' time; they overlap", stacked=True, **labels
    )
