"""Decoding over caches whose heads keep unequal numbers of tokens: contiguous heads against FairKV's mappings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import psutil
from harness.heads import report as made
from harness.heads.division import CHOSEN, CONTIGUOUS, HEAD_METHODS, UNIFORM, kept_heads
from harness.heads.steps import measure_regimes
from harness.launch import Found, Rows, Summary, benchmark
from harness.options import Options, check_memory

PARTS = {"attention": "Attention of a step", "engine": "A decode step"}
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
USABLE = 0.75  # Share of the machine's memory that a part may take
PROCESS_BYTES = 500 << 20  # Of a rank before it has weights or caches, and of the processes that start them


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.profile({"": 30.0, "quick": 5.0})
    options.add("--quick", False, "smaller and fewer")
    known, usual = (*HEAD_METHODS, CHOSEN), "uniform,contiguous,nodp,dp1,dp2,dp3,dp4,split1,split3"
    options.names("--methods", known, usual, "which to run; time: as the cost model chooses")
    options.names("--parts", PARTS, ",".join(PARTS), "what to measure")
    options.numbers("--batches", "4", "sequences decoded together")
    options.numbers("--kept", {"": "16384", "quick": "2048"}, "mean tokens that a KV head keeps")
    options.add("--layers", 8, "layers of a step")
    # By default as in Llama 3.1 405B.
    kept_heads(options, group=16)
    options.add("--hidden", 512, "of the engine's Llama")
    options.add("--intermediate", 1408, "of the engine's Llama")
    options.add("--vocab", 8192, "of the engine's Llama")
    options.add("--steps", 1, "attention steps of a sample, of which it is the mean")
    options.add("--tokens", 2, "engine steps of a sample, of which it is the mean")
    options.add("--repeats", {"": 25, "quick": 9}, "rounds of all methods at most")
    options.add("--cell-seconds", {"": 130.0, "quick": 20.0}, "no further round of a regime begins after them")
    arguments = options.parse(argv)
    ranks, kv_heads = arguments.ranks, arguments.kv_heads
    arguments.heads = kv_heads * arguments.group
    if CONTIGUOUS not in arguments.methods:
        options.error(f"--methods {','.join(arguments.methods)}: gains are over {CONTIGUOUS}: add it")
    if CHOSEN in arguments.methods and not arguments.profile_seconds:
        options.error(f"--profile-seconds 0: the cost model chooses for --methods {CHOSEN}: allowed: more than 0")
    if ranks > kv_heads:
        options.error(f"--ranks {ranks}: allowed: up to --kv-heads {kv_heads}, a head for each rank")
    if "engine" in arguments.parts and kv_heads % ranks:
        remedy = "which plain tensor parallelism divides evenly; or --parts attention"
        options.error(f"--kv-heads {kv_heads}: allowed: multiples of --ranks {ranks}, {remedy}")
    if "engine" in arguments.parts and arguments.hidden % arguments.heads:
        of = f"multiples of --kv-heads x --group = {arguments.heads}"
        options.error(f"--hidden {arguments.hidden}: allowed: {of}, or --parts attention")
    words = f"--batches up to {arguments.batches[-1]}, --kept up to {arguments.kept[-1]}, --layers {arguments.layers}"
    try:
        total = USABLE * psutil.virtual_memory().total
        check_memory(needed_bytes(arguments), total, f"{words} and --hidden {arguments.hidden}")
    except ValueError as error:
        options.error(str(error))
    return arguments


def needed_bytes(arguments: argparse.Namespace) -> int:
    """Memory of the largest part: one method's cache at a time, and what building a layer takes."""
    item, layers, hidden = ITEM[arguments.dtype], arguments.layers, arguments.hidden
    tokens = arguments.batches[-1] * arguments.kv_heads * arguments.kept[-1]
    needed = 2 * arguments.head_dim * tokens * (layers + 2) * item + (arguments.ranks + 1) * PROCESS_BYTES
    if "engine" in arguments.parts:
        # Of every placement its own weights.
        placements = len(set(arguments.methods) - {UNIFORM})
        heads = 2 * (arguments.heads + arguments.kv_heads) * arguments.head_dim + 3 * arguments.intermediate
        copies = sum(int(name[-1]) for name in arguments.methods if name[-1].isdecimal())
        copied = 2 * (arguments.group + 1) * arguments.head_dim * copies
        whole = 2 * arguments.vocab * arguments.ranks * placements
        needed += hidden * (layers * (placements * heads + copied) + whole) * item
    return int(needed)


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    shape = f"hidden {arguments.hidden}, {arguments.kv_heads} KV heads of {arguments.group} query heads"
    subtitle = f"{arguments.layers} layers, {shape}, {arguments.dtype}, {arguments.ranks} ranks; dashed: predicted"
    summary, charts = Summary(), []
    for part in arguments.parts:
        regimes = made.by_regime([row for row in rows if row["part"] == part], "{batch} x {kept}")
        summary[part] = made.summarise(regimes)
        title = f"{PARTS[part]} on {arguments.ranks} ranks, {', '.join(regimes)} kept tokens"
        made.show_gains(regimes, summary[part], "batch kept method utilisation:% seconds:ms predicted_s:ms", title)
        charts.append(made.chart(part, f"{PARTS[part]} by how KV heads are placed", subtitle, regimes, summary[part]))
    return rows, summary, charts


if __name__ == "__main__":
    sys.exit(benchmark("fairkv", parse_arguments(), measure_regimes, report, shared_memory=True))
