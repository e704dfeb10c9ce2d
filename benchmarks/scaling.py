"""How time and memory change with the number of ranks (context parallelism, Sections 4.2.1, 4.2.3 and 4.3 in form)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.launch import Launch, Rows, benchmark
from harness.options import Options

TENSOR_PARALLEL = ("tp", "tp_gloo")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.add("--quick", False, "fewer and shorter prompts, fewer ranks")
    options.numbers("--sizes", None, "numbers of ranks (default: powers of two up to --ranks, with --quick 1 and 2)")
    options.numbers("--contexts", {"": "1024,2048,4096,8192,16384", "quick": "512,1024,2048"}, "tokens")
    options.add("--tokens", {"": 9, "quick": 5}, "tokens generated after each prompt")
    options.add("--repeats", 5, "timed runs of each method at most")
    options.add("--cell-seconds", {"": 20.0, "quick": 3.0}, "no third or further round begins after them")
    options.add("--memory-cap-mb", 1024.0, "memory of a rank for the longest context")
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


def measure_rank(arguments: argparse.Namespace) -> Rows:
    """Measure all methods of one number of ranks, as one of them."""
    from harness.breakdown import Breakdown
    from harness.generations import (
        ContextParallelGeneration,
        Generation,
        TensorParallelGeneration,
        without_stop,
    )
    from harness.models import random_ids, random_model, twin, weight_bytes
    from harness.prefills import tensor_parallel, uses_shared_memory
    from harness.profiles import keep_measured
    from harness.sampling import measure
    from harness.world import Agreement, join_world

    import megakv

    world = join_world(arguments.threads, shared_memory=True, timeout_s=arguments.timeout)
    tokens = arguments.tokens
    model = without_stop(random_model(arguments, positions=arguments.contexts[-1] + tokens, device=world.device))
    section = {"context_parallel": {"size": world.size, "prefill": "pass_kv"}, "tracking": {"timeline": "scaling.png"}}
    engine = megakv.init_inference(twin(model), {"megakv": section})
    sharded = tensor_parallel(model, world) if world.size > 1 else None
    weights = {"cp": weight_bytes(engine.module), "tp": weight_bytes(model if sharded is None else sharded.module)}
    keep_measured(world, model, arguments)
    limits = {"repeats": arguments.repeats, "budget_s": arguments.cell_seconds, "least": 2}
    rows: Rows = []
    for context in arguments.contexts:
        ids = random_ids(arguments.vocab, context, world.device)
        methods: list[Generation] = [ContextParallelGeneration("cp", engine, ids, tokens)]
        if sharded is None:
            methods.append(Generation("tp", model, ids, tokens))
        else:
            methods += [
                TensorParallelGeneration(name, sharded, ids, tokens)
                for name in TENSOR_PARALLEL
                # On an accelerator both are the same.
                if name == "tp" or world.device.type == "cpu"
            ]
        agreement, mark = Agreement(world, arguments.dtype), Breakdown(engine)

        def inspect(name: str, output: Any, agreement: Agreement = agreement, mark: Breakdown = mark) -> dict[str, Any]:
            facts: dict[str, Any] = {
                "max_logit_difference": agreement.check(name, output.logits[0]),
                "weight_bytes": world.gather(weights["cp" if name == "cp" else "tp"]),
            }
            if name == "cp":
                return facts | mark.generated()
            return facts | {"shared_memory": world.size > 1 and uses_shared_memory(name, model.dtype)}

        for method, sample in zip(methods, measure(world, methods, inspect=inspect, **limits), strict=True):
            # The untimed run is not a sample.
            ttit = [max(times) for times in zip(*world.gather(method.ttits[1:]), strict=True)]
            rows.append(sample.to_row(ranks=world.size, context=context, ttit_seconds=ttit))
    engine.destroy()
    world.leave()
    return rows


def report(arguments: argparse.Namespace, rows: Rows, skipped: Mapping[str, str]) -> tuple[dict[str, Any], list[Any]]:
    from harness.publish import MEGABYTE
    from harness.scaling_report import charts, show, summarise

    summary = summarise(rows, arguments.memory_cap_mb * MEGABYTE)
    show(summary)
    return summary, charts(arguments, rows, summary)


if __name__ == "__main__":
    asked = parse_arguments()
    launches = [Launch(size, text=f"ranks: {size}, of {asked.sizes}") for size in asked.sizes]
    sys.exit(benchmark("scaling", asked, measure_rank, report, launches))
