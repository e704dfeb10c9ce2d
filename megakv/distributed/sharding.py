"""Which token lives on which context-parallel rank, always with its slot and its position.

A *slot* is a token's index in the padded ``[B, S]`` sequence: it decides causality, windows and ownership. A *position*
is what rotary embeddings see. They differ where a row is padded. Padded slots are never sharded, so never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of several sequences packed in one row: sequence-major, slots ascending."""

    sequence: IntArray
    """``[L]`` batch row of each token, as are its slot and its rotary position."""
    slot: IntArray
    position: IntArray
    batch: int
    """Number of sequences of the batch (some may have no token here)."""

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def bounds(self) -> IntArray:
        """``[B + 1]`` start of each sequence's run in the packed row."""
        return np.searchsorted(self.sequence, np.arange(self.batch + 1))

    @cached_property
    def sequences(self) -> list[int]:
        """Each token's sequence."""
        return self.sequence.tolist()

    @cached_property
    def single(self) -> bool:
        """Whether no sequence has more than one token, as in a step of decoding."""
        return len(self) <= 1 or bool((np.diff(self.sequence) > 0).all())

    def run(self, sequence: int) -> slice:
        """Where the tokens of one sequence lie in the packed row."""
        return slice(int(self.bounds[sequence]), int(self.bounds[sequence + 1]))

    def keys(self, width: int) -> IntArray:
        """Numbers that tell the tokens apart, where slots are below `width`; they ascend."""
        return self.sequence * width + self.slot

    @classmethod
    def joined(cls, blocks: Sequence[TokenBlock]) -> tuple[TokenBlock, IntArray]:
        """The tokens of several blocks in one, and where each of them is in the blocks' rows behind one another."""
        sequence, slot, position = (
            np.concatenate([getattr(block, name) for block in blocks]) for name in ("sequence", "slot", "position")
        )
        order = np.lexsort((slot, sequence))
        return cls(sequence[order], slot[order], position[order], blocks[0].batch), order

    def take(self, keep: NDArray[np.bool_] | IntArray) -> TokenBlock:
        """The tokens selected by a mask or by ascending indices."""
        return TokenBlock(self.sequence[keep], self.slot[keep], self.position[keep], self.batch)

    def without_last(self, counts: IntArray) -> TokenBlock:
        """The tokens but for so many of the last ones of each sequence: ``[B]``."""
        return self.take(np.arange(len(self)) < np.repeat(self.bounds[1:] - counts, np.diff(self.bounds)))


@dataclass(frozen=True)
class Layout:
    """The new tokens of one forward pass on every context-parallel rank."""

    tokens: tuple[TokenBlock, ...]
    """Per rank, the tokens it computes."""
    stored: tuple[TokenBlock, ...]
    """Per rank, the tokens whose KV it keeps. Equal to `tokens` but where every rank computes every token."""
    replicated: bool = False
    """Whether every rank computes every token."""
    gathered: bool = False
    """Whether the last rank keeps what other ranks compute: the method must bring it there."""
    apart: bool = False
    """Whether no sequence, with all that is cached of it, is on several ranks."""
    wanted: tuple[IntArray, ...] | None = None
    """Per rank, the rows of its tokens whose results the last layer is asked for; None for all of them."""
    longest: int = 0  # Length that rotary frequencies go by, where that is more than the pass's own.

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.tokens)

    @property
    def max_position(self) -> int:
        """The largest rotary position of the pass, over all ranks."""
        return max(self.longest - 1, *(int(block.position.max(initial=0)) for block in self.tokens))

    @cached_property
    def queries(self) -> tuple[TokenBlock, ...]:
        """Per rank, the tokens whose results the last layer is asked for."""
        if self.wanted is None:
            return self.tokens
        return tuple(block.take(rows) for block, rows in zip(self.tokens, self.wanted, strict=True))

    @cached_property
    def first_slots(self) -> IntArray:
        """``[B]`` the first new slot of each sequence; beyond every slot where it has none."""
        firsts = np.full(self.tokens[0].batch, np.iinfo(np.int64).max)
        for block in self.tokens:
            starts, has = block.bounds[:-1], np.diff(block.bounds) > 0
            firsts[has] = np.minimum(firsts[has], block.slot[starts[has]])
        return firsts

    def kept_rows(self, rank: int) -> IntArray | None:
        """Of the tokens that a rank computes, the rows of those that it keeps; None where they are the same."""
        if not self.replicated:
            return None
        width = 1 + int(self.tokens[rank].slot.max(initial=0))
        return np.searchsorted(self.tokens[rank].keys(width), self.stored[rank].keys(width))

    def narrowed(self, wanted: TokenBlock) -> Layout:
        """The same with a last layer that computes no more than these tokens."""
        width = 1 + max(int(block.slot.max(initial=0)) for block in (*self.tokens, wanted))
        keys = wanted.keys(width)
        rows = tuple(np.flatnonzero(np.isin(block.keys(width), keys)) for block in self.tokens)
        if all(len(found) == len(block) for found, block in zip(rows, self.tokens, strict=True)):
            return self
        return replace(self, wanted=rows)


