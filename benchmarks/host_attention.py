"""The host's attention to keys and values where they lie, against how fast its memory can be read at all.

One query token attends to one sequence's rows, as the offload engine lets the host do it: the same thread, the same
kernel, the same layout of rows. Every row is read once, so memory is the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness.launch import Rows, benchmark_alone
from harness.options import DTYPES, Options

if TYPE_CHECKING:
    from torch import Tensor

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


def measure_case(rows: Tensor, shape: HeadShape, arguments: argparse.Namespace, *, threads: int) -> dict[str, Any]:
    """Times of attending to some rows and of reading them, in turns."""
    import torch

    from megakv.attention.partial import Scoring
    from megakv.offload.host_rank import HostRank, Queries

    # What a store of the offload engine says of its rows.
    store: Any = SimpleNamespace(dtype=rows.dtype, head_shape=shape, heads_of=shape.split, quantiser=None)
    host = HostRank(threads)
    host.queries = Queries(arguments.heads, arguments.head_dim, Scoring(arguments.head_dim**-0.5))
    seconds: list[float] = []
    reading: list[float] = []

    def read() -> float:
        """Look at every byte once, and at nothing else."""
        begun = time.perf_counter()
        rows.view(torch.int32).view(-1).amax()
        return time.perf_counter() - begun

    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as reader:
            for _ in range(arguments.repeats + 1):
                seconds.append(host.measure(store, [(0, rows)]))
                reading.append(reader.submit(read).result())
    finally:
        host.close()
    # The first run of each fills caches and starts threads.
    return {"tokens": len(rows), "bytes": rows.nbytes, "seconds": seconds[1:], "read_seconds": reading[1:]}


def summarise(rows: Rows) -> dict[str, Any]:
    """Rates, and attention's as a share of reading's, which are put into the rows."""
    from harness.statistics import median, paired_ratio

    shares = {}
    for row in rows:
        row["gb_s"] = median(rates_of(row, "seconds")).value
        row["read_gb_s"] = median(rates_of(row, "read_seconds")).value
        share = shares[case_of(row)] = paired_ratio(row["read_seconds"], row["seconds"])
        row["share"] = share.value
    return {
        "share": {name: share.to_json() for name, share in shares.items()},
        "lowest_share": min(row["share"] for row in rows),
        "read_gb_s": max(row["read_gb_s"] for row in rows),
    }


def rates_of(row: Mapping[str, Any], key: str) -> list[float]:
    """GB/s of each run."""
    return [row["bytes"] / 1e9 / seconds for seconds in row[key]]


def case_of(row: Mapping[str, Any]) -> str:
    """What a row was measured with, in words."""
    return f"{row['dtype']}, {row['kv_heads']} KV heads, {row['threads']} threads"


def run(arguments: argparse.Namespace) -> tuple[Rows, dict[str, Any], list[Any]]:
    import torch
    from harness.charts import bars
    from harness.models import DTYPES as TYPES
    from harness.publish import show, show_summary
    from tqdm import tqdm

    from megakv.offload.row_format import HeadShape

    found: Rows = []
    cases = [(name, kv_heads) for name in arguments.dtypes for kv_heads in arguments.kv_heads]
    for name, kv_heads in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"{name}, {kv_heads} KV heads")
        shape = HeadShape(kv_heads, arguments.head_dim, arguments.head_dim)
        tokens = max(1, arguments.megabytes * 10**6 // (shape.width * TYPES[name].itemsize))
        rows = torch.randn(tokens, shape.width).to(TYPES[name])
        for threads in arguments.threads:
            place = {"dtype": name, "threads": threads, "heads": arguments.heads, "kv_heads": kv_heads}
            found.append(place | measure_case(rows, shape, arguments, threads=threads))
    summary = summarise(found)
    shown = [{**row, "case": case_of(row)} for row in found]
    show(shown, "case tokens seconds:ms gb_s:GB/s read_gb_s:GB/s share")
    show_summary(summary, "lowest_share")
    drawn = [{"label": row["case"], "rate": rates_of(row, "seconds"), "own": True} for row in shown]
    drawn += [{"label": "reading alone", "rate": rates_of(row, "read_seconds"), "own": False} for row in found]
    size = f"{found[0]['bytes'] / 1e6:.0f} MB of keys and values"
    subtitle = f"one query token, {arguments.heads} query heads, {size}"
    words = {"title": "The host attends to keys and values where they lie", "subtitle": subtitle}
    return found, summary, [bars("", drawn, "label", "rate", own="own", unit="GB/s, more is better", **words)]


if __name__ == "__main__":
    sys.exit(benchmark_alone("host_attention", parse_arguments(), run))
