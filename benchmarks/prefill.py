"""Time to read a prompt: MegaKV's context parallelism, DeepSpeed's tensor parallelism, and a single process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.charts import bars
from harness.launch import Found, Rows, benchmark
from harness.methods import Peers
from harness.models import random_ids, random_model, words_of
from harness.options import Options
from harness.predictions import measured
from harness.publish import TIMES, show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import ratio

SINGLE = "single"
TENSOR_PARALLEL = ("tp", "tp_gloo")
OWN = ("pass_kv", "pass_q", "all_gather")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--quick", False, "a shorter prompt and fewer runs")
    options.add("--context", {"": 8192, "quick": 2048}, "tokens of the prompt")
    options.names("--methods", (SINGLE, *TENSOR_PARALLEL, *OWN), "single,tp,tp_gloo,pass_kv", "which to run")
    options.add("--repeats", {"": 5, "quick": 3}, "timed runs of each method")
    options.profile()
    options.model()
    arguments = options.parse(argv)
    if set(arguments.methods).intersection(TENSOR_PARALLEL):
        remedy = "take other numbers, or leave tp and tp_gloo out of --methods"
        options.check_kv_shards(arguments.kv_heads, arguments.ranks, remedy)
    return arguments


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    # What takes seconds to import comes only in functions, so that wrong arguments are refused at once.
    if "tp_gloo" in arguments.methods and world.device.type != "cpu":
        raise ValueError("--methods tp_gloo runs on CPU only: set DS_ACCELERATOR=cpu, or leave it out")
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_model(arguments, positions=arguments.context, device=world.device)
    known = measured(world, model.config, model.dtype, arguments)
    with Peers(model, world) as peers:
        methods = [peers.prefill(name, ids) for name in arguments.methods]
        samples = measure(world, methods, Agreement(world, arguments.dtype), repeats=arguments.repeats)
    return [
        sample.to_row(
            ranks=arguments.ranks,
            context=arguments.context,
            predicted_s=known and known.prefill(sample.method, arguments.context),
        )
        for sample in samples
    ]


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Speed-ups of MegaKV's methods over the others, and how much of a single process's work per rank they keep."""
    seconds = {row["method"]: row["seconds"] for row in rows}
    own, peers = [[name for name in seconds if (name in OWN) == ours] for ours in (True, False)]
    over_single = [name for name in seconds if name != SINGLE and SINGLE in seconds]
    share = 1 / arguments.ranks
    summary = {
        "speedup": {name: {peer: ratio(seconds[peer], seconds[name]).to_json() for peer in peers} for name in own},
        "efficiency": {name: ratio(seconds[SINGLE], seconds[name]).scaled(share).to_json() for name in over_single},
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }
    show(rows, f"method {TIMES}")
    show_summary(summary)
    words = {"title": f"Prefill of {arguments.context:,} tokens on {arguments.ranks} ranks"}
    words |= {"subtitle": words_of(arguments), "x_label": "seconds, less is better"}
    return rows, summary, [bars("", rows, "method", own=lambda row: row["method"] in OWN, **words)]


if __name__ == "__main__":
    asked = parse_arguments()
    shared_memory = bool(set(asked.methods).intersection(TENSOR_PARALLEL))
    sys.exit(benchmark("prefill", asked, measure_rank, report, shared_memory=shared_memory))
