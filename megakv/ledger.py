"""What a rank sent, how long it waited, and when: the one place where communication and time are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megakv.tracking.metrics import Event


@dataclass
class Tally:
    """Totals of one operation.

    Parameters
    ----------
    calls : int
        Number of calls.
    bytes_sent : int
        Bytes this rank put on the wire.
    seconds : float
        From posting to completion, summed over calls.
    seconds_exposed : float
        Part of `seconds` in which this rank did nothing but wait.
    """

    calls: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    seconds_exposed: float = 0.0


@dataclass
class Ledger:
    """Counts of one rank since the last `reset`.

    Parameters
    ----------
    timeline : bool
        Whether to keep every span, for drawing; totals are always kept.

    Attributes
    ----------
    decoding : bool
        Whether the pass under way computes single tokens.
    computed : dict
        Seconds of computation by name, layer and `decoding`. On an accelerator those in which kernels were started.
    """

    timeline: bool = False
    zero: float = field(default_factory=time.perf_counter)
    tallies: dict[tuple[str, int | None], Tally] = field(default_factory=dict)
    spans: list[Event] = field(default_factory=list)
    decoding: bool = False
    computed: dict[tuple[str, int | None, bool], float] = field(default_factory=dict)
    _dense_since: float | None = None

    def reset(self) -> None:
        """Start counting anew; the present moment becomes the zero of the timeline."""
        self.tallies.clear()
        self.computed.clear()
        self.spans.clear()
        self.zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since the last reset."""
        return time.perf_counter() - self.zero

    def tally(self, operation: str, layer: int | None) -> Tally:
        """The totals of an operation in a layer (None: outside the layers)."""
        return self.tallies.setdefault((operation, layer), Tally())

    def sent(self, operation: str, layer: int | None, nbytes: int) -> None:
        """Count one call that puts `nbytes` on the wire."""
        tally = self.tally(operation, layer)
        tally.calls += 1
        tally.bytes_sent += nbytes

    def transfer(self, operation: str, layer: int | None, posted: float, waited: float) -> None:
        """Count the time of a transfer that was posted and waited for at these times and has just ended."""
        end = self.now()
        tally = self.tally(operation, layer)
        tally.seconds += end - posted
        tally.seconds_exposed += end - waited
        if self.timeline:
            self.spans.append(Event(operation, "communication", posted, end, layer))
            self.spans.append(Event(operation, "wait", waited, end, layer))

    def enter_dense(self) -> None:
        """From here on the rank computes what needs no other rank: projections, feed-forward layers, norms."""
        self._dense_since = self.now() if self.timeline else None

    def leave_dense(self) -> None:
        """End of such a stretch; nothing if none began."""
        if self._dense_since is not None:
            self.spans.append(Event("dense", "compute", self._dense_since, self.now()))
            self._dense_since = None

    @contextmanager
    def compute(self, name: str, layer: int | None = None) -> Iterator[None]:
        """Count a stretch of computation."""
        self.leave_dense()
        start = self.now()
        try:
            yield
        finally:
            end, key = self.now(), (name, layer, self.decoding)
            self.computed[key] = self.computed.get(key, 0.0) + end - start
            if self.timeline:
                self.spans.append(Event(name, "compute", start, end, layer))

    def decode_seconds(self, name: str) -> list[float]:
        """``[layer]`` seconds of a computation in passes over single tokens; empty where there were none."""
        found = {layer: s for (key, layer, decoding), s in self.computed.items() if key == name and decoding}
        layers = [layer for layer in found if layer is not None]
        return [found.get(layer, 0.0) for layer in range(max(layers) + 1)] if layers else []

    def waited_s(self) -> float:
        """Seconds in which this rank did nothing but wait for others."""
        return sum(tally.seconds_exposed for tally in self.tallies.values())

    def by_operation(self) -> dict[str, Tally]:
        """Totals per operation, summed over the layers."""
        totals: dict[str, Tally] = {}
        for (operation, _), tally in self.tallies.items():
            total = totals.setdefault(operation, Tally())
            total.calls += tally.calls
            total.bytes_sent += tally.bytes_sent
            total.seconds += tally.seconds
            total.seconds_exposed += tally.seconds_exposed
        return totals
