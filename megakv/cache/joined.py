"""Several caches of one sequence each, as one of a batch for the time of a pass: each sequence goes on where it is.

A store of a layer of all adds no verb; the stores go on by themselves, and it cannot be forked or put in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megakv.attention.compiled import RowTable, RowTables
from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.cache.places import Places, tables_of
from megakv.cache.store import KVStore, Pair
from megakv.distributed.sharding import IntArray, Layout, TokenTable

INSEPARABLE = "caches that go through one pass stay in their order; cut back, fork or reorder each by itself"


class JoinedStore(KVStore):
    """A layer's stores of several caches: sequence b is the one sequence of the b-th."""

    def __init__(self, stores: Sequence[KVStore]):
        self._stores = stores

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        for store in self._stores:
            store.begin(complete=complete, turn=turn, ends=ends)

    def append(self, sequence: int | Sequence[int], k_KSD: Tensor, v_KSD: Tensor) -> None:
        if isinstance(sequence, Sequence):
            super().append(sequence, k_KSD, v_KSD)
        else:
            self._stores[sequence].append(0, k_KSD, v_KSD)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        return self._stores[sequence].reserve(0, rows, k_KSD, v_KSD)

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None:
        tables = list[RowTable]()
        for sequence, store in enumerate(self._stores):
            table = store.in_place(new[sequence : sequence + 1], k_KLD, v_KLD)
            if table is None:
                for other in range(sequence):
                    self._stores[other].crop(0, self._stores[other].rows(0) - new[other])
                return None
            tables.append(table)
        return tables[0] if len(tables) == 1 else RowTable.joined(tables)

    def runs(self, sequence: int) -> Sequence[Pair]:
        return self._stores[sequence].runs(0)

    def finish(self) -> None:
        for store in self._stores:
            store.finish()

    def rows(self, sequence: int) -> int:
        return self._stores[sequence].rows(0)

    def nbytes(self) -> int:
        return sum(store.nbytes() for store in self._stores)

    def crop(self, sequence: int, length: int) -> None:
        self._stores[sequence].crop(0, length)

    def reorder(self, index: list[int]) -> None:
        raise MegaKVError(INSEPARABLE)

    def fork(self) -> KVStore:
        raise MegaKVError(INSEPARABLE)


class JoinedCache(ShardedCache):
    """Caches of one sequence each, of any lengths, in one pass.

    Slots stay each sequence's own, so that causality and windows are what they are without the others. What the pass
    adds is the members'; if it fails they are as before.
    """

    outlives = True

    def __init__(self, members: Sequence[ShardedCache]):
        first = members[0]
        super().__init__(len(first), size=first.size, rank=first.rank)
        self.members = members
        self._ends: list[int] = []
        self._forgetful: list[tuple[ShardedCache, int]] = []
        # Layers of the pass so far.
        self._attended: list[int] = []
        self._join()

    def _join(self) -> None:
        empty = TokenTable(self.size, 1)
        self.table = TokenTable.joined([member.table if member.length else empty for member in self.members])
        self.length = max(member.length for member in self.members)
        self.compressed = [ranges for member in self.members for ranges in member.compressed or [[]]]

    def pasts(self, batch: int) -> IntArray:
        assert batch == len(self.members)
        return np.array([member.length for member in self.members])

    def begin(
        self, layout: Layout, batch: int, *, prompts: int | None = None, stays: bool = True, turn: bool = False
    ) -> None:
        pasts = self.pasts(batch)
        counts = np.sum([np.diff(block.bounds) for block in layout.stored], axis=0)
        self._ends = (pasts + counts).tolist()
        self._forgetful = [pair for pair in zip(self.members, self._ends, strict=True) if pair[0].forgets]
        for member in self.members:
            member.prepare(1)
        self.table = TokenTable.joined([member.table for member in self.members])
        self.table.extend(layout)
        self._attended.clear()
        self._held = [None] * len(self)

    def store(self, layer: int) -> KVStore:
        store = self._held[layer]
        if store is None:
            store = self._held[layer] = JoinedStore([member.store(layer) for member in self.members])
        return store

    def places(self, new: Sequence[int], like: Pair) -> RowTables | None:
        lent = list[Places]()
        for member, rows in zip(self.members, new, strict=True):
            if (places := member.lent((rows,), like)) is None:
                return None
            lent.append(places)
        for places, rows in zip(lent, new, strict=True):
            places.take((rows,))
        # Members' stores do not know of them until they are asked for again.
        self._held = [None] * len(self)
        return tables_of(lent)

    def attended(self, layer: int, slots: int) -> None:
        self._attended.append(layer)
        for member, end in self._forgetful:
            member.windows[layer] = self.windows[layer]
            member.attended(layer, end)

    def commit(
        self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None, proposed: int = 0
    ) -> None:
        windows = [(layer, self.windows[layer]) for layer in self._attended if self.windows[layer] is not None]
        for member, end in zip(self.members, self._ends, strict=True):
            for layer, window in windows:
                member.windows[layer] = window
            member.commit(end, proposed=proposed)
        self._join()

    def undo(self) -> None:
        for member in self.members:
            member.undo()
        self._join()

    def cut_back(self, slots: int) -> None:
        raise MegaKVError(INSEPARABLE)

    def fork(self) -> ShardedCache:
        raise MegaKVError(INSEPARABLE)

    def _reindex(self, index: list[int]) -> None:
        raise MegaKVError(INSEPARABLE)
