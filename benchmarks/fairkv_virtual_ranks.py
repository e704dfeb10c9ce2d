"""FairKV on more tensor-parallel ranks than a machine has: the kernels of every rank are timed alone on one device, one
after the other, and put together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from harness.heads.division import CHOSEN, CONTIGUOUS, MAPPED, kept_heads
from harness.heads.machine import HOW, VirtualMachine, step_ratio, step_seconds
from harness.heads.report import by_regime, gains, show_gains
from harness.launch import Found, Rows, benchmark_alone
from harness.options import Options
from tqdm import tqdm

SUMS = "benchmarks/results/fairkv.profiles/4.json"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cpu", "cuda"), "cpu", "where kernels run")
    options.numbers("--tp", "4,8", "tensor-parallel degrees")
    options.numbers("--batches", {"cpu": "1,8", "cuda": "60"}, "sequences decoded together")
    options.numbers("--kept", {"cpu": "1K,8K", "cuda": "128,256,512,1024"}, "mean tokens that a KV head keeps")
    usual = {"cpu": "nodp,dp1,split1,dp4,split4,time", "cuda": ",".join(MAPPED)}
    options.names("--methods", (*MAPPED, CHOSEN), usual, "beside contiguous heads")
    options.add("--layers", {"cpu": 4, "cuda": 8}, "layers of a step, each with budgets of its own")
    options.add("--repeats", 9, "timed rounds of all ranks of all methods")
    options.add("--threads", 1, "threads on the CPU")
    text = "profile of a machine on whose ranks sums were measured; also from this checkout's root"
    options.add("--sums", SUMS, text)
    # Those of Llama 3.1 8B, and of Llama 3 70B.
    kept_heads(options, group={"cpu": 4, "cuda": 8})
    options.add("--hidden", {"cpu": 4096, "cuda": 8192}, "hidden size")
    options.add("--intermediate", {"cpu": 14336, "cuda": 28672}, "width of the MLP")
    options.profile({"cpu": 20.0, "cuda": 0.0})
    arguments = options.parse(argv)
    if arguments.tp[-1] > arguments.kv_heads or any(arguments.intermediate % tp for tp in arguments.tp):
        options.error(
            f"--tp {','.join(map(str, arguments.tp))}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of "
            f"--intermediate {arguments.intermediate}"
        )
    if CHOSEN in arguments.methods and not arguments.profile_seconds:
        options.error(f"--profile-seconds 0: the cost model chooses for --methods {CHOSEN}: allowed: more than 0")
    return arguments


def run(arguments: argparse.Namespace) -> Found:
    given = Path(arguments.sums)
    machine = VirtualMachine(arguments, given if given.exists() else Path(__file__).parents[1] / given)
    rows: Rows = []
    for tp, batch, kept in tqdm([*product(arguments.tp, arguments.batches, arguments.kept)], unit="regime"):
        rows += machine.measure(tp, batch, kept, [CONTIGUOUS, *arguments.methods])
    regimes = by_regime(rows, "TP {ranks}, {batch} x {kept}")
    summary = {"how": HOW, **gains(regimes, "predicted_step_s", step_ratio, step_seconds)}
    summary["attention_gain"] = {
        name: {
            method: step_ratio(own[CONTIGUOUS], row, whole=False).to_json()
            for method, row in own.items()
            if method != CONTIGUOUS
        }
        for name, own in regimes.items()
    }
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
    columns = "ranks batch kept method utilisation:% step:ms predicted_step_s:ms attention_gain"
    show_gains(said, summary, columns, "Decode steps of virtual ranks")
    print(f"\nSteps: {HOW}.")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_virtual_ranks", parse_arguments(), run))
