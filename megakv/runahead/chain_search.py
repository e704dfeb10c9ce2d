"""The partition that the predicted chain is fastest with.

As `megakv.runahead.search`, but a prediction takes a millisecond where a measurement takes seconds: it starts from more
partitions, also such that leave the first ranks without tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megakv.base.partition import Partition, even, from_fractions
from megakv.costmodel.chain import Chain, ChainPrediction
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.runahead.descent import ALL_PAIRS, descend, pairs
from megakv.runahead.grid import Grid

STEPS = 512
"""Least steps that a prompt is cut into: finer cuts gain nothing."""
FIRST_STRIDE = 16
"""Steps that the first moves are long."""
PROMISING = 1.15
"""Descents start from the best cut over each number of ranks, unless so much slower than the best of all."""
BALANCINGS = 4
"""Rounds of moving tokens from ranks with more work to ranks with less."""


def best_partition(
    profile: HardwareProfile, model: ModelShape, tokens: int, size: int, *, cached: int = 0, **options: Any
) -> Partition:
    """The partition of a sequence's new tokens over `size` context-parallel ranks that is predicted to be fastest.

    Fewer ranks than all are tried too: on slow links, or for a short prompt, the first ranks get nothing. `options` are
    those of `megakv.costmodel.chain.Chain`.
    """
    return _Descent(Chain(profile, model, **options), tokens, cached, size).run()


def balanced_partition(chain: Chain, tokens: int, size: int, *, cached: int = 0) -> Partition:
    """A good partition over all ranks in few predictions: cuts that balance work, and none moved by trial."""
    return _Descent(chain, tokens, cached, size).balanced()


class _Descent:
    def __init__(self, chain: Chain, tokens: int, cached: int, size: int):
        self._chain = chain
        self._tokens = tokens
        self._cached = cached
        self._size = size
        self._unit = 1 << max(0, (tokens // STEPS).bit_length() - 1)
        self._known: dict[Partition, ChainPrediction] = {}

    def run(self) -> Partition:
        starts = [(0,) * (self._size - 1) + (self._tokens,)]
        active = self._size
        while active > 1:
            if self._tokens >= active * self._unit:
                cuts = Grid(self._tokens, active, self._unit).balances()
                found = [(0,) * (self._size - active) + cut for cut in cuts]
                found += self._balanced(min(found, key=self._seconds))
                starts.append(min(found, key=self._seconds))
            active = active - 1 if self._size <= ALL_PAIRS else active // 2
        fastest = min(map(self._seconds, starts))
        promising = [start for start in starts if self._seconds(start) <= PROMISING * fastest]
        if self._size > ALL_PAIRS:
            promising = [min(starts, key=self._seconds)]
        return min(map(self._descended, promising), key=self._seconds)

    def balanced(self) -> Partition:
        """The best start over all ranks."""
        if self._size == 1 or self._tokens < self._size:
            return even(self._tokens, self._size)
        cuts = Grid(self._tokens, self._size, 1).balances()
        best = min(cuts, key=self._seconds)
        return min([best, *self._balanced(best)], key=self._seconds)

    def _descended(self, best: Partition) -> Partition:
        stride = FIRST_STRIDE * self._unit
        while stride >= self._unit:
            best = descend(best, self._seconds, pairs(self._size, stride))
            stride //= 2
        return best

    def _seconds(self, partition: Partition) -> float:
        return self._predicted(partition).seconds

    def _predicted(self, partition: Partition) -> ChainPrediction:
        if partition not in self._known:
            self._known[partition] = self._chain.predict((partition,), (self._cached,))
        return self._known[partition]

    def _balanced(self, partition: Partition) -> Iterator[Partition]:
        """Partitions whose ranks have ever more equal work: the best one where links are fast."""
        for _ in range(BALANCINGS):
            busy = self._predicted(partition).busy_s
            mean = sum(b for b, part in zip(busy, partition, strict=True) if part) / sum(part > 0 for part in partition)
            shares = [part * (mean / b) ** 0.5 if part else 0.0 for part, b in zip(partition, busy, strict=True)]
            partition = from_fractions(shares, self._tokens)
            yield partition
