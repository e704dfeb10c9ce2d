"""How time and memory change with the number of ranks (context parallelism, Sections 4.2.1, 4.2.3 and 4.3 in form)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    whole_numbers,
)
from harness.launches import LaunchError, Launches, add_part_argument
from harness.ranks import is_rank, serve

CONTEXTS, QUICK_CONTEXTS = "1024,2048,4096,8192,16384", "512,1024,2048"
TENSOR_PARALLEL = {"tp": True, "tp_gloo": False}
"""DeepSpeed's tensor parallelism, and whether its sums may use its shared-memory op."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_rank_arguments(parser)
    parser.add_argument("--sizes", help="numbers of ranks (default: powers of two up to --ranks, with --quick 1 and 2)")
    parser.add_argument("--contexts", help=f"tokens (default {CONTEXTS}, with --quick {QUICK_CONTEXTS})")
    parser.add_argument("--tokens", type=int, help="tokens generated after each prompt (default 9, with --quick 5)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each method at most (default 5)")
    parser.add_argument(
        "--cell-seconds", type=float, help="no third or further round begins after them (default 20, with --quick 3)"
    )
    parser.add_argument(
        "--memory-cap-mb", type=float, default=1024, help="memory of a rank for the longest context (default 1024)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts, fewer ranks")
    add_part_argument(parser)
    add_profile_argument(parser)
    add_model_arguments(parser, layers=2)
    arguments = parser.parse_args(argv)
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    check_profile_argument(parser, arguments)
    quick = arguments.quick
    arguments.tokens = (5 if quick else 9) if arguments.tokens is None else arguments.tokens
    arguments.cell_seconds = (3.0 if quick else 20.0) if arguments.cell_seconds is None else arguments.cell_seconds
    check_positive(parser, arguments, "tokens", "repeats", "cell_seconds", "memory_cap_mb")
    if arguments.tokens < 2:
        parser.error(f"--tokens {arguments.tokens}: the time between tokens needs two")
    powers = [2**n for n in range(arguments.ranks.bit_length()) if 2**n <= (min(2, arguments.ranks) if quick else 1e9)]
    arguments.sizes = whole_numbers(parser, "--sizes", arguments.sizes or ",".join(map(str, powers)))
    arguments.contexts = whole_numbers(
        parser, "--contexts", arguments.contexts or (QUICK_CONTEXTS if quick else CONTEXTS)
    )
    if max(arguments.sizes) > arguments.ranks:
        parser.error(f"--sizes {','.join(map(str, arguments.sizes))}: at most --ranks {arguments.ranks}")
    for size in arguments.sizes:
        check_kv_shards(parser, arguments.kv_heads, size)
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Measure, as one of the ranks of one launch: all methods of this number of ranks."""
    from harness.agreement import Agreement
    from harness.breakdown import Breakdown
    from harness.foretold import foretold
    from harness.generations import (
        ContextParallelGeneration,
        Generation,
        PlainGeneration,
        TensorParallelGeneration,
        without_stop,
    )
    from harness.launches import leave_part
    from harness.models import random_ids, random_llama, twin, weight_bytes
    from harness.predictions import measured_predictions
    from harness.prefills import tensor_parallel, uses_shared_memory
    from harness.report import describe_machine
    from harness.sampling import measure
    from harness.world import join_world

    import megakv

    machine = describe_machine()
    world = join_world(arguments.threads, shared_memory=True, timeout_s=arguments.timeout)
    tokens = arguments.tokens
    model = without_stop(random_llama(arguments, positions=arguments.contexts[-1] + tokens, device=world.device))
    parallel = {"size": world.size, "prefill": "pass_kv"}
    engine = megakv.init_inference(
        twin(model), {"megakv": {"context_parallel": parallel, "tracking": {"timeline": "scaling.png"}}}
    )
    sharded = tensor_parallel(model, world) if world.size > 1 else None
    weights = {"cp": weight_bytes(engine.module), "tp": weight_bytes(model if sharded is None else sharded.module)}
    predictions = measured_predictions(
        world, model, seconds=arguments.profile_seconds, timeout_s=arguments.timeout, results=arguments.json
    )
    rows: list[dict[str, Any]] = []
    for context in arguments.contexts:
        ids = random_ids(arguments.vocab, context, world.device)
        methods: list[Generation] = [ContextParallelGeneration("cp", engine, ids, tokens)]
        if sharded is None:
            methods.append(PlainGeneration("tp", model, ids, tokens))
        else:
            methods += [
                TensorParallelGeneration(name, sharded, ids, tokens, shared_memory=allowed)
                for name, allowed in TENSOR_PARALLEL.items()
                # On an accelerator both are the same.
                if allowed or world.device.type == "cpu"
            ]
        agreement = Agreement(world, arguments.dtype)
        mark = Breakdown(engine)

        def inspect(name: str, output: Any, agreement: Agreement = agreement, mark: Breakdown = mark) -> dict[str, Any]:
            facts: dict[str, Any] = {
                "max_logit_difference": agreement.check(name, output.logits[0]),
                "weight_bytes": world.gather(weights["cp" if name == "cp" else "tp"]),
            }
            if name == "cp":
                facts |= mark.generated()
            else:
                facts["shared_memory"] = world.size > 1 and uses_shared_memory(name, model.dtype)
            return facts

        samples = measure(
            world, methods, repeats=arguments.repeats, inspect=inspect, budget_s=arguments.cell_seconds, least=2
        )
        for method, sample in zip(methods, samples, strict=True):
            # The untimed run is not a sample.
            ttit = [max(times) for times in zip(*world.gather(method.ttits[1:]), strict=True)]
            row = sample.to_row(
                ranks=world.size, context=context, ttit_seconds=ttit, load_average=machine["load_average"]
            )
            rows.append(row | foretold("scaling", row, predictions, arguments))
    if world.rank == 0:
        leave_part(arguments.part, {"machine": machine, "rows": rows})
    engine.destroy()
    world.leave()


def main() -> int:
    """Entry of the process started by hand, which starts every number of ranks in turn, and of every rank."""
    arguments = parse_arguments()
    if is_rank():
        return serve(run, arguments)
    launches = Launches(arguments)
    try:
        parts = []
        for size in arguments.sizes:
            print(f"ranks: {size}, of {arguments.sizes}", flush=True)
            parts.append(launches.run(size))
    except LaunchError as error:
        return error.status
    from megakv.launcher.process import quiet_libraries

    quiet_libraries()
    from harness.scaling_report import report

    report(arguments, parts[0]["machine"], [row for part in parts for row in part["rows"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
