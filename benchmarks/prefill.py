"""Time to read a prompt: MegaKV's context parallelism, DeepSpeed's tensor parallelism, and a single process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.arguments import (
    add_model_arguments,
    add_profile_argument,
    add_rank_arguments,
    check_kv_shards,
    check_model_arguments,
    check_positive,
    check_profile_argument,
    check_rank_arguments,
    method_names,
)
from harness.ranks import is_rank, serve, start_ranks

SINGLE = "single"
TENSOR_PARALLEL = ("tp", "tp_gloo")
OWN = ("pass_kv", "pass_q", "all_gather")
METHODS = (SINGLE, *TENSOR_PARALLEL, *OWN)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_rank_arguments(parser)
    parser.add_argument("--context", type=int, help="tokens of the prompt (default 8192, with --quick 2048)")
    parser.add_argument(
        "--methods", default="single,tp,tp_gloo,pass_kv", help=f"of {','.join(METHODS)} (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, help="timed runs of each method (default 5, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="a shorter prompt and fewer runs")
    add_profile_argument(parser)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)
    arguments.context = (2048 if arguments.quick else 8192) if arguments.context is None else arguments.context
    arguments.repeats = (3 if arguments.quick else 5) if arguments.repeats is None else arguments.repeats
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    check_profile_argument(parser, arguments)
    check_positive(parser, arguments, "context", "repeats")
    arguments.methods = method_names(parser, arguments.methods, METHODS)
    if set(arguments.methods).intersection(TENSOR_PARALLEL):
        remedy = "take other numbers, or leave tp and tp_gloo out of --methods"
        check_kv_shards(parser, arguments.kv_heads, arguments.ranks, remedy)
    return arguments


def summarise(rows: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """Speed-ups of MegaKV's methods over the others, and how much of a single process's work per rank they keep."""
    from harness.statistics import ratio

    seconds = {row["method"]: row["seconds"] for row in rows}
    peers = [name for name in seconds if name not in OWN]
    speedup = {
        name: {peer: ratio(seconds[peer], own).to_json() for peer in peers}
        for name, own in seconds.items()
        if name in OWN
    }
    efficiency = {
        name: ratio(seconds[SINGLE], own).scaled(1 / ranks).to_json()
        for name, own in seconds.items()
        if name != SINGLE and SINGLE in seconds
    }
    return {
        "speedup": speedup,
        "efficiency": efficiency,
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print tables of the results."""
    from harness.report import align, time_table
    from harness.statistics import Interval

    lines = [["", "over", "median ratio [95%]"]]
    for name, peers in summary["speedup"].items():
        lines += [[f"speed-up of {name}", peer, str(Interval(**value))] for peer, value in peers.items()]
    for name, value in summary["efficiency"].items():
        lines.append([f"efficiency of {name}", SINGLE, str(Interval(**value))])
    print(f"\n{time_table(rows)}\n\n{align(lines)}\n")
    print(f"largest difference of the last logits: {summary['max_logit_difference']:.1e} of the largest logit")


def draw(path: Path, arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw the times as bars, beside the results."""
    from harness.chart import draw_bars
    from harness.statistics import median

    picture = path.with_suffix(".png")
    draw_bars(
        picture,
        [(row["method"], median(row["seconds"]), row["method"] in OWN) for row in rows],
        title=f"Prefill of {arguments.context:,} tokens on {arguments.ranks} ranks",
        subtitle=f"Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.dtype}, {arguments.threads} "
        f"thread(s) per rank; median of {arguments.repeats} runs, 95% interval",
        unit="seconds, less is better",
    )
    return [picture]


def run(arguments: argparse.Namespace) -> None:
    """Measure, as one of the ranks, and report from rank 0."""
    from harness.agreement import Agreement
    from harness.foretold import foretold
    from harness.models import random_ids, random_llama
    from harness.predictions import measured_predictions
    from harness.prefills import Prefills, cache_bytes, uses_shared_memory
    from harness.report import describe_machine, publish
    from harness.sampling import measure
    from harness.world import join_world

    machine = describe_machine()
    tensor_parallel = bool(set(arguments.methods).intersection(TENSOR_PARALLEL))
    world = join_world(arguments.threads, shared_memory=tensor_parallel, timeout_s=arguments.timeout)
    if "tp_gloo" in arguments.methods and world.device.type != "cpu":
        raise ValueError("--methods tp_gloo runs on CPU only: set DS_ACCELERATOR=cpu, or leave it out")
    ids = random_ids(arguments.vocab, arguments.context, world.device)
    model = random_llama(arguments, positions=arguments.context, device=world.device)
    predictions = measured_predictions(
        world, model, seconds=arguments.profile_seconds, timeout_s=arguments.timeout, results=arguments.json
    )
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
    if world.rank == 0:
        rows = [sample.to_row(ranks=arguments.ranks, context=arguments.context) for sample in samples]
        rows = [row | foretold("prefill", row, predictions, arguments) for row in rows]
        summary = summarise(rows, arguments.ranks)
        show(rows, summary)
        publish(
            arguments,
            benchmark="prefill",
            machine=machine,
            rows=rows,
            summary=summary,
            draw=lambda path: draw(path, arguments, rows),
        )
    prefills.close()
    world.leave()


def main() -> int:
    """Entry of the process started by hand, and of every rank that it starts."""
    arguments = parse_arguments()
    # Only now and in `run` comes what takes seconds to import, so that wrong arguments are refused at once.
    return serve(run, arguments) if is_rank() else start_ranks(arguments)


if __name__ == "__main__":
    sys.exit(main())
