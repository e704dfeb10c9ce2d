"""A sharded cache whose layers lie in tiers off the accelerator, and are attended to group by group of sequences.

Projections and feed-forward are computed for the whole batch at once; only attention, for which keys and values must be
on the accelerator, goes column by column (KVPR Figure 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, cast

import numpy as np

from megakv.attention.method import AttentionCall
from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import Layout, chunk_bounds
from megakv.offload.store import StoreEngine, TieredStore


class CacheEngine(StoreEngine, Protocol):
    """What a cache tells the engine that it belongs to (see `Offloader`)."""

    def begin(self, cache: OffloadedCache, layout: Layout, *, stays: bool) -> None: ...
    def columns(self, cache: OffloadedCache, call: AttentionCall) -> Iterator[AttentionCall]: ...
    def end(self, cache: OffloadedCache) -> None: ...
    def abandon(self, cache: OffloadedCache) -> None: ...


class OffloadedCache(ShardedCache):
    """Tells the engine of passes, so that it can bring layers before they are asked for."""

    compressible = False

    def __init__(self, layers: int, *, size: int, rank: int, engine: CacheEngine):
        super().__init__(layers, size=size, rank=rank, new_store=lambda layer, batch: TieredStore(layer, batch, engine))
        self._engine = engine

    def _empty(self) -> OffloadedCache:
        return OffloadedCache(len(self._stores), size=self.size, rank=self.rank, engine=self._engine)

    def begin(self, layout: Layout, batch: int, *, stays: bool = True) -> None:
        super().begin(layout, batch)
        self._engine.begin(self, layout, stays=stays)

    def commit(self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None) -> None:
        super().commit(slots, compressed=compressed, first=first)
        self._engine.end(self)

    def store(self, layer: int) -> TieredStore:
        return cast(TieredStore, super().store(layer))

    def divided(self, call: AttentionCall) -> Iterable[AttentionCall]:
        return self._engine.columns(self, call)

    def cut_back(self, slots: int) -> None:
        self._engine.abandon(self)
        super().cut_back(slots)


def groups_of(layout: Layout, count: int) -> list[range]:
    """Consecutive sequences in at most `count` groups of nearly equal size; one where any has several tokens.

    Column by column is for decoding: what else is computed over a cache takes its layers whole.
    """
    batch = layout.tokens[0].batch
    single = layout.wanted is None and all(int(np.diff(block.bounds).max(initial=0)) <= 1 for block in layout.tokens)
    return [range(*bounds) for bounds in pairwise(chunk_bounds(batch, min(count, batch) if single else 1).tolist())]


def group_call(call: AttentionCall, group: range) -> AttentionCall:
    """The part of a layer's attention that belongs to some consecutive sequences; all others seem to have no tokens."""
    tokens, stored = (
        tuple(block.take(np.arange(block.bounds[group.start], block.bounds[group.stop])) for block in blocks)
        for blocks in (call.layout.tokens, call.layout.stored)
    )
    rows = slice(int(call.tokens.bounds[group.start]), int(call.tokens.bounds[group.stop]))
    return replace(
        call,
        q_HLD=call.q_HLD[:, rows],
        k_KLD=call.k_KLD[:, rows],
        v_KLD=call.v_KLD[:, rows],
        layout=replace(call.layout, tokens=tokens, stored=stored),
        table=call.table.only(group),
    )
