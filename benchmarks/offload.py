"""Decoding with keys and values, and weights, off the accelerator: KVPR and what goes beyond it, against others.

In the form of the paper's Tables 2 to 5 and Figures 6 to 10 and 12 to 14. Without --gpu the accelerator is the
processor, and its link is EMULATED: a thread makes real copies, paced to each bandwidth. Every case is kept when it is
measured: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arguments import DTYPES, check_positive, method_names, whole_numbers
from harness.offload_plan import LARGE, PARTS, SMALL, Case, cases, identity, plans, shape_of

if TYPE_CHECKING:
    import torch
    from harness.parts import Parts

LINKS, QUICK_LINKS = "0.1,0.2,0.4", "0.2,0.4"
FULL = {"least_repeats": 2, "repeats": 40, "cell_seconds": 40.0}
QUICK = {"least_repeats": 2, "repeats": 8, "cell_seconds": 4.0}
ON_GPU = {"least_repeats": 1, "repeats": 1, "cell_seconds": 0.0}
CHUNK, GPU_CHUNK = 128, 4096
"""Tokens of all sequences: what costs a processor little takes a GPU less time than Python needs to start it."""
LEAST_NEW = 6


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the results here, and charts (PNG) beside it")
    add("--quick", action="store_true", help="fewer and shorter cases: at most five minutes")
    add("--gpu", action="store_true", help=f"on a CUDA GPU, over its own link, models of {', '.join(LARGE)}, fp16")
    add("--only", help=f"parts, of {', '.join(PARTS)} (default: all)")
    add("--links", help=f"bandwidths of the emulated link in GB/s (default {LINKS}; --quick: {QUICK_LINKS})")
    add("--shapes", help="models instead of each part's own")
    add("--batch", dest="batches", help="sequences instead of each part's own")
    add("--prompt", dest="prompts", help="tokens of each prompt instead of each part's own")
    add("--new", help="tokens to generate instead of each part's own")
    add("--group", type=int, help="sequences of a group, column-by-column, instead of each part's own")
    add("--processes", help="of that part (default 1,2,4; --quick: 1,2)")
    add("--layers", type=int, help="decoder layers (default 4; --gpu: the model's own)")
    add("--hidden", type=int, default=512, help="hidden size (default 512)")
    add("--heads", type=int, default=8, help="query heads (default 8)")
    add("--dtype", choices=DTYPES, help="of weights and activations (default fp32; --gpu: fp16)")
    add("--chunk", type=int, help=f"tokens of a chunk of activations (default {CHUNK}; --gpu: {GPU_CHUNK})")
    add("--repeats", type=int, help="timed rounds of a case at most (default 40; --quick: 8)")
    add("--least-repeats", type=int, help="rounds at least (default 2; --gpu: 1, and no more than these)")
    add("--cell-seconds", type=float, help="no further round begins in a case after them (default 40; --quick: 4)")
    add("--threads", type=int, help="threads that compute (default 1; --gpu: all cores but two)")
    add("--cores", nargs=2, type=int, metavar="CORE", help="of the thread that computes, and of the one that attends")
    add("--parts", metavar="FOLDER", help="where cases are kept (default: FILE with suffix .parts)")
    arguments = parser.parse_args(argv)
    for name, value in (ON_GPU if arguments.gpu else QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.chunk is None:
        arguments.chunk = GPU_CHUNK if arguments.gpu else CHUNK
    if arguments.threads is None:
        arguments.threads = max(1, len(os.sched_getaffinity(0)) - 2) if arguments.gpu else 1
    arguments.dtype = arguments.dtype or ("fp16" if arguments.gpu else "fp32")
    if not arguments.gpu:
        arguments.layers = 4 if arguments.layers is None else arguments.layers
    own = tuple(plans(arguments))
    arguments.only = method_names(parser, arguments.only or ",".join(own), own, name="--only")
    arguments.links = _links(parser, arguments)
    if arguments.shapes:
        arguments.shapes = method_names(parser, arguments.shapes, LARGE if arguments.gpu else SMALL, name="--shapes")
    for name in ("batches", "prompts", "new", "processes"):
        if (text := getattr(arguments, name)) is not None:
            option = {"batches": "--batch", "prompts": "--prompt"}.get(name, f"--{name}")
            setattr(arguments, name, whole_numbers(parser, option, text))
    _check(parser, arguments)
    return arguments


def _links(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[float | None]:
    if arguments.gpu:
        if arguments.links is not None:
            parser.error(f"--links {arguments.links}: emulates a link; with --gpu the GPU's own is measured")
        return [None]
    text = arguments.links or (QUICK_LINKS if arguments.quick else LINKS)
    try:
        links = sorted(float(link) for link in text.split(","))
    except ValueError:
        links = [0.0]
    if links[0] <= 0:
        parser.error(f"--links {text}: allowed: numbers above 0, separated by commas")
    return [*links]


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    names = ("hidden", "heads", "chunk", "threads", "repeats", "least-repeats", "cell-seconds")
    cores = set(arguments.cores or ())
    if arguments.cores and (arguments.gpu or len(cores) < 2 or not cores < os.sched_getaffinity(0)):
        own = sorted(os.sched_getaffinity(0))
        parser.error(f"--cores {arguments.cores}: allowed, without --gpu: two of {own}, of which one is left for links")
    optional = [name for name in ("layers", "group") if getattr(arguments, name) is not None]
    check_positive(parser, arguments, *names, *optional)
    if arguments.new and arguments.new[0] < LEAST_NEW:
        parser.error(f"--new {arguments.new[0]}: allowed: {LEAST_NEW} or more, as the first steps are left out")
    if arguments.heads % 4 or arguments.hidden % (2 * arguments.heads):
        parser.error(f"--heads {arguments.heads}: allowed: multiples of 4 of which --hidden is an even multiple")
    for case in cases(arguments):
        group = arguments.group or plans(arguments)[case.part].group
        if group and case.batch % group:
            parser.error(f"--batch {case.batch}: allowed for part {case.part}: multiples of --group {group}")


def measure(
    arguments: argparse.Namespace, case: Case, device: torch.device, rate_gb_s: float, parts: Parts
) -> list[dict[str, Any]]:
    """The rows of one case."""
    if arguments.gpu:
        return one_by_one(arguments, case, device, rate_gb_s, parts)
    if case.part == "processes":
        from harness.offload_processes import measure_processes

        return measure_processes(arguments, case)
    from harness.offload_cells import CaseBench

    bench = CaseBench(arguments, case, device, rate_gb_s)
    return bench.measure(
        least=arguments.least_repeats,
        most=max(arguments.repeats, arguments.least_repeats),
        budget_s=arguments.cell_seconds,
    )


def one_by_one(
    arguments: argparse.Namespace, case: Case, device: torch.device, rate_gb_s: float, parts: Parts
) -> list[dict[str, Any]]:
    """The rows of a case whose methods cannot stand side by side: each is kept when it is measured."""
    from harness.offload_cells import CaseBench

    bench: CaseBench | None = None
    rows = []
    for method in case.methods:
        name = f"{case.name}-{method}"
        kept = parts.read(name)
        if kept is None or len(kept["row"]["seconds"]) < arguments.least_repeats:
            bench = bench or CaseBench(arguments, case, device, rate_gb_s)
            kept = {"row": bench.measure_alone(method, arguments.least_repeats)}
            parts.write(name, kept)
        rows.append(kept["row"])
    return rows


def run(arguments: argparse.Namespace, parts: Parts) -> None:
    """Measure all cases that are not kept yet."""
    import torch
    from harness.report import describe_machine
    from tqdm import tqdm

    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if arguments.gpu else "cpu")
    rate = measured_rate(parts, device) if arguments.gpu else None
    for case in (bar := tqdm(cases(arguments), unit="case")):
        bar.set_postfix_str(case.name)
        kept = parts.read(case.name)
        if kept is not None and len(kept["rows"][0]["seconds"]) >= arguments.least_repeats:
            continue
        rows = measure(arguments, case, device, case.link_gb_s or rate or 0.0, parts)
        parts.write(case.name, {"rows": rows, "machine": machine})


def measured_rate(parts: Parts, device: torch.device) -> float:
    """GB/s of the accelerator's link, measured once for all cases that are kept together."""
    from harness.offload_gpu import pinned_copy_gb_s

    kept = parts.read("rate") or {"gb_s": round(pinned_copy_gb_s(device), 2)}
    parts.write("rate", kept)
    return float(kept["gb_s"])


