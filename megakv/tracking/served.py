"""What a server did: requests, times, hits, and how its queue and memory went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from megakv.tracking.measurements import STRICT, Count, Number, percentiles

Tier = Literal["device", "host", "disk"]
MOST_MOMENTS = 512
Samples = Annotated[list[Number], Field(max_length=1 << 20)]


@dataclass(frozen=True, slots=True)
class Moment:
    """A server's load at one time."""

    at_s: Number  # Since serving began.
    waiting: Count
    running: Count
    # Since serving began, too.
    prompt_tokens: Count
    hit_tokens: Count
    new_tokens: Count
    kv_tokens: dict[Tier, Count]  # Tokens whose keys and values lie there.
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(slots=True, kw_only=True)
class ServedTraffic:
    """All requests of a server's life; samples are those of its latest requests and tokens."""

    seconds: Number
    requests: Count  # That ended, in whatever way.
    cancelled: Count
    failed: Count
    preempted: Count
    compressed: Count = 0  # Of the requests, those that asked for compressed caches.
    passes: Count
    prompt_tokens: Count
    hit_tokens: Count  # Of the prompts' tokens, those that were found in the prefix store.
    computed_tokens: Count
    new_tokens: Count
    waiting_max: Count = 0  # At a time, when requests were let in.
    running_max: Count = 0
    ttft_s: Samples  # From a request to its first token.
    token_s: Samples  # From a token of a stream to its next.
    # In tokens, and in bytes over all ranks.
    kv_tokens: dict[Tier, Count]
    kv_capacity: dict[Tier, Count]
    kv_bytes: dict[Tier, Count]
    moments: Annotated[list[Moment], Field(max_length=MOST_MOMENTS)] = field(default_factory=list)
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def scalars(self) -> dict[str, float]:
        """As flat metrics."""
        names = ("requests", "cancelled", "failed", "preempted", "compressed", "passes", "prompt_tokens", "hit_tokens")
        more = ("computed_tokens", "new_tokens", "waiting_max", "running_max")
        values = {name: float(getattr(self, name)) for name in (*names, *more)}
        values |= {**percentiles("ttft_s", self.ttft_s), **percentiles("token_s", self.token_s)}
        if self.prompt_tokens:
            values["hit_rate"] = self.hit_tokens / self.prompt_tokens
        if self.seconds:
            values["new_tokens_per_s"] = self.new_tokens / self.seconds
        for tier, tokens in self.kv_tokens.items():
            values[f"kv_tokens_{tier}"] = float(tokens)
        return {f"served/{name}": value for name, value in values.items()}


def thinned(moments: Iterable[Moment]) -> list[Moment]:
    """Every other one, and the last."""
    found = list(moments)
    return found[:-1:2] + found[-1:]
