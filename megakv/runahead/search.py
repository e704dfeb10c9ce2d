"""Search for the partition with the shortest time to first token (KV-Runahead, Section 4.2 and Figure 6).

As published it is a hierarchical grid search: the best of a coarse grid, then every point of the cell around it at half
the stride, and so on down to the unit (``full_grid``): 5^(N-1) points a level, more than a machine can afford from 8K
tokens on. By default tokens are moved between ranks while that is faster, at the same halving strides.

Times of a machine are noisy: whatever else runs only adds to them. So with ``rounds`` a partition is worth the shortest
of its times, the best is measured again after every level, and the best few in turn at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megakv.base.partition import Partition, even
from megakv.costmodel.curves import Positive
from megakv.runahead.descent import descend, pairs, spreads, triples
from megakv.runahead.grid import Bounds, Grid

LEANINGS = (0.0, 0.25, 0.5, 0.75, 1.0, -0.5, -0.9)
"""Shares of attention that ranks are balanced for in the first partitions."""
NEARER = (1 / 8, 1 / 16)
"""How far beside the best of those shares others are tried."""
FINEST = 3
"""Coarse points whose finest cells a full grid has, too."""
MOST_PER_BOUND = 27
"""Partitions that are measured at most for each bound: where there is nothing but noise a search would go on."""


class Trial(BaseModel):
    """One measured partition: of the level of a stride (0 to begin with), the how manieth time of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: tuple[int, ...]
    seconds: Positive
    stride: int = Field(ge=0)
    round: int = Field(0, ge=0)


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    partition: Partition  # The best.
    # Its time and that of the even partition: the medians of the last rounds, if there were any.
    seconds: float
    even_seconds: float
    evaluations: int  # Partitions measured, each counted once.
    trials: tuple[Trial, ...]  # In order.


