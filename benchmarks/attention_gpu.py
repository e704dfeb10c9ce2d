"""Ring attention's work on one GPU: the rate of every virtual rank's partial attention, and what merging adds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import psutil
import torch
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.models import DTYPES
from harness.options import Options
from harness.publish import show
from harness.ring import Heads, VirtualRing, matmul_rate
from harness.timing import Watch
from tqdm import tqdm

from megakv.base.errors import MegaKVError

CLAIM = 128 << 10  # The context at which the rate is judged, in tokens
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 4e-3}
"""How far an output row may lie from the full computation, relative to the row."""
USABLE = 0.9  # Share of the free memory that is used


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cuda", "cpu"), "cuda", "cpu only tries the code, smaller")
    options.numbers("--contexts", {"cuda": "8K,32K,128K,512K,1M", "cpu": "1K,2K"}, "tokens")
    options.numbers("--ranks", {"cuda": "2,4,8,16", "cpu": "2,4"}, "context-parallel degrees")
    options.add("--repeats", {"cuda": 5, "cpu": 3}, "timed runs of every rank")
    options.add("--heads", 16, "query heads of a rank, as in Llama 3 405B on TP8")
    options.add("--kv-heads", 1, "KV heads of a rank")
    options.add("--head-dim", 128, "head dimension")
    options.choice("--dtype", tuple(DTYPES), "bf16", "of queries, keys, values")
    options.add("--matmul", {"cuda": 8192, "cpu": 1024}, "rows of the matrix product")
    options.add("--rows", 16, "rows of each rank that are checked")
    options.add("--threads", 1, "threads on the CPU")
    arguments = options.parse(argv)
    if arguments.heads % arguments.kv_heads:
        options.error(f"--heads {arguments.heads} is no multiple of --kv-heads {arguments.kv_heads}")
    if arguments.contexts[0] < 2 * arguments.ranks[-1]:
        options.error(f"--contexts {arguments.contexts[0]} has fewer tokens than 2 x --ranks {arguments.ranks[-1]}")
    return arguments


def measure_case(arguments: argparse.Namespace, ring: VirtualRing, matmul: float) -> dict[str, Any]:
    """Check, then time, the attention of every rank of a ring."""
    rng = np.random.default_rng(0)
    total, merging = Watch(ring.device), Watch(ring.device)
    worst = np.zeros(2)
    seconds = np.empty((arguments.repeats, ring.size))
    merge_seconds = np.empty_like(seconds)
    for rank in range(ring.size):
        queries = ring.queries(rank)
        attention = ring.attend(rank, queries, merging)
        count = queries.shape[1]
        rows = np.union1d([0, count - 1], rng.choice(count, min(arguments.rows, count), replace=False))
        worst = np.maximum(worst, ring.errors(rank, attention, rows))
        if not worst[0] <= TOLERANCE[arguments.dtype]:
            raise MegaKVError(
                f"{ring.context} tokens on {ring.size} ranks, rank {rank}: an output row differs from the full "
                f"computation by {worst[0]:.1e} of itself, allowed: {TOLERANCE[arguments.dtype]:.0e}"
            )
        del attention
        merging.seconds()
        for repeat in range(arguments.repeats):
            with total.span():
                ring.attend(rank, queries, merging)
            seconds[repeat, rank], merge_seconds[repeat, rank] = total.seconds(), merging.seconds()
    # All ranks of a ring wait for the slowest.
    flops = [ring.heads.flops(slots) for slots in ring.slots]
    rate = float(np.median(sum(flops) / ring.size / seconds.max(axis=1)))
    return {
        "context": ring.context, "ranks": ring.size, "seconds": seconds.max(axis=1).tolist(),
        "rank_seconds": seconds.tolist(), "merge_seconds": merge_seconds.tolist(), "flops": flops,
        "tflops": rate / 1e12, "matmul_tflops": matmul / 1e12, "matmul_fraction": rate / matmul,
        "merge_share": float(np.median(merge_seconds.sum(axis=1) / seconds.sum(axis=1))),
        "output_error": float(worst[0]), "lse_error": float(worst[1]),
    }  # fmt: skip


def summarise(rows: Rows, skipped: Rows) -> Summary:
    """Rates and merging at 128K tokens, or the longest context measured below it, by number of ranks."""
    context = max((row["context"] for row in rows if row["context"] <= CLAIM), default=rows[0]["context"])
    judged = {str(row["ranks"]): row for row in rows if row["context"] == context}
    return {
        "context": context,
        "matmul_fraction": {ranks: row["matmul_fraction"] for ranks, row in judged.items()},
        "lowest_matmul_fraction": min(row["matmul_fraction"] for row in judged.values()),
        "merge_share": {ranks: row["merge_share"] for ranks, row in judged.items()},
        "largest_merge_share": max(row["merge_share"] for row in judged.values()),
        "max_output_error": max(row["output_error"] for row in rows),
        "max_lse_error": max(row["lse_error"] for row in rows),
        "skipped": skipped,
    }


def run(arguments: argparse.Namespace) -> Found:
    """Measure every context on every number of ranks, and report."""
    device = torch.device(arguments.device)
    heads = Heads(arguments.heads, arguments.kv_heads, arguments.head_dim, DTYPES[arguments.dtype])
    rows: Rows = []
    skipped: Rows = []
    for context, size in tqdm([*product(arguments.contexts, arguments.ranks)], unit="case"):
        free = psutil.virtual_memory().available
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        needed = heads.memory_bytes(context, size)
        if needed > USABLE * free:
            reason = f"needs {needed / 2**30:.1f} GiB, {USABLE:.0%} of {free / 2**30:.1f} GiB are usable"
            skipped.append({"context": context, "ranks": size, "reason": reason})
            continue
        # Next to what it is compared with, so that both find the device equally warm.
        rate = matmul_rate(arguments.matmul, heads.dtype, device)
        rows.append(measure_case(arguments, VirtualRing(context, size, heads, device), rate))
    if not rows:
        raise MegaKVError(f"nothing fits: {skipped[0]['context']:,} tokens on {size} ranks: {skipped[-1]['reason']}")
    summary = summarise(rows, skipped)
    show(rows, "context ranks seconds:ms tflops matmul_fraction:% merge_share:% output_error lse_error")
    for entry in skipped:
        print(f"{entry['context']:,} tokens on {entry['ranks']} ranks left out: {entry['reason']}")
    print(
        f"at {summary['context']:,} tokens: at least {summary['lowest_matmul_fraction']:.1%} of the matrix product's "
        f"rate, merging at most {summary['largest_merge_share']:.1%} of the time"
    )
    return rows, summary, []


if __name__ == "__main__":
    # Ranks are virtual here: one process does the work of all.
    sys.exit(benchmark_alone("attention_gpu", parse_arguments(), run))
