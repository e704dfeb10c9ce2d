"""``megakv report``: the HTML page of one or several runs, and the same to W&B. Starts no rank."""

from __future__ import annotations

import argparse
from typing import Any


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``megakv report`` takes."""
    parser.add_argument(
        "reports", nargs="+", metavar="RUN.json", help="reports that megakv.tracking.json or megakv simulate wrote"
    )
    parser.add_argument("--html", default="report.html", help="page to write (default report.html)")
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="also log tables and timelines to this W&B project, offline unless logged in"
    )


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write one HTML page, with nothing outside it, about one or several runs side by side."""
    from megakv.tracking import WandbTrackingConfig, log_runs
    from megakv.tracking.files import write_whole
    from megakv.tracking.page import page, read_runs

    runs = read_runs(arguments.reports)
    write_whole(arguments.html, page(runs).encode())
    written: dict[str, Any] = {"html": arguments.html, "runs": [name for name, _ in runs]}
    if arguments.wandb:
        project = WandbTrackingConfig(enabled=True, project=arguments.wandb, name="report")
        written["wandb"] = str(log_runs(runs, project))
    return written
