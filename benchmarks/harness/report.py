"""The results of a benchmark, as a file and on the screen."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.tracking import machine_info, version_info
from megakv.tracking.files import write_whole

from .statistics import median

MEGABYTE = 1 << 20


def describe_machine() -> dict[str, Any]:
    """The machine and its load at this moment; to be asked before the benchmark loads it itself."""
    return {**machine_info(), "load_average": os.getloadavg()[0]}


def write_report(
    path: str | Path,
    *,
    benchmark: str,
    machine: Mapping[str, Any],
    arguments: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> None:
    """Write the results as JSON, whole or not at all."""
    report = {
        "benchmark": benchmark,
        "machine": machine,
        "versions": version_info(),
        "args": vars(arguments),
        "rows": rows,
        "summary": summary,
    }
    write_whole(path, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())


def publish(
    arguments: argparse.Namespace,
    *,
    benchmark: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    draw: Callable[[Path], Sequence[Path]],
) -> None:
    """Write the results and the charts where ``--json`` asks for them, and say where they are."""
    if not arguments.json:
        return
    path = Path(arguments.json)
    write_report(path, benchmark=benchmark, machine=machine, arguments=arguments, rows=rows, summary=summary)
    drawn = draw(path)
    charts = ", ".join(str(each.resolve()) for each in drawn)
    print(f"results: {path.resolve()}, chart{'s' * (len(drawn) > 1)}: {charts}")


def time_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times, traffic and memory of every row: the busiest or largest rank's."""
    lines = [["method", "ranks", "context", "median s", "fastest", "slowest", "MB sent", "KV MB", "working MB"]]
    for row in rows:
        seconds = row["seconds"]
        lines.append(
            [
                str(row["method"]),
                str(row["ranks"]),
                f"{row['context']:,}",
                f"{median(seconds).value:.3f}",
                f"{min(seconds):.3f}",
                f"{max(seconds):.3f}",
                _megabytes([sum(sent.values()) for sent in row["bytes_sent"]]),
                _megabytes(row.get("kv_bytes")),
                _megabytes(row["working_bytes"]),
            ]
        )
    return align(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in ([*zip(line, widths, strict=True)] for line in lines)
    )


def _megabytes(per_rank: Sequence[int] | None) -> str:
    return "-" if per_rank is None else f"{max(per_rank) / MEGABYTE:.1f}"
