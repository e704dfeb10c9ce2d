"""The results of a benchmark: tables on the screen, one JSON file with raw samples, pictures beside it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.tracking import machine_info, version_info
from megakv.tracking.files import write_whole

from .charts import Chart, draw_charts
from .statistics import Interval, median

Row = Mapping[str, Any]
MEGABYTE = 1 << 20


def describe_machine() -> dict[str, Any]:
    """The machine and its load at this moment; to be asked before the benchmark loads it itself."""
    return {**machine_info(), "load_average": os.getloadavg()[0]}


def publish(
    arguments: argparse.Namespace,
    benchmark: str,
    machine: Mapping[str, Any],
    rows: Sequence[Row],
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


def columns(rows: Iterable[Row], heads: Mapping[str, Callable[[Row], object]]) -> list[list[str]]:
    """A table's head, and a line of each row by what its columns say of it; "-" for what they do not know."""
    lines = [["-" if (cell := show(row)) is None else str(cell) for show in heads.values()] for row in rows]
    return [list(heads), *lines]


def show_intervals(title: str, found: Mapping[str, Any], head: str = "median ratio [95%]") -> None:
    """Print all intervals in a part of a summary, each behind the keys that lead to it."""
    leaves = list(_leaves(found, ()))
    depth = max((len(keys) for keys, _ in leaves), default=1)
    lines = [[*keys, *[""] * (depth - len(keys)), str(value)] for keys, value in leaves]
    show_table(title, [[*[""] * depth, head], *lines])


def _leaves(found: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Interval]]:
    if "value" in found:
        yield keys, Interval(found["value"], found["low"], found["high"])
        return
    for name, inner in found.items():
        yield from _leaves(inner, (*keys, name))


def show_difference(summary: Mapping[str, Any]) -> None:
    print(f"\nlargest difference of the last logits: {summary['max_logit_difference']:.1e} of the largest logit")


def time_table(rows: Sequence[Row]) -> list[list[str]]:
    """Times, traffic and memory of every row: the busiest or largest rank's."""

    def megabytes(per_rank: Sequence[int] | None) -> str | None:
        return None if per_rank is None else f"{max(per_rank) / MEGABYTE:.1f}"

    return columns(
        rows,
        {
            "method": lambda row: row["method"],
            "ranks": lambda row: row["ranks"],
            "context": lambda row: f"{row['context']:,}",
            "median s": lambda row: f"{median(row['seconds']).value:.3f}",
            "fastest": lambda row: f"{min(row['seconds']):.3f}",
            "slowest": lambda row: f"{max(row['seconds']):.3f}",
            "MB sent": lambda row: megabytes([sum(sent.values()) for sent in row["bytes_sent"]]),
            "KV MB": lambda row: megabytes(row.get("kv_bytes")),
            "working MB": lambda row: megabytes(row["working_bytes"]),
        },
    )


class Parts:
    """A folder with a file for every case, kept as it is measured; those of another `identity` are not read."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """A case; None if there is none of this identity."""
        try:
            found: dict[str, Any] = json.loads(self.path(name).read_text())
        except (OSError, ValueError):
            return None
        return found["part"] if found.get("identity") == self.identity else None

    def write(self, name: str, part: Mapping[str, Any]) -> None:
        write_json(self.path(name), {"identity": self.identity, "part": part})

    def names(self, prefix: str = "") -> list[str]:
        """Cases of this identity, in the order of their names."""
        found = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        return [name for name in found if self.read(name) is not None]
