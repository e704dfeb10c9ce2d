"""Pauses of a long pass, in which other passes run (layered prefill)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Pauses:
    """Where a pass pauses, on all ranks alike, for other passes to run within it (layered prefill).

    It can before the attention of a layer and behind it, at stops 2n and 2n + 1 of layer n. What the layers have in
    hand is on the stack of their calls, so that another pass can begin and end there.
    """

    at: int
    """The next stop at which it pauses."""
    run: Callable[[int, list[float]], int]
    """Does what there is to do, given that stop and when each one since the last pause was reached, by
    `time.perf_counter`; says at which stop the next pause is.
    """
    running: bool = False
    """Whether it pauses: what begins now is within the pass."""
    _reached: int = -1
    _moments: list[float] = field(default_factory=list)

    def reach(self, stop: int) -> None:
        """The pass is at a stop, perhaps again."""
        if stop <= self._reached:
            return
        self._reached = stop
        self._moments.append(time.perf_counter())
        if stop >= self.at:
            moments, self._moments, self.running = self._moments, [], True
            try:
                self.at = self.run(stop, moments)
            finally:
                self.running = False