COLUMN_GROWTH = 16


class TokenColumn:
    """A growing integer array, in its last dimension."""

    def __init__(self, *shape: int) -> None:
        self._buffer = np.empty((*shape, COLUMN_GROWTH), dtype=np.int64)
        self.length = 0

    def extend(self, values: IntArray) -> None:
        needed = self.length + values.shape[-1]
        if needed > self._buffer.shape[-1]:
            grown = np.empty((*self._buffer.shape[:-1], needed + needed // 4 + COLUMN_GROWTH), dtype=np.int64)
            grown[..., : self.length] = self.view()
            self._buffer = grown
        self._buffer[..., self.length : needed] = values
        self.length = needed

    def view(self) -> IntArray:
        return self._buffer[..., : self.length]

    def without(self, ranges: Sequence[tuple[int, int]]) -> TokenColumn:
        """The others than those whose first value is in ascending ranges, of values that ascend."""
        values = self.view()
        edges = [0, *np.searchsorted(values[0], np.ravel(ranges)).tolist(), self.length]
        column = TokenColumn(*values.shape[:-1])
        column.extend(np.concatenate([values[..., a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)], axis=-1))
        return column

    def copy(self) -> TokenColumn:
        column = TokenColumn(*self._buffer.shape[:-1])
        column.extend(self.view())
        return column


class TokenTable:
    """Slots and positions of the cached tokens of every sequence on every context-parallel rank.

    `prompts` ``[B]`` are the numbers of the prompts that sequences began as: beams of one, and copies, have the same.
    """

    def __init__(self, size: int, batch: int, prompts: int | None = None):
        self.size = size
        self.batch = batch
        self.prompts: IntArray = np.arange(batch) * (batch if prompts is None else prompts) // max(1, batch)
        self._columns = [[TokenColumn(2) for _ in range(batch)] for _ in range(size)]
        self._tokens: tuple[TokenBlock, ...] | None = None
        # Those that this one is of.
        self._parts: Sequence[TokenTable] = ()

    def extend(self, layout: Layout) -> None:
        for table in (self, *self._parts):
            table._tokens = None
        for row, block in zip(self._columns, layout.stored, strict=True):
            both, bounds = np.stack([block.slot, block.position]), block.bounds.tolist()
            for column, first, last in zip(row, bounds, bounds[1:], strict=False):
                if first < last:
                    column.extend(both[:, first:last])

    def coordinates(self, rank: int, sequence: int) -> tuple[IntArray, IntArray]:
        """Slots and positions of what a rank holds of a sequence."""
        slots, positions = self._columns[rank][sequence].view()
        return slots, positions

    def slots(self, rank: int, sequence: int) -> IntArray:
        slots: IntArray = self._columns[rank][sequence].view()[0]
        return slots

    def positions(self, rank: int, sequence: int) -> IntArray:
        positions: IntArray = self._columns[rank][sequence].view()[1]
        return positions

    def tokens(self) -> tuple[TokenBlock, ...]:
        """Per rank, all that it holds, packed; made once for all layers of a pass."""
        if self._tokens is None:
            self._tokens = self.tokens_since(np.zeros(self.batch, dtype=np.int64))
        return self._tokens

    def tokens_since(self, first: IntArray) -> tuple[TokenBlock, ...]:
        """The same, of every sequence from slot ``first[b]`` on."""
        found = []
        for row in self._columns:
            views = [column.view() for column in row]
            views = [view[:, np.searchsorted(view[0], slot) :] for view, slot in zip(views, first, strict=True)]
            slots, positions = np.concatenate(views, axis=1)
            counts = [view.shape[1] for view in views]
            found.append(TokenBlock(np.repeat(np.arange(self.batch), counts), slots, positions, self.batch))
        return tuple(found)

    def next_positions(self) -> IntArray:
        """``[B]`` the position behind the last token of every sequence."""
        return self._each(lambda column: int(column.view()[1, -1]) + 1 if column.length else 0).max(0)

    def counts(self) -> IntArray:
        """``[N, B]`` tokens held by each rank of each sequence."""
        return self._each(lambda column: column.length)

    def since(self, slot: int) -> IntArray:
        """``[B]`` tokens at `slot` and beyond, on all ranks together."""
        return self._each(lambda column: column.length - int(np.searchsorted(column.view()[0], slot))).sum(0)

    def all_slots(self, sequence: int, count: int | None = None) -> IntArray:
        """Slots of a sequence on all ranks, ascending: of all its tokens, or the last `count`."""
        some = slice(None if count is None else -count, None)
        return np.sort(np.concatenate([self.slots(rank, sequence)[some] for rank in range(self.size)]))[some]

    def _each(self, number: Callable[[TokenColumn], int]) -> IntArray:
        found = [[number(column) for column in row] for row in self._columns]
        return np.array(found, dtype=np.int64).reshape(self.size, self.batch)

    def crop(self, slots: int) -> None:
        """Forget all tokens at `slots` and beyond."""
        self._tokens = None
        for row in self._columns:
            for column in row:
                column.length = int(np.searchsorted(column.view()[0], slots))

    def fork(self) -> TokenTable:
        """A copy."""
        twin = TokenTable(self.size, self.batch)
        twin.prompts = self.prompts
        twin._columns = [[column.copy() for column in row] for row in self._columns]
        return twin

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """The sequences of several tables, behind one another; tokens that come by `extend` are theirs, too."""
        twin = cls(tables[0].size, 0)
        twin.batch, twin._parts = sum(table.batch for table in tables), tables
        twin.prompts = np.arange(twin.batch)
        twin._columns = [[column for table in tables for column in table._columns[rank]] for rank in range(twin.size)]
        return twin

    def only(self, group: range) -> TokenTable:
        """The same tokens of some sequences, as long as none come; all others have none."""
        twin, none = TokenTable(self.size, 0), TokenColumn(2)
        twin.batch, twin.prompts = self.batch, self.prompts
        twin._columns = [[column if at in group else none for at, column in enumerate(row)] for row in self._columns]
        return twin

    def without(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> TokenTable:
        """The same tokens but for ranges of slots of each sequence, ascending, as long as none come."""
        twin = TokenTable(self.size, 0)
        twin.batch, twin.prompts = self.batch, self.prompts
        twin._columns = [
            [column.without(own) if own else column for column, own in zip(row, ranges, strict=True)]
            for row in self._columns
        ]
        return twin

    def reorder(self, index: list[int]) -> None:
        """Row b becomes the present row ``index[b]``."""
        self.batch, self.prompts, self._tokens = len(index), self.prompts[index], None
        self._columns = [[row[source].copy() for source in index] for row in self._columns]


def chunk_bounds(length: int, chunks: int) -> IntArray:
    """``[chunks + 1]`` bounds of near-equal chunks; the remainder goes to the first ones."""
    index = np.arange(chunks + 1)
    return index * (length // chunks) + np.minimum(index, length % chunks)


def pieces(tokens: int, longest: int) -> list[tuple[int, int]]:
    """Bounds of the fewest near-equal pieces of at most `longest` tokens; none of no tokens."""
    bounds = chunk_bounds(tokens, max(1, -(-tokens // longest))).tolist()
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def new_tokens(mask: NDArray[np.bool_], positions: IntArray, first_slot: int | IntArray) -> TokenBlock:
    """Pack the tokens of a padded batch: ``[B, T]`` which are real, and their positions; a column is a slot.

    The first column is the first slot, of all sequences or ``[B]`` of each.
    """
    if mask.shape[1] == 1 and mask.all():
        # As in decoding: many calls for little.
        slots = np.broadcast_to(first_slot, len(mask)).astype(np.int64)
        return TokenBlock(np.arange(len(mask)), slots, positions[:, 0].astype(np.int64), len(mask))
    sequence, column = np.nonzero(mask)
    return TokenBlock(
        sequence=sequence.astype(np.int64),
        slot=column.astype(np.int64) + np.broadcast_to(first_slot, len(mask))[sequence],
        position=positions[sequence, column].astype(np.int64),
        batch=mask.shape[0],
    )
