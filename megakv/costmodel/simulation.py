"""A run on paper: what ranks compute, send and wait for, and what goes wrong with it on real machines.

Whatever plays a run says what happens next on a rank; a processor does one thing at a time. The times are those that
predictions are made of, and without disturbances a run takes what is predicted. Events and traffic are kept as a real
run reports them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megakv.tracking.measurements import Event, Traffic

MOST_TASKS = 3_000_000
ROUNDING = 1e-12
"""Of a time: nobody waits for so little."""
Seconds = Any
"""A number, or an array of them."""


@dataclass(frozen=True)
class Disturbances:
    """Factors on the times of what is computed and sent; a ValueError where one is impossible."""

    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # Computation of a rank takes so many times longer.
    # Messages between two ranks, both ways, take so many times longer; a collective as long as its slowest link.
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    noise: float = 0.0  # Sigma of the log-normal factor, of median 1, that everything gets.
    seed: int = 0  # Of that noise.

    def __post_init__(self) -> None:
        for name, factor in [*self.slow_ranks.items(), *self.slow_links.items()]:
            if not 0 < factor < math.inf:
                raise ValueError(f"{name}: factor {factor}: allowed: a number above 0, such as 2 for twice the time")
        for first, second in self.slow_links:
            if first == second:
                raise ValueError(f"link {first}-{second}: allowed: two different ranks")
        if not 0 <= self.noise <= 5:
            raise ValueError(f"noise {self.noise}: allowed: a sigma from 0 to 5")

    def check(self, ranks: int) -> None:
        named = {*self.slow_ranks, *(rank for link in self.slow_links for rank in link)}
        for rank in sorted(named):
            if not 0 <= rank < ranks:
                raise ValueError(f"rank {rank}: allowed: 0 to {ranks - 1}")


CALM = Disturbances()


@dataclass
class _Count:
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


class Simulation:
    """The clocks of all ranks, and what has happened.

    tp_size: tensor-parallel ranks, which are neighbours.
    records: whether events and traffic are kept, or clocks alone.
    progress: is told the number of tasks now and then.
    Raises ValueError for disturbances of ranks that are not there, and for more than `MOST_TASKS`.
    """

    def __init__(
        self,
        ranks: int,
        disturbances: Disturbances = CALM,
        *,
        tp_size: int = 1,
        records: bool = True,
        progress: Callable[[int], object] | None = None,
    ):
        disturbances.check(ranks)
        self.records = records
        # Ranks of each context-parallel place, and of each tensor-parallel column.
        self.places = [range(first, first + tp_size) for first in range(0, ranks, tp_size)]
        self.columns = [range(column, ranks, tp_size) for column in range(tp_size)]
        self.now = [0.0] * ranks  # When each rank can go on.
        self.events: list[list[Event]] = [[] for _ in range(ranks)]
        self.tasks = 0
        self._disturbed = disturbances
        self._random = np.random.default_rng(disturbances.seed)
        self._progress = progress
        self._counts: list[dict[tuple[str, int | None], _Count]] = [defaultdict(_Count) for _ in range(ranks)]

    @property
    def seconds(self) -> float:
        return max(self.now)

    # How long something takes on the disturbed machine

    def computing(self, rank: int, seconds: Seconds) -> Seconds:
        return self._noisy(seconds * self._disturbed.slow_ranks.get(rank, 1.0))

    def sending(self, rank: int, peer: int, seconds: Seconds) -> Seconds:
        slow = self._disturbed.slow_links
        return self._noisy(seconds * slow.get((rank, peer), slow.get((peer, rank), 1.0)))

    def _noisy(self, seconds: Seconds) -> Seconds:
        sigma = self._disturbed.noise
        return seconds * np.exp(self._random.normal(0.0, sigma, np.shape(seconds))) if sigma else seconds

    # What happens next

    def compute(self, name: str, rank: int, seconds: float, layer: int | None = None) -> None:
        """Work of a rank, as long as it takes there."""
        self.computed(name, rank, self.computing(rank, seconds), layer)

    def compute_all(self, name: str, ranks: Sequence[int], seconds: Sequence[float], layer: int) -> None:
        """Work of several ranks, each by itself."""
        for rank, own in zip(ranks, seconds, strict=True):
            self.compute(name, rank, own, layer)

    def computed(self, name: str, rank: int, seconds: float, layer: int | None = None) -> None:
        """Work of a rank that takes just so long."""
        start = self.now[rank]
        self.now[rank] = end = start + seconds
        if end > start and self.records:
            self.events[rank].append(Event(name, "compute", start, end, layer))
            self._count_task()

    def wait(self, name: str, rank: int, until: float, layer: int | None = None) -> None:
        """A rank stands still for a transfer, if it has not ended before."""
        start = self.now[rank]
        if until - start > ROUNDING * until and self.records:
            self.events[rank].append(Event(name, "wait", start, until, layer))
            self._counts[rank][name, layer].exposed += until - start
        self.now[rank] = max(start, until)

    def transfer(
        self, name: str, ranks: Sequence[int], end: float, seconds: float, nbytes: int, layer: int | None = None
    ) -> None:
        """A transfer that the first of `ranks` sends and any other receives."""
        if not self.records:
            return
        for rank in ranks:
            self.events[rank].append(Event(name, "communication", end - seconds, end, layer))
            self._counts[rank][name, layer].seconds += seconds
        sent = self._counts[ranks[0]][name, layer]
        sent.calls += 1
        sent.nbytes += nbytes
        self._count_task()

    def meet(self, name: str, ranks: Sequence[int], seconds: float, nbytes: Sequence[int], layer: int) -> None:
        """A collective, which begins when all ranks are there; `nbytes` are those that each sends."""
        begun = max(self.now[rank] for rank in ranks)
        links = (factor for link, factor in self._disturbed.slow_links.items() if set(link) <= set(ranks))
        slowest = max(links, default=1.0)
        for rank, count in zip(ranks, nbytes, strict=True):
            own = self._noisy(seconds * slowest)
            self.transfer(name, [rank], begun + own, own, count, layer)
            self.wait(name, rank, begun + own, layer)

    def traffic(self, rank: int) -> list[Traffic]:
        counts = sorted(self._counts[rank].items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0))
        # A receive counts from when it was posted, so that no wait for it is longer.
        return [
            Traffic(name, layer, count.calls, count.nbytes, max(count.seconds, count.exposed), count.exposed)
            for (name, layer), count in counts
        ]

    def _count_task(self) -> None:
        self.tasks += 1
        if self.tasks > MOST_TASKS:
            raise ValueError(
                f"more than {MOST_TASKS:,} tasks are too many: allowed: fewer --layers, larger --chunk-tokens"
            )
        if self._progress is not None and self.tasks % 1024 == 0:
            self._progress(self.tasks)
