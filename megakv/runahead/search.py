"""Search for the partition with the shortest time to first token (KV-Runahead, Section 4.2 and Figure 6).

A hierarchical grid search: the best of a coarse grid, then the cell around it at half the stride, and so on down to the
unit. As published it measures every point of every cell (``full_grid``), 5^(N-1) a level, which is more than a machine
can afford from 8K tokens on. By default a cell is pruned: its points are measured in the order of what the measurements
so far promise (`megakv.runahead.prediction`), and the cell is left when nothing in it promises to be better.

Times of a machine are noisy, and the shortest of many was lucky too. So with ``rounds`` a partition is worth what all
measurements together say of it, its own and those near it, and the best are measured again in turn at the end.
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
from megakv.runahead.grid import Bounds, Grid
from megakv.runahead.prediction import Prediction

MARGIN, COARSE_MARGIN = 0.1, 0.2
"""A point that promises to be slower than the best by more than this is not measured. At the coarsest stride it has to
promise less: there it rests on few measurements."""
GAIN = 0.002
"""What a new best must gain to count as progress."""
LEANINGS = (0.0, 0.25, 0.5, 0.75, 1.0, -0.5, -0.9)
"""Shares of attention that ranks are balanced for in the first partitions."""
FINEST = 3
"""Coarse points whose finest cells a full grid has, too."""
MOST_PER_BOUND = 32
"""Partitions that a pruned search measures at most for each bound: where there is nothing but noise it would go on."""


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
    # A cost model's seconds of a partition, which order and prune what is measured; by default an equation's.
    predict: Callable[[Partition], float] | None = None
    full_grid: bool = False  # Measure every point of every cell first, as published.
    # Measurements of a level without progress after which it is left; four for each bound if None.
    patience: int | None = None
    # So many of the best, and even, are measured again, then half as many, in so many rounds before one is chosen.
    # Without rounds times are taken as exact; with them the best is also measured again after every level.
    finalists: int = 0
    rounds: int = 0
    # Called after each measurement with its trial and about how many are still to come.
    record: Callable[[Trial, int], None] | None = None

    def __post_init__(self) -> None:
        self._trials: list[Trial] = []
        self._times: dict[Partition, list[float]] = {}
        self._worth: dict[Partition, float] = {}
        self._judged = (0, 0)
        self._prediction = Prediction(self.grid, self.predict)
        self._patience = 4 * (self.grid.size - 1) if self.patience is None else self.patience
        # Half as many in each round as in the one before, two at least.
        numbers = (max(min(2, self.finalists), self.finalists >> index) for index in range(self.rounds))
        self._contenders = list(numbers) if self.finalists else []

    def run(self) -> SearchResult:
        """Search."""
        first, strides = even(self.grid.tokens, self.grid.size), self.grid.strides
        begin = list(dict.fromkeys([first, *self.seeds, *map(self.grid.balance, LEANINGS)]))
        self._measure(begin, 0, self._ahead(len(strides)))
        if self.full_grid:
            self._every_cell()
        most = len(self._times) + MOST_PER_BOUND * (self.grid.size - 1)
        for level, stride in enumerate(strides, start=1):
            self._cell(stride, most, self._ahead(len(strides) - level))
        return self._chosen(first)

    def _every_cell(self) -> None:
        """The published way, and the finest cells of the best coarse points: halved strides pass by a narrow valley."""
        strides, coarse = self.grid.strides, self.grid.coarse()
        cells = (len(strides) - 1 + FINEST) * self.grid.points_around
        self._measure(map(self.grid.partition, coarse), strides[0], cells)
        self._judge(strides[0])
        best = sorted(coarse, key=lambda row: self._worth[self.grid.partition(row)])
        center = best[0]
        for stride in strides[1:]:
            cells -= self.grid.points_around
            center = self._descend(center, stride, cells)
        for row in best[:FINEST]:
            cells -= self.grid.points_around
            self._measure(map(self.grid.partition, self.grid.around(row, self.grid.unit)), self.grid.unit, cells)

    def _descend(self, center: Bounds, stride: int, ahead: int) -> Bounds:
        """The best point around one; at the edge of its cell, the best may have better neighbours outside."""
        while True:
            rows = self.grid.around(center, stride)
            self._measure(map(self.grid.partition, rows), stride, ahead)
            self._judge(stride)
            best: Bounds = min(rows, key=lambda row: self._worth[self.grid.partition(row)])
            if np.abs(best - center).max() < self.grid.reach * stride:
                return best
            center = best

    def _cell(self, stride: int, most: int, ahead: int) -> None:
        """Measure what promises most around the best, until nothing promises enough or nothing is gained."""
        calm = 0
        while calm < self._patience and len(self._times) < most:
            center, best = self._center(stride), self._best
            if (partition := self._promising(center, stride)) is None:
                break
            self._measure([partition], stride, self._patience - calm - 1 + ahead)
            self._judge(stride)
            calm = 0 if self._best < (1 - GAIN) * best else calm + 1
        if self.rounds:
            # One lucky time must not lead the search astray.
            first = self._ranked()[0]
            if len(self._times[first]) == 1:
                self._add(first, self.grid.unit, ahead)

    def _promising(self, center: Bounds, stride: int) -> Partition | None:
        """The most promising partition around the best that was not measured yet, if any promises enough."""
        rows = self.grid.around(center, stride)
        margin = MARGIN
        if stride == self.grid.strides[0]:
            rows, margin = np.concatenate([rows, self.grid.coarse()]), COARSE_MARGIN
        promised = self._prediction.seconds(rows)
        for index in promised.argsort(kind="stable"):
            if promised[index] >= (1 + margin) * self._best:
                break
            if (partition := self.grid.partition(rows[index])) not in self._times:
                return partition
        return None

    def _chosen(self, first: Partition) -> SearchResult:
        """The best, of those measured again if there are rounds."""
        unit = self.grid.unit
        self._judge(unit)
        contenders = self._ranked()
        for index, number in enumerate(self._contenders):
            contenders = contenders[:number]
            turns = list(dict.fromkeys([*contenders, first]))
            later = sum(more + 1 for more in self._contenders[index + 1 :])
            for place, partition in enumerate(turns, start=1):
                self._add(partition, unit, len(turns) - place + later)
            self._judge(unit)
            contenders.sort(key=self._worth.__getitem__)
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
        new = [partition for partition in partitions if partition not in self._times]
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

    def _judge(self, stride: int) -> None:
        """Take in what was measured since; neighbours are those within some strides."""
        if self._judged == (len(self._trials), stride):
            return
        self._judged = (len(self._trials), stride)
        bounds = np.array([self.grid.bounds(trial.partition) for trial in self._trials])
        seconds = [trial.seconds for trial in self._trials]
        self._prediction.fit(bounds, seconds, stride, noisy=self.rounds > 0)
        worth = self._prediction.seconds(bounds).tolist() if self.rounds else seconds
        self._worth = {trial.partition: value for trial, value in zip(self._trials, worth, strict=True)}

    def _ranked(self) -> list[Partition]:
        return sorted(self._worth, key=self._worth.__getitem__)

    @property
    def _best(self) -> float:
        return min(self._worth.values())

    def _center(self, stride: int) -> Bounds:
        """``[N - 1]`` bounds of the best, on the grid."""
        self._judge(stride)
        return self.grid.bounds(self.grid.nearest(self._ranked()[0]))

    def _ahead(self, levels: int) -> int:
        """About how many measurements so many levels take, and the rounds after them."""
        return levels * self._patience * 2 // 3 + sum(number + 1 for number in self._contenders)
