"""Time per generated token on a long context: MegaKV's context-parallel decoding against a single process."""

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
    check_model_arguments,
    check_positive,
    check_profile_argument,
    check_rank_arguments,
    method_names,
    whole_numbers,
)
from harness.ranks import is_rank, serve, start_ranks

if TYPE_CHECKING:
    from harness.predictions import Predictions
    from harness.world import World

SINGLE = ("single", "single_idle", "in_place", "in_place_idle")
OWN = ("replicated", "pass_q")
METHODS = (*SINGLE, *OWN)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_rank_arguments(parser)
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per sequence (default %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="which to run (default: all, %(default)s)")
    parser.add_argument("--batches", help="sequences decoded together, e.g. 1,4 (default: 1 and --ranks)")
    parser.add_argument("--tokens", type=int, default=8, help="steps of a sample, whose mean counts (default 8)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each method at most (default 9)")
    parser.add_argument(
        "--cell-seconds", type=float, default=120, help="no further round begins in a batch after them (default 120)"
    )
    add_profile_argument(parser)
    add_model_arguments(parser, kv_heads=16)
    arguments = parser.parse_args(argv)
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    check_profile_argument(parser, arguments)
    check_positive(parser, arguments, "context", "tokens", "repeats", "cell_seconds")
    arguments.batches = whole_numbers(parser, "--batches", arguments.batches or f"1,{arguments.ranks}")
    arguments.methods = method_names(parser, arguments.methods, METHODS)
    if arguments.methods[0].endswith("_idle"):
        parser.error(f"--methods {','.join(arguments.methods)}: the first must run on every rank, for comparison")
    return arguments


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Times per token against those of a single process."""
    from harness.statistics import median, ratio

    ratios: dict[str, Any] = {}
    best: dict[str, Any] = {}
    for batch in sorted({row["batch"] for row in rows}):
        seconds = {row["method"]: row["seconds"] for row in rows if row["batch"] == batch}
        own = [name for name in seconds if name in OWN]
        peers = [name for name in seconds if name in SINGLE]
        ratios[str(batch)] = {
            name: {peer: ratio(seconds[name], seconds[peer]).to_json() for peer in peers} for name in own
        }
        if own and peers:
            fastest = min(own, key=lambda name: median(seconds[name]).value)
            worst = max(value["value"] for value in ratios[str(batch)][fastest].values())
            best[str(batch)] = {"method": fastest, "largest_ratio": worst}
    return {
        "time_ratio": ratios,
        "best": best,
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print tables of the results."""
    from harness.report import align
    from harness.statistics import Interval, median

    lines = [["batch, method", "ms per token", "fastest", "slowest", "attention us", "hop us", "collective us"]]
    for row in rows:
        name, seconds, parts = f"{row['batch']} {row['method']}", row["seconds"], row.get("attention_us")
        times = [f"{1e3 * value:.2f}" for value in (median(seconds).value, min(seconds), max(seconds))]
        shown = ["-"] * 3 if parts is None else [f"{parts[k]:.0f}" for k in ("attention", "send_recv", "collective")]
        lines.append([name, *times, *shown])
    print(f"\n{align(lines)}\n")
    lines = [["time per token of", "batch", "over that of", "median ratio [95%]"]]
    for batch, methods in summary["time_ratio"].items():
        for name, peers in methods.items():
            lines += [[name, batch, peer, str(Interval(**value))] for peer, value in peers.items()]
    print(f"{align(lines)}\n")


