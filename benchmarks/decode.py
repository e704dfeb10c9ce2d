"""Time per generated token on a long context: MegaKV's context-parallel decoding against a single process.

Ranks may be on hosts of their own, whose links have a rate; then one rank alone on its host is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
from harness.launch import Found, Launch, Rows, Summary, benchmark
from harness.links import FREE, checked_rates
from harness.methods import ContextParallel, Generation, Peer, Peers
from harness.models import random_ids, random_model, sharded_cache, single_caches, without_stop
from harness.options import Options, check_memory
from harness.predictions import measured
from harness.publish import show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import median, ratio

SINGLE = ("single", "single_idle", "in_place", "in_place_idle")
OWN = ("replicated", "tensor", "pass_q", "auto")
ALONE = "alone"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--context", 8192, "cached tokens per sequence")
    options.names("--methods", (*SINGLE, *OWN), ",".join((*SINGLE, *OWN)), "which to run")
    options.add("--rates", FREE, f"links between ranks: {FREE}, or of hosts, as unlimited or 1gbit")
    options.hidden("--rate")
    options.numbers("--batches", None, "sequences decoded together, e.g. 1,4 (default: 1 and --ranks)")
    options.add("--tokens", 8, "steps of a sample, whose mean counts")
    options.add("--repeats", 9, "samples of each method at most")
    options.add("--cell-seconds", 120.0, "no further round begins in a batch after them")
    options.profile()
    options.model(kv_heads=16)
    arguments = options.parse(argv)
    arguments.batches = arguments.batches or sorted({1, arguments.ranks})
    arguments.rates = checked_rates(options, "--rates", arguments.rates)
    if arguments.methods[0].endswith("_idle"):
        options.error(f"--methods {','.join(arguments.methods)}: the first must run on every rank, for comparison")
    return arguments


def check_caches(arguments: argparse.Namespace) -> None:
    """Refuse what does not fit into the machine's memory."""
    element = 4 if arguments.dtype == "fp32" else 2
    row = 2 * arguments.layers * arguments.kv_heads * (arguments.hidden // arguments.heads) * element
    # A copying cache holds everything twice on every rank; the shards of all ranks are one copy more.
    copies = 2 * arguments.ranks * bool(set(SINGLE).intersection(arguments.methods)) + 1
    batches = ",".join(map(str, arguments.batches))
    words = f"--batches {batches} with --context {arguments.context} and --layers {arguments.layers}"
    needed = max(arguments.batches) * arguments.context * row * copies
    check_memory(needed, 0.75 * psutil.virtual_memory().total, words)


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    check_caches(arguments)
    positions = arguments.context + arguments.tokens + 2
    model = without_stop(random_model(arguments, positions=positions, device=world.device))
    with Peers(model, world) as peers:
        known = None
        if world.size > 1:
            for name in arguments.methods:
                if name in OWN:
                    own_engine(peers, name)
            known = measured(world, model.config, model.dtype, arguments)
        rows = [row for batch in arguments.batches for row in measure_batch(arguments, world, peers, batch)]
    return [{**row, "predicted_s": known and known.decode(row["method"], row["context"], row["batch"])} for row in rows]


def own_engine(peers: Any, name: str) -> Any:
    return peers.engine(name, {} if name == ALONE else {"decode": name})


def measure_batch(arguments: argparse.Namespace, world: Any, peers: Any, batch: int) -> Rows:
    """The rows of one batch. Its caches are gone afterwards."""
    # Steps: what follows the first one, which the clock starts with.
    context, tokens = arguments.context, arguments.tokens + 1
    ids = random_ids(arguments.vocab, context + 1, world.device, batch)
    size: dict[str, Any] = {"batch": batch, "tokens": context}
    names = arguments.methods if world.size > 1 else [ALONE]
    single = bool(set(SINGLE).intersection(names))
    in_place, copying = single_caches(peers.model, **size, room=tokens) if single else (None, None)
    shard = sharded_cache(peers.model, world, **size)
    methods = []
    for name in names:
        if name in (ALONE, *OWN):
            engine = ContextParallel(own_engine(peers, name))
            methods.append(Generation(name, engine, ids, tokens, partial(shard.cut_back, context), cache=shard))
        else:
            cache: Any = copying if name.startswith("single") else in_place
            part = world.rank == 0 or not name.endswith("idle")
            methods.append(Generation(name, Peer(peers.model), ids, tokens, cache.rewind, cache=cache, takes_part=part))
    limits = {"repeats": arguments.repeats, "budget_s": arguments.cell_seconds, "least": 3}
    place = {"ranks": world.size, "context": context, "batch": batch, "tokens_per_sample": arguments.tokens}
    rows = []
    for sample in measure(world, methods, Agreement(world, arguments.dtype), **limits):
        row = sample.to_row(**place, rate=arguments.rate)
        if sample.method in ("single", "in_place"):
            # Processes that do not wait for each other: the mean is what one of them takes.
            row["seconds"] = [sum(seconds) / len(seconds) for seconds in row["rank_seconds"]]
        rows.append(row)
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Times per token against those of a single process: 1 or less is no worse."""
    ratios: Summary = {}
    best: Summary = {}
    over_alone: Summary = {}
    for rate, batch in sorted({(row["rate"], row["batch"]) for row in rows if row["method"] != ALONE}):
        several = [row for row in rows if row["batch"] == batch]
        alone = [seconds for row in several if row["method"] == ALONE for seconds in row["seconds"]]
        seconds = {row["method"]: row["seconds"] for row in several if row["rate"] == rate and row["method"] != ALONE}
        key = str(batch) if rate == FREE else f"{batch}, {rate}"
        own, peers = [[name for name in seconds if name in some] for some in (OWN, SINGLE)]
        ratios[key] = {name: {peer: ratio(seconds[name], seconds[peer]).to_json() for peer in peers} for name in own}
        if alone:
            compared = {name: ratio(seconds[name], alone, paired=False).to_json() for name in own}
            over_alone.setdefault(rate, {})[str(batch)] = compared
        if own and peers:
            fastest = min(own, key=lambda name: median(seconds[name]).value)
            worst = max(value["value"] for value in ratios[key][fastest].values())
            best[key] = {"method": fastest, "largest_ratio": worst}
    difference = max(row["max_logit_difference"] for row in rows)
    summary = {"time_ratio": ratios, "best": best, "max_logit_difference": difference}
    summary |= {"over_one_host": over_alone} if over_alone else {}
    show(rows, "rate method batch seconds:ms seconds:min seconds:max", "Seconds per token")
    show_summary(summary)
    return rows, summary, []


if __name__ == "__main__":
    asked = parse_arguments()
    across = [Launch(asked.ranks, ["--rate", each], f"links: {each}", name=each, rate=each) for each in asked.rates]
    # Before and behind them, as the machine may become slower.
    alone = [Launch(1, ["--rate", FREE], "one rank alone", name=ALONE)] if asked.rates != [FREE] else []
    sys.exit(benchmark("decode", asked, measure_rank, report, [*alone, *across, *alone]))
