"""What the cost model predicts of decoding over ragged heads, from a profile measured in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megakv.costmodel.hardware import load_profile
from megakv.costmodel.ragged_time import RaggedTimes
from megakv.costmodel.shape import ModelShape

from .head_division import Division
from .models import DTYPES, llama_config
from .profiles import keep_profile, measured_profile
from .world import World


def predicted_seconds(
    world: World, arguments: argparse.Namespace, part: str, divisions: Sequence[Division]
) -> dict[str, dict[str, float | None]]:
    """What rows say of their predicted seconds, by method: of a profile that is measured now, if there is time to.

    Every rank must call it.

    Parameters
    ----------
    world : World
    arguments : Namespace
        Of `fairkv.py`, as they are for the part.
    part : str
        ``attention`` or ``engine``.
    divisions : sequence of Division
    """
    if not arguments.profile_seconds or world.size < 2:
        return {division.name: {"predicted_s": None} for division in divisions}
    sizes = argparse.Namespace(**{**vars(arguments), "heads": arguments.kv_heads * arguments.group})
    model = ModelShape.from_config(llama_config(sizes, positions=64), dtype=DTYPES[arguments.dtype])
    with measured_profile(world, model, seconds=arguments.profile_seconds, timeout_s=arguments.timeout) as path:
        profile = load_profile(path)
    keep_profile(world, profile, arguments.json, f"{part}-{world.size}")
    shared = profile.sum_times(world.size, shared_memory=True) is not None
    times = RaggedTimes(profile, model.attention(), batch=arguments.batch, ranks=world.size, shared_memory=shared)
    found: dict[str, dict[str, float | None]] = {}
    for division in divisions:
        loads = division.loads()
        divided = [bool(division.divided(layer)) for layer in range(len(loads))]
        attention = part == "attention"
        seconds = times.attention(loads, divided) if attention else times.step(model, loads, divided)
        found[division.name] = {"predicted_s": seconds}
    return found
