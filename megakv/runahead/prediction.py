"""What partitions promise: predicted times, corrected by what was measured near by. It orders and prunes the search.

The logarithm of measured over predicted is taken for a smooth function of the bounds (a Gaussian process, kriging):
known where partitions were measured, up to their noise, and fading to its mean some strides away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakv.base.partition import Partition
from megakv.runahead.grid import Bounds, Grid

Floats = NDArray[np.floating[Any]]

ATTENTION = (*np.linspace(0.0, 0.9, 13).tolist(), 0.95, 1.0)
RECEIVING = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
HOPS = (0.0, 0.02, 0.1, 0.25, 0.5)
"""Shares of attention in the compute, and times of receiving and of the hops beside all compute, of the chains that the
equation may be of."""
SHARPNESS = 12
REACH = 3.0
"""Strides over which a deviation holds."""
MOST_FITTED = 100
"""Fastest measurements that are taken in."""
EXACT = 1e-4
NOISES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Variances of a time beside what predictions leave unexplained: of exact times, and those to choose from."""
OUTLIER = 1.0
"""Deviations from which on a time that is too long counts less: something else may have run on the machine."""


class Prediction:
    """Times to first token, fitted to measurements.

    Without a cost model the equation is ``a tokens_r + b pairs_r + c prefix_r + d hops_r`` of the slowest rank r:
    tokens through the weights, query-key pairs, received tokens, all tokens on the hops before. Ranks that are long at
    once wait for each other, so that their norm is taken rather than their maximum. Its constants are the ones, of a
    few hundred, with which the measured times differ least from one ratio.
    """

    def __init__(self, grid: Grid, predict: Callable[[Partition], float] | None = None):
        self._grid = grid
        self._predict = predict
        self._known: dict[Partition, float] = {}
        attention, received, hops = (c.reshape(-1) for c in np.meshgrid(ATTENTION, RECEIVING, HOPS, indexing="ij"))
        self._candidates = np.stack([1 - attention, attention, received, hops])

    def fit(self, bounds: Bounds, seconds: Sequence[float], stride: int, *, noisy: bool = False) -> None:
        """Take in all measurements of bounds ``[n, N - 1]``, the fast ones above all.

        stride: tokens by which bounds are moved now.
        noisy: whether a time says as much of its neighbours as of its own partition.
        """
        times = np.asarray(seconds)
        fast = np.argsort(times, kind="stable")[:MOST_FITTED]
        bounds, times = bounds[fast], times[fast]
        relative = times / times[0]
        weights = relative**-4 / np.sum(relative**-4)
        if self._predict is None:
            logs = np.log(times[:, None] / self._equation(bounds, self._candidates))
            apart = weights @ (logs - weights @ logs) ** 2
            self._constants = self._candidates[:, [int(apart.argmin())]]
        off = np.log(times / self._predicted(bounds))
        self._ratio = float(weights @ off)
        self._bounds, off = bounds, off - self._ratio
        self._length = REACH * stride
        kernel = self._kernel(self._bounds)
        if noisy:
            self._deviation = _through_noise(kernel, off)
        else:
            self._deviation = np.linalg.solve(kernel + EXACT * np.eye(len(off)), off)

    def seconds(self, bounds: Bounds) -> Floats:
        """``[m]`` of the partitions ``[m, N - 1]``."""
        return self._predicted(bounds) * np.exp(self._ratio + self._kernel(bounds) @ self._deviation)

    def _kernel(self, bounds: Bounds) -> Floats:
        """``[m, n]`` how much each partition has of what the measured ones deviate by."""
        apart = (bounds[:, None] - self._bounds) / self._length
        return np.exp(-np.sum(apart**2, axis=-1))

    def _predicted(self, bounds: Bounds) -> Floats:
        """``[m]`` seconds by the cost model or by the equation."""
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


def _through_noise(kernel: Floats, off: Floats) -> Floats:
    """``[n]`` coefficients of the likeliest smooth deviation: as the times come, then with late ones doubted."""
    count, doubt = len(off), np.ones(len(off))
    for _ in range(2):
        likeliest = -math.inf
        for noise in NOISES:
            covariance = kernel + np.diag(noise * doubt)
            solved = np.linalg.solve(covariance, off)
            variance = max(float(off @ solved) / count, 1e-12)
            likelihood = -count * math.log(variance) - np.linalg.slogdet(covariance)[1]
            if likelihood > likeliest:
                likeliest, found, deviation = likelihood, solved, math.sqrt(variance * noise)
        doubt = 1 + (np.maximum(off - kernel @ found, 0) / (OUTLIER * deviation)) ** 2
    return found
