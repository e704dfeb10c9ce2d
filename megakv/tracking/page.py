"""One self-contained HTML page for one or several runs: no script, no outside address, all text of reports escaped."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import count
from pathlib import Path

from megakv.tracking.files import drawn
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.report import RunReport, latency, load_report
from megakv.tracking.tables import Cell, Table, comparison, report_tables
from megakv.tracking.timeline import draw_timelines

MOST_RUNS = 16
MOST_BYTES = 256 << 20
MOST_ROWS = 512
"""Of a table that are shown; a page is for people."""
BARS = ("tokens", "kv_bytes", "kept_tokens", "busy_rate")
"""Columns whose balance between ranks is drawn."""
TITLES = {
    "ranks": "Balance of tokens, keys and values",
    "communication": "Communication",
    "prefill": "Prefill: predicted and measured",
    "offload": "Offloaded keys and values",
    "offload_steps": "Offloaded keys and values, pass by pass",
    "balance": "KV heads (FairKV)",
}
TIMELINE, OFFLOAD = (
    "Compute and communication of every rank",
    "Split points, bytes, utilisation and times, pass by pass",
)
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#22282f;margin:2em auto;max-width:80em;padding:0 1em}
h1,h2,h3{line-height:1.2}h2{margin-top:2em;border-top:1px solid #dde1e6;padding-top:1em}
table{border-collapse:collapse;margin:.5em 0 1.5em}th,td{padding:.2em .7em;text-align:right}
td,th{border-bottom:1px solid #eef0f3}
th{color:#5b636c;font-weight:600}td:first-child,th:first-child,.t{text-align:left}
.b{background:linear-gradient(#2f6db3,#2f6db3) no-repeat left 80%/var(--w) 3px}
img{max-width:100%}pre{background:#f5f6f8;padding:1em;overflow:auto;max-height:30em}.scroll{overflow-x:auto}
"""


def read_runs(paths: Sequence[str | Path]) -> list[tuple[str, RunReport]]:
    """Reports of files, each with a name that no other has."""
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ValueError(f"{len(paths)} reports: allowed: 1 to {MOST_RUNS} on one page")
    runs: dict[str, RunReport] = {}
    for path in map(Path, paths):
        size = path.stat().st_size if path.is_file() else 0  # the reader says why
        if size > MOST_BYTES:
            raise ValueError(f"{path} has {size >> 20} MiB; a page takes reports of {MOST_BYTES >> 20} MiB at most")
        names = (path.stem if number == 1 else f"{path.stem} ({number})" for number in count(1))
        runs[next(name for name in names if name not in runs)] = load_report(path)
    return list(runs.items())


def page(runs: Sequence[tuple[str, RunReport]]) -> str:
    """The HTML of one run or several; ratios are to the first."""
    names, reports = [name for name, _ in runs], [report for _, report in runs]
    head = "Runs of MegaKV" if len(runs) > 1 else f"Run {names[0]} of MegaKV"
    parts = [f"<h1>{escape(head)}</h1>", _table(Table.of(_overview(name, report) for name, report in runs))]
    if len(runs) > 1:
        order = f"<p>From the top: {escape(', '.join(names))}.</p>"
        parts += ["<h3>Timelines on one axis of time</h3>", order, _timelines(reports)]
    parts.append(f"<h3>Metrics</h3>{_table(comparison(reports, names))}")
    parts += [_run(name, report) for name, report in runs]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(head)}</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\"><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _overview(name: str, report: RunReport) -> dict[str, Cell]:
    return {
        "run": name,
        "model": report.model,
        "mesh": f"CP {report.mesh['cp']} x TP {report.mesh['tp']}",
        "prompt tokens": report.prompt_tokens,
        "new tokens": report.new_tokens,
        "prefill": None if report.prefill is None else report.prefill.chosen,
        "TTFT": latency(report.ttft_s),
        "TTIT": latency(report.ttit_s),
    }


def _run(name: str, report: RunReport) -> str:
    parts = [f"<h2>{escape(name)}</h2><h3>Timeline</h3>{_timelines([report])}"]
    for key, table in report_tables(report).items():
        parts.append(f"<h3>{TITLES[key]}</h3>{_table(table)}")
        if key == "offload":
            parts.append(_picture(partial(draw_offload, report), OFFLOAD))
        if key == "balance" and report.balance is not None:
            found = report.balance
            parts.append(
                f"<p>Utilisation: promised {_cell(found.mapped_utilisation)}, of kept tokens "
                f"{_cell(found.kept_utilisation)}, of time in attention {_cell(found.utilisation)}. "
                f"Mapping: {escape(found.mapping or 'none')}</p>"
            )
    for title, values in (
        ("Configuration", report.config),
        ("Machine and versions", {"machine": report.machine, "versions": report.versions}),
    ):
        text = escape(json.dumps(values, indent=2, default=str))
        parts.append(f"<details><summary>{title}</summary><pre>{text}</pre></details>")
    return "".join(parts)


def _timelines(reports: Sequence[RunReport]) -> str:
    return _picture(partial(draw_timelines, reports), TIMELINE)


def _picture(draw: Callable[[io.BytesIO], None], described: str) -> str:
    """What `draw` draws, as a part of the page."""
    return f'<img alt="{described}" src="data:image/png;base64,{base64.b64encode(drawn(draw)).decode()}">'


def _table(table: Table) -> str:
    largest = [
        max((cell for cell in column if isinstance(cell, int | float)), default=0) if name in BARS else 0
        for name, column in zip(table.columns, zip(*table.rows, strict=True), strict=True)
    ]
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = []
    for row in table.rows[:MOST_ROWS]:
        cells = []
        for value, top in zip(row, largest, strict=True):
            mark = ' class="t"' if isinstance(value, str) else ""
            if isinstance(value, int | float) and top:
                mark = f' class="b" style="--w:{100 * value / top:.1f}%"'
            cells.append(f"<td{mark}>{_cell(value)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    more = len(table.rows) - MOST_ROWS
    note = f"<p>{more} more rows are in the report.</p>" if more > 0 else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>{note}'


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return escape(value)
    return f"{int(value):,}" if isinstance(value, int) or value.is_integer() else f"{value:.4g}"
