"""The cost model's predictions beside the numbers that the four papers published.

Of every table, cells are taken in turn: one half serves to fit a few physical constants of the paper's machine
(efficiencies, links, overheads), through the same functions that plan MegaKV's own runs; the other half judges them.
Nothing is measured: the results are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.charts import Chart, predicted_over
from harness.options import Options
from harness.publish import describe_machine, publish, show_table
from papers.published import load_tables
from papers.validation import rows_of, summarise, validate

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def show(summary: Mapping[str, Any]) -> None:
    """Print errors by table, headlines, and pairs with the wrong winner."""
    lines = [["table", "cells", "fitted: median error", "held out", "largest", "right winners"]]
    for name, table in summary["tables"].items():
        errors = [_share(table[f"{use}_error"]) for use in ("fitted_median", "held_out_median", "held_out_largest")]
        lines.append([name, str(table["cells"]), *errors, f"{table['right_winners']} of {table['pairs']}"])
    show_table("", lines)
    lines = [["headline", "published", "predicted", "error", "use"]]
    for name, entry in summary["headlines"].items():
        mark = "" if entry["within_bar"] else " beyond 15%"
        error = f"{entry['error']:+.1%}{mark}"
        lines.append([name, f"{entry['published']:.4g}", f"{entry['predicted']:.4g}", error, entry["use"]])
    show_table("", lines)
    winners = summary["winners"]
    print(
        f"\nheld out: median error {summary['held_out_median_error']:.1%} over {summary['held_out_cells']} cells; "
        f"right winner in {winners['right_share']:.1%} of {winners['pairs']} pairs that differ by more than 3%"
    )
    for pair in winners["wrong"]:
        print(f"  wrong: {pair['table']}: {pair['cells']}")
    for group, names in summary["constants_at_bounds"].items():
        if names:
            print(f"at a bound of the search: {', '.join(names)} of {group}")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Predicted over published, by paper; cells that were fitted are hollow."""
    points, looks = {}, {}
    for colour, paper in zip(COLOURS, dict.fromkeys(row["paper"] for row in rows), strict=True):
        for use, fill in (("fitted", "none"), ("held_out", colour)):
            chosen = [row for row in rows if row["paper"] == paper and row["use"] == use]
            label = f"{paper}, {use.replace('_', ' ')}"
            points[label] = [row["published"] for row in chosen], [row["predicted"] for row in chosen]
            looks[label] = {"facecolors": fill, "edgecolors": colour}
    labels = {"x_label": "published (seconds, tokens/s or share)", "y_label": "predicted"}
    return predicted_over(points, title="Cost model against four papers", looks=looks, **labels)


def main(argv: Sequence[str] | None = None) -> int:
    options = Options(__doc__)
    options.output()
    arguments, machine = options.parse(argv), describe_machine()
    tables = load_tables()
    found = validate(tables)
    rows, summary = rows_of(tables, found), summarise(tables, found)
    show(summary)
    publish(arguments, "validate_papers", machine, rows, summary, [chart(rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
