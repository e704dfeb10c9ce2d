"""Decode attention of a layer by batch and kept tokens, and the latency model that FairKV fits to it (Section 3.2)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.arguments import DTYPES, check_positive, whole_numbers

BATCHES = {"cpu": "1,2,4,8,16", "cuda": "32,64,128,256,512"}
KEPT = "128,256,512,1024"
USABLE = 0.6
"""Share of the free memory that the caches may take."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results here, and charts (PNG) beside it")
    parser.add_argument("--device", choices=tuple(BATCHES), default="cpu", help="where to measure (default cpu)")
    parser.add_argument("--batches", help=f"sequences decoded together (default {BATCHES['cpu']}; cuda: the paper's)")
    parser.add_argument(
        "--kept", default=KEPT, help="mean tokens that a KV head keeps (default %(default)s, the paper's)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds of all cells (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (default 1)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of the layer (default 8)")
    parser.add_argument("--group", type=int, default=8, help="query heads to a KV head (default 8, Llama 3 70B)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of queries, keys, values (default bf16)")
    parser.add_argument("--tp", type=int, default=4, help="ranks of the step that is predicted (default 4)")
    parser.add_argument("--layers", type=int, default=8, help="its layers (default 8)")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the heads' log-normal budgets (default 0.8)")
    parser.add_argument("--seed", type=int, default=222, help="of the budgets (default 222)")
    arguments = parser.parse_args(argv)
    arguments.batches = whole_numbers(parser, "--batches", arguments.batches or BATCHES[arguments.device])
    arguments.kept = whole_numbers(parser, "--kept", arguments.kept)
    for name in ("batches", "kept"):
        if len(getattr(arguments, name)) < 2:
            parser.error(f"--{name} {getattr(arguments, name)[0]}: allowed: two or more, a line goes through them")
    check_positive(parser, arguments, "repeats", "threads", "kv-heads", "group", "head-dim", "tp", "layers", "sigma")
    if arguments.tp > arguments.kv_heads:
        parser.error(f"--tp {arguments.tp}: allowed: up to --kv-heads {arguments.kv_heads}, a head for each rank")
    return arguments


def check_memory(arguments: argparse.Namespace, token_bytes: int) -> None:
    """Refuse caches that do not fit beside each other: cells are measured in turn, so all are there."""
    import psutil
    import torch

    from megakv.errors import MegaKVError

    on_cpu = arguments.device == "cpu"
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    needed = sum(arguments.batches) * sum(arguments.kept) * arguments.kv_heads * token_bytes
    if needed > USABLE * free:
        raise MegaKVError(
            f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]} need {needed / 2**30:.1f} "
            f"GiB; {USABLE:.0%} of {free / 2**30:.1f} GiB are taken at most: ask for fewer"
        )


def run(arguments: argparse.Namespace) -> None:
    """Measure, fit, predict and report."""
    import torch
    from harness.latency_grid import draw, measure_grid, measure_steps, show, summarise
    from harness.models import DTYPES as TYPES
    from harness.ragged_heads import HeadShape
    from harness.report import describe_machine, publish
    from harness.virtual_ranks import Bench

    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, TYPES[arguments.dtype], device)
    check_memory(arguments, shape.token_bytes)
    bench = Bench(device, arguments.repeats)
    rows: list[dict[str, Any]] = measure_grid(arguments, bench, shape)
    rows += measure_steps(arguments, bench, shape)
    summary = summarise(rows, arguments.kv_heads)
    show(rows, summary)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {arguments.threads} thread(s)"
    heads = f"{arguments.kv_heads} KV heads of {arguments.group} query heads"
    subtitle = f"{name}, {heads}, {arguments.dtype}; dashed: fitted"
    publish(
        arguments,
        benchmark="fairkv_latency",
        machine=machine,
        rows=rows,
        summary=summary,
        draw=lambda path: draw(path, subtitle, rows, summary),
    )


def main() -> int:
    """Entry of the only process: one rank at a time is enough."""
    from harness.single_process import run_single_process

    return run_single_process(parse_arguments(), run, on_cpu="measures the CPU")


if __name__ == "__main__":
    sys.exit(main())
