"""How requests share the engine, and what is kept of their prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServingSettings:
    """Settings of a `ServingLoop`; a ValueError names the one that cannot be."""

    max_gap_s: float = 0.4
    """Longest time between two tokens of a stream while other prompts are read: it bounds a pass."""
    decode_share: float = 0.0
    """Part of the time that decoding keeps while prompts are read; at 0.5 streams keep half their rate."""
    chunk_tokens: int = 2048
    """Most prompt tokens in a pass."""
    max_sequences: int = 64
    """Requests that run at a time."""
    max_queue: int = 1024
    """Requests that wait; more are refused."""
    kv_tokens: int | None = None
    """Tokens of which keys and values are on the device: those of running requests, and prefixes kept. None for what
    fits into half of the memory that is free when serving begins."""
    host_kv_tokens: int = 0
    """Tokens of which they are kept in host memory, once the device has no space for them."""
    store: Path | None = None
    """A folder that all ranks share, in which prefixes outlast the server."""
    store_gb: float = 10.0
    """Most that prefixes take there, in GB; the least recently used go first."""
    prompt_lookup: int = 16
    """Candidates for the next tokens of a stream, at most, that are looked up in its prompt and answer, and checked in
    one pass where that pays; 0 for none."""

    def __post_init__(self) -> None:
        whole = {"chunk_tokens": 1, "max_sequences": 1, "max_queue": 0, "host_kv_tokens": 0, "prompt_lookup": 0}
        if self.kv_tokens is not None:
            whole["kv_tokens"] = 1
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: allowed: whole numbers from {least}")
        for name in ("max_gap_s", "store_gb"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} = {getattr(self, name)}: allowed: numbers above 0")
        if not 0 <= self.decode_share < 1:
            raise ValueError(f"decode_share = {self.decode_share}: allowed: from 0 to below 1")
