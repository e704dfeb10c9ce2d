"""Time to read a prompt: MegaKV's context parallelism, DeepSpeed's tensor parallelism, and a single process.

By number of ranks and tokens (context parallelism, Sections 4.2.1 and 4.3 in form), with --tokens through `generate`;
with --hosts on hosts, tensor-parallel inside (Section 4.2.2), the rate of whose links changes from run to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.charts import bars
from harness.launch import Found, Launch, Rows, Summary, benchmark
from harness.links import FREE, UNLIMITED, checked_rates, set_rate
from harness.methods import TENSOR_PARALLEL, Generation, Peers, Prefill
from harness.models import random_ids, random_model, without_stop, words_of
from harness.options import Options
from harness.predictions import measured
from harness.publish import TIMES, show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import median, paired_ratio, ratio

SINGLE = "single"
OWN = ("pass_kv", "pass_q", "all_gather")
PLACE = ("ranks", "context", "rate")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--quick", False, "a shorter prompt and fewer runs")
    options.numbers("--context", {"": "8192", "quick": "2048"}, "tokens of the prompts")
    options.numbers("--sizes", None, "numbers of ranks, a launch each (default: --ranks alone)")
    options.names("--methods", (SINGLE, *TENSOR_PARALLEL, *OWN), "single,tp,tp_gloo,pass_kv", "which to run")
    options.add("--tokens", 0, "tokens to generate; 0: one pass", least=0)
    options.add("--hosts", 0, "hosts of network namespaces, each with an equal share of --ranks; 0: none", least=0)
    options.add("--rates", "1gbit", "with --hosts: limits of every link in each direction, beside none")
    options.add("--repeats", {"": 5, "quick": 3}, "timed runs of each method at most")
    options.add("--cell-seconds", 3600.0, "no third or further round of a length begins after them")
    options.profile()
    options.model()
    arguments = options.parse(argv)
    arguments.sizes = arguments.sizes or [arguments.ranks]
    if arguments.sizes[-1] > arguments.ranks:
        options.error(f"--sizes {','.join(map(str, arguments.sizes))}: at most --ranks {arguments.ranks}")
    if arguments.tokens == 1:
        options.error("--tokens 1: the time between tokens needs two")
    if arguments.hosts == 1 or (arguments.hosts and arguments.ranks % arguments.hosts):
        of = f"--ranks {arguments.ranks}"
        options.error(f"--hosts {arguments.hosts}: allowed: 2 or more, of which {of} is a multiple")
    if set(arguments.methods).intersection(TENSOR_PARALLEL):
        remedy = "take other numbers, or leave tp and tp_gloo out of --methods"
        for size in arguments.sizes:
            options.check_kv_shards(arguments.kv_heads, size, remedy)
    arguments.rates = [UNLIMITED, *checked_rates(options, "--rates", arguments.rates)] if arguments.hosts else [FREE]
    return arguments


def names_of(arguments: argparse.Namespace, size: int) -> list[str]:
    """Methods on so many ranks: a single process on the fewest, what needs several ranks on several."""
    absent = set(TENSOR_PARALLEL) if size == 1 else set() if size == arguments.sizes[0] else {SINGLE}
    # DeepSpeed's shared-memory op is for one host.
    absent |= {"tp"} if arguments.hosts else set()
    return [name for name in arguments.methods if name not in absent]


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    # What takes seconds to import comes only in functions, so that wrong arguments are refused at once.
    if "tp_gloo" in arguments.methods and world.device.type != "cpu":
        raise ValueError("--methods tp_gloo runs on CPU only: set DS_ACCELERATOR=cpu, or leave it out")
    tokens, inside = arguments.tokens, world.size // arguments.hosts if arguments.hosts else 1
    model = without_stop(random_model(arguments, positions=arguments.context[-1] + tokens, device=world.device))
    known = {}
    for rate in reversed(arguments.rates):
        if arguments.hosts:
            set_rate(rate, world)
        known[rate] = measured(world, model.config, model.dtype, arguments, tp_size=inside)
    limits = {"repeats": arguments.repeats, "budget_s": arguments.cell_seconds, "least": 2}
    rows: Rows = []
    with Peers(model, world) as peers:
        runs = [(name, rate) for name in names_of(arguments, world.size) for rate in arguments.rates]
        for context in arguments.context:
            ids = random_ids(arguments.vocab, context, world.device)
            methods: list[Any] = []
            for name, rate in runs:
                steps = [partial(set_rate, rate, world)] if arguments.hosts else []
                said = f"{name}, {rate}" if arguments.hosts else name
                if tokens:
                    methods.append(Generation(said, peers.peer(name, tp_size=inside), ids, tokens, *steps))
                else:
                    methods.append(Prefill(said, peers.peer(name, tp_size=inside), ids, *steps))
            samples = measure(world, methods, Agreement(world, arguments.dtype), **limits)
            for (name, rate), method, sample in zip(runs, methods, samples, strict=True):
                predicted, row = known[rate], sample.to_row(method=name, ranks=world.size, context=context, rate=rate)
                row["predicted_s"] = predicted and predicted.prefill(name, context, generating=bool(tokens))
                if tokens:
                    # The untimed run is not a sample.
                    row["ttit_seconds"] = [max(times) for times in zip(*world.gather(method.ttits[1:]), strict=True)]
                    # The steps that are measured follow the first token; their mean is that of the middle one.
                    steps_s = predicted and name in OWN and predicted.decode("replicated", context + tokens // 2)
                    row["predicted_ttit_s"] = steps_s or None
                rows.append(row)
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Speed-ups of MegaKV's methods over the others; what more ranks gain; what limits of links cost."""
    cells: dict[tuple[Any, ...], Summary] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in PLACE), {})[row["method"]] = row["seconds"]
    summary: Summary = {name: {} for name in ("speedup", "scaling_ratio", "ttft_ttit", "limited_over_unlimited")}
    for (ranks, context, rate), seconds in cells.items():
        own, peers = [[name for name in seconds if (name in OWN) == ours] for ours in (True, False)]
        cell = f"{ranks} ranks, {context} tokens" + f", {rate}" * (rate != FREE)
        summary["speedup"][cell] = {
            name: {each: paired_ratio(seconds[each], seconds[name]).to_json() for each in peers} for name in own
        }
        for name in seconds:
            # With one rank: MegaKV's own, and for the others plain transformers.
            first = cells.get((1, context, rate), {}).get(name if name in OWN else SINGLE)
            if first is not None and name != SINGLE:
                found = summary["scaling_ratio"].setdefault(str(context), {}).setdefault(name, {})
                found[str(ranks)] = ratio(first, seconds[name], paired=False).to_json()
            if arguments.hosts and rate != UNLIMITED:
                unlimited = cells[ranks, context, UNLIMITED][name]
                found = summary["limited_over_unlimited"].setdefault(rate, {})
                found[name] = paired_ratio(seconds[name], unlimited).to_json()
    for row in (row for row in rows if "ttit_seconds" in row):
        times = {"ttft_s": median(row["seconds"]).to_json(), "ttit_s": median(row["ttit_seconds"]).to_json()}
        summary["ttft_ttit"].setdefault(str(row["context"]), {})[f"{row['method']} {row['ranks']}"] = times
    summary["max_logit_difference"] = max(row["max_logit_difference"] for row in rows)
    show(rows, f"method rate {TIMES} ttit_seconds:ms")
    show_summary(summary)
    words = {"title": "Prefill by tokens, ranks and method", "subtitle": words_of(arguments)}
    label = "{context:,} x {ranks}: {method}" + ", {rate}" * bool(arguments.hosts)
    last = [row for row in rows if row["context"] == rows[-1]["context"]]
    own = {"own": lambda row: row["method"] in OWN, "x_label": "seconds, less is better"}
    return rows, summary, [bars("", last, label, **own, **words)]


if __name__ == "__main__":
    asked = parse_arguments()
    shared_memory = not asked.hosts and bool(set(asked.methods).intersection(TENSOR_PARALLEL))
    launches = [Launch(size, text=f"ranks: {size}, of {asked.sizes}") for size in asked.sizes]
    if asked.hosts:
        launches = [Launch(asked.ranks, name="hosts", rate=UNLIMITED, hosts=asked.hosts)]
    sys.exit(benchmark("prefill", asked, measure_rank, report, launches, shared_memory=shared_memory))
