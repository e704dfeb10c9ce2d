"""A sharded cache whose layers lie in tiers off the accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import Layout
from megakv.offload.store import StoreEngine, TieredStore

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall


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
        super().__init__(layers, size=size, rank=rank)
        self._engine = engine

    def begin(self, layout: Layout, batch: int, *, stays: bool = True) -> None:
        super().begin(layout, batch)
        self._engine.begin(self, layout, stays=stays)

    def commit(self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None) -> None:
        super().commit(slots, compressed=compressed, first=first)
        self._engine.end(self)

    def store(self, layer: int) -> TieredStore:
        store = self._stores[layer]
        if store is None:
            store = self._stores[layer] = TieredStore(layer, self.table.batch, self._engine)
        assert isinstance(store, TieredStore)
        return store

    def divided(self, call: AttentionCall) -> Iterable[AttentionCall]:
        return self._engine.columns(self, call)

    def fork(self) -> OffloadedCache:
        twin = OffloadedCache(len(self._stores), size=self.size, rank=self.rank, engine=self._engine)
        twin.length, twin.compressed = self.length, [list(ranges) for ranges in self.compressed]
        twin.table = self.table.fork()
        twin._stores = [None if store is None else store.fork() for store in self._stores]
        return twin

    def cut_back(self, slots: int) -> None:
        self._engine.abandon(self)
        super().cut_back(slots)
