"""Prefill across hosts: context parallelism between them and tensor parallelism inside, against tensor parallelism.

The hosts are network namespaces on this machine, joined by links whose rate is changed from run to run: every round has
all methods at all rates. Needs root, iproute2, pdsh and openssh-server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from harness.launch import Launch, Rows, benchmark
from harness.links import UNLIMITED, checked_rates, set_rate
from harness.options import Options

OWN, PEER = "cp", "tp"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--hosts", 2, "hosts, each with an equal share of --ranks")
    options.add("--rate", "1gbit", "limit of every link in each direction")
    options.add("--context", 8192, "tokens of the prompt")
    options.add("--repeats", 7, "rounds")
    options.profile()
    options.model()
    arguments = options.parse(argv)
    if arguments.hosts < 2 or arguments.ranks % arguments.hosts:
        of = f"--ranks {arguments.ranks}"
        options.error(f"--hosts {arguments.hosts}: allowed: 2 or more, of which {of} is a multiple")
    options.check_kv_shards(arguments.kv_heads, arguments.ranks)
    checked_rates(options, "--rate", arguments.rate)
    return arguments


def measure_rank(arguments: argparse.Namespace) -> Rows:
    from harness.models import random_ids, random_model, twin
    from harness.prefills import ContextParallelPrefill, TensorParallelPrefill, tensor_parallel
    from harness.profiles import keep_measured
    from harness.sampling import Switched, measure
    from harness.world import Agreement, join_world

    import megakv

    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_model(arguments, positions=arguments.context, device=world.device)
    inside, rates = arguments.ranks // arguments.hosts, (UNLIMITED, arguments.rate)
    for rate in reversed(rates):
        set_rate(rate, world)
        keep_measured(world, model, arguments, rate=rate, tp_size=inside)
    parallel = {"size": arguments.hosts, "prefill": "pass_kv"}
    config = {"tensor_parallel": {"tp_size": inside}, "megakv": {"context_parallel": parallel}}
    engine = megakv.init_inference(twin(model), config)
    methods = [
        ContextParallelPrefill(OWN, engine, ids),
        TensorParallelPrefill(f"{PEER}_gloo", tensor_parallel(model, world), ids),
    ]
    rated = [Switched(method, rate, partial(set_rate, rate, world)) for method in methods for rate in rates]
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, output: Any) -> dict[str, Any]:
        return {"max_logit_difference": agreement.check(name, output.logits[0, -1])}

    samples = measure(world, rated, repeats=arguments.repeats, inspect=inspect)
    engine.destroy()
    world.leave()
    place = {"ranks": world.size, "context": arguments.context}
    return [
        sample.to_row(method=each.method.name.removesuffix("_gloo"), rate=each.state, **place)
        for each, sample in zip(rated, samples, strict=True)
    ]


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the limit costs each method, and how much faster context parallelism is at each rate."""
    from harness.statistics import paired_ratio

    seconds = {(row["method"], row["rate"]): row["seconds"] for row in rows}
    rates = [row["rate"] for row in rows if row["method"] == OWN]
    limited = next(rate for rate in rates if rate != UNLIMITED)
    return {
        "limited_over_unlimited": {
            name: paired_ratio(seconds[name, limited], seconds[name, UNLIMITED]).to_json() for name in (OWN, PEER)
        },
        "speedup": {rate: paired_ratio(seconds[PEER, rate], seconds[OWN, rate]).to_json() for rate in rates},
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    from harness.charts import bars
    from harness.models import words_of
    from harness.publish import show_difference, show_intervals, show_table, time_table
    from harness.statistics import median

    summary = summarise(rows)
    show_table("", time_table([{**row, "method": f"{row['method']}, {row['rate']}"} for row in rows]))
    show_intervals("Time with the limit over time without", summary["limited_over_unlimited"])
    show_intervals(f"Time of {PEER} over time of {OWN}", summary["speedup"])
    show_difference(summary)
    inside = arguments.ranks // arguments.hosts
    values = [(f"{row['method']}, {row['rate']}", median(row["seconds"]), row["method"] == OWN) for row in rows]
    title = f"Prefill of {arguments.context:,} tokens on {arguments.hosts} hosts of {inside} rank(s)"
    methods = f"cp: CP{arguments.hosts} x TP{inside}, pass-KV; tp: DeepSpeed TP{arguments.ranks}"
    chart = bars("", values, title=title, subtitle=f"{methods}. {words_of(arguments)}", unit="seconds, less is better")
    return summary, [chart]


if __name__ == "__main__":
    asked = parse_arguments()
    launch = Launch(asked.ranks, name="hosts.py", rate=UNLIMITED, hosts=asked.hosts)
    sys.exit(benchmark("hosts", asked, measure_rank, report, [launch]))
