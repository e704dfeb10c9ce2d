"""The tables of a run's report, for the HTML page and for W&B alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megakv.tracking.measurements import OffloadStep, Traffic
from megakv.tracking.report import RunReport

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Named columns, and rows of equal length."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]  # Of text, numbers and None.


def report_tables(report: RunReport) -> dict[str, Table]:
    """All tables that a report has something for, by name."""
    found = {
        "ranks": _ranks(report),
        "communication": operations(report),
        "prefill": _prefill(report),
        "offload": _offload(report),
        "offload_steps": _offload_steps(report),
        "balance": _balance(report),
    }
    return {name: table for name, table in found.items() if table.rows}


def by_layer(report: RunReport) -> Table:
    """Communication of every rank, operation and layer; layer -1 is outside the layers."""
    columns = ("rank", "operation", "layer", "calls", "bytes_sent", "seconds", "seconds_hidden", "seconds_exposed")
    rows: list[list[Cell]] = [
        [rank.rank, t.operation, -1 if t.layer is None else t.layer, t.calls, t.bytes_sent, *_times([t])]
        for rank in report.ranks
        for t in rank.traffic
    ]
    return Table(columns, rows)


def comparison(reports: Sequence[RunReport], names: Sequence[str]) -> Table:
    """Every metric that any run has, run beside run, and what of the first run's each later one is."""
    scalars = [report.scalars() for report in reports]
    metrics = list(dict.fromkeys(metric for values in scalars for metric in values))
    columns = ["metric", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    rows: list[list[Cell]] = []
    for metric in metrics:
        values = [found.get(metric) for found in scalars]
        rows.append([metric, *values, *(_ratio(value, values[0]) for value in values[1:])])
    return Table(tuple(columns), rows)


def _ratio(value: float | None, first: float | None) -> float | None:
    return None if value is None or not first else value / first


def _times(traffic: Sequence[Traffic]) -> tuple[float, float, float]:
    seconds, exposed = sum(t.seconds for t in traffic), sum(t.seconds_exposed for t in traffic)
    return seconds, seconds - exposed, exposed


def _ranks(report: RunReport) -> Table:
    columns = ("rank", "host", "cp_rank", "tp_rank", "tokens", "kv_bytes", "peak_bytes", "seconds_exposed")
    return Table(
        columns,
        [
            [r.rank, r.host, r.cp_rank, r.tp_rank, r.tokens, r.kv_bytes, r.peak_bytes, sum(r.seconds_exposed.values())]
            for r in report.ranks
        ],
    )


def operations(report: RunReport) -> Table:
    """By operation: sums over ranks and layers of what was sent; times are means over ranks."""
    columns = ("operation", "calls", "bytes_sent", "seconds", "seconds_hidden", "seconds_exposed")
    rows: list[list[Cell]] = []
    for operation in sorted({t.operation for rank in report.ranks for t in rank.traffic}):
        found = [t for rank in report.ranks for t in rank.traffic if t.operation == operation]
        means = (seconds / len(report.ranks) for seconds in _times(found))
        rows.append([operation, sum(t.calls for t in found), sum(t.bytes_sent for t in found), *means])
    return Table(columns, rows)


def _prefill(report: RunReport) -> Table:
    """Predicted times to first token of all that was to choose from, and the measured one of what was chosen."""
    columns = ("method", "predicted_s", "measured_s", "error")
    plan = report.prefill
    if plan is None:
        return Table(columns, [])
    rows: list[list[Cell]] = []
    for name in dict.fromkeys([plan.chosen, *plan.predicted_s]):
        predicted = plan.predicted_s.get(name)
        measured = report.ttft_s if name == plan.chosen else None
        error = None if predicted is None or not measured else predicted / measured - 1
        rows.append([name, predicted, measured, error])
    return Table(columns, rows)


def _offload(report: RunReport) -> Table:
    columns = (
        "rank", "passes", "cached", "recomputed", "on_host", "predicted_s", "measured_s", "error", "waited_s",
        "bytes_in", "bytes_out", "weight_bytes", "disk_bytes", "link_utilisation", "disk_utilisation",
        "plans", "kv_bits", "disk_io",
    )  # fmt: skip
    return Table(columns, [[rank.rank, *_steps(rank.offload), rank.disk_io] for rank in report.ranks if rank.offload])


def _steps(steps: Sequence[OffloadStep]) -> list[Cell]:
    """Tokens are those of the last pass, times and bytes sums; the error is of passes in which nothing was profiled."""

    def total(name: str) -> Any:
        return sum(getattr(step, name) for step in steps)

    last, predicted, measured = steps[-1], total("predicted_s"), total("measured_s")
    usual = [step for step in steps if not step.profiled]
    took = sum(step.measured_s for step in usual)
    error = sum(step.predicted_s for step in usual) / took - 1 if took else None
    tokens = [last.cached, last.recomputed, last.on_host]
    sums = [total("waited_s"), total("bytes_in"), total("bytes_out"), total("weight_bytes"), total("disk_bytes")]
    # Bytes over what the link carries meanwhile: passes count by their time.
    names = ("link_utilisation", "disk_utilisation")
    used = [
        sum(getattr(step, name) * step.measured_s for step in steps) / measured if measured else None for name in names
    ]
    plans = ", ".join(f"{plan} {count}" for plan, count in Counter(step.plan for step in steps).most_common())
    bits = None if last.kv_bits is None else f"{last.kv_bits} (lossy)"
    return [len(steps), *tokens, predicted, measured, error, *sums, *used, plans, bits]


def _offload_steps(report: RunReport) -> Table:
    """Every pass of every rank: which method served it, the split point, bytes each way, times and utilisation."""
    columns = (
        "rank", "pass", "plan", "cached", "resident", "recomputed", "on_host", "predicted_s", "measured_s", "waited_s",
        "bytes_in", "bytes_out", "weight_bytes", "disk_bytes", "link_utilisation", "disk_utilisation",
        "kv_bits", "profiled",
    )  # fmt: skip
    rows: list[list[Cell]] = [
        [
            rank.rank,
            number,
            step.plan,
            *(getattr(step, name) for name in columns[3:-1]),
            "yes" if step.profiled else "no",
        ]
        for rank in report.ranks
        for number, step in enumerate(rank.offload, 1)
    ]
    return Table(columns, rows)


def _balance(report: RunReport) -> Table:
    """What KV heads cost each rank, where caches have budgets per head or heads are mapped."""
    columns = ("rank", "kept_tokens", "attention_s", "busy_rate")
    found = report.balance
    if found is None:
        return Table(columns, [])
    measured = zip(found.attention_s, found.busy_rates, strict=True)
    times: list[tuple[float | None, float | None]] = list(measured) or [(None, None)] * len(found.kept_tokens)
    kept = enumerate(zip(found.kept_tokens, times, strict=True))
    return Table(columns, [[rank, tokens, *pair] for rank, (tokens, pair) in kept])
