"""Time to read a prompt: MegaKV's context parallelism, DeepSpeed's tensor parallelism, and a single process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.launch import Rows, benchmark
from harness.options import Options

SINGLE = "single"
TENSOR_PARALLEL = ("tp", "tp_gloo")
OWN = ("pass_kv", "pass_q", "all_gather")
METHODS = (SINGLE, *TENSOR_PARALLEL, *OWN)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--quick", False, "a shorter prompt and fewer runs")
    options.add("--context", {"": 8192, "quick": 2048}, "tokens of the prompt")
    options.names("--methods", METHODS, "single,tp,tp_gloo,pass_kv", "which to run")
    options.add("--repeats", {"": 5, "quick": 3}, "timed runs of each method")
    options.profile()
    options.model()
    arguments = options.parse(argv)
    if set(arguments.methods).intersection(TENSOR_PARALLEL):
        remedy = "take other numbers, or leave tp and tp_gloo out of --methods"
        options.check_kv_shards(arguments.kv_heads, arguments.ranks, remedy)
    return arguments


def measure_rank(arguments: argparse.Namespace) -> Rows:
    from harness.models import random_ids, random_model
    from harness.prefills import Prefills, cache_bytes, uses_shared_memory
    from harness.profiles import keep_measured
    from harness.sampling import measure
    from harness.world import Agreement, join_world

    tensor_parallel = bool(set(arguments.methods).intersection(TENSOR_PARALLEL))
    world = join_world(arguments.threads, shared_memory=tensor_parallel, timeout_s=arguments.timeout)
    if "tp_gloo" in arguments.methods and world.device.type != "cpu":
        raise ValueError("--methods tp_gloo runs on CPU only: set DS_ACCELERATOR=cpu, or leave it out")
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_model(arguments, positions=arguments.context, device=world.device)
    keep_measured(world, model, arguments)
    prefills = Prefills(model, world)
    methods = [prefills.make(name, ids) for name in arguments.methods]
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, output: Any) -> dict[str, Any]:
        return {
            "max_logit_difference": agreement.check(name, output.logits[0, -1]),
            "kv_bytes": world.gather(cache_bytes(output.past_key_values)),
            "shared_memory": uses_shared_memory(name, model.dtype),
        }

    samples = measure(world, methods, repeats=arguments.repeats, inspect=inspect)
    prefills.close()
    world.leave()
    return [sample.to_row(ranks=arguments.ranks, context=arguments.context) for sample in samples]


def summarise(rows: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """Speed-ups of MegaKV's methods over the others, and how much of a single process's work per rank they keep."""
    from harness.statistics import ratio

    seconds = {row["method"]: row["seconds"] for row in rows}
    peers = [name for name in seconds if name not in OWN]
    over_single = [name for name in seconds if name != SINGLE and SINGLE in seconds]
    return {
        "speedup": {
            name: {peer: ratio(seconds[peer], seconds[name]).to_json() for peer in peers}
            for name in seconds
            if name in OWN
        },
        "efficiency": {name: ratio(seconds[SINGLE], seconds[name]).scaled(1 / ranks).to_json() for name in over_single},
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    from harness.charts import bars
    from harness.models import words_of
    from harness.publish import show_difference, show_intervals, show_table, time_table
    from harness.statistics import median

    summary = summarise(rows, arguments.ranks)
    show_table("", time_table(rows))
    show_intervals("", {f"speed-up of {name}": peers for name, peers in summary["speedup"].items()})
    show_intervals("", {f"efficiency of {name}": value for name, value in summary["efficiency"].items()})
    show_difference(summary)
    values = [(row["method"], median(row["seconds"]), row["method"] in OWN) for row in rows]
    title = f"Prefill of {arguments.context:,} tokens on {arguments.ranks} ranks"
    subtitle = f"{words_of(arguments)}; median of {arguments.repeats} runs, 95% interval"
    chart = bars("", values, title=title, subtitle=subtitle, unit="seconds, less is better")
    return summary, [chart]


if __name__ == "__main__":
    # What takes seconds to import comes only in functions, so that wrong arguments are refused at once.
    sys.exit(benchmark("prefill", parse_arguments(), measure_rank, report))
