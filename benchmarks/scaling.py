"""How time and memory change with the number of ranks (context parallelism, Sections 4.2.1, 4.2.3 and 4.3 in form)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.launch import Found, Launch, Rows, Summary, benchmark
from harness.methods import TENSOR_PARALLEL, ContextParallel, Generation, Peer, Peers
from harness.models import random_ids, random_model, without_stop
from harness.options import Options
from harness.predictions import measured
from harness.publish import show, show_summary
from harness.sampling import Agreement, measure
from harness.statistics import median, ratio


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--quick", False, "fewer and shorter prompts, fewer ranks")
    options.numbers("--sizes", None, "numbers of ranks (default: powers of two up to --ranks, with --quick 1 and 2)")
    options.numbers("--contexts", {"": "1K,2K,4K,8K,16K", "quick": "512,1K,2K"}, "tokens")
    options.add("--tokens", {"": 9, "quick": 5}, "tokens generated after each prompt")
    options.add("--repeats", 5, "timed runs of each method at most")
    options.add("--cell-seconds", {"": 20.0, "quick": 3.0}, "no third or further round begins after them")
    options.profile()
    options.model(layers=2)
    arguments = options.parse(argv)
    if arguments.tokens < 2:
        options.error(f"--tokens {arguments.tokens}: the time between tokens needs two")
    most = min(2, arguments.ranks) if arguments.quick else arguments.ranks
    arguments.sizes = arguments.sizes or [2**n for n in range(most.bit_length())]
    if max(arguments.sizes) > arguments.ranks:
        options.error(f"--sizes {','.join(map(str, arguments.sizes))}: at most --ranks {arguments.ranks}")
    for size in arguments.sizes:
        options.check_kv_shards(arguments.kv_heads, size)
    return arguments


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    """Measure all methods of one number of ranks, as one of them."""
    tokens = arguments.tokens
    model = without_stop(random_model(arguments, positions=arguments.contexts[-1] + tokens, device=world.device))
    limits = {"repeats": arguments.repeats, "budget_s": arguments.cell_seconds, "least": 2}
    rows: Rows = []
    with Peers(model, world) as peers:
        engine = peers.engine("cp", {"prefill": "pass_kv"})
        ways: dict[str, Peer] = {"cp": ContextParallel(engine)}
        if world.size == 1:
            ways["tp"] = Peer(model)
        else:
            # On an accelerator both are the same.
            names = TENSOR_PARALLEL if world.device.type == "cpu" else TENSOR_PARALLEL[:1]
            ways |= {name: peers.tensor_parallel(name) for name in names}
        known = measured(world, model.config, model.dtype, arguments)
        for context in arguments.contexts:
            ids = random_ids(arguments.vocab, context, world.device)
            methods = [Generation(name, peer, ids, tokens) for name, peer in ways.items()]
            samples = measure(world, methods, Agreement(world, arguments.dtype), **limits)
            for method, sample in zip(methods, samples, strict=True):
                # The untimed run is not a sample.
                ttit = [max(times) for times in zip(*world.gather(method.ttits[1:]), strict=True)]
                row = sample.to_row(ranks=world.size, context=context, ttit_seconds=ttit)
                if known and method.name == "cp":
                    row["predicted_s"] = known.prefill("pass_kv", context, generating=True)
                    # The steps that are measured follow the first token; their mean is that of the middle one.
                    row["predicted_ttit_s"] = known.decode("replicated", context + tokens // 2)
                rows.append(row)
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    """Report these rows as the paper's figures and tables do."""
    contexts = [str(context) for context in sorted({row["context"] for row in rows})]
    scaling, latencies = ({context: Summary() for context in contexts} for _ in range(2))
    for row in sorted(rows, key=lambda row: (row["ranks"], row["method"])):
        method, context, ranks = row["method"], str(row["context"]), str(row["ranks"])
        # tau_1 is `cp` on one rank, and for the others plain transformers in one process.
        first = "cp" if method == "cp" else "tp", row["context"], 1
        base = [each for each in rows if (each["method"], each["context"], each["ranks"]) == first]
        if base:
            gain = ratio(base[0]["seconds"], row["seconds"], paired=False)
            scaling[context].setdefault(method, {})[ranks] = gain.to_json()
        kind, _, way = method.partition("_")
        times = {"ttft_s": median(row["seconds"]).to_json(), "ttit_s": median(row["ttit_seconds"]).to_json()}
        latencies[context][f"{kind.upper()}{ranks} {way}".strip()] = times
    summary = {
        "scaling_ratio": {context: found for context, found in scaling.items() if found},
        "ttft_ttit": latencies,
        "max_logit_difference": max(row["max_logit_difference"] for row in rows),
    }
    show(rows, "method ranks context seconds:ms ttit_seconds:ms working_bytes:MB")
    show_summary(summary, "scaling_ratio", "max_logit_difference")
    return rows, summary, []


if __name__ == "__main__":
    asked = parse_arguments()
    launches = [Launch(size, text=f"ranks: {size}, of {asked.sizes}") for size in asked.sizes]
    sys.exit(benchmark("scaling", asked, measure_rank, report, launches, shared_memory=True))
