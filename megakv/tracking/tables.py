"""The tables of a run's report, for the HTML page and for W&B alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from megakv.tracking.measurements import Event, Traffic, offload_totals, percentiles
from megakv.tracking.report import RankReport, RunReport
from megakv.tracking.units import Cell


@dataclass(frozen=True)
class Table:
    """Named columns, and rows of equal length."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]  # Of text, numbers and None.

    @classmethod
    def of(cls, records: Iterable[dict[str, Cell]]) -> Self:
        """A row for each record; all have the same columns."""
        found = list(records)
        return cls(tuple(found[0]) if found else (), [list(record.values()) for record in found])


def report_tables(report: RunReport) -> dict[str, Table]:
    """All tables that a report has something for, by name."""
    found = {
        "served": _served(report),
        "served_moments": _served_moments(report),
        "ranks": _ranks(report),
        "communication": operations(report),
        "products": _products(report),
        "prefill": _prefill(report),
        "offload": Table.of(_offload(rank) for rank in report.ranks if rank.offload),
        "offload_steps": _offload_steps(report),
        "balance": _balance(report),
    }
    return {name: table for name, table in found.items() if table.rows}


def rank_seconds(report: RunReport) -> Table:
    """What each rank did until the last token: compute, wait for communication (exposed) or neither; and what it hid.

    Compute is known where events were recorded, the rest where the run's length is. Waiting for the link to what lies
    off the accelerator is exposed communication too.
    """
    records: list[dict[str, Cell]] = []
    for rank in report.ranks:
        exposed = sum(t.seconds_exposed for t in rank.traffic)
        hidden = sum(t.seconds for t in rank.traffic) - exposed
        exposed += sum(step.waited_s for step in rank.offload)
        compute = busy_seconds([event for event in rank.events if event.kind == "compute"]) if rank.events else None
        end = report.generated_s
        other = None if end is None else max(0.0, end - exposed - (compute or 0.0))
        values = {"compute_s": compute, "exposed_s": exposed, "other_s": other, "hidden_s": hidden}
        records.append({"rank": rank.rank, **values})
    return Table.of(records)


def busy_seconds(events: Sequence[Event]) -> float:
    """Time in which at least one of some events ran."""
    busy, until = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return busy


def operations(report: RunReport) -> Table:
    """By operation: sums over ranks and layers of what was sent; times are means over ranks."""
    found: dict[str, list[Traffic]] = {}
    for traffic in (traffic for rank in report.ranks for traffic in rank.traffic):
        found.setdefault(traffic.operation, []).append(traffic)
    records: list[dict[str, Cell]] = []
    for operation, several in sorted(found.items()):
        seconds, exposed = (sum(getattr(t, name) for t in several) for name in ("seconds", "seconds_exposed"))
        times = {"seconds": seconds, "seconds_hidden": seconds - exposed, "seconds_exposed": exposed}
        sums = {name: sum(getattr(t, name) for t in several) for name in ("calls", "bytes_sent")}
        records.append(
            {"operation": operation, **sums, **{name: time / len(report.ranks) for name, time in times.items()}}
        )
    return Table.of(records)


def answers(report: RunReport) -> Table:
    """Latencies of every turn of a job, by percentile too; of the texts nothing."""
    records: list[dict[str, Cell]] = []
    for number, answer in enumerate(report.answers, 1):
        names = ("prompt_tokens", "cached_tokens", "new_tokens", "ttft_s", "ttit_s")
        # Every row has the columns of the longest answer, also one of a single token.
        tails = percentiles("ttit_s", answer.step_s) or dict.fromkeys(percentiles("ttit_s", [0.0]))
        records.append({"answer": number, **{name: getattr(answer, name) for name in names}, **tails})
    return Table.of(records)


def comparison(reports: Sequence[RunReport], names: Sequence[str]) -> Table:
    """Every metric that any run has, run beside run, and what of the first run's each later one is."""
    scalars = [report.scalars() for report in reports]
    columns = ("metric", *names, *(f"{name} / {names[0]}" for name in names[1:]))
    rows: list[list[Cell]] = []
    for metric in dict.fromkeys(metric for values in scalars for metric in values):
        first, *others = values = [found.get(metric) for found in scalars]
        rows.append([metric, *values, *(None if value is None or not first else value / first for value in others)])
    return Table(columns, rows)


