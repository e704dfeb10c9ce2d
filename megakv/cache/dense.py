"""Keys and values in the memory of the model's device."""

from __future__ import annotations

from torch import Tensor

from megakv.cache.store import KVStore, Pair

GROWTH_DIVISOR = 32
"""A full buffer grows by this fraction of its length, so unused capacity stays near 3%."""
GROWTH_MINIMUM = 16
WINDOW_GROWTH_DIVISOR = 64
"""Where rows are left behind, it grows by that fraction: with those of a window's margin, all are within 5%."""
SPARE_DIVISOR = 30
"""Rows that were left behind go at once where they, with unused capacity, are more than this fraction of the others.
Below that they go when the buffer is full, as in every step of decoding."""
SPARE_MINIMUM = 2


class _GrowingRows:
    """Rows of keys ``[K, n, D]`` and values ``[K, n, Dv]``: sized exactly at first, then grown by a small fraction.

    `length` counts all rows, the first `gone` ones that are not held any more included. Forks share buffers until
    either is appended to.
    """

    def __init__(self, buffers: Pair, length: int, least_growth: int, gone: int = 0):
        self._buffers = buffers
        self._capacity = buffers[0].shape[1]
        self._least_growth = least_growth
        self._shared = False
        # Which row the buffers begin with.
        self._first = gone
        self.length, self.gone = length, gone

    def extend(self, rows: int) -> Pair:
        """Places of more rows, not written yet."""
        before, needed = self.length - self._first, self.length + rows - self._first
        if needed > self._capacity or self._shared:
            needed = self.length + rows - self.gone
            growth = max(1, needed // WINDOW_GROWTH_DIVISOR) if self.gone else self._usual_growth(needed)
            self._move(needed + growth if before else needed)
            before = self.length - self._first
        self.length += rows
        keys, values = self._buffers
        return keys[:, before : before + rows], values[:, before : before + rows]

    def _usual_growth(self, needed: int) -> int:
        return max(self._least_growth, needed // GROWTH_DIVISOR)

    def forget(self, rows: int) -> None:
        """The first rows are not needed any more."""
        self.gone = max(self.gone, min(rows, self.length))
        held = self.length - self.gone
        if SPARE_DIVISOR * (self._capacity - held - SPARE_MINIMUM) > held and self.gone > self._first:
            self._move(held)

    def truncate(self, length: int) -> None:
        self.length, self.gone = length, min(self.gone, length)
        # A cut after a failure must not need more memory than it frees.
        if length < self._first or 2 * (length - self._first) < self._capacity:
            self._move(self.length - self.gone)

    def trim(self) -> None:
        """Hold no spare rows."""
        if self.length - self.gone < self._capacity:
            self._move(self.length - self.gone)

    def _move(self, capacity: int) -> None:
        """To buffers of one's own."""
        keys, values = (each.new_empty((each.shape[0], capacity, each.shape[2])) for each in self._buffers)
        for moved, rows in zip((keys, values), self.view(), strict=True):
            moved[:, : rows.shape[1]] = rows
        self._buffers, self._capacity, self._shared, self._first = (keys, values), capacity, False, self.gone

    def view(self) -> Pair:
        keys, values = self._buffers
        held = slice(self.gone - self._first, self.length - self._first)
        return keys[:, held], values[:, held]

    def fork(self) -> _GrowingRows:
        twin = _GrowingRows(self._buffers, self.length, self._least_growth, self.gone)
        twin._first = self._first
        self._shared = twin._shared = True
        return twin

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


class DenseStore(KVStore):
    """One growing buffer per sequence for keys and one for values.

    `least_growth` are the rows that a full buffer grows by at least.
    """

    def __init__(self, batch: int, least_growth: int = GROWTH_MINIMUM):
        self._least_growth = least_growth
        self._held: list[_GrowingRows | None] = [None] * batch
        # Rows that were gone before any came.
        self._absent = [0] * batch

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        held = self._held[sequence]
        if held is None:
            keys, values = (like.new_empty((like.shape[0], 0, like.shape[2])) for like in (k_KSD, v_KSD))
            absent = self._absent[sequence]
            held = self._held[sequence] = _GrowingRows((keys, values), absent, self._least_growth, absent)
        return held.extend(rows)

    def part(self, sequence: int) -> Pair:
        held = self._held[sequence]
        assert held is not None
        return held.view()

    def rows(self, sequence: int) -> int:
        held = self._held[sequence]
        return self._absent[sequence] if held is None else held.length

    def gone(self, sequence: int) -> int:
        held = self._held[sequence]
        return self._absent[sequence] if held is None else held.gone

    def forget(self, sequence: int, rows: int) -> None:
        held = self._held[sequence]
        if held is None:
            self._absent[sequence] = rows
        else:
            held.forget(rows)

    def crop(self, sequence: int, length: int) -> None:
        held = self._held[sequence]
        self._absent[sequence] = min(self._absent[sequence], length)
        if held is not None and length < held.length:
            held.truncate(length)

    def release(self, sequence: int, rows: int) -> None:
        super().release(sequence, rows)
        held = self._held[sequence]
        if held is not None:
            held.trim()

    def reorder(self, index: list[int]) -> None:
        present, moved = self._held, set[int]()
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
