"""Uncompressed keys and values of a layer whose KV heads are partly shared with other tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megakv.attention.part import KVPart, Part
from megakv.attention.partial import PartialAttention
from megakv.cache.stores import GROWTH_MINIMUM, DenseStore, KVStore
from megakv.device import upload
from megakv.distributed.sharding import IntArray, TokenColumn
from megakv.fairkv.attention import of_heads
from megakv.fairkv.splitting import HeadShares
from megakv.tensor_files import StreamedTensor

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.distributed.sharding import TokenBlock

Pair = tuple[Tensor, Tensor]
Dealt = tuple[IntArray, Pair]
"""Slots of tokens, and their keys and values."""


@dataclass(frozen=True)
class DividedPart:
    """One sequence's keys and values, other tokens in other heads (see `megakv.attention.part.Part`).

    Every pair of a query and a key is counted on one replica of its head only: with a token of an earlier pass on that
    which keeps it; with a token of this pass on that which has the query.

    `held` is what is kept of earlier passes, or was dealt out already: of the heads of this rank alone, then of each
    shared one; None where there is nothing. `new` are tokens of this pass, of all heads.
    """

    sequence: int
    shares: HeadShares
    held: tuple[KVPart | None, ...]
    new: KVPart | None

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to all heads' tokens and merge."""
        q_HLD = partial.q_HLD
        heads, rows = q_HLD.shape[:2]
        group = heads // self.shares.kv_heads
        present = self.new or next((part for part in self.held if part is not None), None)
        if not rows or present is None:
            return
        value_dim = present.v_KSD.shape[-1]
        dtype = torch.promote_types(q_HLD.dtype, torch.float32)
        out = q_HLD.new_zeros((rows, heads, value_dim), dtype=dtype).transpose(0, 1)
        lse = q_HLD.new_full((heads, rows), -torch.inf, dtype=dtype)
        for index, held in enumerate(self.held):
            # Index 0 are the heads of this rank alone, index i + 1 is shared head i.
            first = 0 if index == 0 else self.shares.alone + index - 1
            last = self.shares.alone if index == 0 else first + 1
            if first == last:
                continue
            queries, kv_heads = slice(first * group, last * group), slice(first, last)
            part = of_heads(partial, queries, value_dim)
            if held is not None:
                held.add_to(part)
            if self.new is not None:
                own = None if index == 0 else self.shares.own_queries(index - 1, partial.q_slots)
                _add_rows(part, self.new, kv_heads, own)
            out[queries], lse[queries] = part.out, part.lse
        partial.merge(out, lse)


def _add_rows(partial: PartialAttention, new: KVPart, heads: slice, own: np.ndarray | None) -> None:
    """Attend to some heads of a part with all queries, or with this replica's own."""
    k_KSD, v_KSD = new.k_KSD[heads], new.v_KSD[heads]
    if own is None or own.all():
        partial.add(k_KSD, v_KSD, new.slots, new.positions)
        return
    if not own.any():
        return
    rows = upload(np.flatnonzero(own), k_KSD.device)
    some = PartialAttention(partial.q_HLD[:, rows], partial.q_slots[own], partial.scoring, v_KSD.shape[-1])
    some.add(k_KSD, v_KSD, new.slots, new.positions)
    out = some.out.new_zeros((partial.q_HLD.shape[0], len(own), v_KSD.shape[-1]))
    lse = some.lse.new_full(out.shape[:2], -torch.inf)
    out[:, rows], lse[:, rows] = some.out, some.lse
    partial.merge(out, lse)


