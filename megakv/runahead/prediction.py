"""What partitions promise: predicted times, corrected by what was measured near by. It orders and prunes the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megakv.runahead.grid import Bounds, Grid
from megakv.runahead.partition import Partition

Floats = NDArray[np.float64]

ATTENTION = (*np.linspace(0.0, 0.9, 13).tolist(), 0.95, 1.0)
RECEIVING = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
HOPS = (0.0, 0.02, 0.1, 0.25, 0.5)
"""Shares of attention in the compute, and times of receiving and of the hops beside all compute, of the chains that the
equation may be of."""
MOST_FITTED = 100
"""Fastest measurements that choose the constants."""
SHARPNESS = 12
NEAR_STRIDES = 1.5
TRUST, MOST_TRUST = 0.3, 4.0
"""Weight of the prediction against one measured neighbour whose time is exact, and against one whose time is noise
beside what predictions leave unexplained."""
FAST = 1.1
"""What predictions leave unexplained is judged by partitions that take up to so many times the shortest time."""
OUTLIER, LEAST_WEIGHT = 4.0, 0.2
"""Beyond so many deviations a single time counts half as much, for something else may have run on the machine; but
never less than this: it may as well be the prediction that is wrong."""


class Prediction:
    """Times to first token: one ratio of measured to predicted, and what measured neighbours deviate from it by.

    Without a cost model the equation is ``a tokens_r + b pairs_r + c prefix_r + d hops_r`` of the slowest rank r:
    tokens through the weights, query-key pairs, received tokens, all tokens on the hops before. Ranks that are long at
    once wait for each other, so that their norm is taken rather than their maximum. Its constants are the ones, of a
    few hundred, with which the measured times differ least from one ratio.

    Parameters
    ----------
    grid : Grid
    predict : callable, optional
        A cost model's seconds of a partition.
    """

    def __init__(self, grid: Grid, predict: Callable[[Partition], float] | None = None):
        self._grid = grid
        self._predict = predict
        self._known: dict[Partition, float] = {}
        attention, received, hops = (c.reshape(-1) for c in np.meshgrid(ATTENTION, RECEIVING, HOPS, indexing="ij"))
        self._candidates = np.stack([1 - attention, attention, received, hops])
        self._constants = self._candidates[:, :1]

    def fit(self, bounds: Bounds, seconds: Sequence[float], *, counts: Sequence[int] = (), noise: float = 0.0) -> None:
        """Take in all measurements, those of fast partitions above all.

        Parameters
        ----------
        bounds : array
            ``[n, N - 1]``.
        seconds : sequence of float
            ``[n]``, positive.
        counts : sequence of int
            ``[n]`` how many times each was measured; once if it is empty.
        noise : float
            Relative standard deviation of one time; 0 where times are exact.
        """
        times = np.asarray(seconds)
        often = np.asarray(counts, dtype=np.float64) if len(counts) else np.ones(len(times))
        relative = times / times.min()
        weights = often / relative**4
        weights /= weights.sum()
        if self._predict is None:
            fast = np.argsort(relative, kind="stable")[:MOST_FITTED]
            part = weights[fast]
            logs = np.log(relative[fast, None] / self._equation(bounds[fast], self._candidates))
            apart = part @ (logs - part @ logs / part.sum()) ** 2
            self._constants = self._candidates[:, [int(apart.argmin())]]
        ratios = times / self._seconds(bounds)
        self._ratio = float(np.exp(weights @ np.log(ratios)))
        self._bounds, self._off = bounds, ratios / self._ratio - 1
        self._trust, self._weights = TRUST, often
        if noise:
            unexplained = float(np.mean(self._off[relative <= FAST] ** 2)) - noise**2
            self._trust = min(MOST_TRUST, TRUST + noise**2 / max(unexplained, (noise / MOST_TRUST) ** 2))
            late = np.maximum(self._off, 0.0) / (OUTLIER * noise)
            self._weights = np.where(often == 1, np.maximum(LEAST_WEIGHT, 1 / (1 + late**2)), often)

    def predict(self, bounds: Bounds, stride: int) -> Floats:
        """``[m]`` seconds of the partitions ``[m, N - 1]``; measured neighbours within some strides count."""
        distance = np.zeros((len(bounds), len(self._bounds)))
        for ours, theirs in zip(bounds.T, self._bounds.T, strict=True):
            np.maximum(distance, np.abs(ours[:, None] - theirs) / (NEAR_STRIDES * stride), out=distance)
        nearness = np.exp(-(distance**2)) * self._weights
        found: Floats = self._seconds(bounds) * (1 + nearness @ self._off / (self._trust + nearness.sum(axis=1)))
        return found * self._ratio

    def smoothed(self, stride: int) -> Floats:
        """``[n]`` seconds of the measured partitions themselves, by all measurements together."""
        return self.predict(self._bounds, stride)

    def _seconds(self, bounds: Bounds) -> Floats:
        """``[m]`` as predicted, by the cost model or by the equation."""
        if self._predict is None:
            return self._equation(bounds, self._constants)[:, 0]
        partitions = [self._grid.partition(row) for row in bounds]
        for partition in partitions:
            if partition not in self._known:
                self._known[partition] = self._predict(partition)
        return np.array([self._known[partition] for partition in partitions])

    def _equation(self, bounds: Bounds, constants: Floats) -> Floats:
        """``[m, candidates]`` a smooth maximum over ranks."""
        size = self._grid.size
        edges = np.zeros((len(bounds), size + 1))
        edges[:, 1:-1] = bounds / self._grid.tokens
        edges[:, -1] = 1.0
        prefix = edges[:, :-1]
        lines = [np.diff(edges), np.diff(edges**2), prefix, np.cumsum(prefix, axis=1) / size]
        times = np.stack(lines, axis=-1) @ constants
        longest = np.maximum(times.max(axis=1, keepdims=True), 1e-6)
        found: Floats = longest[:, 0] * ((times / longest) ** SHARPNESS).sum(axis=1) ** (1 / SHARPNESS)
        return found
