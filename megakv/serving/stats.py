"""What a server says of itself: load, memory by tier, hits, times; and which prefixes it keeps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from megakv.tracking.served import ServedCounts, ServedState, Tier

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
    """Its first tokens, a few hundred at most."""
    tier: Tier
    """Of its least available part."""
    used_s_ago: float
    hits: int
    """Requests that began with it, or with a part of it."""