class DividedStore:
    """Of a head that other ranks hold too, only this rank's share of the tokens (see `KVStore`).

    The tokens of a pass are there whole while it attends, since every replica has computed them anyway: they are dealt
    out when it releases the store, or compressed before. A single token is dealt out at once. Where a turn that may be
    compressed is read in several passes, its tokens stay whole until it ends.

    `complete` says that nothing was cached before the pass under way: then it attends on every replica to all there is,
    by whatever method, and what counts of it is decided afterwards.
    """

    def __init__(self, batch: int, shares: HeadShares, least_growth: int = GROWTH_MINIMUM):
        self.shares = shares
        self.complete, self._turn, self._ends = False, False, True
        self._least_growth = least_growth
        # Of the heads of this rank alone, then of each shared one.
        self._kept = [DenseStore(batch, least_growth) for _ in range(1 + len(shares.patterns))]
        self._rows = [[TokenColumn() for _ in range(batch)] for _ in shares.patterns]
        self._given = [0] * batch
        self._new: dict[int, Pair] = {}

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        """A pass begins, perhaps of a turn that may be compressed: until that ends, tokens are not dealt out."""
        self.complete, self._turn, self._ends = complete, turn, ends

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """See `KVStore`."""
        if k_KSD.shape[1] == 1 and not (self.complete or self._turn or sequence in self._new):
            self._deal(sequence, k_KSD, v_KSD, self._given[sequence])
            self._given[sequence] += 1
        elif sequence not in self._new:
            self._new[sequence] = k_KSD, v_KSD
            self._given[sequence] += k_KSD.shape[1]
        else:
            for room, rows in zip(self.reserve(sequence, k_KSD.shape[1], k_KSD, v_KSD), (k_KSD, v_KSD), strict=True):
                room[:] = rows

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        """See `CollectingStore`."""
        held = self._new.get(sequence)
        before = 0 if held is None else held[0].shape[1]
        keys, values = (like.new_empty((len(like), before + rows, like.shape[2])) for like in (k_KSD, v_KSD))
        if held is not None:
            keys[:, :before], values[:, :before] = held
        self._new[sequence] = keys, values
        self._given[sequence] += rows
        return keys[:, before:], values[:, before:]

    def _deal(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor, first: int) -> None:
        """Keep this rank's share of tokens that begin at a row."""
        alone = self.shares.alone
        if alone:
            self._kept[0].append(sequence, k_KSD[:alone], v_KSD[:alone])
        rows = np.arange(first, first + k_KSD.shape[1])
        for index in range(len(self.shares.patterns)):
            own = np.flatnonzero(self.shares.own_tokens(index, rows))
            if len(own):
                head = slice(alone + index, alone + index + 1)
                chosen = upload(own, k_KSD.device)
                self._kept[1 + index].append(sequence, k_KSD[head, chosen], v_KSD[head, chosen])
                self._rows[index][sequence].extend(own + first)

    def fill(self, sequence: int, slots: IntArray, alone: Pair | None, shared: dict[int, Dealt]) -> None:
        """Take what was kept of a saved sequence, whose tokens on this rank have `slots`.

        `alone` are their keys and values in the heads of this rank alone, None where there are no such heads; `shared`
        has by shared head the slots of those of its tokens that this rank keeps, with their keys and values.
        """
        if alone is not None:
            self._kept[0].append(sequence, *alone)
        for index, (kept, (keys, values)) in shared.items():
            self._kept[1 + index].append(sequence, keys, values)
            self._rows[index][sequence].extend(np.searchsorted(slots, kept))
        self._given[sequence] += len(slots)

    def part(self, sequence: int) -> Pair:
        """``[K, n, D]`` and ``[K, n, Dv]`` of the turn's tokens, all heads."""
        return self._new[sequence]

    def rows(self, sequence: int) -> int:
        """Rows that this rank was given of a sequence."""
        return self._given[sequence]

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """See `KVStore`."""
        new = None
        if sequence in self._new:
            keys, values = self._new[sequence]
            fresh = slice(len(slots) - keys.shape[1], None)
            new = KVPart(sequence, keys, values, slots[fresh], positions[fresh])
            if self.complete:
                yield new
                return
        yield DividedPart(sequence, self.shares, tuple(self._held(sequence, slots, positions)), new)

    def _held(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[KVPart | None]:
        for index, store in enumerate(self._kept):
            if not store.rows(sequence):
                yield None
                continue
            rows = slice(0, store.rows(sequence)) if index == 0 else self._rows[index - 1][sequence].view()
            yield KVPart(sequence, *store.part(sequence), slots[rows], positions[rows])

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> None:
        """Nothing lies elsewhere."""

    def release(self) -> None:
        """Deal out the tokens of the pass, unless its turn goes on."""
        if not self._ends:
            return
        for sequence in list(self._new):
            keys, values = self._new.pop(sequence)
            self._deal(sequence, keys, values, self._given[sequence] - keys.shape[1])

    def shrink(self, sequence: int, length: int) -> None:
        """Forget the turn's tokens, which are all behind the first `length` rows."""
        keys, _ = self._new.pop(sequence)
        self._given[sequence] -= keys.shape[1]
        assert self._given[sequence] == length

    def kept(self, sequence: int) -> IntArray:
        """See `KVStore`."""
        counts = [store.rows(sequence) for store in self._kept]
        return np.array([counts[0]] * self.shares.alone + counts[1:], dtype=np.int64)

    def crop(self, lengths: list[int]) -> None:
        """See `KVStore`."""
        self._new.clear()
        self._given = [min(given, length) for given, length in zip(self._given, lengths, strict=True)]
        self._kept[0].crop(lengths)
        for store, columns in zip(self._kept[1:], self._rows, strict=True):
            left = [int(np.searchsorted(rows.view(), length)) for rows, length in zip(columns, lengths, strict=True)]
            store.crop(left)
            for rows, count in zip(columns, left, strict=True):
                rows.length = count

    def reorder(self, index: list[int]) -> None:
        """See `KVStore`."""
        self._given = [self._given[source] for source in index]
        self._rows = [[columns[source].copy() for source in index] for columns in self._rows]
        for store in self._kept:
            store.reorder(index)

    def fork(self) -> DividedStore:
        """See `KVStore`."""
        twin = DividedStore(0, self.shares, self._least_growth)
        twin._given = list(self._given)
        twin._rows = [[rows.copy() for rows in columns] for columns in self._rows]
        twin._kept = [store.fork() for store in self._kept]
        return twin

    def nbytes(self) -> int:
        """See `KVStore`."""
        rows = sum(column.view().nbytes for columns in self._rows for column in columns)
        return rows + sum(store.nbytes() for store in self._kept)

    def saved(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """See `KVStore`; of each shared head also the slots of its tokens, for other ranks hold the others."""
        tensors = self._kept[0].saved(sequence, slots)
        for index, store in enumerate(self._kept[1:]):
            if store.rows(sequence):
                found = store.saved(sequence, slots)
                found["slots"] = StreamedTensor.of(torch.from_numpy(slots[self._rows[index][sequence].view()]))
                tensors |= {f"shared{index}.{name}": tensor for name, tensor in found.items()}
        return tensors


def make_dense_store(batch: int, shares: HeadShares | None = None) -> KVStore:
    """A store of uncompressed keys and values, whose heads other ranks share or not."""
    return DenseStore(batch) if shares is None else DividedStore(batch, shares)
