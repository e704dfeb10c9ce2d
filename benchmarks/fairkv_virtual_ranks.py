"""FairKV on more tensor-parallel ranks than a machine has cores for: the kernels of every rank are timed alone, one
after the other, and put together by the cost model, which adds the sums over ranks and what a layer has besides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import psutil
from harness.heads.division import CHOSEN, CONTIGUOUS, MAPPED, kept_heads
from harness.heads.machine import HOW, VirtualMachine, step_ratio, step_seconds
from harness.heads.report import by_regime, gains, show_gains
from harness.launch import Found, Rows, benchmark_alone
from harness.options import Options, check_memory
from tqdm import tqdm

USABLE = 0.5  # Share of the free memory that caches may take
SUMS = "benchmarks/results/fairkv.profiles/4.json"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.numbers("--tp", "4,8", "tensor-parallel degrees")
    options.numbers("--batches", "1,8", "sequences decoded together")
    options.numbers("--kept", "1K,8K", "mean tokens that a KV head keeps")
    options.names("--methods", (*MAPPED, CHOSEN), "nodp,dp1,split1,dp4,split4,time", "beside contiguous heads")
    options.add("--layers", 4, "layers of a step, each with budgets of its own")
    options.add("--repeats", 9, "timed rounds of all ranks of all methods")
    options.add("--threads", 1, "threads on the CPU")
    text = "profile of a machine on whose ranks sums were measured; also from this checkout's root"
    options.add("--sums", SUMS, text)
    # Those of Llama 3.1 8B.
    kept_heads(options, group=4)
    options.add("--hidden", 4096, "hidden size")
    options.add("--intermediate", 14336, "width of the MLP")
    options.profile(20.0)
    arguments = options.parse(argv)
    if arguments.tp[-1] > arguments.kv_heads or any(arguments.intermediate % tp for tp in arguments.tp):
        options.error(
            f"--tp {','.join(map(str, arguments.tp))}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of "
            f"--intermediate {arguments.intermediate}"
        )
    if not arguments.profile_seconds:
        options.error("--profile-seconds 0: the cost model puts the ranks together: allowed: more than 0")
    return arguments


def run(arguments: argparse.Namespace) -> Found:
    methods = [CONTIGUOUS, *arguments.methods]
    tokens = arguments.batches[-1] * arguments.kv_heads * arguments.kept[-1] * len(methods)
    named = f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]}"
    check_memory(tokens * 2 * arguments.head_dim * 4, USABLE * psutil.virtual_memory().available, named)
    given = Path(arguments.sums)
    machine = VirtualMachine(arguments, given if given.exists() else Path(__file__).parents[1] / given)
    rows: Rows = []
    for tp, batch, kept in tqdm([*product(arguments.tp, arguments.batches, arguments.kept)], unit="regime"):
        rows += machine.measure(tp, batch, kept, methods)
    regimes = by_regime(rows, "TP {ranks}, {batch} x {kept}")
    summary = {"how": HOW, **gains(regimes, "predicted_step_s", step_ratio, step_seconds)}
    summary["batch_over_tokens"] = {
        name: {
            method.removeprefix("dp"): step_ratio(row, own[other]).to_json()
            for method, row in own.items()
            if method.startswith("dp") and (other := f"split{method[-1]}") in own
        }
        for name, own in regimes.items()
    }
    said = {
        name: {method: {**row, "step": step_seconds(row)} for method, row in own.items()}
        for name, own in regimes.items()
    }
    columns = "ranks batch kept method utilisation:% step:ms predicted_step_s:ms"
    show_gains(said, summary, columns, "Decode steps of virtual ranks: kernels timed rank by rank, put together")
    print(f"\nSteps: {HOW}.")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_virtual_ranks", parse_arguments(), run))