@dataclass
class PartitionSearch:
    """One search; `run` it once."""

    grid: Grid
    # Seconds of a partition. It is called once per partition and round.
    evaluate: Callable[[Partition], float]
    # Where the best is expected: of a cost model, of neighbouring prompts. They are measured as they are, on the grid
    # or not, also with empty parts.
    seeds: Sequence[Partition] = ()
    full_grid: bool = False  # Measure every point of every cell first, as published.
    # So many of the best, and even, are measured again, then half as many, in so many rounds before one is chosen.
    # Without rounds times are taken as exact; with them the best is also measured again after every level.
    finalists: int = 0
    rounds: int = 0
    # Called after each measurement with its trial and about how many are still to come.
    record: Callable[[Trial, int], None] | None = None

    def __post_init__(self) -> None:
        self._trials: list[Trial] = []
        self._times: dict[Partition, list[float]] = {}
        self._pairs = len(pairs(self.grid.size, 1))
        # Half as many in each round as in the one before, two at least.
        numbers = (max(min(2, self.finalists), self.finalists >> index) for index in range(self.rounds))
        self._contenders = list(numbers) if self.finalists else []

    def run(self) -> SearchResult:
        """Search."""
        grid, first = self.grid, even(self.grid.tokens, self.grid.size)
        leaning = {share: grid.balance(share) for share in LEANINGS}
        levels = len(grid.strides)
        self._measure([first, *self.seeds, *leaning.values()], 0, self._ahead(levels) + 2 * len(NEARER))
        for number, apart in enumerate(NEARER, start=1):
            best = min(leaning, key=lambda share: self._worth(leaning[share]))
            sides = {share: grid.balance(share) for share in (best - apart, min(1.0, best + apart))}
            self._measure(sides.values(), 0, self._ahead(levels) + 2 * (len(NEARER) - number))
            leaning |= sides
        if self.full_grid:
            self._every_cell()
        most = max(len(self._times), MOST_PER_BOUND * (grid.size - 1)) + self.full_grid * MOST_PER_BOUND
        for level, stride in enumerate(grid.strides, start=1):
            self._descend(stride, most, self._ahead(levels - level))
        return self._chosen(first)

    def _every_cell(self) -> None:
        """The published way, and the finest cells of the best coarse points: halved strides pass by a narrow valley."""
        strides, coarse = self.grid.strides, self.grid.coarse()
        cells = (len(strides) - 1 + FINEST) * self.grid.points_around
        self._measure(map(self.grid.partition, coarse), strides[0], cells)
        best = sorted(coarse, key=self._bounds_worth)
        center = best[0]
        for stride in strides[1:]:
            cells -= self.grid.points_around
            center = self._best_around(center, stride, cells)
        for row in best[:FINEST]:
            cells -= self.grid.points_around
            self._measure(map(self.grid.partition, self.grid.around(row, self.grid.unit)), self.grid.unit, cells)

    def _best_around(self, center: Bounds, stride: int, ahead: int) -> Bounds:
        """The best point around one; at the edge of its cell, the best may have better neighbours outside."""
        while True:
            rows = self.grid.around(center, stride)
            self._measure(map(self.grid.partition, rows), stride, ahead)
            best: Bounds = min(rows, key=self._bounds_worth)
            if np.abs(best - center).max() < self.grid.reach * stride:
                return best
            center = best

    def _descend(self, stride: int, most: int, ahead: int) -> None:
        """Move tokens of the best, a stride at a time, until no move gains or enough was measured."""
        grid, left = self.grid, 0

        def seconds(partition: Partition) -> float:
            self._measure([partition], stride, max(0, min(left, self._pairs) - 1) + ahead)
            return self._worth(partition)

        def ends(untried: int) -> bool:
            nonlocal left
            left = untried
            return left == 0 or len(self._times) >= most

        moves = pairs(grid.size, stride)
        if stride == grid.unit:
            moves += spreads(grid.size, stride)
            # Dearer ones only where all of these fail.
            descend(self._best, seconds, moves, least=1, ends=ends)
            moves += triples(grid.size, stride)
        descend(self._best, seconds, moves, least=1, ends=ends)
        while self.rounds and len(self._times[self._best]) == 1:
            # One lucky time must not lead the search astray.
            self._add(self._best, grid.unit, ahead)

    def _chosen(self, first: Partition) -> SearchResult:
        """The best, of those measured again if there are rounds."""
        contenders = sorted(self._times, key=self._worth)
        for index, number in enumerate(self._contenders):
            contenders = contenders[:number]
            turns = list(dict.fromkeys([*contenders, first]))
            later = sum(more + 1 for more in self._contenders[index + 1 :])
            for place, partition in enumerate(turns, start=1):
                self._add(partition, self.grid.unit, len(turns) - place + later)
            contenders.sort(key=self._worth)
        best = contenders[0]
        last = {partition: sorted(self._times[partition][-self.rounds :]) for partition in (best, first)}
        # Both were measured in turn: what was slower than even then, time by time, is not worth it.
        if all(slow > fast for slow, fast in zip(last[best], last[first], strict=False)):
            best = first
        shown = {partition: statistics.median(times) for partition, times in last.items()}
        return SearchResult(best, shown[best], shown[first], len(self._times), tuple(self._trials))

    # What was measured, and what it is worth

    def _measure(self, partitions: Iterable[Partition], stride: int, ahead: int) -> None:
        """Those that are new; `ahead` more come after them."""
        new = [partition for partition in dict.fromkeys(partitions) if partition not in self._times]
        for left, partition in zip(reversed(range(len(new))), new, strict=True):
            self._add(partition, stride, left + ahead)

    def _add(self, partition: Partition, stride: int, left: int) -> None:
        """Measure a partition, once more if it was measured before."""
        times = self._times.setdefault(partition, [])
        seconds = float(self.evaluate(partition))
        if not 0 < seconds < math.inf:
            raise ValueError(f"partition {partition} took {seconds} seconds: a positive time was expected")
        trial = Trial(partition=partition, seconds=seconds, stride=stride, round=len(times))
        times.append(seconds)
        self._trials.append(trial)
        if self.record is not None:
            self.record(trial, left)

    def _worth(self, partition: Partition) -> float:
        return min(self._times[partition])

    def _bounds_worth(self, bounds: Bounds) -> float:
        return self._worth(self.grid.partition(bounds))

    @property
    def _best(self) -> Partition:
        return min(self._times, key=self._worth)

    def _ahead(self, levels: int) -> int:
        """About how many measurements so many levels take, and the rounds after them."""
        return levels * self._pairs + sum(number + 1 for number in self._contenders)
