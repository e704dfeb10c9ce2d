"""What the cost model predicts of decoding over ragged heads, from a profile measured in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megakv.costmodel.decoding import RaggedTimes
from megakv.costmodel.hardware import load_profile
from megakv.costmodel.shape import ModelShape

from .head_division import Division
from .models import DTYPES, llama_config
from .profiles import keep_profile, measured_profile
from .world import World

Predictions = dict[str, dict[str, dict[str, float | None]]]


def predicted_seconds(
    world: World, arguments: argparse.Namespace, parts: Sequence[str], divisions: Sequence[Division]
) -> Predictions:
    """What rows say of their predicted seconds, by part and method: of a profile measured now, if there is time to.

    Every rank must call it.
    """
    if not arguments.profile_seconds or world.size < 2:
        return {part: {division.name: {"predicted_s": None} for division in divisions} for part in parts}
    model = ModelShape.from_config(llama_config(arguments, positions=64), dtype=DTYPES[arguments.dtype])
    with measured_profile(world, model, seconds=arguments.profile_seconds, timeout_s=arguments.timeout) as path:
        profile = load_profile(path)
    keep_profile(world, profile, arguments.json, str(world.size))
    shared = profile.sum_times(world.size, shared_memory=True) is not None
    times = RaggedTimes(profile, model.attention(), batch=arguments.batch, ranks=world.size, shared_memory=shared)
    found: Predictions = {part: {} for part in parts}
    for division in divisions:
        loads = division.loads()
        divided = [bool(division.divided(layer)) for layer in range(len(loads))]
        for part in parts:
            attention = part == "attention"
            seconds = times.attention(loads, divided) if attention else times.step(model, loads, divided)
            found[part][division.name] = {"predicted_s": seconds}
    return found
