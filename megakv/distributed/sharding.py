"""Which token lives on which context-parallel rank, always with its slot and its position.

A *slot* is a token's index in the padded ``[B, S]`` sequence: it decides causality, windows and ownership. A *position*
is what rotary embeddings see. They differ where a row is padded. Padded slots are never sharded, so never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of several sequences packed in one row: sequence-major, slots ascending.

    Parameters
    ----------
    sequence, slot, position : IntArray
        ``[L]`` batch row, slot and rotary position of each token.
    batch : int
        Number of sequences of the batch (some may have no token here).
    """

    sequence: IntArray
    slot: IntArray
    position: IntArray
    batch: int

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
    """The new tokens of one forward pass on every context-parallel rank.

    Parameters
    ----------
    tokens : tuple of TokenBlock
        Per rank, the tokens it computes.
    stored : tuple of TokenBlock
        Per rank, the tokens whose KV it keeps. Equal to `tokens` but where every rank computes every token.
    replicated : bool
        Whether every rank computes every token.
    gathered : bool
        Whether the last rank keeps what other ranks compute: the method must bring it there.
    wanted : tuple of IntArray, optional
        Per rank, the rows of its tokens whose results the last layer is asked for; None for all of them.
    """

    tokens: tuple[TokenBlock, ...]
    stored: tuple[TokenBlock, ...]
    replicated: bool
    gathered: bool = False
    wanted: tuple[IntArray, ...] | None = None

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.tokens)

    @property
    def max_position(self) -> int:
        """The largest rotary position of the pass, over all ranks."""
        return max((int(block.position.max()) for block in self.tokens if len(block)), default=0)

    @cached_property
    def queries(self) -> tuple[TokenBlock, ...]:
        """Per rank, the tokens whose results the last layer is asked for."""
        if self.wanted is None:
            return self.tokens
        return tuple(block.take(rows) for block, rows in zip(self.tokens, self.wanted, strict=True))

    def kept_rows(self, rank: int) -> IntArray | None:
        """Of the tokens that a rank computes, the rows of those that it keeps; None where they are the same."""
        if not self.replicated:
            return None
        tokens, stored = self.tokens[rank], self.stored[rank]
        width = 1 + int(tokens.slot.max(initial=0))
        return np.searchsorted(tokens.sequence * width + tokens.slot, stored.sequence * width + stored.slot)

    def narrowed(self, wanted: TokenBlock) -> Layout:
        """The same with a last layer that computes no more than these tokens."""
        width = 1 + max(int(block.slot.max(initial=0)) for block in (*self.tokens, wanted))
        keys = wanted.sequence * width + wanted.slot
        rows = tuple(np.flatnonzero(np.isin(block.sequence * width + block.slot, keys)) for block in self.tokens)
        if all(len(found) == len(block) for found, block in zip(rows, self.tokens, strict=True)):
            return self
        return replace(self, wanted=rows)


COLUMN_GROWTH = 16


class TokenColumn:
    """A growing 1-D integer array."""

    def __init__(self) -> None:
        self._buffer = np.empty(COLUMN_GROWTH, dtype=np.int64)
        self.length = 0

    def extend(self, values: IntArray) -> None:
        needed = self.length + len(values)
        if needed > len(self._buffer):
            grown = np.empty(needed + needed // 4 + COLUMN_GROWTH, dtype=np.int64)
            grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : needed] = values
        self.length = needed

    def view(self) -> IntArray:
        return self._buffer[: self.length]

    def copy(self) -> TokenColumn:
        column = TokenColumn()
        column.extend(self.view())
        return column


