"""The results of a benchmark: tables on the screen, one JSON file with raw samples, pictures beside it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.tracking import machine_info, version_info
from megakv.tracking.files import write_whole

from .charts import Chart, draw_charts
from .statistics import median

MEGABYTE = 1 << 20


def describe_machine() -> dict[str, Any]:
    """The machine and its load at this moment; to be asked before the benchmark loads it itself."""
    return {**machine_info(), "load_average": os.getloadavg()[0]}


def publish(
    arguments: argparse.Namespace,
    benchmark: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    charts: Sequence[Chart],
) -> None:
    """Write the results, whole or not at all, and the charts where ``--json`` asks for them; say where they are."""
    if not arguments.json:
        return
    path = Path(arguments.json)
    report = {
        "benchmark": benchmark,
        "machine": machine,
        "versions": version_info(),
        "args": {name: value for name, value in vars(arguments).items() if name != "part"},
        "rows": rows,
        "summary": summary,
    }
    write_json(path, report)
    drawn = ", ".join(str(each.resolve()) for each in draw_charts(path, charts))
    print(f"results: {path.resolve()}, charts: {drawn}")


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all; NaN is refused."""
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in ([*zip(line, widths, strict=True)] for line in lines)
    )


def show_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print a table of a head and some lines; nothing where there is only the head."""
    if len(lines) > 1:
        print(f"\n{title}\n{align(lines)}" if title else f"\n{align(lines)}")


def show_difference(summary: Mapping[str, Any]) -> None:
    print(f"\nlargest difference of the last logits: {summary['max_logit_difference']:.1e} of the largest logit")


def time_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Times, traffic and memory of every row: the busiest or largest rank's."""
    lines = [["method", "ranks", "context", "median s", "fastest", "slowest", "MB sent", "KV MB", "working MB"]]
    for row in rows:
        seconds = row["seconds"]
        times = [f"{value:.3f}" for value in (median(seconds).value, min(seconds), max(seconds))]
        sent = [sum(sent.values()) for sent in row["bytes_sent"]]
        sizes = [_megabytes(each) for each in (sent, row.get("kv_bytes"), row["working_bytes"])]
        lines.append([str(row["method"]), str(row["ranks"]), f"{row['context']:,}", *times, *sizes])
    return lines


def _megabytes(per_rank: Sequence[int] | None) -> str:
    return "-" if per_rank is None else f"{max(per_rank) / MEGABYTE:.1f}"


class Parts:
    """A folder with a file for every cell, kept as it is measured: a run that ends early goes on where it was.

    What `identity` names must be the same for cells to be compared: files of another one are left alone, but not read.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """A cell; None if there is none of this identity."""
        try:
            found: dict[str, Any] = json.loads(self.path(name).read_text())
        except (OSError, ValueError):
            return None
        return found["part"] if found.get("identity") == self.identity else None

    def write(self, name: str, part: Mapping[str, Any]) -> None:
        write_json(self.path(name), {"identity": self.identity, "part": part})

    def names(self, prefix: str = "") -> list[str]:
        """Cells of this identity, in the order of their names."""
        found = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        return [name for name in found if self.read(name) is not None]
