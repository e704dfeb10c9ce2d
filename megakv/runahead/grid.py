"""The grid on which partitions are searched: every partition is the row of its inner bounds (KV-Runahead, Figure 6).

Bounds rather than parts, because moving one bound moves tokens between two neighbours of the chain and leaves the
others alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megakv.base.partition import Partition, from_fractions

Bounds = NDArray[np.int64]
"""``[n, N - 1]`` first tokens of ranks 1 to N - 1, one row per partition."""

COARSE_CELLS = 12
"""Cells of the first level at most: 96 tokens in strides of 8, as in Figure 6."""
MOST_AROUND = 5000
"""Grid points around a cell beyond which only some bounds move at a time."""
BALANCES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Grid:
    """Partitions of `tokens` in whole units, each of `size` ranks (2 or more) with one unit or more."""

    tokens: int
    size: int
    unit: int

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """From the coarsest to the unit, each half of the one before."""
        levels = max(0, math.ceil(math.log2(self.tokens / (self.unit * COARSE_CELLS))))
        return tuple(self.unit << level for level in range(levels, -1, -1))

    def bounds(self, partition: Sequence[int]) -> Bounds:
        """``[N - 1]`` the inner bounds of a partition."""
        return np.cumsum(np.asarray(partition, dtype=np.int64))[:-1]

    def partition(self, bounds: Bounds) -> Partition:
        """Tokens of each rank."""
        return tuple(int(part) for part in np.diff(bounds, prepend=0, append=self.tokens))

    def nearest(self, partition: Sequence[int]) -> Partition:
        """A partition of this grid close to any other of the same prompt."""
        bounds = np.rint(self.bounds(partition) / self.unit).astype(np.int64) * self.unit
        least = np.arange(1, self.size, dtype=np.int64) * self.unit
        most = (self.tokens - 1) // self.unit * self.unit - least[::-1] + self.unit
        rising = np.maximum.accumulate(bounds - least) + least
        return self.partition(np.clip(rising, least, most))

    def coarse(self) -> Bounds:
        """All partitions in whole coarsest strides."""
        stride = self.strides[0]
        inner = range(stride, self.tokens, stride)
        rows = list(itertools.combinations(inner, self.size - 1))
        return np.array(rows, dtype=np.int64).reshape(len(rows), self.size - 1)

    def around(self, center: Bounds, stride: int) -> Bounds:
        """Partitions whose bounds lie whole strides away from those of `center`, at most `reach`.

        With two strides that is the cell around the best point of the level before, whose stride was twice as long.
        Where the combinations are too many, from 9 ranks on, at most three bounds move at a time, or neighbouring ones
        together.
        """
        return self._possible(center + stride * self._offsets)

    def _possible(self, rows: Bounds) -> Bounds:
        """Those with a unit or more for each rank."""
        rising = np.diff(rows, axis=1, prepend=0, append=self.tokens)
        rising[:, -1] += self.unit - 1  # the last part takes what the units leave over
        return rows[(rising >= self.unit).all(axis=1)]

    @cached_property
    def reach(self) -> int:
        """Strides that a bound moves within a cell: two up to 6 ranks, five values of each bound as in Figure 6."""
        return 2 if 5 ** (self.size - 1) <= MOST_AROUND else 1

    @property
    def points_around(self) -> int:
        """Points of a cell."""
        return len(self._offsets)

    @cached_property
    def _offsets(self) -> Bounds:
        free = self.size - 1
        if (2 * self.reach + 1) ** free <= MOST_AROUND:
            steps = range(-self.reach, self.reach + 1)
            return np.array(list(itertools.product(steps, repeat=free)), dtype=np.int64)
        rows = {tuple([0] * free)}
        for moving in itertools.combinations(range(free), 3):
            for turns in itertools.product((-1, 0, 1), repeat=3):
                row = [0] * free
                for bound, step in zip(moving, turns, strict=True):
                    row[bound] = step
                rows.add(tuple(row))
        for first, last in itertools.combinations(range(free + 1), 2):
            for step in (-2, -1, 1, 2):
                rows.add(tuple(step if first <= bound < last else 0 for bound in range(free)))
        return np.array(sorted(rows), dtype=np.int64)

    def balance(self, share: float) -> Partition:
        """The partition that would give all ranks equal work, were attention this share of it.

        A negative share gives earlier ranks less than later ones, as slow links want it.
        """
        edges = np.arange(self.size + 1) / self.size
        if share:
            # Work up to a token at x of the prompt: (1 - share) x + share x^2.
            edges = (np.sqrt((1 - share) ** 2 + 4 * share * edges) - (1 - share)) / (2 * share)
        return self.nearest(from_fractions(np.diff(edges).tolist(), self.tokens))

    def balances(self) -> list[Partition]:
        """Balances for several shares of attention; even is the first."""
        return list(dict.fromkeys(self.balance(share) for share in BALANCES))
