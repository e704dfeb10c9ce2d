"""Rows of keys and values in segments: frozen ones that any number of holders share, and a tail that grows.

Also what of them stays when a layer's sliding window has moved on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megakv.attention.compiled import Run
from megakv.cache.store import Pair, cut

GROWTH_DIVISOR = 32
"""A full tail grows by this fraction of all rows, so unused capacity stays near 3%."""
WINDOW_GROWTH_DIVISOR = 64
"""Where rows are left behind, it grows by that fraction: with those of a window's margin, all are within 5%."""
SPARE_DIVISOR = 30
"""Rows that were left behind go at once where they, with unused capacity, are more than this fraction of the others.
Below that they go when the tail is full, as in every step of decoding."""
SPARE_MINIMUM = 2
MOST_SEGMENTS = 8
"""Attention to a segment costs a kernel call and a merge: of more frozen ones, the smallest neighbours are joined."""
TINY_ROWS = 128
"""Neighbours that have no more rows together are joined in any case."""


MARGIN_DIVISOR = 64
"""Beside a window this fraction of it stays, at most twice: a conversation may be cut back by so much without being
read anew, and not every token is a reason to look for what can go."""


class _Buffer:
    """Memory of a tail, filled from the front. Whoever holds all rows that were written may write the next ones."""

    __slots__ = ("_whole", "capacity", "keys", "shared", "values", "written")

    def __init__(self, keys: Tensor, values: Tensor, written: int = 0):
        self.keys, self.values, self.capacity = keys, values, keys.shape[1]
        self.written = written
        # So many leading rows others may hold, too: they are never written again.
        self.shared = 0
        self._whole: Run | None = None

    def rows(self, first: int, last: int) -> Pair:
        return self.keys[:, first:last], self.values[:, first:last]

    def run(self, first: int, last: int) -> Run:
        """The same for compiled code, with all of the memory behind them, where more rows may come."""
        if self._whole is None:
            self._whole = Run.of(self.keys, self.values)
        return self._whole.part(first, last - first, self.keys.element_size())

    def empty(self, capacity: int) -> _Buffer:
        """Another of the same heads, head dims, type and device."""
        keys, values = (like.new_empty((like.shape[0], capacity, like.shape[2])) for like in (self.keys, self.values))
        return _Buffer(keys, values)


