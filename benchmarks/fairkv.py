"""Decoding over caches whose heads keep unequal numbers of tokens: contiguous heads against FairKV's mappings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.arguments import (
    DTYPES,
    add_profile_argument,
    add_rank_arguments,
    check_positive,
    check_profile_argument,
    check_rank_arguments,
    method_names,
)
from harness.ranks import is_rank, serve, start_ranks

if TYPE_CHECKING:
    from harness.head_division import Division
    from harness.world import World

COPIES = (1, 2, 3, 4)
METHODS = ("uniform", "contiguous", "nodp", *(f"{kind}{copies}" for kind in ("dp", "split") for copies in COPIES))
PARTS = ("attention", "engine")
TITLES = {"attention": "Attention of a step", "engine": "A decode step"}
DEFAULTS = "uniform,contiguous,nodp,dp1,dp2,dp3,dp4,split1,split3"
QUICK = {"kept": 2048, "repeats": 9, "cell_seconds": 20.0, "profile_seconds": 5.0}
FULL = {"kept": 16384, "repeats": 25, "cell_seconds": 130.0, "profile_seconds": 30.0}
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
USABLE = 0.75
"""Share of the machine's memory that a part may take."""
PROCESS_BYTES = 500 << 20
"""Of a rank before it has weights or caches, and of the processes that start them."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_rank_arguments(parser)
    add_profile_argument(parser, FULL["profile_seconds"])
    parser.set_defaults(profile_seconds=None)
    parser.add_argument("--quick", action="store_true", help=f"smaller and fewer: {QUICK} instead of {FULL}")
    parser.add_argument("--methods", default=DEFAULTS, help="which to run (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences decoded together (default 4)")
    parser.add_argument("--kept", type=int, help=f"mean tokens that a KV head keeps (default {FULL['kept']:,})")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the heads' log-normal budgets (default 0.8)")
    parser.add_argument("--seed", type=int, default=222, help="of the budgets (default 222)")
    parser.add_argument("--layers", type=int, default=8, help="layers of a step (default 8)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of a layer (default 8)")
    parser.add_argument("--group", type=int, default=16, help="query heads to a KV head (default 16, Llama 3.1 405B)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of queries, keys, values (default bf16)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: both, %(default)s)")
    for name, value in (("hidden", 512), ("intermediate", 1408), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the engine's Llama (default {value})")
    parser.add_argument("--steps", type=int, default=1, help="attention steps of a sample, of which it is the mean (1)")
    parser.add_argument("--tokens", type=int, default=2, help="engine steps of a sample, of which it is the mean (2)")
    parser.add_argument("--repeats", type=int, help=f"rounds of all methods at most (default {FULL['repeats']})")
    parser.add_argument(
        "--cell-seconds", type=float, help=f"no further round of a part begins after them ({FULL['cell_seconds']:g})"
    )
    arguments = parser.parse_args(argv)
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    check_rank_arguments(parser, arguments)
    check_profile_argument(parser, arguments)
    sizes = ("batch", "kept", "sigma", "layers", "kv-heads", "group", "head-dim")
    check_positive(parser, arguments, *sizes, "hidden", "intermediate", "vocab")
    check_positive(parser, arguments, "steps", "tokens", "repeats", "cell-seconds")
    arguments.parts = method_names(parser, arguments.parts, PARTS, name="--parts")
    arguments.methods = method_names(parser, arguments.methods, METHODS)
    if arguments.ranks > arguments.kv_heads:
        parser.error(f"--ranks {arguments.ranks}: allowed: up to --kv-heads {arguments.kv_heads}, a head for each rank")
    if "engine" in arguments.parts and arguments.kv_heads % arguments.ranks:
        parser.error(
            f"--kv-heads {arguments.kv_heads}: allowed: multiples of --ranks {arguments.ranks}, which plain tensor "
            "parallelism divides evenly; or --parts attention"
        )
    arguments.heads = arguments.kv_heads * arguments.group
    if "engine" in arguments.parts and arguments.hidden % arguments.heads:
        parser.error(
            f"--hidden {arguments.hidden}: allowed: multiples of --kv-heads x --group = {arguments.heads}, or --parts "
            "attention"
        )
    check_memory(parser, arguments)
    return arguments


def make_divisions(arguments: argparse.Namespace) -> list[Division]:
    """Every method's, of the same budgets."""
    from harness.head_division import make_division, skewed_budgets

    budgets = skewed_budgets(arguments.layers, arguments.kv_heads, arguments.kept, arguments.sigma, arguments.seed)
    return [make_division(name, budgets, ranks=arguments.ranks, batch=arguments.batch) for name in arguments.methods]


