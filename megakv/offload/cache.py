"""A sharded cache whose layers lie in tiers off the accelerator, and are attended to group by group of sequences.

In decoding, projections and feed-forward are computed for the whole batch at once; only attention, for which keys and
values must be on the accelerator, goes column by column (KVPR Figure 4). Layers go so as a whole where there are more
tokens (`LayerColumns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.cache.cache import ShardedCache
from megakv.cache.ragged import Rotate
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.shares import HeadShares
from megakv.cache.store import KVStore
from megakv.distributed.sharding import IntArray, Layout, TokenBlock, TokenTable, chunk_bounds
from megakv.fairkv.replicas import HeadReplicas
from megakv.offload.bodies import CompressedStore, TieredBody
from megakv.offload.shared_tiers import SharedTiers
from megakv.offload.store import Strip, TieredStore
from megakv.offload.tiered_rows import StoreEngine


class CacheEngine(StoreEngine, Protocol):
    """What a cache tells the engine that it belongs to (see `Offloader`)."""

    def new_cache(self, layers: int) -> OffloadedCache: ...
    def begin(self, cache: OffloadedCache, layout: Layout, *, stays: bool, turn: bool) -> None: ...
    def columns(self, cache: OffloadedCache, call: AttentionCall) -> Iterator[AttentionCall]: ...
    def end(self, cache: OffloadedCache) -> None: ...
    def abandon(self, cache: OffloadedCache) -> None: ...


class References(NamedTuple):
    """Stores that stand for those of all layers, with rows as wide as any: of those with rows of all tokens, and all.
    In the mean of all layers a token has `row_bytes`.
    """

    whole: TieredStore
    sample: TieredStore
    row_bytes: Callable[[], float]


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
        replicas: HeadReplicas | None = None,
        rotate: Callable[[int, Tensor, int], Tensor] | None = None,
    ):
        def new_store(layer: int, prompts: IntArray) -> KVStore:
            shares = None if replicas is None else replicas.shares(layer)
            if shares is None:
                return TieredStore(layer, len(prompts), engine)
            return SharedTiers(layer, prompts, shares, engine)

        super().__init__(
            layers,
            size=size,
            rank=rank,
            new_store=new_store,
            compresses=compresses,
            shares_heads=replicas is not None,
            rotate=rotate,
        )
        self._engine, self._replicas = engine, replicas

    def _empty(self) -> OffloadedCache:
        cache = self._engine.new_cache(len(self._stores))
        cache.compresses = self.compresses
        return cache

    def _compressing(self, store: Any, rotate: Rotate | None) -> CompressedStore:
        return CompressedStore(self.table.batch, store, rotate)

    def begin(
        self, layout: Layout, batch: int, *, prompts: int | None = None, stays: bool = True, turn: bool = False
    ) -> None:
        super().begin(layout, batch, prompts=prompts)
        self._engine.begin(self, layout, stays=stays, turn=turn)

    def commit(
        self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None, proposed: int = 0
    ) -> None:
        super().commit(slots, compressed=compressed, first=first, proposed=proposed)
        self._engine.end(self)

    def _tiered(self, layer: int) -> TieredStore | SharedTiers | CompressedStore:
        return cast(TieredStore | SharedTiers | CompressedStore, self.store(layer))

    def tier(self, layer: int) -> TieredStore:
        """The rows of a layer that lie in tiers whole: all tokens, and all heads but those of several ranks."""
        return self._tiered(layer).tier

    def strips(self, layer: int) -> list[Strip]:
        """The tiers of a layer, that one first."""
        return self._tiered(layer).strips

    def set_format(self, layer: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Take the format of a layer's keys and values, of which there may be none."""
        self._tiered(layer).set_format(k_KSD, v_KSD)

    @property
    def heads(self) -> Sequence[Sequence[HeadShares | None]]:
        """Of each tensor-parallel rank, its KV heads of all layers; None stands for those of any layer, where all ranks
        have as many in all layers.
        """
        return [[None] * len(self._stores)] if self._replicas is None else self._replicas.everywhere

    def references(self, store: TieredStore) -> References:
        """What plans go by; a layer's store, where layers are alike."""
        if self._replicas is None:
            return References(store, store, partial(self.row_bytes, store))
        used = [layer for layer, own in enumerate(self._stores) if own is not None]
        strips = [self.strips(layer) for layer in used]

        def widest(stores: Iterable[TieredStore]) -> TieredStore:
            known = (own for own in stores if own.known)
            return max(known, key=lambda own: own.row_width, default=store)

        sample = widest(strip.store for own in strips for strip in own)
        return References(widest(own[0].store for own in strips), sample, partial(self.row_bytes, sample))

    def row_bytes(self, store: TieredStore) -> float:
        """Bytes of a token's keys and values in the mean of all layers, given a store that has some."""
        if self._replicas is None:
            return store.row_bytes
        layers = range(len(self._stores))
        heads = sum(sum(self._replicas.held(layer).whole_heads) for layer in layers) / len(layers)
        # A rank may have copies alone whose tokens are all with others.
        return store.body_row_bytes * heads or 1.0

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
        if not found:
            return 0.0, 0.0
        # Heads are not as many in all layers, and of those that other ranks have, too, all tokens are no whole head's.
        token = len(self._stores) * self.row_bytes(self.tier(found[0].layer))
        head = found[0].token_bytes
        tokens, in_memory = (sum(getattr(body, name) for body in found) for name in ("tokens", "in_memory"))
        return tokens * head / token, (tokens - in_memory) * head / token

    def page_bytes(self) -> tuple[int, int]:
        """Bytes of pages: of rows, and of what compression kept."""
        layers = [layer for layer, store in enumerate(self._stores) if store is not None]
        bodies = (body for layer in layers for body in self.bodies(layer, range(self.table.batch)))
        rows = sum(strip.store.nbytes() for layer in layers for strip in self.strips(layer))
        return rows, sum(body.page_bytes for body in bodies)

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
