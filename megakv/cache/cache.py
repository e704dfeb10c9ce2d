"""The transformers cache of a context-parallel model: one table of tokens over all ranks, one store per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from megakv.attention.compiled import RowTables
from megakv.cache.dense import DenseStore
from megakv.cache.notes import Notes
from megakv.cache.places import Places
from megakv.cache.ragged import RaggedStore, Rotate
from megakv.cache.segments import first_held
from megakv.cache.span import CacheSpan
from megakv.cache.store import KVStore, Pair, SpanStore, TurnStore
from megakv.cache.transformers_cache import TransformersCache
from megakv.distributed.sharding import IntArray, Layout, TokenTable

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall


class ShardedCache(TransformersCache):
    """A cache of global length whose keys and values are spread over the context-parallel ranks.

    `size` and `rank` are the context-parallel degree and this rank's index in it. `new_store` makes the store of a
    layer for sequences of prompts (`TokenTable.prompts`); with `compresses`, compressed tokens are held beside it.
    `shares_heads` says whether any rank holds only some tokens of a head that others hold too, and `rotate` moves a
    layer's keys ``[n, D]`` on by so many positions.

    `length` are the slots that are cached. `compressed` has by sequence the ranges of slots that were compressed,
    ascending: not all of their tokens are held any more.

    `windows` are those of the layers, as far as their attention has shown any. What a layer's window has left behind,
    and no query will see again, is freed when a pass has succeeded: all before slot ``gone[layer]``, on every rank.
    Then the cache cannot be cut back to less than `reach` slots, unless to none. Nor can it to what was there before
    sequences were compressed again. Where the cache does not forget (`forgets`), nothing is freed.
    """

    outlives = False
    """Whether what is cached is of use after a pass that failed: then no rank may keep one that another has not."""

    def __init__(
        self,
        layers: int,
        *,
        size: int,
        rank: int,
        new_store: Callable[[int, IntArray], TurnStore] = lambda layer, prompts: DenseStore(len(prompts)),
        compresses: bool = False,
        shares_heads: bool = False,
        rotate: Callable[[int, Tensor, int], Tensor] | None = None,
    ):
        super().__init__(layers)
        self.size, self.rank = size, rank
        self.compressed: list[list[tuple[int, int]]] = []
        self.windows: list[int | None] = [None] * layers
        self.gone = [0] * layers
        self.forgets, self.compresses = True, compresses
        self._new_store, self._shares_heads, self._rotate = new_store, shares_heads, rotate
        self.table = TokenTable(size, 0)
        self._held: list[KVStore | None] = [None] * layers
        self._places: Places | None = None
        # By layer and sequence; and those of a pass under way.
        self._notes: list[dict[int, Notes]] = [{} for _ in range(layers)]
        self._expected: Sequence[int] = ()
        self._new_notes: dict[int, dict[int, Notes]] = {}

    @property
    def batch_size(self) -> int:
        return self.table.batch if self.length else -1

    def pasts(self, batch: int) -> IntArray:
        """``[B]`` slots that are cached of each sequence of such a batch."""
        return np.full(batch, self.length)

    def begin(
        self, layout: Layout, batch: int, *, prompts: int | None = None, stays: bool = True, turn: bool = False
    ) -> None:
        """Register the tokens of a pass in the table, before its layers append their keys and values.

        The batch are copies of so many `prompts`, as many of each; by default it has no copies. `stays` says whether
        what is cached is attended to by the rank that holds it, and nowhere else; `turn` whether the pass belongs to a
        turn that may be compressed.
        """
        self.prepare(batch, prompts)
        self.table.extend(layout)

    def prepare(self, batch: int, prompts: int | None = None) -> None:
        """The same before any token is registered."""
        if self.length == 0:
            self.table = TokenTable(self.size, batch, prompts)
            self.compressed = [[] for _ in range(batch)]
            self.gone, self.reach = [0] * len(self), 0
            self._held, self._places = [None] * len(self), None
            self._notes = [{} for _ in range(len(self))]
        elif batch != self.table.batch:
            raise ValueError(
                f"input_ids has {batch} rows but the cache holds {self.table.batch} sequences; "
                "start a new session or pass as many rows"
            )

    def evicts(self, slots: int) -> None:
        """The pass that has begun, and ends at a slot, compresses sequences again: there is no way back once it has."""
        self.reach = slots

    def evicted(self, sequences: Sequence[int]) -> None:
        """It has ended."""
        for sequence in sequences:
            self.compressed[sequence] = [(0, self.length)]

    def notes(self, layer: int) -> Mapping[int, Notes]:
        """What was noted of a layer's attention, by sequence."""
        return self._new_notes.get(layer, self._notes[layer])

    def note(self, layer: int, notes: Mapping[int, Notes]) -> None:
        """Put that in the place of what was noted before; it holds when the pass has succeeded."""
        self._new_notes[layer] = dict(notes)

    def commit(
        self, slots: int, *, compressed: Sequence[int] = (), first: int | None = None, proposed: int = 0
    ) -> None:
        """End a pass, after which the cache spans so many slots, of which the last `proposed` may be taken back.

        In `compressed` sequences a turn that ended with it was compressed; `first` is that turn's first slot, the
        pass's own if None. Where a turn goes on that may be compressed, `compressed` is empty, `first` is not None.
        """
        for sequence in compressed:
            self.compressed[sequence].append((self.length if first is None else first, slots))
        self.length = slots
        for layer, notes in self._new_notes.items():
            self._notes[layer] = notes
        self._new_notes.clear()
        # What comes of a turn may be compressed together with what came.
        for layer in range(len(self) if self.forgets else 0):
            self._leave_behind(layer, slots - proposed if compressed or first is None else first)

    def attended(self, layer: int, slots: int) -> None:
        """A layer has attended in a pass that ends at a slot, of which nothing is to be compressed.

        Where nothing was cached before, no more than the window stays at once: if the pass fails, nothing is cached.
        """
        if self.length == 0 and self.forgets:
            self._leave_behind(layer, slots)

    def _leave_behind(self, layer: int, slots: int) -> None:
        """Forget what the window of later queries leaves out, of the tokens before a slot."""
        window = self.windows[layer]
        first = first_held(window, slots, self.gone[layer])
        if window is None or first == self.gone[layer] or (store := self._stores[layer]) is None:
            return
        self.gone[layer], self.reach = first, max(self.reach, first + window - 1)
        for sequence in range(self.table.batch):
            store.forget(sequence, int(np.searchsorted(self.table.slots(self.rank, sequence), first)))

    @property
    def holds_compressed(self) -> bool:
        """Whether tokens of any sequence were compressed."""
        return any(self.compressed)

    @property
    def _stores(self) -> list[KVStore | None]:
        """Stores by layer, those that there are: they know of all rows."""
        if (places := self._places) is not None:
            self._places = None
            places.settle()
        return self._held

    def places(self, new: Sequence[int], like: Pair) -> RowTables | None:
        """Where the rows of all layers lie, with places for so many new ones of each sequence, which all layers have to
        fill then; None, with nothing done, where each layer's store must be asked.
        """
        if (lent := self.lent(new, like)) is None:
            return None
        lent.take(new)
        return lent.tables()

    def lent(self, new: Sequence[int], like: Pair) -> Places | None:
        """Places for at least so many, which stay those of this cache until something else is asked of its stores."""
        if self._places is None or not self._places.has(new, like[0].dtype):
            stores = [self.store(layer) for layer in range(len(self))]
            self._places = Places.of(stores, new, like)
        return self._places

    def store(self, layer: int) -> KVStore:
        """The store of one layer, created at its first use."""
        store = self._stores[layer]
        if store is None:
            store = rows = self._new_store(layer, self.table.prompts)
            if self.compresses:
                store = self._compressing(rows, None if self._rotate is None else partial(self._rotate, layer))
            self._held[layer] = store
            if self._expected:
                cast(SpanStore, store).preallocate(0, self._expected[layer])
        return store

    def preallocate(self, slots: Sequence[int]) -> None:
        """Memory may be taken for so many slots of one sequence at once, layer by layer."""
        if self.compresses or self._shares_heads:
            return
        self._expected = [-(-each // self.size) + self.size for each in slots]
        for store, rows in zip(self._stores, self._expected, strict=True):
            if store is not None:
                cast(SpanStore, store).preallocate(0, rows)

    def _compressing(self, store: TurnStore, rotate: Rotate | None) -> KVStore:
        """The store of a layer that may be compressed, around that of all other rows."""
        return RaggedStore(self.table.batch, store, rotate)

    def span(self, first: int, last: int) -> CacheSpan:
        """Slots ``[first, last)`` of the one sequence, in shared memory; a ValueError where they are not held whole."""
        there = self.table.batch == 1 and 0 <= first <= last <= self.length
        if not there or self.compresses or self._shares_heads or max(self.gone) > first:
            raise ValueError(f"slots {first} to {last} are not there, or were compressed, shared, or left behind")
        blocks = tuple(block.take((block.slot >= first) & (block.slot < last)) for block in self.table.tokens())
        start = int(np.searchsorted(self.table.slots(self.rank, 0), first))
        stop = start + len(blocks[self.rank])
        stores = [cast(SpanStore, self.store(layer)) for layer in range(len(self))] if stop > start else []
        layers = [store.share(0, start, stop) for store in stores] or [()] * len(self)
        return CacheSpan.of(Layout(blocks, blocks), first, last, self.rank, layers)

    def append_span(self, span: CacheSpan) -> None:
        """Go on, in a cache of one sequence, with slots that follow its own, which are not copied.

        A ValueError where they do not fit, which leaves the cache as it was.
        """
        span.check_follows(self.length, rank=self.rank, size=self.size, layers=len(self))
        # No pass begins: nothing is brought for one.
        ShardedCache.begin(self, span.layout, 1)
        try:
            for layer, runs in enumerate(span.layers):
                if runs:
                    cast(SpanStore, self.store(layer)).append_shared(0, runs)
        except BaseException:
            self.cut_back(self.length)
            raise
        ShardedCache.commit(self, span.last)

    def fork(self) -> ShardedCache:
        """A cache with the same tokens, sharing memory."""
        twin = self._empty()
        twin.length, twin.compressed = self.length, [list(ranges) for ranges in self.compressed]
        twin.windows, twin.gone, twin.reach = list(self.windows), list(self.gone), self.reach
        twin.forgets, twin.table = self.forgets, self.table.fork()
        twin._held = [None if store is None else store.fork() for store in self._stores]
        twin._notes = [dict(notes) for notes in self._notes]
        return twin

    def _empty(self) -> ShardedCache:
        return ShardedCache(
            len(self),
            size=self.size,
            rank=self.rank,
            new_store=self._new_store,
            compresses=self.compresses,
            shares_heads=self._shares_heads,
            rotate=self._rotate,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCache:
        # What the cache needs of its engine, such as threads and pages, cannot be copied and need not be.
        return self.fork()

    def nbytes(self) -> int:
        """Bytes of keys and values held on this rank, and of what was noted of their attention."""
        notes = {id(note): note for layer in self._notes for note in layer.values()}
        stores = sum(store.nbytes() for store in filter(None, self._stores))
        return stores + sum(note.nbytes() for note in notes.values())

    def head_tokens(self) -> list[list[int]]:
        """``[layer][KV head]`` tokens that this rank's heads hold, over all sequences; empty if it is all of them."""
        if not (self.holds_compressed or self._shares_heads):
            return []
        result: list[list[int]] = []
        for store in self._stores:
            rows = () if store is None else map(store.kept, range(self.table.batch))
            held = [counts for counts in rows if len(counts)]
            result.append(np.sum(held, axis=0).tolist() if held else [])
        return result

    def divided(self, call: AttentionCall) -> Iterable[AttentionCall]:
        """A layer's attention in the parts that are computed one behind the other, in the order of their rows."""
        return (call,)

    def undo(self) -> None:
        """Forget the tokens of a pass that failed half-way."""
        self.cut_back(self.length)

    def cut_back(self, slots: int) -> None:
        """Forget all tokens at `slots` and beyond.

        All are forgotten where what would stay sees some that a window has left behind, or that were evicted.
        """
        self._new_notes.clear()
        if (slots := slots if slots >= self.reach else 0) == 0:
            self.gone, self.reach = [0] * len(self), 0
        self.length = min(self.length, slots)
        self.compressed = [
            [(first, min(last, slots)) for first, last in ranges if first < slots] for ranges in self.compressed
        ]
        self._notes = [{row: found.below(slots) for row, found in notes.items() if slots} for notes in self._notes]
        self.table.crop(slots)
        lengths = self.table.counts()[self.rank].tolist()
        for store in filter(None, self._stores):
            for sequence, length in enumerate(lengths):
                store.crop(sequence, length)

    def _reindex(self, index: list[int]) -> None:
        self.table.reorder(index)
        self.compressed = [list(self.compressed[source]) for source in index]
        self._notes = [
            {row: notes[source] for row, source in enumerate(index) if source in notes} for notes in self._notes
        ]
        for store in filter(None, self._stores):
            store.reorder(index)
