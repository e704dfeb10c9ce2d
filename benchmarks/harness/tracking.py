"""The results of a benchmark as a W&B run: its arguments, machine, rows, summary and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megakv.tracking.config import WandbTrackingConfig
from megakv.tracking.measurements import percentiles
from megakv.tracking.tables import Table
from megakv.tracking.wandb_run import WandbRun

FACTS = ("machine", "versions", "args")


def log_results(project: str, results: Mapping[str, Any], charts: Sequence[Path]) -> None:
    """Log what a results file holds and the charts beside it; say where the run lies."""
    config = WandbTrackingConfig(enabled=True, project=project, group=results["benchmark"], name=results["benchmark"])
    run = WandbRun(config, {name: results[name] for name in FACTS})
    records = [_cells(row) for row in results["rows"]]
    columns = tuple(dict.fromkeys(name for record in records for name in record))
    rows = Table(columns, [[record.get(name) for name in columns] for record in records])
    pictures = {f"charts/{path.stem}": path.read_bytes() for path in charts}
    run.log({**dict(_numbers(results["summary"], "summary")), "rows": rows, **pictures})
    directory, upload = run.directory, run.upload
    run.close()
    if directory is not None:
        print(f"W&B run: {directory}" + (f", upload it: {upload}" if upload else ""))


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's numbers and words, percentiles of its samples, and bytes by operation, summed over ranks."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bool):
            found[name] = "yes" if value else "no"
        elif isinstance(value, str | int | float):
            found[name] = value
        elif name == "seconds" and isinstance(value, list):
            found |= percentiles(name, value)
        elif name == "bytes_sent" and isinstance(value, list):
            for operation in sorted({key for rank in value for key in rank}):
                found[f"{name}/{operation}"] = sum(rank.get(operation, 0) for rank in value)
    return found


def _numbers(found: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number in a summary behind the keys that lead to it."""
    if isinstance(found, Mapping):
        for key, inner in found.items():
            yield from _numbers(inner, f"{name}/{key}")
    elif isinstance(found, int | float):
        yield name, float(found)