class SegmentedRows:
    """Rows of keys ``[K, n, D]`` and values ``[K, n, Dv]``: frozen segments, then a tail.

    The tail is sized exactly at first, then grows by a small fraction. `length` counts all rows, the first `gone` ones
    that are not held any more included. Forks share all memory, and each goes on behind what it shares: none is copied.
    Heads, head dims, type and device are those of `like`.
    """

    def __init__(self, like: Pair, least_growth: int, gone: int = 0):
        self._frozen: tuple[Pair, ...] = ()
        # Frozen segments, and where they lie.
        self._found: tuple[tuple[Pair, ...], list[Run]] = ((), [])
        self._tail = _Buffer(*like).empty(0)
        # Which row the tail's buffer begins with.
        self._first = gone
        self._least_growth, self._expected = least_growth, 0
        self.length, self.gone = gone, gone

    @classmethod
    def of(cls, pair: Pair, least_growth: int) -> SegmentedRows:
        """All of these rows, in memory that nobody else writes."""
        held, rows = cls(pair, least_growth), pair[0].shape[1]
        held._tail, held.length = _Buffer(*pair, rows), rows
        return held

    @property
    def _like(self) -> Pair:
        return self._tail.keys, self._tail.values

    @property
    def _held(self) -> int:
        """Rows of the tail that are held."""
        return self.length - max(self.gone, self._first)

    @property
    def dtype(self) -> torch.dtype:
        return self._tail.keys.dtype

    @property
    def _places(self) -> int:
        """Places right behind the last row."""
        before, tail = self.length - self._first, self._tail
        open_ended = 0 < before == tail.written and self.length > self.gone
        return tail.capacity - before if open_ended else 0

    def take_places(self, rows: int) -> bool:
        """Whether there are places right behind the last row for so many more, which then count as present."""
        if self._places < rows:
            return False
        self.length += rows
        self._tail.written += rows
        return True

    def lend(self, rows: int) -> int:
        """Find places for so many rows, or more, behind the last one: nobody takes any until they are `taken`."""
        if self._places < max(rows, self._least_growth // 2):
            # A layer that is nearly full grows with those that are.
            self._grow(rows)
        places = self._tail.capacity - (self.length - self._first)
        self._tail.written = self._tail.capacity
        return places

    def taken(self, rows: int) -> None:
        """So many of the places that were lent have rows now."""
        self.length += rows
        self._tail.written = self.length - self._first

    def expect(self, length: int) -> None:
        """So many rows will be there in all: the next memory that is taken has places for them."""
        self._expected = length

    def extend(self, rows: int) -> Pair:
        """Places of more rows, not written yet."""
        before = self.length - self._first
        if before != self._tail.written or before + rows > self._tail.capacity:
            self._grow(rows)
            before = self.length - self._first
        self.length += rows
        self._tail.written = before + rows
        return self._tail.rows(before, before + rows)

    def _grow(self, rows: int) -> None:
        """A tail of one's own that has places for so many more rows."""
        if self._tail.shared:
            self._freeze()
        needed = self._held + rows
        growth = max(1, needed // WINDOW_GROWTH_DIVISOR) if self.gone else self._usual_growth
        capacity = needed + growth if self.length > self.gone else needed
        self._move(max(capacity, self._expected - max(self.gone, self._first)))

    @property
    def _usual_growth(self) -> int:
        return max(self._least_growth, self.length // GROWTH_DIVISOR)

    def append_shared(self, runs: Sequence[Pair]) -> None:
        """Hold rows that others hold, too, and nobody writes any more; a ValueError if they are of another kind."""
        for found, like in ((run[kind], self._like[kind]) for run in runs for kind in range(2)):
            shape = like.shape[0], found.shape[1], like.shape[2]
            if (found.shape, found.dtype, found.device) != (shape, like.dtype, like.device):
                raise ValueError(
                    f"rows of {list(found.shape)}, {found.dtype} on {found.device} do not follow rows of "
                    f"{list(shape)}, {like.dtype} on {like.device}"
                )
        self._freeze()
        self._frozen = _consolidated((*self._frozen, *runs))
        self.length += sum(keys.shape[1] for keys, _ in runs)
        self._first = self.length

    def forget(self, rows: int) -> None:
        """The first rows are not needed any more."""
        gone = max(self.gone, min(rows, self.length))
        self._frozen = cut(self._frozen, min(gone, self._first) - min(self.gone, self._first))
        self.gone = gone
        held = self._held
        wasted = SPARE_DIVISOR * (self._tail.capacity - held - SPARE_MINIMUM) > held and gone > self._first
        if wasted and not self._tail.shared:
            self._move(held)

    def truncate(self, length: int) -> None:
        if self.length - self._first == self._tail.written:
            # Nobody has written behind these rows.
            self._tail.written = max(self._tail.shared, length - self._first)
        self.length, self.gone = length, min(self.gone, length)
        if self._held <= 0:
            self._frozen = cut(self._frozen, 0, length - self.gone)
            self._tail, self._first = self._tail.empty(0), length
        elif 2 * (length - self._first) < self._tail.capacity and not self._tail.shared:
            # A cut after a failure must not need more memory than it frees.
            self._move(self._held)

    def _move(self, capacity: int) -> None:
        """The tail's rows to a buffer of one's own."""
        moved, held = self._tail.empty(capacity), self._held
        for to, rows in zip(moved.rows(0, held), self._tail_rows() if held else (), strict=held > 0):
            to[:] = rows
        moved.written = held
        self._tail, self._first = moved, max(self.gone, self._first)

    def _freeze(self) -> None:
        """What the tail has becomes a segment, and an empty one begins."""
        if self._held:
            self._frozen = _consolidated((*self._frozen, self._tail_rows()))
        if self._tail.written:
            self._tail = self._tail.empty(0)
        self._first = self.length

    def _tail_rows(self) -> Pair:
        return self._tail.rows(max(self.gone, self._first) - self._first, self.length - self._first)

    def segments(self) -> list[Pair]:
        """What lies contiguously, in order; nothing where no row is held."""
        tail = [self._tail_rows()] if self._held else []
        return [*self._frozen, *tail] if self._frozen else tail

    def runs(self) -> list[Run]:
        """The same for compiled code, the tail last, where there is one, empty or not."""
        if self._found[0] is not self._frozen:
            self._found = self._frozen, [Run.of(*pair) for pair in self._frozen]
        tail, first = self._tail, max(self.gone, self._first) - self._first
        return [*self._found[1], *([tail.run(first, self.length - self._first)] if tail.capacity else [])]

    def joined(self) -> Pair:
        """All of it in one piece, a copy from then on where it was in several."""
        segments = self.segments()
        if len(segments) > 1:
            keys, values = (torch.cat(each, dim=1) for each in zip(*segments, strict=True))
            self._frozen, self._tail = (), _Buffer(keys, values, keys.shape[1])
            self._first = self.gone
            return keys, values
        return segments[0] if segments else self._tail.rows(0, 0)

    def share(self, first: int, last: int) -> list[Pair]:
        """Some rows, none of which is gone, as segments: nobody writes them any more."""
        self._tail.shared = max(self._tail.shared, min(last, self.length) - self._first)
        return list(cut(self.segments(), first - self.gone, last - self.gone))

    def fork(self) -> SegmentedRows:
        """The same rows, in the same memory."""
        self._tail.shared = max(self._tail.shared, self.length - self._first)
        twin = SegmentedRows(self._tail.rows(0, 0), self._least_growth, self.gone)
        twin._frozen, twin._tail, twin._first, twin.length = self._frozen, self._tail, self._first, self.length
        return twin

    def nbytes(self) -> int:
        """Bytes of what is held, shared memory included, and of unused capacity."""
        frozen = sum(tensor.nbytes for pair in self._frozen for tensor in pair)
        return frozen + self._tail.keys.nbytes + self._tail.values.nbytes


def _consolidated(segments: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """The same rows in few segments: neighbours in one buffer are one without a copy, others are joined if need be."""
    found: list[Pair] = []
    for segment in segments:
        if found and all(map(_adjoin, found[-1], segment)):
            keys, values = (_widened(*each) for each in zip(found[-1], segment, strict=True))
            found[-1] = keys, values
        else:
            found.append(segment)
    while len(found) > 1:
        sizes = [first[0].shape[1] + second[0].shape[1] for first, second in pairwise(found)]
        least = min(sizes)
        if len(found) <= MOST_SEGMENTS and least > TINY_ROWS:
            break
        at = sizes.index(least)
        keys, values = (torch.cat(each, dim=1) for each in zip(*found[at : at + 2], strict=True))
        found[at : at + 2] = [(keys, values)]
    return tuple(found)


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """Whether rows ``[K, n, D]`` lie in memory right behind others."""
    begins = first.storage_offset() + first.shape[1] * first.stride(1)
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.stride() == second.stride() and begins == second.storage_offset()


def _widened(first: Tensor, second: Tensor) -> Tensor:
    rows = first.shape[1] + second.shape[1]
    return first.as_strided((first.shape[0], rows, first.shape[2]), first.stride(), first.storage_offset())


def held_rows(window: int | None, tokens: int) -> int:
    """Of so many tokens of a sequence, how many a layer holds at most between passes."""
    return tokens if window is None else min(tokens, window + 2 * (window // MARGIN_DIVISOR))


def first_held(window: int | None, length: int, gone: int) -> int:
    """The slot before which everything can go, given those that are cached and those that went before."""
    if window is None:
        return gone
    margin, seen = window // MARGIN_DIVISOR, length - window + 1
    return seen - margin if seen > gone + 2 * margin else gone
