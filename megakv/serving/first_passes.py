"""A server's first passes, before anybody asks for one: what a token takes, of memory and of time.

Without them the first prompts would be read in chunks that begin small and grow, and all else would wait for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megakv.base.device import without_autograd
from megakv.base.errors import MegaKVError, PeerLostError
from megakv.cache.cache import ShardedCache
from megakv.distributed.comm import Communicator
from megakv.engine.engine import MegaKVEngine
from megakv.offload.host_memory import available_memory
from megakv.serving.pass_times import FIRST_CHUNK, GROWTH, PassSize, PassTimes
from megakv.serving.settings import ServingSettings

SHARE = 0.5
"""Part of the free memory that keys and values may take, where nothing else is said."""


@dataclass(frozen=True)
class KVMemory:
    """Space for so many `tokens`; each takes `token_bytes`, over all ranks.

    Where what is kept of caches does not lie in their memory, there is space for so many `copies` beside them.
    """

    tokens: int
    token_bytes: int
    copies: int | None = None

    def on_disk(self, gigabytes: float) -> int:
        """Tokens for which a store of that size has space."""
        return int(gigabytes * 1e9) // max(1, self.token_bytes)


def measured_memory(comm: Communicator, nbytes: float, tokens: int | None, room: int | None) -> KVMemory:
    """For so many `tokens`, or as many as half of every rank's free memory holds, where a token takes so much on this
    rank; or for as many as all have `room` for in tiers, and copies of no more in that memory. Collective.

    A ValueError where so many `tokens` have no room there.
    """
    device = comm.mesh.device
    if device.type == "cpu" or room is not None:
        free = (available_memory() or psutil.virtual_memory().available) // comm.watch.neighbours
    else:
        free = int(get_accelerator().available_memory(device.index))
    ranks = comm.gather_objects((nbytes, int(SHARE * free / max(1.0, nbytes)), room))
    fits, token_bytes = min(fits for _, fits, _ in ranks), round(sum(each for each, _, _ in ranks))
    if rooms := [own for _, _, own in ranks if own is not None]:
        wanted = min(rooms) if tokens is None else tokens
        if not 0 < wanted <= min(rooms):
            raise ValueError(
                f"megakv.offload.host_gb and disk_gb have room for {min(rooms)} tokens of max_sequences, each of which "
                f"takes pages of its own, and kv_tokens = {tokens or 'as many as fit'}: raise them, or lower "
                "kv_tokens, max_sequences or megakv.offload.page_kib"
            )
        return KVMemory(wanted, token_bytes, min(fits, wanted))
    if tokens is None and fits < 1:
        raise MegaKVError("no memory is left for keys and values: set kv_tokens, or free some")
    return KVMemory(fits if tokens is None else tokens, token_bytes)


def memory_in_use(device: torch.device) -> int:
    """Bytes of this rank's device, or of its process where that is the processor."""
    if device.type != "cpu":
        return int(get_accelerator().memory_allocated(device.index))
    return int(psutil.Process().memory_info().rss)


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
    """The memory that there is, and how long passes took."""

    kv: KVMemory
    times: PassTimes


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
        _time_candidates(engine, settings, kv, times, step_s)
        _time_sequences(engine, settings, kv, times, step_s)
        _time_prompts(engine, settings, kv, times, step_s)
    except PeerLostError:
        raise
    except (MegaKVError, RuntimeError) as error:
        # Whoever asks for as much will be told; there may be many who do not.
        logger.warning("a pass before the first request failed: %s", error)
    return FirstPasses(kv, times)


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


def _time_candidates(
    engine: MegaKVEngine, settings: ServingSettings, kv: KVMemory, times: PassTimes, step_s: float
) -> None:
    """A token with candidates for those that follow, as many as there may be and a single one."""
    most = settings.prompt_lookup
    length = TOKENS + 1 + most
    if not most or kv.tokens < length or not (_takes(engine, length) and _is_short(engine, (1 + most) * step_s)):
        return
    with ExitStack() as stack:
        cache = _new_cache(engine)
        stack.callback(cache.reset)
        _seconds(engine, [cache], TOKENS)
        # What a first one makes is there for all others.
        for number, count in enumerate((most, most, most, 1)):
            seconds = _seconds(engine, [cache], 1 + count, candidates=(count,))
            cache.cut_back(TOKENS)
            if number:
                times.add(PassSize(sequences=1, context=TOKENS, candidates=count), seconds)


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


def _seconds(engine: MegaKVEngine, caches: Sequence[ShardedCache], new: int, candidates: Sequence[int] = ()) -> float:
    """What a pass over so many new tokens of each takes, of which some may be candidates."""
    began = time.perf_counter()
    engine.extend(caches, [[0] * new for _ in caches], candidates=candidates)
    return time.perf_counter() - began
