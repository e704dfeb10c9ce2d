"""The cost model's predictions beside the numbers that the four papers published.

Of every table, cells are taken in turn: one half serves to fit a few physical constants of the paper's machine
(efficiencies, links, overheads), through the same functions that plan MegaKV's own runs; the other half judges them.
Nothing is measured: the results are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import align, describe_machine, publish
from papers.published import load_tables
from papers.validation import rows_of, summarise, validate

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results, and beside them a chart")
    return parser.parse_args(argv)


def show(summary: Mapping[str, Any]) -> None:
    """Print errors by table, headlines, and pairs with the wrong winner."""
    lines = [["table", "cells", "fitted: median error", "held out", "largest", "right winners"]]
    for name, table in summary["tables"].items():
        errors = [_share(table[f"{use}_error"]) for use in ("fitted_median", "held_out_median", "held_out_largest")]
        lines.append([name, str(table["cells"]), *errors, f"{table['right_winners']} of {table['pairs']}"])
    print(align(lines))
    lines = [["headline", "published", "predicted", "error", "use"]]
    for name, entry in summary["headlines"].items():
        mark = "" if entry["within_bar"] else " beyond 15%"
        error = f"{entry['error']:+.1%}{mark}"
        lines.append([name, f"{entry['published']:.4g}", f"{entry['predicted']:.4g}", error, entry["use"]])
    print("\n" + align(lines))
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


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Predicted over published, by paper; cells that were fitted are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7))
    for colour, paper in zip(COLOURS, dict.fromkeys(row["paper"] for row in rows), strict=True):
        for use, style in (("fitted", {"facecolors": "none"}), ("held_out", {"facecolors": colour})):
            chosen = [row for row in rows if row["paper"] == paper and row["use"] == use]
            axes.scatter(
                [row["published"] for row in chosen],
                [row["predicted"] for row in chosen],
                s=22,
                edgecolors=colour,
                label=f"{paper}, {use.replace('_', ' ')}",
                **style,
            )
    shown = [row for row in rows if row["use"] != "reported"]
    ends = [min(row["published"] for row in shown) / 1.3, max(row["published"] for row in shown) * 1.3]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="black", alpha=0.1)
    axes.set(xscale="log", yscale="log", xlabel="published (seconds, tokens/s or share)", ylabel="predicted")
    axes.set_title("Cost model against four papers; the band is 10%")
    axes.legend(fontsize=8)
    figure.tight_layout()
    chart = path.with_suffix(".png")
    figure.savefig(chart, dpi=120)
    pyplot.close(figure)
    return [chart]


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, judge, print and write."""
    arguments = parse_arguments(argv)
    machine = describe_machine()
    tables = load_tables()
    found = validate(tables)
    rows, summary = rows_of(tables, found), summarise(tables, found)
    show(summary)
    publish(
        arguments,
        benchmark="validate_papers",
        machine=machine,
        rows=rows,
        summary=summary,
        draw=lambda path: draw(path, rows),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
