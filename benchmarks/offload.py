"""Decoding with keys and values, and weights, off the accelerator: KVPR and what goes beyond it, against others.

In the form of the paper's Tables 2 to 5 and Figures 6 to 10, 12 and 13. Without --gpu the accelerator is the
processor, and its link is EMULATED: a thread makes real copies, paced to each bandwidth. Every case is kept when it is
measured: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.launch import quiet
from harness.offload_plan import LARGE, PARTS, SMALL, Case, cases, identity, plans
from harness.options import DTYPES, Options

if TYPE_CHECKING:
    import torch
    from harness.offload_case import CaseBench
    from harness.publish import Parts

LEAST_NEW = 6


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "fewer and shorter cases: at most five minutes")
    options.add("--gpu", False, f"on a CUDA GPU, over its own link, models of {', '.join(LARGE)}, fp16")
    options.add("--only", None, f"parts, of {', '.join(PARTS)} (default: all)", kind=str)
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
    options.add("--chunk", {"": 128, "gpu": 4096}, "tokens of a chunk of activations, of all sequences")
    options.add("--repeats", {"": 40, "quick": 8, "gpu": 1}, "timed rounds of a case at most")
    options.add("--least-repeats", {"": 2, "gpu": 1}, "rounds at least")
    text = "no further round begins in a case after them"
    options.add("--cell-seconds", {"": 40.0, "quick": 4.0, "gpu": 0.0}, text, least=0)
    cores = os.sched_getaffinity(0)
    options.add("--threads", {"": 1, "gpu": max(1, len(cores) - 2)}, "threads that compute")
    text = "of the thread that computes, and of the one that attends"
    options.add_argument("--cores", nargs=2, type=int, metavar="CORE", help=text)
    options.add("--parts", None, "folder where cases are kept (default: FILE with suffix .parts)", kind=str)
    arguments = options.parse(argv)
    own = tuple(plans(arguments))
    arguments.only = options.some_of("--only", arguments.only or ",".join(own), own)
    if arguments.gpu and arguments.links is not None:
        options.error("--links emulates a link; with --gpu the GPU's own is measured")
    arguments.links = arguments.links or [None]
    if arguments.shapes:
        arguments.shapes = options.some_of("--shapes", arguments.shapes, LARGE if arguments.gpu else SMALL)
    pair = set(arguments.cores or ())
    if arguments.cores and (arguments.gpu or len(pair) < 2 or not pair < cores):
        allowed = f"two of {sorted(cores)}, of which one is left for links"
        options.error(f"--cores {arguments.cores}: allowed, without --gpu: {allowed}")
    if arguments.new and arguments.new[0] < LEAST_NEW:
        options.error(f"--new {arguments.new[0]}: allowed: {LEAST_NEW} or more, as the first steps are left out")
    if arguments.heads % 4 or arguments.hidden % (2 * arguments.heads):
        options.error(f"--heads {arguments.heads}: allowed: multiples of 4 of which --hidden is an even multiple")
    for case in cases(arguments):
        group = arguments.group or plans(arguments)[case.part].group
        if group and case.batch % group:
            options.error(f"--batch {case.batch}: allowed for part {case.part}: multiples of --group {group}")
    return arguments


def measure(
    arguments: argparse.Namespace, case: Case, device: torch.device, rate_gb_s: float, parts: Parts
) -> list[dict[str, Any]]:
    from harness.offload_case import CaseBench

    if arguments.gpu:
        return one_by_one(arguments, case, CaseBench(arguments, case, device, rate_gb_s), parts)
    least, most = arguments.least_repeats, max(arguments.repeats, arguments.least_repeats)
    bench = CaseBench(arguments, case, device, rate_gb_s)
    return bench.measure(least=least, most=most, budget_s=arguments.cell_seconds)


def one_by_one(arguments: argparse.Namespace, case: Case, bench: CaseBench, parts: Parts) -> list[dict[str, Any]]:
    """The rows of a case whose methods cannot stand side by side: each is kept when it is measured."""
    rows = []
    for method in case.methods:
        name = f"{case.name}-{method}"
        kept = parts.read(name)
        if kept is None or len(kept["row"]["seconds"]) < arguments.least_repeats:
            kept = {"row": bench.measure_alone(method, arguments.least_repeats)}
            parts.write(name, kept)
        rows.append(kept["row"])
    return rows


def measure_all(arguments: argparse.Namespace, parts: Parts) -> None:
    import torch
    from harness.offloads import pinned_copy_gb_s
    from harness.publish import describe_machine
    from tqdm import tqdm

    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if arguments.gpu else "cpu")
    rate = 0.0
    if arguments.gpu:
        # The link is measured once for all cases that are kept together.
        kept = parts.read("rate") or {"gb_s": round(pinned_copy_gb_s(device), 2)}
        parts.write("rate", kept)
        rate = kept["gb_s"]
    for case in (bar := tqdm(cases(arguments), unit="case")):
        bar.set_postfix_str(case.name)
        kept = parts.read(case.name)
        if kept is None or len(kept["rows"][0]["seconds"]) < arguments.least_repeats:
            rows = measure(arguments, case, device, case.link_gb_s or rate, parts)
            parts.write(case.name, {"rows": rows, "machine": machine})


def report(arguments: argparse.Namespace, parts: Parts) -> int:
    """Print the tables of all cases that were kept; write the JSON and the charts where they are asked for."""
    from harness.offload_report import OffloadCharts, show, tables
    from harness.offload_summary import in_order, summarise
    from harness.publish import publish

    kept = [part for name in parts.names() if "rows" in (part := parts.read(name) or {})]
    rows = in_order(row for part in kept for row in part["rows"] if row["part"] in PARTS)
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 1
    measured = {row["part"] for row in rows}
    summary = summarise(rows, exact_type=arguments.dtype == "fp32")
    made = tables(rows)
    summary["tables"] = [{"title": title, "lines": lines} for title, lines in made]
    summary["not_measured"] = {part: text for part, text in PARTS.items() if part not in measured}
    show(made, summary)
    charts = OffloadCharts(f"{arguments.dtype}, {arguments.threads} thread(s)").all(rows)
    publish(arguments, "offload", kept[0]["machine"], rows, summary, charts)
    return 1 if summary["tokens_equal"] is False else 0


def run(arguments: argparse.Namespace) -> int:
    import torch
    from harness.publish import Parts
    from harness.world import alone

    from megakv.errors import MegaKVError

    if arguments.gpu and not torch.cuda.is_available():
        print("--gpu: this machine has no CUDA GPU; without it, the link is emulated", file=sys.stderr)
        return 2
    quiet()
    with tempfile.TemporaryDirectory() as spare, alone():
        beside = Path(arguments.json).with_suffix(".parts") if arguments.json else Path(spare)
        parts = Parts(Path(arguments.parts or beside), identity(arguments))
        try:
            measure_all(arguments, parts)
        except (MegaKVError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return report(arguments, parts)


if __name__ == "__main__":
    sys.exit(run(parse_arguments()))
