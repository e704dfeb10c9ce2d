"""Time to first token of KV-Runahead's chain, of TSP, tensor parallelism, ring pass-KV and what `auto` chooses.

In the form of the paper's Tables 1 to 3 and Figures 6, 8, 10 and 11, over contexts, ranks, KV heads and links.
Partitions are searched on the ranks as the run goes on. Every cell is kept when it is done: the same command goes on
from there.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.arguments import (
    add_model_arguments,
    add_rank_arguments,
    check_model_arguments,
    check_positive,
    check_rank_arguments,
    method_names,
    whole_numbers,
)
from harness.launches import LaunchError, Launches, add_part_argument, leave_part
from harness.links import FREE, LimitedLinks, check_rate, unavailable
from harness.neighbours import NoisyLinks
from harness.ranks import is_rank, serve, start_ranks
from harness.runahead_plan import METHODS, Group, groups, identity, is_done, profile_path

QUICK = {
    "context": "1024,1536,2048",
    "table_spacing": 1024,
    "repeats": 3,
    "cell_seconds": 60.0,
    "profile_seconds": 20.0,
    "search_patience": 4,
}
FULL = {
    "context": "2048,4096,6144,8192",
    "table_spacing": 4096,
    "repeats": 7,
    "cell_seconds": 600.0,
    "profile_seconds": 60.0,
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_arguments(parser, timeout_s=8 * 3600)
    add = parser.add_argument
    add("--context", help=f"tokens of the prompts, such as 4096,8192 (default {FULL['context']})")
    add("--sizes", help="numbers of ranks (default: --ranks alone)")
    add("--kv-heads", default="16", help="key-value heads, one model for each, such as 16,4,1 (default 16)")
    add("--family", choices=("llama", "falcon"), default="llama", help="of the model (default llama)")
    add("--methods", help=f"of {','.join(METHODS)} (default: all but single_masked)")
    add("--rates", default=FREE, help=f"links between ranks: {FREE}, or limits such as 1gbit between hosts, as root")
    add("--noise", action="store_true", help="also beside a competing flow at half rate, on limited links")
    add("--table", help="lookup table to begin with; {ranks}, {kv_heads} and {rate} in its name are filled in")
    add("--table-spacing", type=int, help="kvr_p interpolates between multiples of it (default 4096)")
    add("--profile", help="hardware profile for auto and the searches, its name filled in likewise")
    add("--profile-seconds", type=float, help="how long one is measured without --profile; 0: none (default 60)")
    add("--search-step", type=int, help="tokens of a search's finest stride (default about 1/128 of the prompt)")
    add(
        "--search-patience",
        type=int,
        help="partitions without progress after which a stride is left (default 4 a bound)",
    )
    add("--search-repeats", type=int, default=1, help="passes of a promising partition (default 1)")
    add("--repeats", type=int, help="rounds at most (default 7)")
    add("--least-repeats", type=int, default=3, help="rounds at least (default 3)")
    add("--cell-seconds", type=float, help="no further round begins in a cell after them (default 600)")
    add("--bound-repeats", type=int, default=2, help="rounds of single and single_masked, apart (default 2)")
    add("--quick", action="store_true", help=f"shorter and less of everything: {QUICK['context']} tokens, 3 rounds")
    add("--parts", metavar="FOLDER", help="where cells are kept (default: FILE.parts of --json)")
    add_part_argument(parser)
    for name in ("--plan", "--switch"):
        add(name, help=argparse.SUPPRESS)
    add_model_arguments(parser, without=("kv-heads",))
    arguments = parser.parse_args(argv)
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.kv_heads = whole_numbers(parser, "--kv-heads", arguments.kv_heads)
    arguments.context = whole_numbers(parser, "--context", arguments.context)
    arguments.sizes = whole_numbers(parser, "--sizes", arguments.sizes or str(arguments.ranks))
    check_rank_arguments(parser, arguments)
    check_model_arguments(parser, arguments)
    counts = ("table_spacing", "search_repeats", "repeats", "least_repeats", "cell_seconds", "bound_repeats")
    check_positive(parser, arguments, *counts)
    arguments.methods = method_names(
        parser, arguments.methods or ",".join(name for name in METHODS if name != "single_masked"), METHODS
    )
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    sizes = ",".join(map(str, arguments.sizes))
    if arguments.sizes[0] < 2 or arguments.sizes[-1] > arguments.ranks:
        parser.error(f"--sizes {sizes}: allowed: 2 to --ranks {arguments.ranks}; a chain of one sends nothing")
    if arguments.context[0] < 4 * arguments.ranks:
        parser.error(
            f"--context {arguments.context[0]}: allowed: from {4 * arguments.ranks} on --ranks {arguments.ranks}"
        )
    if arguments.profile_seconds < 0:
        parser.error(f"--profile-seconds {arguments.profile_seconds:g}: allowed: 0 or more")
    arguments.rates = arguments.rates.split(",")
    for rate in arguments.rates:
        try:
            check_rate(rate)
        except ValueError as error:
            parser.error(f"--rates: {error}")
    if arguments.noise and set(arguments.rates) == {FREE}:
        parser.error("--noise needs limited links: give --rates such as 1gbit")
    if arguments.parts is None and arguments.json:
        arguments.parts = str(Path(arguments.json).with_suffix(".parts"))


def run(arguments: argparse.Namespace) -> None:
    """Measure the cells of one group, as one of its ranks."""
    from harness.models import MODELS
    from harness.parts import Parts
    from harness.report import describe_machine
    from harness.runahead_cells import CellBench
    from harness.searches import kept
    from harness.world import join_world

    machine = describe_machine()
    group = Group.load(arguments.plan)
    asked = identity(arguments)
    arguments.kv_heads = group.kv_heads
    searched = group.searched(arguments.methods, arguments.table_spacing)
    shared_memory = "tp" in arguments.methods and group.rate == FREE
    world = join_world(arguments.threads, shared_memory=shared_memory, timeout_s=arguments.timeout)
    positions = max([*searched, *group.contexts])
    model = MODELS[arguments.family](arguments, positions=positions, device=world.device)
    parts = Parts(Path(arguments.parts), asked)
    with _profile(arguments, group, world, model) as profile:
        table = _table(arguments, group, world)
        bench = CellBench(arguments, group, world, model, table=table, profile=profile)
        for context in group.contexts:
            for length in group.narrowed([context]).searched(arguments.methods, arguments.table_spacing):
                result = bench.searches.search(length)
                if result is not None:
                    parts.write(f"search-{group.cell(length)}", kept(result))
            rows = bench.measure(context)
            if world.rank == 0:
                rows = [{**row, "load_average": machine["load_average"]} for row in rows]
                cell = {"machine": machine, "repeats": arguments.repeats, "rows": rows}
                parts.write(group.cell(context), cell)
        bench.close()
    if world.rank == 0:
        leave_part(arguments.part, {"machine": machine})
    world.leave()


@contextlib.contextmanager
def _profile(arguments: argparse.Namespace, group: Group, world: Any, model: Any) -> Iterator[str | None]:
    """The hardware profile of a group: given, kept by an earlier run, measured now, or none."""
    from harness.predictions import shape_of
    from harness.profiles import measured_profile

    path = profile_path(group, arguments.profile, Path(arguments.parts))
    if arguments.profile is not None:
        yield str(path)
        return
    if world.gather(path.exists())[0] or not arguments.profile_seconds:
        yield str(path) if path.exists() else None
        return
    measuring = measured_profile(world, shape_of(model), seconds=arguments.profile_seconds, timeout_s=arguments.timeout)
    with measuring as measured:
        if world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(measured, path)
        yield measured


def _table(arguments: argparse.Namespace, group: Group, world: Any) -> Path:
    """The group's own lookup table, which begins as the one given."""
    path = Path(arguments.parts) / "tables" / f"{group.name}.json"
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.table is not None and not path.exists():
            shutil.copyfile(group.filled(arguments.table), path)
    world.barrier()
    return path


