"""Sliding windows: which cached tokens no query of a pass sees in a layer, so that they need not be brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megakv.distributed.sharding import TokenTable

Windows = list[int | None]
"""Of each layer, as its attention showed it; None where queries see all that comes before them."""


class OutOfWindow:
    """First tokens of each sequence on a rank that lie before every query's window, in a pass and the one after it.

    Queries of a pass come behind all that was cached before it, so the first slot behind that is the least they have.
    The table has the tokens of the pass, of which `new` counts those of each rank and sequence.
    """

    def __init__(self, windows: Windows, table: TokenTable, rank: int, new: Sequence[Sequence[int]]):
        self._windows, self._table, self._rank, self._new = windows, table, rank, new
        self._found: dict[tuple[int | None, bool], list[int]] = {}

    def in_layer(self, layer: int, *, beyond: bool = False) -> list[int]:
        """Per sequence, in one layer; with `beyond`, in the pass after this one."""
        return self._behind(self._windows[layer], beyond)

    def in_the_mean(self, *, beyond: bool = False) -> list[int]:
        """Per sequence, in the mean of all layers, rounded down."""
        counts = Counter(self._windows)
        if set(counts) <= {None}:
            return [0] * self._table.batch
        layers = sum(counts.values())
        return [
            sum(counts[window] * own for window, own in zip(counts, each, strict=True)) // layers
            for each in zip(*(self._behind(window, beyond) for window in counts), strict=True)
        ]

    def _behind(self, window: int | None, beyond: bool) -> list[int]:
        if (window, beyond) not in self._found:
            batch = range(self._table.batch)
            self._found[window, beyond] = [
                0 if window is None else self._before(window, sequence, beyond) for sequence in batch
            ]
        return self._found[window, beyond]

    def _before(self, window: int, sequence: int, beyond: bool) -> int:
        cached = [
            slots if beyond else slots[: len(slots) - new[sequence]]
            for rank, new in enumerate(self._new)
            for slots in (self._table.slots(rank, sequence),)
        ]
        first = max((int(slots[-1]) + 1 for slots in cached if len(slots)), default=0)
        return int(np.searchsorted(cached[self._rank], first - window, side="right"))
