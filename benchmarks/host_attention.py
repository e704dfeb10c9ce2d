"""The host's attention to keys and values where they lie, against how fast its memory can be read at all.

One query token attends to one sequence's rows, as the offload engine lets the host do it: the same thread, the same
kernel, the same layout of rows. Every row is read once, so memory is the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.launch import Rows, run_alone
from harness.options import DTYPES, Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


class SequenceRows:
    """Keys and values of one sequence in host memory, as a store of the offload engine has them."""

    def __init__(self, nbytes: int, *, kv_heads: int, dim: int, dtype: torch.dtype):
        import torch

        from megakv.offload.row_format import HeadShape

        self.dtype = dtype
        self.head_shape = HeadShape(kv_heads, dim, dim)
        tokens = max(1, nbytes // (self.head_shape.width * dtype.itemsize))
        self.rows = torch.randn(tokens, self.head_shape.width).to(dtype)

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, W]`` rows as keys and values."""
        return self.head_shape.split(rows)

    def read(self) -> float:
        """Look at every byte once, and at nothing else."""
        import torch

        return float(self.rows.view(torch.int32).view(-1).amax())


def measure_case(rows: SequenceRows, arguments: argparse.Namespace, *, threads: int) -> dict[str, Any]:
    """Times of attending to some rows and of reading them, in turns."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from megakv.attention.partial import Scoring
    from megakv.offload.host_rank import HostRank, Queries

    dim = arguments.head_dim
    host = HostRank(threads)
    host.queries = Queries(arguments.heads, dim, Scoring(dim**-0.5))

    def timed(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    seconds: list[float] = []
    reading: list[float] = []
    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as reader:
            for _ in range(arguments.repeats + 1):
                seconds.append(host.measure(rows, [(0, rows.rows)]))  # type: ignore[arg-type]
                reading.append(reader.submit(timed, rows.read).result())
    finally:
        host.close()
    # The first run of each fills caches and starts threads.
    return {"tokens": len(rows.rows), "bytes": rows.rows.nbytes, "seconds": seconds[1:], "read_seconds": reading[1:]}


def summarise(rows: Rows) -> dict[str, Any]:
    """Rates, and attention's as a share of reading's, which are put into the rows."""
    from harness.statistics import median, paired_ratio

    shares = {}
    for row in rows:
        gigabytes = row["bytes"] / 1e9
        row["gb_s"] = median([gigabytes / each for each in row["seconds"]]).value
        row["read_gb_s"] = median([gigabytes / each for each in row["read_seconds"]]).value
        share = shares[case_of(row)] = paired_ratio(row["read_seconds"], row["seconds"])
        row["share"] = share.value
    return {
        "share": {name: share.to_json() for name, share in shares.items()},
        "lowest_share": min(row["share"] for row in rows),
        "read_gb_s": max(row["read_gb_s"] for row in rows),
    }


def case_of(row: Mapping[str, Any]) -> str:
    """What a row was measured with, in words."""
    return f"{row['dtype']}, {row['kv_heads']} KV heads, {row['threads']} threads"


def run(arguments: argparse.Namespace) -> None:
    """Measure every case, and report."""
    import torch
    from harness.charts import bars
    from harness.models import DTYPES as TYPES
    from harness.publish import describe_machine, publish, show_table
    from harness.statistics import median
    from tqdm import tqdm

    machine = describe_machine()
    torch.manual_seed(0)
    found: Rows = []
    cases = [(name, kv_heads) for name in arguments.dtypes for kv_heads in arguments.kv_heads]
    for name, kv_heads in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"{name}, {kv_heads} KV heads")
        shape = {"kv_heads": kv_heads, "dim": arguments.head_dim, "dtype": TYPES[name]}
        rows = SequenceRows(arguments.megabytes * 10**6, **shape)
        for threads in arguments.threads:
            place = {"dtype": name, "threads": threads, "heads": arguments.heads, "kv_heads": kv_heads}
            found.append(place | measure_case(rows, arguments, threads=threads))
    summary = summarise(found)
    lines = [["keys and values", "tokens", "ms", "attends, GB/s", "reads, GB/s", "share"]]
    values = []
    for row in found:
        numbers = (f"{row['tokens']:,}", f"{row['bytes'] / row['gb_s'] / 1e6:.2f}")
        lines.append([case_of(row), *numbers, *(f"{row[each]:.1f}" for each in ("gb_s", "read_gb_s"))])
        lines[-1].append(f"{row['share']:.2f}")
        for label, key, own in ((case_of(row), "seconds", True), ("reading alone", "read_seconds", False)):
            values.append((label, median([row["bytes"] / 1e9 / each for each in row[key]]), own))
    show_table("", lines)
    print(f"\nat least {summary['lowest_share']:.2f} of what reading memory takes")
    size = f"{found[0]['bytes'] / 1e6:.0f} MB of keys and values"
    subtitle = f"one query token, {arguments.heads} query heads, {size}"
    title = "The host attends to keys and values where they lie"
    chart = bars("", values, title=title, subtitle=subtitle, unit="GB/s, more is better")
    publish(arguments, "host_attention", machine, found, summary, [chart])


if __name__ == "__main__":
    sys.exit(run_alone(parse_arguments(), run))
