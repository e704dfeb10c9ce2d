"""FairKV at the size of a large model without other GPUs: every tensor-parallel rank's decode work on one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from harness.heads.division import CONTIGUOUS, HEAD_METHODS, UNIFORM, kept_heads, make_division, skewed_budgets
from harness.heads.kernels import Bench, Dense, HeadShape, TokenPool, VirtualRanks, check_same
from harness.heads.report import show_part, summarise
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.models import DTYPES
from harness.options import Options
from tqdm import tqdm

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cuda", "cpu"), "cuda", "cpu only tries the code, smaller")
    options.numbers("--tp", {"cuda": "4,8", "cpu": "2,4"}, "tensor-parallel degrees")
    options.numbers("--kept", {"cuda": "128,256,512,1024", "cpu": "64,128"}, "mean tokens that a KV head keeps")
    options.add("--batch", {"cuda": 60, "cpu": 6}, "sequences decoded together")
    options.add("--layers", {"cuda": 8, "cpu": 2}, "layers, each with budgets of its own")
    options.add("--repeats", {"cuda": 9, "cpu": 3}, "timed runs of every rank and layer")
    options.add("--threads", 1, "threads on the CPU")
    options.names("--methods", HEAD_METHODS, ",".join(HEAD_METHODS), "as for fairkv.py")
    # By default as in Llama 3 70B.
    shape: dict[str, Any] = {"group": {"cuda": 8, "cpu": 2}, "head_dim": {"cuda": 128, "cpu": 32}}
    kept_heads(options, **shape, dtype={"cuda": "bf16", "cpu": "fp32"})
    options.add("--hidden", {"cuda": 8192, "cpu": 256}, "hidden size")
    options.add("--intermediate", {"cuda": 28672, "cpu": 512}, "width of the MLP")
    arguments = options.parse(argv)
    if arguments.tp[-1] > arguments.kv_heads or arguments.intermediate % arguments.tp[-1]:
        options.error(
            f"--tp {arguments.tp[-1]}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of --intermediate "
            f"{arguments.intermediate}"
        )
    return arguments


def measure_case(arguments: argparse.Namespace, bench: Any, tp: int, kept: int) -> Rows:
    """The rows of one degree and budget; every method must compute what contiguous heads do."""
    batch, spread = arguments.batch, (arguments.sigma, arguments.seed)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], bench.device)
    budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, *spread)
    pool = TokenPool(shape, max(kept, *map(max, budgets)), arguments.seed)
    size = {"ranks": tp, "batch": batch}
    expected = VirtualRanks(make_division(CONTIGUOUS, budgets, **size), pool, batch).outputs(0)
    dense, products = Dense(shape, arguments.hidden, arguments.intermediate, batch), dict[int, Any]()
    shared = bench.by_turns([partial(dense.feed_forward, tp)])
    rows = []
    for name in arguments.methods:
        ranks = VirtualRanks(make_division(name, budgets, **size), pool, batch)
        facts = ranks.division.facts()
        if name != UNIFORM:
            facts["max_output_difference"] = check_same(name, ranks.outputs(0), expected, TOLERANCE[arguments.dtype])
        attention = ranks.attention_seconds(bench)
        whole = attention.copy()
        for number in sorted(set(ranks.held.flat)):
            if number not in products:
                products[number] = bench.by_turns([partial(dense.projections, int(number))]) + shared
            whole[:, ranks.held == number] += products[number]
        # Every layer is as slow as its slowest rank.
        slowest = attention.max(axis=2).sum(axis=1)
        busy = attention.sum(axis=1) / slowest[:, None]
        row = {"method": name, **size, "kept": kept, "seconds": slowest.tolist()}
        row |= {"whole_seconds": whole.max(axis=2).sum(axis=1).tolist()}
        row |= {"rank_seconds": attention.sum(axis=1).tolist()}
        rows.append(row | {"busy_rates": busy.mean(axis=0).tolist(), "busy": busy.T.tolist()} | facts)
    return rows


def run(arguments: argparse.Namespace) -> Found:
    bench = Bench(torch.device(arguments.device), arguments.repeats)
    rows: Rows = []
    summary: Summary = {"attention": {}, "whole": {}}
    for tp, kept in tqdm([*product(arguments.tp, arguments.kept)], unit="case"):
        own = measure_case(arguments, bench, tp, kept)
        rows += own
        # How busy ranks are is known of attention alone.
        together = [{**row, "seconds": row["whole_seconds"]} for row in own]
        for row in together:
            del row["busy"]
        for part, some, title in (("attention", own, "Attention"), ("whole", together, "Attention and products")):
            found = summary[part].setdefault(str(tp), {})[str(kept)] = summarise(some)
            show_part(f"{title} on {tp} virtual ranks, {arguments.batch} x {kept} kept tokens", some, found)
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_gpu", parse_arguments(), run))