def check_memory(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if a part does not fit into the machine's memory."""
    import psutil

    item, layers, hidden = ITEM[arguments.dtype], arguments.layers, arguments.hidden
    tokens = arguments.batch * arguments.kv_heads * arguments.kept
    # One method's cache is in memory at a time, and what building a layer takes.
    needed = 2 * arguments.head_dim * tokens * (layers + 2) * item + (arguments.ranks + 1) * PROCESS_BYTES
    if "engine" in arguments.parts:
        # Of every placement its own weights.
        placements = len(set(arguments.methods) - {"uniform"})
        heads = 2 * (arguments.heads + arguments.kv_heads) * arguments.head_dim + 3 * arguments.intermediate
        copies = sum(int(name[-1]) for name in arguments.methods if name[-1].isdecimal())
        copied = 2 * (arguments.group + 1) * arguments.head_dim * copies
        whole = 2 * arguments.vocab * arguments.ranks * placements
        needed += hidden * (layers * (placements * heads + copied) + whole) * item
    available = USABLE * psutil.virtual_memory().total
    if needed > available:
        parser.error(
            f"--batch {arguments.batch} with --kept {arguments.kept}, --layers {layers} and --hidden {hidden} needs "
            f"{needed / 2**30:.1f} GiB; at most {available / 2**30:.1f} GiB are taken here: ask for fewer"
        )


def measure_attention(
    arguments: argparse.Namespace, world: World, divisions: Sequence[Division]
) -> list[dict[str, Any]]:
    """The rows of attention alone."""
    from harness.agreement import Agreement
    from harness.fairkv_report import load_facts
    from harness.head_division import UNIFORM
    from harness.models import DTYPES as TYPES
    from harness.ragged_decode import RaggedDecode
    from harness.ragged_heads import HeadShape, TokenPool
    from harness.room import Room
    from harness.sampling import measure
    from harness.statistics import median

    from megakv.distributed.comm import Communicator
    from megakv.distributed.ledger import Ledger
    from megakv.distributed.mesh import make_mesh

    comm = Communicator(make_mesh(cp_size=1, tp_size=world.size, timeout_s=arguments.timeout), Ledger())
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, TYPES[arguments.dtype], world.device)
    pool = TokenPool(shape, max(max(row) for division in divisions for row in division.budgets), arguments.seed)
    size = {"batch": arguments.batch, "steps": arguments.steps}
    room = Room()
    methods = [RaggedDecode(division, pool, comm, room, **size) for division in divisions]
    agreement = Agreement(world, arguments.dtype)

    def inspect(name: str, outputs: Any) -> dict[str, Any]:
        return {} if name == UNIFORM else {"max_output_difference": agreement.check(name, outputs)}

    rows = []
    samples = measure(
        world, methods, repeats=arguments.repeats, inspect=inspect, budget_s=arguments.cell_seconds, least=3
    )
    room.clear()
    for sample, method, division in zip(samples, methods, divisions, strict=True):
        # The first run is the untimed one.
        busy = world.gather(method.busy[1:])
        rows.append(
            sample.to_row(
                part="attention",
                ranks=arguments.ranks,
                batch=arguments.batch,
                kept=arguments.kept,
                busy=busy,
                busy_rates=[median(rates).value for rates in busy],
                layer_seconds=world.gather(method.layer_seconds[1:]),
                **load_facts(division),
            )
        )
    return rows


def run(arguments: argparse.Namespace) -> None:
    """Measure, as one of the ranks, and report from rank 0."""
    from harness.fairkv_predictions import predicted_seconds
    from harness.fairkv_report import draw, show, summarise
    from harness.mapped_engines import measure_engines
    from harness.report import describe_machine, publish
    from harness.world import join_world

    machine = describe_machine()
    world = join_world(arguments.threads, shared_memory=True, timeout_s=arguments.timeout)
    divisions = make_divisions(arguments)
    predicted = predicted_seconds(world, arguments, arguments.parts, divisions)
    parts: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.parts:
        measured = (measure_attention if part == "attention" else measure_engines)(arguments, world, divisions)
        parts[part] = [row | predicted[part][row["method"]] for row in measured]
    if world.rank == 0:
        summary = {part: summarise(rows) for part, rows in parts.items()}
        titles = {
            part: f"{TITLES[part]} on {arguments.ranks} ranks, {arguments.batch} x {arguments.kept:,} kept tokens"
            for part in parts
        }
        subtitle = (
            f"{arguments.layers} layers of {arguments.kv_heads} KV heads, {arguments.group} query heads each, sigma "
            f"{arguments.sigma:g}, {arguments.dtype}, {arguments.threads} thread(s) per rank; median, 95% interval"
        )
        for part, rows in parts.items():
            show(titles[part], rows, summary[part])
        publish(
            arguments,
            benchmark="fairkv",
            machine=machine,
            rows=[row for rows in parts.values() for row in rows],
            summary=summary,
            draw=lambda path: [
                draw(path.with_suffix(f".{part}.png"), titles[part], subtitle, rows) for part, rows in parts.items()
            ],
        )
    world.leave()


def main() -> int:
    """Entry of the process started by hand, and of every rank that it starts."""
    arguments = parse_arguments()
    return serve(run, arguments) if is_rank() else start_ranks(arguments)


if __name__ == "__main__":
    sys.exit(main())
