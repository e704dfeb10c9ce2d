"""What a server did: requests, times, hits, and how its queue and memory went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

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


def _counted(meaning: str) -> int:
    return field(default=0, metadata={"meaning": meaning})


@dataclass(slots=True, kw_only=True)
class ServedCounts:
    """Counts since a server's start, which every way to look at a server shows under these names."""

    requests: Count = _counted("Answers that have ended, in whatever way")
    cancelled: Count = _counted("Answers that were cancelled")
    failed: Count = _counted("Answers that failed")
    preempted: Count = _counted("Answers that made room for one of higher priority")
    compressed: Count = _counted("Answers that asked for compressed caches")
    passes: Count = _counted("Forward passes")
    prompt_tokens: Count = _counted("Prompt tokens of admitted requests")
    hit_tokens: Count = _counted("Of them, those that were found in the prefix store")
    computed_tokens: Count = _counted("Prompt tokens that were computed")
    new_tokens: Count = _counted("Tokens that were generated")
    proposed_tokens: Count = _counted("Candidates for them, looked up in prompts and answers, that were checked")
    accepted_tokens: Count = _counted("Of the candidates, those that came true")
    waiting_max: Count = _counted("Requests at a time, at most, that found no room when others were let in")
    running_max: Count = _counted("Requests at a time, at most, that ran")

    def counts(self) -> dict[str, int]:
        """All of them by name."""
        return {each.name: getattr(self, each.name) for each in fields(ServedCounts)}


@dataclass(slots=True, kw_only=True)
class ServedState(ServedCounts):
    """Counts, with a server's memory by tier and its latest times."""

    kv_tokens: dict[Tier, Count]  # Tokens whose keys and values lie there; one may lie in memory and on disk.
    kv_capacity: dict[Tier, Count]
    kv_bytes: dict[Tier, Count]  # Over all ranks.
    ttft_s: Samples  # Of the latest requests, from the request to its first token.
    token_s: Samples  # From a token of a stream to its next, the latest.

    def values(self) -> dict[str, Any]:
        """All fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(ServedState)}


@dataclass(slots=True, kw_only=True)
class ServedTraffic(ServedState):
    """All requests of a server's life; samples are those of its latest requests and tokens."""

    seconds: Number
    moments: Annotated[list[Moment], Field(max_length=MOST_MOMENTS)] = field(default_factory=list)
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def scalars(self) -> dict[str, float]:
        """As flat metrics."""
        values = {name: float(count) for name, count in self.counts().items()}
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
