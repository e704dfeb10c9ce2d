"""Moments in what an accelerator does, and the seconds between them.

A processor that computes as it is told is at every moment where the thread is that tells it. An accelerator is not: a
moment is put into its queue of work, and known once the accelerator has come to it. Nobody waits for that.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    """Moments of one accelerator; what they are is the clock's own."""

    def mark(self) -> Any:
        """The moment at which the accelerator comes to what this thread has it do next."""

    def passed(self, mark: Any) -> bool:
        """Whether it has come there; then it has come to all earlier ones of this thread, too."""

    def seconds(self, first: Any, last: Any) -> float:
        """From one moment to another, once both have passed."""


class HostClock:
    """Where the processor itself is the accelerator."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first
