"""Uncompressed keys and values of a layer whose KV heads are partly shared with other tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.attention.partial import KVPart, Part, PartialAttention
from megakv.attention.reference import Scoring
from megakv.base.device import upload
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.dense import DenseStore
from megakv.cache.ragged_attention import attend_by_heads
from megakv.cache.saved import SavedLayer
from megakv.cache.shares import HeadShares
from megakv.cache.store import KVStore, Pair
from megakv.distributed.sharding import IntArray, TokenColumn


@dataclass(frozen=True)
class SharedHeadsPart:
    """One sequence's keys and values, other tokens in other heads (see `megakv.attention.partial.Part`).

    Every pair of a query and a key is counted on one replica of its head only: with a token of an earlier pass on that
    which keeps it; with a token of this pass on that which has the query. The sequence began as a `prompt`.

    `held` is what is kept: of the heads of this rank alone, then of each shared one; None where there is nothing. `new`
    are tokens of this pass, of all heads.
    """

    sequence: int
    prompt: int
    shares: HeadShares
    held: tuple[KVPart | None, ...]
    new: KVPart | None

    def runs(self, q_HLD: Tensor, slot: int, scoring: Scoring) -> None:
        """See `Part`: which tokens a query sees differs from head to head."""

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to all heads' tokens and merge."""
        if not partial.q_HLD.shape[1] or (self.new is None and not any(self.held)):
            return
        # Index 0 are the heads of this rank alone, index i + 1 is shared head i.
        bounds = [0, *range(self.shares.alone, self.shares.kv_heads + 1)]

        def add(index: int, part: PartialAttention) -> None:
            held = self.held[index]
            if held is not None:
                held.add_to(part)
            if self.new is not None:
                own = None if index == 0 else self.shares.own_queries(index - 1, self.prompt, partial.q_slots)
                _add_rows(part, self.new, slice(bounds[index], bounds[index + 1]), own)

        attend_by_heads(partial, bounds, add)


def _add_rows(partial: PartialAttention, new: KVPart, heads: slice, own: np.ndarray | None) -> None:
    """Attend to some heads of a part with all queries, or with this replica's own."""
    k_KSD, v_KSD = new.k_KSD[heads], new.v_KSD[heads]
    if own is None or own.all():
        partial.add(k_KSD, v_KSD, new.slots, new.positions)
        return
    if not own.any():
        return
    rows = upload(np.flatnonzero(own), k_KSD.device)
    some = PartialAttention(partial.q_HLD[:, rows], partial.q_slots[own], partial.scoring, partial.value_dim)
    some.add(k_KSD, v_KSD, new.slots, new.positions)
    out = some.out.new_zeros((partial.q_HLD.shape[0], len(own), some.out.shape[-1]))
    lse = some.lse.new_full(out.shape[:2], -torch.inf)
    out[:, rows], lse[:, rows] = some.out, some.lse
    partial.merge(out, lse)


