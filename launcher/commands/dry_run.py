"""``megakv dry-run``: every rank of a run on the meta device, in this process."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megakv.base.errors import MegaKVError
from megakv.tracking.files import check_outputs, write_whole

if TYPE_CHECKING:
    from megakv.planner.dry_run import DryRun, VirtualRank

GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", required=True, help="the JSON of the run")
    parser.add_argument("--model", required=True, help="directory or hub id; only config.json is read")
    parser.add_argument("--context", type=int, help="tokens of a prompt (default: the positions that the model has)")
    parser.add_argument("--batch", type=int, default=1, help="prompts (default 1)")
    parser.add_argument("--new-tokens", type=int, default=0, help="tokens to generate for each (default 0)")
    parser.add_argument("--hardware", help="a machine's name, or its profile: sums above its memory are refused")
    parser.add_argument("--json", help="write the result, rank by rank, to this file")


def run(arguments: argparse.Namespace) -> None:
    """Build the ranks of a run without weights, check all shapes and shards, and add up memory per rank."""
    from megakv.costmodel.presets import hardware
    from megakv.planner.dry_run import dry_run

    check_outputs({"--json": arguments.json}, {"--config": arguments.config})
    memory = (
        None if arguments.hardware is None else hardware(arguments.hardware, setting="--hardware").spec.memory_bytes
    )
    result = dry_run(
        arguments.model,
        arguments.config,
        context=arguments.context,
        batch=arguments.batch,
        new_tokens=arguments.new_tokens,
        memory_bytes=memory,
    )
    if arguments.json:
        write_whole(arguments.json, json.dumps(result.to_json(), indent=1).encode())
    print(describe(result))
    if result.problem is not None:
        raise MegaKVError(result.problem)


def describe(result: DryRun) -> str:
    """The table that a user sees; neighbours with the same numbers share a row."""
    mesh = result.mesh
    lines = [
        f"{result.model}: {result.model_type}, {result.parameters / 1e9:.2f}e9 parameters in {result.tensors} tensors, "
        f"{result.cut_parameters} of them cut",
        f"CP {mesh['cp']} x TP {mesh['tp']}, {result.batch} x {result.context} tokens, {result.new_tokens} new each: "
        "all shapes fit, all shards add up",
        f"{'ranks':>11} {'tokens':>9} {'weights GB':>11} {'KV GB':>8} {'activations GB':>15} {'sum GB':>8} "
        f"{'host GB':>8}",
    ]
    for _, group in groupby(result.ranks, key=_numbers):
        ranks = list(group)
        first, last = ranks[0], ranks[-1]
        name = f"{first.rank}" if first is last else f"{first.rank}-{last.rank}"
        lines.append(
            f"{name:>11} {first.tokens:>9} {first.weight_bytes / GB:>11.2f} {first.kv_bytes / GB:>8.2f} "
            f"{first.activation_bytes / GB:>15.2f} {first.total_bytes / GB:>8.2f} {first.host_bytes / GB:>8.2f}"
        )
    if result.host_taken:
        every = result.host_taken * len(result.ranks)
        lines.append(
            f"off the accelerator: each rank takes {result.host_taken / GB:.2f} GB of host memory at start, all "
            f"{len(result.ranks)} together {every / GB:.2f} GB"
        )
    if result.memory_bytes is not None and result.problem is None:
        largest = max(rank.total_bytes for rank in result.ranks)
        lines.append(f"fits: at most {largest / GB:.1f} of {result.memory_bytes / GB:.1f} GB on a rank")
    return "\n".join(lines)


def _numbers(rank: VirtualRank) -> tuple[Any, ...]:
    return rank.tokens, rank.weight_bytes, rank.kv_bytes, rank.activation_bytes, rank.host_bytes
