"""The host's attention to keys and values where they lie, against how fast its memory can be read at all.

One query token attends to one sequence's rows, as the offload engine lets the host do it: the same thread, the same
kernel, the same layout of rows. Every row is read once, so memory is the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arguments import DTYPES, check_positive, method_names, whole_numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUICK = {"megabytes": 128, "repeats": 7}
FULL = {"megabytes": 512, "repeats": 15}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results here, and a chart (PNG) beside it")
    parser.add_argument("--quick", action="store_true", help="128 MB and 7 runs: a few seconds for each case")
    parser.add_argument("--threads", default="1,2,4", help="cores that attend (default 1,2,4)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", default="1,8,32", help="KV heads, divisors of --heads (default 1,8,32)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension (default 128)")
    parser.add_argument("--dtypes", default="fp32,bf16", help="types of keys and values (default fp32,bf16)")
    parser.add_argument("--megabytes", type=int, help="size of keys and values, beyond all caches (default 512)")
    parser.add_argument("--repeats", type=int, help="timed runs of a case (default 15; --quick: 7)")
    arguments = parser.parse_args(argv)
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.threads = whole_numbers(parser, "--threads", arguments.threads)
    arguments.kv_heads = whole_numbers(parser, "--kv-heads", arguments.kv_heads)
    arguments.dtypes = method_names(parser, arguments.dtypes, DTYPES, name="--dtypes")
    check_positive(parser, arguments, "heads", "head-dim", "megabytes", "repeats")
    for kv_heads in arguments.kv_heads:
        if arguments.heads % kv_heads:
            parser.error(f"--heads {arguments.heads} is no multiple of --kv-heads {kv_heads}")
    return arguments


class Rows:
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


def measure_case(
    rows: Rows, *, threads: int, heads: int, kv_heads: int, dim: int, repeats: int, name: str
) -> dict[str, Any]:
    """Rates of attending to some rows and of reading them, in turns."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from megakv.attention.partial import Scoring
    from megakv.offload.host_rank import HostRank, Queries

    host = HostRank(threads)
    queries = Queries(heads, dim, Scoring(dim**-0.5))

    def timed(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    seconds: list[float] = []
    reading: list[float] = []
    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as reader:
            for _ in range(repeats + 1):
                seconds.append(host.measure(rows, [(0, rows.rows)], queries))  # type: ignore[arg-type]
                reading.append(reader.submit(timed, rows.read).result())
    finally:
        host.close()
    # The first run of each fills caches and starts threads.
    seconds, reading = seconds[1:], reading[1:]
    return {
        "dtype": name,
        "threads": threads,
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": len(rows.rows),
        "bytes": rows.rows.nbytes,
        "seconds": seconds,
        "read_seconds": reading,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates, and attention's as a share of reading's, which is put into the rows."""
    from harness.statistics import median, paired_ratio

    shares = {}
    for row in rows:
        gigabytes = row["bytes"] / 1e9
        row["gb_s"] = median([gigabytes / each for each in row["seconds"]]).value
        row["read_gb_s"] = median([gigabytes / each for each in row["read_seconds"]]).value
        shares[case_of(row)] = paired_ratio(row["read_seconds"], row["seconds"])
        row["share"] = shares[case_of(row)].value
    return {
        "share": {name: share.to_json() for name, share in shares.items()},
        "lowest_share": min(row["share"] for row in rows),
        "read_gb_s": max(row["read_gb_s"] for row in rows),
    }


def case_of(row: Mapping[str, Any]) -> str:
    """What a row was measured with, in words."""
    return f"{row['dtype']}, {row['kv_heads']} KV heads, {row['threads']} threads"


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print the results."""
    from harness.report import align

    lines = [["keys and values", "tokens", "ms", "attends, GB/s", "reads, GB/s", "share"]]
    for row in rows:
        numbers = (f"{row['tokens']:,}", f"{row['bytes'] / row['gb_s'] / 1e6:.2f}")
        rates = (f"{row['gb_s']:.1f}", f"{row['read_gb_s']:.1f}", f"{row['share']:.2f}")
        lines.append([case_of(row), *numbers, *rates])
    print(f"\n{align(lines)}\n\nat least {summary['lowest_share']:.2f} of what reading memory takes")


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw attention's rates as bars, below each what reading alone reaches."""
    from harness.chart import draw_bars
    from harness.statistics import median

    bars = []
    for row in rows:
        for label, name, own in ((case_of(row), "seconds", True), ("reading alone", "read_seconds", False)):
            bars.append((label, median([row["bytes"] / 1e9 / each for each in row[name]]), own))
    picture = path.with_suffix(".png")
    first = rows[0]
    draw_bars(
        picture,
        bars,
        title="The host attends to keys and values where they lie",
        subtitle=f"one query token, {first['heads']} query heads, {first['bytes'] / 1e6:.0f} MB of keys and values",
        unit="GB/s, more is better",
    )
    return [picture]


def run(arguments: argparse.Namespace) -> None:
    """Measure every case, and report."""
    import torch
    from harness.models import DTYPES as TYPES
    from harness.report import describe_machine, publish
    from tqdm import tqdm

    machine = describe_machine()
    torch.manual_seed(0)
    cases = [(name, kv_heads) for name in arguments.dtypes for kv_heads in arguments.kv_heads]
    found = []
    for name, kv_heads in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"{name}, {kv_heads} KV heads")
        size, dim = arguments.megabytes * 10**6, arguments.head_dim
        rows = Rows(size, kv_heads=kv_heads, dim=dim, dtype=TYPES[name])
        for threads in arguments.threads:
            found.append(
                measure_case(
                    rows, threads=threads, heads=arguments.heads, kv_heads=kv_heads, dim=dim,
                    repeats=arguments.repeats, name=name,
                )
            )  # fmt: skip
    summary = summarise(found)
    show(found, summary)
    publish(
        arguments,
        benchmark="host_attention",
        machine=machine,
        rows=found,
        summary=summary,
        draw=lambda path: draw(path, found),
    )


def main() -> int:
    """Entry of the only process."""
    arguments = parse_arguments()
    from megakv.launcher.process import quiet_libraries

    quiet_libraries()
    run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
