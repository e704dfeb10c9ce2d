"""Decoding with keys and values, and weights, off the accelerator: KVPR and what goes beyond it, against others.

In the form of the paper's Tables 2 to 5 and Figures 6, 7, 9, 12 and 13. Without --gpu the accelerator is the
processor, and its link is EMULATED: a thread makes real copies, paced to each bandwidth.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from harness.launch import Found, Rows, benchmark_alone
from harness.offload.case import CaseBench
from harness.offload.decoder import pinned_copy_gb_s
from harness.offload.plan import LARGE, PARTS, SMALL, cases, plans
from harness.offload.report import charts, in_order, show_tables, summarise
from harness.options import DTYPES, Options
from harness.publish import show_summary
from harness.world import alone
from tqdm import tqdm

LEAST_NEW = 6


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "fewer and shorter cases: at most five minutes")
    options.add("--gpu", False, f"on a CUDA GPU, over its own link, models of {', '.join(LARGE)}, fp16")
    options.add("--only", None, f"parts, of {', '.join(PARTS)} (default: all)", kind=str)
    options.add(
        "--methods", None, "methods instead of each part's own, of which it measures those that it has", kind=str
    )
    text = "bandwidths of the emulated link in GB/s"
    options.numbers("--links", {"": "0.1,0.2,0.4", "quick": "0.2,0.4", "gpu": None}, text, kind=float)
    options.add("--shapes", None, "models instead of each part's own", kind=str)
    options.numbers("--batch", None, "sequences instead of each part's own")
    options.numbers("--prompt", None, "tokens of each prompt instead of each part's own")
    options.numbers("--new", None, "tokens to generate instead of each part's own")
    options.add("--group", None, "sequences of a group, column-by-column, instead of each part's own", kind=int)
    options.add("--layers", {"": 4, "gpu": None}, "decoder layers (--gpu: the model's own)")
    options.add("--hidden", 512, "hidden size")
    options.add("--heads", 8, "query heads")
    options.choice("--dtype", DTYPES, {"": "fp32", "gpu": "fp16"}, "of weights and activations")
    # What costs a processor little takes a GPU less time than Python needs to start it.
    options.add("--chunk", {"": 128, "gpu": 16384}, "tokens of a chunk of activations, of all sequences")
    options.add("--repeats", {"": 40, "quick": 8, "gpu": 1}, "timed rounds of a case at most")
    options.add("--least-repeats", {"": 2, "gpu": 1}, "rounds at least")
    text = "no further round begins in a case after them"
    options.add("--cell-seconds", {"": 40.0, "quick": 4.0, "gpu": 0.0}, text, least=0)
    cores = len(os.sched_getaffinity(0))
    options.add("--threads", {"": 1, "gpu": max(1, cores - 2)}, "threads that compute")
    arguments = options.parse(argv)
    arguments.device = "cuda" if arguments.gpu else "cpu"
    own_plans = plans(arguments)
    own = tuple(own_plans)
    arguments.only = options.some_of("--only", arguments.only or ",".join(own), own)
    if arguments.methods:
        known = {name for part in arguments.only for name in own_plans[part].methods}
        arguments.methods = options.some_of("--methods", arguments.methods, sorted(known))
    if arguments.gpu and arguments.links is not None:
        options.error("--links emulates a link; with --gpu the GPU's own is measured")
    arguments.links = arguments.links or [None]
    if arguments.shapes:
        arguments.shapes = options.some_of("--shapes", arguments.shapes, LARGE if arguments.gpu else SMALL)
    if arguments.new and arguments.new[0] < LEAST_NEW:
        options.error(f"--new {arguments.new[0]}: allowed: {LEAST_NEW} or more, as the first steps are left out")
    if arguments.heads % 4 or arguments.hidden % (2 * arguments.heads):
        options.error(f"--heads {arguments.heads}: allowed: multiples of 4 of which --hidden is an even multiple")
    for case in cases(arguments):
        group = arguments.group or plans(arguments)[case.part].group
        if group and case.batch % group:
            options.error(f"--batch {case.batch}: allowed for part {case.part}: multiples of --group {group}")
    return arguments


def measure_all(arguments: argparse.Namespace) -> Rows:
    device, rows = torch.device(arguments.device), []
    rate = round(pinned_copy_gb_s(device), 2) if arguments.gpu else 0.0
    least, most = arguments.least_repeats, max(arguments.repeats, arguments.least_repeats)
    for case in (bar := tqdm(cases(arguments), unit="case")):
        bar.set_postfix_str(case.name)
        bench = CaseBench(arguments, case, device, case.link_gb_s or rate)
        rows += bench.measure(least=least, most=most, budget_s=arguments.cell_seconds)
    return rows


def run(arguments: argparse.Namespace) -> Found:
    with alone():
        rows: Any = in_order(measure_all(arguments))
    summary = summarise(rows, exact_type=arguments.dtype == "fp32")
    measured = {row["part"] for row in rows}
    summary["not_measured"] = {part: text for part, text in PARTS.items() if part not in measured}
    show_tables(rows)
    shown = ("tokens_equal", "lossy_token_agreement", "auto_over_best", "prediction_median_error", "predictions")
    show_summary(summary, *shown)
    return rows, summary, charts(f"{arguments.dtype}, {arguments.threads} thread(s)", rows)


if __name__ == "__main__":
    sys.exit(benchmark_alone("offload", parse_arguments(), run))
