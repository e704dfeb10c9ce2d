"""The host's attention to keys and values where they lie, against how fast its memory can be read at all.

One query token attends to one sequence's rows, as the offload engine lets the host do it: the same thread, the same
kernel, the same layout of rows. Every row is read once, so memory is the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from harness.launch import Found, Rows, benchmark_alone
from harness.models import DTYPES
from harness.options import Options
from harness.publish import show, show_summary
from harness.statistics import median, paired_ratio
from harness.timing import by_turns
from tqdm import tqdm

from megakv.attention.partial import Scoring
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.row_format import HeadShape


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "128 MB and 7 runs: a few seconds for each case")
    options.numbers("--threads", "1,2,4", "cores that attend")
    options.add("--heads", 32, "query heads")
    options.numbers("--kv-heads", "1,8,32", "KV heads, divisors of --heads")
    options.add("--head-dim", 128, "head dimension")
    options.names("--dtypes", DTYPES, "fp32,bf16", "types of keys and values")
    options.add("--megabytes", {"": 512, "quick": 128}, "size of keys and values, beyond all caches")
    options.add("--repeats", {"": 15, "quick": 7}, "timed runs of a case")
    arguments = options.parse(argv)
    for kv_heads in arguments.kv_heads:
        if arguments.heads % kv_heads:
            options.error(f"--heads {arguments.heads} is no multiple of --kv-heads {kv_heads}")
    return arguments


def measure_case(rows: torch.Tensor, shape: HeadShape, arguments: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Times of attending to some rows and of reading them, in turns."""
    # What a store of the offload engine says of its rows.
    store: Any = SimpleNamespace(dtype=rows.dtype, head_shape=shape, heads_of=shape.split, quantiser=None)
    with (
        closing(HostRank(threads)) as host,
        ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as reader,
    ):
        host.queries = Queries(arguments.heads, arguments.head_dim, Scoring(arguments.head_dim**-0.5))
        # Every byte is looked at once, and nothing else.
        whole = rows.view(torch.int32).view(-1)
        calls = {
            "seconds": lambda: host.measure(store, [(0, rows)]),
            "read_seconds": lambda: reader.submit(whole.amax).result(),
        }
        return {"tokens": len(rows), "bytes": rows.nbytes, **by_turns(calls, arguments.repeats)}


def run(arguments: argparse.Namespace) -> Found:
    """Rates, and attention's as a share of reading's."""
    rows: Rows = []
    for name, kv_heads in tqdm([*product(arguments.dtypes, arguments.kv_heads)], unit="case"):
        shape = HeadShape(kv_heads, arguments.head_dim, arguments.head_dim)
        tokens = max(1, arguments.megabytes * 10**6 // (shape.width * DTYPES[name].itemsize))
        data = torch.randn(tokens, shape.width).to(DTYPES[name])
        for threads in arguments.threads:
            place = {"dtype": name, "threads": threads, "heads": arguments.heads, "kv_heads": kv_heads}
            rows.append(place | measure_case(data, shape, arguments, threads))
    shares = {}
    for row in rows:
        row["case"] = f"{row['dtype']}, {row['kv_heads']} KV heads, {row['threads']} threads"
        for rate, name in (("gb_s", "seconds"), ("read_gb_s", "read_seconds")):
            row[rate] = median([row["bytes"] / 1e9 / seconds for seconds in row[name]]).value
        shares[row["case"]] = paired_ratio(row["read_seconds"], row["seconds"])
        row["share"] = shares[row["case"]].value
    summary = {
        "share": {name: share.to_json() for name, share in shares.items()},
        "lowest_share": min(row["share"] for row in rows),
        "read_gb_s": max(row["read_gb_s"] for row in rows),
    }
    show(rows, "case tokens seconds:ms gb_s:GB/s read_gb_s:GB/s share")
    show_summary(summary, "lowest_share")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("host_attention", parse_arguments(), run))
