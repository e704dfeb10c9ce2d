"""The papers' models and machines, and the few constants of these that one half of the published cells fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares

from megakv.costmodel.machine_spec import Link, MachineSpec
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape

from .published import Cell

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
Constants = Mapping[str, float]
Predict = Callable[[Cell, Constants], float]


@dataclass(frozen=True)
class Constant:
    """One number that is fitted."""

    start: float  # Where the search begins, and its bounds: what is physically possible
    low: float
    high: float


def fitted(cells: Sequence[Cell], constants: Mapping[str, Constant], predict: Predict) -> dict[str, float]:
    """Constants with the least error of the cells that are there to be fitted, on a logarithmic scale.

    Outliers count less than in proportion (soft L1): a published number may be wrong, or a rank have been slow.
    """
    names = list(constants)
    known = [cell for cell in cells if cell.use == "fitted"]
    published = np.log([cell.value for cell in known])

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return np.log([predict(cell, values) for cell in known]) - published

    chosen = constants.values()
    found = least_squares(
        errors,
        np.log([each.start for each in chosen]),
        bounds=(np.log([each.low for each in chosen]), np.log([each.high for each in chosen])),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
    )
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


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
