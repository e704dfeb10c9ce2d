"""Prefill across hosts: context parallelism between them and tensor parallelism inside, against tensor parallelism.

The hosts are network namespaces on this machine, joined by links whose rate is changed from run to run: every round has
all methods at all rates. Needs root, iproute2, pdsh and openssh-server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.charts import bars
from harness.launch import Found, Launch, Rows, benchmark
from harness.links import UNLIMITED, checked_rates, set_rate
from harness.methods import ContextParallel, Peers, Prefill
from harness.models import random_ids, random_model, words_of
from harness.options import Options
from harness.predictions import measured
from harness.publish import TIMES, show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import paired_ratio

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


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_model(arguments, positions=arguments.context, device=world.device)
    inside, rates = arguments.ranks // arguments.hosts, (UNLIMITED, arguments.rate)
    predicted: dict[tuple[str, str], float | None] = {}
    for rate in reversed(rates):
        set_rate(rate, world)
        known = measured(world, model.config, model.dtype, arguments, tp_size=inside)
        predicted[OWN, rate] = known and known.prefill("pass_kv", arguments.context)
    with Peers(model, world) as peers:
        engine = peers.engine(OWN, {"prefill": "pass_kv"}, tp_size=inside)
        both = {OWN: ContextParallel(engine), PEER: peers.tensor_parallel("tp_gloo")}
        places = [(name, rate) for name in both for rate in rates]
        methods = [Prefill(f"{name}, {rate}", both[name], ids, partial(set_rate, rate, world)) for name, rate in places]
        samples = measure(world, methods, Agreement(world, arguments.dtype), repeats=arguments.repeats)
    size = {"ranks": world.size, "context": arguments.context}
    return [
        sample.to_row(method=name, rate=rate, **size, predicted_s=predicted.get((name, rate)))
        for (name, rate), sample in zip(places, samples, strict=True)
    ]


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Report what the limit costs each method, and how much faster context parallelism is at each rate."""
    seconds = {(row["method"], row["rate"]): row["seconds"] for row in rows}
    limited = {name: paired_ratio(seconds[name, arguments.rate], seconds[name, UNLIMITED]) for name in (OWN, PEER)}
    speedup = {rate: paired_ratio(seconds[PEER, rate], seconds[OWN, rate]) for rate in (UNLIMITED, arguments.rate)}
    summary = {
        "limited_over_unlimited": {name: found.to_json() for name, found in limited.items()},
        "speedup": {rate: found.to_json() for rate, found in speedup.items()},
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }
    show(rows, f"method rate {TIMES}")
    show_summary(summary)
    inside = arguments.ranks // arguments.hosts
    words = {"title": f"Prefill of {arguments.context:,} tokens on {arguments.hosts} hosts of {inside} rank(s)"}
    methods = f"cp: CP{arguments.hosts} x TP{inside}, pass-KV; tp: DeepSpeed TP{arguments.ranks}"
    words |= {"subtitle": f"{methods}. {words_of(arguments)}", "x_label": "seconds, less is better"}
    return rows, summary, [bars("", rows, "{method}, {rate}", own=lambda row: row["method"] == OWN, **words)]


if __name__ == "__main__":
    asked = parse_arguments()
    launch = Launch(asked.ranks, name="hosts.py", rate=UNLIMITED, hosts=asked.hosts)
    sys.exit(benchmark("hosts", asked, measure_rank, report, [launch]))