class SharedHeadsStore(KVStore):
    """Of a head that other ranks hold too, only this rank's share of the tokens.

    The tokens of a pass are there whole while it attends, since every replica has computed them anyway: `finish` keeps
    this rank's, unless they were compressed before. Of a single token they are kept at once. Where a turn that may be
    compressed is read in several passes, its tokens stay whole until it ends.

    A pass before which nothing was cached attends on every replica to all there is, by whatever method, and what counts
    of it is decided afterwards.

    `prompts` ``[B]`` are those that the sequences began as (`TokenTable.prompts`). What is kept lies in stores that
    `new_store` makes for a batch of so many sequences.
    """

    def __init__(self, prompts: IntArray, shares: HeadShares, new_store: Callable[[int], KVStore] = DenseStore):
        self._prompts, batch = prompts.tolist(), len(prompts)
        self._shares = shares
        self._complete, self._turn, self._ends = False, False, True
        # Of the heads of this rank alone, which have all tokens though there be no such head, then of each shared one.
        self._kept = [new_store(batch) for _ in range(1 + len(shares.patterns))]
        self._kept_rows = [[TokenColumn() for _ in range(batch)] for _ in shares.patterns]
        self._given = [0] * batch
        self._new: dict[int, Pair] = {}

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        # Of other sequences in the same pass.
        self._keep_new()
        self._complete, self._turn, self._ends = complete, turn, ends

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        count = k_KSD.shape[1]
        if sequence in self._new:
            super().append(sequence, k_KSD, v_KSD)
            return
        if count == 1 and not (self._complete or self._turn):
            self._keep(sequence, k_KSD, v_KSD, self._given[sequence])
        else:
            self._new[sequence] = k_KSD, v_KSD
        self._given[sequence] += count

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        if self._complete or self._turn or self._new.keys() & set(sequences):
            super().append_each(sequences, k_KLD, v_KLD)
            return
        self._kept[0].append_each(sequences, *(each[: self._shares.alone] for each in (k_KLD, v_KLD)))
        for index, sequence in enumerate(sequences):
            row = slice(index, index + 1)
            self._keep_shared(sequence, k_KLD[:, row], v_KLD[:, row], self._given[sequence])
            self._given[sequence] += 1

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        held = self._new.get(sequence)
        before = 0 if held is None else held[0].shape[1]
        keys, values = (like.new_empty((len(like), before + rows, like.shape[2])) for like in (k_KSD, v_KSD))
        if held is not None:
            keys[:, :before], values[:, :before] = held
        self._new[sequence] = keys, values
        self._given[sequence] += rows
        return keys[:, before:], values[:, before:]

    def _keep(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor, first: int) -> None:
        """Keep this rank's share of tokens that begin at a row."""
        alone = self._shares.alone
        self._kept[0].append(sequence, k_KSD[:alone], v_KSD[:alone])
        self._keep_shared(sequence, k_KSD, v_KSD, first)

    def _keep_shared(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor, first: int) -> None:
        alone, rows = self._shares.alone, np.arange(first, first + k_KSD.shape[1])
        for index, columns in enumerate(self._kept_rows):
            own = np.flatnonzero(self._shares.own_tokens(index, self._prompts[sequence], rows))
            if len(own):
                head, chosen = slice(alone + index, alone + index + 1), upload(own, k_KSD.device)
                self._kept[1 + index].append(sequence, k_KSD[head, chosen], v_KSD[head, chosen])
                columns[sequence].extend(own + first)

    def part(self, sequence: int) -> Pair:
        """Those of the turn's tokens, all heads."""
        return self._new[sequence]

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        new = None
        if sequence in self._new:
            keys, values = self._new[sequence]
            fresh = slice(len(slots) - keys.shape[1], None)
            new = KVPart(sequence, keys, values, slots[fresh], positions[fresh])
            if self._complete:
                yield new
                return
        held = tuple(self._held(sequence, slots, positions))
        yield SharedHeadsPart(sequence, self._prompts[sequence], self._shares, held, new)

    def _held(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[KVPart | None]:
        for index, store in enumerate(self._kept):
            count = store.rows(sequence)
            if count == store.gone(sequence) or (index == 0 and not self._shares.alone):
                yield None
                continue
            keys, values = store.part(sequence)
            here = slice(count - keys.shape[1], count)
            rows = here if index == 0 else self._kept_rows[index - 1][sequence].view()[here]
            yield KVPart(sequence, keys, values, slots[rows], positions[rows])

    def pieces(self, sequence: int) -> Iterator[tuple[int, Tensor, Tensor, IntArray]]:
        yield from self._kept[0].pieces(sequence)
        for index, store in enumerate(self._kept[1:]):
            numbers = self._kept_rows[index][sequence].view()
            for _, keys, values, rows in store.pieces(sequence):
                yield self._shares.alone + index, keys, values, numbers[rows]

    def finish(self) -> None:
        self._finish_kept()
        # Behind those that the pass has read.
        self._keep_new()
        self._finish_kept()

    def _finish_kept(self) -> None:
        # Those of single heads first: with the other one the layer is done.
        for store in reversed(self._kept):
            store.finish()

    def _keep_new(self) -> None:
        """Of the tokens that have attended keep this rank's."""
        for sequence in list(self._new if self._ends else ()):
            keys, values = self._new.pop(sequence)
            self._keep(sequence, keys, values, self._given[sequence] - keys.shape[1])

    def forget(self, sequence: int, rows: int) -> None:
        self._kept[0].forget(sequence, rows)
        for store, columns in zip(self._kept[1:], self._kept_rows, strict=True):
            store.forget(sequence, int(np.searchsorted(columns[sequence].view(), rows)))

    def crop(self, sequence: int, length: int) -> None:
        self._new.pop(sequence, None)
        self._given[sequence] = min(self._given[sequence], length)
        self._kept[0].crop(sequence, length)
        for store, columns in zip(self._kept[1:], self._kept_rows, strict=True):
            rows = columns[sequence]
            rows.length = int(np.searchsorted(rows.view(), length))
            store.crop(sequence, rows.length)

    def release(self, sequence: int, rows: int) -> None:
        new = self._new.get(sequence)
        if new is None or new[0].shape[1] != rows:
            super().release(sequence, rows)
            return
        # What was kept before stays as it is.
        del self._new[sequence]
        self._given[sequence] -= rows

    def reorder(self, index: list[int]) -> None:
        self._prompts = [self._prompts[source] for source in index]
        self._given = [self._given[source] for source in index]
        self._kept_rows = [[columns[source].copy() for source in index] for columns in self._kept_rows]
        for store in self._kept:
            store.reorder(index)

    def fork(self) -> SharedHeadsStore:
        twin = copy(self)
        twin._prompts = list(self._prompts)
        twin._given, twin._new = list(self._given), {}
        twin._kept_rows = [[rows.copy() for rows in columns] for columns in self._kept_rows]
        twin._kept = [store.fork() for store in self._kept]
        return twin

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """Of each shared head also the slots of its tokens, for other ranks hold the others."""
        tensors = self._kept[0].save(sequence, slots) if self._shares.alone else {}
        for index, store in enumerate(self._kept[1:]):
            if found := store.save(sequence, slots):
                rows = self._kept_rows[index][sequence].view()[store.gone(sequence) :]
                found["slots"] = StreamedTensor.of(torch.from_numpy(slots[rows]))
                tensors |= {f"shared{index}.{name}": tensor for name, tensor in found.items()}
        return tensors

    def load(self, sequence: int, saved: SavedLayer) -> None:
        if not len(saved.tokens.slots):
            return
        absent = saved.tokens.absent
        self._kept[0].forget(sequence, absent)
        if absent < len(saved.tokens.slots):
            self._keep(sequence, *saved.rows(), absent)
        self._given[sequence] += len(saved.tokens.slots)

    def rows(self, sequence: int) -> int:
        return self._given[sequence]

    def kept(self, sequence: int) -> IntArray:
        counts = [store.rows(sequence) - store.gone(sequence) for store in self._kept]
        return np.array([counts[0]] * self._shares.alone + counts[1:], dtype=np.int64)

    def nbytes(self) -> int:
        rows = sum(column.view().nbytes for columns in self._kept_rows for column in columns)
        return rows + sum(store.nbytes() for store in self._kept)
