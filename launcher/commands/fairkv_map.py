"""``megakv fairkv map``: from a budget profile to KV heads on ranks. Starts no rank."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megakv.costmodel.head_times import HeadTimes
    from megakv.costmodel.shape import ModelShape

WORTH = {"barrier_utilisation", "efficiency"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--profile", required=True, help='JSON: {"model": NAME, "budgets": [layer][KV head]}')
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel ranks")
    text = "extra replicas of KV heads per layer, at most (default: with --objective time as many as pay, else 0)"
    parser.add_argument("--copies", type=int, help=text)
    parser.add_argument("--split", choices=("even", "free"), default="free", help="how replicas share a head")
    parser.add_argument(
        "--objective",
        choices=("time", "barrier", "equation4", "algorithm2"),
        help="time: predicted seconds of a step (default with --hardware); barrier: the slowest rank of every layer "
        "(default without); equation4: the paper's, the largest sum over layers; algorithm2: the paper's listing, the "
        "fullest less the emptiest rank of every layer",
    )
    parser.add_argument("--hardware", help="predict steps on this machine: a hardware profile, a data sheet, or a name")
    parser.add_argument("--batch", type=int, help="sequences that a predicted step decodes (default 1)")
    text = "tokens of a sequence that a rank may keep, over its KV heads and all layers, in the profile's worst prompt"
    parser.add_argument("--memory-cap", type=float, help=text)
    text = "bytes for a rank's KV heads of all layers: their weights, and what the sequences of --batch keep"
    parser.add_argument("--memory-cap-bytes", type=float, help=text)
    parser.add_argument("--max-replicas", type=int, help="R_max: replicas of one KV head (default: the ranks)")
    parser.add_argument("--copied-heads", type=int, help="CH: KV heads per layer with more than one replica")
    text = "directory, hub id or config file: refuse the profile of another model; whose steps --hardware predicts"
    parser.add_argument("--model", help=text)
    parser.add_argument("--length", type=int, help="tokens of a sequence: refuse budgets above it")
    parser.add_argument("--json", required=True, help="write the mapping to this file")
    parser.add_argument("--png", help="draw loads, contiguous and mapped, and gains by regime, to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Place KV heads with different budgets on ranks, with copies, so that no rank waits."""
    import torch

    from megakv.fairkv.figures import draw_mapping
    from megakv.fairkv.mapper import map_heads
    from megakv.fairkv.profile import load_budgets
    from megakv.launcher.model_names import model_name
    from megakv.tracking.files import check_outputs

    check_outputs({"--json": arguments.json, "--png": arguments.png}, {"--profile": arguments.profile})
    if arguments.length is not None and arguments.length < 1:
        raise ValueError(f"--length {arguments.length}: allowed: 1 or more")
    profile = load_budgets(arguments.profile, setting="--profile")
    times, model = _times(arguments), None
    if arguments.model:
        model = times.model if times else _shape(arguments.model, torch.float32)
    try:
        if model is not None:
            profile.check_model(model_name(arguments.model), len(model.layers), model.cached_heads)
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
        times=times,
        memory_cap=arguments.memory_cap,
        memory_cap_bytes=arguments.memory_cap_bytes,
        max_replicas=arguments.max_replicas,
        copied_heads=arguments.copied_heads,
    )
    found.save(arguments.json)
    if arguments.png:
        draw_mapping(found, arguments.png)
    return {
        "layers": len(found.mapping),
        "kv_heads": found.n_kv_heads,
        "ranks": found.tp_size,
        **found.model_dump(include={"model", "copies", "split", "objective", *WORTH, "rank_loads", "busy_rates"}),
        "contiguous": found.contiguous and found.contiguous.model_dump(include=WORTH),
        "time": found.time and found.time.model_dump(),
        "json": arguments.json,
        "png": arguments.png,
    }


def _times(arguments: argparse.Namespace) -> HeadTimes | None:
    """What predicts steps of --model on --hardware; None where no machine is given."""
    if arguments.hardware is None:
        if arguments.batch is not None:
            raise ValueError(f"--batch {arguments.batch}: only of predicted steps; name the machine by --hardware")
        return None
    if not arguments.model:
        raise ValueError(f"--hardware {arguments.hardware}: steps of which model? Name it by --model")
    batch = 1 if arguments.batch is None else arguments.batch
    for name, value in (("--batch", batch), ("--tp", arguments.tp)):
        if value < 1:
            raise ValueError(f"{name} {value}: allowed: 1 or more")
    return step_times(arguments.hardware, arguments.model, tp_size=arguments.tp, batch=batch)


def step_times(machine: str, model: str, *, tp_size: int, batch: int = 1) -> HeadTimes:
    """What predicts a model's steps on the machine of --hardware."""
    import torch

    from megakv.costmodel.head_times import HeadTimes
    from megakv.costmodel.presets import hardware

    profile = hardware(machine, setting="--hardware").on_mesh(cp_size=1, tp_size=tp_size)
    shape = _shape(model, getattr(torch, profile.fingerprint.dtype))
    shared = profile.sum_times(tp_size, shared_memory=True) is not None
    try:
        return HeadTimes(profile, shape, tp_size=tp_size, batch=batch, shared_memory=shared)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}; allowed: a model that caches keys and values of heads") from error


def _shape(model: str, dtype: torch.dtype) -> ModelShape:
    """Sizes of a model; no weights are read."""
    from megakv.costmodel.shape import ModelShape

    try:
        return ModelShape.from_path(model, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from error