def measure_all(arguments: argparse.Namespace, parts: Any, skipped: dict[str, str]) -> int:
    """Start ranks for every group that is not measured yet; the exit status of the first launch that fails."""
    launches = Launches(arguments)
    reason = unavailable() if set(arguments.rates) - {FREE} else None
    for group in groups(arguments):
        left = [
            context
            for context in group.contexts
            if not is_done(
                parts.read(group.cell(context)),
                group.methods(arguments.methods, context, arguments.table_spacing),
                group.noise,
                arguments.repeats,
            )
        ]
        if group.rate != FREE and reason is not None:
            skipped[group.name] = reason
            print(f"{group.name}: not measured: {reason}", file=sys.stderr)
            continue
        if not left:
            print(f"{group.name}: measured already", flush=True)
            continue
        print(f"{group.name}: {', '.join(map(str, left))} tokens", flush=True)
        links = NoisyLinks if group.noise else LimitedLinks
        plan = parts.folder / "plan"
        group.narrowed(left).save(plan)
        options = ["--plan", str(plan.resolve()), "--parts", str(parts.folder.resolve())]
        try:
            launches.run(group.ranks, options, start=start_ranks if group.rate == FREE else links(group.rate))
        except LaunchError as error:
            return error.status
        finally:
            plan.unlink()
    return 0


def main() -> int:
    """Entry of the process started by hand, which starts the ranks of every group, and of every rank."""
    arguments = parse_arguments()
    if is_rank():
        return serve(run, arguments)
    from harness.parts import Parts

    with contextlib.ExitStack() as stack:
        folder = arguments.parts or stack.enter_context(tempfile.TemporaryDirectory(prefix="megakv-benchmark-"))
        parts = Parts(Path(folder), identity(arguments))
        parts.folder.mkdir(parents=True, exist_ok=True)
        skipped: dict[str, str] = {}
        status = measure_all(arguments, parts, skipped)
        from megakv.launcher.process import quiet_libraries

        quiet_libraries()
        from harness.runahead_report import report

        # What was measured is shown whatever ended the run.
        return report(arguments, parts, skipped) or status


if __name__ == "__main__":
    sys.exit(main())
