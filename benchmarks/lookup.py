"""Prompt lookup: how many steps, and how much time, answers take that quote a document, and such that repeat nothing.

Answers of SmolLM2-135M-Instruct about the document of its recipe, with and without lookup in turns; the link to an
accelerator is EMULATED.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.launch import Rows, Summary, benchmark_alone
from harness.limits_lookup import PLACES
from harness.options import DTYPES, Options


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "short answers and one round: minutes")
    options.add("--model", None, "folder of a model (default: that of recipes/smollm2)", kind=str)
    options.names("--places", PLACES, ",".join(PLACES), "where keys and values lie")
    options.add("--link", 0.1, "GB/s of the emulated link")
    options.choice("--dtype", DTYPES, "fp32", "of weights, keys and values")
    options.add("--threads", 1, "cores that compute")
    options.add("--document", {"": 1500, "quick": 600}, "tokens of the document")
    options.add("--new", {"": 96, "quick": 48}, "tokens of an answer")
    options.add("--lookup", 10, "tokens to look up")
    options.add("--repeats", {"": 5, "quick": 1}, "timed rounds")
    return options.parse(argv)


def run(arguments: argparse.Namespace) -> tuple[Rows, Summary, list[Any]]:
    from harness import limits_lookup
    from harness.publish import show_summary
    from harness.world import alone

    with alone():
        rows = limits_lookup.measure(arguments)
    summary, charts = limits_lookup.report(rows)
    show_summary(summary, "lookup")
    return rows, summary, charts


if __name__ == "__main__":
    sys.exit(benchmark_alone("lookup", parse_arguments(), run))
