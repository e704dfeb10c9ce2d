"""``megakv report``: the HTML page of one or several runs, and the same to W&B. Starts no rank."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "reports", nargs="+", metavar="RUN.json", help="reports that megakv.tracking.json or megakv simulate wrote"
    )
    parser.add_argument("--html", default="report.html", help="page to write (default report.html)")
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="also log tables and timelines to this W&B project, offline unless logged in"
    )
    parser.add_argument("--json", dest="result_file", help="write the result to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write one HTML page, with nothing outside it, about one or several runs side by side."""
    from megakv.tracking.config import check_project
    from megakv.tracking.files import check_outputs, write_whole
    from megakv.tracking.page import page, read_runs

    check_project(arguments.wandb)
    check_outputs({"--html": arguments.html}, {path: path for path in arguments.reports})
    runs = read_runs(arguments.reports)
    write_whole(arguments.html, page(runs).encode())
    written: dict[str, Any] = {"html": arguments.html, "runs": [name for name, _ in runs]}
    if arguments.wandb:
        from megakv.tracking.config import WandbTrackingConfig
        from megakv.tracking.tracker import log_runs

        project = WandbTrackingConfig(enabled=True, project=arguments.wandb, name="report")
        written["wandb"] = str(log_runs(runs, project))
    return written
