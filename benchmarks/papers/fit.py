"""Fitting a few physical constants of a machine to the published times of one half of the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from .published import Cell

Constants = Mapping[str, float]
Predict = Callable[[Cell, Constants], float]


@dataclass(frozen=True)
class Constant:
    """One number that is fitted."""

    start: float  # Where the search begins, and its bounds: what is physically possible
    low: float
    high: float


NEAR = 1.1
"""A constant this close to a bound is what the bound says, not what the times say."""


def at_bounds(values: Mapping[str, float], constants: Mapping[str, Constant]) -> list[str]:
    """Names of the constants whose search ended at a bound."""
    return [
        name for name, each in constants.items() if values[name] < each.low * NEAR or values[name] * NEAR > each.high
    ]


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
