"""Prefill across hosts: context parallelism between them and tensor parallelism inside, against tensor parallelism.

The hosts are network namespaces on this machine, joined by links whose rate is changed from run to run: every round has
all methods at all rates. Needs root, iproute2, pdsh and openssh-server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arguments import (
    add_model_arguments,
    add_profile_argument,
    add_rank_arguments,
    check_kv_shards,
    check_model_arguments,
    check_positive,
    check_profile_argument,
    check_rank_arguments,
)
from harness.launches import LaunchError, Launches, add_part_argument
from harness.links import UNLIMITED, LimitedLinks, check_rate, unavailable
from harness.ranks import is_rank, serve

if TYPE_CHECKING:
    from harness.predictions import Predictions
    from harness.world import World

OWN = "cp"
PEER = "tp"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_arguments(parser)
    parser.add_argument("--hosts", type=int, default=2, help="hosts, each with an equal share of --ranks (default 2)")
    parser.add_argument("--rate", default="1gbit", help="limit of every link in each direction (default 1gbit)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt (default 8192)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default 7)")
    add_part_argument(parser)
    add_profile_argument(parser)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    check_profile_argument(parser, arguments)
    check_positive(parser, arguments, "context", "repeats")
    if arguments.hosts < 2 or arguments.ranks % arguments.hosts:
        parser.error(f"--hosts {arguments.hosts}: allowed: 2 or more, of which --ranks {arguments.ranks} is a multiple")
    check_kv_shards(parser, arguments.kv_heads, arguments.ranks)
    try:
        check_rate(arguments.rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return arguments


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


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print tables of the results."""
    from harness.report import align, time_table
    from harness.statistics import Interval

    lines = [["", "median ratio [95%]"]]
    for name, value in summary["limited_over_unlimited"].items():
        lines.append([f"{name}: time with the limit over time without", str(Interval(**value))])
    for rate, value in summary["speedup"].items():
        lines.append([f"{rate}: time of {PEER} over time of {OWN}", str(Interval(**value))])
    labelled = [{**row, "method": f"{row['method']}, {row['rate']}"} for row in rows]
    print(f"\n{time_table(labelled)}\n\n{align(lines)}\n")
    print(f"largest difference of the last logits: {summary['max_logit_difference']:.1e} of the largest logit")


def draw(path: Path, arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw the times as bars, beside the results."""
    from harness.chart import draw_bars
    from harness.statistics import median

    inside = arguments.ranks // arguments.hosts
    picture = path.with_suffix(".png")
    draw_bars(
        picture,
        [(f"{row['method']}, {row['rate']}", median(row["seconds"]), row["method"] == OWN) for row in rows],
        title=f"Prefill of {arguments.context:,} tokens on {arguments.hosts} hosts of {inside} rank(s)",
        subtitle=f"cp: CP{arguments.hosts} x TP{inside}, pass-KV; tp: DeepSpeed TP{arguments.ranks}. Llama, "
        f"{arguments.layers} layers of {arguments.hidden}, {arguments.dtype}, {arguments.threads} thread(s) per rank",
        unit="seconds, less is better",
    )
    return [picture]


def predictions_by_rate(arguments: argparse.Namespace, world: World, model: Any) -> dict[str, Predictions]:
    """Predictions from a profile of the ranks at every rate; none without a time to measure it.

    Every rank must call it.
    """
    from harness.predictions import predictions_of, shape_of
    from harness.profiles import keep_profile, measured_profile
    from harness.rated import set_rate

    found: dict[str, Predictions] = {}
    if not arguments.profile_seconds:
        return found
    inside = arguments.ranks // arguments.hosts
    for rate in (UNLIMITED, arguments.rate):
        set_rate(rate, world)
        measuring = measured_profile(
            world, shape_of(model), seconds=arguments.profile_seconds, timeout_s=arguments.timeout, tp_size=inside
        )
        with measuring as profile:
            found[rate] = predictions_of(profile, world, model, tp_size=inside)
        keep_profile(world, found[rate].profile, arguments.json, f"{world.size}-{rate}")
    return found


def run(arguments: argparse.Namespace) -> None:
    """Measure, as one of the ranks."""
    from harness.agreement import Agreement
    from harness.foretold import foretold
    from harness.launches import leave_part
    from harness.models import random_ids, random_llama, twin
    from harness.prefills import ContextParallelPrefill, TensorParallelPrefill, tensor_parallel
    from harness.rated import Rated
    from harness.report import describe_machine
    from harness.sampling import measure
    from harness.world import join_world

    import megakv

    machine = describe_machine()
    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_llama(arguments, positions=arguments.context, device=world.device)
    config = {
        "tensor_parallel": {"tp_size": arguments.ranks // arguments.hosts},
        "megakv": {"context_parallel": {"size": arguments.hosts, "prefill": "pass_kv"}},
    }
    predictions = predictions_by_rate(arguments, world, model)
    engine = megakv.init_inference(twin(model), config)
    sharded = tensor_parallel(model, world)

    methods = [
        ContextParallelPrefill(OWN, engine, ids),
        TensorParallelPrefill(PEER, sharded, ids, shared_memory=False),
    ]
    rated = [Rated(method, rate, world) for method in methods for rate in (UNLIMITED, arguments.rate)]
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, output: Any) -> dict[str, Any]:
        return {"max_logit_difference": agreement.check(name, output.logits[0, -1])}

    samples = measure(world, rated, repeats=arguments.repeats, inspect=inspect)
    rows = [
        sample.to_row(method=cell.method.name, rate=cell.rate, ranks=world.size, context=arguments.context)
        for cell, sample in zip(rated, samples, strict=True)
    ]
    rows = [row | foretold("hosts", row, predictions.get(row["rate"]), arguments) for row in rows]
    if world.rank == 0:
        leave_part(arguments.part, {"machine": machine, "rows": rows})
    engine.destroy()
    world.leave()


def main() -> int:
    """Entry of the process started by hand, which makes the hosts, and of every rank on them."""
    arguments = parse_arguments()
    if is_rank():
        return serve(run, arguments)
    if reason := unavailable():
        print(f"hosts.py: hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    try:
        links = LimitedLinks(UNLIMITED, hosts=arguments.hosts)
        part = Launches(arguments).run(arguments.ranks, start=links)
    except LaunchError as error:
        return error.status
    from harness.report import publish

    rows = part["rows"]
    summary = summarise(rows)
    show(rows, summary)
    publish(
        arguments,
        benchmark="hosts",
        machine=part["machine"],
        rows=rows,
        summary=summary,
        draw=lambda path: draw(path, arguments, rows),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