class TokenTable:
    """Slots and positions of the cached tokens of every sequence on every context-parallel rank."""

    def __init__(self, size: int, batch: int):
        self.size = size
        self.batch = batch
        self._slots = [[TokenColumn() for _ in range(batch)] for _ in range(size)]
        self._positions = [[TokenColumn() for _ in range(batch)] for _ in range(size)]
        self._tokens: tuple[TokenBlock, ...] | None = None

    def extend(self, layout: Layout) -> None:
        self._tokens = None
        for rank, block in enumerate(layout.stored):
            for sequence in range(self.batch):
                run = block.run(sequence)
                if run.stop > run.start:
                    self._slots[rank][sequence].extend(block.slot[run])
                    self._positions[rank][sequence].extend(block.position[run])

    def slots(self, rank: int, sequence: int) -> IntArray:
        return self._slots[rank][sequence].view()

    def positions(self, rank: int, sequence: int) -> IntArray:
        return self._positions[rank][sequence].view()

    def tokens(self) -> tuple[TokenBlock, ...]:
        """Per rank, all that it holds, packed; made once for all layers of a pass."""
        if self._tokens is None:
            found = []
            for counts, *columns in zip(self.counts(), self._slots, self._positions, strict=True):
                slots, positions = (np.concatenate([column.view() for column in row]) for row in columns)
                found.append(TokenBlock(np.repeat(np.arange(self.batch), counts), slots, positions, self.batch))
            self._tokens = tuple(found)
        return self._tokens

    def next_positions(self) -> IntArray:
        """``[B]`` the position behind the last token of every sequence."""
        found = np.zeros(self.batch, dtype=np.int64)
        for row in self._positions:
            for sequence, column in enumerate(row):
                if column.length:
                    found[sequence] = max(found[sequence], column.view()[-1] + 1)
        return found

    def counts(self) -> NDArray[np.int64]:
        """``[N, B]`` tokens held by each rank of each sequence."""
        return np.array([[column.length for column in row] for row in self._slots], dtype=np.int64).reshape(
            self.size, self.batch
        )

    def since(self, slot: int) -> NDArray[np.int64]:
        """``[B]`` tokens at `slot` and beyond, on all ranks together."""
        found = [[len(column.view()) - np.searchsorted(column.view(), slot) for column in row] for row in self._slots]
        return np.array(found, dtype=np.int64).reshape(self.size, self.batch).sum(0)

    def crop(self, slots: int) -> None:
        """Forget all tokens at `slots` and beyond."""
        self._tokens = None
        for rank in range(self.size):
            for sequence in range(self.batch):
                length = int(np.searchsorted(self.slots(rank, sequence), slots))
                self._slots[rank][sequence].length = length
                self._positions[rank][sequence].length = length

    def fork(self) -> TokenTable:
        """A copy."""
        twin = TokenTable(self.size, 0)
        twin.batch = self.batch
        twin._slots = [[column.copy() for column in row] for row in self._slots]
        twin._positions = [[column.copy() for column in row] for row in self._positions]
        return twin

    def reorder(self, index: list[int]) -> None:
        """Row b becomes the present row ``index[b]``."""
        self.batch, self._tokens = len(index), None
        for columns in (self._slots, self._positions):
            for rank in range(self.size):
                columns[rank] = [columns[rank][source].copy() for source in index]


def _counts(held: NDArray[np.int64] | None, batch: int, size: int) -> NDArray[np.int64]:
    return np.zeros((size, batch), dtype=np.int64) if held is None else held


