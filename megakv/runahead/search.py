"""Search for the partition with the shortest time to first token (KV-Runahead, Section 4.2 and Figure 6).

A hierarchical grid search: the best of a coarse grid, then the cell around it at half the stride, and so on down to the
unit. As published it measures every point of every cell (``full_grid``), 5^(N-1) a level, which is more than a machine
can afford from 8K tokens on. By default a cell is pruned: its points are measured in the order of what the measurements
so far promise (`megakv.runahead.trend`), and the cell is left when nothing in it promises to be better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.curves import Positive
from megakv.runahead.grid import Bounds, Grid
from megakv.runahead.partition import Partition, even
from megakv.runahead.trend import Floats, Trend

MARGIN = 0.1
"""A point that promises to be slower than the best by more than this is not measured."""
GAIN = 0.002
"""What a new best must gain to count as progress."""
LEANINGS = ((0.25, 0.5, 0.75), (-0.5, -0.9))
"""Shares of attention to balance the ranks for, in the two directions away from even."""
DOWNHILL_STEPS = 8
RECENT, DISTRUST = 8, 20.0
"""Patience grows with the mean relative error of the last promises: by all of itself for an error of 5%."""


class Trial(BaseModel):
    """One measured partition.

    Parameters
    ----------
    partition : tuple of int
        Tokens of each rank.
    seconds : float
    stride : int
        Of the level that it was measured in; 0 for the partitions that a search begins with.
    round : int
        How often the partition had been measured before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: tuple[int, ...]
    seconds: Positive
    stride: int = Field(ge=0)
    round: int = Field(0, ge=0)


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Parameters
    ----------
    partition : tuple of int
        The best.
    seconds : float
        Its time: the median of the last rounds, if there were any.
    even_seconds : float
        The same of the even partition.
    evaluations : int
        Partitions measured, each counted once.
    trials : tuple of Trial
        In order.
    """

    partition: Partition
    seconds: float
    even_seconds: float
    evaluations: int
    trials: tuple[Trial, ...]


@dataclass
class PartitionSearch:
    """One search; `run` it once.

    Parameters
    ----------
    grid : Grid
    evaluate : callable
        Seconds of a partition. It is called once per partition and round, never for one that is `known`.
    seeds : sequence of Partition
        Where the best is expected: of a cost model, of neighbouring prompts. They are measured as they are, on the
        grid or not, also with empty parts.
    full_grid : bool
        Measure every point of every cell first, as published.
    patience : int
        Measurements of a level without progress after which it is left; four for each bound if None. It grows where
        measurements turn out otherwise than expected.
    finalists, rounds : int
        So many of the best, and even, are measured again so many times, in turn, before one is chosen. Without rounds
        times are taken as exact; with them the best is also measured again after every level, until it stays the best.
    known : iterable of Trial
        Of an earlier run of the same search that was stopped: it is followed without measuring.
    record : callable, optional
        Called after each measurement with its trial and about how many are still to come.
    """

    grid: Grid
    evaluate: Callable[[Partition], float]
    seeds: Sequence[Partition] = ()
    full_grid: bool = False
    patience: int | None = None
    finalists: int = 0
    rounds: int = 0
    known: Iterable[Trial] = ()
    record: Callable[[Trial, int], None] | None = None

    def __post_init__(self) -> None:
        self._known = {(trial.partition, trial.round): trial.seconds for trial in self.known}
        self._trials: list[Trial] = []
        self._times: dict[Partition, list[float]] = {}
        self._seconds: dict[Partition, float] = {}
        self._broken: list[float] = []
        self._trend = Trend(self.grid.tokens, self.grid.size)
        self._calm = 4 * (self.grid.size - 1) if self.patience is None else self.patience

    def run(self) -> SearchResult:
        """Search.

        Raises
        ------
        ValueError
            If a time is not positive and finite.
        """
        first = even(self.grid.tokens, self.grid.size)
        for partition in (first, *self.seeds):
            self._measure(partition, 0, left=self._ahead(0))
        if self.full_grid:
            self._every_cell()
        self._promising()
        if self.full_grid:
            self._all_round()
        again = self._repeat(first)
        best = min(again or self._seconds, key=lambda partition: (again or self._seconds)[partition])
        return SearchResult(
            partition=best,
            seconds=(again or self._seconds)[best],
            even_seconds=(again or self._seconds)[first],
            evaluations=len(self._seconds),
            trials=tuple(self._trials),
        )

    def _every_cell(self) -> None:
        strides = self.grid.strides
        self._measure_all(self.grid.coarse(), strides[0], strides[1:])
        for level, stride in enumerate(strides[1:], start=1):
            while True:
                center = self._best()
                self._measure_all(self.grid.around(center, stride), stride, strides[level + 1 :])
                # At the edge of its cell, the best may have better neighbours outside.
                if np.abs(self._best() - center).max() < self.grid.reach * stride:
                    break
            self._challenge()

    def _all_round(self) -> None:
        """Whole cells of the finest stride around the best, then around the next best outside of them.

        Messages make valleys of their own. No more is measured than whole cells of all levels would have taken.
        """
        stride = self.grid.unit
        most = len(self.grid.coarse()) + (len(self.grid.strides) + 2) * self.grid.points_around
        centers: list[Bounds] = []
        while True:
            ranked = sorted(self._seconds, key=lambda partition: self._seconds[partition])
            bounds = (self.grid.bounds(self.grid.nearest(partition)) for partition in ranked)
            best = self._best()
            center = (
                best
                if not any((best == other).all() for other in centers)
                else next(
                    (
                        row
                        for row in bounds
                        if all(np.abs(row - other).max() > self.grid.reach * stride for other in centers)
                    ),
                    None,
                )
            )
            if center is None:
                return
            cell = [row for row in self.grid.around(center, stride) if self.grid.partition(row) not in self._seconds]
            if len(self._seconds) + len(cell) > most:
                return
            centers.append(center)
            self._measure_all(np.array(cell), stride, ())

    def _measure_all(self, rows: Bounds, stride: int, below: Sequence[int]) -> None:
        for index, row in enumerate(rows):
            left = len(rows) - index - 1 + len(below) * self.grid.points_around + self._repeats
            self._measure(self.grid.partition(row), stride, left=left)

    def _promising(self) -> None:
        self._lean()
        strides = self.grid.strides
        for level, stride in enumerate(strides):
            self._cell([stride], MARGIN, self._ahead(level + 1))
            self._challenge()
        # Whatever a level overlooked: points near and far that promise to be better than the best.
        self._cell(strides, -GAIN, self._repeats)

    def _lean(self) -> None:
        """Balances for more and more attention, or for less and less, as long as they get better."""
        for shares in LEANINGS:
            for share in shares:
                before = min(self._seconds.values())
                self._measure(self.grid.balance(share), 0, left=self._ahead(0))
                if min(self._seconds.values()) >= before:
                    break

    def _cell(self, strides: Sequence[int], margin: float, ahead: int) -> None:
        """Measure what promises most around the best, until nothing promises enough or nothing is gained."""
        calm = 0
        while calm < self._patience() and (found := self._next(strides, margin)) is not None:
            before, (partition, stride, promised) = min(self._seconds.values()), found
            self._measure(partition, stride, left=max(0, self._calm - calm - 1) + ahead)
            self._broken.append(abs(promised / self._seconds[partition] - 1))
            calm = 0 if min(self._seconds.values()) < (1 - GAIN) * before else calm + 1

    def _patience(self) -> float:
        """More where promises have lately been broken: then the trend does not know this chain."""
        recent = self._broken[-RECENT:]
        return self._calm * (1 + DISTRUST * sum(recent) / max(1, len(recent)))

    def _next(self, strides: Sequence[int], margin: float) -> tuple[Partition, int, float] | None:
        """The most promising partition around the best that was not measured yet, if any promises enough."""
        measured = np.array([self.grid.bounds(partition) for partition in self._seconds])
        self._trend.fit(measured, list(self._seconds.values()))
        best, found = (1 + margin) * min(self._seconds.values()), None
        for stride in strides:
            rows, promised = self._downhill(stride)
            for index in promised.argsort(kind="stable"):
                if promised[index] >= best:
                    break
                partition = self.grid.partition(rows[index])
                if partition not in self._seconds:
                    best = float(promised[index])
                    found = partition, stride, best
                    break
        return found

    def _downhill(self, stride: int) -> tuple[Bounds, Floats]:
        """Points with what they promise: the cell around the best, and those around ever more promising points."""
        rows = self.grid.around(self._best(), stride)
        if stride == self.grid.strides[0]:
            rows = np.concatenate([rows, self.grid.coarse()])
        promised = self._trend.predict(rows, stride)
        for _ in range(DOWNHILL_STEPS):
            index = int(promised.argmin())
            cell = self.grid.around(rows[index], stride)
            values = self._trend.predict(cell, stride)
            rows, promised = np.concatenate([rows, cell]), np.concatenate([promised, values])
            if values.min() >= promised[index]:
                break
        return rows, promised

    def _challenge(self) -> None:
        """Measure the best again, until it stays the best: the fastest of many noisy times was lucky too."""
        for _ in range(self.rounds):
            best = min(self._seconds, key=lambda partition: self._seconds[partition])
            self._time(best, self.grid.unit, self._repeats)
            if self._seconds[best] <= min(self._seconds.values()):
                break

    def _repeat(self, first: Partition) -> dict[Partition, float]:
        """Medians of measuring the best again."""
        if not self._repeats:
            return {}
        ranked = sorted(self._seconds, key=lambda partition: self._seconds[partition])
        chosen = list(dict.fromkeys([*ranked[: self.finalists], first]))
        left = len(chosen) * self.rounds
        for _ in range(self.rounds):
            for partition in chosen:
                left -= 1
                self._time(partition, self.grid.unit, left)
        return {partition: statistics.median(self._times[partition][-self.rounds :]) for partition in chosen}

    def _measure(self, partition: Partition, stride: int, *, left: int) -> None:
        if partition not in self._seconds:
            self._time(partition, stride, left)

    def _time(self, partition: Partition, stride: int, left: int) -> None:
        times = self._times.setdefault(partition, [])
        number = len(times)
        seconds = self._known.get((partition, number))
        if seconds is None:
            seconds = float(self.evaluate(partition))
        if not 0 < seconds < math.inf:
            raise ValueError(f"partition {partition} took {seconds} seconds: a positive time was expected")
        trial = Trial(partition=partition, seconds=seconds, stride=stride, round=number)
        times.append(seconds)
        self._seconds[partition] = statistics.median(times)
        self._trials.append(trial)
        if self.record is not None:
            self.record(trial, left)

    def _best(self) -> Bounds:
        """``[N - 1]`` bounds of the best partition, on the grid."""
        best = min(self._seconds, key=lambda partition: self._seconds[partition])
        return self.grid.bounds(self.grid.nearest(best))

    @property
    def _repeats(self) -> int:
        return (self.finalists + 1) * self.rounds if self.finalists else 0

    def _ahead(self, level: int) -> int:
        """About how many measurements the levels from this one on take."""
        return (len(self.grid.strides) - level) * self._calm * 2 // 3 + self._repeats
