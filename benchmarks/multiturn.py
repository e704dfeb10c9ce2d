"""Later turns of a conversation: ring pass-KV against ring pass-Q by the share of tokens that are new.

The form of context parallelism's Section 4.2.4, Table 4 and Figure 9: the length T + P is fixed, and of it T tokens are
new and P are cached. What `auto` chooses is judged by the samples of the method that it chose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.charts import lines
from harness.launch import Found, Launch, Rows, Summary, benchmark
from harness.links import FREE, checked_rates
from harness.methods import ContextParallel, Peers, Prefill
from harness.models import random_ids, random_model, sharded_cache, words_of
from harness.options import Options
from harness.predictions import Predictions, measured
from harness.publish import show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import Case, crossover, judge, paired_ratio

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.shape import ModelShape
from megakv.forward.choice import Evidence, choose_prefill

METHODS = ("pass_kv", "pass_q")
WITHOUT_PROFILE = "no profile"
POLICIES = ("cost", "alg1", "alg5")
"""Policies that decide with a profile; an engine would go by the first one."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--context", 8192, "T + P, new and cached tokens")
    options.numbers("--miss-rates", "0.5,1,2.5,5,10,20,50,100", "100 T / (T + P), in percent", kind=float, most=100)
    options.add("--pairs", 7, "rounds of both methods at least")
    options.add("--most-pairs", 41, "rounds at most")
    options.add("--cell-seconds", 15.0, "further rounds begin for so long")
    options.add("--rates", FREE, "links between ranks: free, or limits such as 1gbit between hosts, as root")
    options.profile(60.0)
    options.hidden("--rate")
    options.model(layers=4, kv_heads=2)
    arguments = options.parse(argv)
    if arguments.ranks < 2:
        options.error(f"--ranks {arguments.ranks}: nothing is passed on fewer than 2 ranks")
    if arguments.most_pairs < arguments.pairs:
        options.error(f"--most-pairs {arguments.most_pairs} is less than --pairs {arguments.pairs}")
    for rate in arguments.miss_rates:
        if round(arguments.context * rate / 100) < 2 * arguments.ranks:
            options.error(
                f"--miss-rates {rate:g} of --context {arguments.context}: allowed: at least "
                f"{2 * arguments.ranks} new tokens on --ranks {arguments.ranks}; fewer are decoded, not prefilled"
            )
    arguments.rates = checked_rates(options, "--rates", arguments.rates)
    return arguments


def find_evidence(known: Predictions | None) -> dict[str, Any]:
    """By policy, the one that decides for `auto` last, what it decides from."""
    evidence = {WITHOUT_PROFILE: Evidence()}
    return evidence | ({policy: Evidence(policy, known.profile) for policy in reversed(POLICIES)} if known else {})


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    """Measure all miss rates over the links of one launch, as one of its ranks."""
    model = random_model(arguments, positions=arguments.context, device=world.device)
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    limits = {"repeats": arguments.most_pairs, "least": arguments.pairs, "budget_s": arguments.cell_seconds}
    rows: Rows = []
    with Peers(model, world) as peers:
        engines = {name: peers.engine(name, {"prefill": name}) for name in METHODS}
        known = measured(world, model.config, model.dtype, arguments)
        evidence, shape = find_evidence(known), ModelShape.from_config(model.config, dtype=model.dtype).attention()
        for rate in arguments.miss_rates:
            new = round(arguments.context * rate / 100)
            cached = arguments.context - new
            # Both methods' turns are on top of it.
            cache = sharded_cache(model, world, batch=1, tokens=cached)
            on_top: Any = partial(Prefill, past_key_values=cache)
            rewind = partial(cache.cut_back, cached)
            turns = [on_top(name, ContextParallel(each), ids[:, cached:], rewind) for name, each in engines.items()]
            work = Workload((new,), (cached,), world.size)
            choices = {name: choose_prefill(known, work, shape) for name, known in evidence.items()}
            place = {"ranks": world.size, "context": arguments.context, "rate": arguments.rate}
            place |= {"miss_rate": new / arguments.context, "new_tokens": new, "cached_tokens": cached}
            place |= {"auto": list(choices.values())[-1], "policies": choices}
            samples = measure(world, turns, Agreement(world, arguments.dtype), **limits)
            for each in samples:
                rows.append(each.to_row(**place, predicted_s=known and known.prefill(each.method, new, cached)))
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """The verdict on `auto` over all rates of links and by rate, and where the methods cross."""

    def cases(policy: str | None = None, rate: str | None = None) -> list[Case]:
        """With the choice of `auto` or of one policy, over all links or those of one rate."""
        return [
            Case(kv["miss_rate"], dict(zip(METHODS, (kv["seconds"], q["seconds"]), strict=True)),
                 kv["policies"][policy] if policy else kv["auto"])
            for kv, q in zip(rows[::2], rows[1::2], strict=True) if rate in (None, kv["rate"])
        ]  # fmt: skip

    rates: Summary = {}
    points = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        group = cases(rate=rate)
        speeds = [paired_ratio(case.seconds["pass_q"], case.seconds["pass_kv"]).to_json() for case in group]
        own = [
            {"miss_rate": case.miss_rate, "auto": case.chosen, **speed}
            for case, speed in zip(group, speeds, strict=True)
        ]
        rates[rate] = {**judge(group), "crossover_miss_rate": crossover(group), "speed_ratio": own}
        points += [
            {"rate": rate, "miss": 100 * point["miss_rate"], "auto": point["auto"], "speed": point} for point in own
        ]
    summary = {
        **judge(cases()),
        "policies": {policy: judge(cases(policy)) for policy in rows[0]["policies"]},
        "equation_1_miss_rate": 2 * arguments.kv_heads / arguments.heads,
        "rates": rates,
        "not_measured": dict(skipped),
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }
    show(rows, "rate method miss_rate:% new_tokens cached_tokens seconds auto")
    show(points, "rate miss auto speed", "Speed of pass-KV over pass-Q")
    show_summary({**summary, "rates": {rate: found["crossover_miss_rate"] for rate, found in rates.items()}})
    words = {
        "title": f"pass-KV / pass-Q speed ratio, T + P = {arguments.context:,}, CP{arguments.ranks}",
        "subtitle": f"{words_of(arguments)}; rings: auto chose pass-Q",
        "x_label": "cache miss rate T / (T + P), percent", "y_label": "speed of pass-KV over pass-Q",
        "hollow": lambda point: point["auto"] == "pass_q", "level": 1.0,
    }  # fmt: skip
    return rows, summary, [lines("", points, "miss", "speed", "links: {rate}", **words)]


if __name__ == "__main__":
    asked = parse_arguments()
    launches = [Launch(asked.ranks, ["--rate", each], f"links: {each}", name=each, rate=each) for each in asked.rates]
    sys.exit(benchmark("multiturn", asked, measure_rank, report, launches))
