"""FairKV, Table 2: how busy tensor-parallel ranks are when KV heads keep different numbers of tokens.

Ada-KV leaves each head a share of the budget and gives the rest to the heads that score best: here to heads by a
Dirichlet distribution, whose one constant is how evenly. Every head keeps the observation window whatever its budget.
All ranks wait for the slowest in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gamma

from megakv.base.loads import barrier_utilisation
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.profile import BudgetProfile

from .fit import Constant, Constants, fitted
from .published import Cell

NAMES = ("fairkv_table_2",)
HEADS, LAYERS = 8, 80
FLOOR, WINDOW = 0.2, 32
"""Ada-KV's share that every head keeps, and SnapKV's window."""
BUDGETS = (128, 256, 512, 1024)
CONSTANTS = {"evenness": Constant(1.0, 0.05, 20.0)}


def fit(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Constants of every model, of one half of its cells."""
    models = dict.fromkeys(cell.setting["model"] for cell in cells)
    return {
        model: fitted([cell for cell in cells if cell.setting["model"] == model], CONSTANTS, predict)
        for model in models
    }


def predict(cell: Cell, constants: Constants) -> float:
    """Share of the time that a rank is busy."""
    setting = cell.setting
    kept = kept_tokens(setting["budget"], constants["evenness"])
    return barrier_utilisation(kept.reshape(LAYERS, setting["tp"], -1).sum(axis=2))


def kept_tokens(budget: int, evenness: float) -> NDArray[np.float64]:
    """``[layers, heads]`` tokens kept."""
    # The same quantiles for every constant, so that predictions change smoothly with it.
    shares = np.maximum(gamma.ppf(_uniform(), evenness), 1e-12)
    shares = shares / shares.sum(axis=1, keepdims=True)
    free = budget - WINDOW
    kept: NDArray[np.float64] = WINDOW + free * (FLOOR + (1 - FLOOR) * HEADS * shares)
    return kept


@cache
def _uniform() -> NDArray[np.float64]:
    return np.random.default_rng(0).random((LAYERS, HEADS))


def gain(constants: Constants, *, tp: int, copied: int) -> float:
    """Throughput of fair-copying over contiguous heads, at the budget where it is highest: attention alone."""
    gains = []
    for budget in BUDGETS:
        kept = kept_tokens(budget, constants["evenness"])
        contiguous = kept.reshape(LAYERS, tp, -1).sum(axis=2)
        profile = BudgetProfile(model="a model", budgets=tuple(map(tuple, kept.tolist())))
        mapped = np.array(map_heads(profile, tp_size=tp, copies=copied).loads)
        gains.append(float(contiguous.max(axis=1).sum() / mapped.max(axis=1).sum()))
    return max(gains)
