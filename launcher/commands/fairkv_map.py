"""``megakv fairkv-map``: from a budget profile to KV heads on ranks. Starts no rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WORTH = {"barrier_utilisation", "efficiency"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--profile", required=True, help='JSON: {"model": NAME, "budgets": [layer][KV head]}')
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel ranks")
    parser.add_argument("--copies", type=int, default=0, help="extra replicas of KV heads per layer (default 0)")
    parser.add_argument("--split", choices=("even", "free"), default="free", help="how replicas share a head")
    parser.add_argument(
        "--objective",
        choices=("barrier", "equation4", "requests"),
        default="barrier",
        help="barrier: the slowest rank of every layer (default); equation4: the paper's, the largest sum over layers; "
        "requests: the barrier for the profile's single prompts, each with its own split",
    )
    parser.add_argument("--memory-cap", type=float, help="tokens a rank may keep, over its KV heads and all layers")
    parser.add_argument("--max-replicas", type=int, help="R_max: replicas of one KV head (default: the ranks)")
    parser.add_argument("--copied-heads", type=int, help="CH: KV heads per layer with more than one replica")
    parser.add_argument("--model", help="directory, hub id or config file: refuse the profile of another model")
    parser.add_argument("--length", type=int, help="tokens of a sequence: refuse budgets above it")
    parser.add_argument("--json", required=True, help="write the mapping to this file")
    parser.add_argument("--png", help="draw the loads, contiguous and mapped, to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Place KV heads with different budgets on ranks, with copies, so that no rank waits."""
    from megakv.fairkv.figures import draw_mapping
    from megakv.fairkv.mapper import map_heads
    from megakv.fairkv.profile import load_budgets

    _check_files(arguments)
    if arguments.length is not None and arguments.length < 1:
        raise ValueError(f"--length {arguments.length}: allowed: 1 or more")
    profile = load_budgets(arguments.profile, setting="--profile")
    model = _shape(arguments.model) if arguments.model else None
    try:
        if model is not None:
            profile.check_model(*model)
        if arguments.length is not None:
            profile.check_length(arguments.length)
    except ValueError as error:
        raise ValueError(f"--profile = {arguments.profile!r}: {error}") from error
    found = map_heads(
        profile,
        tp_size=arguments.tp,
        copies=arguments.copies,
        split=arguments.split,
        objective=arguments.objective,
        memory_cap=arguments.memory_cap,
        max_replicas=arguments.max_replicas,
        copied_heads=arguments.copied_heads,
    )
    writers: list[tuple[str, str | None, Callable[[str], None]]] = [
        ("--json", arguments.json, found.save),
        ("--png", arguments.png, partial(draw_mapping, found)),
    ]
    for option, path, write in writers:
        try:
            if path:
                write(path)
        except OSError as error:
            raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from error
    return {
        "layers": len(found.mapping),
        "kv_heads": found.n_kv_heads,
        "ranks": found.tp_size,
        **found.model_dump(include={"model", "copies", "split", "objective", *WORTH, "rank_loads", "busy_rates"}),
        "contiguous": found.contiguous and found.contiguous.model_dump(include=WORTH),
        "json": arguments.json,
        "png": arguments.png,
    }


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse to write over the profile, or the picture over the mapping."""
    named: dict[Path, str] = {}
    for name in ("profile", "json", "png"):
        if path := getattr(arguments, name):
            other = named.setdefault(Path(path).resolve(), name)
            if other != name:
                raise ValueError(f"--{name} {path} is the file of --{other}: name another one")


def _shape(model: str) -> tuple[str, int, int]:
    """Name, layers and KV heads of a model; no weights are read."""
    import torch

    from megakv.costmodel.shape import ModelShape

    try:
        shape = ModelShape.from_path(model, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from error
    path = Path(model)
    return str(path.parent) if path.is_file() else model, len(shape.layers), shape.cached_heads
