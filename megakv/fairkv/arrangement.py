"""Which rank is which: the layers' mappings against each other, so that no rank holds more than its memory.

The time of a layer stays the same when its ranks change places. So layers are first mapped each for itself, then turned
until the ranks hold equally much over all layers; only where a cap is tighter than that, heads move at a price in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megakv.fairkv.assignment import TOLERANCE
from megakv.fairkv.layer import LayerMapping

ROUNDS = 2_000


def level_ranks(loads: NDArray[np.float64]) -> NDArray[np.int64]:
    """An order of the ranks in each layer that keeps the largest sum over layers low.

    Parameters
    ----------
    loads : array of shape [layers, ranks]

    Returns
    -------
    array of shape [layers, ranks]
        The rank on which to put what is on each rank.
    """
    layers, size = loads.shape
    orders = np.zeros((layers, size), dtype=np.int64)
    totals = np.zeros(size)
    for layer in np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable"):
        orders[layer, np.argsort(-loads[layer], kind="stable")] = np.argsort(totals, kind="stable")
        totals[orders[layer]] += loads[layer]
    placed = np.zeros_like(loads)
    np.put_along_axis(placed, orders, loads, axis=1)
    for _ in range(ROUNDS):
        step = _exchange(placed)
        if step is None:
            break
        layer, one, other = step
        placed[layer, [one, other]] = placed[layer, [other, one]]
        first, second = orders[layer] == one, orders[layer] == other
        orders[layer, first], orders[layer, second] = other, one
    return orders


def _exchange(placed: NDArray[np.float64]) -> tuple[int, int, int] | None:
    """The exchange of two ranks in one layer that lowers the fullest rank most without another becoming as full."""
    totals = placed.sum(axis=0)
    full = int(totals.argmax())
    change = placed[:, full : full + 1] - placed
    after = np.maximum(totals[full] - change, totals + change)
    after[:, full] = np.inf
    layer, other = np.unravel_index(int(after.argmin()), after.shape)
    if after[layer, other] >= totals[full] * (1 - TOLERANCE):
        return None
    return int(layer), full, int(other)


def arrange(mappings: Sequence[LayerMapping], budgets: Sequence[Sequence[float]], tp_size: int) -> list[LayerMapping]:
    """The same mappings with ranks renumbered in each layer so that the ranks hold about equally much."""
    loads = np.array([m.loads(b, tp_size) for m, b in zip(mappings, budgets, strict=True)])
    orders = level_ranks(loads)
    return [m.renumbered(order.tolist()) for m, order in zip(mappings, orders, strict=True)]


def memory_of(mappings: Sequence[LayerMapping], budgets: Sequence[Sequence[float]], tp_size: int) -> list[float]:
    """Tokens that each rank keeps, summed over heads and layers."""
    layers = [m.loads(b, tp_size) for m, b in zip(mappings, budgets, strict=True)]
    return [sum(column) for column in zip(*layers, strict=True)]
