"""A server's load, memory, times and kept prefixes, as they are asked for and as they are logged."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from megakv.tracking.served import MOST_MOMENTS, Moment, ServedCounts, ServedState, ServedTraffic, Tier, thinned

# It comes with DeepSpeed, which the process that speaks HTTP does without.
if TYPE_CHECKING:
    from megakv.tracking.tracker import Tracker

State = Literal["starting", "serving", "draining", "ended"]


SAMPLES = 4096
"""Latest times that are kept."""


@dataclass(slots=True, kw_only=True)
class Counts(ServedCounts):
    """Counts, and the latest times."""

    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))


@dataclass(slots=True, kw_only=True)
class ServingStats(ServedState):
    """A snapshot of a server."""

    state: State
    waiting: int
    running: int
    memory_bytes: tuple[int, ...]
    """By rank: of its device, or of its process where that is the processor."""


@dataclass(frozen=True)
class Document:
    """A prefix that is kept, up to the end of a branch of the tree."""

    id: int
    tokens: int
    beginning: tuple[int, ...]
    """Its first tokens, a few dozen at most."""
    tier: Tier
    """Of its least available part."""
    used_s_ago: float
    hits: int
    """Requests that began with it, or with a part of it."""


INTERVAL_S = 10.0


class TrafficLog:
    """In a ``with``: a thread of rank 0 that looks at the loop's stats every `interval_s`, twice as long when it has
    looked often; what it has seen by the end is `traffic`.
    """

    def __init__(self, stats: Callable[[], ServingStats], tracker: Tracker, interval_s: float = INTERVAL_S):
        self._stats, self._tracker, self._interval_s = stats, tracker, interval_s
        self._began = time.monotonic()
        self._moments: list[Moment] = []
        self._step = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megakv-traffic", daemon=True)

    def __enter__(self) -> TrafficLog:
        self._thread.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._ended.set()
        self._thread.join()

    def traffic(self) -> ServedTraffic:
        """Everything so far."""
        return self._traffic(self._stats())

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._look()
        self._look()

    def _look(self) -> None:
        stats = self._stats()
        now = {each.name: getattr(stats, each.name) for each in fields(Moment) if each.name != "at_s"}
        self._moments.append(Moment(at_s=time.monotonic() - self._began, **now))
        if len(self._moments) >= MOST_MOMENTS:
            self._moments = thinned(self._moments)
            self._interval_s *= 2
        scalars = self._traffic(stats).scalars()
        scalars |= {"served/waiting": float(stats.waiting), "served/running": float(stats.running)}
        self._tracker.log(scalars, self._step)
        self._step += 1

    def _traffic(self, stats: ServingStats) -> ServedTraffic:
        return ServedTraffic(**stats.values(), seconds=time.monotonic() - self._began, moments=list(self._moments))
