"""One self-contained HTML page for one or several runs: no script, no outside address, all text of reports escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from megakv.tracking.glossary import glossary
from megakv.tracking.html import document, facts, folded, metrics, picture, seconds_chart, table, text
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.overview import overview, served
from megakv.tracking.report import RunReport, load_report
from megakv.tracking.tables import comparison, rank_seconds, report_tables
from megakv.tracking.timeline import default_end, draw_timelines, drawn_part, has_events
from megakv.tracking.units import duration, shown

MOST_RUNS = 16
MOST_JSON = 100_000
"""Letters of a configuration that are shown."""
TITLES = {
    "served": "Served: keys and values by tier",
    "served_moments": "Served: queue, tokens and memory over time",
    "ranks": "Balance of tokens, keys and values",
    "communication": "Communication",
    "prefill": "Prefill: predicted and measured",
    "offload": "Offloaded keys and values",
    "offload_steps": "Offloaded keys and values, pass by pass",
    "balance": "KV heads (FairKV)",
}


def read_runs(paths: Sequence[str | Path]) -> list[tuple[str, RunReport]]:
    """Reports of files, each with a name that no other has."""
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ValueError(f"{len(paths)} reports: allowed: 1 to {MOST_RUNS} on one page")
    runs: dict[str, RunReport] = {}
    for path in map(Path, paths):
        names = (path.stem if number == 1 else f"{path.stem} ({number})" for number in count(1))
        runs[next(name for name in names if name not in runs)] = load_report(path)
    return list(runs.items())


def page(runs: Sequence[tuple[str, RunReport]], preface: Sequence[str] = ()) -> str:
    """The HTML of one run or several; ratios are to the first, and HTML to begin with may be given."""
    names, reports = [name for name, _ in runs], [report for _, report in runs]
    parts = [*preface, facts({name: overview(report) for name, report in runs})]
    measured = metrics(comparison(reports, names), len(runs))
    drawn = [(name, report) for name, report in runs if has_events(report)]
    if len(runs) > 1:
        if len(drawn) > 1:
            parts += ["<h2>Timelines on one axis of time</h2>", _timelines(drawn)]
        charts = {name: rank_seconds(report) for name, report in runs}
        parts += ["<h2>Compute and communication of every rank, on one axis</h2>", seconds_chart(charts)]
        parts += [f"<h2>Metrics</h2>{measured}"]
    for name, report in runs:
        parts += [f"<h2>{text(name)}</h2>"] * (len(runs) > 1) + [_run(name, report)]
    if len(runs) == 1:
        parts.append(f"<details><summary>Metrics</summary>{measured}</details>")
    terms = glossary(re.sub(r"<pre>.*?</pre>|<[^>]*>", " ", "".join(parts), flags=re.DOTALL))
    lines = "".join(f"<dt>{text(term)}</dt><dd>{text(meaning)}</dd>" for term, meaning in terms.items())
    parts.append(f"<h2>Terms</h2><dl>{lines}</dl>")
    return document("Runs of MegaKV" if len(runs) > 1 else f"Run {names[0]} of MegaKV", parts)


def _run(name: str, report: RunReport) -> str:
    parts = [_answers(report)] if report.answers else []
    if report.served is not None:
        parts += ["<h3>Served</h3>", facts({name: served(report.served)})]
    parts += ["<h3>Compute and communication of every rank</h3>", seconds_chart({name: rank_seconds(report)})]
    if has_events(report):
        parts += ["<h3>Timeline</h3>", _timelines([(name, report)])]
    for key, values in report_tables(report).items():
        content = table(values)
        if key in ("offload_steps", "served_moments"):
            parts.append(f"<details><summary>{TITLES[key]}</summary>{content}</details>")
            continue
        parts.append(f"<h3>{TITLES[key]}</h3>{content}")
        if key == "offload":
            described = "Split points, bytes, utilisation and times, pass by pass"
            parts.append(picture(partial(draw_offload, report), described))
        if key == "balance" and report.balance is not None:
            balance = report.balance
            used = (balance.mapped_utilisation, balance.kept_utilisation, balance.utilisation)
            promised, kept, measured = (shown("utilisation", value) for value in used)
            parts.append(
                f"<p>Utilisation: promised {promised}, of kept tokens {kept}, of time in attention {measured}. "
                f"Mapping: {text(balance.mapping or 'none')}</p>"
            )
    details: dict[str, dict[str, Any]] = {
        "Configuration": report.config,
        "Settings of the job": report.settings,
        "Machine and versions": {"machine": report.machine, "versions": report.versions},
    }
    for title, said in details.items():
        if said:
            parts.append(folded(title, json.dumps(said, indent=2, default=str, ensure_ascii=False)[:MOST_JSON]))
    return "".join(parts)


def _answers(report: RunReport) -> str:
    """What was asked and said."""
    parts = ["<h3>Answers</h3>"]
    for each in report.answers:
        asked = f"<p>{text(each.question)}</p>" if each.question else ""
        judged = {True: " (correct)", False: " (WRONG)", None: ""}[each.correct]
        expected = f"<p>expected: {text(each.expected)}{judged}</p>" if each.expected else ""
        times = f"TTFT {duration(each.ttft_s)}, TTIT {duration(each.ttit_s)}" if len(report.answers) > 1 else ""
        expected += f"<p>{times}</p>" * bool(times)
        parts.append(f'{asked}<div class="answer">{text(each.answer.strip())}</div>{expected}')
    return "".join(parts)


def _timelines(runs: Sequence[tuple[str, RunReport]]) -> str:
    order = f"<p>From the top: {text(', '.join(name for name, _ in runs))}.</p>" if len(runs) > 1 else ""
    reports = [report for _, report in runs]
    drawn = picture(partial(draw_timelines, reports), "Compute and communication of every rank")
    parts = {name: drawn_part(report, max(map(default_end, reports))) for name, report in runs}
    said = (f"{text(name)}: {part}" if len(runs) > 1 else part for name, part in parts.items() if part)
    return order + drawn + "".join(f"<p>Drawn: {words}.</p>" for words in said)
