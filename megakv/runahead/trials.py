"""Measured partitions: each once or several times, made now or taken from the journal of a search that was stopped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.curves import Positive
from megakv.runahead.partition import Partition

USUAL_NOISE, USUAL_PAIRS = 0.01, 2
"""Deviation of a time that is assumed until there are so many pairs of times of one partition."""
MOST_NOISE = 0.1
"""Times further apart count as so far: something else ran on the machine."""


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


class Trials:
    """All measurements of one search.

    Parameters
    ----------
    evaluate : callable
        Seconds of a partition.
    known : iterable of Trial
        Of an earlier run of the same search: these are not measured again.
    record : callable, optional
        Called after each measurement with its trial and about how many are still to come.
    """

    def __init__(
        self,
        evaluate: Callable[[Partition], float],
        known: Iterable[Trial] = (),
        record: Callable[[Trial, int], None] | None = None,
    ):
        self.made: list[Trial] = []
        self.times: dict[Partition, list[float]] = {}
        self.seconds: dict[Partition, float] = {}
        """Median of the times of each partition."""
        self._evaluate = evaluate
        self._known = {(trial.partition, trial.round): trial.seconds for trial in known}
        self._record = record

    def add(self, partition: Partition, stride: int, left: int) -> None:
        """Measure a partition, once more if it was measured before.

        Parameters
        ----------
        partition : tuple of int
        stride, left : int
            For `record`.

        Raises
        ------
        ValueError
            If its time is not positive and finite.
        """
        times = self.times.setdefault(partition, [])
        number = len(times)
        seconds = self._known.get((partition, number))
        if seconds is None:
            seconds = float(self._evaluate(partition))
        if not 0 < seconds < math.inf:
            raise ValueError(f"partition {partition} took {seconds} seconds: a positive time was expected")
        trial = Trial(partition=partition, seconds=seconds, stride=stride, round=number)
        times.append(seconds)
        self.seconds[partition] = statistics.median(times)
        self.made.append(trial)
        if self._record is not None:
            self._record(trial, left)

    def noise(self) -> float:
        """Relative standard deviation of a time, by partitions that were measured several times."""
        apart = [
            min(abs(later / earlier - 1), MOST_NOISE) ** 2 / 2
            for times in self.times.values()
            for earlier, later in pairwise(times)
        ]
        return math.sqrt((USUAL_PAIRS * USUAL_NOISE**2 + sum(apart)) / (USUAL_PAIRS + len(apart)))
