"""``megakv timeline``."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("report", help="a report that megakv.tracking.json wrote")
    parser.add_argument("png", help="picture to write")
    parser.add_argument("--trace", help="trace to write")
    parser.add_argument("--beside", help="another report to draw below, on the same axis of time")
    parser.add_argument("--json", dest="result_file", help="write the result to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw one report, or two."""
    from megakv.tracking.files import check_outputs
    from megakv.tracking.report import load_report
    from megakv.tracking.timeline import draw_timelines, write_trace

    inputs = {"REPORT": arguments.report, "--beside": arguments.beside}
    check_outputs({"PNG": arguments.png, "--trace": arguments.trace}, inputs)
    report = load_report(arguments.report)
    others = [load_report(arguments.beside)] if arguments.beside else []
    draw_timelines([report, *others], arguments.png)
    written = {"png": arguments.png}
    if arguments.trace:
        write_trace(report, arguments.trace)
        written["trace"] = arguments.trace
    return written
