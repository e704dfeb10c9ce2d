"""Time to first token of KV-Runahead's chain, of TSP, tensor parallelism, ring pass-KV and what `auto` chooses.

In the form of the paper's Tables 1 to 3 and Figures 6, 8, 10 and 11, over contexts, ranks, KV heads and links.
Partitions are searched on the ranks as the run goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.launch import Launch, Rows, benchmark, is_rank
from harness.links import FREE, checked_rates
from harness.methods import Peers
from harness.models import random_model
from harness.options import Options
from harness.runahead.case import CaseBench
from harness.runahead.plan import METHODS, groups
from harness.runahead.report import report


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks(timeout_s=8 * 3600.0)
    options.add("--quick", False, "shorter and less of everything")
    options.numbers("--context", {"": "2048,4096,6144,8192", "quick": "1024,1536,2048"}, "tokens of the prompts")
    options.numbers("--sizes", None, "numbers of ranks (default: --ranks alone)")
    options.numbers("--kv-heads", "16", "key-value heads, one model for each, such as 16,4,1")
    options.choice("--family", ("llama", "falcon"), "llama", "of the model")
    options.names("--methods", METHODS, ",".join(METHODS), "which to run")
    options.add("--rates", FREE, "links between ranks: free, or limits such as 1gbit between hosts, as root")
    options.add("--noise", False, "also beside a competing flow at half rate, on limited links")
    options.add("--table-spacing", {"": 4096, "quick": 1024}, "kvr_p interpolates between multiples of it")
    options.profile({"": 60.0, "quick": 20.0})
    text = "tokens of a search's finest stride (default about 1/128 of the prompt)"
    options.add("--search-step", None, text, kind=int)
    text = "partitions without progress after which a stride is left (default 4 a bound)"
    options.add("--search-patience", {"": None, "quick": 4}, text, kind=int)
    options.add("--search-repeats", 1, "passes of a promising partition")
    options.add("--repeats", {"": 7, "quick": 3}, "rounds at most")
    options.add("--least-repeats", 3, "rounds at least")
    options.add("--cell-seconds", {"": 600.0, "quick": 60.0}, "no further round begins in a cell after them")
    options.hidden("--switch")
    options.model(without=("kv_heads",))
    arguments = options.parse(argv)
    ranks, context = arguments.ranks, arguments.context[0]
    arguments.sizes = arguments.sizes or [ranks]
    if arguments.sizes[0] < 2 or arguments.sizes[-1] > ranks:
        sizes = ",".join(map(str, arguments.sizes))
        options.error(f"--sizes {sizes}: allowed: 2 to --ranks {ranks}; a chain of one sends nothing")
    if context < 4 * ranks:
        options.error(f"--context {context}: allowed: from {4 * ranks} on --ranks {ranks}")
    arguments.rates = checked_rates(options, "--rates", arguments.rates)
    # Ranks are given the rate of their own group alone.
    if arguments.noise and set(arguments.rates) == {FREE} and not is_rank():
        options.error("--noise needs limited links: give --rates such as 1gbit")
    return arguments


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    """Measure the cases of one group, as one of its ranks."""
    (group,) = groups(arguments)
    arguments.kv_heads = group.kv_heads
    asked = arguments.methods, arguments.table_spacing
    positions = max(length for context in group.contexts for length in (context, *group.searched(*asked, context)))
    model = random_model(arguments, positions=positions, device=world.device)
    with TemporaryDirectory(prefix="megakv-benchmark-") as own, Peers(model, world) as peers:
        # Every rank reads rank 0's files.
        bench = CaseBench(arguments, group, world, peers, Path(world.gather(own)[0]))
        rows = [row for context in group.contexts for row in bench.measure(context)]
        world.barrier()
    return rows


if __name__ == "__main__":
    asked = parse_arguments()
    shared = "tp" in asked.methods and asked.rates == [FREE]
    launches = [
        Launch(group.ranks, group.words, group.name, name=group.name, rate=group.rate, noise=group.noise)
        for group in groups(asked)
    ]
    sys.exit(benchmark("runahead", asked, measure_rank, report, launches, shared_memory=shared))
