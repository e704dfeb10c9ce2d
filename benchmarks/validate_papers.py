"""The cost model's predictions beside the numbers that the four papers published.

Of every table, cells are taken in turn: one half serves to fit a few physical constants of the paper's machine
(efficiencies, links, overheads), through the same functions that plan MegaKV's own runs; the other half judges them.
Nothing is measured: the results are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.charts import predicted_over
from harness.options import Options
from harness.publish import describe_machine, publish, show
from papers.published import load_tables
from papers.validation import rows_of, summarise, validate


def show_all(summary: Mapping[str, Any]) -> None:
    """Print errors by table, headlines, and pairs with the wrong winner."""
    errors = "fitted_median_error:% held_out_median_error:% held_out_largest_error:%"
    show([{"table": name, **table} for name, table in summary["tables"].items()],
         f"table cells {errors} right_winners pairs")  # fmt: skip
    headlines = [{"headline": name, **entry} for name, entry in summary["headlines"].items()]
    show(headlines, "headline published predicted error:% within_bar use")
    winners = summary["winners"]
    print(
        f"\nheld out: median error {summary['held_out_median_error']:.1%} over {summary['held_out_cells']} cells; "
        f"right winner in {winners['right_share']:.1%} of {winners['pairs']} pairs that differ by more than 3%"
    )
    for pair in winners["wrong"]:
        print(f"  wrong: {pair['table']}: {pair['cells']}")


def main(argv: Sequence[str] | None = None) -> int:
    options = Options(__doc__)
    options.output()
    arguments, machine = options.parse(argv), describe_machine()
    found = validate(load_tables())
    rows, summary = rows_of(found), summarise(found)
    show_all(summary)
    known = [row for row in rows if row["use"] != "reported"]
    words = {"title": "Cost model against four papers", "x_label": "published (seconds, tokens/s or share)"}
    chart = predicted_over(known, "published", "{paper}, {use}", **words)
    publish(arguments, "validate_papers", machine, rows, summary, [chart])
    return 0


if __name__ == "__main__":
    sys.exit(main())
