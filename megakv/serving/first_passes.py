"""A server's first passes, before anybody asks for one: what a token takes, of memory and of time.

Without them the first prompts would be read in chunks that begin small and grow, and all else would wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megakv.cache.cache import ShardedCache
from megakv.distributed.agreement import Agreement
from megakv.serving.memory import KVMemory, measured_memory
from megakv.serving.pass_times import FIRST_CHUNK, GROWTH, PassSize, PassTimes
from megakv.serving.settings import ServingSettings

TOKENS = 8
"""Of the first prompts."""
STEP = 4
"""Each further prompt has so many times the tokens of the one before."""
ENOUGH_S = 0.25
"""Behind a pass that took so long no longer one comes."""
SEQUENCES = 8
"""That decode together, at most."""


class FirstEngine(Protocol):
    """What first passes need of an engine."""

    agreement: Agreement

    @property
    def joins(self) -> bool: ...
    @property
    def most_mixed(self) -> float: ...
    def new_cache(self, *, forgets: bool, compresses: bool) -> ShardedCache: ...
    def room(self, cache: ShardedCache, sequences: int) -> int | None: ...
    def check_length(self, prompt: int, new: int) -> None: ...
    def extend(self, caches: Sequence[ShardedCache], tokens: Sequence[Sequence[int]]) -> Any: ...


@dataclass(frozen=True)
class FirstPasses:
    """The memory that there is, how long passes took, of a model with so many layers."""

    kv: KVMemory
    times: PassTimes
    layers: int


def first_passes(engine: FirstEngine, settings: ServingSettings) -> FirstPasses:
    """Compute a little. Collective; a ValueError or MegaKVError where there is no memory for what is asked."""
    comm = engine.agreement.comm
    with engine.agreement.call():
        cache = _new_cache(engine)
        # What a first pass makes is there for all others.
        seconds = [_seconds(engine, [cache], new) for new in (TOKENS, 1, 1)][-1]
        held = (pair for layer in range(len(cache)) for _, *pair, _ in cache.store(layer).pieces(0))
        nbytes = sum(tensor.nbytes for pair in held for tensor in pair) / cache.length
        room = engine.room(cache, settings.max_sequences)
        kv = measured_memory(comm, nbytes, settings.kv_tokens, room)
        cache.reset()
        times = PassTimes(engine.most_mixed)
        times.add(PassSize(sequences=1, context=TOKENS + 1), seconds)
        new = FIRST_CHUNK
        # All ranks go by the clock of the first one.
        while _is_room(engine, settings, kv, new) and comm.broadcast_object(seconds) < ENOUGH_S:
            seconds = _seconds(engine, [cache], new)
            times.add(PassSize().with_prompt(0, new), seconds)
            cache.reset()
            new *= STEP
        sequences = min(SEQUENCES, settings.max_sequences, kv.tokens // (TOKENS + 1))
        if engine.joins and sequences > 1:
            caches = [_new_cache(engine) for _ in range(sequences)]
            for tokens in (TOKENS, 1, 1):
                seconds = _seconds(engine, caches, tokens)
            times.add(PassSize(sequences=sequences, context=sequences * (TOKENS + 1)), seconds)
            for each in caches:
                each.reset()
    return FirstPasses(kv, times, len(cache))


def _is_room(engine: FirstEngine, settings: ServingSettings, kv: KVMemory, new: int) -> bool:
    """Whether a prompt of so many tokens fits, and more than those of before can be trusted behind it."""
    if new > min(settings.chunk_tokens / GROWTH, kv.tokens):
        return False
    try:
        engine.check_length(new, 1)
    except ValueError:
        return False
    return True


def _new_cache(engine: FirstEngine) -> ShardedCache:
    return engine.new_cache(forgets=False, compresses=False)


def _seconds(engine: FirstEngine, caches: Sequence[ShardedCache], new: int) -> float:
    """What a pass over so many new tokens of each takes."""
    began = time.perf_counter()
    engine.extend(caches, [[0] * new for _ in caches])
    return time.perf_counter() - began
