"""``megakv report``: the HTML page of one or several runs. Starts no rank."""

from __future__ import annotations

import argparse
from typing import Any


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``megakv report`` takes."""
    parser.add_argument("reports", nargs="+", metavar="RUN.json", help="reports that megakv.tracking.json wrote")
    parser.add_argument("--html", default="report.html", help="page to write (default report.html)")


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write one HTML page, with nothing outside it, about one or several runs side by side."""
    from megakv.tracking.files import write_whole
    from megakv.tracking.page import page, read_runs

    runs = read_runs(arguments.reports)
    write_whole(arguments.html, page(runs).encode())
    return {"html": arguments.html, "runs": [name for name, _ in runs]}
