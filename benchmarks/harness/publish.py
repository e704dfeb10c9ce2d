"""The results of a benchmark: tables on the screen, one JSON file with raw samples, pictures beside it, a W&B run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megakv.base.errors import MegaKVError
from megakv.tracking.config import WandbTrackingConfig
from megakv.tracking.files import write_whole
from megakv.tracking.machine import machine_info, version_info
from megakv.tracking.measurements import percentiles
from megakv.tracking.tables import Table
from megakv.tracking.wandb_run import WandbRun

from .charts import Chart, draw_charts
from .statistics import Interval

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
    machine: Row,
    rows: Sequence[Row],
    summary: Row,
    charts: Sequence[Chart],
) -> None:
    """Write results and charts, whole or not at all, where ``--json`` and ``--wandb`` ask for them."""
    if not arguments.json and not arguments.wandb:
        return
    args = {name: value for name, value in vars(arguments).items() if name != "part"}
    report = {"benchmark": benchmark, "machine": machine, "versions": version_info(), "args": args}
    report |= {"rows": rows, "summary": summary}
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


def log_results(project: str, results: Row, charts: Sequence[Path]) -> None:
    """Log what a results file holds and the charts beside it as a W&B run; say where it lies."""
    config = WandbTrackingConfig(enabled=True, project=project, group=results["benchmark"], name=results["benchmark"])
    run = WandbRun(config, {name: results[name] for name in ("machine", "versions", "args")})
    records = []
    for row in results["rows"]:
        record = {name: value for name, value in row.items() if isinstance(value, str | int | float)}
        record |= {name: "yes" if value else "no" for name, value in record.items() if isinstance(value, bool)}
        if isinstance(row.get("seconds"), list):
            record |= percentiles("seconds", row["seconds"])
        sent = row.get("bytes_sent") or []
        for operation in {key for rank in sent for key in rank}:
            record[f"bytes_sent/{operation}"] = sum(rank.get(operation, 0) for rank in sent)
        records.append(record)
    columns = tuple(dict.fromkeys(name for record in records for name in record))
    table = Table(columns, [[record.get(name) for name in columns] for record in records])
    pictures = {f"charts/{path.stem}": path.read_bytes() for path in charts}
    numbers = {"/".join(("summary", *keys)): value for keys, value in walk(results["summary"])}
    numbers = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
    run.log({**numbers, "rows": table, **pictures})
    directory, upload = run.directory, run.upload
    run.close()
    if directory is not None:
        print(f"W&B run: {directory}" + (f", upload it: {upload}" if upload else ""))


def walk(
    found: Any, depth: int = 99, keys: tuple[str, ...] = (), *, whole: Sequence[str] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every entry of nested mappings, as deep as asked, behind its keys; mappings with a key of `whole` are entries."""
    if not isinstance(found, Mapping) or len(keys) == depth or any(key in found for key in whole):
        yield keys, found
        return
    for key, inner in found.items():
        yield from walk(inner, depth, (*keys, key), whole=whole)


def leaves(found: Any, *names: str) -> Iterator[dict[str, Any]]:
    """A row for each entry of so many nested mappings: under `names` the keys that lead to it, and its ``value``."""
    for keys, value in walk(found, len(names)):
        yield {**dict(zip(names, keys, strict=True)), "value": value}


def table(rows: Sequence[Row], columns: str) -> list[list[str]]:
    """A head, and a line for each row, of columns such as ``method context seconds:ms busy:%``.

    Dots lead into what is nested. Of samples the median is shown, or with ``:min`` and ``:max`` an end; of bytes by
    rank the most, all operations together; "-" of what is not known. A column of which nothing is known is left out.
    """
    cells = []
    for column in columns.split():
        name, _, unit = column.partition(":")
        shown = []
        for row in rows:
            found: Any = row
            for key in name.split("."):
                found = found.get(key) if isinstance(found, Mapping) else None
            shown.append(_cell(found, unit))
        if set(shown) != {"-"}:
            cells.append([f"{name} {unit}".strip(), *shown])
    return [list(line) for line in zip(*cells, strict=True)]


def _cell(found: Any, unit: str) -> str:
    factor, form = UNITS[unit]
    if isinstance(found, Mapping) and found.get("value") is not None:
        return str(Interval.of(found).scaled(factor))
    if isinstance(found, list) and unit == "MB":
        found = max(sum(rank.values()) if isinstance(rank, Mapping) else rank for rank in found)
    elif isinstance(found, list) and found and all(isinstance(each, int | float) for each in found):
        found = {"min": min, "max": max}.get(unit, median)(found)
    if isinstance(found, str | bool):
        return str(found)
    if isinstance(found, int) and not unit:
        return f"{found:,}"
    if isinstance(found, int | float):
        return f"{found:,.0f}" if not unit and abs(found) >= 1e4 else format(factor * found, form)
    return "-"


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{'>' if place else '<'}{widths[place]}}" for place, cell in enumerate(line)) for line in lines
    )


def show(rows: Sequence[Row], columns: str, title: str = "") -> None:
    """Print a table, if there are rows."""
    if rows:
        print(f"\n{title}\n{align(table(rows, columns))}" if title else f"\n{align(table(rows, columns))}")


def show_summary(summary: Row, *parts: str) -> None:
    """Print all numbers and intervals in a summary, or some parts of it, each behind the keys that lead to it."""
    chosen = {name: summary[name] for name in parts or summary if name in summary}
    found = [(keys, _cell(value, "")) for keys, value in walk(chosen, whole=("value",)) if not isinstance(value, list)]
    if lines := [["  ".join(keys), shown] for keys, shown in found if shown != "-"]:
        print(f"\n{align(lines)}")


def run_parts(
    parts: Mapping[str, Any], arguments: argparse.Namespace, may_fail: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any], list[Chart]]:
    """Rows, summary and charts of the parts that are asked for, each of which measures and then reports its rows.

    What `may_fail` is in the summary's ``not_run``, with the reason.
    """
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"not_run": {}} if may_fail else {}
    charts: list[Chart] = []
    for name in arguments.parts:
        measure, report = parts[name]
        try:
            found = measure(arguments)
        except MegaKVError as error:
            if name not in may_fail:
                raise
            summary["not_run"][name] = str(error)
            print(f"{name}: not measured: {error}", file=sys.stderr)
            continue
        own, drawn = report(found)
        rows += [{"part": name, **row} for row in found]
        summary |= own
        charts += drawn
    show_summary(summary)
    return rows, summary, charts
