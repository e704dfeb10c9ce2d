"""The results of a benchmark: tables on the screen, one JSON file with raw samples, pictures beside it."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megakv.tracking.files import write_whole
from megakv.tracking.machine import machine_info, version_info

from .charts import Chart, draw_charts
from .statistics import Interval
from .tracking import log_results

Row = Mapping[str, Any]
MEGABYTE = 1 << 20
UNITS = {"": (1, ",.4g"), "s": (1, ".3f"), "ms": (1e3, ".2f"), "us": (1e6, ".1f"), "MB": (1 / MEGABYTE, ".1f"),
         "GB/s": (1, ".3g"), "%": (1, ".1%"), "min": (1, ".3f"), "max": (1, ".3f")}  # fmt: skip
"""By the unit of a column: what its numbers are multiplied by, and how they are written."""
TIMES = "ranks context seconds:s seconds:min seconds:max bytes_sent:MB kv_bytes:MB working_bytes:MB"
"""Times, traffic and memory of a row: the busiest or largest rank's."""


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
    """Write the results and the charts where ``--json`` and ``--wandb`` ask for them; say where they are.

    A file is written whole or not at all.
    """
    if not arguments.json and not arguments.wandb:
        return
    report = {
        "benchmark": benchmark,
        "machine": machine,
        "versions": version_info(),
        "args": {name: value for name, value in vars(arguments).items() if name != "part"},
        "rows": rows,
        "summary": summary,
    }
    with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as spare:
        path = Path(arguments.json or f"{spare}/{benchmark}.json")
        write_json(path, report)
        drawn = draw_charts(path, charts)
        if arguments.json:
            print(f"results: {path.resolve()}, charts: {', '.join(str(each.resolve()) for each in drawn)}")
        if arguments.wandb:
            log_results(arguments.wandb, report, drawn)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def table(rows: Sequence[Row], columns: str) -> list[list[str]]:
    """A head, and a line for each row, of columns such as ``method context seconds:ms busy:%``.

    Dots lead into what is nested. Of samples the median is shown, or with ``:min`` and ``:max`` an end; of bytes by
    rank the most, all operations together; "-" of what is not known. A column of which nothing is known is left out.
    """
    cells = []
    for column in columns.split():
        name, _, unit = column.partition(":")
        shown = [_cell(_at(row, name), unit) for row in rows]
        if any(cell != "-" for cell in shown):
            cells.append([f"{name} {unit}".strip(), *shown])
    return [list(line) for line in zip(*cells, strict=True)]


def _at(found: Any, keys: str) -> Any:
    for key in keys.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _cell(found: Any, unit: str) -> str:
    factor, form = UNITS[unit]
    if isinstance(found, Mapping) and found.get("value") is not None:
        return str(Interval.of(found).scaled(factor))
    if isinstance(found, list) and unit == "MB":
        found = max(sum(rank.values()) if isinstance(rank, Mapping) else rank for rank in found)
    elif isinstance(found, list) and found and all(isinstance(each, int | float) for each in found):
        found = {"min": min, "max": max}.get(unit, median)(found)
    if isinstance(found, int) and not unit:
        return f"{found:,}" if not isinstance(found, bool) else str(found)
    if isinstance(found, int | float):
        return f"{found:,.0f}" if not unit and abs(found) >= 1e4 else format(factor * found, form)
    return found if isinstance(found, str) else "-"


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in ([*zip(line, widths, strict=True)] for line in lines)
    )


def show(rows: Sequence[Row], columns: str, title: str = "") -> None:
    """Print a table, if there are rows."""
    if rows:
        print(f"\n{title}\n{align(table(rows, columns))}" if title else f"\n{align(table(rows, columns))}")


def leaves(found: Any, *names: str) -> Iterator[dict[str, Any]]:
    """A row for each entry of so many nested mappings: under `names` the keys that lead to it, and its ``value``."""
    if not names:
        yield {"value": found}
        return
    for key, inner in found.items():
        for row in leaves(inner, *names[1:]):
            yield {names[0]: key, **row}


def show_summary(summary: Mapping[str, Any], *parts: str) -> None:
    """Print all numbers and intervals in a summary, or some parts of it, each behind the keys that lead to it."""

    def lines(found: Any, *keys: str) -> Iterator[list[str]]:
        if isinstance(found, Mapping) and "value" not in found:
            for key, inner in found.items():
                yield from lines(inner, *keys, key)
        elif (shown := _cell(found, "")) != "-" and not isinstance(found, list):
            yield ["  ".join(keys), shown]

    if found := list(lines({name: summary[name] for name in parts or summary if name in summary})):
        print(f"\n{align(found)}")


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

    def all(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """Cases of this identity by name, in the order of their names."""
        names = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        return {name: part for name in names if (part := self.read(name)) is not None}
