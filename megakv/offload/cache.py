"""A sharded cache whose layers lie in tiers off the accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import Layout
from megakv.offload.store import TieredStore

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.offload.runtime import Offloader


class OffloadedCache(ShardedCache):
    """Tells the offload engine of passes, so that it can bring layers before they are asked for.

    Parameters
    ----------
    layers, size, rank : int
        As for `ShardedCache`.
    offloader : Offloader
    """

    compressible = False

    def __init__(self, layers: int, *, size: int, rank: int, offloader: Offloader):
        super().__init__(layers, size=size, rank=rank)
        self._offloader = offloader

    def begin(self, layout: Layout, batch: int, *, stays: bool = True) -> None:
        super().begin(layout, batch)
        self._offloader.begin(self, layout, stays=stays)

    def commit(self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None) -> None:
        super().commit(slots, compressed=compressed, first=first)
        self._offloader.end(self)

    def store(self, layer: int) -> TieredStore:
        store = self._stores[layer]
        if store is None:
            store = self._stores[layer] = TieredStore(layer, self.table.batch, self._offloader)
        assert isinstance(store, TieredStore)
        return store

    def divided(self, call: AttentionCall) -> Iterable[AttentionCall]:
        return self._offloader.columns(self, call)

    def fork(self) -> OffloadedCache:
        twin = OffloadedCache(len(self._stores), size=self.size, rank=self.rank, offloader=self._offloader)
        twin.length, twin.compressed = self.length, [list(ranges) for ranges in self.compressed]
        twin.table = self.table.fork()
        twin._stores = [None if store is None else store.fork() for store in self._stores]
        return twin

    def cut_back(self, slots: int) -> None:
        self._offloader.abandon(self)
        super().cut_back(slots)
