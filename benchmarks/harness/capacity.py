"""How long a context fits under a cap of memory: a straight line through measured lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of a rank as a straight line over the context's tokens."""

    fixed_bytes: float  # What does not grow: weights, and what the line has at no token
    token_bytes: float  # Per token of the context
    # How far the line through all lengths but the longest misses what was measured there, relative to that; None
    # where there are fewer than three lengths
    error: float | None

    def longest(self, cap_bytes: float) -> int:
        """Tokens that fit under a cap; extrapolated where that is beyond what was measured."""
        return max(0, int((cap_bytes - self.fixed_bytes) / self.token_bytes))


def memory_line(contexts: Sequence[int], working_bytes: Sequence[int], weight_bytes: int) -> MemoryLine:
    """Fit it to the largest rank's memory, without its weights, at several lengths."""
    if len(set(contexts)) < 2:
        raise ValueError(f"{len(set(contexts))} length(s) give no line; two are needed")
    slope, start = np.polyfit(contexts, working_bytes, 1)
    if slope <= 0:
        raise ValueError(f"memory does not grow with the context: {list(working_bytes)} bytes at {list(contexts)}")
    error = None
    if len(contexts) > 2:
        order = np.argsort(contexts)
        x, y = np.asarray(contexts)[order], np.asarray(working_bytes)[order]
        part = np.polyfit(x[:-1], y[:-1], 1)
        error = float(np.polyval(part, x[-1]) / y[-1] - 1)
    return MemoryLine(float(weight_bytes + max(start, 0.0)), float(slope), error)
