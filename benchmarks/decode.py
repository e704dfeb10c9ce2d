"""Time per generated token on a long context: MegaKV's context-parallel decoding against a single process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.launch import Rows, benchmark
from harness.options import Options, check_memory

if TYPE_CHECKING:
    from harness.world import World

SINGLE = ("single", "single_idle", "in_place", "in_place_idle")
OWN = ("replicated", "pass_q")
METHODS = (*SINGLE, *OWN)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--context", 8192, "cached tokens per sequence")
    options.names("--methods", METHODS, ",".join(METHODS), "which to run")
    options.numbers("--batches", None, "sequences decoded together, e.g. 1,4 (default: 1 and --ranks)")
    options.add("--tokens", 8, "steps of a sample, whose mean counts")
    options.add("--repeats", 9, "samples of each method at most")
    options.add("--cell-seconds", 120.0, "no further round begins in a batch after them")
    options.profile()
    options.model(kv_heads=16)
    arguments = options.parse(argv)
    arguments.batches = arguments.batches or sorted({1, arguments.ranks})
    if arguments.methods[0].endswith("_idle"):
        options.error(f"--methods {','.join(arguments.methods)}: the first must run on every rank, for comparison")
    return arguments


def check_caches(arguments: argparse.Namespace) -> None:
    """Refuse what does not fit into the machine's memory."""
    import psutil

    element = 4 if arguments.dtype == "fp32" else 2
    row = 2 * arguments.layers * arguments.kv_heads * (arguments.hidden // arguments.heads) * element
    # A copying cache holds everything twice on every rank; the shards of all ranks are one copy more.
    copies = 2 * arguments.ranks * bool(set(SINGLE).intersection(arguments.methods)) + 1
    batches = ",".join(map(str, arguments.batches))
    words = f"--batches {batches} with --context {arguments.context} and --layers {arguments.layers}"
    needed = max(arguments.batches) * arguments.context * row * copies
    check_memory(needed, 0.75 * psutil.virtual_memory().total, words)


def measure_batch(
    arguments: argparse.Namespace, world: World, model: Any, engines: Mapping[str, Any], batch: int
) -> Rows:
    """The rows of one batch. Its caches are gone afterwards."""
    from harness.breakdown import Breakdown
    from harness.generations import (
        ContextParallelGeneration,
        CopyingCache,
        Generation,
        RoomyCache,
        sharded_cache,
    )
    from harness.models import random_ids
    from harness.sampling import measure
    from harness.world import Agreement

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
            methods.append(Generation(name, model, ids, tokens, cache=cache, takes_part=takes_part))
    agreement = Agreement(world, arguments.dtype)
    marks = {name: Breakdown(engine) for name, engine in engines.items()}

    def inspect(name: str, output: Any) -> dict[str, Any]:
        first = None if output is None else output.logits[0]
        facts: dict[str, Any] = {"max_logit_difference": agreement.check(name, first)}
        return facts | ({"attention_us": marks[name].generated()["decode_us"]} if name in marks else {})

    limits = {"repeats": arguments.repeats, "budget_s": arguments.cell_seconds, "least": 3}
    place = {"ranks": arguments.ranks, "context": arguments.context, "batch": batch}
    rows = []
    for sample in measure(world, methods, inspect=inspect, **limits):
        row = sample.to_row(**place, tokens_per_sample=arguments.tokens)
        if sample.method in ("single", "in_place"):
            # Processes that do not wait for each other: the mean is what one of them takes.
            row["seconds"] = [sum(seconds) / len(seconds) for seconds in row["rank_seconds"]]
        rows.append(row)
    return rows


def measure_rank(arguments: argparse.Namespace) -> Rows:
    from harness.generations import without_stop
    from harness.models import random_model, twin
    from harness.profiles import keep_measured
    from harness.world import join_world

    import megakv

    check_caches(arguments)
    world = join_world(arguments.threads, shared_memory=False, timeout_s=arguments.timeout)
    positions = arguments.context + arguments.tokens + 2
    model = without_stop(random_model(arguments, positions=positions, device=world.device))
    engines = {}
    for name in arguments.methods:
        if name in OWN:
            section = {"context_parallel": {"size": world.size, "decode": name}, "tracking": {"timeline": "decode.png"}}
            engines[name] = megakv.init_inference(twin(model), {"megakv": section})
    keep_measured(world, model, arguments, idle=any(name.endswith("_idle") for name in arguments.methods))
    rows = [row for batch in arguments.batches for row in measure_batch(arguments, world, model, engines, batch)]
    for engine in engines.values():
        engine.destroy()
    world.leave()
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Times per token against those of a single process: 1 or less is no worse."""
    from harness.statistics import median, ratio

    ratios: dict[str, Any] = {}
    best: dict[str, Any] = {}
    for batch in sorted({row["batch"] for row in rows}):
        seconds = {row["method"]: row["seconds"] for row in rows if row["batch"] == batch}
        own, peers = [[name for name in seconds if name in some] for some in (OWN, SINGLE)]
        found = {name: {peer: ratio(seconds[name], seconds[peer]).to_json() for peer in peers} for name in own}
        ratios[str(batch)] = found
        if own and peers:
            fastest = min(own, key=lambda name: median(seconds[name]).value)
            worst = max(value["value"] for value in found[fastest].values())
            best[str(batch)] = {"method": fastest, "largest_ratio": worst}
    difference = max(row["max_logit_difference"] for row in rows)
    return {"time_ratio": ratios, "best": best, "max_logit_difference": difference}


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    from harness.charts import bars
    from harness.models import words_of
    from harness.publish import columns, show_intervals, show_table
    from harness.statistics import median

    summary = summarise(rows)

    def microseconds(part: str) -> Any:
        return lambda row: f"{row['attention_us'][part]:.0f}" if "attention_us" in row else None

    shown = {
        "batch, method": lambda row: f"{row['batch']} {row['method']}",
        "ms per token": lambda row: f"{1e3 * median(row['seconds']).value:.2f}",
        "fastest": lambda row: f"{1e3 * min(row['seconds']):.2f}",
        "slowest": lambda row: f"{1e3 * max(row['seconds']):.2f}",
        "attention us": microseconds("attention"),
        "hop us": microseconds("send_recv"),
        "collective us": microseconds("collective"),
    }
    show_table("", columns(rows, shown))
    show_intervals("Time per token by batch and method, over that of", summary["time_ratio"])
    values = [
        (f"{row['method']}, {row['batch']}".replace("_", " "), median(row["seconds"]).scaled(1e3), row["method"] in OWN)
        for row in rows
    ]
    title = f"Decoding at {arguments.context:,} cached tokens on {arguments.ranks} ranks"
    subtitle = f"{words_of(arguments)}; method, batch; median, 95% interval"
    chart = bars("", values, title=title, subtitle=subtitle, unit="milliseconds per step, less is better")
    return summary, [chart]


if __name__ == "__main__":
    sys.exit(benchmark("decode", parse_arguments(), measure_rank, report))
