"""The parts of a page: tables, charts and pictures as HTML. All text is escaped here, and cut where it is endless."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from megakv.tracking.files import BLUE, ORANGE, PALE, RED, drawn
from megakv.tracking.tables import Table
from megakv.tracking.units import Cell, duration, shown, title

MOST_ROWS = 512
"""Of a table that are shown; a page is for people."""
MOST_BARS = 64
MOST_LETTERS = 2000
BARS = ("tokens", "kv_bytes", "kept_tokens", "busy_rate")
"""Columns whose balance between ranks is drawn."""
KINDS = {
    "compute_s": "compute",
    "exposed_s": "exposed communication",
    "other_s": "other",
    "hidden_s": "hidden communication",
}
STYLE = f"""
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,sans-serif;color:#22282f;margin:0 auto;max-width:76em;padding:1em;overflow-wrap:anywhere}}
h1,h2,h3{{line-height:1.2;margin:1.6em 0 .5em}}h1{{margin-top:.2em}}h2{{border-top:1px solid #dde1e6;padding-top:1em}}
p{{max-width:52em;margin:.4em 0}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.25em .8em .25em 0;text-align:right;vertical-align:top;border-bottom:1px solid #eef0f3}}
.scroll td,.scroll th{{white-space:nowrap;overflow-wrap:normal}}
th{{color:#5b636c;font-weight:600}}td:first-child,th:first-child,.t{{text-align:left}}
.wide td:first-child,.wide th:first-child{{position:sticky;left:0;background:#fff}}
.b{{background:linear-gradient({BLUE},{BLUE}) no-repeat left 90%/var(--w) 3px}}
.scroll{{overflow-x:auto;margin:.5em 0 1.2em}}
.facts td{{text-align:left}}.scroll.facts td{{white-space:normal;overflow-wrap:anywhere;min-width:9em}}
.facts td:first-child,.facts th{{color:#5b636c}}
.facts td:first-child,.scroll.facts td:first-child{{overflow-wrap:normal;min-width:0}}
.picture img{{display:block;width:100%;min-width:52em}}
pre,.answer{{background:#f5f6f8;padding:.8em;overflow:auto;max-height:30em;white-space:pre-wrap;margin:.4em 0}}
details{{margin:.5em 0}}summary{{cursor:pointer;font-weight:600}}
.chart{{display:grid;grid-template-columns:max-content 1fr;gap:.5em .8em;margin:.6em 0;max-width:60em}}
.lane{{display:flex;overflow:hidden}}.lane i{{flex:none;height:12px}}
.chart i{{display:block;min-width:1px}}i.hidden_s{{height:6px}}
.chart small{{display:block;color:#5b636c;padding-top:2px}}
.chart b{{grid-column:1/-1;margin-top:.4em}}
.key{{display:flex;flex-wrap:wrap}}.key i{{display:inline-block;width:.9em;height:.7em;margin:0 .3em 0 0}}
.key span{{margin-right:1.2em;white-space:nowrap}}
.compute_s{{background:{BLUE}}}.exposed_s{{background:{RED}}}.hidden_s{{background:{ORANGE}}}.other_s{{background:{PALE}}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1em}}dt{{font-weight:600}}dd{{margin:0}}
@media(max-width:40em){{body{{font-size:14px;padding:.7em}}th,td{{padding-right:.6em}}
.wide td:first-child,.wide th:first-child{{white-space:normal;min-width:0;max-width:8em}}}}
"""


def text(value: str) -> str:
    """Text of a report."""
    return escape(value if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]} ...")


def document(heading: str, parts: Iterable[str]) -> str:
    """A whole page, with nothing outside it."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{text(heading)}</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\"><style>{STYLE}</style></head><body>"
        f"<h1>{text(heading)}</h1>{''.join(parts)}</body></html>\n"
    )


def table(values: Table) -> str:
    """A table in units that suit its columns; it scrolls inside its box where it is wide."""
    largest = [
        max((cell for cell in column if isinstance(cell, int | float)), default=0) if name in BARS else 0
        for name, column in zip(values.columns, zip(*values.rows, strict=True), strict=True)
    ]
    head = "".join(f"<th>{text(title(name))}</th>" for name in values.columns)
    rows = []
    for row in values.rows[:MOST_ROWS]:
        cells = []
        for name, value, top in zip(values.columns, row, largest, strict=True):
            mark = ' class="t"' if isinstance(value, str) else ""
            if isinstance(value, int | float) and top:
                mark = f' class="b" style="--w:{100 * value / top:.1f}%"'
            cells.append(f"<td{mark}>{text(shown(name, value))}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _scrolled(head, rows) + _more(len(values.rows), MOST_ROWS, "rows")


def metrics(values: Table, runs: int) -> str:
    """Runs side by side: a metric a row, each in its unit, then what of the first run's the others are."""

    def cells(name: str, row: Sequence[Cell]) -> str:
        ratios = ("-" if value is None else f"{value:.2f}" for value in row[runs:])
        return "".join(f"<td>{text(each)}</td>" for each in (*(shown(name, value) for value in row[:runs]), *ratios))

    head = "".join(f"<th>{text(name)}</th>" for name in values.columns)
    rows = [f"<tr><td>{text(title(str(name)))}</td>{cells(str(name), row)}</tr>" for name, *row in values.rows]
    return _scrolled(head, rows[:MOST_ROWS]) + _more(len(rows), MOST_ROWS, "metrics")


def facts(columns: Mapping[str, Mapping[str, str]]) -> str:
    """What is known of one run or several, a fact a row."""
    names = dict.fromkeys(name for values in columns.values() for name in values)
    rows = []
    for name in names:
        cells = "".join(f"<td>{text(values.get(name, '-'))}</td>" for values in columns.values())
        rows.append(f"<tr><td>{text(name)}</td>{cells}</tr>")
    if len(columns) == 1:
        return f'<table class="facts">{"".join(rows)}</table>'
    head = "".join(f'<th class="t">{text(name)}</th>' for name in ("", *columns))
    return f'<div class="scroll wide facts"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def seconds_chart(groups: Mapping[str, Table]) -> str:
    """Compute, hidden and exposed communication of every rank, of all runs on one axis."""
    rows: list[list[Any]] = [[cell or 0.0 for cell in row] for values in groups.values() for row in values.rows]
    most = max((max(sum(spent), behind) for _, *spent, behind in rows), default=0.0) or 1.0
    parts = []
    for name, values in groups.items():
        if len(groups) > 1:
            parts.append(f"<b>{text(name)}</b>")
        for rank, *row in values.rows[:MOST_BARS]:
            seconds: dict[str, Any] = dict(zip(KINDS, row, strict=True))
            bars = {
                kind: f'<i class="{kind}" style="width:{100 * length / most:.2f}%"></i>' if length else ""
                for kind, length in seconds.items()
            }
            hidden = bars.pop("hidden_s")
            words = {kind: f"{kind[:-2]} {duration(value)}" for kind, value in seconds.items() if value is not None}
            if "other_s" in words and (spent := sum(seconds[kind] or 0.0 for kind in KINDS if kind != "hidden_s")):
                words["exposed_s"] += f" ({seconds['exposed_s'] / spent:.1%} of the time)"
            lanes = f'<div class="lane">{"".join(bars.values())}</div>{hidden}'
            parts.append(f"<span>rank {rank}</span><div>{lanes}<small>{', '.join(words.values())}</small></div>")
        parts.append(_more(len(values.rows), MOST_BARS, "ranks"))
    key = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in KINDS.items())
    key += f"<span>the axis ends at {duration(most)}</span>"
    return f'<p class="key">{key}</p><div class="chart">{"".join(parts)}</div>'


def picture(draw: Callable[[io.BytesIO], None], described: str) -> str:
    """What `draw` draws; on a narrow screen it scrolls inside its box."""
    data = base64.b64encode(drawn(draw)).decode()
    return f'<div class="scroll picture"><img alt="{text(described)}" src="data:image/png;base64,{data}"></div>'


def folded(heading: str, content: str) -> str:
    """Text that a click unfolds."""
    return f"<details><summary>{text(heading)}</summary><pre>{escape(content)}</pre></details>"


def _scrolled(head: str, rows: Iterable[str]) -> str:
    return f'<div class="scroll wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _more(count: int, most: int, things: str) -> str:
    return f"<p>{count - most} more {things} are in the report.</p>" if count > most else ""
