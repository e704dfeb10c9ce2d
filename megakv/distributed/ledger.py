"""What a rank sent, how long it waited, and when: the one place where communication and time are counted.

Times are those of the device that computes. A CUDA device comes to a moment long after the host has asked for it: what
lies between two moments is added up when both have passed, and nobody waits for that.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megakv.base.device import Clock, HostClock
from megakv.tracking.measurements import Event

Kind = Literal["compute", "communication", "wait"]


@dataclass
class Tally:
    """Totals of one operation."""

    calls: int = 0
    bytes_sent: int = 0
    """What this rank put on the wire."""
    seconds: float = 0.0
    """From posting to completion, summed over calls."""
    seconds_exposed: float = 0.0
    """Part of `seconds` in which this rank did nothing but wait."""


@dataclass
class Ledger:
    """Counts of one rank since the last `reset`."""

    timeline: bool = False
    """Whether to keep every span, for drawing; totals are always kept."""
    clock: Clock = field(default_factory=HostClock)
    tallies: defaultdict[tuple[str, int | None], Tally] = field(default_factory=lambda: defaultdict(Tally))
    """By operation and layer (None: outside the layers)."""
    spans: list[Event] = field(default_factory=list)
    decoding: bool = False
    """Whether the pass under way computes single tokens."""
    computed: defaultdict[tuple[str, int | None, bool], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of computation by name, layer and `decoding`."""
    methods: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By stage, how many layers each attention method served."""
    _dense_since: Any = None
    # Moments that are not known to have passed, with what then is to be counted.
    _coming: deque[tuple[Any, Callable[[], None]]] = field(default_factory=deque)
    _captured: list[tuple[str, int | None, int]] | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting anew; the present moment becomes the zero of the timeline."""
        self._coming.clear()
        self._dense_since = None
        self.tallies.clear()
        self.computed.clear()
        self.methods.clear()
        self.spans.clear()
        self._started = time.perf_counter()
        self._zero = self.clock.mark()

    def now(self) -> float:
        """Seconds since the last reset, by the host."""
        return time.perf_counter() - self._started

    def mark(self) -> Any:
        """The present moment of the device; None while a graph is captured."""
        return self.clock.mark() if self._captured is None else None

    @contextmanager
    def capturing(self) -> Iterator[list[tuple[str, int | None, int]]]:
        """Around the capture of a CUDA graph, in which nothing is sent and no time passes: what each replay `sent`."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def read(self) -> None:
        """Count what has passed."""
        while self._coming and self.clock.passed(self._coming[0][0]):
            self._coming.popleft()[1]()

    def _when_passed(self, mark: Any, count: Callable[[], None]) -> None:
        if not self._coming and self.clock.passed(mark):
            count()
            return
        self._coming.append((mark, count))
        self.read()

    def _span(self, name: str, kind: Kind, first: Any, last: Any, layer: int | None = None) -> None:
        if self.timeline:
            begin, end = (self.clock.seconds(self._zero, mark) for mark in (first, last))
            self.spans.append(Event(name, kind, begin, end, layer))

    def sent(self, operation: str, layer: int | None, nbytes: int) -> None:
        """Count one call that puts `nbytes` on the wire."""
        if self._captured is not None:
            self._captured.append((operation, layer, nbytes))
            return
        tally = self.tallies[operation, layer]
        tally.calls += 1
        tally.bytes_sent += nbytes

    def attended(self, method: str) -> None:
        """Count a layer that an attention method serves."""
        self.methods["decode" if self.decoding else "prefill"][method] += 1

    def transfer(self, operation: str, layer: int | None, posted: Any, waited: Any, end: Any = None) -> None:
        """Count the time of a transfer that was posted and waited for at these moments and ended then, or just now."""
        if self._captured is not None:
            return
        end = self.mark() if end is None else end
        if self._coming or not self.clock.passed(end):
            self._when_passed(end, lambda: self._transferred(operation, layer, posted, waited, end))
        else:
            self._transferred(operation, layer, posted, waited, end)

    def _transferred(self, operation: str, layer: int | None, posted: Any, waited: Any, end: Any) -> None:
        tally = self.tallies[operation, layer]
        tally.seconds += self.clock.seconds(posted, end)
        tally.seconds_exposed += self.clock.seconds(waited, end)
        self._span(operation, "communication", posted, end, layer)
        self._span(operation, "wait", waited, end, layer)

    def enter_dense(self, since: Any = None) -> None:
        """From here on, or then, the rank computes what needs no other: projections, feed-forward layers, norms."""
        self._dense_since = (self.mark() if since is None else since) if self.timeline else None

    def leave_dense(self, at: Any = None) -> bool:
        """End of such a stretch; nothing if none began. Whether one had."""
        if self._dense_since is None or self._captured is not None:
            return False
        begin, end = self._dense_since, self.mark() if at is None else at
        self._dense_since = None
        self._when_passed(end, lambda: self._span("dense", "compute", begin, end))
        return True

    def compute(self, name: str, layer: int | None = None) -> Stretch:
        """Count a stretch of computation: ``with ledger.compute(...)``."""
        return Stretch(self, name, layer)

    def computed_since(self, start: Any, name: str, layer: int | None, end: Any = None) -> None:
        """Count the end of one."""
        if self._captured is not None:
            return
        end, key = self.mark() if end is None else end, (name, layer, self.decoding)
        if not self.timeline and not self._coming and self.clock.passed(end):
            self.computed[key] += self.clock.seconds(start, end)
            return

        def count() -> None:
            self.computed[key] += self.clock.seconds(start, end)
            self._span(name, "compute", start, end, layer)

        self._when_passed(end, count)

    def decode_seconds(self, name: str) -> list[float]:
        """``[layer]`` seconds of a computation in passes over single tokens; empty where there were none."""
        self.read()
        found = {layer: s for (key, layer, decoding), s in self.computed.items() if key == name and decoding}
        layers = [layer for layer in found if layer is not None]
        return [found.get(layer, 0.0) for layer in range(max(layers) + 1)] if layers else []

    def waited_s(self) -> float:
        """Seconds in which this rank did nothing but wait for others."""
        self.read()
        return sum(tally.seconds_exposed for tally in self.tallies.values())


class Stretch:
    """A stretch of computation, which is counted when it ends. Every layer of every token makes one: it is small."""

    __slots__ = ("_layer", "_ledger", "_name", "_start")

    def __init__(self, ledger: Ledger, name: str, layer: int | None):
        self._ledger, self._name, self._layer = ledger, name, layer

    def __enter__(self) -> None:
        self._ledger.leave_dense()
        self._start = self._ledger.mark()

    def __exit__(self, *ending: object) -> None:
        self._ledger.computed_since(self._start, self._name, self._layer)
