"""Later turns of a conversation: ring pass-KV against ring pass-Q by the share of tokens that are new.

The form of context parallelism's Section 4.2.4, Table 4 and Figure 9: the length T + P is fixed, and of it T tokens are
new and P are cached. What `auto` chooses is judged by the samples of the method that it chose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.launch import Launch, Rows, benchmark
from harness.links import FREE, checked_rates
from harness.options import Options

METHODS = ("pass_kv", "pass_q")
WITHOUT_PROFILE = "no profile"
POLICIES = ("cost", "alg1", "alg5")
"""What decides with a profile; the first one is what an engine would go by."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--context", 8192, "T + P, new and cached tokens")
    options.numbers("--miss-rates", "0.5,1,2.5,5,10,20,50,100", "100 T / (T + P), in percent", kind=float, most=100)
    options.add("--pairs", 7, "rounds of both methods at least")
    options.add("--most-pairs", 41, "rounds at most")
    options.add("--cell-seconds", 15.0, "further rounds begin for so long")
    options.add("--rates", FREE, "links between ranks: free, or limits such as 1gbit between hosts, as root")
    text = "configuration whose megakv.context_parallel section decides for auto; {rate} in its name becomes the rate"
    options.add("--config", None, text, kind=str)
    options.profile(60.0)
    options.hidden("--rate")
    options.model(layers=4, kv_heads=2)
    arguments = options.parse(argv)
    if arguments.ranks < 2:
        options.error(f"--ranks {arguments.ranks}: nothing is passed on fewer than 2 ranks")
    if arguments.most_pairs < arguments.pairs:
        options.error(f"--most-pairs {arguments.most_pairs} is less than --pairs {arguments.pairs}")
    for rate in arguments.miss_rates:
        if new_tokens(arguments.context, rate) < 2 * arguments.ranks:
            options.error(
                f"--miss-rates {rate:g} of --context {arguments.context}: allowed: at least "
                f"{2 * arguments.ranks} new tokens on --ranks {arguments.ranks}; fewer are decoded, not prefilled"
            )
    arguments.rates = checked_rates(options, "--rates", arguments.rates)
    return arguments


def new_tokens(context: int, miss_rate: float) -> int:
    return round(context * miss_rate / 100)


def find_evidence(arguments: argparse.Namespace, world: Any, model: Any) -> dict[str, Any]:
    """By policy, the one that decides for `auto` last, what it decides from: a profile measured now, or a file's."""
    from harness.profiles import keep_profile, measured_profile, shape_of

    from megakv.choice import Evidence
    from megakv.config import load_config
    from megakv.costmodel.hardware import load_profile
    from megakv.costmodel.policy_fit import load_fit

    evidence = {WITHOUT_PROFILE: Evidence()}
    if arguments.config is not None:
        config = load_config(arguments.config.replace("{rate}", arguments.rate)).megakv.context_parallel
        profile = None if config.profile is None else load_profile(config.profile)
        fit = None if config.fit is None else load_fit(config.fit)
        name = config.policy if config.profile or config.fit else WITHOUT_PROFILE
        evidence.pop(name, None)
        return evidence | {name: Evidence(config.policy, profile, fit)}
    if arguments.profile_seconds:
        profile = measured_profile(world, shape_of(model), arguments)
        keep_profile(world, profile, arguments.json, f"{world.size}-{arguments.rate}")
        evidence |= {policy: Evidence(policy, profile) for policy in reversed(POLICIES)}
    return evidence


def measure_rank(arguments: argparse.Namespace) -> Rows:
    """Measure all miss rates over the links of one launch, as one of its ranks."""
    from harness.breakdown import Breakdown
    from harness.generations import sharded_cache
    from harness.models import random_ids, random_model, twin
    from harness.prefills import Turn
    from harness.profiles import shape_of
    from harness.sampling import measure
    from harness.world import Agreement, join_world

    import megakv
    from megakv.choice import choose_prefill
    from megakv.costmodel.context_parallel import Workload

    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    model = random_model(arguments, positions=arguments.context, device=world.device)
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    engines = {}
    for name in METHODS:
        section = {"context_parallel": {"size": world.size, "prefill": name}, "tracking": {"timeline": "multiturn.png"}}
        engines[name] = megakv.init_inference(twin(model), {"megakv": section})
    evidence, shape = find_evidence(arguments, world, model), shape_of(model).attention()
    limits = {"repeats": arguments.most_pairs, "least": arguments.pairs, "budget_s": arguments.cell_seconds}
    rows: Rows = []
    for rate in arguments.miss_rates:
        new = new_tokens(arguments.context, rate)
        cached = arguments.context - new
        cache = sharded_cache(model, world, batch=1, tokens=cached)
        turns = {name: Turn(name, engine, ids[:, cached:], cache) for name, engine in engines.items()}
        work = Workload((new,), (cached,), world.size)
        choices = {name: choose_prefill(known, work, shape) for name, known in evidence.items()}
        agreement = Agreement(world, arguments.dtype)
        marks = {name: Breakdown(turn.model) for name, turn in turns.items()}

        def inspect(name: str, output: Any, agreement: Agreement = agreement) -> dict[str, Any]:
            return {"max_logit_difference": agreement.check(name, output.logits[0])}

        place = {"ranks": world.size, "context": arguments.context, "rate": arguments.rate}
        place |= {"miss_rate": new / arguments.context, "new_tokens": new, "cached_tokens": cached}
        place |= {"auto": list(choices.values())[-1], "policies": choices}
        rows += [
            # Every rank asks for the times.
            sample.to_row(**place, attention_us=marks[sample.method].microseconds())
            for sample in measure(world, list(turns.values()), inspect=inspect, **limits)
        ]
    for engine in engines.values():
        engine.destroy()
    world.leave()
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    from harness.multiturn_report import chart, show, summarise

    summary = summarise(rows, 2 * arguments.kv_heads / arguments.heads, skipped)
    show(rows, summary)
    return summary, [chart(arguments, summary)]


if __name__ == "__main__":
    asked = parse_arguments()
    launches = [
        Launch(asked.ranks, ["--rate", rate], f"{asked.ranks} ranks, links: {rate}", name=rate, rate=rate)
        for rate in asked.rates
    ]
    sys.exit(benchmark("multiturn", asked, measure_rank, report, launches))
