"""Keys and values in the memory of the model's device.

Beside the verbs of every store: `share`, `append_shared` and `preallocate` are for spans and prompts of caches that are
neither compressed nor shared between ranks, which tiers have too (`SpanStore`); `in_place` lets a step of decoding read
rows where they lie; `part` has all rows in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakv.attention.compiled import RowTable
from megakv.cache.segments import SegmentedRows
from megakv.cache.store import Pair, SpanStore

GROWTH_MINIMUM = 16
"""Rows that a full buffer grows by at least."""


class DenseStore(SpanStore):
    """Rows of each sequence in segments, which forks share, and a tail that grows.

    `least_growth` are the rows that a full buffer grows by at least.
    """

    in_hand = True

    def __init__(self, batch: int, least_growth: int = GROWTH_MINIMUM):
        self._least_growth = least_growth
        self._held: list[SegmentedRows | None] = [None] * batch
        # Rows that were gone before any came.
        self._absent = [0] * batch
        self._expected: dict[int, int] = {}
        # Where all rows lie, as long as none is elsewhere, and none of them goes.
        self._table: RowTable | None = None

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        return self._rows_like(sequence, (k_KSD, v_KSD)).extend(rows)

    def hold_alike(self, sequences: int, k_KLD: Tensor, v_KLD: Tensor) -> bool:
        count = len(self._held)
        rows = k_KLD.shape[1] // max(1, count)
        if sequences != count or self._expected or any(self._absent) or any(self._held):
            return False
        pair = (each.unflatten(1, (count, rows)).transpose(0, 1) for each in (k_KLD, v_KLD))
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in pair)
        self._held = [SegmentedRows.of(own, self._least_growth) for own in zip(keys, values, strict=True)]
        self._table = None
        return True

    def _rows_like(self, sequence: int, like: Pair) -> SegmentedRows:
        held, self._table = self._held[sequence], None
        if held is None:
            held = self._held[sequence] = SegmentedRows(like, self._least_growth, self._absent[sequence])
            held.expect(self._expected.pop(sequence, 0))
        return held

    def share(self, sequence: int, first: int, last: int) -> Sequence[Pair]:
        held = self._held[sequence]
        return [] if held is None else held.share(first, last)

    def append_shared(self, sequence: int, runs: Sequence[Pair]) -> None:
        self._rows_like(sequence, runs[0]).append_shared(runs)

    def preallocate(self, sequence: int, rows: int) -> None:
        held = self._held[sequence]
        if held is None:
            self._expected[sequence] = rows
        else:
            held.expect(rows)

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None:
        if len(new) == 1 and (table := self._table) is not None and table.dtype == k_KLD.dtype:
            # Of many sequences in one pass each has a store of its own, in every layer.
            held, rows = self._held[0], new[0]
            if not rows:
                return table
            if held is not None and held.take_places(rows):
                table.add(0, rows)
                return table
        if self._table is not None:
            if self._table.dtype != k_KLD.dtype:
                return None
        elif self.dtypes - {k_KLD.dtype}:
            return None
        for sequence, rows in enumerate(new):
            held = self._held[sequence]
            if not rows:
                continue
            if held is None or not held.take_places(rows):
                self.reserve(sequence, rows, k_KLD, v_KLD)
            elif self._table is not None:
                self._table.add(sequence, rows)
        if self._table is None:
            runs = [[] if held is None else held.runs() for held in self._held]
            gone = [self.gone(sequence) for sequence in range(len(self._held))]
            self._table = RowTable.of(runs, gone, k_KLD.dtype)
        return self._table

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The types of all rows."""
        return {held.dtype for held in self._held if held is not None}

    def lend(self, sequence: int, rows: int, like: Pair) -> tuple[SegmentedRows | None, int]:
        """The rows of a sequence, if there are any, with places for so many more or more, and how many: see
        `SegmentedRows.lend`.
        """
        held, self._table = self._held[sequence], None
        if rows:
            held = self._rows_like(sequence, like)
        return held, 0 if held is None or not rows else held.lend(rows)

    def part(self, sequence: int) -> Pair:
        """All rows in one piece, a copy from then on where they lay in several."""
        held, self._table = self._held[sequence], None
        assert held is not None
        return held.joined()

    def runs(self, sequence: int) -> Sequence[Pair]:
        held = self._held[sequence]
        return [] if held is None else held.segments()

    def rows(self, sequence: int) -> int:
        held = self._held[sequence]
        return self._absent[sequence] if held is None else held.length

    def gone(self, sequence: int) -> int:
        """How many first rows were forgotten."""
        held = self._held[sequence]
        return self._absent[sequence] if held is None else held.gone

    def forget(self, sequence: int, rows: int) -> None:
        held, self._table = self._held[sequence], None
        if held is None:
            self._absent[sequence] = rows
        else:
            held.forget(rows)

    def crop(self, sequence: int, length: int) -> None:
        held, self._table = self._held[sequence], None
        self._absent[sequence] = min(self._absent[sequence], length)
        if held is not None and length < held.length:
            held.truncate(length)

    def reorder(self, index: list[int]) -> None:
        present, moved, self._table = self._held, set[int](), None
        self._held, self._absent = [], [self._absent[source] for source in index]
        for source in index:
            held = present[source]
            self._held.append(held.fork() if held is not None and source in moved else held)
            moved.add(source)

    def fork(self) -> DenseStore:
        twin = DenseStore(0, self._least_growth)
        twin._held, twin._absent = [held and held.fork() for held in self._held], list(self._absent)
        return twin

    def nbytes(self) -> int:
        return sum(held.nbytes() for held in self._held if held is not None)
