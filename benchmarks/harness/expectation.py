"""What a step should take: every rank's work by a latency model, and the jitter of ranks with equal work.

Kept tokens alone, as in FairKV's Section 3.2, promise too much. A token costs more while other ranks are at work, with
which it shares memory and caches, a page costs something whatever it holds, every layer ends in a sum, and ranks with
equal work are not done at the same moment. The last is measured on equal budgets, where nothing else makes a rank wait,
and put on every method's work: equal loads wait for the slowest of all ranks, contiguous heads mostly for the one that
has most to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakv.fairkv.pages import PAGE_SIZES

Rows = Sequence[Mapping[str, Any]]
Table = npt.NDArray[np.float64]


def page_count(tokens: int) -> int:
    """Pages of all sizes that hold so many tokens of one head."""
    pages = 0
    for size in PAGE_SIZES:
        pages, tokens = pages + tokens // size, tokens % size
    return pages


def crowded_tokens(loads: Table) -> Table:
    """``[layers, ranks]`` the sum over a rank's tokens of the number of other ranks that are still at work meanwhile.

    All begin together, and go on alike.
    """
    order = np.argsort(loads, axis=1)
    ascending = np.take_along_axis(loads, order, axis=1)
    others = np.arange(loads.shape[1] - 1, -1, -1)
    crowded = np.cumsum(np.diff(ascending, axis=1, prepend=0) * others, axis=1)
    found = np.empty_like(crowded)
    np.put_along_axis(found, order, crowded, axis=1)
    return found


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's attention at one layer, by least squares through every rank, layer and method."""

    token: float  # Of a kept token while no other rank is at work, in seconds
    crowding: float  # What it costs more for each other rank at work, in seconds
    page: float  # Of a page of whatever size, in seconds

    def seconds(self, row: Mapping[str, Any]) -> Table:
        """``[layers, ranks]`` of a row's work."""
        costs: Table = _work(row) @ np.array([self.token, self.crowding, self.page])
        return costs

    @classmethod
    def fit(cls, rows: Rows) -> Costs:
        """Through the medians of the measured repetitions; nothing costs less than nothing."""
        work = np.concatenate([_work(row).reshape(-1, 3) for row in rows])
        measured = np.concatenate([np.median(_measured(row), axis=0).ravel() for row in rows])
        costs, columns = np.zeros(3), [0, 1, 2]
        while columns:
            found = np.linalg.lstsq(work[:, columns], measured, rcond=None)[0]
            if found.min() >= 0:
                costs[columns] = found
                break
            del columns[int(found.argmin())]
        return cls(*costs.tolist())


def _work(row: Mapping[str, Any]) -> Table:
    """``[layers, ranks, 3]`` tokens, the others' presence meanwhile, and pages."""
    loads, pages = (np.asarray(row[name], dtype=np.float64) for name in ("loads", "pages"))
    return np.stack([loads, crowded_tokens(loads), pages], axis=-1)


def _measured(row: Mapping[str, Any]) -> Table:
    """``[repetitions, layers, ranks]`` seconds that a rank computed."""
    return np.moveaxis(np.asarray(row["layer_seconds"], dtype=np.float64), 0, -1)


def expected_seconds(rows: Rows, even: Mapping[str, Any], costs: Costs) -> dict[str, float]:
    """Seconds of a step of every method."""
    measured = _measured(even)
    jitter = measured / costs.seconds(even)
    rest = np.asarray(even["seconds"]) - measured.max(axis=2).sum(axis=1)
    return {
        row["method"]: float(np.median((costs.seconds(row) * jitter).max(axis=2).sum(axis=1) + rest)) for row in rows
    }
