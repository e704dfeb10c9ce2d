"""Which cached tokens the queries of a pass see, and where their rows lie.

In layers with a sliding window, cached tokens that no query of a pass sees need not be brought. Most are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from megakv.distributed.sharding import TokenTable
from megakv.offload.equations import Placement
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


class Reach(NamedTuple):
    """Of each sequence's cached tokens, those in reach of windows; of them those that stay, and those with activations.

    `firsts` are the tokens that lie before all windows.
    """

    firsts: tuple[int, ...]
    lengths: tuple[int, ...]
    resident: tuple[int, ...]
    inputs: tuple[int, ...]

    @classmethod
    def of(cls, store: TieredStore, lengths: Sequence[int], firsts: Sequence[int]) -> Reach:
        """Of so many tokens in reach."""
        # Some layers have this step's tokens already: those that count are the same in all.
        both = store.residents.counts(), seen(store.with_inputs(), firsts)
        return cls(tuple(firsts), tuple(lengths), *(tuple(map(min, lengths, each)) for each in both))

    def placements(self, store: TieredStore) -> list[Placement]:
        """Where the rows of each sequence lie."""
        memory, held = (seen(store.in_memory(inputs=inputs), self.firsts) for inputs in (False, True))
        return [
            Placement(length - kept, given, min(length, rows), min(given, own))
            for length, kept, given, rows, own in zip(*self[1:], memory, held, strict=True)
        ]


def seen(counts: Sequence[int], firsts: Sequence[int]) -> tuple[int, ...]:
    """So many tokens, less those that lie before all windows."""
    return tuple(max(0, count - first) for count, first in zip(counts, firsts, strict=True))
