"""Charts of `offload.py`: the forms of KVPR's Figures 6 to 10 and 12 to 14, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grouped_bars import draw_groups
from .lines import Line, draw_lines
from .offload_plan import IN_MEMORY, variant
from .offload_summary import settings, step_s
from .offload_tables import TASKS, link_words, longest, place_words, size_words
from .statistics import Interval, median

Row = Mapping[str, Any]
COLOURS = {
    "in_memory": "#9aa7b5",
    "transformers": "#22282f",
    "stream": "#c8553d",
    "kvpr": "#b58a2a",
    "chunked": "#3f8f5f",
    "cpu_rank": "#8a6bb8",
    "auto": "#2f6db3",
    "stream_4bit": "#e3a18f",
    "kvpr_4bit": "#dcc68d",
    "kvpr_coarse": "#8a929b",
    "row_stream": "#22282f",
}
LABELS = {method: variant(method).title for method in COLOURS}
FIGURE_9 = ("kvpr", "kvpr_4bit", "stream", "stream_4bit")
FIGURE_8 = ("stream", "kvpr", "auto")
FIGURE_12 = ("kvpr", "chunked", "auto")


class Charts:
    """Charts beside a file of results."""

    def __init__(self, results: Path, *, dtype: str, threads: int):
        self.drawn: list[Path] = []
        self._results = results
        self._machine = f"{dtype}, {threads} thread(s)"

    def draw(self, rows: Sequence[Row]) -> list[Path]:
        """Draw what there are rows for."""
        for part, own in settings(rows):
            match part:
                case "links" | "long":
                    self._links(part, own)
                    self._split_points(own)
                case "disk" | "windows":
                    self._links(part, own)
                case "latency":
                    self._sizes(own, part, "Figure 7")
                case "llama":
                    self._sizes(own, part, "Figure 13")
                case "throughput":
                    self._throughput(own)
                case "batches":
                    self._by(own, "batch", part, "Figure 6, second row", "sequences")
                case "hiding":
                    self._hiding(own)
                case "processes":
                    self._by(own, "processes", part, "Figure 14", "processes on this host")
        self._predictions(rows)
        return self.drawn

    def _path(self, name: str) -> Path:
        """A file that nothing was drawn to yet."""
        path, count = self._results.with_suffix(f".{name}.png"), 1
        while path in self.drawn:
            count += 1
            path = self._results.with_suffix(f".{name}.{count}.png")
        self.drawn.append(path)
        return path

    def _words(self, rows: Sequence[Row], *, size: bool = False) -> str:
        row = rows[0]
        words = [f"{row['shape']}, {row['layers']} layers"]
        if len({row["batch"] for row in rows}) == 1:
            words.append(f"batch {row['batch']}" + (f" of {size_words(row)}" if size else ""))
        if row["weights_offloaded"]:
            groups = max(row["groups"] for row in rows)
            words.append("weights offloaded" + (f", up to {groups} groups" if groups > 1 else ""))
        return ", ".join([*words, self._machine, link_words(rows, short=True)])

    def _links(self, part: str, rows: Sequence[Row]) -> None:
        model = rows[0]["shape"]
        rates = list(dict.fromkeys(row["link_gb_s"] for row in rows))
        words = {
            "title": f"Decoding by every method, keys and values {place_words(rows)}: {model}",
            "subtitle": self._words(rows, size=True),
        }
        if len(rates) == 1:
            times = {LABELS[row["method"]]: [median(row["seconds"]).scaled(1e3)] for row in rows}
            colours = {LABELS[row["method"]]: COLOURS[row["method"]] for row in rows}
            path = self._path(f"{part}.{model}")
            draw_groups(path, [f"{rates[0]:.3g} GB/s"], times, y_label="ms per step", colours=colours, **words)
            return
        lines = []
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method]
            lines.append(
                Line(
                    LABELS[method],
                    [1e3 * row["link_gb_s"] for row in own],
                    [median(row["seconds"]).scaled(1e3) for row in own],
                    dashed=method == IN_MEMORY,
                    colour=COLOURS[method],
                )
            )
        x_label = f"bandwidth of the {rows[0]['link']} link, MB/s"
        path = self._path(f"{part}.{model}")
        labels = {"x_label": x_label, "y_label": "milliseconds per step"}
        draw_lines(path, lines, log_y=True, legend_above=True, **labels, **words)

    def _split_points(self, rows: Sequence[Row]) -> None:
        """Figure 12, over the slowest link; nothing where recomputing never pays."""
        slowest = min(row["link_gb_s"] for row in rows)
        own = [row for row in rows if row["method"] in FIGURE_12 and row["link_gb_s"] == slowest]
        lines = []
        for row in own:
            if row["recomputed"]:
                points = [_point(split) for _, split in row["split_points"]]
                cached = [cached for cached, _ in row["split_points"]]
                lines.append(Line(LABELS[row["method"]], cached, points, colour=COLOURS[row["method"]]))
        if not lines:
            return
        draw_lines(
            self._path("split"),
            lines,
            title="Split point l, step by step (form of Figure 12)",
            subtitle=self._words(own, size=True),
            x_label="cached tokens s' of all sequences",
            y_label="tokens recomputed from activations",
            log_x=False,
            legend_above=True,
        )

    def _sizes(self, rows: Sequence[Row], part: str, form: str) -> None:
        """Bars by prompt and new tokens: latency as in Figure 7, throughput as in Figure 13."""
        latency = part == "latency"
        self._bars(
            rows,
            size_words,
            name=part,
            title=f"{'Decode latency' if latency else 'Decoding throughput'}, weights resident (form of {form})",
            y_label="seconds for all new tokens" if latency else "tokens per second",
            x_label="prompt/new tokens",
            value=_latency if latency else _throughput,
        )

    def _throughput(self, rows: Sequence[Row]) -> None:
        plain = [row for row in rows if not row["lossy"]]
        text = {"y_label": "tokens per second", "x_label": "prompt/new tokens", "value": _throughput}
        title = "Decoding throughput, column-by-column (form of Figure 6)"
        self._bars(plain, size_words, name="throughput", title=title, **text)
        some = [row for row in rows if row["method"] in FIGURE_9]
        title = "Four-bit keys and values, lossy (form of Figure 9)"
        self._bars(some, size_words, name="compression", title=title, **text)
        last = longest(rows)
        self._timelines([row for row in last if row["method"] in FIGURE_8])
        shares = {
            task: [_point(100 * row["breakdown_s"][task] / sum(row["breakdown_s"].values())) for row in last]
            for task in TASKS
        }
        draw_groups(
            self._path("breakdown"),
            [_short(row["method"]) for row in last],
            shares,
            title="What a step does (form of Figure 10)",
            subtitle=self._words(last, size=True),
            y_label="percent of the tasks' time; they overlap",
            stacked=True,
        )

    def _timelines(self, rows: Sequence[Row]) -> None:
        """Figure 8: computing, and memory as a share of the most that any of them holds."""
        most = max(max(row["timeline"]["device_bytes"]) for row in rows)
        lines = []
        for row in rows:
            found, label, colour = row["timeline"], LABELS[row["method"]], COLOURS[row["method"]]
            for values, scale, name, dashed in (
                (found["compute_utilisation"], 100.0, f"{label} (C)", False),
                (found["device_bytes"], 100 / most, f"{label} (M)", True),
            ):
                if values:
                    points = [_point(scale * value) for value in values]
                    lines.append(Line(name, found["seconds"], points, dashed=dashed, colour=colour))
        draw_lines(
            self._path("utilisation"),
            lines,
            title="Computing (C) and device memory (M) while decoding (form of Figure 8)",
            subtitle=self._words(rows, size=True),
            x_label="seconds",
            y_label="percent; memory: of the most that one holds",
            log_x=False,
            legend_above=True,
        )

    def _hiding(self, rows: Sequence[Row]) -> None:
        self._bars(
            rows,
            lambda row: str(row["batch"]),
            name="hiding",
            title="A small cache, weights offloaded, row-by-row (form of Table 2)",
            y_label="seconds for all new tokens",
            x_label="batch size",
            value=_latency,
        )

    def _by(self, rows: Sequence[Row], axis: str, name: str, form: str, x_label: str) -> None:
        each = " of each process" if axis == "processes" else ""
        self._bars(
            rows,
            lambda row: str(row[axis]),
            name=name,
            title=f"Throughput{each} by {axis} (form of {form})",
            y_label="tokens per second",
            x_label=x_label,
            value=_throughput,
        )

    def _bars(self, rows: Sequence[Row], place: Any, *, name: str, title: str, value: Any, **labels: str) -> None:
        places = list(dict.fromkeys(map(place, rows)))
        series: dict[str, list[Interval | None]] = {}
        for method in dict.fromkeys(row["method"] for row in rows):
            own = {place(row): value(row) for row in rows if row["method"] == method}
            series[LABELS[method]] = [own.get(each) for each in places]
        colours = {LABELS[method]: COLOURS[method] for method in COLOURS}
        subtitle = self._words(rows)
        draw_groups(self._path(name), places, series, title=title, subtitle=subtitle, colours=colours, **labels)

    def _predictions(self, rows: Sequence[Row]) -> None:
        """Predicted over measured time of every case and method of one process."""
        known = [row for row in rows if "predicted_s" in row and row["processes"] == 1]
        lines = []
        for method in dict.fromkeys(row["method"] for row in known):
            own = sorted((row for row in known if row["method"] == method), key=step_s)
            points = [_point(row["predicted_s"] / step_s(row)) for row in own]
            times = [1e3 * step_s(row) for row in own]
            lines.append(Line(LABELS[method], times, points, joined=False, colour=COLOURS[method]))
        if lines:
            draw_lines(
                self._path("predictions"),
                lines,
                title="Predicted over measured time of a step, all cases",
                subtitle=f"{self._machine}, {link_words(known, short=True)}",
                x_label="measured, milliseconds",
                y_label="predicted over measured",
                log_x=False,
                legend_above=True,
                level=1.0,
            )


def _short(method: str) -> str:
    """A method's name on two lines."""
    return LABELS[method].replace("row-by-row ", "row-by-row\n").replace(", ", "\n")


def _point(value: float) -> Interval:
    return Interval(value, value, value)


def _latency(row: Row) -> Interval:
    return median(row["decode_s"])


def _throughput(row: Row) -> Interval:
    times = median(row["seconds"])
    return Interval(row["batch"] / times.value, row["batch"] / times.high, row["batch"] / times.low)
