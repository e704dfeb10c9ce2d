"""What the partitions measured so far say about all others and about each other: it orders and prunes the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megakv.runahead.grid import Bounds

Floats = NDArray[np.float64]

SHARED = 5
"""Constants that all lines share; each rank has one more of its own."""
SHARPNESS = 12
ROUNDS = 6
RIDGE, OWN_RIDGE = 1e-3, 2e-2
BEGINNINGS = ((0.45, 0.45, 0.0), (0.9, 0.0, 0.0), (0.05, 0.85, 0.0), (0.5, 0.2, 0.9))
"""Shares of weights, attention and the last hop that a fit may begin with; the first is what it leans to."""
NEAR_STRIDES = 1.5
TRUST = 0.3
"""Weight of the fitted lines against one measured neighbour whose time is exact."""
MOST_TRUST = 4.0
"""The same against one neighbour whose time is noise beside what lines leave unexplained."""
FAST = 1.1
"""What lines leave unexplained is judged by partitions that take up to so many times the shortest time."""
OUTLIER, LEAST_WEIGHT = 4.0, 0.2
"""Beyond so many deviations a single time counts half as much, for something else may have run on the machine; but
never less than this: it may as well be the lines that are wrong."""


class Trend:
    """The time to first token as the longest of several lines, fitted to measurements.

    In a chain whose links all compute the same layers the slowest link sets the pace, or the slowest hop does:
    ``a tokens_r + b pairs_r + c prefix_r + d hops_r + t_r`` for rank r, and ``e hop`` for the last hop, with constants
    of 0 or more: of tokens through the weights, of query-key pairs, of received tokens, of all tokens on the hops
    before, of a rank. Where several lines are long at once they wait for each other, so that their norm is taken rather
    than their maximum: it also tells what else to shorten where the longest line cannot be. Near measured points, what
    they deviate by is taken over: the less, the more of it may be noise.

    Parameters
    ----------
    tokens, size : int
        Of the prompt, and of the chain.
    """

    def __init__(self, tokens: int, size: int):
        self._tokens = tokens
        self._size = size
        self._bounds: Bounds = np.empty((0, size - 1), dtype=np.int64)
        self._ratios: Floats = np.empty(0)
        self._weights: Floats = np.empty(0)
        self._trust = TRUST
        self._constants: Floats | None = None

    def fit(self, bounds: Bounds, seconds: Sequence[float], *, counts: Sequence[int] = (), noise: float = 0.0) -> None:
        """Fit to all measurements, those of fast partitions above all.

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
        features, times = self._features(bounds), np.asarray(seconds)
        scale = times.min()
        often = np.asarray(counts, dtype=np.float64) if len(counts) else np.ones(len(times))
        relative, weights = times / scale, often * (scale / times) ** 2
        own = np.zeros(self._size)
        candidates = [self._size * np.array([a, b, 0.0, 0.0, e / self._size, *own]) for a, b, e in BEGINNINGS]
        prior = candidates[0]
        if self._constants is not None:
            candidates = [prior, self._constants / scale]
        ridge = np.array([RIDGE] * SHARED + [OWN_RIDGE] * self._size)
        best, least = prior, np.inf
        for constants in candidates:
            for _ in range(ROUNDS):
                lines = features @ constants
                shares = (lines / _norm(lines)[:, None]) ** (SHARPNESS - 1)
                # The norm is the sum of the lines in these shares: linear in the constants as long as they hold.
                rows = (features * shares[:, :, None]).sum(axis=1)
                weighted = rows * weights[:, None]
                solved = _nonnegative(rows.T @ weighted + np.diag(ridge), weighted.T @ relative + ridge * prior)
                constants = (constants + solved) / 2
                error = _norm(features @ constants) - relative
                loss = float((weights * error**2).sum() + (ridge * (constants - prior) ** 2).sum())
                if loss < least:
                    best, least = constants, loss
        self._constants = best * scale
        self._bounds = bounds
        self._ratios = relative / _norm(features @ best)
        self._weights = often
        self._trust = TRUST
        if noise:
            off = self._ratios - 1
            unexplained = float(np.mean(off[relative <= FAST] ** 2)) - noise**2
            self._trust = min(MOST_TRUST, TRUST + noise**2 / max(unexplained, (noise / MOST_TRUST) ** 2))
            single = np.maximum(LEAST_WEIGHT, 1 / (1 + (np.maximum(off, 0.0) / (OUTLIER * noise)) ** 2))
            self._weights = np.where(often == 1, single, often)

    def predict(self, bounds: Bounds, stride: int) -> Floats:
        """``[m]`` seconds of the partitions ``[m, N - 1]``; measured neighbours within some strides count."""
        assert self._constants is not None
        distance = np.zeros((len(bounds), len(self._bounds)))
        for ours, theirs in zip(
            bounds.T / (NEAR_STRIDES * stride), self._bounds.T / (NEAR_STRIDES * stride), strict=True
        ):
            np.maximum(distance, np.abs(ours[:, None] - theirs), out=distance)
        nearness = np.exp(-(distance**2)) * self._weights
        deviation = nearness @ (self._ratios - 1) / (self._trust + nearness.sum(axis=1))
        found: Floats = _norm(self._features(bounds) @ self._constants) * (1 + deviation)
        return found

    def smoothed(self, stride: int) -> Floats:
        """``[n]`` seconds of the measured partitions themselves, by all measurements together."""
        return self.predict(self._bounds, stride)

    def _features(self, bounds: Bounds) -> Floats:
        """``[n, N + 1, 5 + N]`` the lines of all ranks and of the last hop, by constant."""
        size = self._size
        edges = np.zeros((len(bounds), size + 1))
        edges[:, 1:-1] = bounds / self._tokens
        edges[:, -1] = 1.0
        features = np.zeros((len(bounds), size + 1, SHARED + size))
        features[:, :-1, 0] = np.diff(edges, axis=1)
        features[:, :-1, 1] = np.diff(edges**2, axis=1)
        features[:, :-1, 2] = edges[:, :-1]
        features[:, :-1, 3] = np.cumsum(edges[:, :-1], axis=1) / size
        features[:, -1, 4] = edges[:, -2]
        features[:, range(size), range(SHARED, SHARED + size)] = 1.0
        return features


def _norm(lines: Floats) -> Floats:
    """``[n]`` a smooth maximum of the lines ``[n, m]``, none of which is negative."""
    longest = lines.max(axis=1)
    longest[longest <= 0] = 1.0
    found: Floats = longest * ((lines / longest[:, None]) ** SHARPNESS).sum(axis=1) ** (1 / SHARPNESS)
    return np.maximum(found, 1e-6)


def _nonnegative(matrix: Floats, vector: Floats) -> Floats:
    """About the least squares of a normal equation over numbers of 0 or more."""
    free = np.ones(len(vector), dtype=bool)
    values = np.zeros(len(vector))
    while free.any():
        solved = np.linalg.solve(matrix[np.ix_(free, free)], vector[free])
        values[:] = 0.0
        values[free] = np.maximum(solved, 0.0)
        if (solved >= 0).all():
            break
        free[free] = solved > 0
    return values
