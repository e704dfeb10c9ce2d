"""An imagined chain, layer by layer and message by message, with constants to choose: what partitions are tried on."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakv.base.partition import Partition


@dataclass(frozen=True)
class SimulatedChain:
    """Seconds of its parts, per layer.

    Parameters
    ----------
    layers : int
    before, after : float
        Of a token, before and after attention.
    pair : float
        Of a query with a key; half of them are hidden among a rank's own tokens.
    carry : float
        Of a token's keys and values on a link.
    message : float
        Of a message beside that.
    receive : float
        Of taking in a received token, which keeps the processor busy.
    """

    layers: int
    before: float
    after: float
    pair: float
    carry: float
    message: float
    receive: float

    @classmethod
    def any(cls, tokens: int, rng: random.Random) -> SimulatedChain:
        """From mostly weights to mostly attention, from free links to links that outweigh all compute."""
        share = rng.uniform(0.03, 0.97)
        early = rng.uniform(0.1, 0.5)
        compute = 1.0
        dense = (1 - share) * compute / tokens
        return cls(
            layers=rng.choice((1, 2, 4, 8, 16, 32)),
            before=early * dense,
            after=(1 - early) * dense,
            pair=2 * share * compute / tokens**2,
            carry=compute / tokens * 10 ** rng.uniform(-3, 0),
            message=compute * 10 ** rng.uniform(-4, -1.5),
            receive=compute / tokens * rng.choice((0.0, 10 ** rng.uniform(-3, -1))),
        )

    @classmethod
    def usual(cls, tokens: int, rng: random.Random) -> SimulatedChain:
        """One of 8 layers or more whose links carry a prompt's keys and values in a fifth of the compute at most."""
        while True:
            found = cls.any(tokens, rng)
            if found.layers >= 8 and found.carry * tokens <= 0.2:
                return found

    def seconds(self, partitions: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[n]`` TTFT of the partitions ``[n, N]``."""
        return np.asarray(self._seconds(list(partitions.astype(np.float64).T), np.maximum))

    def _seconds(self, parts: Sequence[Any], later: Callable[[Any, Any], Any]) -> Any:
        """TTFT, from the tokens of each rank: numbers, or arrays of many partitions'."""
        prefixes = [0.0, *itertools.accumulate(parts[:-1])]
        end, free = [0.0 * own for own in parts], [0.0 * own for own in parts]
        for _ in range(self.layers):
            arrival = 0.0
            for rank, (own, before) in enumerate(zip(parts, prefixes, strict=True)):
                ready = end[rank] + self.before * own
                local = ready + self.pair * own * own / 2
                seen = later(local, arrival) if rank else local
                end[rank] = seen + (self.pair * own + self.receive) * before + self.after * own
                # Its own part first, then what it has received.
                sent = later(free[rank], ready) + self.message + self.carry * own
                if rank:
                    sent = later(sent, arrival) + self.message + self.carry * before
                free[rank] = arrival = sent
        return functools.reduce(later, end)

    def evaluator(self, noise: float = 0.0, rng: random.Random | None = None) -> Counter:
        """What a search calls; with noise every measurement takes longer by some random part."""
        return Counter(lambda partition: self._seconds(list(map(float, partition)), max), noise, rng)


class Counter:
    """An evaluation that remembers what it was asked.

    Parameters
    ----------
    truth : callable
        Seconds of a partition.
    noise : float
        Mean of what random interference adds, relative.
    rng : random.Random, optional
        Its source.
    """

    def __init__(self, truth: Callable[[Partition], float], noise: float, rng: random.Random | None):
        self._truth = truth
        self._noise = noise
        self._rng = rng
        self.asked: list[Partition] = []

    def __call__(self, partition: Partition) -> float:
        self.asked.append(partition)
        disturbed = self._rng.expovariate(1 / self._noise) if self._rng and self._noise else 0.0
        return self._truth(partition) * (1 + disturbed)


def all_partitions(tokens: int, size: int, unit: int) -> NDArray[np.int64]:
    """``[n, size]`` every partition in whole units with a unit or more for each rank."""
    units = tokens // unit
    grids = np.meshgrid(*[np.arange(1, units)] * (size - 1), indexing="ij")
    bounds = np.stack([grid.reshape(-1) for grid in grids], axis=1)
    rising = (np.diff(bounds, axis=1) > 0).all(axis=1)
    return np.diff(bounds[rising], axis=1, prepend=0, append=units) * unit