def chunk_bounds(length: int, chunks: int) -> IntArray:
    """``[chunks + 1]`` bounds of near-equal chunks; the remainder goes to the first ones."""
    sizes = np.full(chunks, length // chunks, dtype=np.int64)
    sizes[: length % chunks] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


def pieces(tokens: int, longest: int) -> list[tuple[int, int]]:
    """Bounds of the fewest near-equal pieces of at most `longest` tokens; none of no tokens."""
    bounds = chunk_bounds(tokens, max(1, -(-tokens // longest))).tolist()
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def _select(new: TokenBlock, owner: IntArray, size: int) -> tuple[TokenBlock, ...]:
    return tuple(new.take(owner == rank) for rank in range(size))


def balanced(new: TokenBlock, size: int, held: NDArray[np.int64] | None = None) -> Layout:
    """Load-balanced shards (context parallelism, Section 3.5.1): 2N chunks, rank i takes chunks i and 2N-1-i.

    Every sequence is balanced by itself. Pairs with more tokens go to the ranks that hold fewest of the sequence, so
    that ranks differ by at most one token per sequence however many turns there were.

    Parameters
    ----------
    new : TokenBlock
        The new tokens of all sequences.
    size : int
        Context-parallel degree N.
    held : IntArray, optional
        ``[N, B]`` tokens already held by each rank.
    """
    held = _counts(held, new.batch, size)
    owner = np.empty(len(new), dtype=np.int64)
    for sequence in range(new.batch):
        run = new.run(sequence)
        bounds = chunk_bounds(run.stop - run.start, 2 * size)
        sizes = np.diff(bounds)
        pair_sizes = sizes[:size] + sizes[: size - 1 : -1]
        pairs = np.argsort(-pair_sizes, kind="stable")
        ranks = np.argsort(held[:, sequence], kind="stable")
        rank_of_pair = np.empty(size, dtype=np.int64)
        rank_of_pair[pairs] = ranks
        rank_of_chunk = np.concatenate([rank_of_pair, rank_of_pair[::-1]])
        owner[run] = np.repeat(rank_of_chunk, sizes)
    shards = _select(new, owner, size)
    return Layout(tokens=shards, stored=shards, replicated=False)


def contiguous(new: TokenBlock, partitions: Sequence[Sequence[int]], *, gathered: bool = False) -> Layout:
    """Contiguous shards of given sizes, in rank order (KV-Runahead, Section 4).

    Parameters
    ----------
    new : TokenBlock
        The new tokens of all sequences.
    partitions : sequence of sequence of int
        Per sequence, the number of tokens of each rank; sums to the sequence's new tokens.
    gathered : bool
        Whether the last rank keeps the keys and values of all of them, instead of each rank its own.

    Raises
    ------
    ValueError
        If the sizes of a sequence are negative or do not sum to its new tokens.
    """
    size = len(partitions[0])
    owner = np.empty(len(new), dtype=np.int64)
    for sequence, sizes in enumerate(partitions):
        run = new.run(sequence)
        if min(sizes) < 0 or sum(sizes) != run.stop - run.start:
            raise ValueError(
                f"the partition {list(sizes)} of sequence {sequence} must be {size} numbers >= 0 "
                f"that sum to its {run.stop - run.start} new tokens"
            )
        owner[run] = np.repeat(np.arange(size), sizes)
    shards = _select(new, owner, size)
    stored = _select(new, np.full(len(new), size - 1), size) if gathered else shards
    return Layout(tokens=shards, stored=stored, replicated=False, gathered=gathered)


def on_last_rank(new: TokenBlock, size: int) -> Layout:
    """All tokens on the last rank, which computes and keeps them."""
    shards = _select(new, np.full(len(new), size - 1), size)
    return Layout(tokens=shards, stored=shards, replicated=False)


def round_robin_owners(new: TokenBlock, size: int, held: NDArray[np.int64] | None = None) -> IntArray:
    """Owner of each decoded token: the rank that holds fewest tokens of its sequence (Algorithm 4's rotation).

    Ties rotate with slot and batch row, so that the tokens of one step spread over the ranks.
    """
    counts = _counts(held, new.batch, size).copy()
    owner = np.empty(len(new), dtype=np.int64)
    for index, (sequence, slot) in enumerate(zip(new.sequence, new.slot, strict=True)):
        first = int(sequence + slot) % size
        rotated = np.roll(counts[:, sequence], -first)
        rank = (first + int(np.argmin(rotated))) % size
        owner[index] = rank
        counts[rank, sequence] += 1
    return owner


def round_robin(new: TokenBlock, size: int, held: NDArray[np.int64] | None = None) -> Layout:
    """Decoded tokens dealt out one by one; each rank computes and keeps its own."""
    shards = _select(new, round_robin_owners(new, size, held), size)
    return Layout(tokens=shards, stored=shards, replicated=False)


def replicated(new: TokenBlock, size: int, held: NDArray[np.int64] | None = None) -> Layout:
    """Every rank computes every token; the KV is dealt out as by `round_robin`."""
    stored = _select(new, round_robin_owners(new, size, held), size)
    return Layout(tokens=(new,) * size, stored=stored, replicated=True)


def new_tokens(mask: NDArray[np.bool_], positions: NDArray[np.int64], first_slot: int) -> TokenBlock:
    """Pack the real tokens of a padded batch.

    Parameters
    ----------
    mask : array of bool
        ``[B, T]`` which of the new slots hold a real token.
    positions : array of int
        ``[B, T]`` their rotary positions.
    first_slot : int
        Slot of the first column.
    """
    sequence, column = np.nonzero(mask)
    return TokenBlock(
        sequence=sequence.astype(np.int64),
        slot=column.astype(np.int64) + first_slot,
        position=positions[sequence, column].astype(np.int64),
        batch=mask.shape[0],
    )
