"""Export of a run to the trace-event format that chrome://tracing and Perfetto read."""

import json
from pathlib import Path
from typing import Any

from megakv.tracking.files import write_whole
from megakv.tracking.metrics import Event, RankReport, RunReport

_THREADS = {"compute": 0, "wait": 1}


def write_trace(report: RunReport, path: str | Path) -> None:
    """Write the run as a trace: one process per rank, times in microseconds since the run's zero.

    Compute and waiting are threads of complete events. Transfers in flight overlap each other, which a thread
    cannot show, and so are asynchronous events.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    events = [event for rank in report.ranks for event in _rank_events(rank)]
    metadata = {"model": report.model, "mesh": report.mesh, "ttft_s": report.ttft_s, "ttit_s": report.ttit_s}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}
    write_whole(path, json.dumps(trace, separators=(",", ":")).encode())


def _rank_events(report: RankReport) -> list[dict[str, Any]]:
    label = f"rank {report.rank} (cp {report.cp_rank}, tp {report.tp_rank}) on {report.host}"
    common = {"pid": report.rank, "tid": 0}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": label}, **common},
        {"ph": "M", "name": "process_sort_index", "args": {"sort_index": report.rank}, **common},
    ]
    for kind, thread in _THREADS.items():
        events.append({"ph": "M", "name": "thread_name", "args": {"name": kind}, "pid": report.rank, "tid": thread})
    for number, event in enumerate(report.events):
        events.extend(_trace_events(event, report.rank, number))
    return events


def _trace_events(event: Event, rank: int, number: int) -> list[dict[str, Any]]:
    args = {} if event.layer is None else {"layer": event.layer}
    base: dict[str, Any] = {"name": event.name, "cat": event.kind, "pid": rank, "args": args}
    start, end = event.start * 1e6, event.end * 1e6
    if event.kind in _THREADS:
        return [{**base, "ph": "X", "tid": _THREADS[event.kind], "ts": start, "dur": end - start}]
    asynchronous = {**base, "tid": 0, "id": f"{rank}.{number}"}
    return [{**asynchronous, "ph": "b", "ts": start}, {**asynchronous, "ph": "e", "ts": end}]
