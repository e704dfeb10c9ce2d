"""A server's first passes, before anybody asks for one: what a token takes, of memory and of time.

Without them the first prompts would be read in chunks that begin small and grow, and all else would wait for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megakv.base.device import without_autograd
from megakv.base.errors import MegaKVError, PeerLostError
from megakv.cache.cache import ShardedCache
from megakv.engine.engine import MegaKVEngine
from megakv.serving.memory import KVMemory, measured_memory
from megakv.serving.pass_times import FIRST_CHUNK, GROWTH, PassSize, PassTimes
from megakv.serving.settings import ServingSettings

logger = logging.getLogger(__name__)

TOKENS = 8
"""Of the first prompt; two more follow."""
STEP = 4
"""Each further prompt has so many times the tokens of the one before."""
LONGEST_S = 1.0
"""A pass that may take longer does not come: with N times the tokens of another it may take N times as long."""
SEQUENCES = 8
"""That decode together, at most."""


@dataclass(frozen=True)
class FirstPasses:
    """The memory that there is, how long passes took, of a model with so many layers."""

    kv: KVMemory
    times: PassTimes
    layers: int


@without_autograd
def first_passes(engine: MegaKVEngine, settings: ServingSettings) -> FirstPasses:
    """Compute a little. Collective; a ValueError or MegaKVError where there is no memory for what is asked."""
    cache = _new_cache(engine)
    # What a first pass makes is there for all others.
    step_s = [_seconds(engine, [cache], new) for new in (TOKENS, 1, 1)][-1]
    with engine.agreement.call():
        held = (pair for layer in range(len(cache)) for _, *pair, _ in cache.store(layer).pieces(0))
        nbytes = sum(tensor.nbytes for pair in held for tensor in pair) / cache.length
        room = engine.room(cache, settings.max_sequences)
        kv = measured_memory(engine.agreement.comm, nbytes, settings.kv_tokens, room)
    cache.reset()
    times = PassTimes(engine.most_mixed)
    times.add(PassSize(sequences=1, context=TOKENS + 1), step_s)
    try:
        _time_sequences(engine, settings, kv, times, step_s)
        _time_prompts(engine, settings, kv, times, step_s)
    except PeerLostError:
        raise
    except (MegaKVError, RuntimeError) as error:
        # Whoever asks for as much will be told; there may be many who do not.
        logger.warning("a pass before the first request failed: %s", error)
    return FirstPasses(kv, times, len(cache))


def _time_sequences(
    engine: MegaKVEngine, settings: ServingSettings, kv: KVMemory, times: PassTimes, step_s: float
) -> None:
    """Tokens of several sequences in a pass, if engines have such."""
    sequences = min(SEQUENCES, settings.max_sequences, kv.tokens // 3)
    if not engine.joins or sequences < 2 or not _is_short(engine, sequences * step_s):
        return
    with ExitStack() as stack:
        caches = [_new_cache(engine) for _ in range(sequences)]
        for cache in caches:
            stack.callback(cache.reset)
        seconds = [_seconds(engine, caches, 1) for _ in range(3)][-1]
    times.add(PassSize(sequences=sequences, context=2 * sequences), seconds)


def _time_prompts(
    engine: MegaKVEngine, settings: ServingSettings, kv: KVMemory, times: PassTimes, step_s: float
) -> None:
    """Prompts of more and more tokens: what is more than twice the longest is not trusted."""
    new, expected = FIRST_CHUNK, FIRST_CHUNK * step_s
    while new <= min(settings.chunk_tokens / GROWTH, kv.tokens) and _takes(engine, new) and _is_short(engine, expected):
        with ExitStack() as stack:
            cache = _new_cache(engine)
            stack.callback(cache.reset)
            seconds = _seconds(engine, [cache], new)
        times.add(PassSize().with_prompt(0, new), seconds)
        new, expected = new * STEP, seconds * STEP


def _takes(engine: MegaKVEngine, new: int) -> bool:
    """Whether the model takes prompts of so many tokens."""
    try:
        engine.check_length(new, 1)
    except ValueError:
        return False
    return True


def _is_short(engine: MegaKVEngine, seconds: float) -> bool:
    """Whether a pass may come, by the clock of the first rank. Collective."""
    with engine.agreement.call():
        return engine.agreement.comm.broadcast_object(seconds) <= LONGEST_S


def _new_cache(engine: MegaKVEngine) -> ShardedCache:
    return engine.new_cache(forgets=False, compresses=False)


def _seconds(engine: MegaKVEngine, caches: Sequence[ShardedCache], new: int) -> float:
    """What a pass over so many new tokens of each takes."""
    began = time.perf_counter()
    engine.extend(caches, [[0] * new for _ in caches])
    return time.perf_counter() - began
