"""Search for the partition with the shortest time to first token (KV-Runahead, Section 4.2 and Figure 6).

A hierarchical grid search: the best of a coarse grid, then the cell around it at half the stride, and so on down to the
unit. As published it measures every point of every cell (``full_grid``), 5^(N-1) a level, which is more than a machine
can afford from 8K tokens on. By default a cell is pruned: its points are measured in the order of what the measurements
so far promise (`megakv.runahead.prediction`), and the cell is left when nothing in it promises to be better.

Times of a machine are noisy, and the shortest of many was lucky too. So with ``rounds`` a partition is worth what all
measurements together say of it, its own and those near it, and the best are measured again in turn at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megakv.runahead.grid import Bounds, Grid
from megakv.runahead.partition import Partition, even
from megakv.runahead.prediction import Floats, Prediction
from megakv.runahead.ranking import Ranking
from megakv.runahead.trials import SearchResult, Trial, Trials

MARGIN = 0.1
"""A point that promises to be slower than the best by more than this is not measured."""
GAIN = 0.002
"""What a new best must gain to count as progress."""
LEANINGS = ((0.25, 0.5, 0.75), (-0.5, -0.9))
"""Shares of attention to balance the ranks for, in the two directions away from even."""
FINER_LEANINGS = (0.125, 0.0625)
"""How far from the best of them others are tried."""
DOWNHILL_STEPS = 8
RECENT, DISTRUST, MOST_DISTRUST = 8, 20.0, 2.0
"""Patience grows with the mean relative error of the last promises: by all of itself for an error of 5%, and by twice
itself at most."""
MOST_PER_BOUND = 32
"""Partitions that a pruned search measures at most for each bound: where there is nothing but noise it would go on."""
FEW_UNITS = 16
"""Where ranks have no more units than this, one more or less changes their times by more than predictions know."""
FINE_STRIDES, COARSE_PATIENCE = 2, 0.5
"""Before the last strides half the patience will do: what they overlook the finer ones find."""


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
    predict : callable, optional
        A cost model's seconds of a partition, which order and prune what is measured; by default an equation's.
    full_grid : bool
        Measure every point of every cell first, as published.
    patience : int
        Measurements of a level without progress after which it is left; four for each bound if None. It grows where
        measurements turn out otherwise than expected.
    finalists, rounds : int
        So many of the best, and even, are measured again, then fewer and fewer of them, in so many rounds before one is
        chosen. Without rounds times are taken as exact; with them the best is also measured again after every level.
    known : iterable of Trial
        Of an earlier run of the same search that was stopped: it is followed without measuring.
    record : callable, optional
        Called after each measurement with its trial and about how many are still to come.
    """

    grid: Grid
    evaluate: Callable[[Partition], float]
    seeds: Sequence[Partition] = ()
    predict: Callable[[Partition], float] | None = None
    full_grid: bool = False
    patience: int | None = None
    finalists: int = 0
    rounds: int = 0
    known: Iterable[Trial] = ()
    record: Callable[[Trial, int], None] | None = None

    def __post_init__(self) -> None:
        self._trials = Trials(self.evaluate, self.known, self.record)
        self._ranking = Ranking(self.grid, self._trials, Prediction(self.grid, self.predict), noisy=self.rounds > 0)
        self._broken: list[float] = []
        self._most = 0
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
        return self._chosen(first)

    # The published way

    def _every_cell(self) -> None:
        strides = self.grid.strides
        self._measure_all(self.grid.coarse(), strides[0], strides[1:])
        for level, stride in enumerate(strides[1:], start=1):
            while True:
                center = self._ranking.center()
                self._measure_all(self.grid.around(center, stride), stride, strides[level + 1 :])
                # At the edge of its cell, the best may have better neighbours outside.
                if np.abs(self._ranking.center() - center).max() < self.grid.reach * stride:
                    break
            self._challenge(self._ahead(level + 1))

    def _all_round(self) -> None:
        """Whole cells of the finest stride around the best, then around the next best outside of them.

        Messages make valleys of their own. No more is measured than whole cells of all levels would have taken.
        """
        stride = self.grid.unit
        most = len(self.grid.coarse()) + (len(self.grid.strides) + 2) * self.grid.points_around
        centers: list[Bounds] = []
        while (center := self._unvisited(centers)) is not None:
            measured = self._trials.seconds
            cell = [row for row in self.grid.around(center, stride) if self.grid.partition(row) not in measured]
            if len(measured) + len(cell) > most:
                return
            centers.append(center)
            self._measure_all(np.array(cell), stride, ())

    def _unvisited(self, centers: Sequence[Bounds]) -> Bounds | None:
        """The best, if it is no centre yet; else the best outside of the cells around the centres."""
        best = self._ranking.center()
        if not any((best == other).all() for other in centers):
            return best
        reach = self.grid.reach * self.grid.unit
        for partition in self._ranking.best():
            row = self.grid.bounds(self.grid.nearest(partition))
            if all(np.abs(row - other).max() > reach for other in centers):
                return row
        return None

    def _measure_all(self, rows: Bounds, stride: int, below: Sequence[int]) -> None:
        for index, row in enumerate(rows):
            left = len(rows) - index - 1 + len(below) * self.grid.points_around + self._repeats
            self._measure(self.grid.partition(row), stride, left=left)

    # Pruned

    def _promising(self) -> None:
        self._most = len(self._trials.seconds) + MOST_PER_BOUND * (self.grid.size - 1)
        self._lean()
        strides = self.grid.strides
        for level, stride in enumerate(strides):
            share = 1.0 if level >= len(strides) - FINE_STRIDES else COARSE_PATIENCE
            self._cell([stride], MARGIN, self._ahead(level + 1), share)
            self._challenge(self._ahead(level + 1))
        # Whatever a level overlooked: points near and far that promise to be better than the best.
        self._cell(strides, -GAIN, self._repeats)
        if self.grid.tokens <= FEW_UNITS * self.grid.size * self.grid.unit:
            self._polish()

    def _polish(self) -> None:
        """Move each bound of the best by a unit, until none makes it better."""
        while True:
            rows = map(self.grid.partition, self.grid.beside(self._ranking.center()))
            unknown = [partition for partition in rows if partition not in self._trials.seconds]
            if not unknown or len(self._trials.seconds) >= self._most:
                return
            for index, partition in enumerate(unknown, start=1):
                self._measure(partition, self.grid.unit, left=len(unknown) - index + self._repeats)

    def _lean(self) -> None:
        """Balances for more and more attention, or for less and less, as long as they get better; then between them."""
        found = {0.0: self._trials.seconds[even(self.grid.tokens, self.grid.size)]}
        for shares in LEANINGS:
            before = found[0.0]
            for share in shares:
                found[share] = self._leaning(share)
                if found[share] >= before:
                    break
                before = found[share]
            if before < found[0.0]:
                break
        for step in FINER_LEANINGS:
            best = min(found, key=lambda share: found[share])
            for share in (max(-1.0, best - step), best + step):
                found[share] = self._leaning(share)

    def _leaning(self, share: float) -> float:
        partition = self.grid.balance(share)
        self._measure(partition, 0, left=self._ahead(0))
        return self._trials.seconds[partition]

    def _cell(self, strides: Sequence[int], margin: float, ahead: int, share: float = 1.0) -> None:
        """Measure what promises most around the best, until nothing promises enough or nothing is gained."""
        calm = 0
        while calm < share * self._patience() and len(self._trials.seconds) < self._most:
            if (found := self._next(strides, margin)) is None:
                return
            before, (partition, stride, promised) = self._ranking.seconds, found
            self._measure(partition, stride, left=max(0, self._calm - calm - 1) + ahead)
            self._broken.append(abs(promised / self._trials.seconds[partition] - 1))
            self._ranking.judge(strides[-1])
            calm = 0 if self._ranking.seconds < (1 - GAIN) * before else calm + 1

    def _patience(self) -> float:
        """More where promises have lately been broken by more than noise: then they do not know this chain."""
        recent = self._broken[-RECENT:]
        off = sum(recent) / max(1, len(recent)) - self._ranking.noise
        return self._calm * (1 + min(MOST_DISTRUST, DISTRUST * max(0.0, off)))

    def _next(self, strides: Sequence[int], margin: float) -> tuple[Partition, int, float] | None:
        """The most promising partition around the best that was not measured yet, if any promises enough."""
        self._ranking.judge(strides[-1])
        best, found = (1 + margin) * self._ranking.seconds, None
        for stride in strides:
            rows, promised = self._downhill(stride)
            for index in promised.argsort(kind="stable"):
                if promised[index] >= best:
                    break
                partition = self.grid.partition(rows[index])
                if partition not in self._trials.seconds:
                    best = float(promised[index])
                    found = partition, stride, best
                    break
        return found

    def _downhill(self, stride: int) -> tuple[Bounds, Floats]:
        """Points with what they promise: the cell around the best, and those around ever more promising points."""
        rows = self.grid.around(self._ranking.center(), stride)
        if stride == self.grid.strides[0]:
            rows = np.concatenate([rows, self.grid.coarse()])
        promised = self._ranking.promised(rows, stride)
        for _ in range(DOWNHILL_STEPS):
            index = int(promised.argmin())
            cell = self.grid.around(rows[index], stride)
            values = self._ranking.promised(cell, stride)
            rows, promised = np.concatenate([rows, cell]), np.concatenate([promised, values])
            if values.min() >= promised[index]:
                break
        return rows, promised

    # What noise may have done

    def _challenge(self, ahead: int) -> None:
        """Measure the best again, unless it was: one lucky time must not lead the search astray."""
        if self.rounds:
            best = self._ranking.best()[0]
            if len(self._trials.times[best]) == 1:
                self._trials.add(best, self.grid.unit, ahead)
                self._ranking.judge(self.grid.unit)

    def _chosen(self, first: Partition) -> SearchResult:
        """The best, of those measured again if there are rounds."""
        trials, contenders = self._trials, self._ranking.best()
        numbers = list(self._contenders())
        for index, number in enumerate(numbers):
            contenders, later = contenders[:number], sum(more + 1 for more in numbers[index + 1 :])
            turns = list(dict.fromkeys([*contenders, first]))
            for place, partition in enumerate(turns, start=1):
                trials.add(partition, self.grid.unit, len(turns) - place + later)
            self._ranking.judge(self.grid.unit)
            contenders = self._ranking.best(contenders)
        best = contenders[0]
        last = {partition: sorted(trials.times[partition][-self.rounds :]) for partition in (best, first)}
        # Both were measured in turn: what was slower than even then, time by time, is not worth it.
        if all(slow > fast for slow, fast in zip(last[best], last[first], strict=False)):
            best = first
        shown = {partition: statistics.median(times) for partition, times in last.items()}
        return SearchResult(best, shown[best], shown[first], len(trials.seconds), tuple(trials.made))

    def _contenders(self) -> Iterator[int]:
        """How many are measured again in each round: half as many as in the one before, two at least."""
        if self.finalists:
            yield from (max(min(2, self.finalists), self.finalists >> number) for number in range(self.rounds))

    def _measure(self, partition: Partition, stride: int, *, left: int) -> None:
        if partition not in self._trials.seconds:
            self._trials.add(partition, stride, left)

    @property
    def _repeats(self) -> int:
        return sum(number + 1 for number in self._contenders())

    def _ahead(self, level: int) -> int:
        """About how many measurements the levels from this one on take."""
        return (len(self.grid.strides) - level) * self._calm * 2 // 3 + self._repeats