def draw(path: Path, arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw the times per token as bars, beside the results."""
    from harness.chart import draw_bars
    from harness.statistics import median

    bars = []
    for row in rows:
        label = f"{row['method']}, {row['batch']}".replace("_", " ")
        bars.append((label, median(row["seconds"]).scaled(1e3), row["method"] in OWN))
    picture = path.with_suffix(".png")
    draw_bars(
        picture,
        bars,
        title=f"Decoding at {arguments.context:,} cached tokens on {arguments.ranks} ranks",
        subtitle=f"Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.kv_heads} KV heads, "
        f"{arguments.dtype}, {arguments.threads} thread(s) per rank; method, batch; median, 95% interval",
        unit="milliseconds per step, less is better",
    )
    return [picture]


def check_memory(arguments: argparse.Namespace, machine: Mapping[str, Any]) -> None:
    """Refuse what does not fit into the machine's memory."""
    element = 4 if arguments.dtype == "fp32" else 2
    row = 2 * arguments.layers * arguments.kv_heads * (arguments.hidden // arguments.heads) * element
    held = max(arguments.batches) * arguments.context * row
    # A copying cache holds everything twice on every rank; the shards of all ranks are one copy more.
    whole = set(SINGLE).intersection(arguments.methods)
    needed = held * (2 * arguments.ranks * bool(whole) + 1)
    available = 0.75 * machine["memory_bytes"]
    if needed > available:
        raise ValueError(
            f"--batches {','.join(map(str, arguments.batches))} with --context {arguments.context} and --layers "
            f"{arguments.layers} needs {needed / 2**30:.1f} GiB of caches on {arguments.ranks} ranks; at most "
            f"{available / 2**30:.1f} GiB are taken here: ask for fewer"
        )


def measure_batch(
    arguments: argparse.Namespace,
    world: World,
    model: Any,
    engines: Mapping[str, Any],
    batch: int,
    predictions: Predictions | None,
) -> list[dict[str, Any]]:
    """The rows of one batch. Its caches are gone afterwards."""
    from harness.agreement import Agreement
    from harness.breakdown import Breakdown
    from harness.caches import CopyingCache, RoomyCache, sharded_cache
    from harness.foretold import foretold
    from harness.generations import ContextParallelGeneration, Generation, PlainGeneration
    from harness.models import random_ids
    from harness.sampling import measure

    # Steps: what follows the first one, which the clock starts with.
    tokens = arguments.tokens + 1
    ids = random_ids(arguments.vocab, arguments.context + 1, world.device, batch)
    size = {"batch": batch, "tokens": arguments.context}
    whole = RoomyCache(model, **size, room=tokens) if set(SINGLE).intersection(arguments.methods) else None
    copying = None if whole is None else CopyingCache(whole)
    shard = sharded_cache(model, world, **size) if engines else None
    methods: list[Generation] = []
    for name in arguments.methods:
        if name in OWN:
            methods.append(ContextParallelGeneration(name, engines[name], ids, tokens, cache=shard))
        else:
            cache = copying if name.startswith("single") else whole
            takes_part = world.rank == 0 or not name.endswith("idle")
            methods.append(PlainGeneration(name, model, ids, tokens, cache=cache, takes_part=takes_part))
    agreement = Agreement(world, arguments.dtype)
    marks = {name: Breakdown(engine) for name, engine in engines.items()}

    def inspect(name: str, output: Any) -> dict[str, Any]:
        first = None if output is None else output.logits[0]
        facts: dict[str, Any] = {"max_logit_difference": agreement.check(name, first)}
        if name in marks:
            facts["attention_us"] = marks[name].generated()["decode_us"]
        return facts

    rows = []
    for sample in measure(
        world, methods, repeats=arguments.repeats, inspect=inspect, budget_s=arguments.cell_seconds, least=3
    ):
        row = sample.to_row(
            ranks=arguments.ranks, context=arguments.context, batch=batch, tokens_per_sample=arguments.tokens
        )
        if sample.method in ("single", "in_place"):
            # Processes that do not wait for each other: the mean is what one of them takes.
            row["seconds"] = [sum(seconds) / len(seconds) for seconds in row["rank_seconds"]]
        rows.append(row | foretold("decode", row, predictions, arguments))
    return rows


def run(arguments: argparse.Namespace) -> None:
    """Measure, as one of the ranks, and report from rank 0."""
    from harness.generations import without_stop
    from harness.models import random_llama, twin
    from harness.predictions import measured_predictions
    from harness.report import describe_machine, publish
    from harness.world import join_world

    import megakv

    machine = describe_machine()
    check_memory(arguments, machine)
    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    positions = arguments.context + arguments.tokens + 2
    model = without_stop(random_llama(arguments, positions=positions, device=world.device))
    engines = {}
    for name in arguments.methods:
        if name in OWN:
            section = {"context_parallel": {"size": world.size, "decode": name}, "tracking": {"timeline": "decode.png"}}
            engines[name] = megakv.init_inference(twin(model), {"megakv": section})
    predictions = measured_predictions(
        world,
        model,
        seconds=arguments.profile_seconds,
        timeout_s=arguments.timeout,
        results=arguments.json,
        idle=any(name.endswith("_idle") for name in arguments.methods),
    )
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        rows += measure_batch(arguments, world, model, engines, batch, predictions)
    if world.rank == 0:
        summary = summarise(rows)
        show(rows, summary)
        publish(
            arguments,
            benchmark="decode",
            machine=machine,
            rows=rows,
            summary=summary,
            draw=lambda path: draw(path, arguments, rows),
        )
    for engine in engines.values():
        engine.destroy()
    world.leave()


def main() -> int:
    """Entry of the process started by hand, and of every rank that it starts."""
    arguments = parse_arguments()
    return serve(run, arguments) if is_rank() else start_ranks(arguments)


if __name__ == "__main__":
    sys.exit(main())
