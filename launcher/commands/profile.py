"""``megakv profile``, and what each of its ranks runs.

On several hosts start them by hand:
``deepspeed --hostfile FILE --module megakv.launcher.commands.profile --json PROFILE``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megakv.launcher.process import own_rank, quiet_libraries, report_errors
from megakv.launcher.ranks import (
    add_rank_arguments,
    check_rank_arguments,
    command_line,
    dtype_of,
    join_ranks,
    progress,
    start_ranks,
)

if TYPE_CHECKING:
    from megakv.costmodel.hardware import HardwareProfile
    from megakv.costmodel.records import Record
    from megakv.costmodel.shape import ModelShape
    from megakv.distributed.comm import Communicator

DEFAULT_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; its ranks all but their number."""
    add_rank_arguments(
        parser,
        seconds=DEFAULT_SECONDS,
        seconds_help=f"how long it may take, about (default {DEFAULT_SECONDS:g}); more is steadier",
        ranks=ranks,
    )
    parser.add_argument(
        "--model", help="directory, hub id or config file: measure with this model's heads and matrices"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure on ranks of this machine."""
    from megakv.costmodel.hardware import load_profile

    measure(__name__, arguments)
    return summary(load_profile(arguments.json, setting="--json"))


def measure(module: str, arguments: argparse.Namespace) -> None:
    """Start the ranks of a measuring command."""
    check_rank_arguments(arguments, arguments.ranks)
    if arguments.model:
        model_shape(arguments)
    start_ranks(module, command_line(arguments), ranks=arguments.ranks, threads=arguments.threads)


def model_shape(arguments: argparse.Namespace) -> ModelShape:
    """That of --model."""
    from megakv.costmodel.shape import ModelShape
    from megakv.weights.placement import contiguous_head_map

    try:
        model = ModelShape.from_path(arguments.model, dtype=dtype_of(arguments))
        contiguous_head_map(len(model.layers), model.heads, model.kv_heads, arguments.tp)
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    return model


def summary(profile: HardwareProfile) -> dict[str, object]:
    """What a profile says, in a few numbers."""
    return {
        "machine": profile.fingerprint.model_dump(),
        "attention_gflops": {
            f"{table.kernel}, head dimension {table.head_dim}, group {table.group}": round(table.flops / 1e9, 1)
            for table in profile.attention
        },
        "matmul_gflops": round(profile.matmul_flops / 1e9, 1),
        "memory_gb_per_s": round(profile.memory_bandwidth / 1e9, 2),
        "exchange_gb_per_s": round(profile.exchange.bandwidth / 1e9, 2),
        "exchange_under_attention_gb_per_s": round(profile.bandwidth / 1e9, 2),
        "exchange_latency_us": round(profile.exchange.latency * 1e6, 1),
        "exposed_transfer": round(profile.exposed_transfer, 2),
        "exposed_compute": round(profile.exposed_compute, 2),
    }


def join_and_measure(
    description: str | None,
    arguments_of: Callable[..., None],
    work: Callable[[argparse.Namespace, Communicator, Callable[[int], None]], Record],
) -> None:
    """Entry of every rank of a measuring command: join the others, do the work, and keep what rank 0 found.

    work: takes the arguments, the communicator, and what is to be told the number of steps after each of them.
    """
    parser = argparse.ArgumentParser(description=description)
    arguments_of(parser, ranks=False)
    arguments = parser.parse_args()
    quiet_libraries()
    with report_errors():
        comm = join_ranks(arguments)
        with progress(parser.prog.removesuffix(".py").replace("_", "-")) as step:
            found = work(arguments, comm, step)
        if own_rank() == 0:
            found.save(arguments.json)


def _measured(arguments: argparse.Namespace, comm: Communicator, report: Callable[[int], None]) -> HardwareProfile:
    from megakv.planner.measure.kernels import Matrices
    from megakv.planner.measure.profile import measure_profile

    options: dict[str, Any] = {}
    if arguments.model:
        model = model_shape(arguments)
        shape = model.attention(tp_size=arguments.tp)
        sizes = (shape,) if shape.latent is None else (shape, shape.absorbed)
        options = {"sizes": sizes, "matrices": Matrices.of(model)}
    return measure_profile(comm, dtype=dtype_of(arguments), seconds=arguments.seconds, report=report, **options)


if __name__ == "__main__":
    join_and_measure(__doc__, add_arguments, _measured)
