"""One self-contained HTML page for one or several runs: no script, no outside address, all text of reports escaped."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from megakv.tracking.files import BLUE, ORANGE, PALE, RED, drawn
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.overview import overview, served
from megakv.tracking.report import RunReport, load_report
from megakv.tracking.tables import Table, comparison, rank_seconds, report_tables
from megakv.tracking.timeline import default_end, draw_timelines, drawn_part, has_events
from megakv.tracking.units import TERMS, duration, shown, title

MOST_RUNS = 16
MOST_JSON = 100_000
"""Letters of a configuration that are shown."""
MOST_ROWS = 512
"""Rows of a table that are shown; a page is for people."""
MOST_BARS = 64
MOST_LETTERS = 2000
KINDS = {
    "compute_s": "compute",
    "exposed_s": "exposed communication",
    "other_s": "other",
    "hidden_s": "hidden communication",
}
FOLDED = ("offload_steps", "served_moments")
TITLES = {
    "served": "Served: keys and values by tier",
    "served_moments": "Served: queue, tokens and memory over time",
    "ranks": "Balance of tokens, keys and values",
    "communication": "Communication",
    "products": "Libraries that multiply, by rows",
    "prefill": "Prefill: predicted and measured",
    "offload": "Offloaded keys and values",
    "offload_steps": "Offloaded keys and values, pass by pass",
    "balance": "KV heads (FairKV)",
}


class Picture(NamedTuple):
    """A picture and its words."""

    described: str
    data: str  # A PNG in base64.

    @classmethod
    def of(cls, draw: Callable[[io.BytesIO], None], described: str) -> Picture:
        """What `draw` draws."""
        return cls(described, base64.b64encode(drawn(draw)).decode())


def read_runs(paths: Sequence[str | Path]) -> list[tuple[str, RunReport]]:
    """Reports of files, each with a name that no other has."""
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ValueError(f"{len(paths)} reports: allowed: 1 to {MOST_RUNS} on one page")
    runs: dict[str, RunReport] = {}
    for path in map(Path, paths):
        names = (path.stem if number == 1 else f"{path.stem} ({number})" for number in count(1))
        runs[next(name for name in names if name not in runs)] = load_report(path)
    return list(runs.items())


def page(runs: Sequence[tuple[str, RunReport]], preface: Sequence[str | Picture] = ()) -> str:
    """The HTML of one run or several; ratios are to the first. Sentences and pictures to begin with may be given."""
    names, reports = [name for name, _ in runs], [report for _, report in runs]
    recorded = [(name, report) for name, report in runs if has_events(report)]
    template = _environment().from_string(files("megakv.tracking").joinpath("page.html").read_text())
    return template.render(
        heading="Runs of MegaKV" if len(runs) > 1 else f"Run {names[0]} of MegaKV",
        preface=preface,
        overviews={name: overview(report) for name, report in runs},
        timeline=_timelines(recorded) if len(runs) > 1 and len(recorded) > 1 else None,
        charts=_chart({name: rank_seconds(report) for name, report in runs}),
        compared=comparison(reports, names),
        runs=[_run(name, report) for name, report in runs],
    )


def _explained(body: str) -> dict[str, str]:
    """The terms that a page uses, beside what reports say in their own words, and what they mean."""
    said = re.sub(r"<pre>.*?</pre>|<[^>]*>", " ", body, flags=re.DOTALL)
    return {term: words for term, words in TERMS.items() if re.search(rf"(?<![\w-]){term}(?![\w-])", said)}


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "cut": lambda value: value if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]} ...",
        "duration": duration,
        "explained": _explained,
        "facts": lambda columns: dict.fromkeys(name for values in columns.values() for name in values),
        "shown": lambda value, name: shown(name, value),
        "words": title,
    }
    colours = {"blue": BLUE, "orange": ORANGE, "pale": PALE, "red": RED}
    environment.globals |= {"colours": colours, "kinds": KINDS, "titles": TITLES, "folded": FOLDED}
    environment.globals |= {"most_rows": MOST_ROWS, "most_bars": MOST_BARS}
    return environment


def _run(name: str, report: RunReport) -> dict[str, Any]:
    details: dict[str, dict[str, Any]] = {
        "Configuration": report.config,
        "Settings of the job": report.settings,
        "Machine and versions": {"machine": report.machine, "versions": report.versions},
    }
    tables = report_tables(report)
    described = "Split points, bytes, utilisation and times, pass by pass"
    return {
        "name": name,
        "report": report,
        "served": None if report.served is None else served(report.served),
        "chart": _chart({name: rank_seconds(report)}),
        "timeline": _timelines([(name, report)]) if has_events(report) else None,
        "tables": tables,
        "offload": Picture.of(partial(draw_offload, report), described) if "offload" in tables else None,
        "details": {
            heading: said and json.dumps(said, indent=2, default=str, ensure_ascii=False)[:MOST_JSON]
            for heading, said in details.items()
        },
    }


def _chart(groups: Mapping[str, Table]) -> dict[str, Any]:
    """Compute, hidden and exposed communication of every rank, of all runs on one axis that ends at `most` seconds."""
    rows: list[list[Any]] = [[cell or 0.0 for cell in row] for values in groups.values() for row in values.rows]
    most = max((max(sum(spent), behind) for _, *spent, behind in rows), default=0.0) or 1.0
    found = [
        (name, [_bars(row, most) for row in each.rows[:MOST_BARS]], len(each.rows)) for name, each in groups.items()
    ]
    return {"most": most, "groups": found}


def _bars(row: Sequence[Any], most: float) -> dict[str, Any]:
    seconds: dict[str, Any] = dict(zip(KINDS, row[1:], strict=True))
    words = {kind: f"{kind[:-2]} {duration(value)}" for kind, value in seconds.items() if value is not None}
    if "other_s" in words and (spent := sum(seconds[kind] or 0.0 for kind in KINDS if kind != "hidden_s")):
        words["exposed_s"] += f" ({seconds['exposed_s'] / spent:.1%} of the time)"
    bars = {kind: f"{100 * length / most:.2f}" for kind, length in seconds.items() if length}
    return {"rank": row[0], "bars": bars, "words": ", ".join(words.values())}


def _timelines(runs: Sequence[tuple[str, RunReport]]) -> dict[str, Any]:
    names, reports = [name for name, _ in runs], [report for _, report in runs]
    end = max(map(default_end, reports))
    parts = {name: drawn_part(report, end) for name, report in runs}
    return {
        "names": names,
        "picture": Picture.of(partial(draw_timelines, reports), "Compute and communication of every rank"),
        "parts": [f"{name}: {part}" if len(runs) > 1 else part for name, part in parts.items() if part],
    }
