"""Later turns of a conversation: ring pass-KV against ring pass-Q by the share of tokens that are new.

The form of context parallelism's Section 4.2.4, Table 4 and Figure 9: the length T + P is fixed, and of it T tokens are
new and P are cached. What `auto` chooses is judged by the samples of the method that it chose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.arguments import (
    add_model_arguments,
    add_rank_arguments,
    check_model_arguments,
    check_positive,
    check_rank_arguments,
)
from harness.launches import LaunchError, Launches, add_part_argument
from harness.links import FREE, LimitedLinks, check_rate, unavailable
from harness.ranks import is_rank, serve, start_ranks

METHODS = ("pass_kv", "pass_q")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_arguments(parser)
    parser.add_argument("--context", type=int, default=8192, help="T + P, new and cached tokens (default 8192)")
    parser.add_argument(
        "--miss-rates", default="0.5,1,2.5,5,10,20,50,100", help="100 T / (T + P), in percent (default %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=7, help="rounds of both methods at least (default 7)")
    parser.add_argument("--most-pairs", type=int, default=41, help="rounds at most (default 41)")
    parser.add_argument("--cell-seconds", type=float, default=15, help="further rounds begin for so long (default 15)")
    parser.add_argument(
        "--rates", default=FREE, help=f"links between ranks: {FREE}, or limits such as 1gbit between hosts, as root"
    )
    parser.add_argument(
        "--config",
        metavar="JSON",
        help="configuration file whose megakv.context_parallel section decides for auto; {rate} in it becomes the rate",
    )
    parser.add_argument(
        "--profile-seconds",
        type=float,
        default=60,
        help="how long the links' hardware profile is measured for auto, without --config; 0: none (default 60)",
    )
    add_part_argument(parser)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    add_model_arguments(parser, layers=4, kv_heads=2)
    arguments = parser.parse_args(argv)
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    check_positive(parser, arguments, "context", "pairs", "most_pairs", "cell_seconds")
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: nothing is passed on fewer than 2 ranks")
    if arguments.profile_seconds < 0:
        parser.error(f"--profile-seconds {arguments.profile_seconds:g}: allowed: 0 or more")
    if arguments.most_pairs < arguments.pairs:
        parser.error(f"--most-pairs {arguments.most_pairs} is less than --pairs {arguments.pairs}")
    try:
        arguments.miss_rates = sorted({float(rate) for rate in arguments.miss_rates.split(",")})
    except ValueError:
        parser.error(f"--miss-rates {arguments.miss_rates}: allowed: numbers above 0 and up to 100")
    for rate in arguments.miss_rates:
        if not 0 < rate <= 100 or new_tokens(arguments.context, rate) < 2 * arguments.ranks:
            parser.error(
                f"--miss-rates {rate:g} of --context {arguments.context}: allowed: up to 100, and at least "
                f"{2 * arguments.ranks} new tokens on --ranks {arguments.ranks}; fewer are decoded, not prefilled"
            )
    arguments.rates = arguments.rates.split(",")
    for rate in arguments.rates:
        try:
            check_rate(rate)
        except ValueError as error:
            parser.error(f"--rates: {error}")
    return arguments


def new_tokens(context: int, miss_rate: float) -> int:
    """T, of a miss rate in percent."""
    return round(context * miss_rate / 100)


def run(arguments: argparse.Namespace) -> None:
    """Measure all miss rates over the links of one launch, as one of its ranks."""
    from harness.agreement import Agreement
    from harness.breakdown import Breakdown
    from harness.caches import sharded_cache
    from harness.foretold import foretold
    from harness.launches import leave_part
    from harness.models import random_ids, random_llama, twin
    from harness.policies import Policies
    from harness.predictions import predictions_of, shape_of
    from harness.profiles import keep_profile, measured_profile
    from harness.report import describe_machine
    from harness.sampling import measure
    from harness.turns import Turn
    from harness.world import join_world

    import megakv

    machine = describe_machine()
    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    model = random_llama(arguments, positions=arguments.context, device=world.device)
    ids = random_ids(arguments.vocab, arguments.context, world.device)

    engines = {}
    for name in METHODS:
        section = {"context_parallel": {"size": world.size, "prefill": name}, "tracking": {"timeline": "multiturn.png"}}
        engines[name] = megakv.init_inference(twin(model), {"megakv": section})
    policies = Policies(world, model)
    predictions = None
    if arguments.config is not None:
        policies.use_config(arguments.config.replace("{rate}", arguments.rate))
    elif arguments.profile_seconds:
        measuring = measured_profile(
            world, shape_of(model), seconds=arguments.profile_seconds, timeout_s=arguments.timeout
        )
        with measuring as profile:
            policies.use_profile(profile)
            predictions = predictions_of(profile, world, model)
        keep_profile(world, predictions.profile, arguments.json, f"{world.size}-{arguments.rate}")
    rows: list[dict[str, Any]] = []
    for rate in arguments.miss_rates:
        new = new_tokens(arguments.context, rate)
        cached = arguments.context - new
        cache = sharded_cache(model, world, batch=1, tokens=cached)
        turns = {name: Turn(name, engine, ids[:, cached:], cache) for name, engine in engines.items()}
        choices = policies.choose(new, cached)
        agreement = Agreement(world, arguments.dtype)

        marks = {name: Breakdown(turn.model) for name, turn in turns.items()}

        def inspect(name: str, output: Any, agreement: Agreement = agreement) -> dict[str, Any]:
            return {"max_logit_difference": agreement.check(name, output.logits[0])}

        samples = measure(
            world,
            list(turns.values()),
            repeats=arguments.most_pairs,
            least=arguments.pairs,
            budget_s=arguments.cell_seconds,
            inspect=inspect,
        )
        found = [
            # Every rank asks for the times.
            sample.to_row(
                ranks=world.size,
                context=arguments.context,
                rate=arguments.rate,
                miss_rate=new / arguments.context,
                new_tokens=new,
                cached_tokens=cached,
                auto=choices[policies.deciding],
                policies=choices,
                attention_us=marks[sample.method].microseconds(),
                load_average=machine["load_average"],
            )
            for sample in samples
        ]
        rows += [row | foretold("multiturn", row, predictions, arguments) for row in found]
    if world.rank == 0:
        leave_part(arguments.part, {"machine": machine, "rows": rows})
    for engine in engines.values():
        engine.destroy()
    world.leave()


def main() -> int:
    """Entry of the process started by hand, which starts the ranks for every rate of links, and of every rank."""
    arguments = parse_arguments()
    if is_rank():
        return serve(run, arguments)
    launches = Launches(arguments)
    parts: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    reason = unavailable() if set(arguments.rates) - {FREE} else None
    for rate in arguments.rates:
        if rate != FREE and reason is not None:
            skipped[rate] = reason
            print(f"{rate}: not measured: {reason}", file=sys.stderr)
            continue
        print(f"{arguments.ranks} ranks, links: {rate}", flush=True)
        start = start_ranks if rate == FREE else LimitedLinks(rate)
        try:
            parts[rate] = launches.run(arguments.ranks, ["--rate", rate], start=start)
        except LaunchError as error:
            return error.status
    if not parts:
        return 1
    from megakv.launcher.process import quiet_libraries

    quiet_libraries()
    from harness.multiturn_report import report

    machine = next(iter(parts.values()))["machine"]
    report(arguments, machine, [row for part in parts.values() for row in part["rows"]], skipped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
