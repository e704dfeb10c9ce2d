"""Everything that `runahead.py` has measured so far, as tables, charts and one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from .parts import Parts
from .report import publish
from .runahead_charts import draw_all
from .runahead_plan import profile_path
from .runahead_predictions import with_predictions
from .runahead_summary import summarise
from .runahead_tables import show

SEARCH = "search-"


def report(arguments: argparse.Namespace, parts: Parts, skipped: Mapping[str, str]) -> int:
    """Print the tables of all cells that were kept; write the JSON and the charts where they are asked for."""
    cells = [part for name in parts.names("r") if (part := parts.read(name)) is not None]
    if not cells:
        print("nothing was measured", file=sys.stderr)
        return 1
    searches = {name.removeprefix(SEARCH): found for name in parts.names(SEARCH) if (found := parts.read(name))}
    rows = with_predictions(
        [row for cell in cells for row in cell["rows"]],
        arguments,
        lambda group: profile_path(group, arguments.profile, parts.folder),
    )
    summary = {**summarise(rows), "searches": searches, "not_measured": dict(skipped)}
    show(summary)
    publish(
        arguments,
        benchmark="runahead",
        machine=cells[0]["machine"],
        rows=rows,
        summary=summary,
        draw=lambda path: draw_all(path, arguments, summary, searches),
    )
    return 0
