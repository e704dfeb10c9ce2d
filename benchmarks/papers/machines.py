"""Model shapes of the recipes, and the papers' machines with fitted constants in place of the presets' own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from megakv.costmodel.machine_spec import Link, MachineSpec
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@cache
def model_shape(name: str, *, fp8: bool = False) -> ModelShape:
    """A model of the recipes, in 16 bits."""
    shape = ModelShape.from_path(RECIPES / name, dtype=torch.bfloat16)
    return shape.with_fp8_feed_forward() if fp8 else shape


def changed(preset: str, **values: Any) -> MachineSpec:
    """A preset with other constants; `inside` and `between` as links."""
    return MachineSpec.model_validate({**PRESETS[preset].model_dump(), **values})


def link(bandwidth: float, latency_s: float, *, collective_bandwidth: float | None = None) -> dict[str, float | None]:
    """A link's entry in a machine."""
    return Link(bandwidth=bandwidth, latency_s=latency_s, collective_bandwidth=collective_bandwidth).model_dump()
