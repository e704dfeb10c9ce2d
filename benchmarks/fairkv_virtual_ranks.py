"""FairKV on more tensor-parallel ranks than a machine has cores for: the kernels of every rank are timed alone, one
after the other, and put together by the cost model, which adds the sums over ranks and what a layer has besides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from harness.launch import Rows, Summary, benchmark_alone
from harness.options import CHOSEN, CONTIGUOUS, MAPPED, Options, check_memory

USABLE = 0.5  # Share of the free memory that caches may take
SUMS = "benchmarks/results/fairkv.profiles/4.json"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.numbers("--tp", "4,8", "tensor-parallel degrees")
    options.numbers("--batches", "1,8", "sequences decoded together")
    options.numbers("--kept", "1K,8K", "mean tokens that a KV head keeps")
    methods = (*MAPPED, CHOSEN)
    options.names("--methods", methods, "nodp,dp1,split1,dp4,split4,time", "beside contiguous heads")
    options.add("--layers", 4, "layers of a step, each with budgets of its own")
    options.add("--repeats", 9, "timed rounds of all ranks of all methods")
    options.add("--threads", 1, "threads on the CPU")
    options.add(
        "--sums", SUMS, "profile of a machine on whose ranks sums were measured; also from this checkout's root"
    )
    # Those of Llama 3.1 8B.
    options.kept_heads(group=4)
    options.add("--hidden", 4096, "hidden size")
    options.add("--intermediate", 14336, "width of the MLP")
    options.profile(20.0)
    arguments = options.parse(argv)
    widest = arguments.tp[-1]
    if widest > arguments.kv_heads or any(arguments.intermediate % tp for tp in arguments.tp):
        options.error(
            f"--tp {','.join(map(str, arguments.tp))}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of "
            f"--intermediate {arguments.intermediate}"
        )
    if not arguments.profile_seconds:
        options.error("--profile-seconds 0: the cost model puts the ranks together: allowed: more than 0")
    return arguments


def run(arguments: argparse.Namespace) -> tuple[Rows, Summary, list[Any]]:
    from harness.virtual_steps import VirtualMachine, chart, show_steps, summarise
    from tqdm import tqdm

    methods = [CONTIGUOUS, *arguments.methods]
    tokens = arguments.batches[-1] * arguments.kv_heads * arguments.kept[-1] * len(methods)
    named = f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]}"
    check_memory(tokens * 2 * arguments.head_dim * 4, USABLE * psutil.virtual_memory().available, named)
    given = Path(arguments.sums)
    machine = VirtualMachine(arguments, given if given.exists() else Path(__file__).parents[1] / given)
    cases = [(tp, batch, kept) for tp in arguments.tp for batch in arguments.batches for kept in arguments.kept]
    rows: Rows = []
    for tp, batch, kept in (bar := tqdm(cases, unit="regime")):
        bar.set_postfix_str(f"TP {tp}, {batch} x {kept} kept")
        rows += machine.measure(tp, batch, kept, methods)
    summary = summarise(rows)
    show_steps(rows, summary)
    return rows, summary, [chart(summary, f"hidden {arguments.hidden}")]


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_virtual_ranks", parse_arguments(), run))
