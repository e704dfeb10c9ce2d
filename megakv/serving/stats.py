"""What a server says of itself: load, memory by tier, hits, times; and which prefixes it keeps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["device", "host", "disk"]
State = Literal["starting", "serving", "draining", "ended"]


SAMPLES = 4096
"""Latest times that are kept."""


@dataclass
class Counts:
    """Since the start, and the latest times; named as in `ServingStats`."""

    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0
    compressed: int = 0
    passes: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    waiting_max: int = 0
    running_max: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))


@dataclass(frozen=True)
class ServingStats:
    """A snapshot. Counts are since the start; samples are those of the latest requests and tokens."""

    state: State
    waiting: int
    running: int
    requests: int
    """That have ended, in whatever way."""
    cancelled: int
    failed: int
    preempted: int
    """How often a request made room for one of higher priority."""
    compressed: int
    """Those of the requests that asked for compressed caches."""
    passes: int
    prompt_tokens: int
    """Of requests that were admitted."""
    hit_tokens: int
    """Those of them that were not computed."""
    computed_tokens: int
    """Prompt tokens that were computed."""
    new_tokens: int
    waiting_max: int
    """Requests at a time, at most, for which there was no room when others were let in."""
    running_max: int
    """Requests at a time, at most, that ran."""
    kv_tokens: dict[Tier, int]
    """Tokens whose keys and values lie there; one may lie in memory and on disk."""
    kv_capacity: dict[Tier, int]
    kv_bytes: dict[Tier, int]
    """Over all ranks."""
    memory_bytes: tuple[int, ...]
    """By rank: of its device, or of its process where that is the processor."""
    ttft_s: tuple[float, ...]
    """Of the latest requests, from `submit` to the first token."""
    token_s: tuple[float, ...]
    """From a token of a stream to its next, the latest."""


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