def report(arguments: argparse.Namespace, parts: Parts) -> int:
    """Print the tables of all cases that were kept; write the JSON and the charts where they are asked for."""
    from harness.models import DTYPES as TYPES
    from harness.offload_charts import Charts
    from harness.offload_summary import in_order, summarise
    from harness.offload_tables import show, tables
    from harness.report import publish

    kept = [part for name in parts.names() if "rows" in (part := parts.read(name) or {})]
    rows = in_order(row for part in kept for row in part["rows"])
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 1
    measured = {row["part"] for row in rows}
    summary = summarise(rows, exact_type=arguments.dtype == "fp32")
    shapes = {model: shape_of(model, arguments) for model in {row["shape"] for row in rows}}
    made = tables(rows, shapes, TYPES[arguments.dtype].itemsize)
    summary["tables"] = [{"title": table.title, "lines": table.lines} for table in made]
    summary["not_measured"] = {part: text for part, text in PARTS.items() if part not in measured}
    show(made, summary)
    charts = Charts(Path(arguments.json or ""), dtype=arguments.dtype, threads=arguments.threads)
    publish(
        arguments,
        benchmark="offload",
        machine=kept[0]["machine"],
        rows=rows,
        summary=summary,
        draw=lambda _: charts.draw(rows),
    )
    return 1 if summary["tokens_equal"] is False else 0


def main() -> int:
    """Entry of the process that measures; only part `processes` starts others."""
    arguments = parse_arguments()
    import tempfile

    import torch

    if arguments.gpu and not torch.cuda.is_available():
        print("--gpu: this machine has no CUDA GPU; without it, the link is emulated", file=sys.stderr)
        return 2
    from harness.parts import Parts
    from harness.world import alone

    from megakv.errors import MegaKVError
    from megakv.launcher.process import quiet_libraries

    quiet_libraries()
    with tempfile.TemporaryDirectory() as spare, alone():
        beside = Path(arguments.json).with_suffix(".parts") if arguments.json else Path(spare)
        parts = Parts(Path(arguments.parts or beside), identity(arguments))
        try:
            run(arguments, parts)
        except (MegaKVError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return report(arguments, parts)


if __name__ == "__main__":
    sys.exit(main())
