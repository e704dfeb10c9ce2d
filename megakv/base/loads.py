"""How busy ranks are that wait for the slowest of them at every layer's end."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _checked(loads: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(loads, dtype=np.float64)
    if found.ndim != 2 or not found.size:
        raise ValueError(f"loads have shape {list(found.shape)}; allowed: [layers, ranks], one of each or more")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("loads must be finite and not negative")
    return found


def _of_slowest(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Along the last axis, every load over the largest; 1 where there is nothing to do."""
    slowest = loads.max(axis=-1, keepdims=True)
    return np.divide(loads, slowest, out=np.ones_like(loads), where=slowest > 0)


def barrier_utilisation(loads: ArrayLike) -> float:
    """Mean load over the slowest rank's, averaged over layers, of ``[layers, ranks]`` loads.

    Ranks wait for the slowest at every layer's end: it is the part of the attention time in which a rank works.
    """
    return float(_of_slowest(_checked(loads)).mean(axis=1).mean())


def efficiency(loads: ArrayLike) -> float:
    """Equation 5 of the paper: mean over ranks of a rank's load, summed over layers, over the largest such sum.

    It is 1 where the slowest rank is another one in every layer, and ranks wait all the same.
    """
    return float(_of_slowest(_checked(loads).sum(axis=0)).mean())


def busy_rates(loads: ArrayLike) -> list[float]:
    """For each rank, its load over the sum of the slowest ranks' loads: what part of the attention time it works."""
    found = _checked(loads)
    slowest = found.max(axis=1).sum()
    return [float(total / slowest) if slowest > 0 else 1.0 for total in found.sum(axis=0)]
