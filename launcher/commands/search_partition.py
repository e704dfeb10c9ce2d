"""``megakv search-partition``."""

from __future__ import annotations

import argparse
import sys

from megakv.launcher.ranks import command_line, start_ranks
from megakv.launcher.search_arguments import add_search_arguments, check_search, journal_path, search_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--ranks", type=int, help="processes to start here (default: as many as the JSON wants)")
    add_search_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks, which search and write the table."""
    config = search_config(arguments, arguments.ranks)
    check_search(arguments, config)
    names = ["model", "config", "contexts", "table", "profile", "threads", "step", "patience", "repeats", "png"]
    words = command_line(arguments, names) + ["--full-grid"] * arguments.full_grid
    try:
        start_ranks("megakv.launcher.search", config.cp_size * config.tp_size, arguments.threads, words)
    except KeyboardInterrupt:
        print(
            f"megakv: stopped; what was measured is in {journal_path(arguments)}: the same command goes on from there",
            file=sys.stderr,
        )
        raise
