"""What measured partitions are worth, and what others promise: by their own times, or by all times together."""

from __future__ import annotations

import numpy as np

from megakv.runahead.grid import Bounds, Grid
from megakv.runahead.partition import Partition
from megakv.runahead.prediction import Floats, Prediction
from megakv.runahead.trials import Trials

DEVIATIONS = 4.0
"""What others say of a partition counts up to so many deviations of its own median."""
INTERFERENCE = 0.3
"""A single time may be too long by this part: something else ran on the machine."""


class Ranking:
    """The measured partitions of a search, best first.

    Parameters
    ----------
    grid : Grid
    trials : Trials
    prediction : Prediction
    noisy : bool
        Whether a partition is worth what all measurements together say of it, instead of its own time.
    """

    def __init__(self, grid: Grid, trials: Trials, prediction: Prediction, *, noisy: bool):
        self._grid = grid
        self._trials = trials
        self._noisy = noisy
        self._prediction = prediction
        self._values: dict[Partition, float] = {}
        self._judged = (0, 0)

    def judge(self, stride: int) -> None:
        """Take in what was measured since; neighbours are those within some strides."""
        if self._judged == (known := (len(self._trials.made), stride)):
            return
        self._judged, seconds = known, self._trials.seconds
        measured = np.array([self._grid.bounds(partition) for partition in seconds])
        counts = [len(self._trials.times[partition]) for partition in seconds]
        self._prediction.fit(measured, list(seconds.values()), counts=counts, noise=self.noise)
        own = worth = np.array(list(seconds.values()))
        if self._noisy:
            most = DEVIATIONS * self.noise / np.sqrt(counts)
            least = np.where(np.array(counts) == 1, np.maximum(most, INTERFERENCE), most)
            worth = np.clip(self._prediction.smoothed(stride), own * (1 - np.minimum(least, 0.9)), own * (1 + most))
        self._values = dict(zip(seconds, worth.tolist(), strict=True))

    @property
    def noise(self) -> float:
        """Relative standard deviation of a time; 0 where times are exact."""
        return self._trials.noise() if self._noisy else 0.0

    @property
    def seconds(self) -> float:
        """What the best is worth."""
        return min(self._values.values())

    def best(self, among: list[Partition] | None = None) -> list[Partition]:
        """All measured partitions, or some of them, best first."""
        if len(self._values) < len(self._trials.seconds):
            self.judge(self._grid.unit)
        return sorted(self._values if among is None else among, key=lambda partition: self._values[partition])

    def center(self) -> Bounds:
        """``[N - 1]`` bounds of the best, on the grid."""
        return self._grid.bounds(self._grid.nearest(self.best()[0]))

    def promised(self, bounds: Bounds, stride: int) -> Floats:
        """``[m]`` seconds that partitions ``[m, N - 1]`` promise."""
        return self._prediction.predict(bounds, stride)
