"""What a step should take: every rank's work by the latency model of FairKV's Section 3.2, and the jitter of equal ranks.

Kept tokens alone say too much: a page costs something whatever it holds, layers end in a sum, and ranks with equal work
are never done at the same moment. The last is measured on equal budgets, where nothing else makes a rank wait, and put
on every method's work: one that loads its ranks alike waits for the slowest of all, contiguous heads for the one that
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


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's attention at one layer, by least squares through every rank, layer and method.

    Parameters
    ----------
    token, page : float
        Of a kept token and of a page of whatever size, in seconds.
    """

    token: float
    page: float

    def seconds(self, row: Mapping[str, Any]) -> Table:
        """``[layers, ranks]`` of a row's work."""
        return self.token * _table(row["loads"]) + self.page * _table(row["pages"])

    @classmethod
    def fit(cls, rows: Rows) -> Costs:
        """Through the medians of the measured repetitions."""
        work = np.concatenate([np.stack([_table(row[name]).ravel() for name in ("loads", "pages")], 1) for row in rows])
        measured = np.concatenate([np.median(_measured(row), axis=0).ravel() for row in rows])
        token, page = np.linalg.lstsq(work, measured, rcond=None)[0].tolist()
        if page < 0 or token < 0:
            token, page = float(work[:, 0] @ measured / (work[:, 0] @ work[:, 0])), 0.0
        return cls(token, page)


def _table(values: Sequence[Sequence[float]]) -> Table:
    return np.asarray(values, dtype=np.float64)


def _measured(row: Mapping[str, Any]) -> Table:
    """``[repetitions, layers, ranks]`` seconds that a rank computed."""
    return np.moveaxis(np.asarray(row["layer_seconds"], dtype=np.float64), 0, -1)


def expected_seconds(rows: Rows, even: Mapping[str, Any], costs: Costs) -> dict[str, float]:
    """Seconds of a step of every method.

    Parameters
    ----------
    rows : sequence of mapping
        Each with ``loads`` and ``pages`` ``[layers][ranks]``.
    even : mapping
        The row of equal budgets, also with ``layer_seconds`` ``[ranks][repetitions][layers]`` and ``seconds`` of the
        same repetitions.
    costs : Costs

    Returns
    -------
    dict
        From method to the median over repetitions of the sum over layers of the slowest rank, each rank's work slowed
        down as its like was in that repetition of `even`, and what else that repetition took.
    """
    measured = _measured(even)
    jitter = measured / costs.seconds(even)
    rest = np.asarray(even["seconds"]) - measured.max(axis=2).sum(axis=1)
    return {
        row["method"]: float(np.median((costs.seconds(row) * jitter).max(axis=2).sum(axis=1) + rest)) for row in rows
    }
