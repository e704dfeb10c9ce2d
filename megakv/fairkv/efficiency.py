"""How busy a mapping keeps the ranks: at every layer's barrier, and by the paper's Equation 5.

Loads are of shape [layers, ranks]; others, negative or infinite ones are a `ValueError`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _loads(loads: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(loads, dtype=np.float64)
    if found.ndim != 2 or not found.size:
        raise ValueError(f"loads have shape {list(found.shape)}; allowed: [layers, ranks], one of each or more")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("loads must be finite and not negative")
    return found


def _shares(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Along the last axis, every load over the largest; 1 where there is nothing to do."""
    slowest = loads.max(axis=-1, keepdims=True)
    return np.divide(loads, slowest, out=np.ones_like(loads), where=slowest > 0)


def barrier_utilisation(loads: ArrayLike) -> float:
    """Mean load over the slowest rank's, averaged over layers.

    Every layer ends in an all-reduce, at which the ranks wait for the slowest: this is the part of the attention time
    in which a rank works. A layer without any load counts as 1.
    """
    return float(_shares(_loads(loads)).mean(axis=1).mean())


def efficiency(loads: ArrayLike) -> float:
    """Equation 5 of the paper: mean over ranks of a rank's load, summed over layers, over the largest such sum.

    It is what would count if ranks met once per token and not in every layer, and what memory is like: a mapping whose
    slowest rank is another one in every layer has an efficiency of 1 and keeps the ranks waiting all the same.
    """
    return float(_shares(_loads(loads).sum(axis=0)).mean())


def busy_rates(loads: ArrayLike) -> list[float]:
    """For each rank, its load over the sum of the slowest ranks' loads: what part of the attention time it works."""
    found = _loads(loads)
    slowest = found.max(axis=1).sum()
    return [float(total / slowest) if slowest > 0 else 1.0 for total in found.sum(axis=0)]
