"""Which cached tokens the queries of a pass see, and where their rows lie.

In layers with a sliding window, cached tokens that no query of a pass sees need not be brought. Most are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from megakv.distributed.sharding import TokenTable
from megakv.offload.prices import Placement
from megakv.offload.store import TieredStore

Windows = list[int | None]
"""Of each layer, as its attention showed it; None where queries see all that comes before them."""


class OutOfWindow:
    """First tokens of each sequence on a rank that lie before every query's window, in a pass and the one after it.

    Queries of a pass come behind all that was cached before it, so the first slot behind that is the least they have,
    in whichever sequence.
    The table has the tokens of the pass, of which `new` counts those of each rank and sequence.
    """

    def __init__(self, windows: Windows, table: TokenTable, rank: int, new: Sequence[Sequence[int]]):
        self._windows, self._table, self._rank, self._new = windows, table, rank, new
        self._behind = cache(self._count)

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

    def _count(self, window: int | None, beyond: bool) -> list[int]:
        if window is None:
            return [0] * self._table.batch
        cached = [
            [self._table.slots(rank, sequence)[: None if beyond else -count or None] for sequence, count in counts]
            for rank, counts in enumerate(map(enumerate, self._new))
        ]
        first = max((int(slots[-1]) + 1 for own in cached for slots in own if len(slots)), default=0)
        return [int(np.searchsorted(slots, first - window, side="right")) for slots in cached[self._rank]]


def placed_rows(store: TieredStore, lengths: Sequence[int], firsts: Sequence[int]) -> list[Placement]:
    """Where the rows of each sequence's tokens in reach lie: so many, behind the first ones.

    Some layers have this step's tokens already: those that count are the same in all.
    """
    counts = store.with_inputs(), store.in_memory(), store.in_memory(inputs=True)
    inputs, rows, held = (map(min, lengths, seen(each, firsts)) for each in counts)
    away = [length - min(length, kept) for length, kept in zip(lengths, store.residents.counts(), strict=True)]
    return [
        Placement(count, given, min(count, there), min(given, own))
        for count, given, there, own in zip(away, inputs, rows, held, strict=True)
    ]


def seen(counts: Sequence[int], firsts: Sequence[int]) -> tuple[int, ...]:
    """So many tokens, less those that lie before all windows."""
    return tuple(max(0, count - first) for count, first in zip(counts, firsts, strict=True))
