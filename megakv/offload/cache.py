"""A sharded cache whose layers lie in tiers off the accelerator, and are attended to group by group of sequences.

In decoding, projections and feed-forward are computed for the whole batch at once; only attention, for which keys and
values must be on the accelerator, goes column by column (KVPR Figure 4). Layers go so as a whole where there are more
tokens (`LayerColumns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.cache.cache import ShardedCache
from megakv.cache.dense import DenseStore
from megakv.cache.ragged import Rotate
from megakv.cache.store import KVStore
from megakv.distributed.sharding import IntArray, Layout, TokenBlock, TokenTable, chunk_bounds
from megakv.fairkv.attention import RaggedPart
from megakv.offload.bodies import TieredBody
from megakv.offload.store import StoreEngine, TieredStore
from megakv.offload.turn_store import CompressedStore, TurnStore


class CacheEngine(StoreEngine, Protocol):
    """What a cache tells the engine that it belongs to (see `Offloader`)."""

    def begin(self, cache: OffloadedCache, layout: Layout, *, stays: bool, turn: bool) -> None: ...
    def columns(self, cache: OffloadedCache, call: AttentionCall) -> Iterator[AttentionCall]: ...
    def end(self, cache: OffloadedCache) -> None: ...
    def abandon(self, cache: OffloadedCache) -> None: ...


class OffloadedCache(ShardedCache):
    """Tells the engine of passes, so that it can bring layers before they are asked for."""

    def __init__(
        self,
        layers: int,
        *,
        size: int,
        rank: int,
        engine: CacheEngine,
        compresses: bool = False,
        rotate: Callable[[int, Tensor, int], Tensor] | None = None,
    ):
        def new_store(layer: int, prompts: IntArray) -> KVStore:
            return TieredStore(layer, len(prompts), engine)

        super().__init__(layers, size=size, rank=rank, new_store=new_store, compresses=compresses, rotate=rotate)
        self._engine = engine

    def _empty(self) -> OffloadedCache:
        return OffloadedCache(
            len(self._stores),
            size=self.size,
            rank=self.rank,
            engine=self._engine,
            compresses=self.compresses,
            rotate=self._rotate,
        )

    def _compressing(self, store: Any, rotate: Rotate | None) -> CompressedStore:
        # Beside what heads keep, unused capacity of a turn's rows counts.
        batch = self.table.batch
        return CompressedStore(batch, TurnStore(store, DenseStore(batch, least_growth=2)), rotate)

    def begin(
        self, layout: Layout, batch: int, *, prompts: int | None = None, stays: bool = True, turn: bool = False
    ) -> None:
        super().begin(layout, batch, prompts=prompts)
        self._engine.begin(self, layout, stays=stays, turn=turn)

    def commit(self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None) -> None:
        super().commit(slots, compressed=compressed, first=first)
        self._engine.end(self)

    def tier(self, layer: int) -> TieredStore:
        """The rows of a layer that lie in tiers whole, with all heads."""
        store: Any = self.store(layer)
        tier: TieredStore = store.tier
        return tier

    def bodies(self, layer: int, group: range) -> list[TieredBody]:
        """What compression has kept of some sequences in a layer, each body once."""
        if not self.compresses:
            return []
        store: Any = self.store(layer)
        return list(dict.fromkeys(body for sequence in group for body in store.bodies(sequence)))

    def left(self, layer: int, group: range) -> list[RaggedPart]:
        """What compression has kept of some sequences in a layer and the host attends to."""
        store: Any = self.store(layer)
        columns = (self.table.slots, self.table.positions)
        return [
            part
            for sequence in group
            for part in store.left(sequence, *(column(self.rank, sequence) for column in columns))
        ]

    def kept(self, group: range) -> tuple[float, float]:
        """As much as how many tokens of all heads that is, in the mean of all layers; how much of it lies on disk."""
        if not self.holds_compressed:
            return 0.0, 0.0
        found = [body for layer in range(len(self._stores)) for body in self.bodies(layer, group)]
        tokens = sum(body.tokens / len(body.counts) for body in found)
        in_memory = sum(body.in_memory / len(body.counts) for body in found)
        return tokens / len(self._stores), (tokens - in_memory) / len(self._stores)

    def page_bytes(self) -> tuple[int, int]:
        """Bytes of pages: of rows, and of what compression kept."""
        layers = [layer for layer, store in enumerate(self._stores) if store is not None]
        bodies = (body for layer in layers for body in self.bodies(layer, range(self.table.batch)))
        return sum(self.tier(layer).nbytes() for layer in layers), sum(body.page_bytes for body in bodies)

    def uncompressed(self) -> TokenTable:
        """The tokens of those rows."""
        return self.table.without(self.compressed) if self.holds_compressed else self.table

    def divided(self, call: AttentionCall) -> Iterable[AttentionCall]:
        return self._engine.columns(self, call)

    def cut_back(self, slots: int) -> None:
        self._engine.abandon(self)
        super().cut_back(slots)


def is_single(layout: Layout) -> bool:
    """Whether a pass has no more than one token of each sequence."""
    return layout.wanted is None and all(int(np.diff(block.bounds).max(initial=0)) <= 1 for block in layout.tokens)


def groups_of(layout: Layout, count: int) -> list[range]:
    """Consecutive sequences in at most `count` groups of nearly equal size.

    With context parallelism one where any sequence has several tokens: ranks exchange a layer's rows whole.
    """
    batch = layout.tokens[0].batch
    divided = is_single(layout) or layout.size == 1
    return [range(*bounds) for bounds in pairwise(chunk_bounds(batch, min(count, batch) if divided else 1).tolist())]


def group_layout(layout: Layout, group: range) -> Layout:
    """The tokens of some consecutive sequences; all others seem to have none."""
    runs = [_rows(block, group) for block in layout.tokens]
    wanted = None
    if layout.wanted is not None:
        each = zip(layout.wanted, runs, strict=True)
        wanted = tuple(rows[(rows >= run.start) & (rows < run.stop)] - run.start for rows, run in each)
    return replace(layout, tokens=_taken(layout.tokens, group), stored=_taken(layout.stored, group), wanted=wanted)


def group_call(call: AttentionCall, group: range) -> AttentionCall:
    """The part of a layer's attention that belongs to some consecutive sequences; all others seem to have no tokens."""
    queries, rows = _rows(call.tokens, group), _rows(call.layout.tokens[call.rank], group)
    return replace(
        call,
        q_HLD=call.q_HLD[:, queries],
        k_KLD=call.k_KLD[:, rows],
        v_KLD=call.v_KLD[:, rows],
        layout=group_layout(call.layout, group),
        table=call.table.only(group),
    )


def _rows(block: TokenBlock, group: range) -> slice:
    """Where the tokens of some consecutive sequences lie in the packed row."""
    return slice(int(block.bounds[group.start]), int(block.bounds[group.stop]))


def _taken(blocks: Sequence[TokenBlock], group: range) -> tuple[TokenBlock, ...]:
    return tuple(block.take(np.arange(*block.bounds[[group.start, group.stop]])) for block in blocks)