def _served(report: RunReport) -> Table:
    """Where a server's keys and values lay in the end."""
    found = report.served
    if found is None:
        return Table.of(())
    names = ("kv_tokens", "kv_capacity", "kv_bytes")
    return Table.of(
        {"tier": tier, **{name: getattr(found, name).get(tier) for name in names}} for tier in sorted(found.kv_tokens)
    )


def _served_moments(report: RunReport) -> Table:
    """A server's queue, tokens and memory as they went."""
    moments = [] if report.served is None else report.served.moments
    tiers = dict.fromkeys(tier for moment in moments for tier in moment.kv_tokens)
    names = ("at_s", "waiting", "running", "prompt_tokens", "hit_tokens", "new_tokens")
    return Table.of(
        {name: getattr(moment, name) for name in names}
        | {f"kv_tokens_{tier}": moment.kv_tokens.get(tier) for tier in tiers}
        for moment in moments
    )


def _ranks(report: RunReport) -> Table:
    names = ("rank", "host", "cp_rank", "tp_rank", "tokens", "kv_bytes", "peak_bytes")
    return Table.of(
        {name: getattr(rank, name) for name in names}
        | {"seconds_exposed": sum(t.seconds_exposed for t in rank.traffic)}
        for rank in report.ranks
    )


def _products(report: RunReport) -> Table:
    """Libraries by the rows that they multiply, with rates of all."""
    names = dict.fromkeys(name for each in report.products for name in each.flops)
    return Table.of(
        {
            "rows": f"{each.first} to {each.last}" if each.last else f"{each.first} and more",
            "dtype": report.dtype,
            "library": each.library,
            **{f"{name}: GFLOP/s": each.flops[name] / 1e9 if name in each.flops else None for name in names},
        }
        for each in report.products
    )


def _prefill(report: RunReport) -> Table:
    """Predicted times to first token of all that was to choose from, and the measured one of what was chosen."""
    plan = report.prefill
    if plan is None:
        return Table.of(())
    records: list[dict[str, Cell]] = []
    for name in dict.fromkeys([plan.chosen, *plan.predicted_s]):
        predicted = plan.predicted_s.get(name)
        measured = report.ttft_s if name == plan.chosen else None
        error = None if predicted is None or not measured else predicted / measured - 1
        records.append({"method": name, "predicted_s": predicted, "measured_s": measured, "error": error})
    return Table.of(records)


def _offload(rank: RankReport) -> dict[str, Cell]:
    bits = rank.offload[-1].kv_bits
    return {
        "rank": rank.rank,
        "passes": len(rank.offload),
        **offload_totals(rank.offload),
        "plans": passes_by_plan(rank),
        "kv_bits": None if bits is None else f"{bits} (lossy)",
        "disk_io": rank.disk_io,
        "schedule": rank.schedule,
    }


def passes_by_plan(rank: RankReport) -> str:
    """How many passes over offloaded keys and values each method served."""
    return ", ".join(f"{plan} {count}" for plan, count in Counter(step.plan for step in rank.offload).most_common())


def _offload_steps(report: RunReport) -> Table:
    """Every pass of every rank: which method served it, the split point, bytes each way, times and utilisation."""
    return Table.of(
        {"rank": rank.rank, "pass": number, **asdict(step), "profiled": "yes" if step.profiled else "no"}
        for rank in report.ranks
        for number, step in enumerate(rank.offload, 1)
    )


def _balance(report: RunReport) -> Table:
    """What KV heads cost each rank, where caches have budgets per head or heads are mapped."""
    found = report.balance
    if found is None:
        return Table.of(())
    nothing = [None] * len(found.kept_tokens)
    columns = (found.kept_tokens, found.attention_s or nothing, found.busy_rates or nothing)
    return Table.of(
        {"rank": rank, "kept_tokens": tokens, "attention_s": seconds, "busy_rate": rate}
        for rank, (tokens, seconds, rate) in enumerate(zip(*columns, strict=True))
    )
